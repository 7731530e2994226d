"""How everything grows from one core to as many as there are, beside llama.cpp with as many threads: decode, prompts, long prompts, streamed experts, a machine that others use too,
and one of several nodes of memory. Single measurements and their goals are those of `kernels`; what it takes several minutes for on few cores, or has no meaning there, is here alone."""

import json
import subprocess
from dataclasses import replace
from statistics import median

import machine
import peers
import streamed_experts
from chart import Chart
from findings import Pick, bars, goals, having, said
from models import evict, quickly, size
from peers import LLAMA, SLUICE
from results import compare
from scratch import busy, output, say
from suites import kernels
from suites.kernels import LONG, NAMES, PROMPT, THREADS, Decode, Prefill

TITLE = "Many cores"
SUITE = "many-cores"
AXIS = [*kernels.AXIS, THREADS]
FEW = min(2, THREADS)
DECODES = [Decode(shape, "q4", "Q4_0", t, 1.5 if t == 1 else goal, 0.9) for shape, goal in (("dense", 1.4), ("moe", 1.8)) for t in AXIS]
DECODES += [Decode("dense", "q8", "Q8_0", FEW, 1.25), Decode("dense", "bf16", "BF16", FEW, None, 0.94)]
PREFILLS = [Prefill(shape, "q4", "Q4_0", t, goal) for shape, goal in (("dense", 3.0), ("moe", 5.0)) for t in AXIS]
# A giant: a model with real dimensions, in a bundle.
GIANT, STREAMED = "qwen3-30b-a3b@12", "12 layers of 30B-A3B, 4 bit"
BUDGET = 2_000_000_000

# What grows with the threads, and whether its last stands in the README.
GROWING = [
    ("Decode, 0.6B", f"decode, {NAMES['dense']}, 4 bit", True),
    ("Decode, mixture", f"decode, {NAMES['moe']}, 4 bit", False),
    ("Prompt, 0.6B", f"prefill {PROMPT}, {NAMES['dense']}, 4 bit", False),
    ("Prompt, mixture", f"prefill {PROMPT}, {NAMES['moe']}, 4 bit", True),
]
HOW = ("exact", "attention on integers")


def picks(rows):
    """Rows that charts show, at the threads of the page, which may be another machine's."""
    threads, found = sorted({row.threads for row in rows}), []
    for label, case, front in GROWING:
        for t in threads:
            named = f"{label}, {t} thread{'s' * (t != 1)}"
            found.append(Pick(named, case, "speed", "llama.cpp", t, front=named if front and t == threads[-1] else ""))
    return found + [Pick(f"Prompt of {LONG:,}, 0.6B, {how}", f"prefill {LONG}, {NAMES['dense']}, 4 bit, {how}", "speed", "llama.cpp") for how in HOW]


def charts(rows):
    under = f"Speed over llama.cpp's with equal threads and bits; prompts of {PROMPT} tokens; models in memory, random weights of real dimensions."
    return {"": Chart(f"One to {max((row.threads for row in rows), default=THREADS)} threads, beside llama.cpp", bars(rows, picks(rows)), under=under)}


