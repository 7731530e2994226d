"""Experts from disk: models several times larger than the memory that they are given, beside llama.cpp under the same limit, beside what disk and processor allow, and with each
part of the design taken away. The goals are those that the project set itself."""

import functools
import shutil
import time
from dataclasses import dataclass
from statistics import median

import cgroup
from chart import Amounts, Bar, Chart
from findings import Pick, bars, goals, having, said
from models import bytes_of, model, model_path, size
from peers import LLAMA, SLUICE, Peer
from results import compare, lines
from scratch import DIR, ROOT, free, output, say
from streamed_experts import CONTEXT, DEPTH, GENERATED, PROMPT, REQUEST, THREADS, Flags, bound, busy_disk, compute_of, decode, disk, expert_bytes, llama, ours, plan, policies, prefill, speed

TITLE = "Experts from disk: decode, prefill, memory"
SUITE = "experts"
FACTORS = (2, 4.4, 10)


@dataclass
class Giant:
    shape: str
    # Our form, and llama.cpp's of as many bits.
    ours: str
    theirs: str
    name: str
    bits: int
    k: int
    factors: tuple = FACTORS
    # Where everything but decode is measured.
    middle: float = 4.4
    # An ordinary checkpoint beside the bundle, and one thing changed at a time.
    whole: bool = False
    quick: bool = False

    @property
    def case(self):
        return f"{self.shape} {self.bits} bit"

    @property
    def bundle(self):
        return f"{self.ours}-bundle"


GIANTS = [
    Giant("qwen3-30b-a3b@22", "q4", "Q4_0", "22 layers of 30B-A3B", 4, 8, whole=True),
    Giant("qwen3-30b-a3b@22", "q4-q2", "Q4_0-Q2_K", "22 layers of 30B-A3B", 2, 8),
    Giant("qwen3.5-35b-a3b@16", "q4", "Q4_0", "16 layers of Qwen3.5-35B-A3B", 4, 8),
    Giant("qwen3.5-397b-a17b@4", "q4-q2", "Q4_0-Q2_K", "4 layers of Qwen3.5-397B-A17B", 2, 10),
    # A checkpoint and the bundle that is packed from it take 31 GB meanwhile; of three layers, none of attention, llama.cpp makes no model.
    Giant("qwen3.5-397b-a17b@4", "q4", "Q4_0", "4 layers of Qwen3.5-397B-A17B", 4, 10),
    Giant("qwen3-30b-a3b@4", "q4", "Q4_0", "4 layers of 30B-A3B", 4, 8, (2.5,), 2.5, whole=True, quick=True),
]


def short(giant):
    return f"{giant.name.replace('Qwen3.5-', '')}, {giant.bits} bit"


def cases_of(giant):
    """The cases of its decodes, with how many times its memory it is."""
    return [(f"decode, {giant.name}, {giant.bits} bit, {factor} times the limit", factor) for factor in sorted(giant.factors)]


PICKS = [
    *(
        Pick(f"{short(g)}, {factor}×", case, "slots", "llama.cpp", front=f"Streamed 30B-A3B, {factor} times its memory" if g.whole and not g.quick else "")
        for g in GIANTS
        for case, factor in cases_of(g)
    ),
    *(
        Pick(f"Prompt of {PROMPT}, {short(g)}", f"prefill {PROMPT}, {g.name}, {g.bits} bit, {g.middle} times the limit", "slots", "llama.cpp", front=f"Prompt, streamed 30B-A3B, {g.middle} times its memory" if g.whole else "")
        for g in GIANTS
        if not g.quick
    ),
]


def picks(_):
    """Rows that charts show."""
    return PICKS


def charts(rows):
    under = "Speed over llama.cpp's under the same memory limit. Decode without look-ahead, by model size over memory; prompts at 4.4 times. Layers of real dimensions, random weights."
    return {
        "": Chart("Mixtures larger than memory, beside llama.cpp", bars(rows, picks(rows)), under=under),
        "tiers": tiers_chart(tiers(rows)),
    }


def tiers_chart(drawn):
    under = "Where the experts were that tokens wanted. Decode without look-ahead; all else is always in memory."
    return Chart("What a streamed mixture finds in memory", drawn, Amounts("%", end=100.0), under, ("in memory", "from disk"))


