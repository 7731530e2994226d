"""Logits, hidden states and vectors as arrays, without copies."""

import gc

import numpy
import pytest

import sluice


def test_an_array_is_seen_without_a_copy(model):
    inner = model.engine.logits(model.tokenizer.encode("Once upon a time"), True)
    first, second = numpy.asarray(inner), numpy.asarray(inner)
    assert first.shape == (4, model.engine.vocabulary) == inner.shape and first.dtype == numpy.float32 and len(inner) == 4
    assert first.__array_interface__["data"][0] == second.__array_interface__["data"][0] == inner.__array_interface__["data"][0]
    kept = first.copy()
    del inner, second
    gc.collect()
    assert numpy.array_equal(first, kept)


def test_dlpack_is_the_same_memory(model):
    inner = model.engine.hidden_states(model.tokenizer.encode("Once"))
    view = numpy.from_dlpack(inner)
    assert inner.__dlpack_device__() == (1, 0)
    assert view.__array_interface__["data"][0] == inner.__array_interface__["data"][0]
    torch = pytest.importorskip("torch", reason="SKIPPED: there is no torch")
    tensor = torch.from_dlpack(inner)
    assert tensor.data_ptr() == inner.__array_interface__["data"][0] and tuple(tensor.shape) == inner.shape


def test_the_last_row_is_that_of_all(model):
    ids = model.tokenizer.encode("Once upon a time there was a dog")
    every, last = model.logits(ids), model.logits(ids, all=False)
    assert numpy.array_equal(every[-1:], last)
    # Any beginning has the same bits.
    assert numpy.array_equal(model.logits(ids[:3]), every[:3])
    assert numpy.array_equal(model.hidden_states(ids[:3]), model.hidden_states(ids)[:3])


def test_states_are_what_vectors_are_made_of(model):
    ids = model.tokenizer.encode("Once upon a time")
    state = model.hidden_states(ids)[-1].astype("f8")
    vector = model.embed([ids])[0]
    assert numpy.allclose(vector, state / numpy.linalg.norm(state), atol=1e-6)
    assert model.embed(["a", "b"], dimensions=8).shape == (2, 8)


def test_log_probabilities_of_a_continuation(model):
    ids = model.tokenizer.encode("Once upon a time there was a dog")
    whole, part = model.logprobs(ids, top=2), model.logprobs(ids, start=5, top=2)
    assert part == whole[4:] and len(whole) == len(ids) - 1
    assert all(len(top) == 2 and top[0][1] >= top[1][1] for _, top in whole)
    assert model.logprobs(ids, start=len(ids)) == []
    with pytest.raises(sluice.RequestError, match="between 1 and"):
        model.logprobs(ids, start=0)
    with pytest.raises(sluice.RequestError, match="vocabulary"):
        model.logits([10**6])
    with pytest.raises(sluice.RequestError):
        model.logits([])
