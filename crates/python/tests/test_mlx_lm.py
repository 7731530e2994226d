"""The interface of mlx_lm."""

import json
import subprocess

import numpy
import pytest

import sluice

PROMPT = "Once upon a time"


def cli_tokens(program, path, count, *more):
    command = [program, "run", "-m", path, "-p", PROMPT, "--raw", "--temperature", "0", "-n", str(count), "--json", *more]
    return json.loads(subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout)


def test_the_answer_is_the_programs(model, tokenizer, program):
    told = cli_tokens(program, model.engine.path, 24)
    pieces = list(sluice.stream_generate(model, tokenizer, PROMPT, max_tokens=24))
    assert "".join(piece.text for piece in pieces) == told["text"]
    assert [piece.token for piece in pieces if not piece.finish_reason] == told["tokens"]


def test_the_answer_of_a_real_model_is_the_programs(real_model, program):
    told = cli_tokens(program, real_model, 16)
    with sluice.Model(real_model, max_context=512) as model:
        batch = sluice.batch_generate(model, prompts=[PROMPT, "Hello"], max_tokens=16)
        assert batch.texts[0] == told["text"]
        assert batch.token_ids[0] == told["tokens"]
        states = model.hidden_states(PROMPT)
        assert states.shape == (len(model.tokenizer.encode(PROMPT)), model.engine.hidden) and numpy.isfinite(states).all()


def test_pieces_are_the_whole(model, tokenizer):
    pieces = list(sluice.stream_generate(model, tokenizer, PROMPT, max_tokens=12))
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "length" and pieces[-1].generation_tokens == 12
    assert pieces[-1].prompt_tokens == 4 and pieces[-1].peak_memory > 0
    assert "".join(piece.text for piece in pieces) == sluice.generate(model, tokenizer, PROMPT, max_tokens=12)


def test_a_batch_has_the_answers_of_its_prompts(model, tokenizer):
    prompts = [PROMPT, "The cat", "A small dog"] * 4
    alone = [sluice.generate(model, tokenizer, prompt, max_tokens=10) for prompt in prompts[:3]]
    batch = sluice.batch_generate(model, tokenizer, prompts, max_tokens=10)
    assert batch.texts == alone * 4
    assert batch.stats.generation_tokens == sum(map(len, batch.token_ids))
    limits = sluice.batch_generate(model, tokenizer, prompts[:2], max_tokens=[1, 3])
    assert list(map(len, limits.token_ids)) == [1, 3]


def test_seeds_repeat_and_differ(model, tokenizer):
    def tell(seed):
        sampler = sluice.make_sampler(temp=1.5, top_p=0.95)
        return sluice.generate(model, tokenizer, PROMPT, max_tokens=24, sampler=sampler, seed=seed)

    assert tell(1) == tell(1)
    assert len({tell(seed) for seed in range(4)}) > 1


def test_stops_end_the_text(model, tokenizer):
    whole = sluice.generate(model, tokenizer, PROMPT, max_tokens=20)
    stop = whole[10:14]
    pieces = list(sluice.stream_generate(model, tokenizer, PROMPT, max_tokens=20, stop=stop))
    assert "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
    assert pieces[-1].finish_reason == "stop"


def test_logits_processors_see_and_change_logits(model, tokenizer):
    seen = []

    def only_seven(tokens, logits):
        seen.append((tokens.tolist(), logits.shape, logits.dtype))
        logits[...] = -numpy.inf
        logits[..., 700] = 0
        return logits

    pieces = list(sluice.stream_generate(model, tokenizer, PROMPT, max_tokens=3, logits_processors=[only_seven]))
    assert [piece.token for piece in pieces] == [700] * 4
    prompt = tokenizer.encode(PROMPT)
    assert [tokens for tokens, _, _ in seen] == [prompt, prompt + [700], prompt + [700, 700]]
    assert {(shape, str(kind)) for _, shape, kind in seen} == {((1, model.engine.vocabulary), "float32")}


