"""The interface of llama-cpp-python."""

import json

import pytest

import sluice
from sluice.llama_cpp import Llama, LlamaGrammar


@pytest.fixture(scope="module")
def llm():
    llm = Llama(model_path=sluice.demo(), n_ctx=512, verbose=False)
    yield llm
    llm.close()


def test_a_completion_is_an_object_or_chunks(llm, model):
    whole = llm("Once upon a time", max_tokens=8, temperature=0)
    assert whole["object"] == "text_completion" and whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["text"] == sluice.generate(model, prompt="Once upon a time", max_tokens=8)
    assert whole["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}
    chunks = list(llm.create_completion("Once upon a time", max_tokens=8, temperature=0, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_an_echo_has_log_probabilities_of_the_prompt(llm, model):
    answer = llm("Once upon a time", max_tokens=2, temperature=0, echo=True, logprobs=2)["choices"][0]
    found = answer["logprobs"]
    assert "".join(found["tokens"]) == answer["text"] and answer["text"].startswith("Once upon a time")
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1:4] == [chosen for chosen, _ in model.logprobs("Once upon a time")]
    assert [answer["text"][at:][: len(token)] for at, token in zip(found["text_offset"], found["tokens"])] == found["tokens"]
    assert len(found["top_logprobs"]) == 6


def test_a_conversation_is_answered_whole_or_in_chunks(llm):
    messages = [{"role": "user", "content": "Tell me a story."}]
    whole = llm.create_chat_completion(messages, max_tokens=12, temperature=0)
    assert whole["object"] == "chat.completion"
    chunks = list(llm.create_chat_completion(messages, max_tokens=12, temperature=0, stream=True))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole["choices"][0]["message"]["content"]


def test_answers_keep_to_what_is_asked(llm):
    messages = [{"role": "user", "content": "How old are you?"}]
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 9}}, "required": ["age"], "additionalProperties": False}
    for arguments in (
        {"response_format": {"type": "json_object", "schema": schema}},
        {"grammar": LlamaGrammar.from_json_schema(json.dumps(schema))},
    ):
        answer = llm.create_chat_completion(messages, max_tokens=40, temperature=0, **arguments)
        assert list(json.loads(answer["choices"][0]["message"]["content"])) == ["age"]
    with pytest.raises(sluice.RequestError, match="GBNF"):
        LlamaGrammar.from_string("root ::= x")


def test_tools_are_called(llm):
    tools = [{"type": "function", "function": {"name": "age", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}]
    try:
        answer = llm.create_chat_completion(
            [{"role": "user", "content": "?"}], tools=tools, tool_choice={"type": "function", "function": {"name": "age"}}, max_tokens=60, temperature=0
        )
    except sluice.RequestError as error:
        # The demo model's template knows no tool calls.
        assert "tool" in str(error) or "calls" in str(error)
    else:
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "age"


def test_processors_and_biases(llm):
    answer = llm("A", max_tokens=3, temperature=0, logit_bias={700: 100.0})
    assert answer["choices"][0]["text"] == llm.detokenize([700] * 3).decode()
    seen = []
    llm("A", max_tokens=2, temperature=0, logits_processor=[lambda ids, scores: seen.append(scores.shape) or scores])
    assert seen == [(llm.n_vocab(),)] * 2
    chunks = list(llm.create_chat_completion([{"role": "user", "content": "A"}], max_tokens=2, logit_bias={700: 100.0}, stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == llm.detokenize([700] * 2).decode()


def test_texts_become_tokens_and_back(llm):
    tokens = llm.tokenize(b"Once upon a time")
    assert llm.detokenize(tokens) == b"Once upon a time"
    assert len(llm.tokenize(b"<|im_end|>", special=True)) < len(llm.tokenize(b"<|im_end|>", special=False))
    assert llm.n_ctx() == 512 and llm.token_eos() >= 0 and llm.n_embd() > 0


def test_vectors_have_the_shape_of_openais(llm):
    answer = llm.create_embedding(["a", "b"])
    assert [one["index"] for one in answer["data"]] == [0, 1]
    assert llm.embed("a") == pytest.approx(answer["data"][0]["embedding"])


def test_what_is_not_supported_is_refused_by_name(llm):
    for arguments, said in [({"suffix": "x"}, "suffix"), ({"mirostat_mode": 2}, "mirostat_mode"), ({"nonsense": 1}, "nonsense")]:
        with pytest.raises(sluice.RequestError, match=said):
            llm("A", **arguments)
    assert llm("A", max_tokens=1, mirostat_mode=0, typical_p=1.0)["usage"]["completion_tokens"] == 1


def test_names_of_the_hub_are_made_of_files_and_patterns(monkeypatch):
    named = []
    monkeypatch.setattr(Llama, "__init__", lambda self, name, **options: named.append((name, options)))
    Llama.from_pretrained("org/name-GGUF", "*q4_k_m.gguf", n_ctx=7)
    Llama.from_pretrained("org/name-GGUF", "name-Q8_0.gguf")
    Llama.from_pretrained("org/name")
    assert named == [
        ("org/name-GGUF:q4_k_m", {"n_ctx": 7}),
        ("https://huggingface.co/org/name-GGUF/resolve/main/name-Q8_0.gguf", {}),
        ("org/name", {}),
    ]
    with pytest.raises(sluice.RequestError, match="name the file"):
        Llama.from_pretrained("org/name", "*")
