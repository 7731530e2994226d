"""Loading, cold and warm: each way of reading beside the disk's own speed, memory, first tokens beside other programs', and keys and values that are reserved beside
those that grow. The goals are those that the project set itself."""

import json
import mmap
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import scratch
from chart import Chart
from findings import Pick, bars, goals, having, said
from models import bytes_of, model, size
from peers import LLAMA, PYTHON, SLUICE, Died, Peer, died
from results import compare, lines
from scratch import ROOT, output, say

TITLE = "Loading: time, first token, memory"
SUITE = "loading"
PROMPT, GENERATED = 34, 64
THREADS = len(os.sched_getaffinity(0))
# Qwen3's dimensions, random weights: ours and the nearest of llama.cpp's formats.
VARIANTS = [
    ("4b", "q4", "Q4_0"),
    ("4b", "q8", "Q8_0"),
    ("8b", "q3", "Q3_K"),
    ("8b", "q4", "Q4_0"),
    ("8b", "q6", "Q6_K"),
    ("8b", "q8", "Q8_0"),
    ("14b", "q4", "Q4_0"),
    ("14b", "q6", "Q6_K"),
]
QUICK = ("4b", "q4")
# In the README's chart.
FRONT = [("4b", "q4"), ("14b", "q4")]
# Published on another machine (MLX's loaders, warm): seconds of the default loader and of the mapped one, and peak memory in GB of both.
PUBLISHED = {
    ("4b", "q4"): (0.101, 0.131, 2.38, 2.38),
    ("4b", "q8"): (0.184, 0.246, 4.37, 4.37),
    ("8b", "q3"): (0.146, 0.075, 4.37, 4.37),
    ("8b", "q4"): (0.352, 0.328, 4.72, 8.82),
    ("8b", "q6"): (0.637, 0.435, 8.82, 8.82),
    ("8b", "q8"): (2.572, 0.125, 8.82, 8.84),
    ("14b", "q4"): (2.323, 0.535, 8.84, 11.09),
    ("14b", "q6"): (3.701, 5.388, 12.08, 12.16),
}
KV_VARIANTS = [("4b", "q4"), ("8b", "q4"), ("14b", "q4")]
MADV_POPULATE_WRITE = 23
# Seconds after which a peer that has no token yet is stopped, and not started again: what is shown is then a bound.
LIMIT = 60
# What decode reads must stay in memory beside page cache of as much again.
ROOM = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 0.4


def title(shape, form):
    return f"Qwen3-{shape.upper()}, {form[1:]} bit"


def picks(rows):
    """The first token beside the best peer of the same speed behind it, whichever that was."""
    found = []
    for shape, form, _ in VARIANTS:
        for state, front in (("cold", f"First token, {shape.upper()} dense, cold start"), ("warm", "")):
            case = f"{title(shape, form)}, {state}, from the start"
            best = next((r.peer_name for r in rows if r.case == case and "the best at full speed" in r.peer_name), None)
            if best:
                found.append(Pick(f"{title(shape, form)}, {state}", case, "first token", best, front=front if (shape, form) in FRONT and best.startswith("llama.cpp") else ""))
    return found


def charts(rows):
    under = "Time to first token of llama.cpp or torch over ours, whichever is quicker and then runs at full speed (repacked). From the start of the process, and cold: nothing of the model in the page cache."
    return {"": Chart("Time to the first token of a new process", bars(rows, picks(rows)), under=under)}


