"""Serving: many requests at once beside llama.cpp's server, on random-weight models of equal dimensions and bits. `sluice bench serve` is the client of all; ours and the peer's server
stand beside each other and are asked in turn, each round with other prompts. The goals are those that the project set itself."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import cgroup
from chart import Chart
from findings import Pick, bars, goals, having, said
from models import evict, served, size
from peers import IK_LLAMA, LLAMA, PLAIN, SLUICE, Died, Peer
from results import compare
from scratch import Failed, output, say
from servers import die_with_us, metric, server
from shapes import config

TITLE = "Serving: throughput, latency, prefix cache, fairness"
SUITE = "serving"
THREADS = len(os.sched_getaffinity(0))
NAMES = {"dense": "Qwen3-0.6B", "moe": "6 layers of 30B-A3B", "hybrid": "8 layers of Qwen3-Next-80B-A3B, 128 experts"}
# The published workload (vLLM on Metal) has 100 requests, which take half an hour on two cores. This many give the same figures within some minutes.
REQUESTS = 16
# Rounds of what takes minutes by itself, and requests before those that count, in the first of them.
LONG_ROUNDS, WARMUPS = 1, 2
# Seconds for all that a server is asked in one go.
PATIENCE = 900
# Depending on its options, ik_llama.cpp's server ends with an assertion or takes a second and more for each step of eight. Seconds allowed for a first answer of a few tokens, and for the workload.
FIRST_ANSWER, FORK_PATIENCE = 90, 240
# What streams is several times larger than its limit.
STREAMED, FACTOR = "qwen3-30b-a3b@4", 2.5
# Requests at once, and tokens of all of them together that llama-server has room for.
SLOTS, CONTEXT = 8, 16_384


@dataclass
class Workload:
    """The workload of eight requests at once: tokens in and out, requests."""

    input: int = 1024
    output: int = 128
    requests: int = REQUESTS


CASES = [
    "bound dense",
    "bound moe",
    "bound hybrid",
    "throughput dense",
    "throughput moe",
    "throughput hybrid",
    "integers dense",
    "integers moe",
    "integers hybrid",
    "shared dense",
    "shared hybrid",
    "arrival dense",
    "streamed moe",
    "conversation dense",
    "conversation hybrid",
    "many cores dense",
]
QUICK = ["throughput dense", "shared dense", "conversation dense"]


# As the README's chart calls them.
FRONT = {"dense": "dense", "moe": "mixture", "hybrid": "hybrid"}
PICKS = [
    *(Pick(f"Throughput, {NAMES[s]}", f"eight at once, {NAMES[s]}, 4 bit", "output", "llama-server", front=f"Eight at once, {FRONT[s]}, throughput") for s in NAMES),
    *(Pick(f"First token, {NAMES[s]}", f"eight at once, {NAMES[s]}, 4 bit", "TTFT, mean", "llama-server") for s in NAMES),
    *(Pick(f"Between tokens, {NAMES[s]}", f"eight at once, {NAMES[s]}, 4 bit", "TPOT, mean", "llama-server", front="Eight at once, dense, between tokens" if s == "dense" else "") for s in NAMES),
    *(Pick(f"First token, 900 of 1024 tokens shared, {NAMES[s]}", f"900 of 1024 tokens shared, {NAMES[s]}, 4 bit", "TTFT, median", "llama-server") for s in NAMES),
    Pick("First token, 4000 tokens among 7 streams", f"a prompt of 4000 tokens among 7 streams, {NAMES['dense']}, 4 bit", "the prompt's TTFT", "llama-server"),
    *(Pick(f"First token in a conversation, {NAMES[s]}", f"conversation, thinking kept, {NAMES[s]}, 4 bit", "TTFT, mean", "llama-server") for s in NAMES),
]


def picks(_):
    """Rows that charts show."""
    return PICKS


def charts(rows):
    under = "Throughput or latency over llama-server's, more is better; eight requests at once unless stated; 4 bit, random weights of real dimensions."
    return {"": Chart("Serving, beside llama-server", bars(rows, picks(rows)), under=under)}


def found(rows):
    """What the figures say, a line each."""
    many, turns = [r for r in rows if r.case.startswith("eight at once") and "integers" not in r.case], [r for r in rows if r.figure.startswith("turns that compute more")]
    of = lambda figure: having(many, figure=figure, peer="llama-server")  # noqa: E731
    gaps = having(rows, "a prompt of 4000", "the largest gap", "its usual")
    fork = next((r.peer_died for r in many if r.peer_name.startswith("ik_llama") and r.peer_died), "")
    return [
        *said("Throughput of eight at once is {spread} times llama-server's, in {cases}; goals met: {goals}.", of("output")),
        *said("Time to first token is {spread} times lower; goals met: {goals}.", of("TTFT")),
        *said("Time between tokens is {spread} times lower; goals met: {goals}.", of("TPOT, mean")),
        *said("With attention on integers (`--attention int8`, lossy) throughput is {spread} times llama-server's.", having(rows, "eight at once, attention", "output")),
        *said("Throughput is {spread} times that of ik_llama.cpp's server.", having(many, figure="output", peer="ik_llama")),
        *([f"ik_llama.cpp's server died in some cases, which have no figure: {fork}."] if fork else []),
        *said("A step of eight reaches {percent} of the limit set by bytes or products; goals met: {goals}.", having(rows, "step of", "output")),
        *said("With 900 of 1024 tokens shared, a first token takes {percent} of the time that the other 124 take alone; goals met: {goals}.", having(rows, "900", "TTFT", "the other")),
        *([f"A prompt of 4000 tokens among streams stretches the largest gap of a stream to {gaps[0].ours:.1f} times its usual gap; goals met: {goals(gaps)}."] if gaps else []),
        *([f"Conversations with tools in which some turn recomputes more than the last turn: {sum(r.ours > 0 for r in turns)} of {len(turns)}."] if turns else []),
        *said("Mixtures read from disk: eight at once gain {percent} of the limit set by their shared experts; goals met: {goals}.", having(rows, "8 at once over 1")),
        f"All goals together: {goals(rows)} met.",
    ]


def cases(quick):
    return CASES if not quick else QUICK


def run(names, quick, rounds, parts):
    # As an error does, so that every server is ended first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows, notes = [], []
    # A round takes minutes.
    rounds = min(rounds, 3)
    LLAMA.serves()
    # Takes long to build, and is asked in these cases alone.
    asks_fork = not quick and any(name.startswith("throughput") for name in names)
    if asks_fork:
        IK_LLAMA.serves()
    for name in names:
        what, shape = name.rsplit(" ", 1)
        measure = {"bound": bound, "throughput": throughput, "integers": integers, "shared": shared, "arrival": arrival, "conversation": conversation, "streamed": streamed, "many cores": many_cores}[what]
        say(name)
        rows += parts.measure(f"{name} {rounds}", lambda: measure(shape, rounds, quick, notes), notes)
    workload = Workload() if not quick else QUICK_WORKLOAD
    notes.append(f"throughput: {workload.requests} requests of {workload.input} tokens in and {workload.output} out, 10 a second by a Poisson process, {SLOTS} under way at once, {WARMUPS} warm-ups before the first of {min(rounds, LONG_ROUNDS)} rounds; vLLM's published benchmark has 100 of 1024 and 128, and 5")
    notes.append("a peer that no goal refers to is measured in the first round only")
    notes.append("prompts are random token ids, different in each round; answers are greedy, streamed and of full length (ignore_eos)")
    notes.append(f"llama-server: {SLOTS} slots, continuous batching, weights repacked, KV in f16, no prompts kept in memory where none comes twice; Sluice: KV in bf16, prefix cache on")
    if asks_fork:
        notes.append(f"ik_llama.cpp: {IK_LLAMA.missing or 'in ik-llama-cpp-python ' + IK_LLAMA.package_version}, one round, {SLOTS} slots, weights repacked while loading")
    return rows, notes


QUICK_WORKLOAD = Workload(256, 32, 8)


# --- servers, and what they are asked


def ours(shape, *more, form="q4", group=None, parallel=SLOTS):
    folder = served(shape, form)
    evict(folder)
    command = lambda port: [SLUICE, "serve", folder, "--port", port, "--parallel", parallel, "--threads", THREADS, *PLAIN, *more]  # noqa: E731
    return server(command, f"serve-{shape}", group)


def theirs(shape, *more, parallel=SLOTS, context=CONTEXT, keeps=0):
    """llama-server; `keeps`: MiB of prompts that it keeps in memory beside its slots."""
    file = served(shape, "Q4_0")
    options = ["-m", file, "-t", THREADS, "-np", parallel, "-c", context, "-cram", keeps, "-fit", "off", "--host", "127.0.0.1", *more]

    @contextmanager
    def started():
        with ExitStack() as stack:
            yield LLAMA.attempt(lambda bench: stack.enter_context(server(lambda port: [bench.with_name("llama-server"), *options, "--port", port], f"llama-server-{shape}")))

    return started()


def ik(shape):
    file = served(shape, "Q4_0")
    # With its flash attention, which is on unless asked otherwise, an assertion ends it among eight slots ("S > 0").
    options = ["-m", file, "-t", THREADS, "-np", SLOTS, "-c", CONTEXT, "-cram", 0, "-rtr", "-no-fa", "--host", "127.0.0.1"]
    return server(lambda port: [IK_LLAMA.server, *options, "--port", port], f"ik-llama-server-{shape}")


def ask(address, shape, seed, *more, workload="random", patience=PATIENCE):
    """The figures of `sluice bench serve` for a server, within `patience` seconds. Any failure counts as the death of that server."""
    # Control tokens and unused tokens are at the end of the vocabulary.
    vocabulary = config(shape)["vocab_size"] - 300
    words = [SLUICE, "bench", "serve", "--base-url", address, "--workload", workload, "--seed", seed, "--vocabulary", vocabulary, "--json", *map(str, more)]
    try:
        done = subprocess.run([str(w) for w in words], capture_output=True, text=True, errors="replace", timeout=patience, preexec_fn=die_with_us)
    except subprocess.TimeoutExpired:
        raise Died(f"no answer within {patience} s") from None
    if done.returncode != 0:
        raise Died(done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else f"exit code {done.returncode}")
    said = json.loads(done.stdout.splitlines()[-1])
    if said.get("failures"):
        raise Died(f"{said['requests']['failed']} requests failed: {said['failures'][0]}"[:200])
    return said


def own(address, *more, **kinds):
    """Of our own server, which has to answer."""
    try:
        return ask(address, *more, **kinds)
    except Died as why:
        raise Failed(f"bench: sluice serve: {why}") from None


class Asked(Peer):
    """A peer's server; where it does not start it has died."""

    def __init__(self, stack, start):
        super().__init__()
        self.address = None

        def begin():
            self.address = stack.enter_context(start())

        self.measure(begin)
        self.all = []


