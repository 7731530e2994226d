"""The engine for asyncio."""

import asyncio
import time

import pytest

import sluice
from sluice import AsyncEngine, SamplingParams


@pytest.fixture(scope="module")
def engine(model):
    return AsyncEngine(model)


def greedy(count, **more):
    return SamplingParams(temperature=0, max_tokens=count, **more)


async def last(outputs):
    found = None
    async for found in outputs:
        pass
    return found


def test_requests_are_computed_together(engine, model):
    prompts = ["Once upon a time", "The cat", "A dog"] * 5

    async def all_of_them():
        return await asyncio.gather(*(last(engine.generate(prompt, greedy(8))) for prompt in prompts))

    found = asyncio.run(all_of_them())
    alone = [sluice.generate(model, prompt=prompt, max_tokens=8) for prompt in prompts[:3]]
    assert [output.outputs[0].text for output in found] == alone * 5
    assert all(output.finished and len(output.outputs[0].token_ids) == 8 for output in found)


def test_the_loop_goes_on_meanwhile(engine):
    async def count():
        task, ticks = asyncio.ensure_future(last(engine.generate("Once upon a time", greedy(40)))), 0
        while not task.done():
            await asyncio.sleep(0.002)
            ticks += 1
        return ticks, await task

    ticks, output = asyncio.run(count())
    assert ticks >= 5 and output.finished


def test_what_is_left_or_aborted_is_cancelled(engine, model):
    async def leave():
        async for _ in engine.generate("Once upon a time", greedy(5000)):
            break
        task = asyncio.ensure_future(last(engine.generate("Once upon a time", greedy(5000), "mine")))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stopped = engine.generate("Once upon a time", greedy(5000), "named")
        await stopped.__anext__()
        await engine.abort("named")
        rest = await asyncio.wait_for(last(stopped), 10)
        assert rest is None or not rest.finished
        for _ in range(200):
            if running(await engine.metrics()) == 0:
                return True
            await asyncio.sleep(0.02)
        return False

    def running(metrics):
        (line,) = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")]
        return float(line.split()[-1])

    begun = time.monotonic()
    assert asyncio.run(leave())
    assert time.monotonic() - begun < 20 and model.engine.failure is None
    # The engine is free again.
    assert len(sluice.generate(model, prompt="The cat", max_tokens=3)) > 0


def test_endpoints_are_the_servers(engine):
    async def ask():
        body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8, "temperature": 0}
        whole = await engine.chat(body)
        chunks = [chunk async for chunk in await engine.chat({**body, "stream": True})]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
        assert text == whole["choices"][0]["message"]["content"]
        tokens = (await engine.tokenize({"prompt": "Once upon a time"}))["tokens"]
        assert (await engine.detokenize({"tokens": tokens}))["prompt"].endswith("Once upon a time")
        assert len((await engine.embeddings({"input": "a"}))["data"]) == 1
        assert (await engine.completions({"prompt": "The", "max_tokens": 1}))["object"] == "text_completion"
        assert (await engine.messages({"messages": body["messages"], "max_tokens": 2}))["type"] == "message"
        assert (await engine.responses({"input": "Hi", "max_output_tokens": 2}))["object"] == "response"
        await engine.check_health()
        with pytest.raises(sluice.RequestError, match="messages must be a list"):
            await engine.chat({"messages": 1})
        with pytest.raises(sluice.RequestError, match="messages must be a list"):
            [chunk async for chunk in await engine.chat({"messages": 1, "stream": True})]
        with pytest.raises(sluice.RequestError, match="prompt cache"):
            await engine.sessions()

    asyncio.run(ask())


def test_sessions_survive_the_engine(tmp_path):
    text = "Once upon a time there was a small dog who liked to run in the park. " * 12

    async def once(work):
        async with AsyncEngine(sluice.demo(), prompt_cache=tmp_path / "cache", prompt_cache_min_tokens=32, max_context=2048) as engine:
            return await work(engine)

    async def save(engine):
        saved = await engine.save_session("mine-1", prompt=text)
        assert [one["name"] for one in await engine.sessions()] == ["mine-1"]
        return saved["tokens"]

    async def use(engine):
        found = await engine.load_session("mine-1")
        output = await last(engine.generate({"prompt_token_ids": found["prompt"]}, greedy(2)))
        await engine.delete_session("mine-1")
        assert await engine.sessions() == []
        return found["tokens"], output.num_cached_tokens

    tokens = asyncio.run(once(save))
    # What is kept can be looked at from outside.
    kept = sluice.PromptCache(tmp_path / "cache")
    assert kept.models()[0]["tokens"] >= tokens // 2 and kept.stat()["in_use"] is False
    assert kept.verify()["wrong"] == 0 and kept.gc()["bytes"] >= 0
    again, cached = asyncio.run(once(use))
    assert again == tokens and cached > tokens // 2
    kept.clear()
    with pytest.raises(sluice.ModelError, match="no prompt cache"):
        kept.models()