def found(rows):
    """What the figures say, a line each."""
    first, auto = [p.of(rows) for p in picks(rows)], having(rows, "Qwen3", "first token", "best of three")
    others = [r for r in having(rows, figure="first token") if "from the start" in r.case and r not in first]
    speed = [r for r in having(rows, figure="generation", peer="mmap") if "auto" in r.case]
    return [
        *said("Time to first token of a new process is {spread} times lower than that of the best peer that then runs at full speed, in {cases}; goals met: {goals}.", first),
        *said("Against llama.cpp's other ways to load, torch, and mlx-lm where it was not stopped: {spread} times.", others),
        *said("Cold, `direct` reads at {percent} of the disk's speed; goals met: {goals}.", having(rows, figure="read", peer="disk alone")),
        *said("`auto`, which chooses in advance, takes {percent} of the time of the best of the three readers; goals met: {goals}.", auto),
        *said("Memory while loading is {percent} of the weights with every reader: none makes a second copy.", having(rows, figure="peak of loading")),
        *said("After `auto`, generation runs at {percent} of its speed after a map; goals met: {goals} (the machine's noise exceeds 3 %).", speed),
        *said("Warm, a first token's cost beyond its compute is {percent} of the allowed 150 ms; goals met: {goals}.", having(rows, figure="first token beyond")),
        *said("With keys and values reserved in advance, a first token takes {percent} of the time, for more memory.", having(rows, figure="first token", peer="dynamic")),
        f"All goals together: {goals(rows)} met.",
    ]


def cases(quick):
    return [f"{shape} {ours}" for shape, ours, _ in VARIANTS if not quick or (shape, ours) == QUICK]


def run(names, quick, rounds, parts):
    rows, notes = [], []
    for shape, ours, theirs in VARIANTS:
        name = f"{shape} {ours}"
        if name not in names:
            continue
        if bytes_of(shape, ours) > ROOM:
            notes.append(f"left out: Qwen3-{shape.upper()}, {ours[1:]} bit, which with its page cache does not fit this memory")
            continue
        had = [p.exists() for p in (model_path(shape, ours), model_path(shape, theirs))]
        rows += parts.measure(f"{name} loads", lambda: loads(shape, ours, rounds), notes)
        rows += parts.measure(f"{name} left", lambda: left(shape, ours, rounds), notes)
        if (shape, ours) in KV_VARIANTS:
            rows += parts.measure(f"{name} kv", lambda: reserved(shape, ours, rounds), notes)
        rows += parts.measure(f"{name} starts", lambda: starts(shape, ours, theirs, rounds, quick), notes)
        # Disks are small, so large models that were made for this variant alone are removed.
        for form, before in zip((ours, theirs), had):
            path = model_path(shape, form)
            if not before and not quick and path.exists() and size(path) > 3e9:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    notes.append(f"first token: from the start of the process, {PROMPT} tokens of prompt; speeds over {GENERATED} tokens behind it")
    notes.append("before each case memory is taken and given back, so that no case pays for what a hypervisor had reclaimed")
    notes.append(f"stopped: no token within {LIMIT} s, which is what the ratio is to")
    notes.append("cold: dropped from the page cache and looked at; a cache of the host's beneath a virtual disk cannot be dropped")
    return rows, notes


LEARNED = """\
**Cold**, the disk decides. `direct` reads at its speed without a copy. A map whose chunks are populated ahead of use is as fast within the noise. Buffered reads (`pread`) pay for a copy through the page
cache and are by far the slowest. **Warm**, a map always wins, and by more the larger the model: nothing is read, and page tables are filled while the prompt runs. `pread` copies, and `direct` goes to the disk as if nothing were
cached. So `auto` maps what is in the page cache, reads past it what is not, and is never far from the best of the three. After a cold `direct` the page cache is as empty as before. A machine that often starts the same
model, and has the memory, is better served by `--load mmap`, whose second start is warm.

The cost of mapping a file depends on how it came into the page cache. If another program read it, it occupies small pages, and filling their tables takes longer for larger models. A cold start by `mmap` leaves it in large
pages, which are mapped in less than half of the time. Either runs beside the prompt. At 8 GB, first and second prompt take over a second each, and their difference is less certain than the allowed 150 ms. Its range
goes from below zero to several times as much, for `mmap` and for `auto`, which is the same map.

In the figures published for MLX, neither its reader nor its map wins everywhere, and the map's peak doubles where a second copy is made. Here no reader makes a second copy: the peak is the weights. Speed after loading
is the same for all readers, within the machine's noise.
"""