def figures(said):
    """The figures of a report."""
    return {
        "output": said["output_tokens_per_second"],
        "TTFT, mean": said["ttft_ms"]["mean"],
        "TPOT, mean": said["tpot_ms"]["mean"],
        "TPOT, P99": said["tpot_ms"]["p99"],
        "ITL, P99": said["itl_ms"]["p99"],
    }


def beside(case, name, mine, peer, who, goals):
    """A row for each figure of a report."""
    rows = []
    for figure, goal in goals.items():
        unit, above = ("tokens/s", True) if figure == "output" else ("ms", False)
        row = compare(SUITE, case, figure, unit, [m[figure] for m in mine], [p[figure] for p in peer.all], who, goal, above, THREADS, peer.died)
        rows.append(row)
    return rows


def met(row, is_met):
    """A figure by itself, with a goal."""
    row.met = is_met
    return row


# --- cases


def bound(shape, rounds, quick, notes):
    """Steps of eight by themselves, beside what the machine could do at best."""
    case = f"step of {SLOTS}, 1024 tokens before each, {NAMES[shape]}, 4 bit"
    options = ["--sequences", SLOTS, "--context", 1024, "--tokens", 32, "--rounds", rounds, "--threads", THREADS, "--json"]
    said = json.loads(output([SLUICE, "bench", "decode", served(shape, "q4"), *options]))
    step, bytes_, products = (said[key]["all"] for key in ("step_seconds", "bound_by_bytes_seconds", "bound_by_products_seconds"))
    best = [max(b, p) for b, p in zip(bytes_, products)]
    weights, cache = (said[f"{what}_bytes_per_step"] / 1e6 for what in ("weight", "cache"))
    notes.append(f"step of {SLOTS}, {NAMES[shape]}: {weights:.0f} MB of weights (those of distinct experts once), {cache:.0f} MB of keys, values and states, {said['weight_macs_per_step'] / 1e9:.1f} G multiply-adds")
    speed = lambda seconds: [SLOTS / s for s in seconds]  # noqa: E731
    return [compare(SUITE, case, "output", "tokens/s", speed(step), speed(best), "bytes or products, whichever take longer", 0.85, True, THREADS)]


