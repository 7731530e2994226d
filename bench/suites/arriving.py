"""Models that are computed with while they arrive, from a hub on this machine that sends so many bytes in a second: when the first token comes, and how much of the model is there by then,
beside the same program that fetches all of it first."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import models
import peers
from chart import Amounts, Bar, Chart
from findings import having, said
from peers import SLUICE
from results import compare
from scratch import DIR, ROOT, Failed, say

TITLE = "Computing while a model arrives"
SUITE = "arriving"
HUB = Path(os.environ.get("BENCH_HUB") or SLUICE.with_name("test-hub")).absolute()
BANDWIDTH = 60_000_000
THREADS = len(os.sched_getaffinity(0))
# The goal that the project set itself: the first token of a streamed mixture at this part of its download.
PART = 0.3
# A model, what it is called, how its experts are kept, and prompts by their tokens. Experts have a tenth of the weights' bytes in memory.
VARIANTS = {
    "mixture": ("qwen3-30b-a3b@4", "Qwen3-30B-A3B, 4 of 48 layers, 4 bit", ["--experts", "slots", "--expert-budget", "150M"], (1, 4, 16)),
    "dense": ("dense", "Qwen3-0.6B, 4 bit", [], (1, 64)),
}
FIRST, THERE = "first token", "there at the first token"


def case(what, tokens):
    return f"{what}, a prompt of {tokens} token{'s' if tokens > 1 else ''}, {BANDWIDTH / 1e6:.0f} MB/s"


def picks(rows):
    return []


def charts(rows):
    shares = [Bar(row.case.partition(", 4 of")[0] + row.case.partition("4 bit")[2], 100 * row.ratio, low=100 * row.low, high=100 * row.high, goal=row.goal and 100 * row.goal, missed=row.met is False) for row in having(rows, figure=THERE)]
    return {"": Chart("Part of a model that is there at its first token", shares, Amounts("%", end=100), "Bytes that have arrived when the first token of a new process is there, of all bytes of the model. Mark: the goal for streamed mixtures.")}


def found(rows):
    dense = [r for r in having(rows, figure=FIRST) if "A3B" not in r.case]
    streamed = [r for r in having(rows, figure=FIRST) if "A3B" in r.case]
    parts = having(rows, figure=THERE, peer="all of it")
    return [
        *said("The first token of a streamed mixture comes when {percent} of it is there, by the length of the prompt; goals met: {goals}.", [r for r in parts if r.goal]),
        *said("That takes {percent} of the time that it takes when all is fetched first.", streamed),
        *said("A dense model needs all of its layers: its first token takes {percent} of the time.", dense),
    ]


def cases(quick):
    return list(VARIANTS)


def prepare():
    peers.build_sluice()
    peers.make_environment()
    if "BENCH_HUB" not in os.environ and subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "sluice-test-hub"], cwd=ROOT).returncode != 0:
        sys.exit("bench: the test hub does not build")


def versions():
    version = subprocess.run([SLUICE, "--version"], capture_output=True, text=True, check=True)
    return {"sluice": version.stdout.removeprefix("sluice").strip()}


@contextmanager
def hub(model):
    """A hub that has the model as org/m, and its address."""
    with tempfile.TemporaryDirectory(dir=DIR) as root:
        folder = Path(root) / "org" / "m"
        folder.mkdir(parents=True)
        for file in model.iterdir():
            (folder / file.name).symlink_to(file)
        served = subprocess.Popen([HUB, root, "127.0.0.1:0", str(BANDWIDTH)], stdout=subprocess.PIPE, text=True)
        try:
            yield served.stdout.readline().strip()
        finally:
            served.kill()
            served.wait()


def asked(address, command):
    """What a command prints that finds the hub, with an empty cache."""
    with tempfile.TemporaryDirectory(dir=DIR) as home:
        environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": home, "HF_HUB_OFFLINE": ""}
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            raise Failed(f"bench: {' '.join(map(str, command))}: {done.stderr[-2000:]}")
        return done.stdout


def answer(address, tokens, more):
    # Each letter pair with a space in front is one token, and so is the first pair.
    pairs = [a + b for a in "abcdefgh" for b in "ijklmnop"]
    prompt = " ".join(pairs[:tokens])
    command = [SLUICE, "run", "org/m", prompt, "--raw", "-n", "2", "--ignore-eos", "--temperature", "0", "-c", "512", "--json", *more]
    figures = json.loads(asked(address, command))
    assert figures["prompt_tokens"] == tokens, f"{prompt!r} has {figures['prompt_tokens']} tokens"
    return figures


def run(names, quick, rounds, parts):
    rows, notes = [], []
    for name in names:
        rows += parts.measure(name, lambda: measured(name, 1 if quick else min(rounds, 3), quick), notes)
    return rows, notes


def measured(name, rounds, quick):
    shape, title, flags, prompts = VARIANTS[name]
    model = models.quickly(shape, "q4", "text")
    rows = []
    with hub(model) as address:
        for tokens in prompts[:1] if quick else prompts:
            firsts, waited, there, sizes, texts = [], [], [], [], set()
            for _ in range(rounds):
                say(f"{case(title, tokens)}")
                now = answer(address, tokens, flags)
                first = answer(address, tokens, [*flags, "--wait-for-download"])
                texts |= {now["text"], first["text"]}
                download = now["stats"]["download"]
                there.append(download["at_first_token"] / 1e6)
                sizes.append(download["bytes"] / 1e6)
                firsts.append(now["stats"]["first_token_seconds"]["from_start"])
                waited.append(first["stats"]["first_token_seconds"]["from_start"])
            assert len(texts) == 1, f"{name}: other answers while it arrives"
            goal = PART if name == "mixture" else None
            rows.append(compare(SUITE, case(title, tokens), THERE, "MB", there, sizes, "all of it", goal, above=False, threads=THREADS))
            rows.append(compare(SUITE, case(title, tokens), FIRST, "s", firsts, waited, "all fetched first", above=False, threads=THREADS))
    return rows
