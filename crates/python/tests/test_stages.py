"""A model in stages: in this process, in processes of their own that are killed, and over Ray (SLUICE_RAY=1)."""

import os
import random
import signal
import threading
import time

import pytest

import sluice
from sluice.stages import LocalStages, Pipeline, Stage, even, layer_count, open_processes

#: Instants at which processes are killed. SLUICE_STAGE_KILLS=200 is the campaign.
KILLS = int(os.environ.get("SLUICE_STAGE_KILLS", "4"))
OPTIONS = {"max_context": 512, "parallel": 4, "threads": 1}
PARAMS = [{"temperature": 0}, {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3}]


@pytest.fixture(scope="module")
def prompts(model):
    texts = ["Once upon a time there was a dog. " * 6, "The cat", "A king who had three sons went into the forest. " * 3]
    return [model.tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def expected(model, prompts):
    found = []
    for params in PARAMS:
        llm = sluice.LLM(model)
        wanted = sluice.SamplingParams(max_tokens=24, ignore_eos=True, **params)
        found.append([output.outputs[0].token_ids for output in llm.generate([{"prompt_token_ids": p} for p in prompts], wanted)])
    return [[list(tokens) for tokens in each] for each in found]


def test_tokens_are_those_of_one_engine_for_every_cut(prompts, expected):
    layers = layer_count(sluice.demo())
    cuts = [[(0, at), (at, layers)] for at in range(1, layers)] + [even(layers, 4), even(layers, 1)]
    assert len(cuts) > 4
    for ranges in cuts:
        stages = LocalStages([Stage(sluice.demo(), each, **OPTIONS) for each in ranges])
        with Pipeline(stages, microbatches=len(ranges) + 1, chunk=32) as pipeline:
            for params, tokens in zip(PARAMS, expected):
                assert pipeline.generate(prompts, params, 24) == tokens, ranges


def test_load_gives_a_stage_for_layers():
    stage, tokenizer = sluice.load(sluice.demo(), layers=(0, 2), **OPTIONS)
    assert stage.is_first and not stage.is_last
    hidden, logits, tokens = stage.step([(1, 0, tokenizer.encode("Once upon"), None, False)])
    assert len(hidden) % (4 * stage.hidden) == 0 and (logits, tokens) == (b"", [])
    with pytest.raises(sluice.EngineError, match="goes on at 9"):
        stage.step([(1, 9, [1], None, False)])
    stage.close()
    with pytest.raises(sluice.EngineError, match="closed"):
        stage.step([(1, 0, [1], None, False)])
    with pytest.raises(sluice.ModelError, match="layers 3..99"):
        Stage(sluice.demo(), (3, 99), **OPTIONS)


def test_a_bad_request_ends_and_others_go_on(prompts, expected):
    layers = layer_count(sluice.demo())
    stages = LocalStages([Stage(sluice.demo(), each, **OPTIONS) for each in even(layers, 2)])
    with Pipeline(stages, chunk=32) as pipeline:
        good = pipeline.submit(prompts[0], PARAMS[0], 24)
        bad = pipeline.submit([10**6], PARAMS[0], 4)
        with pytest.raises(sluice.EngineError, match="of a vocabulary of"):
            bad.result()
        assert good.result() == expected[0][0]
        with pytest.raises(sluice.RequestError):
            pipeline.submit([], PARAMS[0])
    with pytest.raises(sluice.EngineError, match="closed"):
        pipeline.submit([1])


def test_killed_processes_change_no_token_and_nothing_is_stuck(prompts, expected):
    chance = random.Random(os.environ.get("SLUICE_SEED", "1"))
    stages = open_processes(sluice.demo(), even(layer_count(sluice.demo()), 2), timeout=20, **OPTIONS)
    with Pipeline(stages, microbatches=3, chunk=32, restarts=5) as pipeline:
        for number in range(KILLS):
            which = number % len(PARAMS)
            requests = [pipeline.submit(prompt, PARAMS[which], 24) for prompt in prompts]

            def kill():
                time.sleep(chance.uniform(0, 0.25))
                os.kill(chance.choice(stages.stages).process.pid, signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            assert [request.result() for request in requests] == expected[which], number
            killer.join()
        assert pipeline.generate(prompts, PARAMS[0], 24) == expected[0]
        print(f"{KILLS} kills, of which {pipeline.lost} hit a request")


def test_a_stage_that_falls_silent_is_replaced(prompts, expected):
    # As behind a partition: nobody has closed anything, and no answer comes.
    stages = open_processes(sluice.demo(), even(layer_count(sluice.demo()), 2), timeout=3, **OPTIONS)
    with Pipeline(stages, microbatches=3, chunk=32, restarts=5) as pipeline:
        for which in range(2):
            requests = [pipeline.submit(prompt, PARAMS[which], 24) for prompt in prompts]
            os.kill(stages.stages[which].process.pid, signal.SIGSTOP)
            assert [request.result() for request in requests] == expected[which]


@pytest.mark.skipif(os.environ.get("SLUICE_RAY") != "1", reason="SKIPPED: SLUICE_RAY=1 runs the tests over Ray")
def test_actors_of_ray_give_the_same_tokens_and_may_be_killed(prompts, expected):
    ray = pytest.importorskip("ray", reason="SKIPPED: there is no Ray")
    from sluice.ray_stages import RayStages, checked

    folder = os.path.dirname(os.path.dirname(os.path.abspath(sluice.__file__)))
    owns = not ray.is_initialized()
    if owns:
        environment = {"PYTHONPATH": folder, "SLUICE_DEMO": sluice.demo()}
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    try:
        for count, compiled in [(2, True), (4, True), (2, False)]:
            config = checked({"model": sluice.demo(), "stages": count, "options": OPTIONS, "compiled": compiled, "timeout": 90})
            stages = RayStages(config)
            assert compiled or not stages.is_compiled
            with Pipeline(stages, config["microbatches"], 32, 3) as pipeline:
                for params, tokens in zip(PARAMS, expected):
                    assert pipeline.generate(prompts, params, 24) == tokens, (count, compiled)
                if count == 2:
                    requests = [pipeline.submit(prompt, PARAMS[1], 24) for prompt in prompts]
                    time.sleep(0.05)
                    ray.kill(stages.actors[1])
                    assert [request.result() for request in requests] == expected[1]
            print(f"{count} actors, compiled: {stages.is_compiled}")
    finally:
        if owns:
            ray.shutdown()