def found(rows):
    """What the figures say, a line each."""
    prompt, speeds = f"prefill {PROMPT}", [r for r in rows if r.figure == "speed"]
    exact, integers = (having(speeds, f"prefill {LONG}, {NAMES['dense']}, 4 bit, {how}", peer="llama.cpp") for how in HOW)
    return [
        *said("Decode runs at {spread} times llama.cpp's speed with the same number of threads, in {cases}; goals met: {goals}.", having(speeds, "decode", peer="llama.cpp")),
        *said("It reads weights at {percent} of the same threads' best read speed; goals met: {goals}.", having(rows, "decode", peer="read limit")),
        *said(f"A prompt of {PROMPT} tokens: {{spread}} times its speed, in {{cases}}; goals met: {{goals}}.", having(speeds, prompt, peer="llama.cpp")),
        *said("All threads together reach {percent} of one thread's speed times their number; goals met: {goals}.", having(rows, prompt, "speed of all threads")),
        *said("With AMX it runs at {spread} times the speed of VNNI alone; goals met: {goals}.", having(speeds, f"{prompt} by AMX")),
        *said("Activations in int11 instead of int8 leave {percent} of the speed; goals met: {goals}.", having(rows, peer="with int8")),
        *said(f"A prompt of {LONG:,} tokens, exact: {{spread}} times llama.cpp's speed; goals met: {{goals}}.", exact),
        *said("With attention on integers, which is lossy: {spread} times; goals met: {goals}.", integers),
        *said(f"Such prompts keep {{percent}} of the speed at {PROMPT} tokens; goals met: {{goals}}.", having(rows, f"prefill {LONG}", "speed kept")),
        *said("Streamed from disk, decode and a prompt reach {percent} of the limit set by the longer of reads and compute; goals met: {goals}.", having(rows, "streamed", peer="max(")),
        *said("Decode with all threads keeps {percent} of its speed beside busy loops on half of the cores, or beside a second engine; goals met: {goals}.", having(rows, "beside")),
        *said("On several memory nodes, `--numa spread` runs at {spread} times the speed of the kernel's own placement.", [r for r in having(speeds, "nodes") if r.case.endswith("spread")]),
        *said("With a copy of the weights for each node (`--numa replicate`) it is {spread} times.", [r for r in having(speeds, "nodes") if r.case.endswith("replicate")]),
        f"All goals together: {goals(rows)} met.",
    ]


def absent():
    return None if THREADS >= 4 else f"{THREADS} processors are too few; `bench/run kernels` measures them"


def versions():
    return peers.versions_of(LLAMA)


def cases(_):
    return ["limits", *(c.name for c in [*DECODES, *PREFILLS]), "long prompts", "amx", kernels.FINE, "streamed", "nodes", "beside others"]


def run(names, quick, rounds, parts):
    rows, notes = [], []
    what = {c.name: lambda c=c: kernels.decode(made(c), rounds) for c in DECODES}
    what |= {c.name: lambda c=c: kernels.prefill(made(c), rounds) for c in PREFILLS}
    what |= {"limits": lambda: limits(rounds), "long prompts": lambda: kernels.long_prompts(rounds), "amx": lambda: amx(rounds)}
    what |= {kernels.FINE: lambda: kernels.finely(rounds, kernels.levels()[:1], quickly)}
    what |= {"streamed": lambda: streamed(rounds), "nodes": lambda: nodes(rounds, notes), "beside others": lambda: beside_others(max(rounds, 3))}
    for name in names:
        rows += parts.measure(name, what[name], notes)
    for shape in ("dense", "moe"):
        rows += kernels.scaling(rows, f"prefill {PROMPT}, {NAMES[shape]}, 4 bit")
    notes.append(f"decode: {kernels.GENERATED} tokens behind {kernels.CONTEXT}; KV in bf16 (Sluice) and f16 (llama.cpp); llama.cpp with its repacking, flash attention as it chooses")
    notes.append(f"streamed: {STREAMED}; the longer of all reads over the disk's own speed and of all compute, of the same run; the disk measured before it")
    return [replace(row, suite=SUITE) for row in rows], notes


def made(c):
    """Makes its models in the quick way, where they are not there."""
    for form in (c.ours, c.theirs):
        quickly(c.shape, form)
    return c


# --- figures


def limits(rounds):
    lines = [json.loads(x) for x in output([SLUICE, "bench", "roofline", "--threads", ",".join(map(str, AXIS)), "--rounds", max(rounds, 3), "--json"]).splitlines()]
    return [row for line in lines for row in kernels.limit_rows(line)]


def amx(rounds):
    """What AMX brings: to prompts, whose attention is exact, and to attention on integers."""
    if not kernels.has_amx():
        return []
    rows = []
    for shape in ("dense", "moe"):
        folder, speeds = quickly(shape, "q4"), {"amx": [], "avx512": []}
        evict(folder)
        for _ in range(rounds):
            for isa, all in speeds.items():
                [line] = kernels.ours("prefill", folder, THREADS, "--tokens", PROMPT, "--no-roofline", SLUICE_ISA=isa)
                all.append(line["tokens_per_second"]["median"])
        rows.append(compare(SUITE, f"prefill {PROMPT} by AMX, {NAMES[shape]}, 4 bit", "speed", "tokens/s", speeds["amx"], speeds["avx512"], "VNNI alone", 2.2, threads=THREADS))
    return rows + kernels.amx(rounds)


