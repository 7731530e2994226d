"""Writes deepseek.json: conversations, and the prompts that DeepSeek's own programs make of them.

V3.2's program is read from a file: `encoding/encoding_dsv32.py` of the checkpoint, or the copy that mlx-lm has
(`mlx_lm/chat_templates/deepseek_v32.py`). V4's is the package deepseek-recipe. Run from anywhere:

    python make_deepseek.py path/to/encoding_dsv32.py
"""

import importlib.util
import json
import pathlib
import sys

import deepseek_recipe as recipe

HERE = pathlib.Path(__file__).parent

WEATHER = {
    "name": "get_weather",
    "description": "The weather \"now\" in a city – in °C",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
        "required": ["city"],
    },
}
CLOCK = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, CLOCK)]

SYSTEM = {"role": "system", "content": "  Be brief.\n"}
USER = {"role": "user", "content": "Weather in Köln?"}
FULL = {"city": "Köln\n<b> \"x\"", "n": 1.5, "days": [1, 2], "o": {"a": "b", "c": [None, True]}, "t": True, "z": None}


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def tool(id, content):
    return {"role": "tool", "tool_call_id": id, "content": content}


def assistant(content, thought=None, calls=None):
    message = {"role": "assistant", "content": content}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


CALLED = assistant("I look.", "Two calls.\n", [call("a", "get_weather", FULL), call("b", "get_weather", {"city": ""})])
CHATS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, assistant("\nCold.  ", "Hm."), {"role": "user", "content": "And \t“now”?"}],
    "called": [USER, CALLED, tool("a", "3.5"), tool("b", '{"error": 1}\n')],
    "called again": [
        SYSTEM, USER, CALLED, tool("a", "3.5"), tool("b", "none"),
        assistant("", "Once more.", [call("c", "get_weather", {"city": "Oslo"})]), tool("c", "-1"),
    ],
    "answered": [USER, CALLED, tool("a", "3.5"), tool("b", "none"), assistant("Cold.", "So."), {"role": "user", "content": "Thanks"}],
    "answered without thoughts": [
        USER, assistant("", None, [call("a", "get_weather", {"city": "Oslo"})]), tool("a", "-1"), assistant("Cold."),
        {"role": "user", "content": "Thanks"},
    ],
    "nothing": [USER, assistant("", "Now.", [call("a", "now", {})]), tool("a", "12:00")],
    # The two programs treat these differently, and each template follows its own.
    "order": [USER, CALLED, tool("b", "second"), tool("a", "first"), {"role": "user", "content": "Well?"}],
    "two systems": [SYSTEM, {"role": "system", "content": "Be kind."}, USER],
}


def v32(encoder, chat, tools, thinking, effort):
    messages = [dict(message) for message in CHATS[chat]]
    if tools:
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["tools"] = TOOLS
    return encoder.encode_messages(messages, thinking_mode="thinking" if thinking else "chat")


def v4(chat, tools, thinking, effort):
    def message(m):
        content = m["content"]
        if m["role"] == "system":
            return recipe.SystemMessage(content)
        if m["role"] == "user":
            return recipe.UserMessage(content)
        if m["role"] == "tool":
            return recipe.ToolMessage(content, m["tool_call_id"])
        calls = [recipe.ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in m.get("tool_calls", [])]
        # What is missing is empty, as where requests are converted.
        thought = m.get("reasoning_content", "" if thinking else None)
        return recipe.AssistantMessage(content, thought, calls or None)

    functions = [recipe.ToolDefinition(f["name"], f["description"], f["parameters"]) for f in (WEATHER, CLOCK)]
    conversation = recipe.Conversation(
        [message(m) for m in CHATS[chat]], thinking_mode=thinking, tools=functions if tools else None, reasoning_effort=effort,
    )
    return recipe.DeepseekV4Encoding().render_conversation(conversation).prompt


def main():
    spec = importlib.util.spec_from_file_location("encoder", sys.argv[1])
    encoder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(encoder)
    cases = []

    def case(model_type, chat, tools=False, thinking=True, effort=None):
        # Without an effort our template asks for none, as the program does for a low one.
        render = (lambda *args: v32(encoder, *args)) if model_type == "deepseek_v32" else v4
        prompt = render(chat, tools, thinking, effort or "low")
        cases.append({"model_type": model_type, "chat": chat, "tools": tools, "thinking": thinking, "effort": effort, "prompt": prompt})

    for model_type in ["deepseek_v32", "deepseek_v4"]:
        for chat in ["one", "system", "turns", "two systems"]:
            case(model_type, chat)
            case(model_type, chat, thinking=False)
        for chat in ["one", "called", "called again", "answered", "answered without thoughts", "nothing", "order", "turns", "two systems"]:
            case(model_type, chat, tools=True)
        for chat in ["called again", "answered without thoughts"]:
            case(model_type, chat, tools=True, thinking=False)
        case(model_type, "called")
    for effort in ["low", "high", "xhigh", "max"]:
        case("deepseek_v4", "system", effort=effort)
    case("deepseek_v4", "one", thinking=False, effort="max")
    # The words about tools are the same everywhere: they are written once.
    words = {}
    for model_type in ["deepseek_v32", "deepseek_v4"]:
        prompt = next(c["prompt"] for c in cases if c["model_type"] == model_type and c["tools"])
        words[model_type] = prompt[prompt.index("## Tools"):prompt.index("<｜User｜>")]
        for c in cases:
            if c["model_type"] == model_type:
                c["prompt"] = c["prompt"].replace(words[model_type], "WORDS")
    golden = {"tools": TOOLS, "chats": CHATS, "words": words, "cases": cases}
    (HERE / "deepseek.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")
    print(len(cases), "cases")


main()