def sections(rows):
    """The published table with our figures beside it, and what there is to learn."""
    found = {(row.case, row.figure): row.ours for row in rows if not row.peer_name or row.figure == "generation"}
    body = []
    for shape, form, _ in VARIANTS:
        case, (pread, mapped, peak, mapped_peak) = title(shape, form), PUBLISHED[shape, form]
        of = lambda mode, figure: found.get((f"{case}, warm, {mode}", figure))  # noqa: E731, B023
        if of("mmap", "load") is None:
            continue
        peaks = {row.case: row for row in rows if row.figure == "peak of loading"}
        pair = lambda mode: peaks[f"{case}, warm, {mode}"].ours  # noqa: E731, B023
        body.append([
            case,
            f"{peaks[f'{case}, warm, mmap'].peer:.2f}",
            f"{of('pread', 'load'):.3f} / {of('mmap', 'load'):.3f}",
            f"{of('pread', 'load') / of('mmap', 'load'):.2f}",
            f"{pread:.3f} / {mapped:.3f}",
            f"{pread / mapped:.2f}",
            f"{pair('pread'):.2f} / {pair('mmap'):.2f}",
            f"{peak:.2f} / {mapped_peak:.2f}",
        ])
    head = ["model", "GB", "load, warm, pread / mmap, s", "speed-up", "published (MLX, M1 Max)", "speed-up", "peak, pread / mmap, GB", "published"]
    return [("Beside the published table", lines(head, body)), ("When each reader wins", LEARNED)]


def model_path(shape, form):
    return scratch.DIR / "models" / f"{shape}-{form}{'.gguf' if form[0].isupper() else ''}"


# --- ours


def loads(shape, form, rounds):
    """The table of `sluice bench load`, as rows."""
    case, folder = title(shape, form), model(shape, form)
    say(f"loading {case}")
    lines = [json.loads(x) for x in output([SLUICE, "bench", "load", folder, "--rounds", rounds, "--prompt", PROMPT, "--tokens", GENERATED, "--json"]).splitlines()]
    by = {(x["state"], x["mode"]): x for x in lines}
    rows = []

    def figure(state, mode, name, label, unit, peer=None, peer_name="", goal=None, above=True, scale=1.0):
        ours = [v * scale for v in by[state, mode][name]["all"]]
        peer = [v * scale for v in peer] if peer else None
        rows.append(compare(SUITE, f"{case}, {state}, {mode}", label, unit, ours, peer, peer_name, goal, above, THREADS))

    for state in ("cold", "warm"):
        for mode in ("mmap", "pread", "direct", "auto"):
            x = by[state, mode]
            figure(state, mode, "load_seconds", "load", "s")
            figure(state, mode, "first_token_seconds", "first token", "s")
        # The best by median; its rounds beside those of auto.
        best = min((by[state, m] for m in ("mmap", "pread", "direct")), key=lambda x: x["first_token_seconds"]["median"])
        figure(state, "auto", "first_token_seconds", "first token", "s", best["first_token_seconds"]["all"], f"best of three, {best['mode']}", 1.05, False)
        for mode in ("pread", "direct", "auto"):
            mapped = by[state, "mmap"]["generation_tokens_per_second"]["all"]
            figure(state, mode, "generation_tokens_per_second", "generation", "tokens/s", mapped, "mmap", 0.97)
        for mode in ("mmap", "pread", "direct", "auto"):
            x = by[state, mode]
            weights = [x["bytes"]] * rounds
            figure(state, mode, "load_peak_memory", "peak of loading", "GB", weights, "weights", 1.02, False, 1e-9)
            figure(state, mode, "peak_memory", "peak, KV and scratch too", "GB", weights, "weights", None, False, 1e-9)
    x = by["cold", "direct"]
    speed = [x["bytes"] / s / 1e9 for s in x["load_seconds"]["all"]]
    disk = [d / 1e9 for d in x["disk_bytes_per_second"]["all"]]
    rows.append(compare(SUITE, f"{case}, cold, direct", "read", "GB/s", speed, disk, "disk alone", 0.95, threads=THREADS))
    x = by["warm", "mmap"]
    beyond = [1e3 * (a - b) for a, b in zip(x["first_token_seconds"]["all"], x["prompt_seconds"]["all"])]
    rows.append(compare(SUITE, f"{case}, warm, mmap", "first token beyond its compute", "ms", beyond, [150.0] * rounds, "limit", 1.0, False, THREADS))
    pread, mapped = (by["warm", m]["load_seconds"]["all"] for m in ("pread", "mmap"))
    published = PUBLISHED[shape, form]
    label = f"published {published[0] / published[1]:.2f} for MLX's two"
    rows.append(compare(SUITE, f"{case}, warm", "load by pread over mmap", "times", [a / b for a, b in zip(pread, mapped)], [published[0] / published[1]] * rounds, label, threads=THREADS))
    return rows


