#!/usr/bin/env python3
"""What bounds each GPU kernel: NVIDIA's profiler over `sluice bench`, each kernel alone.

    bench/kernel_profile.py [--sluice BINARY] [--csv FOLDER [--driver VERSION] [--commit COMMIT] [--date DATE]]

Needs `ncu` and a GPU whose counters it may read. With --csv it measures nothing and takes what `ncu` has written already, FOLDER/NAME.csv or ncu-NAME.csv for each case; the
other options then say what those were made with. Writes docs/results/gpu-kernels.md and .json; `bench/run all --redraw` writes the page anew.
"""

import argparse
import csv
import datetime
import json
import math
import pathlib
import re
import sys
from collections import Counter
from statistics import median

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import machine  # noqa: E402
from chart import Amounts, Bar, Chart  # noqa: E402
from models import quickly  # noqa: E402
from peers import SLUICE  # noqa: E402
from results import RESULTS, lines, top  # noqa: E402
from scratch import DIR, Failed, run, say  # noqa: E402

NAME = "gpu-kernels"
# For each case its name on the page, and arguments of `sluice bench`: step, shape and form of the model, options.
CASES = {
    "small": ("token, 0.6B", "decode dense q4 --context 128 --tokens 4"),
    "deep": ("token, 0.6B behind 8,192", "decode dense q4 --context 8192 --tokens 4"),
    "bf16": ("token, 0.6B bf16", "decode dense bf16 --context 128 --tokens 4"),
    "large": ("token, 4B", "decode 4b q4 --context 128 --tokens 4"),
    "mixture": ("token, mixture", "decode moe q4 --context 128 --tokens 4"),
    "hybrid": ("token, hybrid", "decode hybrid q4 --context 128 --tokens 4"),
    "eight": ("8 sequences, mixture", "decode moe q4 --sequences 8 --context 128 --tokens 4 --top-k 20 --top-p 0.95"),
    "many": ("32 sequences, mixture", "decode moe q4 --sequences 32 --context 128 --tokens 4"),
    "prompt": ("prompt, 4B", "prefill 4b q4 --tokens 2048"),
    "mprompt": ("prompt, mixture", "prefill moe q4 --tokens 2048"),
    "iprompt": ("prompt, mixture with attention on integers", "prefill moe q4 --tokens 2048 --attention int8"),
    "hprompt": ("prompt, hybrid", "prefill hybrid q4 --tokens 2048"),
    "f32": ("prompt, 0.6B with f32 activations", "prefill dense q4 --tokens 64 --activations f32"),
    "halves": ("prompt, 0.6B bf16", "prefill dense bf16 --tokens 512"),
}
ALWAYS = ["--device", "cuda", "--no-roofline", "--rounds", "1"]

