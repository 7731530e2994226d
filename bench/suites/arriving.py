"""Models that are computed with while they arrive, from a hub on this machine that sends so many bytes in a second: when the first token comes, and how much of the model is there by then,
beside the least that this token needs, and beside the same program that fetches all of it first. And models that are only fetched, beside `curl` from the same hub without a limit."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
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
LEAST = "the least that it needs"
# A model that is only fetched, of 2 GB, and the goal beside curl.
PULL, PULLED, SPEED, LIKE_CURL = "pull", "qwen3-30b-a3b@6", "speed", 0.9
CURL, CHECKED = "curl", "curl, then sha256sum and sync"


def case(what, tokens):
    return f"{what}, a prompt of {tokens} token{'s' if tokens > 1 else ''}, {BANDWIDTH / 1e6:.0f} MB/s"


def picks(rows):
    return []


def charts(rows):
    shares = [Bar(row.case.partition(", 4 of")[0] + row.case.partition("4 bit")[2], 100 * row.ratio, low=100 * row.low, high=100 * row.high, goal=row.goal and 100 * row.goal, missed=row.met is False) for row in having(rows, figure=THERE, peer="all of it")]
    return {"": Chart("Part of a model that is there at its first token", shares, Amounts("%", end=100), "Bytes that have arrived when the first token of a new process is there, of all bytes of the model. Mark: the goal for streamed mixtures.")}


def found(rows):
    dense = [r for r in having(rows, figure=FIRST) if "A3B" not in r.case]
    streamed = [r for r in having(rows, figure=FIRST) if "A3B" in r.case]
    parts = having(rows, figure=THERE, peer="all of it")
    return [
        *said("The first token of a streamed mixture comes when {percent} of it is there, by the length of the prompt; goals met: {goals}.", [r for r in parts if "A3B" in r.case]),
        *said("That is {spread} times as much as this token needs: what every token reads, and the experts that it chose.", having(rows, figure=THERE, peer=LEAST)),
        *said("It takes {percent} of the time that it takes when all is fetched first.", streamed),
        *said("A dense model needs all of its layers: its first token takes {percent} of the time.", dense),
        *said("A model of 2 GB is fetched, checked and made safe from a crash at {spread} times the speed of curl, which does neither; goals met: {goals}.", having(rows, figure=SPEED, peer=CURL + " ")),
        *said("With curl, sha256sum and sync one after the other, {spread} times.", having(rows, figure=SPEED, peer=CHECKED)),
    ]


def cases(quick):
    return [*VARIANTS, PULL]


def absent():
    """What is missing for it to run here."""
    return None if shutil.which("curl") else "there is no curl"


def prepare():
    peers.build_sluice()
    peers.make_environment()
    if "BENCH_HUB" not in os.environ and subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "sluice-test-hub"], cwd=ROOT).returncode != 0:
        sys.exit("bench: the test hub does not build")


def versions():
    version = subprocess.run([SLUICE, "--version"], capture_output=True, text=True, check=True)
    return {"sluice": version.stdout.removeprefix("sluice").strip()}


@contextmanager
def hub(model, *bandwidth):
    """A hub that has the model as org/m, and its address; with a bandwidth, as much of weights as this in a second."""
    with tempfile.TemporaryDirectory(dir=DIR) as root:
        folder = Path(root) / "org" / "m"
        folder.mkdir(parents=True)
        for file in model.iterdir():
            (folder / file.name).symlink_to(file)
        served = subprocess.Popen([HUB, root, "127.0.0.1:0", *map(str, bandwidth)], stdout=subprocess.PIPE, text=True)
        try:
            yield served.stdout.readline().strip()
        finally:
            served.kill()
            served.wait()


def asked(address, command):
    """What a command prints that finds the hub, with an empty cache."""
    with tempfile.TemporaryDirectory(dir=DIR) as home:
        return output(command, at(address, home))


def at(address, home):
    return {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": ""}


def output(command, environment=None):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=os.environ | (environment or {}))
    if done.returncode != 0:
        raise Failed(f"bench: {' '.join(map(str, command))}: {done.stderr[-2000:]}")
    return done.stdout


def answer(address, tokens, more, model="org/m"):
    # Each letter pair with a space in front is one token, and so is the first pair.
    pairs = [a + b for a in "abcdefgh" for b in "ijklmnop"]
    prompt = " ".join(pairs[:tokens])
    # One token, so that the experts that were wanted are those of the prompt.
    command = [SLUICE, "run", model, prompt, "--raw", "-n", "1", "--ignore-eos", "--temperature", "0", "-c", "512", "--json", *more]
    figures = json.loads(asked(address, command))
    assert figures["prompt_tokens"] == tokens, f"{prompt!r} has {figures['prompt_tokens']} tokens"
    return figures


def least(model, figures):
    """Bytes that the first token of a streamed mixture needs: every tensor but experts and an embedding beside a head of its own, of which it needs a few rows, and the experts that it wanted."""
    size = {}
    for file in models.files(model):
        with open(file, "rb") as opened:
            header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
        size |= {name: t["data_offsets"][1] - t["data_offsets"][0] for name, t in header.items() if name != "__metadata__"}
    has_head = any(name.startswith("lm_head.") for name in size)
    left_out = [name for name in size if ".switch_mlp." in name or has_head and ".embed_tokens." in name]
    return sum(size.values()) - sum(size[name] for name in left_out) + figures["stats"]["experts"]["wanted_bytes"]


def run(names, quick, rounds, parts):
    rows, notes = [], []
    for name in names:
        what = pulled if name == PULL else measured
        rows += parts.measure(name, lambda: what(name, 1 if quick else min(rounds, 3)), notes)
    if PULL in names:
        notes.append("pull and curl by turns, each into an empty folder on the same disk, after a sync; the hub is on the same machine and takes its part of the cores. pull verifies the hub's SHA-256 while it fetches, and ends when all bytes are on the disk")
    return rows, notes


def measured(name, rounds):
    shape, title, flags, prompts = VARIANTS[name]
    model = models.quickly(shape, "q4", "text")
    rows, waited = [], []
    with hub(model, BANDWIDTH) as address:
        for tokens in prompts:
            firsts, there, sizes, needed = [], [], [], []
            for _ in range(rounds):
                say(f"{case(title, tokens)}")
                now = answer(address, tokens, flags)
                here = answer(address, tokens, flags, model)
                assert now["text"] == here["text"], f"{name}: another answer while it arrives"
                download = now["stats"]["download"]
                there.append(download["at_first_token"] / 1e6)
                sizes.append(download["bytes"] / 1e6)
                if name == "mixture":
                    needed.append(least(model, now) / 1e6)
                firsts.append(now["stats"]["first_token_seconds"]["from_start"])
                # However long the prompt is.
                if len(waited) < rounds:
                    first = answer(address, tokens, [*flags, "--wait-for-download"])
                    waited.append(first["stats"]["first_token_seconds"]["from_start"])
            # Where the token itself needs more than that part, there is no goal to reach.
            goal = PART if needed and max(needed) < PART * min(sizes) else None
            rows.append(compare(SUITE, case(title, tokens), THERE, "MB", there, sizes, "all of it", goal, above=False, threads=THREADS))
            if needed:
                rows.append(compare(SUITE, case(title, tokens), THERE, "MB", there, needed, LEAST, threads=THREADS))
            rows.append(compare(SUITE, case(title, tokens), FIRST, "s", firsts, waited, "all fetched first", above=False, threads=THREADS))
    return rows


def pulled(_, rounds):
    """`pull` beside curl: megabytes in a second."""
    model = models.quickly(PULLED, "q4", "text")
    (file,) = models.files(model)
    size = file.stat().st_size / 1e6
    ours, plain, checked = [], [], []
    with hub(model) as address:
        for _ in range(rounds):
            say(f"{PULL} beside {CURL}")
            ours.append(size / timed(lambda home: output([SLUICE, "pull", "org/m", "--quiet"], at(address, home))))
            fetch = ["curl", "-sSfL", f"{address}/org/m/resolve/main/{file.name}", "-o"]
            plain.append(size / timed(lambda home: output([*fetch, home / "file"])))
            checked.append(size / timed(lambda home: [output(c) for c in ([*fetch, home / "file"], ["sha256sum", home / "file"], ["sync", home / "file"])]))
    what = f"a model of {size / 1000:.1f} GB, no limit"
    return [
        compare(SUITE, what, SPEED, "MB/s", ours, plain, f"{CURL} alone", LIKE_CURL, threads=THREADS),
        compare(SUITE, what, SPEED, "MB/s", ours, checked, CHECKED, threads=THREADS),
    ]


def timed(work):
    """Seconds of `work(folder)` with an empty folder, while nothing else is written to the disk."""
    os.sync()
    with tempfile.TemporaryDirectory(dir=DIR) as home:
        begun = time.monotonic()
        work(Path(home))
        return time.monotonic() - begun