def beside_llama(shape, rounds, quick, *more):
    """The workload of eight at once: its options, our figures with `more`, and llama-server's."""
    workload = QUICK_WORKLOAD if quick else Workload()
    options = ["--input", workload.input, "--output", workload.output, "--requests", workload.requests, "--concurrency", SLOTS, "--warmups"]
    with ExitStack() as stack:
        mine_at = stack.enter_context(ours(shape, *more))
        peer = Asked(stack, lambda: theirs(shape))
        mine = []
        for seed in range(1, min(rounds, LONG_ROUNDS) + 1):
            warmups = WARMUPS if seed == 1 else 0
            mine.append(figures(own(mine_at, shape, seed, *options, warmups)))
            peer.measure(lambda: figures(ask(peer.address, shape, seed, *options, warmups)))
    return options, mine, peer


def integers(shape, rounds, quick, notes):
    """The same workload where attention works on integers."""
    _, mine, peer = beside_llama(shape, rounds, quick, "--attention", "int8")
    case = f"eight at once, attention on integers, {NAMES[shape]}, 4 bit"
    return beside(case, shape, mine, peer, f"llama-server {LLAMA.name('Q4_0').partition(' ')[2]}", dict.fromkeys(("output", "TTFT, mean", "TPOT, mean", "TPOT, P99")))


