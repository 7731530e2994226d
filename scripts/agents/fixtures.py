"""What an agent sent, as test data: long texts cut, tools that the script does not use cut further, what differs from run to run made the same."""

import json
import re

# Texts that are longer are cut, to so many characters; the descriptions of tools too.
LONG, TEXT, NOTE = 200, 60, 40
# Tools that are kept beside those of the script: one of each kind, and so many functions.
OTHERS = 2
HEADERS = ("anthropic-version", "anthropic-beta", "originator", "x-app")


def cut(value, longest, most):
    if isinstance(value, str):
        return value if len(value) <= longest else value[:most].rstrip() + " [..]"
    if isinstance(value, list):
        return [cut(item, longest, most) for item in value]
    return {name: cut(item, longest, most) for name, item in value.items()} if isinstance(value, dict) else value


def few(schema, most):
    """A schema with fewer properties, none of which is described."""
    if not isinstance(schema, dict):
        return schema
    small = {name: few(value, most) for name, value in schema.items() if name != "description"}
    if isinstance(small.get("properties"), dict):
        small["properties"] = dict(list(small["properties"].items())[:most])
        if "required" in small:
            small["required"] = [name for name in small["required"] if name in small["properties"]]
    return small


def cut_tool(tool, keep):
    tool = json.loads(json.dumps(tool))
    function = tool.get("function", tool)
    if "description" in function:
        function["description"] = cut(function["description"], NOTE, NOTE)
    for name in ("parameters", "input_schema"):
        if isinstance(function.get(name), dict):
            function[name] = few(function[name], 99 if keep else 2)
    if isinstance(tool.get("tools"), list):
        tool["tools"] = [cut_tool(inner, False) for inner in tool["tools"][:2]]
    return tool


def cut_tools(tools, used):
    kept, kinds, others = [], set(), 0
    for tool in tools:
        function = tool.get("function", tool)
        kind = (tool.get("type"), frozenset(name for name in tool if name not in ("description", "input_schema", "parameters", "name", "type")))
        keep = function.get("name") in used
        if not keep and kind in kinds and others >= OTHERS:
            continue
        others += not keep
        kinds.add(kind)
        kept.append(cut_tool(tool, keep))
    return kept


def plain(text, work):
    text = text.replace(str(work), "/work/fox").replace(str(work.parent), "/work")
    # Ids of throw-away sessions.
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "00000000-0000-4000-8000-000000000000", text)
    return re.sub(r"(?<![0-9a-f])[0-9a-f]{62,64}(?![0-9a-f])", "0" * 64, text)


def ignored(exchange):
    names = next((value for name, value in exchange.answer_headers.items() if name.lower() == "sluice-ignored"), "")
    return [name for name in names.split(", ") if name]


def fixture(row, exchanges, steps, work):
    used = {step["name"] for step in steps}

    def body(exchange):
        whole = json.loads(plain(exchange.body.decode(), work))
        tools = whole.pop("tools", None)
        small = cut(whole, LONG, TEXT)
        return small if tools is None else {**small, "tools": cut_tools(tools, used)}

    asked = [exchange for exchange in exchanges if isinstance(exchange.step, int)]
    return {
        "agent": row["agent"],
        "version": row["version"],
        "path": asked[0].path.split("?")[0],
        "headers": {name.lower(): value for name, value in asked[0].headers.items() if name.lower() in HEADERS},
        "requests": [body(exchange) for exchange in asked],
        "asides": [body(exchange) for exchange in exchanges if exchange.step == "aside"],
        "steps": json.loads(plain(json.dumps(steps), work)),
        "ignored": [ignored(exchange) for exchange in asked],
    }


def written(found):
    """As JSON, a request a line."""
    line = lambda value: json.dumps(value, ensure_ascii=False)  # noqa: E731
    fields = []
    for name, value in found.items():
        many = isinstance(value, list) and value
        fields.append(f'"{name}": ' + ("[\n  " + ",\n  ".join(map(line, value)) + "\n ]" if many else line(value)))
    return "{\n " + ",\n ".join(fields) + "\n}\n"