def streamed(rounds):
    """A mixture at twice the memory that it is given, and its prompts in two gigabytes."""
    bundle, rows = quickly(GIANT, "q4-bundle"), []
    request = min(streamed_experts.REQUEST, streamed_experts.expert_bytes(bundle))
    for what, budget, words, more in (
        ("decode", size(bundle) // 2, "decode at twice the limit", ("--context", streamed_experts.CONTEXT, "--tokens", streamed_experts.GENERATED)),
        ("prefill", BUDGET, f"prompt of {PROMPT} in {BUDGET // 10**9} GB", ("--tokens", PROMPT)),
    ):
        mine, allowed, waits = [], [], []
        for _ in range(rounds):
            evict(bundle)
            disk = json.loads(output([SLUICE, "bench", "disk", bundle, "--request", request, "--depth", streamed_experts.DEPTH, "--order", "random", "--rounds", 1, "--json"]).splitlines()[-1])["bytes_per_second"]
            [line] = kernels.ours(what, bundle, THREADS, "--experts", "slots", "--memory-budget", budget, "--no-roofline", *more)
            reads, (compute, _) = line["experts"]["read_bytes"] / disk, streamed_experts.compute_of(line)
            mine.append(line["tokens_per_second"]["median"])
            allowed.append((line["tokens"] if what == "decode" else PROMPT) / max(reads, compute))
            waits.append(100 * reads / max(reads, compute))
        case = f"streamed, {STREAMED}, {words}"
        rows.append(compare(SUITE, case, "speed", "tokens/s", mine, allowed, "max(reads, compute)", 0.85, threads=THREADS))
        rows.append(compare(SUITE, case, "reads over the longer", "%", waits, None, "", threads=THREADS))
    return rows


def nodes(rounds, notes):
    """What it brings to spread memory over its nodes, and to copy the weights for each, on all threads."""
    if machine.nodes() < 2:
        notes.append("nodes: skipped: all memory is of one node")
        return []
    rows = []
    for shape in ("dense", "moe"):
        folder = quickly(shape, "q4")
        for what, words, more in (
            ("decode", "decode", ("--context", kernels.CONTEXT, "--tokens", kernels.GENERATED)),
            ("prefill", f"prefill {PROMPT}", ("--tokens", PROMPT)),
        ):
            case = f"nodes, {words}, {NAMES[shape]}, 4 bit"
            say(case)
            speeds = {how: [] for how in ("off", "spread", "replicate")}
            for _ in range(rounds):
                for how, all in speeds.items():
                    # What the page cache holds stays on its node: each has the weights read anew.
                    evict(folder)
                    [line] = kernels.ours(what, folder, THREADS, "--numa", how, "--no-roofline", *more)
                    all.append(line["tokens_per_second"]["median"])
            off = speeds.pop("off")
            rows += [compare(SUITE, f"{case}, {how}", "speed", "tokens/s", mine, off, "left to the kernel", threads=THREADS) for how, mine in speeds.items()]
    return rows


def beside_others(rounds):
    """Decode with all threads while others use half of the processors, and while a second engine with as many threads runs."""
    folder, case = quickly("dense", "q4"), f"beside others, decode, {NAMES['dense']}, 4 bit"
    evict(folder)
    command = [str(x) for x in (SLUICE, "bench", "decode", folder, "--threads", THREADS, "--rounds", 3, "--no-roofline", "--json", "--context", kernels.CONTEXT, "--tokens", 128)]
    say(case)

    def engines(n):
        """Tokens per second of engines that begin together, medians of their rounds."""
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(n)]
        return [json.loads(engine.communicate()[0].splitlines()[-1])["tokens_per_second"]["median"] for engine in running]

    alone, beside_loops, both = [], [], []
    for _ in range(rounds):
        alone += engines(1)
        with busy(THREADS // 2):
            beside_loops += engines(1)
        # The slower of the two engines counts.
        both.append(min(engines(2)))
    return [
        compare(SUITE, f"{case}, {THREADS // 2} busy loops", "speed", "tokens/s", beside_loops, [median(alone)] * rounds, "alone", 0.5, threads=THREADS),
        compare(SUITE, f"{case}, a second engine", "speed of the slower", "tokens/s", both, [median(alone)] * rounds, "alone", 0.5, threads=THREADS),
    ]