def left(shape, form, rounds):
    """A second start with maps, after a cold start with maps: how a file came into the page cache decides what its page tables cost."""
    case, folder = title(shape, form), model(shape, form)
    say(f"second starts of {case}")
    prepare(folder, "cold")
    output([SLUICE, "eval", "logits", folder, "--tokens", 1000, "--load", "mmap"])
    command = [SLUICE, "bench", "load", folder, "--modes", "mmap,auto", "--states", "warm", "--rounds", max(rounds, 5), "--prompt", PROMPT, "--tokens", GENERATED, "--json"]
    return second_starts(case, [json.loads(x) for x in output(command).splitlines()])


def second_starts(case, lines):
    rows = []
    for x in lines:
        name = f"{case}, warm as a cold start by mmap leaves it, {x['mode']}"
        beyond = [1e3 * (a - b) for a, b in zip(x["first_token_seconds"]["all"], x["prompt_seconds"]["all"])]
        rows.append(compare(SUITE, name, "load", "s", x["load_seconds"]["all"], None, "", threads=THREADS))
        rows.append(compare(SUITE, name, "first token beyond its compute", "ms", beyond, [150.0] * len(beyond), "limit", 1.0, False, THREADS))
    return rows


def reserved(shape, form, rounds):
    """The table of `sluice bench kv`, as rows: each reservation beside dynamic allocation."""
    case, folder = title(shape, form), model(shape, form)
    say(f"keys and values of {case}")
    lines = [json.loads(x) for x in output([SLUICE, "bench", "kv", folder, "--rounds", max(rounds, 3), "--json"]).splitlines()]
    dynamic, rows = lines[0], []
    for line in lines[1:]:
        name = f"{case}, {line['kv']}"
        for key, label, unit, goal, above, scale in [
            ("first_token_seconds", "first token", "ms", 1.01, False, 1e3),
            ("prompt_tokens_per_second", "prompt", "tokens/s", 0.99, True, 1),
            ("generation_tokens_per_second", "generation", "tokens/s", 0.99, True, 1),
            ("peak_memory", "peak", "GB", None, False, 1e-9),
        ]:
            ours, other = ([v * scale for v in x[key]["all"]] for x in (line, dynamic))
            rows.append(compare(SUITE, name, label, unit, ours, other, "dynamic", goal, above, THREADS))
        rows.append(compare(SUITE, name, "KV grew while generating", "bytes", line["kv_growth"]["all"], None, "", threads=THREADS))
    return rows


# --- from the start of a process to its first token


