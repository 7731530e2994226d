"""The interface of vllm."""

import json

import numpy
import pytest

import sluice
from sluice.vllm import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model)


def test_answers_come_in_the_order_of_prompts(llm, model):
    prompts = ["Once upon a time", {"prompt": "The cat"}, {"prompt_token_ids": model.tokenizer.encode("A dog")}, model.tokenizer.encode("A bird")]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
    assert [output.prompt for output in outputs] == ["Once upon a time", "The cat", None, None]
    for output, text in zip(outputs, ["Once upon a time", "The cat", "A dog", "A bird"]):
        assert output.outputs[0].text == sluice.generate(model, prompt=text, max_tokens=6)
        assert output.finished and output.outputs[0].finish_reason == "length" and output.outputs[0].finished()
        assert output.prompt_token_ids == model.tokenizer.encode(text)


def test_one_prompt_and_its_choices(llm):
    (output,) = llm.generate("Once upon a time", SamplingParams(n=3, temperature=1.5, max_tokens=12, seed=7))
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len({one.text for one in output.outputs}) > 1
    (again,) = llm.generate("Once upon a time", SamplingParams(n=3, temperature=1.5, max_tokens=12, seed=7))
    assert [one.text for one in again.outputs] == [one.text for one in output.outputs]


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0, max_tokens=2), SamplingParams(temperature=0, max_tokens=5)]
    assert [len(one.outputs[0].token_ids) for one in llm.generate(["A", "B"], params)] == [2, 5]
    with pytest.raises(sluice.RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate(["A"], params)


def test_log_probabilities_of_prompt_and_answer(llm, model):
    (output,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1))
    answer = output.outputs[0]
    assert len(answer.logprobs) == 3 and all(token in one for token, one in zip(answer.token_ids, answer.logprobs))
    assert answer.cumulative_logprob == pytest.approx(sum(one[token].logprob for token, one in zip(answer.token_ids, answer.logprobs)))
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 4
    logits = model.logits(output.prompt_token_ids).astype("f8")
    for at, token in enumerate(output.prompt_token_ids[1:]):
        row = logits[at] - logits[at].max()
        assert output.prompt_logprobs[at + 1][token].logprob == pytest.approx(row[token] - numpy.log(numpy.exp(row).sum()), abs=1e-4)


def test_conversations(llm):
    one = [{"role": "user", "content": "Tell me a story."}]
    params = SamplingParams(temperature=0, max_tokens=8)
    (alone,) = llm.chat(one, params)
    both = llm.chat([one, one], params)
    assert [output.outputs[0].text for output in both] == [alone.outputs[0].text] * 2


def test_what_tokens_may_come(llm, model):
    (output,) = llm.generate("A", SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[700, 701]))
    assert set(output.outputs[0].token_ids) <= {700, 701}
    (output,) = llm.generate("A", SamplingParams(temperature=0, max_tokens=3, logit_bias={702: 100.0}))
    assert output.outputs[0].token_ids == [702] * 3
    end = sorted(model.tokenizer.eos_token_ids)[0]
    (output,) = llm.generate("A", SamplingParams(temperature=0, max_tokens=6, min_tokens=4, logit_bias={end: 50.0}))
    assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].finish_reason == "stop"
    (output,) = llm.generate("A", SamplingParams(temperature=0, max_tokens=20, structured_outputs={"choice": ["red", "blue"]}))
    assert output.outputs[0].text in ("red", "blue")
    (output,) = llm.generate("A", SamplingParams(temperature=0, max_tokens=40, guided_decoding={"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}}))
    assert isinstance(json.loads(output.outputs[0].text), list)


def test_vectors(llm, model):
    outputs = llm.embed(["Once", "Twice"])
    assert numpy.allclose(outputs[0].outputs.embedding, model.embed("Once")[0]) and len(outputs) == 2
    assert numpy.linalg.norm(outputs[1].outputs.embedding) == pytest.approx(1, abs=1e-5)


def test_what_is_not_supported_is_refused_by_name():
    for arguments, said in [({"bad_words": ["x"]}, "bad_words"), ({"best_of": 3}, "best_of"), ({"include_stop_str_in_output": True}, "include_stop")]:
        with pytest.raises(sluice.RequestError, match=said):
            SamplingParams(**arguments)
    with pytest.raises(sluice.RequestError, match="swarm is no option"):
        LLM(sluice.demo(), swarm=1)
