"""Runs of a model whose experts come from disk, ours and llama.cpp's under the same limit of memory; the disk by itself; and what a run's line says: its speed, what it computed, and
the speed that disk and processor allow. Standard library only."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import cgroup
from models import evict
from peers import LLAMA, SLUICE, died, parsed
from scratch import busy

THREADS = len(os.sched_getaffinity(0))
CONTEXT, GENERATED, PROMPT = 64, 32, 512
# Expert bytes of a request to the disk where it is measured alone.
REQUEST = 4 << 20
DEPTH = 64


@dataclass
class Flags:
    """How Sluice is asked to stream."""

    experts: str = "slots"
    lookahead: str = "auto"
    more: tuple = field(default_factory=tuple)

    def words(self, budget):
        words = ["--experts", self.experts, "--lookahead", self.lookahead, *self.more, "--threads", THREADS]
        # A mapped model has no budget.
        return [*map(str, words), *([] if budget is None or self.experts == "mapped" else ["--memory-budget", str(int(budget))])]


# --- one measurement each


def ours(what, path, flags, limit, *more, rounds=1, timeout=600):
    """A line of JSON of `sluice bench` under a limit, and what its group saw; None where it did not work, which the caller notes."""
    evict(path)
    words = flags.words(limit)
    command = [SLUICE, "bench", what, path, *words, "--rounds", rounds, "--no-roofline", "--json", *more]
    ran = cgroup.run(command, limit, timeout)
    if ran.code != 0:
        return None, ran
    return json.loads(ran.out.splitlines()[-1]), ran


def decode(path, flags, limit, tokens=GENERATED):
    return ours("decode", path, flags, limit, "--context", CONTEXT, "--tokens", tokens)


def prefill(path, flags, limit, *more):
    return ours("prefill", path, flags, limit, "--tokens", PROMPT, *more)


def llama(path, limit, generated, prompt=0, timeout=600):
    """Tokens per second of llama.cpp under a limit; 0 where there was no token in time."""
    evict(path)
    options = ["-m", path, "-t", THREADS, "-p", prompt, "-n", generated, "-d", 0 if prompt else CONTEXT, "-ngl", 0]
    options += ["-lm", "mmap", "--repack", 0, "-r", 1, "--no-warmup", "-o", "json"]

    def once(bench):
        ran = cgroup.run([bench, *options], limit, timeout)
        if ran.timed_out or ran.killed:
            return 0.0
        if ran.code != 0:
            raise died(ran.code, ran.errors)
        return parsed(lambda text: json.loads(text)[0]["avg_ts"], ran.out)

    return LLAMA.attempt(once)


def disk(path, request, depth=DEPTH, order="random", seconds=1.0, align=4096):
    """Bytes per second past the page cache."""
    command = [SLUICE, "bench", "disk", path, "--request", int(request), "--depth", depth, "--order", order, "--align", align, "--seconds", seconds, "--rounds", 1, "--json"]
    ran = cgroup.run(command)
    if ran.code != 0:
        sys.exit(f"bench: the disk cannot be measured:\n{ran.errors[-2000:]}")
    return json.loads(ran.out.splitlines()[-1])["bytes_per_second"]


def busy_disk(path, request):
    """The same while something runs on every thread: completions, copies and the processor's time are the same machine's."""
    with busy(THREADS):
        return disk(path, request)


def plan(path, limit, bandwidth, latency, hit_rate):
    """Tokens per second that `sluice plan` expects of this memory and disk where so many experts are found in memory."""
    command = [SLUICE, "plan", path, "--memory", int(limit), "--disk-bandwidth", int(bandwidth), "--disk-latency", 1e6 * latency, "--hit-rate", hit_rate, "--context", CONTEXT + GENERATED, "--json"]
    ran = cgroup.run(command)
    if ran.code != 0:
        sys.exit(f"bench: sluice plan failed:\n{ran.errors[-2000:]}")
    return next(t["tokens_per_second"] for t in json.loads(ran.out)["tokens"] if abs(t["hit_rate"] - hit_rate) < 1e-9)


def policies():
    """The eviction policies, read from the error about a policy that does not exist."""
    ran = cgroup.run([SLUICE, "bench", "decode", "--expert-policy", "-"])
    names = ran.errors.partition("expected one of:")[2].partition("\n")[0]
    return names.replace(",", " ").split()


def expert_bytes(bundle):
    """From one expert to the next in a bundle."""
    manifest = json.loads((Path(bundle) / "bundle.json").read_text())
    return next(iter(manifest["experts"].values()))["stride"]


# --- what a line of `sluice bench` says


def speed(line):
    return line["tokens_per_second"]["median"]


def seconds_of(line, phase):
    return line["phases"].get(phase, {}).get("seconds", 0.0)


def compute_of(line):
    """Seconds of computing, and of these of routed and shared experts; nothing of either is waiting for reads."""
    waiting = line["experts"]["waiting_seconds"]
    return sum(p["seconds"] for p in line["phases"].values()) - waiting, max(0.0, seconds_of(line, "experts") - waiting)


def bound(line, bandwidth, k):
    """The speed that disk and processor allow a run, from its own misses and compute times; and the same with look-ahead, where all reads run beside all compute."""
    e, tokens = line["experts"], line["tokens"]
    reads, (compute, experts) = e["read_bytes"] / bandwidth, compute_of(line)
    hits = e["hits"] / max(1, e["wanted"])
    alone = compute - experts + max(reads, experts * hits) + experts / k * (1 - hits)
    return tokens / alone, tokens / max(reads, compute)
