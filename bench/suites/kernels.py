"""Decode, prefill and memory of a model that is in memory already, at equal bits and threads. The goals are those that the project set itself for its CPU kernels."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from chart import Chart
from findings import Pick, bars, goals, having, said
from models import evict, model, model_path, size
from peers import LLAMA, PYTHON, SLUICE, Died, Peer, answer, died
from results import compare
from scratch import ROOT, output, say

TITLE = "Kernels: decode, prefill, memory"
SUITE = "kernels"
CONTEXT, GENERATED, PROMPT = 128, 64, 512
THREADS = len(os.sched_getaffinity(0))
NAMES = {"dense": "Qwen3-0.6B", "moe": "MoE, 6 layers of 30B-A3B", "hybrid": "hybrid, 8 layers of Qwen3-Next"}
BITS = {"q4": "4 bit", "q8": "8 bit", "q2": "2 bit", "bf16": "bf16"}


@dataclass
class Decode:
    shape: str
    ours: str
    theirs: str
    threads: int
    # Goals: our speed over llama.cpp's, and the share of the read bandwidth.
    goal: float | None = None
    limit: float | None = None
    transformers: bool = False
    quick: bool = False

    @property
    def name(self):
        return f"decode {self.shape} {self.ours} {self.threads}"


@dataclass
class Prefill:
    shape: str
    ours: str
    theirs: str
    threads: int
    # Goals: our speed over each peer's, and the share of our own peak arithmetic.
    goal: float | None = None
    limit: float | None = None
    transformers: bool = False
    quick: bool = False

    @property
    def name(self):
        return f"prefill {self.shape} {self.ours} {self.threads}"


DECODES = [
    Decode("dense", "q4", "Q4_0", 1, 1.5, 0.9),
    Decode("dense", "q4", "Q4_0", THREADS, 1.4, 0.9, quick=True),
    Decode("dense", "q8", "Q8_0", THREADS, 1.25),
    Decode("dense", "q2", "Q2_K", THREADS, 2.0, 0.65),
    Decode("dense", "bf16", "BF16", THREADS, None, 0.94, transformers=True),
    Decode("moe", "q4", "Q4_0", THREADS, 1.8, 0.9, quick=True),
    Decode("hybrid", "q4", "Q4_0", THREADS, 1.5, quick=True),
]
PREFILLS = [
    Prefill("dense", "q4", "Q4_0", THREADS, 3.0, 0.55, quick=True),
    Prefill("moe", "q4", "Q4_0", THREADS, 5.0, quick=True),
    Prefill("hybrid", "q4", "Q4_0", THREADS, 4.0, quick=True),
    Prefill("dense", "bf16", "BF16", THREADS, 1.5, transformers=True),
]
# The numbers of threads at which decode and prefill are measured.
AXIS = [1 << n for n in range(THREADS.bit_length()) if 1 << n < THREADS]
DECODES += [Decode(shape, "q4", "Q4_0", t, goal, 0.9) for shape, goal in (("dense", 1.4), ("moe", 1.8)) for t in AXIS if (shape, t) != ("dense", 1)]
PREFILLS += [Prefill(shape, "q4", "Q4_0", t, goal) for shape, goal in (("dense", 3.0), ("moe", 5.0)) for t in AXIS]
# A long prompt, and attention on integers for it.
LONG = 8192
# Activations nearer to f32, and the shares of int8's speed that they should have.
FINE = "int11"
FINE_DECODE, FINE_PROMPT = 0.95, 0.6


PICKS = [
    *(
        Pick(f"Decode {bits}, {NAMES[shape]}", f"decode, {NAMES[shape]}, {bits}", "speed", "llama.cpp", THREADS, front=front)
        for shape, bits, front in (
            ("dense", "4 bit", "Decode, 0.6B dense"),
            ("dense", "8 bit", ""),
            ("dense", "2 bit", ""),
            ("dense", "bf16", ""),
            ("moe", "4 bit", "Decode, mixture of experts"),
            ("hybrid", "4 bit", "Decode, hybrid"),
        )
    ),
    Pick(f"Speed kept at 8k, 4 bit, {NAMES['dense']}", f"decode at 8k over decode at 1k, {NAMES['dense']}, 4 bit", "speed kept", "llama.cpp"),
    *(
        Pick(f"Prompt {bits}, {NAMES[shape]}", f"prefill {PROMPT}, {NAMES[shape]}, {bits}", "speed", "llama.cpp", THREADS, front=front)
        for shape, bits, front in (
            ("dense", "4 bit", "Prompt, 0.6B dense"),
            ("dense", "bf16", ""),
            ("moe", "4 bit", "Prompt, mixture of experts"),
            ("hybrid", "4 bit", "Prompt, hybrid"),
        )
    ),
    Pick(f"Memory 4 bit, {NAMES['moe']}", f"memory, {NAMES['moe']}, 4 bit", "peak resident", "llama.cpp", less=True),
]


def picks(_):
    """Rows that charts show."""
    return PICKS


def charts(rows):
    under = f"Speed over llama.cpp's, or its memory over ours, at equal bits; prompts of {PROMPT} tokens; models in memory, random weights of real dimensions."
    return {"": Chart("Kernels, beside llama.cpp", bars(rows, picks(rows)), under=under)}


def found(rows):
    """What the figures say, a line each."""
    prompt, decoded = f"prefill {PROMPT}", having(rows, "decode, ", "speed", "llama.cpp")
    without_amx = [row for row in having(rows, prompt, "operations") if not row.peer_name.endswith("AMX")]
    kept, memory = having(rows, "decode at 8k", peer="llama.cpp"), having(rows, "memory", peer="llama.cpp")
    return [
        *said("Decode runs at {spread} times llama.cpp's speed at equal bits and threads, in {cases}; goals met: {goals}.", decoded),
        *said(f"A prompt of {PROMPT} tokens runs at {{spread}} times its speed, in {{cases}}; goals met: {{goals}}.", having(rows, prompt, "speed", "llama.cpp")),
        *said("Against transformers (bf16): {spread} times its speed.", having(rows, peer="transformers")),
        *said("Decode uses {percent} of the bandwidth of a plain read; goals met: {goals}.", having(rows, "decode", peer="read limit")),
        *said("Prompts reach {percent} of the processor's peak without AMX; goals met: {goals}.", without_amx),
        *said("Activations in int11 instead of int8 leave {percent} of the speed; goals met: {goals}.", having(rows, peer="with int8")),
        *said("At 8k of context decode keeps {spread} times as much of its speed at 1k as llama.cpp does.", kept),
        *said("A mixture of experts takes {spread} times less memory than in llama.cpp, which repacks it: only its file, keys and values, and scratch.", memory, less=True),
        f"All goals together: {goals(rows)} met.",
    ]


def cases(quick):
    found = {"limits": True}
    found |= {c.name: c.quick or found.get(c.name, False) for c in DECODES}
    found |= {c.name: c.quick for c in PREFILLS}
    found |= {"context": False, "long prompts": False, "memory": True, "mlx": False, FINE: False}
    if has_amx():
        found["amx"] = False
    return [name for name, in_quick in found.items() if in_quick or not quick]


def has_amx():
    return "amx_int8" in Path("/proc/cpuinfo").read_text()


def levels():
    """The instruction sets whose int8 and int11 are compared, best first."""
    flags = Path("/proc/cpuinfo").read_text()
    return [level for level, flag in (("amx", "amx_int8"), ("avx512", "avx512_vnni"), ("avx2", "avx2")) if flag in flags]


def run(names, quick, rounds, parts):
    rows, notes = [], []
    what = {"limits": lambda: limits(rounds), "context": lambda: context(rounds), "memory": memory, "mlx": mlx}
    what |= {"long prompts": lambda: long_prompts(rounds), "amx": lambda: amx(rounds), FINE: lambda: finely(rounds, levels())}
    what |= {c.name: lambda c=c: decode(c, rounds) for c in DECODES}
    what |= {c.name: lambda c=c: prefill(c, rounds) for c in PREFILLS}
    for name in names:
        rows += parts.measure(name, what[name], notes)
    for shape in ("dense", "moe"):
        rows += scaling(rows, f"prefill {PROMPT}, {NAMES[shape]}, 4 bit")
    for shape, ours, theirs in sorted({(c.shape, c.ours, c.theirs) for c in [*DECODES, *PREFILLS] if c.name in names}):
        paths = model_path(shape, ours), model_path(shape, theirs)
        if all(path.exists() for path in paths):
            notes.append(f"{NAMES[shape]}, {BITS[ours]}: {size(paths[0]) / 1e6:.0f} MB for Sluice, {size(paths[1]) / 1e6:.0f} MB as {theirs}")
    notes.append(f"decode: {GENERATED} tokens behind {CONTEXT}; KV in bf16 (Sluice) and f16 (llama.cpp); llama.cpp with its repacking, flash attention as it chooses")
    return rows, notes


# --- one measurement each; tokens per second


def ours(what, path, threads, *more, **environment):
    """One line of JSON of `sluice bench`, the last."""
    command = [SLUICE, "bench", what, path, "--threads", threads, "--rounds", 1, "--json", *more]
    return [json.loads(line) for line in output(command, **environment).splitlines()]


def llama(path, threads, prompt=0, generated=0, depths=(0,)):
    """Tokens per second at each depth, by the CPU alone: with `-ngl 0` a build for GPUs still takes prompts there."""
    options = ["-m", path, "-t", threads, "-p", prompt, "-n", generated, "-d", ",".join(map(str, depths)), "-ngl", 0, "-r", 1, "-o", "json"]
    return LLAMA.attempt(lambda bench: answer(["env", "CUDA_VISIBLE_DEVICES=", bench, *options], lambda text: [test["avg_ts"] for test in json.loads(text)]))


def python_peer(name, path, threads, prompt, context, generated):
    command = [PYTHON, ROOT / "bench" / f"with_{name}.py", path, threads, prompt, context, generated]
    return answer(command, lambda text: json.loads(text.splitlines()[-1]))


def peak_memory(command):
    """Highest resident set of a process, in bytes."""
    with tempfile.TemporaryFile() as sink:
        process = subprocess.Popen([str(c) for c in command], stdout=sink, stderr=sink)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        sink.seek(0)
        said = sink.read().decode(errors="replace")
    if process.returncode != 0:
        raise died(process.returncode, said)
    return usage.ru_maxrss * 1024


# --- figures


def limits(rounds):
    lines = [json.loads(x) for x in output([SLUICE, "bench", "roofline", "--threads", f"1,{THREADS}", "--rounds", max(rounds, 5), "--json"]).splitlines()]
    return [row for line in lines for row in limit_rows(line)]


def limit_rows(line):
    """Of a line of `sluice bench roofline`."""
    rows = []
    for name, value in line.items():
        if name.endswith("_per_second") and value:
            what, scale = ("read, GB/s", 1e9) if name.startswith("read") else (name.split("_")[0] + " dot products, TOPS", 1e12)
            figure, unit = what.split(", ")
            rows.append(compare(SUITE, "limits", figure, unit, [value["median"] / scale], None, "", threads=line["threads"]))
    return rows


def decode(c, rounds):
    case = f"decode, {NAMES[c.shape]}, {BITS[c.ours]}"
    say(f"{case}, {c.threads} threads")
    folder, file = model(c.shape, c.ours), model(c.shape, c.theirs)
    evict(folder)
    mine, read, used = [], [], []
    theirs, torch = Peer(), Peer()
    for _ in range(rounds):
        [line] = ours("decode", folder, c.threads, "--context", CONTEXT, "--tokens", GENERATED)
        mine.append(line["tokens_per_second"]["median"])
        used.append(mine[-1] * line["weight_bytes_per_token"] / 1e9)
        read.append(line["read_bytes_per_second"]["median"] / 1e9)
        theirs.measure(lambda: llama(file, c.threads, generated=GENERATED, depths=[CONTEXT])[0])
        if c.transformers:
            torch.measure(lambda: python_peer("transformers", folder, c.threads, 0, CONTEXT, GENERATED)["decode"])
    rows = [compare(SUITE, case, "speed", "tokens/s", mine, theirs.all, LLAMA.name(c.theirs), c.goal, threads=c.threads, died=theirs.died)]
    if c.transformers:
        rows.append(compare(SUITE, case, "speed", "tokens/s", mine, torch.all, "transformers", threads=c.threads, died=torch.died))
    rows.append(compare(SUITE, case, "weights read", "GB/s", used, read, "read limit", c.limit, threads=c.threads))
    return rows


def prefill(c, rounds):
    case = f"prefill {PROMPT}, {NAMES[c.shape]}, {BITS[c.ours]}"
    say(f"{case}, {c.threads} threads")
    folder, file = model(c.shape, c.ours), model(c.shape, c.theirs)
    evict(folder)
    mine, done, peak, tiles = [], [], [], []
    theirs, torch = Peer(), Peer()
    for _ in range(rounds):
        [line] = ours("prefill", folder, c.threads, "--tokens", PROMPT)
        mine.append(line["tokens_per_second"]["median"])
        done.append(line["operations_per_second"]["median"] / 1e12)
        peak.append(line["peak_operations_per_second"]["median"] / 1e12)
        if amx := line.get("amx_peak_operations_per_second"):
            tiles.append(amx["median"] / 1e12)
        theirs.measure(lambda: llama(file, c.threads, prompt=PROMPT)[0])
        if c.transformers:
            torch.measure(lambda: python_peer("transformers", folder, c.threads, PROMPT, 0, 0)["prefill"])
    rows = [compare(SUITE, case, "speed", "tokens/s", mine, theirs.all, LLAMA.name(c.theirs), c.goal, threads=c.threads, died=theirs.died)]
    if c.transformers:
        rows.append(compare(SUITE, case, "speed", "tokens/s", mine, torch.all, "transformers", c.goal, threads=c.threads, died=torch.died))
    rows.append(compare(SUITE, case, "operations", "TOPS", done, peak, f"{line['arithmetic']} peak", c.limit, threads=c.threads))
    if tiles:
        rows.append(compare(SUITE, case, "operations", "TOPS", done, tiles, "int8 peak by AMX", threads=c.threads))
    return rows


def scaling(rows, case):
    """How the speed grows from one thread to all, where both were measured."""
    speed = {row.threads: row.ours for row in rows if row.case == case and row.figure == "speed"}
    if THREADS < 2 or not {1, THREADS} <= speed.keys():
        return []
    return [compare(SUITE, case, "speed of all threads", "tokens/s", [speed[THREADS]], [THREADS * speed[1]], f"{THREADS} times one's", 0.75, threads=THREADS)]


def context(rounds):
    case = f"decode at 8k over decode at 1k, {NAMES['dense']}, 4 bit"
    say(case)
    evict(model("dense", "q4"))
    mine, theirs = [], Peer()

    def kept():
        short, long = llama(model("dense", "Q4_0"), THREADS, generated=32, depths=[1024, 8192])
        return long / short

    for _ in range(rounds):
        short, long = ours("decode", model("dense", "q4"), THREADS, "--context", "1024,8192", "--tokens", 32, "--no-roofline")
        mine.append(long["tokens_per_second"]["median"] / short["tokens_per_second"]["median"])
        theirs.measure(kept)
    return [compare(SUITE, case, "speed kept", "of 1", mine, theirs.all, LLAMA.name("Q4_0"), 1.1, threads=THREADS, died=theirs.died)]


def long_prompts(rounds):
    """How much of the speed at 512 tokens a long prompt keeps, and its speed beside llama.cpp's."""
    folder, file, name = model("dense", "q4"), model("dense", "Q4_0"), f"{NAMES['dense']}, 4 bit"
    say(f"prefill {LONG}, {name}")
    evict(folder)
    exact, integers, theirs = [], [], Peer()

    def speed(tokens, *more):
        [line] = ours("prefill", folder, THREADS, "--tokens", tokens, "--no-roofline", *more)
        return line["tokens_per_second"]["median"]

    for _ in range(min(rounds, 3)):
        exact.append((speed(PROMPT), speed(LONG)))
        integers.append((speed(PROMPT, "--attention", "int8"), speed(LONG, "--attention", "int8")))
        theirs.measure(lambda: llama(file, THREADS, prompt=LONG)[0])
    rows = []
    for mine, how, kept in ((exact, "exact", 0.5), (integers, "attention on integers", 0.75)):
        case = f"prefill {LONG}, {name}, {how}"
        rows.append(compare(SUITE, case, "speed", "tokens/s", [long for _, long in mine], theirs.all, LLAMA.name("Q4_0"), 3.0, threads=THREADS, died=theirs.died))
        rows.append(compare(SUITE, case, "speed kept", "tokens/s", [long for _, long in mine], [short for short, _ in mine], f"{PROMPT} tokens", kept, threads=THREADS))
    return rows