# What a warp waits for, in the profiler's words and in ours.
STALLS = {
    "barrier": "barriers",
    "long_scoreboard": "memory",
    "short_scoreboard": "shared memory",
    "wait": "the instruction before",
    "math_pipe_throttle": "arithmetic units",
    "mio_throttle": "the queue of shared memory",
    "lg_throttle": "the queue of memory",
    "no_instruction": "code",
    "not_selected": "its turn",
    "dispatch_stall": "dispatch",
    "membar": "fences",
    "imc_miss": "constants",
    "branch_resolving": "branches",
    "sleeping": "sleep",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
TIME = "gpu__time_duration.sum"
FIGURES = {
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "multiprocessors": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "slots": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
METRICS = [TIME, *FIGURES.values(), "launch__grid_size", "launch__block_size", *map(STALL.format, STALLS)]
# Launches of each kernel that are measured, counted by its name: the first one may be what loads its code.
WHICH = ":::2|3|4|5"
# From here on, in percent, a kernel is bound by what it uses.
BOUND = 60
SHOWN = 16


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sluice", default=str(SLUICE))
    parser.add_argument("--csv", type=pathlib.Path, help="a folder with what ncu has written already")
    parser.add_argument("--driver", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--date", default="")
    args = parser.parse_args()

    cases, made_on = {}, {}
    for name, (_, line) in CASES.items():
        rows, units = read(made(args.csv, name) if args.csv else measure(args.sluice, name, line))
        made_on = {"gpu": rows[0]["device__attribute_display_name"], "multiprocessors": int(number(rows[0]["device__attribute_multiprocessor_count"]))}
        cases[name] = {"command": line, "launches": launches(rows, units)}
    made_on["driver"] = args.driver or (machine.gpu() or "unknown").rpartition(", ")[2]
    made_on["commit"] = args.commit or machine.commit()
    made_on["date"] = args.date or datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    (RESULTS / f"{NAME}.json").write_text(written(made_on, cases))
    print(redraw().read_text())


def written(made_on, cases):
    """As JSON, with a line for each launch."""
    body = []
    for name, case in cases.items():
        each = ",\n".join(f"  {json.dumps(launch)}" for launch in case["launches"])
        body.append(f' {json.dumps(name)}: {{"command": {json.dumps(case["command"])}, "launches": [\n{each}\n ]}}')
    return json.dumps(made_on)[:-1] + ', "cases": {\n' + ",\n".join(body) + "\n}}\n"


def made(folder, name):
    """The file of a case, if it is there already."""
    found = next((path for path in (folder / f"{name}.csv", folder / f"ncu-{name}.csv") if path.exists()), None)
    if found is None:
        raise Failed(f"bench: {folder}: no {name}.csv")
    return found


def measure(sluice, name, line):
    """The file that the profiler writes of a case."""
    what, shape, form, *more = line.split()
    path = DIR / "profiles" / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    say(f"profiling {line}")
    # The clocks stay as they are, as in the engine.
    profiler = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--metrics", ",".join(METRICS), "--kernel-id", WHICH, "--log-file", path]
    run([*profiler, sluice, "bench", what, quickly(shape, form), *more, *ALWAYS], f"ncu-{name}.log")
    return path


# --- what the profiler says


def read(path):
    """Rows of launches, and the row of their units. What the profiler has to say besides begins with ==."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("==")))
    if len(rows) < 2:
        raise Failed(f"bench: {path}: the profiler has measured no kernel")
    return rows[1:], rows[0]


def number(text):
    return float((text or "0").replace(",", ""))


def sides(text):
    """`(128, 8, 1)`, as numbers."""
    return [int(n) for n in re.findall(r"\d+", text)]


def launches(rows, units):
    """Kernels by name and shape of their launch, medians of those that were seen; the longest first."""
    scale, groups = {"ns": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "s": 1e6}[units[TIME]], {}
    for row in rows:
        groups.setdefault((row["Kernel Name"], row["Grid Size"], row["Block Size"]), []).append(row)
    found = []
    for (kernel, grid, block), seen in groups.items():
        middle = lambda column: median(number(row[column]) for row in seen)  # noqa: E731
        launch = {"kernel": kernel, "grid": sides(grid), "block": sides(block), "seen": len(seen), "us": round(middle(TIME) * scale, 2)}
        launch |= {name: round(middle(column), 1) for name, column in FIGURES.items()}
        launch["registers"] = int(launch["registers"])
        stalls = sorted(((round(middle(STALL.format(name)), 2), name) for name in STALLS), reverse=True)
        launch["stalls"] = [[name, cycles] for cycles, name in stalls[:2]]
        found.append(launch)
    return sorted(found, key=lambda launch: -launch["us"])


def bound(launch, multiprocessors):
    """What bounds it, by the rule of the page."""
    if launch["memory"] >= BOUND:
        return "memory"
    if launch["slots"] >= BOUND:
        return "instructions"
    if math.prod(launch["grid"]) < multiprocessors:
        return "too few blocks"
    # A warp that is ready and waits for its turn waits for no latency.
    return "latency: " + next(STALLS[name] for name, _ in launch["stalls"] if name != "not_selected")


# --- the page


def redraw():
    """The page and its chart, from gpu-kernels.json."""
    data = json.loads((RESULTS / f"{NAME}.json").read_text())
    cases, limit = [{"title": CASES[name][0], **case} for name, case in data["cases"].items()], data["multiprocessors"]
    prompts = of_prompts(cases)
    every = [(launch, title(case, launch["kernel"] in prompts)) for case in cases for launch in case["launches"]]
    page = top(NAME, "Each GPU kernel by the profiler", {"": chart(longest(every))}, found(cases, every, limit))
    page += f"\nMeasured {data['date']} at commit {data['commit']}: {data['gpu']}, {limit} multiprocessors, driver {data['driver']}.\n"
    page += f"\n## How it was measured\n\n{how(limit)}\n"
    for case in cases:
        page += f"\n## {case['title'][0].upper()}{case['title'][1:]}\n\n`sluice bench {case['command']}`\n\n"
        page += lines(HEAD, [cells(launch, limit) for launch in case["launches"]])
    path = RESULTS / f"{NAME}.md"
    path.write_text(page)
    return path


HEAD = ["kernel", "launch: blocks x threads, registers", "us", "memory %", "issue slots %", "warps %", "waits for", "bound by"]


def cells(launch, multiprocessors):
    waits = ", ".join(f"{STALLS[name]} {cycles:.1f}" for name, cycles in launch["stalls"])
    shape = f"{math.prod(launch['grid']):,} x {math.prod(launch['block']):,}, {launch['registers']}"
    shares = [f"{launch[name]:.1f}" for name in ("memory", "slots", "warps")]
    return [f"`{launch['kernel']}`", shape, us(launch["us"]), *shares, waits, bound(launch, multiprocessors)]


def us(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}"


def longest(every):
    """The longest launch of each kernel, with its case; the longest first."""
    best = {}
    for launch, title in every:
        if launch["kernel"] not in best or launch["us"] > best[launch["kernel"]][0]["us"]:
            best[launch["kernel"]] = launch, title
    return sorted(best.values(), key=lambda one: -one[0]["us"])


def chart(kernels):
    bars = [Bar(f"{k['kernel']}, {title}, {us(k['us'])} us", max(k["memory"], k["slots"]), other=k["memory"] > k["slots"]) for k, title in kernels[:SHOWN]]
    under = f"The longest launch of each kernel, the {len(bars)} longest of them: issue slots used or memory's throughput, whichever is more, in percent of what there is."
    return Chart("What the longest GPU kernels use", bars, Amounts("%", end=100.0), under, ("issue slots", "memory"))


def title(case, of_prompt):
    """What a kernel's case is called: in one of tokens, those of the prompt before them are no token's."""
    behind = re.search(r"--context (\d+)", case["command"])
    return f"prompt of {int(behind[1]):,}, {case['title'].partition(', ')[2]}" if behind and of_prompt else case["title"]


def of_prompts(cases):
    """Names of kernels that compute prompts: those that are in a case of one, and products in tiles, whose shape depends on the prompt's length (`tiles_*` is their name in older results)."""
    names = {launch["kernel"] for case in cases for launch in case["launches"]}
    seen = {launch["kernel"] for case in cases if case["command"].startswith("prefill") for launch in case["launches"]}
    return seen | {name for name in names if name.startswith(("gemm_mma", "tiles_"))}


def found(cases, every, multiprocessors):
    """What the figures say, a line each."""
    kernels = longest(every)
    by = Counter(bound(launch, multiprocessors).partition(":")[0] for launch, _ in kernels)
    waits = Counter(bound(launch, multiprocessors) for launch, _ in kernels if bound(launch, multiprocessors).startswith("latency"))
    most = ", ".join(f"{why.partition(': ')[2]} {n}" for why, n in waits.most_common(3))
    prompts = of_prompts(cases)
    own = lambda case: [launch for launch in case["launches"] if case["command"].startswith("prefill") or launch["kernel"] not in prompts]  # noqa: E731
    kinds = {
        "a token": [case for case in cases if case["command"].startswith("decode") and "--sequences" not in case["command"]],
        "a step of several sequences": [case for case in cases if "--sequences" in case["command"]],
        "a prompt": [case for case in cases if case["command"].startswith("prefill")],
    }
    said = [
        f"{len(kernels)} kernels in {len({(k['kernel'], *k['grid'], *k['block']) for k, _ in every})} shapes of launch. By the longest launch of each, {by['memory']} {'is' if by['memory'] == 1 else 'are'} bound by memory, "
        f"{by['instructions']} by instructions, {by['too few blocks']} by too few blocks, and {by['latency']} by latency ({most}).",
    ]
    for kind, of in kinds.items():
        names = {}
        for case in of:
            launch = own(case)[0]
            of_what = case["title"].removeprefix(f"{kind.split()[-1]}, ")
            names.setdefault((launch["kernel"], bound(launch, multiprocessors)), []).append(f"{of_what}: {us(launch['us'])} us")
        said.append(f"The longest kernels of {kind}: " + "; ".join(f"`{kernel}`, {why} ({', '.join(where)})" for (kernel, why), where in names.items()) + ".")
    tokens = [(launch, case["title"]) for case in kinds["a token"] for launch in own(case)]
    most_memory, where = max(tokens, key=lambda one: one[0]["memory"])
    said.append(f"A token's own kernels use at most {most_memory['memory']:.0f} % of memory's throughput (`{most_memory['kernel']}`, {where}) and {max(k['slots'] for k, _ in tokens):.0f} % of the issue slots.")
    said.append("Kernels of experts in tiers are missing: they wait for the host, so the profiler cannot repeat them. [gpu-profile.md](gpu-profile.md) has their times.")
    return said


def how(multiprocessors):
    always = " ".join(ALWAYS)
    return f"""`bench/kernel_profile.py` runs the commands below under `ncu`, each with `{always}`. The profiler runs each kernel alone, one after the other, several times for all of its counters. Clocks are not
locked, and the caches are emptied before each run. So times are longer than in the engine. Kernels of a token that overlap there, or fetch weights while their predecessor ends, do not overlap here.

The second to the fifth launch of each kernel are measured, counted by its name. Launches of the same kernel and shape are one row, with medians; the longest come first. So one row may be
several matrices, and a kernel's later shapes may be missing: the head of a token, for one.

- *Memory %*: the throughput of the device's memory, relative to its peak.
- *Issue slots %*: the share of cycles that issue an instruction, on multiprocessors that have a block.
- *Warps %*: the share of the warps that a multiprocessor can hold.
- *Waits for*: the two main reasons why a warp issues nothing, in waiting cycles per issued instruction. *Memory* is the device's memory and its caches. *The instruction before* is a fixed
  latency. *Code* is instructions that are not in the cache. *Its turn* is a ready warp while another one issues.
- *Bound by* follows from these: memory if memory % is {BOUND} or more; else instructions if issue slots % is {BOUND} or more; else too few blocks if the launch has fewer than the GPU has
  multiprocessors ({multiprocessors}); else latency, with the main reason to wait other than its turn.

Cases of tokens also have kernels of the preceding prompt, which the same process computes: those that occur in a case of a prompt as well, and `gemm_mma_*` (`tiles_*` in older results). Weights are random, of real dimensions: 0.6B and 4B are whole,
the mixture is six layers of 30B-A3B, the hybrid eight of Qwen3-Next with a quarter of its experts."""


if __name__ == "__main__":
    main()