def tiers(rows, front=False):
    """A bar for each decode: what share of the experts was in memory; and what came of it. With `front` of those in the README."""
    found, drawn = {(row.case, row.figure): row for row in rows if row.figure != "slots" or row.peer_name == "bound"}, []
    for giant in GIANTS:
        if front and (giant.bits, giant.middle) != (4, 4.4):
            continue
        for case, factor in cases_of(giant):
            hits, speed, limit = (found.get((case, figure)) for figure in ("experts found in slots", "slots", "control group, peak"))
            if hits and speed and limit:
                label = f"{short(giant)}\n{limit.peer * factor / 1e3:.1f} GB in {limit.peer / 1e3:.1f} GB: {hits.ours:.0f} % in memory"
                drawn.append(Bar(label, hits.ours, f"{speed.ours:.1f} tokens/s", whole=100.0))
    return drawn


def found(rows):
    """What the figures say, a line each."""
    llama = having(rows, "decode", "slots", "llama.cpp")
    slow, quick = [r for r in llama if r.peer < 1], [r for r in llama if r.peer >= 1]
    ahead = [r for r in having(rows, "decode", "slots, look-ahead", "without")]
    limits = [r for r in having(rows, "decode", peer="limit")]
    return [
        *said("Where llama.cpp makes less than a token a second under the limit, decode is {spread} times as fast, in {cases}; goals met: {goals}.", slow),
        *said("Where it makes more, because its page cache holds most of what it needs (at twice the limit, or with few layers): {spread} times, in {cases}; goals met: {goals}.", quick),
        *said(f"A prompt of {PROMPT} tokens: {{spread}} times llama.cpp's speed, in {{cases}}.", having(rows, "prefill", "slots", "llama.cpp")),
        *said("With slots, decode is {spread} times as fast as with the page cache alone; goals met: {goals}.", having(rows, "decode", "slots", "page cache")),
        *said("Without look-ahead, decode reaches {percent} of the limit set by disk and processor; goals met: {goals}.", [r for r in having(rows, "decode", "slots", "bound") if r.figure == "slots" and r.peer_name == "bound"]),
        *said("Look-ahead, which changes no bit, makes decode {spread} times as fast.", ahead),
        *said("No run exceeded its limit: peaks are {percent} of it.", limits),
        *said("Where all experts fit, slots are as fast as mapped weights ({spread}).", having(rows, "everything fits")),
        *said("`sluice plan`, given the disk's speed and the hit rate, predicts {spread} times the measured speed.", having(rows, figure="sluice plan")),
        f"All goals together: {goals(rows)} met.",
    ]


class Notes(list):
    def add(self, text):
        if text not in self:
            self.append(text)
            say(f"note: {text}")


def cases(quick):
    giants = [g.case for g in GIANTS if quick is None or g.quick == quick]
    return [*giants, "fits", *([] if quick else ["packing"])]


def run(names, quick, rounds, parts):
    rows, notes = [], Notes()
    if reason := cgroup.why_not():
        notes.add(f"left out, all of it: {reason}")
        return rows, notes
    for giant in GIANTS:
        if giant.case not in names:
            continue
        had = {form: model_path(giant.shape, form).exists() for form in forms(giant)}
        if not room_for(giant, notes):
            continue
        try:
            rows += one(giant, rounds, quick, notes, parts)
        finally:
            # Disks are small, so models that were made for this giant alone are removed.
            if not quick:
                drop(giant, [form for form, before in had.items() if not before])
    if "fits" in names:
        rows += parts.measure("fits", lambda: fits(rounds, quick, notes), notes)
    if "packing" in names:
        rows += parts.measure("packing", packing, notes)
    notes.append(f"decode: {GENERATED} tokens behind {CONTEXT}, after 8 that are not counted; KV in bf16 (Sluice) and f16 (llama.cpp, mapped, not repacked)")
    notes.append("memory limit: a control group, page cache charged to it, the model's files evicted before each run; Sluice's budget is the limit")
    notes.append("bound of decode: compute before the routers, the longer of reads (bytes missed over the disk's bandwidth) and ready compute, the last expert's compute; sums of a token's layers")
    return rows, notes


# --- models