def amx(rounds):
    """What AMX brings to attention on integers."""
    case, folder = f"prefill {LONG} by AMX, {NAMES['dense']}, 4 bit, attention on integers", model("dense", "q4")
    say(case)
    evict(folder)
    speeds = {isa: [] for isa in ("amx", "avx512")}
    for _ in range(min(rounds, 3)):
        for isa, all in speeds.items():
            [line] = ours("prefill", folder, THREADS, "--tokens", LONG, "--attention", "int8", "--no-roofline", SLUICE_ISA=isa)
            all.append(line["tokens_per_second"]["median"])
    return [compare(SUITE, case, "speed", "tokens/s", speeds["amx"], speeds["avx512"], "VNNI", threads=THREADS)]


def finely(rounds, levels, model=model):
    """What is left of int8's speed where activations are int11, on each instruction set."""
    rows = []
    for shape in ("dense", "moe"):
        folder = model(shape, "q4")
        evict(folder)
        for level in levels:
            for what, words, goal, more in (
                ("decode", "decode", FINE_DECODE, ("--context", CONTEXT, "--tokens", GENERATED)),
                ("prefill", f"prefill {PROMPT}", FINE_PROMPT, ("--tokens", PROMPT)),
            ):
                case = f"{words}, {NAMES[shape]}, 4 bit, {FINE} on {level}"
                say(case)
                speeds = {FINE: [], "int8": []}
                for _ in range(rounds):
                    for mode, all in speeds.items():
                        [line] = ours(what, folder, THREADS, "--no-roofline", "--activations", mode, *more, SLUICE_ISA=level)
                        all.append(line["tokens_per_second"]["median"])
                rows.append(compare(SUITE, case, "speed", "tokens/s", speeds[FINE], speeds["int8"], "with int8", goal, threads=THREADS))
    return rows