def throughput(shape, rounds, quick, notes):
    case = f"eight at once, {NAMES[shape]}, 4 bit"
    options, mine, peer = beside_llama(shape, rounds, quick)
    goals = {"output": 2.5 if shape == "dense" else 3.0, "TTFT, mean": 1.0, "TPOT, mean": 1.0, "TPOT, P99": 1.0, "ITL, P99": None}
    rows = beside(case, shape, mine, peer, f"llama-server {LLAMA.name('Q4_0').partition(' ')[2]}", goals)
    if not quick:
        fork = beside_fork(shape, options)
        rows += beside(case, shape, mine[:1], fork, "ik_llama.cpp Q4_0", {"output": 1.0, "TTFT, mean": None, "TPOT, mean": None})
    return rows


def beside_fork(shape, options):
    """ik_llama.cpp in one round of the workload. It is tried until it dies once, and then no longer."""
    if IK_LLAMA.missing:
        return missing(IK_LLAMA.missing)
    with ExitStack() as stack:
        fork = Asked(stack, lambda: ik(shape))
        few = ["--input", 16, "--output", 4, "--requests", 1, "--warmups", 0]

        def both():
            ask(fork.address, shape, 0, *few, patience=FIRST_ANSWER)
            return figures(ask(fork.address, shape, 1, *options, 0, patience=FORK_PATIENCE))

        fork.measure(both)
        # It may not hear anything else any more.
        IK_LLAMA.missing = fork.died
    return fork


def missing(why):
    peer = Peer()
    peer.died = why
    return peer


