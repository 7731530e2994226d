"""How the package behaves in a process that has other things to do: threads, forks, signals, memory."""

import os
import signal
import subprocess
import threading
import time

import pytest

import sluice


def test_threads_have_their_own_answers(model):
    prompts = ["Once upon a time", "The cat", "A dog", "A bird"]
    alone = [sluice.generate(model, prompt=prompt, max_tokens=12) for prompt in prompts]
    found = {}

    def work(number):
        found[number] = [sluice.generate(model, prompt=prompt, max_tokens=12) for prompt in prompts]

    threads = [threading.Thread(target=work, args=[number]) for number in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [found[number] for number in range(6)] == [alone] * 6


def test_python_runs_while_tokens_are_computed(model):
    ticks, done = 0, threading.Event()

    def work():
        sluice.generate(model, prompt="Once upon a time", max_tokens=40)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks >= 10


INTERRUPTED = """
import sluice, sys, time
model, tokenizer = sluice.load(sluice.demo(), max_context=100000)
try:
    for piece in sluice.stream_generate(model, tokenizer, "Once upon a time", max_tokens=90000, ignore_eos=True):
        if piece.generation_tokens == 3:
            print("begun", flush=True)
except KeyboardInterrupt:
    begun = time.time()
    print("interrupted", len(sluice.generate(model, tokenizer, "The cat", max_tokens=3)) > 0, flush=True)
"""


def test_ctrl_c_ends_a_generation_and_nothing_else(python):
    process = python(INTERRUPTED)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (out, process.returncode) == ("interrupted True\n", 0), error


COLLECTED = """
import sluice
model = sluice.Model(sluice.demo(), max_context=100000)
print("begun", flush=True)
sluice.LLM(model).generate(["Once upon a time"] * 8, sluice.SamplingParams(max_tokens=90000, ignore_eos=True))
"""


def test_ctrl_c_ends_a_batch(python):
    process = python(COLLECTED)
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in error and process.returncode != 0


FORKED = """
import os, sluice, sys
model, tokenizer = sluice.load(sluice.demo(), max_context=1000)
sluice.generate(model, tokenizer, "Once", max_tokens=2)
child = os.fork()
if child == 0:
    try:
        sluice.generate(model, tokenizer, "Once", max_tokens=2)
    except sluice.EngineError as error:
        assert "fork" in str(error), error
        own = sluice.Model(sluice.demo(), max_context=1000)
        text = sluice.generate(own, prompt="The cat", max_tokens=3)
        own.close()
        del model, tokenizer
        sys.exit(7 if text else 1)
    sys.exit(2)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
print(len(sluice.generate(model, tokenizer, "The cat", max_tokens=3)) > 0)
"""


def test_a_fork_must_load_its_own(python):
    process = python(FORKED)
    out, error = process.communicate(timeout=120)
    assert (out, process.returncode) == ("True\n", 0), error


FREED = """
import gc, sluice
def held():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
def threads():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("Threads:"))
def once():
    model, tokenizer = sluice.load(sluice.demo(), max_context=4000)
    sluice.generate(model, tokenizer, "Once upon a time " * 100, max_tokens=4)
    model.embed("a")
    used = held()
    stream = sluice.stream_generate(model, tokenizer, "Once", max_tokens=3000)
    next(stream)
    del model, tokenizer, stream
    gc.collect()
    return used
[once() for _ in range(3)]
before, threads_before = held(), threads()
used = [once() for _ in range(4)]
print(before, min(used), held(), threads_before, threads())
"""


def test_del_gives_memory_and_threads_back(python):
    process = python(FREED)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    before, used, after, threads_before, threads_after = map(float, out.split())
    # What the allocator keeps of it varies by some megabytes, and does not grow.
    assert used > before + 15, out
    assert after < before + 10, out
    assert threads_after <= threads_before, out


AT_EXIT = """
import sluice
model, tokenizer = sluice.load(sluice.demo(), max_context=2000, prompt_cache=FOLDER, prompt_cache_min_tokens=32)
prompt = "Once upon a time there was a small dog who liked to run. " * 8
print(list(sluice.stream_generate(model, tokenizer, prompt, max_tokens=2))[-1].cached_tokens)
"""


def test_the_prompt_cache_is_written_at_exit(python, tmp_path):
    cached = []
    for _ in range(2):
        process = python(AT_EXIT.replace("FOLDER", repr(str(tmp_path / "cache"))))
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        cached.append(int(out))
    assert cached[0] == 0 and cached[1] > 50


def test_closing_ends_what_runs(python):
    code = """
import sluice, threading, time
model = sluice.Model(sluice.demo(), max_context=50000)
def work():
    try:
        sluice.generate(model, prompt="Once", max_tokens=40000, ignore_eos=True)
        print("no error")
    except sluice.Error as error:
        print(type(error).__name__)
thread = threading.Thread(target=work)
thread.start()
time.sleep(0.5)
model.close()
thread.join(20)
print(thread.is_alive())
"""
    process = python(code)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert out.split()[0] in ("RequestError", "EngineError") and out.split()[1] == "False"


def test_errors_have_the_programs_words(program, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for path in ["/nonexistent/model", str(tmp_path)]:
        told = subprocess.run([program, "run", "-m", path, "-p", "x"], capture_output=True, text=True).stderr.strip()
        with pytest.raises(sluice.ModelError) as raised:
            sluice.load(path)
        assert str(raised.value) in told, (str(raised.value), told)
    assert issubclass(sluice.ModelError, sluice.Error) and issubclass(sluice.RequestError, ValueError)


def test_options_are_checked(model):
    for options, said in [
        ({"swarm": 1}, "swarm is no option"),
        ({"device": "tpu"}, "device must be auto, cpu"),
        ({"kv_type": "int3"}, "kv_type must be one of"),
        ({"threads": 0}, "threads must be between"),
        ({"memory_budget": "much"}, "8G"),
        ({"gpu_memory": "1G"}, "gpu_memory"),
        ({"max_context": "x"}, "max_context"),
    ]:
        with pytest.raises(sluice.RequestError, match=said):
            sluice.load(sluice.demo(), **options)
    with pytest.raises(sluice.ModelError, match="budget|memory"):
        sluice.load(sluice.demo(), memory_budget="1M")


def test_the_process_of_the_tests_still_works(model):
    assert os.getpid() == model._process and model.engine.failure is None
    assert model.memory()["kv"] > 0 and model.facts()["architecture"]