def memory():
    case = f"memory, {NAMES['moe']}, 4 bit"
    say(case)
    folder, file = model("moe", "q4"), model("moe", "Q4_0")
    more = ["--context", CONTEXT, "--tokens", 8, "--no-roofline"]
    try:
        mine = peak_memory([SLUICE, "bench", "decode", folder, "--threads", THREADS, "--rounds", 1, "--json", *more]) / 1e6
    except Died as why:
        sys.exit(f"bench: sluice failed: {why}")
    [line] = ours("decode", folder, THREADS, *more)
    accounted = line["memory"]
    # An image that a reader filled counts as copied, and is the file; what is widened beside it is small.
    weights = max(size(folder), accounted["weights_mapped"] + accounted["weights_copied"])
    allowed = (weights + accounted["scratch"] + line["cache_bytes_per_token"]) / 1e6
    theirs = Peer()
    theirs.measure(lambda: LLAMA.attempt(lambda bench: peak_memory([bench, "-m", file, "-t", THREADS, "-p", CONTEXT, "-n", 8, "-ngl", 0, "-r", 1]) / 1e6))
    return [
        compare(SUITE, case, "peak resident", "MB", [mine], theirs.all, LLAMA.name("Q4_0, repacked"), threads=THREADS, died=theirs.died),
        # The rest is the program itself.
        compare(SUITE, case, "peak resident", "MB", [mine], [allowed], "file, KV and scratch", 1.02, above=False, threads=THREADS),
    ]


def mlx():
    case = f"{NAMES['dense']}, 4 bit, few tokens"
    say(f"mlx-lm, {case}")
    folder, prompt, generated = model("dense", "q4"), 16, 4
    theirs = Peer()
    theirs.measure(lambda: python_peer("mlx", folder, THREADS, prompt, prompt, generated))
    [decoded] = ours("decode", folder, THREADS, "--context", prompt, "--tokens", generated, "--no-roofline")
    [read] = ours("prefill", folder, THREADS, "--tokens", prompt, "--no-roofline")

    def beside(name, key, line):
        mine, other = [line["tokens_per_second"]["median"]], [x[key] for x in theirs.all]
        return compare(SUITE, f"{name}, {case}", "speed", "tokens/s", mine, other, "mlx-lm, float32", threads=THREADS, died=theirs.died)

    return [beside("decode", "decode", decoded), beside(f"prefill {prompt}", "prefill", read)]
