#!/usr/bin/env python3
"""Asks a running `sluice serve` with the SDKs that OpenAI, Anthropic and Ollama publish, and says what each was told.

    python3 -m venv /tmp/clients && /tmp/clients/bin/pip install openai anthropic ollama
    /tmp/clients/bin/python scripts/clients.py http://127.0.0.1:8080 [KEY]
"""

import json
import sys

import anthropic
import ollama
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


def with_ollama():
    client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"})
    listed = client.list().models[0]
    holds("ollama: list", listed.model.endswith(":latest") and listed.size and listed.details.family, listed.model)
    holds("ollama: ps", client.ps().models[0].model == listed.model)
    shown = client.show(listed.model)
    family = shown.modelinfo["general.architecture"]
    holds("ollama: show", shown.modelinfo[f"{family}.context_length"] > 0 and "completion" in shown.capabilities, shown.capabilities)
    asked = {"role": "user", "content": QUESTION}
    options = {"temperature": 0, "num_predict": 12, "num_ctx": 4096, "seed": 1}
    ask = {"model": listed.model, "messages": [asked], "options": options, "keep_alive": "5m", "think": False}
    whole = client.chat(**ask)
    parts = list(client.chat(**ask, stream=True))
    said = "".join(part.message.content for part in parts)
    holds("ollama: chat, whole and streamed", whole.message.content and whole.message.content == said, said)
    last = parts[-1]
    holds("ollama: the end", last.done and last.done_reason == "length" and last.eval_count == 12 and last.eval_duration > 0, last.done_reason)
    made = client.generate(listed.model, QUESTION, options=options)
    holds("ollama: generate", made.response == said, made.response)
    raw = "".join(part.response for part in client.generate(listed.model, "Once", raw=True, options=options, stream=True))
    holds("ollama: generate, raw", raw, raw)
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["age"], "additionalProperties": False}
    formed = client.chat(**{**ask, "options": {**options, "num_predict": 64}}, format=schema)
    holds("ollama: format", isinstance(json.loads(formed.message.content)["age"], int), formed.message.content)
    tool = {"type": "function", "function": {"name": "read", "description": "Reads a file.", "parameters": TOOL}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "read", "arguments": {"path": "a"}}}]}
    turns = [asked, call, {"role": "tool", "tool_name": "read", "content": "A file."}]
    holds("ollama: results of tools", client.chat(**{**ask, "messages": turns}, tools=[tool]).message)
    try:
        client.chat(**{**ask, "messages": [{"role": "user", "content": "word " * 200_000}]})
        holds("ollama: overflow", False, "it was taken")
    except ollama.ResponseError as error:
        holds("ollama: overflow", error.status_code in (400, 413), error.error)
    vectors = client.embed(listed.model, [QUESTION, "Another."])
    holds("ollama: embed", len(vectors.embeddings) == 2 and abs(sum(x * x for x in vectors.embeddings[0]) - 1) < 1e-5, len(vectors.embeddings[0]))
    holds("ollama: embeddings", len(client.embeddings(listed.model, QUESTION).embedding) == len(vectors.embeddings[0]))
    return list(vectors.embeddings[0])


def embeddings(expected):
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    # The client asks for Base64 by default and decodes it without a word.
    made = client.embeddings.create(model="any", input=[QUESTION, "Another."])
    holds("openai: embeddings", [d.index for d in made.data] == [0, 1] and made.usage.prompt_tokens > 2, made.usage.prompt_tokens)
    plain = client.embeddings.create(model="any", input=QUESTION, encoding_format="float").data[0].embedding
    same = lambda a, b: len(a) == len(b) and all(abs(x - y) < 1e-6 for x, y in zip(a, b))
    holds("openai: embeddings, floats and Base64", same(plain, made.data[0].embedding) and same(plain, expected))
    short = client.embeddings.create(model="any", input=QUESTION, dimensions=8).data[0].embedding
    holds("openai: embeddings, dimensions", len(short) == 8 and abs(sum(x * x for x in short) - 1) < 1e-5)
    try:
        client.embeddings.create(model="any", input="word " * 20_000)
        holds("openai: embeddings, overflow", False, "it was taken")
    except openai.BadRequestError as error:
        holds("openai: embeddings, overflow", error.code == "context_length_exceeded", error.code)


with_openai()
with_anthropic()
embeddings(with_ollama())
print(f"all {len(tried)} hold")