def starts(shape, ours, theirs, rounds, quick):
    case = title(shape, ours)
    say(f"first tokens of {case}")
    folder, file = model(shape, ours), model(shape, theirs)
    tokens = ",".join(str(1000 + 37 * i) for i in range(PROMPT))
    mine = [SLUICE, "eval", "logits", folder, "--tokens", tokens, "--threads", THREADS]
    llama = ["-m", file, "-t", THREADS, "-p", PROMPT, "-n", 0, "-ngl", 0, "-r", 1, "--no-warmup", "-o", "jsonl"]
    # name, what it reads, command (of llama.cpp without the program), whether it keeps its full decode speed
    peers = [(f"{theirs}, {lm}, {'repacked' if rp else 'as it is'}", file, [*llama, "-lm", lm, "--repack", rp], rp == 1) for lm in ("mmap", "none", "dio") for rp in (1, 0)]
    of_llama = {name for name, *_ in peers}
    peers.append(("mlx-lm, CPU", folder, [PYTHON, ROOT / "bench" / "first_token_mlx.py", folder, tokens], True))
    peers.append(("safetensors + torch, weights only", folder, [PYTHON, ROOT / "bench" / "load_torch.py", folder], True))
    if quick:
        peers = [p for p in peers if "as it is" not in p[0] and "mlx" not in p[0]]
    rows = []
    for state in ("cold", "warm"):
        own, others = [], {name: Peer() for name, *_ in peers}

        def first(name, reads, command):
            # MLX's processor path takes minutes: once it has missed the limit it is left alone.
            if others[name].all and others[name].all[-1] >= LIMIT:  # noqa: B023
                return float(LIMIT)
            if name in of_llama:
                return LLAMA.attempt(lambda bench: first_output([bench, *command], reads, state))  # noqa: B023
            return first_output(command, reads, state)  # noqa: B023

        for _ in range(rounds):
            try:
                own.append(first_output(mine, folder, state))
            except Died as why:
                sys.exit(f"bench: sluice failed: {why}")
            for name, reads, command, _ in peers:
                others[name].measure(lambda: first(name, reads, command))  # noqa: B023
        full = [name for name, _, _, keeps in peers if keeps and others[name].all]
        best = min(full, key=lambda name: median(others[name].all), default=None)  # noqa: B023
        for name, *_ in peers:
            peer = others[name]
            # Times: ours over theirs, so 1.5 times as fast is at most two thirds.
            goal = 1 / 1.5 if name == best else None
            label = LLAMA.name(name) if name in of_llama else name
            label += (", the best at full speed" if name == best else "") + (", stopped" if LIMIT in peer.all else "")
            rows.append(compare(SUITE, f"{case}, {state}, from the start", "first token", "s", own, peer.all, label, goal, False, THREADS, died=peer.died))
    return rows


def first_output(command, reads, state):
    """Seconds from the start of a process to the first line that it prints, or LIMIT."""
    prepare(reads, state)
    begun = time.perf_counter()
    try:
        process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise Died(f"cannot be started: {error.strerror}") from None
    if not select.select([process.stdout], [], [], LIMIT)[0]:
        process.kill()
        process.communicate()
        return float(LIMIT)
    line = process.stdout.readline()
    taken = time.perf_counter() - begun
    _, errors = process.communicate()
    if not line or process.returncode != 0:
        raise died(process.returncode, errors.decode(errors="replace"))
    return taken


def prepare(path, state):
    """Brings a model into the page cache or out of it, and memory for it into this machine."""
    path = Path(path)
    files = [f for f in path.iterdir() if f.suffix == ".safetensors"] if path.is_dir() else [path]
    for file in files:
        with open(file, "rb", buffering=0) as f:
            if state == "warm":
                buffer = bytearray(4 << 20)
                while f.readinto(buffer):
                    pass
            else:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if state == "cold" and os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    # As much free memory as a model and a copy of it take is touched and given back: what a hypervisor has reclaimed of it costs whoever touches it first.
    free = next(int(x.split()[1]) * 1024 for x in open("/proc/meminfo") if x.startswith("MemFree"))
    # A copy of it is all that comes when the page cache has it already.
    wanted = int((1.25 if state == "warm" else 2.25) * sum(f.stat().st_size for f in files))
    with mmap.mmap(-1, min(wanted, free // 4 * 3), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(MADV_POPULATE_WRITE)