# Published for a 397B-A17B in 2 and 4 bits on another machine (M3 Max with 48 GB, 17.5 GB/s from its SSD, macOS): ratios of tokens/s, and what here stands beside them.
PUBLISHED = [
    ("experts mapped, a fault for each page, of reads", 1.03 / 5.29, "mapped: a fault for each page", None, ""),
    ("the page cache alone, of a cache of its own", 5.74 / 4.80, "page cache, no slots", None, "under a limit buffered reads reclaim pages as they go, and the copy costs a core"),
    ("the next layer's router ahead of time, of without", 0.62, "look-ahead on", "look-ahead off", "only the likeliest are read here, only while the disk is idle, and bits stay the same"),
    ("fewer experts per token: 4 of 10 there, 4 of 8 here", 3.15 / 1.20, "K = 4, lossy", None, "as what is read; it is lossy"),
    ("6 of 10 there, 6 of 8 here", 1.91 / 1.20, "K = 6, lossy", None, "as what is read; it is lossy"),
]

LEARNED = """\
Also published: parallel reads of whole experts beat everything smaller. This holds. The disk alone needs large requests and a few of them at once, and small ones cost a decode dearly. From 256 KiB on, differences are within noise,
and so is alignment beyond a page. Caches of their own were a loss there, where memory is shared with a GPU. Here the speed comes from them, and having one matters more than its policy: LRU is somewhat behind aged
LFU and the scan-aware policy, which are alike. Two bits instead of four gain as much as the bytes suggest where reads are the limit, and nothing where the cache holds the wanted experts anyway.
"""


def sections(rows):
    """The published ablation with ours beside it."""
    found = {row.figure: row.ours for row in rows if row.case.startswith("ablation")}
    base = next((row.peer for row in rows if row.case.startswith("ablation")), None)
    if base is None:
        return []

    def row(what, published, here, why):
        holds = (published > 1) == (here > 1)
        return [what, f"{published:.2f}", f"{here:.2f}", "yes" if holds else "no", why]

    body = [row(what, published, found[ours] / (found[other] if other else base), why) for what, published, ours, other, why in PUBLISHED if ours in found]
    two, four = (next((r.ours for r in rows if r.case == f"decode, 22 layers of 30B-A3B, {bits} bit, 4.4 times the limit" and r.figure == "slots"), None) for bits in (2, 4))
    if two and four:
        body.append(row("2 bits, of 4 bits, each under its own 4.4th", 5.55 / 5.29, two / four, "there other things were the limit, here it is the disk"))
    return [("What of the published holds on this machine", lines(["ratio of tokens/s", "published", "here", "same side of 1", "why"], body)), ("What was learned", LEARNED)]


def forms(giant):
    return [giant.ours, giant.bundle, giant.theirs]


def room_for(giant, notes):
    """Whether the disk takes what is not there yet: a bundle beside the checkpoint that it is packed from, and llama.cpp's file beside both, or after the checkpoint."""
    missing = [f for f in forms(giant) if not model_path(giant.shape, f).exists()]
    sizes = {f: bytes_of(giant.shape, f) for f in missing}
    wanted = sum(sizes.values()) if giant.whole else sum(sizes.values()) - min(sizes.get(giant.ours, 0), sizes.get(giant.theirs, 0))
    if free() >= wanted:
        return True
    notes.add(f"left out: {giant.name}, {giant.bits} bit, which takes {wanted / 1e9:.0f} GB of disk while {free() / 1e9:.0f} GB are to spare")
    return False


def make(giant, quick):
    """The paths of the bundle and of llama.cpp's file."""
    had = model_path(giant.shape, giant.ours).exists()
    bundle = model(giant.shape, giant.bundle)
    if not (had or giant.whole or quick):
        drop(giant, [giant.ours])
    return bundle, model(giant.shape, giant.theirs)


def drop(giant, what):
    for form in what:
        path = model_path(giant.shape, form)
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()


# --- figures


def one(giant, rounds, quick, notes, parts):
    """All that is measured of one giant."""
    rows, case = [], f"{giant.name}, {giant.bits} bit, {giant.middle} times the limit"

    @functools.cache
    def made():
        bundle, gguf = make(giant, quick)
        notes.append(f"{giant.name}, {giant.bits} bit: {size(bundle) / 1e9:.2f} GB, as {giant.theirs} {size(gguf) / 1e9:.2f} GB")
        return bundle, gguf, size(bundle)

    def part(name, what):
        nonlocal rows
        rows += parts.measure(f"{giant.shape} {giant.ours} {name}", lambda: what(*made()), notes)

    for factor in giant.factors:
        part(f"decode {factor}", lambda bundle, gguf, there: decodes(giant, bundle, gguf, there / factor, factor, rounds, notes))
    part("prefill", lambda bundle, gguf, there: prefills(giant, case, bundle, gguf, there / giant.middle, 1 if quick else min(rounds, 3), quick, notes))
    if giant.whole:
        part("layouts", lambda bundle, _, there: layouts(giant, case, bundle, there / giant.middle, rounds, notes))
        part("ablation", lambda bundle, _, there: ablation(giant, case, bundle, there / giant.middle, min(rounds, 3), quick, notes))
    return rows


