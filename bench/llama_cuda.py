"""llama.cpp's CUDA backend: what its tools are asked on one GPU, and how their answers are read. Standard library only."""

import json
import os
import subprocess
import time

from models import evict, files
from peers import CudaLlamaCpp, answer, died, parsed

THREADS = len(os.sched_getaffinity(0))
LLAMA = CudaLlamaCpp()


def llama(path, rounds, *options):
    """Tokens per second of each round, by tokens of the prompt, tokens generated and depth."""
    command = ["-m", path, "-t", THREADS, "-ngl", 99, "-fa", "on", "-r", rounds, "-o", "json", *options]
    return LLAMA.attempt(lambda bench: answer([bench, *command], by_test))


def by_test(text):
    """What llama-bench says, as `llama` gives it."""
    return {(t["n_prompt"], t["n_gen"], t["n_depth"]): t["samples_ts"] for t in json.loads(text)}


def by_parallel(text):
    """Tokens per second that llama-batched-bench generates, by sequences."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {line["pl"]: line["speed_tg"] for line in lines}


def first_line(bench, file, tokens, way, state):
    """Seconds until llama-bench says how long its prompt of so many tokens took."""
    if state == "cold":
        for name in files(file):
            evict(name)
    command = [bench, "-m", file, "-ngl", 99, "-fa", "on", "-t", THREADS, "-p", tokens, "-n", 0, "-r", 1, "--no-warmup", "-o", "jsonl", "-lm", way]
    began = time.monotonic()
    with subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        line = process.stdout.readline()
        taken = time.monotonic() - began
        process.stdout.read()
    if process.returncode != 0:
        raise died(process.returncode, "")
    parsed(json.loads, line)
    return taken
