#!/usr/bin/env python3
"""Asks a running `sluice serve` with the SDKs that OpenAI and Anthropic publish, and says what each was told.

    python3 -m venv /tmp/clients && /tmp/clients/bin/pip install openai anthropic
    /tmp/clients/bin/python scripts/clients.py http://127.0.0.1:8080 [KEY]
"""

import sys

import anthropic
import openai

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
KEY = sys.argv[2] if len(sys.argv) > 2 else "none"
QUESTION = "Tell me a story about a fox."
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}

tried = []


def holds(what, condition, shown=""):
    if not condition:
        sys.exit(f"FAILED: {what}: {shown}")
    tried.append(what)
    print(f"ok: {what}", f"({shown})" if shown else "")


def with_openai():
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    model = client.models.list().data[0].id
    holds("openai: models.list", model, model)
    ask = {"model": "any", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = client.chat.completions.create(**ask, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    holds("openai: chat, whole and streamed", whole and whole == said, whole)
    # The client takes an answer for whole only where the model has come to an end: here that of a sentence.
    ask = {"model": "any", "instructions": "Be kind.", "input": QUESTION, "max_output_tokens": 200, "temperature": 0, "extra_body": {"stop": ["."]}}
    tools = [{"type": "function", "name": "read", "parameters": TOOL, "strict": False}, {"type": "web_search"}]
    whole = client.responses.create(**ask, tools=tools)
    with client.responses.stream(**ask, tools=tools) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        said = stream.get_final_response()
    holds("openai: responses, whole and streamed", whole.output_text == said.output_text == deltas, deltas)
    holds("openai: responses, usage", said.usage.input_tokens_details.cached_tokens > 0, said.usage.to_json(indent=None))
    then = [{"role": "user", "content": QUESTION}, *[i.to_dict() for i in said.output], {"role": "user", "content": "And then?"}]
    holds("openai: responses, next turn", client.responses.create(**{**ask, "input": then}).output)
    try:
        client.responses.create(**{**ask, "input": "word " * 200_000})
        holds("openai: overflow", False, "it was taken")
    except openai.BadRequestError as error:
        holds("openai: overflow", error.code == "context_length_exceeded", error.code)


def with_anthropic():
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    model = client.models.list().data[0]
    holds("anthropic: models.list", model.display_name, f"{model.id}, {model.created_at}")
    system = [{"type": "text", "text": "Be kind. " * 40, "cache_control": {"type": "ephemeral"}}]
    tools = [{"name": "read", "description": "Reads a file.", "input_schema": TOOL}]
    ask = {"model": "any", "max_tokens": 12, "system": system, "tools": tools, "extra_body": {"temperature": 0}}
    asked = [{"role": "user", "content": QUESTION}]
    whole = client.messages.create(**ask, messages=asked, metadata={"user_id": "me"})
    with client.messages.stream(**ask, messages=asked) as stream:
        text = "".join(stream.text_stream)
        said = stream.get_final_message()
    holds("anthropic: messages, whole and streamed", whole.content[0].text == said.content[0].text == text, text)
    holds("anthropic: usage", said.usage.cache_read_input_tokens > 0 and said.usage.output_tokens == 12, said.usage.to_json(indent=None))
    holds("anthropic: stop_reason", said.stop_reason == "max_tokens", said.stop_reason)
    use = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "A file."}
    turns = [*asked, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    holds("anthropic: results of tools", client.messages.create(**ask, messages=turns).content)
    counted = client.messages.count_tokens(model="any", system=system, tools=tools, messages=asked).input_tokens
    usage = said.usage
    total = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    holds("anthropic: count_tokens", counted == total, counted)
    try:
        client.messages.create(**ask, messages=[{"role": "user", "content": "word " * 200_000}])
        holds("anthropic: overflow", False, "it was taken")
    except anthropic.BadRequestError as error:
        holds("anthropic: overflow", "prompt is too long: " in str(error) and error.request_id, str(error)[:120])


with_openai()
with_anthropic()
print(f"all {len(tried)} hold")