def shared(shape, rounds, quick, notes):
    """900 tokens of 1,024 in common."""
    name = f"900 of 1024 tokens shared, {NAMES[shape]}, 4 bit"
    alone = ["--concurrency", 1, "--rate", 0, "--requests", 5, "--warmups", 2, "--output", 4]
    # Eight that all generate for a while, so that there are steps of eight and nothing else: their prompts are there, computed for those that asked before.
    eight = ["--concurrency", SLOTS, "--rate", 0, "--requests", SLOTS, "--warmups", 0]
    prefix = ["--shared", 900, "--input", 1024]
    traffic = ["--input", 512, "--output", 64, "--requests", 12, "--concurrency", SLOTS]
    ttft, rest, step, unshared, on, off = [], [], [], [], [], []
    with ExitStack() as stack:
        mine_at = stack.enter_context(ours(shape))
        without_at = stack.enter_context(ours(shape, "--no-prefix-cache"))
        peer = Asked(stack, lambda: theirs(shape, "-kvu"))

        def step_of_eight(seed, *prompts, **kinds):
            own(mine_at, shape, seed, *eight, *prompts, "--output", 1, **kinds)
            said = own(mine_at, shape, seed, *eight, *prompts, "--output", 96, **kinds)
            if not said["full_itl_ms"]:
                raise Failed("bench: sluice serve: there was no step of eight")
            return said["full_itl_ms"]["median"]

        for seed in range(1, rounds + 1):
            said = own(mine_at, shape, 10 * seed, *alone, *prefix, workload="shared-prefix")
            ttft.append(said["ttft_ms"]["median"])
            rest.append(own(mine_at, shape, 10 * seed + 1, *alone, "--input", 124)["ttft_ms"]["median"])
            if seed == 1:
                peer.measure(lambda: ask(peer.address, shape, 10, *alone, *prefix, workload="shared-prefix")["ttft_ms"]["median"])
            step.append(step_of_eight(10 * seed + 2, *prefix, workload="shared-prefix"))
            unshared.append(step_of_eight(10 * seed + 3, "--input", 1024))
            if not quick:
                # The first to run has the colder processor, so they take turns.
                order = [(mine_at, on), (without_at, off)]
                for address, found in order if seed % 2 else order[::-1]:
                    found.append(own(address, shape, 10 * seed + 4, *traffic)["output_tokens_per_second"])
    rows = [
        compare(SUITE, name, "TTFT, median", "ms", ttft, rest, "the other 124 tokens alone", 1.15, False, THREADS),
        compare(SUITE, name, "TTFT, median", "ms", ttft, peer.all, "llama-server", None, False, THREADS, peer.died),
        compare(SUITE, name, "step of eight", "ms", step, unshared, "nothing shared", 0.6, False, THREADS),
    ]
    if on:
        rows.append(compare(SUITE, name, "output of unshared traffic", "tokens/s", on, off, "--no-prefix-cache", 0.98, True, THREADS))
    return rows


def arrival(shape, rounds, quick, notes):
    """A long prompt among streams."""
    case = f"a prompt of 4000 tokens among 7 streams, {NAMES[shape]}, 4 bit"
    options = ["--streams", 7, "--long", 4000, "--input", 128]
    with ExitStack() as stack:
        mine_at = stack.enter_context(ours(shape))
        peer = Asked(stack, lambda: theirs(shape, "-kvu"))
        mine = []
        for seed in range(1, rounds + 1):
            mine.append(own(mine_at, shape, seed, *options, workload="arrival"))
            if seed == 1:
                peer.measure(lambda: ask(peer.address, shape, seed, *options, workload="arrival"))
    one = [1.0] * rounds
    rows = []
    for figure, key, goal, limit in (
        ("the largest gap of a stream", "largest_gap_over_usual", 3.0, "its usual gap"),
        ("the prompt's TTFT", "among_over_alone", 1.7, "alone"),
    ):
        found = [m[key] for m in mine]
        rows.append(compare(SUITE, case, figure, "times", found, one, limit, goal, False, THREADS))
        rows.append(compare(SUITE, case, figure, "times", found, [p[key] for p in peer.all], "llama-server", None, False, THREADS, peer.died))
    rows.append(compare(SUITE, case, "the prompt's TTFT", "ms", [m["among_ms"] for m in mine], [p["among_ms"] for p in peer.all], "llama-server", None, False, THREADS, peer.died))
    return rows