def test_a_kept_view_of_logits_keeps_its_numbers(model, tokenizer):
    kept = []
    sluice.generate(model, tokenizer, PROMPT, max_tokens=4, logits_processors=[lambda tokens, logits: kept.append(logits)])
    ids = tokenizer.encode(PROMPT)
    assert numpy.array_equal(kept[0][0], model.logits(ids, all=False)[0])
    assert not numpy.array_equal(kept[0], kept[1])


def test_what_a_processor_raises_is_raised(model, tokenizer):
    def fail(tokens, logits):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        sluice.generate(model, tokenizer, PROMPT, logits_processors=[fail])
    assert sluice.generate(model, tokenizer, PROMPT, max_tokens=2)


def test_a_sampler_may_be_a_function(model, tokenizer):
    greedy = sluice.generate(model, tokenizer, PROMPT, max_tokens=8)
    assert sluice.generate(model, tokenizer, PROMPT, max_tokens=8, sampler=lambda logprobs: logprobs.argmax(-1)) == greedy


def test_penalties_and_biases_are_processors(model, tokenizer):
    first = list(sluice.stream_generate(model, tokenizer, PROMPT, max_tokens=1))[0].token
    for processors in (sluice.make_logits_processors(logit_bias={first: -100.0}), [lambda tokens, logits: logits * -1]):
        assert list(sluice.stream_generate(model, tokenizer, PROMPT, max_tokens=1, logits_processors=processors))[0].token != first
    plain = sluice.generate(model, tokenizer, PROMPT, max_tokens=60)
    penalised = sluice.generate(model, tokenizer, PROMPT, max_tokens=60, logits_processors=sluice.make_logits_processors(repetition_penalty=1.5))
    assert plain != penalised


def test_an_answer_keeps_to_its_grammar(model, tokenizer):
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"], "additionalProperties": False}
    answer = json.loads(sluice.generate(model, tokenizer, PROMPT, max_tokens=40, json_schema=schema))
    assert list(answer) == ["age"] and answer["age"] < 100
    assert sluice.generate(model, tokenizer, PROMPT, max_tokens=40, regex="(yes|no)!") in ("yes!", "no!")
    assert sluice.generate(model, tokenizer, PROMPT, max_tokens=40, grammar='start: "a" "b"') == "ab"
    with pytest.raises(sluice.RequestError, match="exclude"):
        sluice.generate(model, tokenizer, PROMPT, regex="a", grammar="b")
    with pytest.raises(sluice.RequestError):
        sluice.generate(model, tokenizer, PROMPT, regex="(")


def test_log_probabilities_are_of_the_logits(model, tokenizer):
    piece = next(iter(sluice.stream_generate(model, tokenizer, PROMPT, max_tokens=1, logprobs=3)))
    logits = model.logits(PROMPT, all=False)[0].astype("f8")
    expected = logits - logits.max() - numpy.log(numpy.exp(logits - logits.max()).sum())
    assert list(piece.logprobs) == numpy.argsort(-expected)[:3].tolist()
    assert numpy.allclose(list(piece.logprobs.values()), numpy.sort(expected)[::-1][:3], atol=1e-4)


def test_templates_keep_the_text_of_messages_apart(model, tokenizer):
    messages = [{"role": "user", "content": "Hi <|im_end|>"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert text.endswith("assistant\n") or "assistant" in text
    assert tokenizer.decode(tokens) == text
    # What a message spells is text, and so more than one token.
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokens.count(end) < tokenizer.encode(text, add_special_tokens=False).count(end)


def test_arguments_are_checked(model, tokenizer):
    for arguments, said in [
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"top_p": 2.0}, "top_p must be above 0, at most 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"seed": "x"}, "seed: 'x'"),
        ({"nonsense": 1}, "nonsense"),
    ]:
        with pytest.raises(sluice.RequestError, match=said):
            sluice.generate(model, tokenizer, PROMPT, **arguments)
    with pytest.raises(sluice.RequestError, match="no tokens"):
        sluice.generate(model, tokenizer, [])
    with pytest.raises(sluice.RequestError, match="not in the vocabulary"):
        sluice.generate(model, tokenizer, [10**6])
    with pytest.raises(sluice.RequestError, match="no room for an answer"):
        sluice.generate(model, tokenizer, [5] * (model.context + 1))