def failed(case, ran, notes):
    why = "killed for memory" if ran.killed else "no answer in time" if ran.timed_out else (ran.errors.strip().splitlines() or ["no message"])[-1]
    why = why.replace(f"{DIR}/models/", "")
    notes.add(f"{case}: {why}")


def decodes(giant, bundle, gguf, limit, factor, rounds, notes):
    case = f"decode, {giant.name}, {giant.bits} bit, {factor} times the limit"
    say(case)
    request = min(REQUEST, expert_bytes(bundle))
    found, peer = {"plain": [], "ahead": [], "no cache": []}, Peer()
    bounds, shallow, ideals, read, memory, hits, plans, misses = [], [], [], [], [], [], [], []
    for _ in range(rounds):
        bandwidth = disk(bundle, request)
        for name, flags in (("plain", Flags(lookahead="off")), ("ahead", Flags(lookahead="on")), ("no cache", Flags("pagecache", lookahead="off"))):
            line, ran = decode(bundle, flags, limit)
            if line is None:
                failed(f"{case}, {name}", ran, notes)
                continue
            found[name].append(speed(line))
            if name == "plain":
                bounds.append(bound(line, bandwidth, giant.k)[0])
                read.append((line["experts"]["read_bytes"] / line["tokens"] / 1e6, bandwidth / 1e9))
                hits.append(100 * line["experts"]["hits"] / max(1, line["experts"]["wanted"]))
                memory.append((ran, line))
                # As many reads as a layer has at once, and one by itself.
                misses.append(giant.k * (1 - hits[-1] / 100))
                shallow.append(bound(line, disk(bundle, request, depth=max(1, round(misses[-1]))), giant.k)[0])
                latency = max(0.0, request / disk(bundle, request, depth=1) - request / bandwidth)
                plans.append(plan(bundle, limit, bandwidth, latency, hits[-1] / 100))
            elif name == "ahead":
                ideals.append(bound(line, bandwidth, giant.k)[1])
        if all(peer.all):
            # Where it is slow few tokens say it; once without an answer is enough.
            few = bool(peer.all) and peer.all[-1] < 1 or not peer.all and factor > 3
            peer.measure(lambda: llama(gguf, limit, 4 if few else GENERATED))  # noqa: B023
    rows = []
    add = lambda *a, **more: rows.append(compare(SUITE, case, *a, threads=THREADS, **more))  # noqa: E731
    plain, ahead = found["plain"], found["ahead"]
    whole = lambda other: plain and len(other) == len(plain)  # noqa: E731
    if plain:
        add("slots", "tokens/s", plain, bounds, "bound", goal=0.85)
        add("experts found in slots", "%", hits, None, "")
        add("read", "MB a token", [r for r, _ in read], None, "")
        add("disk alone", "GB/s", [b for _, b in read], None, "")
        add("computed", "ms a token", [1e3 * compute_of(line)[0] / line["tokens"] for _, line in memory], None, "")
        add("waited for reads", "ms a token", [1e3 * line["experts"]["waiting_seconds"] / line["tokens"] for _, line in memory], None, "")
        add("slots", "tokens/s", plain, shallow, f"bound, the disk given {max(1, round(median(misses)))} at once, as a layer misses")
    if whole(ahead):
        add("sluice plan, told the disk and the hits", "tokens/s", plans, ahead, "measured, look-ahead")
        add("slots, look-ahead", "tokens/s", ahead, plain, "without")
        add("slots, look-ahead", "tokens/s", ahead, bounds, "bound without it", goal=0.85)
        add("slots, look-ahead", "tokens/s", ahead, ideals, "max(reads, compute)")
    if whole(found["no cache"]):
        add("slots", "tokens/s", plain, found["no cache"], "page cache", goal=1.0)
    if not all(peer.all):
        notes.add(f"{case}: llama.cpp had no token in time")
    elif plain and peer.died or whole(peer.all):
        add("slots", "tokens/s", plain, peer.all, LLAMA.name(giant.theirs), goal=10, died=peer.died)
    if memory:
        rows += memories(case, limit, memory)
    return rows


