"""sdk.py WAY URL TASK: an agent as small as can be, around the SDKs that OpenAI and Anthropic publish: three tools, called until the model has no more calls."""

import json
import subprocess
import sys
from pathlib import Path

WAY, URL, TASK = sys.argv[1:]


def read(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text()


def edit(path: str, old: str, new: str) -> str:
    """Replaces a text in a file."""
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "done"


def run(command: str) -> str:
    """Runs a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout


TOOLS = {function.__name__: function for function in (read, edit, run)}


def schema(function):
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": list(names), "additionalProperties": False}


def chat():
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    described = [{"name": name, "description": function.__doc__, "parameters": schema(function)} for name, function in TOOLS.items()]
    messages = [{"role": "user", "content": TASK}]
    while True:
        with client.chat.completions.stream(model="any", messages=messages, tools=[{"type": "function", "function": f} for f in described]) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            given = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": given})


def responses():
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    tools = [{"type": "function", "name": name, "description": function.__doc__, "parameters": schema(function), "strict": True} for name, function in TOOLS.items()]
    items = [{"role": "user", "content": TASK}]
    while True:
        with client.responses.stream(model="any", input=items, tools=tools, store=False, include=["reasoning.encrypted_content"]) as stream:
            response = stream.get_final_response()
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments", "parsed"}) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            given = TOOLS[call.name](**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": given})


def messages():
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    tools = [anthropic.beta_tool(function) for function in TOOLS.values()]
    asked = [{"role": "user", "content": TASK}]
    runner = client.beta.messages.tool_runner(model="any", max_tokens=2000, messages=asked, tools=tools, stream=True)
    for stream in runner:
        message = stream.get_final_message()
    return message.content[-1].text


print({"chat": chat, "responses": responses, "messages": messages}[WAY]())