def conversation(shape, rounds, quick, notes):
    """What is computed again of a conversation with tools; counted, so one round is enough."""
    rows = []
    for thinking in ("kept", "stripped"):
        case = f"conversation, thinking {thinking}, {NAMES[shape]}, 4 bit"
        turns = 12 if quick else 30
        options = ["--turns", turns, "--thinking", thinking, "--output", 16]
        with ExitStack() as stack:
            mine_at = stack.enter_context(ours(shape))
            mine = own(mine_at, shape, 1, *options, workload="conversation")
            peer = missing("") if quick else Asked(stack, lambda: theirs(shape, "-kvu", keeps=2048))
            if not quick:
                peer.measure(lambda: ask(peer.address, shape, 1, *options, workload="conversation"))
        beyond = mine["turns_beyond_the_last"]
        row = compare(SUITE, case, "turns that compute more than the last turn again", f"of {turns}", [beyond], None, "", 0, False, THREADS)
        rows.append(met(row, beyond == 0))
        again = [mine["recomputed_tokens"]]
        rows.append(compare(SUITE, case, "computed", "tokens", again, [mine["last_turn_tokens"]], "new in their turns", None, False, THREADS))
        if not quick:
            rows.append(compare(SUITE, case, "computed", "tokens", again, [p["recomputed_tokens"] for p in peer.all], "llama-server", None, False, THREADS, peer.died))
            rows.append(compare(SUITE, case, "TTFT, mean", "ms", [mine["ttft_ms_mean"]], [p["ttft_ms_mean"] for p in peer.all], "llama-server", None, False, THREADS, peer.died))
    return rows


def streamed(_, rounds, quick, notes):
    """Eight at once over one, experts read under a limit of memory."""
    case = f"8 at once over 1, 4 layers of 30B-A3B, 4 bit, {FACTOR} times the limit"
    if reason := cgroup.why_not():
        notes.append(f"left out, what streams: {reason}")
        return []
    folder = served(STREAMED, "q4-bundle")
    limit = int(size(folder) / FACTOR)
    k = config(STREAMED)["num_experts_per_tok"]
    gains, bounds, speeds, distinct = [], [], [], []

    def once(address, seed, at_once):
        names = ("sluice:experts_wanted_total", "sluice:step_seconds_count")
        before = [metric(address, n) for n in names]
        options = ["--input", 16, "--output", 96, "--rate", 0, "--concurrency", at_once, "--requests", 2 * at_once, "--warmups", 0]
        said = own(address, STREAMED, seed, *options)
        wanted, steps = (metric(address, n) - b for n, b in zip(names, before))
        return said["output_tokens_per_second"], wanted / steps / config(STREAMED)["num_hidden_layers"]

    with cgroup.made(limit) as group, ours(STREAMED, "--memory-budget", limit, form="q4-bundle", group=group) as address:
        for seed in range(1, rounds + 1):
            (one, _), (eight, wanted) = once(address, 2 * seed, 1), once(address, 2 * seed + 1, SLOTS)
            gains.append(eight / one)
            bounds.append(SLOTS * k / wanted)
            speeds.append((one, eight))
            distinct.append(wanted)
    notes.append("streamed: " + "; ".join(f"{one:.1f} and {eight:.1f} tokens/s, {d:.1f} distinct experts of {SLOTS * k} wanted a step and layer" for (one, eight), d in zip(speeds, distinct)))
    return [compare(SUITE, case, "output", "times", gains, bounds, "8K over distinct experts", 0.9, True, THREADS)]


def many_cores(shape, rounds, quick, notes):
    """One, eight and thirty-two at once, where there are cores for it."""
    if THREADS < 8:
        notes.append(f"left out: 1, 8 and 32 at once on many cores, for which {THREADS} are too few")
        return []
    rows = []
    with ExitStack() as stack:
        mine_at = stack.enter_context(ours(shape, parallel=32))
        peer = Asked(stack, lambda: theirs(shape, parallel=32, context=32 * 2048))
        for at_once in (1, 8, 32):
            options = ["--requests", max(4, 2 * at_once), "--concurrency", at_once, "--rate", 0]
            mine, peer.all = [], []
            for seed in range(1, rounds + 1):
                mine.append(figures(own(mine_at, shape, 100 * at_once + seed, *options)))
                peer.measure(lambda: figures(ask(peer.address, shape, 100 * at_once + seed, *options)))
            case = f"{at_once} at once, {NAMES[shape]}, 4 bit"
            rows += beside(case, shape, mine, peer, "llama-server Q4_0", {"output": None, "TTFT, mean": None, "TPOT, mean": None})
    return rows