def memories(case, limit, memory):
    """What runs held, beside their budget and beside the limit."""
    held = [(ran.anonymous + ran.mapped) / 1e6 for ran, _ in memory]
    budget = [limit / 1e6] * len(memory)
    return [
        compare(SUITE, case, "anonymous and mapped, peak", "MB", held, budget, "limit", 1.0, False, THREADS),
        compare(SUITE, case, "locked or pinned, peak", "MB", [ran.pinned / 1e6 for ran, _ in memory], None, "", threads=THREADS),
        compare(SUITE, case, "control group, peak", "MB", [ran.peak / 1e6 for ran, _ in memory], budget, "limit", 1.0, False, THREADS),
    ]


def prefills(giant, case, bundle, gguf, limit, rounds, quick, notes):
    name = f"prefill {PROMPT}, {case}"
    say(name)
    mine, bounds, busy, single, theirs = [], [], [], [], Peer()
    for _ in range(rounds):
        bandwidth = disk(bundle, min(REQUEST, expert_bytes(bundle)))
        line, ran = prefill(bundle, Flags(), limit)
        if line is None:
            failed(name, ran, notes)
            return []
        mine.append(speed(line))
        for into, speed_of_disk in ((bounds, bandwidth), (busy, busy_disk(bundle, min(REQUEST, expert_bytes(bundle))))):
            into.append(PROMPT / max(line["experts"]["read_bytes"] / speed_of_disk, compute_of(line)[0]))
        if not quick and all(theirs.all):
            theirs.measure(lambda: llama(gguf, limit, 0, PROMPT))
        # One token at a time from the same beginning; what fewer tokens take says what all would.
        line, ran = ours("decode", bundle, Flags(), limit, "--context", 1, "--tokens", GENERATED if quick else PROMPT // 4)
        if line is None:
            failed(f"{name}, token by token", ran, notes)
            return []
        single.append(speed(line))
    rows = [
        compare(SUITE, name, "slots", "tokens/s", mine, bounds, "bound", 0.85, threads=THREADS),
        compare(SUITE, name, "slots", "tokens/s", mine, busy, "bound, the disk while all threads run", threads=THREADS),
        compare(SUITE, name, "slots", "tokens/s", mine, single, "token by token", 10, threads=THREADS),
    ]
    if theirs.died or len(theirs.all) == len(mine) and all(theirs.all):
        rows.append(compare(SUITE, name, "slots", "tokens/s", mine, theirs.all, LLAMA.name(giant.theirs), threads=THREADS, died=theirs.died))
    return rows


def layouts(giant, case, bundle, limit, rounds, notes):
    """An ordinary checkpoint beside the bundle that was packed from it."""
    say(f"ordinary checkpoint, {case}")
    plain, packed = [], []
    for _ in range(rounds):
        for path, into in ((model(giant.shape, giant.ours), plain), (bundle, packed)):
            line, ran = decode(path, Flags(), limit)
            if line is None:
                failed(f"ordinary checkpoint, {case}", ran, notes)
                return []
            into.append(speed(line))
    return [compare(SUITE, f"decode, {case}", "from an ordinary checkpoint", "tokens/s", plain, packed, "bundle", 0.85, threads=THREADS)]


def ablation(giant, case, bundle, limit, rounds, quick, notes):
    """One thing changed at a time, each beside the run with nothing changed of the same round."""
    changes = {
        "mapped: a fault for each page": Flags("mapped"),
        "page cache, no slots": Flags("pagecache"),
        "neither: one layer's slots": Flags(more=("--expert-budget", 2 * giant.k * expert_bytes(bundle))),
        "look-ahead off": Flags(lookahead="off"),
        "look-ahead on": Flags(lookahead="on"),
        **{f"replacement {p}": Flags(more=("--expert-policy", p)) for p in policies()},
        **{f"K = {k}, lossy": Flags(more=("--experts-per-token", k)) for k in (6, 4, 3, 2)},
        **{f"requests of {r >> 10} KiB": Flags(more=("--expert-request", r)) for r in (64 << 10, 256 << 10, 1 << 20, 4 << 20)},
        **{f"{d} requests at once": Flags(more=("--expert-depth", d)) for d in (1, 2, 4, 8, 16, 64)},
    }
    if quick:
        changes = {name: changes[name] for name in ("mapped: a fault for each page", "page cache, no slots")}
    say(f"ablation, {case}")
    base, with_change = {name: [] for name in changes}, {name: [] for name in changes}
    lines = {}
    for _ in range(rounds):
        line, ran = decode(bundle, Flags(), limit)
        if line is None:
            failed(f"ablation, {case}", ran, notes)
            return []
        usual = speed(line)
        for name, flags in changes.items():
            if name in lines and lines[name] is None:
                continue
            lines[name], ran = decode(bundle, flags, limit, GENERATED if flags.experts == "slots" else 8)
            if lines[name] is None:
                failed(f"{name}, {case}", ran, notes)
                continue
            base[name].append(usual)
            with_change[name].append(speed(lines[name]))
    rows = [
        compare(SUITE, f"ablation, {case}", name, "tokens/s", with_change[name], base[name], "slots, all as by default", threads=THREADS)
        for name in changes
        if with_change[name]
    ]
    if not quick:
        rows += disks(f"disk, {giant.name}", bundle, rounds)
    return rows


def disks(case, bundle, rounds):
    """The disk alone: requests of an expert's size beside smaller and larger ones, fewer at once, in order, aligned further."""
    whole = expert_bytes(bundle)
    cases = {f"requests of {r >> 10} KiB": {"request": r} for r in (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)}
    cases |= {f"an expert at a time, {d} at once": {"request": whole, "depth": d} for d in (1, 2, 4, 8, 16)}
    cases |= {"an expert at a time, in order": {"request": whole, "order": "sequential"}}
    cases |= {f"an expert at a time, at multiples of {a >> 10} KiB": {"request": whole, "align": a} for a in (64 << 10, 2 << 20)}
    usual, found = {name: [] for name in cases}, {name: [] for name in cases}
    for _ in range(rounds):
        base = disk(bundle, whole) / 1e9
        for name, how in cases.items():
            usual[name].append(base)
            found[name].append(disk(bundle, **how) / 1e9)
    peer = f"an expert ({whole >> 10} KiB) at a time, {DEPTH} at once"
    return [compare(SUITE, case, name, "GB/s", found[name], usual[name], peer) for name in cases]


def fits(rounds, quick, notes):
    """Slots for all experts beside plain mapped weights, without a limit."""
    case = "everything fits, 4 layers of 30B-A3B, 4 bit"
    say(case)
    path = model("qwen3-30b-a3b@4", "q4-bundle")
    mapped, slots = [], []
    for _ in range(rounds):
        for flags, into in ((Flags("mapped"), mapped), (Flags(lookahead="off"), slots)):
            # The prompt is long, so that hardly any expert is wanted for the first time behind it.
            line, ran = ours("decode", path, flags, None, "--context", PROMPT, "--tokens", 128, rounds=3)
            if line is None:
                failed(case, ran, notes)
                return []
            into.append(speed(line))
    return [compare(SUITE, case, "slots", "tokens/s", slots, mapped, "mapped", 0.97, threads=THREADS)]


def packing():
    """A layer of 397B-A17B's dimensions, 4 bit, packed to 2 bit by every recipe."""
    case = "a layer of Qwen3.5-397B-A17B, 4 bit, packed to 2 bit"
    say(case)
    shape, form = "qwen3.5-397b-a17b@1:16384", "q4"
    had = model_path(shape, form).exists()
    source, out = model(shape, form), DIR / "models" / "packed"
    # Any text: weights are random, and what counts is time.
    for file in (ROOT / "models" / "demo").glob("tokenizer*"):
        shutil.copy(file, source)
    text = DIR / "calibration.txt"
    text.write_text("".join(file.read_text() for file in sorted((ROOT / "crates").rglob("*.rs"))))
    recipes = {
        "minimum and maximum": ["--min-max"],
        "MLX's rounding": [],
        "search for least squares": ["--search"],
        "what experts see, 131,072 tokens": ["--calibration", text],
    }
    rows = []
    for recipe, flags in recipes.items():
        shutil.rmtree(out, ignore_errors=True)
        begun = time.perf_counter()
        output([SLUICE, "pack", source, out, "--bits", "none", "--experts-bits", 2, "--layout", "bundle", *flags])
        rows.append(compare(SUITE, case, recipe, "minutes", [(time.perf_counter() - begun) / 60], None, "", threads=THREADS))
    shutil.rmtree(out)
    if not had:
        shutil.rmtree(source)
    return rows
