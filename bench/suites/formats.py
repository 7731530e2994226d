"""GGUF files beside llama.cpp on the same file: what is computed from real models, how fast random-weight ones decode and take prompts, and how a mixture is streamed under a memory
limit, beside a bundle that is packed from it. What transformers and llama.cpp compute from real models is recorded (`tests/golden/real`), so neither torch nor transformers is needed here. Single
measurements are those of `kernels` and `streamed_experts`; the goals are those that the project set itself."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import cgroup
import peers
import real_models
import streamed_experts
from chart import Chart
from findings import Pick, bars, goals, having, said
from models import evict, model, model_path, pack, quickly, size
from peers import LLAMA, PLAIN, SLUICE, Peer
from results import compare
from scratch import ROOT, Failed, output, say
from suites import kernels

TITLE = "Formats: GGUF files as they are"
SUITE = "formats"
CONTEXT, GENERATED, PROMPT, THREADS = kernels.CONTEXT, kernels.GENERATED, kernels.PROMPT, kernels.THREADS
NAMES = {"dense": "Qwen3-0.6B", "1.7b": "Qwen3-1.7B", "8b-quarter": "9 layers of Qwen3-8B", "moe": "MoE, 6 layers of 30B-A3B"}
FORMS = ("Q4_K_M", "Q4_0", "Q8_0", "IQ4_XS", "MXFP4")
# Tolerances: a part of the range of logits, and a ratio of perplexities.
LOGITS, PERPLEXITY = 1e-4, 1.0005
# Of the range of logits: where llama.cpp, which rounds activations to eight bits, may choose the other of the best two.
NEAR_TIE = 1e-2
# Streamed: the mixture, its form, and how many times its limit it is.
GIANT, STREAMED, FACTOR = "qwen3-30b-a3b@4", "Q4_K_M", 4
# So slow a peer is asked for few tokens, and not for longer than this many seconds.
FEW_TOKENS, PATIENCE = 4, 240
# Windows of a perplexity, of those that are recorded.
WINDOWS = 4
EXACT = ("--activations", "f32", "--kv-type", "f32", "--threads", THREADS)


@dataclass(frozen=True)
class Speed:
    """Decode and a prompt of one file."""

    shape: str
    form: str
    quick: bool = False

    @property
    def name(self):
        return f"speed {self.shape} {self.form}"

    @property
    def file(self):
        return f"{NAMES[self.shape]}, {self.form}"


# What two cores measure in half an hour with `--rounds 2`: every form of a small model and of 8B with fewer layers, one between them, and mixtures.
SPEEDS = [*(Speed("dense", form, quick=True) for form in FORMS), Speed("1.7b", "Q4_K_M"), *(Speed("8b-quarter", form) for form in FORMS), *(Speed("moe", form) for form in ("Q4_K_M", "UD-Q2_K", "MXFP4"))]
PICKS = [
    *(Pick(f"Decode {s.file}", f"decode, {s.file}", "speed", "llama.cpp", THREADS, front="Decode, 1.7B Q4_K_M" if (s.shape, s.form) == ("1.7b", "Q4_K_M") else "") for s in SPEEDS),
    *(Pick(f"Prompt {s.file}", f"prefill {PROMPT}, {s.file}", "speed", "llama.cpp", THREADS) for s in SPEEDS),
]


def prepare():
    """Without what only other suites take, which is gigabytes."""
    peers.build_sluice()
    peers.make_environment("gguf", "numpy")
    LLAMA.make()


def versions():
    return peers.versions_of(LLAMA)


def picks(_):
    """Rows that charts show."""
    return PICKS


def charts(rows):
    under = f"Speed over llama.cpp's on the same file with as many threads; prompts of {PROMPT} tokens; models in memory, random weights of real dimensions."
    return {"": Chart("GGUF files, beside llama.cpp", bars(rows, picks(rows)), under=under)}


def found(rows):
    """What the figures say, a line each."""
    real = [r for r in rows if r.ratio and r.case in set(real_models.MODELS.values())]
    llama = "llama.cpp"
    return [
        *said("Logits of real models are as near to transformers' on the dequantised weights as 1e-4 of their range; goals met: {goals}.", [r for r in real if r.figure == "logits"]),
        *said("Greedy answers are llama.cpp's, or the best two tokens were nearly alike where they part; goals met: {goals}.", [r for r in real if r.figure.startswith("greedy")]),
        *said("Perplexity is not above llama.cpp's by more than 0.05 %; goals met: {goals}.", [r for r in real if r.figure.startswith("perplexity")]),
        *said("Decode runs at {spread} times llama.cpp's speed on the same file, in {cases}; goals met: {goals}.", having(rows, "decode", "speed", llama)),
        *said(f"A prompt of {PROMPT} tokens runs at {{spread}} times its speed, in {{cases}}; goals met: {{goals}}.", having(rows, f"prefill {PROMPT}", "speed", llama)),
        *said("Decode uses {percent} of the bandwidth of a plain read; goals met: {goals}.", having(rows, "decode", peer="read limit")),
        *said("A mixture of {cases} streamed under a limit: {spread} times llama.cpp's speed; goals met: {goals}.", having(rows, "streamed", peer=llama)),
        f"All goals together: {goals(rows)} met.",
    ]


def cases(quick):
    found = {"values": True}
    found |= {f"{what} {name}": True for name in real_models.MODELS for what in ("logits", "greedy", "perplexity")}
    found |= {s.name: s.quick for s in SPEEDS}
    found["streamed"] = False
    return [name for name, in_quick in found.items() if in_quick or not quick]


def run(names, quick, rounds, parts):
    rows, notes = [], []
    what = {"values": lambda: values(notes)}
    for name in real_models.MODELS:
        what |= {f"logits {name}": lambda n=name: logits(n), f"greedy {name}": lambda n=name: greedy(n), f"perplexity {name}": lambda n=name: perplexity(n, notes)}
    what |= {s.name: lambda s=s: speed(s, rounds) for s in SPEEDS}
    what["streamed"] = lambda: streamed(rounds, notes)
    wanted = [name for name in real_models.MODELS if any(case.endswith(f" {name}") for case in names)]
    try:
        missing = real_models.fetch() if wanted else []
    except Failed:
        missing = real_models.missing()
    notes += [f"left out: {title(name)}, which cannot be had" for name in missing if name in wanted]
    for name in names:
        if name.rpartition(" ")[2] in missing:
            continue
        try:
            rows += parts.measure(name, what[name], notes)
        except Failed as why:
            say(str(why))
            notes.append(f"left out: {name}: {last_line(why)}")
    for s in SPEEDS:
        if s.name in names and model_path(s.shape, s.form).exists():
            notes.append(f"{s.file}: {size(model_path(s.shape, s.form)) / 1e6:.0f} MB")
    notes.append(f"decode: {GENERATED} tokens behind {CONTEXT}; activations in int8, KV in bf16 (Sluice) and f16 (llama.cpp); llama.cpp with its repacking, flash attention as it chooses")
    return rows, notes


def last_line(why):
    """Of a failure: what the program that failed said last."""
    return (str(why).strip().splitlines() or ["no message"])[-1]


# --- values


def values(notes):
    """Types whose dequantised values differ from the gguf package's, by the test that compares them (every value's bits, as a sum for each type)."""
    if "BENCH_SLUICE" in os.environ or shutil.which("cargo") is None:
        notes.append("left out: dequantised values, which a test compares that is built here")
        return []
    say("values")
    golden = (ROOT / "crates" / "kernels" / "tests" / "blocks_golden.txt").read_text().splitlines()
    test = (ROOT / "crates" / "kernels" / "tests" / "kernels" / "blocks_golden.rs").read_text()
    blocks = int(re.search(r"const BLOCKS: usize = (\d+)", test)[1])
    # Of what ./test has built: kernels as they ship.
    output(["cargo", "test", "--quiet", "--profile", "quick", "--locked", "--workspace", "--test", "kernels", "blocks_golden"])
    compared = sum(blocks * int(line.split()[1]) for line in golden)
    case = f"dequantised values, {len(golden)} types, the gguf package's"
    return [compare(SUITE, case, "differ", f"of {compared:,} values", [0], None, "")]


# --- real models


def title(name):
    return real_models.MODELS[name]


def logits(name):
    """The greatest difference of ours from transformers', in millionths of the range."""
    say(f"logits, {title(name)}")
    worst, golden = 0.0, real_models.golden(name)
    for case in golden["logits"]:
        # The rows that are known, and no others, so that the output stays small.
        for known in case["rows"]:
            ids = ",".join(map(str, case["ids"][: known["position"] + 1]))
            [row] = json.loads(output([SLUICE, "eval", "logits", real_models.path(name), "--tokens", ids, "--json", *EXACT]))["logits"]
            theirs = [*known["top"], *((i * case["stride"], x) for i, x in enumerate(known["sampled"]))]
            worst = max(worst, *(abs(row[token] - value) / case["range"] for token, value in theirs))
    return [compare(SUITE, title(name), "logits", "1e-6 of the range from transformers", [1e6 * worst], [1e6 * LOGITS], "limit", 1.0, False, THREADS)]


def answer(name, prompt):
    command = [SLUICE, "run", "-m", real_models.path(name), prompt, "--raw", "--json", "--temp", 0, "--max-tokens", 64, "--ignore-eos", *PLAIN, *EXACT]
    return json.loads(output(command))["tokens"]


def parted(name, case, ours, theirs):
    """By how much of the range of our own logits the first token that differs is ahead of theirs; None where all are alike."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    if at is None:
        return None
    ids = ",".join(map(str, case["ids"] + ours[:at]))
    [row] = json.loads(output([SLUICE, "eval", "logits", real_models.path(name), "--tokens", ids, "--json", *EXACT]))["logits"]
    return (row[ours[at]] - row[theirs[at]]) / (max(row) - min(row))


def greedy(name):
    say(f"greedy, {title(name)}")
    rows, golden = [], real_models.golden(name)
    answers = [answer(name, case["prompt"]) for case in golden["greedy"]]
    for peer, limit, goal in (("llama_cpp", NEAR_TIE, 1.0), ("transformers", 2 * LOGITS, 1.0)):
        margins = [parted(name, case, ours, case[peer]["ids"]) for case, ours in zip(golden["greedy"], answers)]
        parts = [m for m in margins if m is not None]
        whose, n = {"llama_cpp": "llama.cpp's"}.get(peer, "transformers'"), len(margins)
        alike = sum(m is None or 0 <= m <= limit for m in margins)
        rows.append(compare(SUITE, title(name), f"greedy answers of 64 tokens, {whose} or parted by less than {100 * limit:g} % of the range", "answers", [alike], [n], "of all", goal, threads=THREADS))
        rows.append(compare(SUITE, title(name), f"greedy answers of 64 tokens, {whose}", "answers", [n - len(parts)], None, "", threads=THREADS))
        if parts:
            rows.append(compare(SUITE, title(name), f"greedy, ahead where they part from {whose}, at most", "% of the range", [100 * max(parts)], None, "", threads=THREADS))
    return rows


def perplexity(name, notes):
    golden = real_models.golden(name)["perplexity"]
    text = Path(os.environ.get("SLUICE_DEMO_CHECKPOINT") or "../shared/demo-model") / golden["text"]
    if not text.exists():
        notes.append(f"left out: perplexity, whose text, {golden['text']}, is in the folder that SLUICE_DEMO_CHECKPOINT names")
        return []
    say(f"perplexity, {title(name)}")
    windows = min(WINDOWS, *(len(golden[peer]) for peer in ("llama_cpp", "transformers")))
    mean = lambda nats: sum(nats[:windows]) / windows  # noqa: E731
    rows = []
    for how, flags in (("f32 activations", EXACT), ("as by default", ("--threads", THREADS))):
        command = [SLUICE, "eval", "ppl", real_models.path(name), "--text", text, "--window", golden["window"], "--windows", windows, "--json", *flags]
        ours = json.loads(output(command))["perplexity"]
        for peer, goal in (("llama_cpp", PERPLEXITY), ("transformers", None)):
            theirs = 2.718281828459045 ** mean(golden[peer])
            rows.append(compare(SUITE, title(name), f"perplexity, {how}", "of 1", [ours], [theirs], peer.replace("_", ".") + ", recorded", goal, False, THREADS))
    return rows


# --- speed


def speed(s, rounds):
    """Decode and a prompt, ours beside theirs on one file."""
    say(f"decode and prefill, {s.file}, {THREADS} threads")
    path = quickly(s.shape, s.form) if s.shape == "8b" else model(s.shape, s.form)
    evict(path)
    mine, used, read, prompts = [], [], [], []
    theirs, their_prompts = Peer(), Peer()
    for _ in range(rounds):
        [line] = kernels.ours("decode", path, THREADS, "--context", CONTEXT, "--tokens", GENERATED)
        mine.append(line["tokens_per_second"]["median"])
        used.append(mine[-1] * line["weight_bytes_per_token"] / 1e9)
        read.append(line["read_bytes_per_second"]["median"] / 1e9)
        theirs.measure(lambda: kernels.llama(path, THREADS, generated=GENERATED, depths=[CONTEXT])[0])
        [line] = kernels.ours("prefill", path, THREADS, "--tokens", PROMPT, "--no-roofline")
        prompts.append(line["tokens_per_second"]["median"])
        their_prompts.measure(lambda: kernels.llama(path, THREADS, prompt=PROMPT)[0])
    name = LLAMA.name(s.form)
    return [
        compare(SUITE, f"decode, {s.file}", "speed", "tokens/s", mine, theirs.all, name, 1.3, threads=THREADS, died=theirs.died),
        compare(SUITE, f"decode, {s.file}", "weights read", "GB/s", used, read, "read limit", 0.85, threads=THREADS),
        compare(SUITE, f"prefill {PROMPT}, {s.file}", "speed", "tokens/s", prompts, their_prompts.all, name, 1.5, threads=THREADS, died=their_prompts.died),
    ]


def streamed(rounds, notes):
    """A mixture under a limit of a part of its size: from the file as it is, from a bundle that is packed from it, and by llama.cpp."""
    name = f"{GIANT.partition('@')[2]} layers of 30B-A3B, {STREAMED}"
    case = f"streamed, {name}, {FACTOR} times the limit"
    if reason := cgroup.why_not():
        notes.append(f"left out: {case}: {reason}")
        return []
    say(case)
    path = model(GIANT, STREAMED)
    bundle, limit = path.with_suffix(".bundle"), size(path) / FACTOR
    try:
        if not bundle.exists():
            # Blocks are quantised anew: about as many bits, aligned and expert by expert.
            pack(path, bundle, 4)
    except Failed as why:
        notes.append(f"{case}: no bundle beside it ({last_line(why)})")
    ways = {"file": path} | ({"bundle": bundle} if bundle.exists() else {})
    found, held, peer = {way: [] for way in ways}, [], Peer()
    for _ in range(rounds):
        for way, of in ways.items():
            line, ran = streamed_experts.decode(of, streamed_experts.Flags(), limit)
            if line is None:
                why = "killed for memory" if ran.killed else "no answer in time" if ran.timed_out else last_line(ran.errors)
                notes.append(f"left out: {case}, {way}: {why}")
                return []
            found[way].append(streamed_experts.speed(line))
            if way == "file":
                held.append((ran.anonymous + ran.mapped) / 1e6)
        if all(peer.all):
            tokens = streamed_experts.GENERATED if peer.all and peer.all[-1] >= 1 else FEW_TOKENS
            peer.measure(lambda: streamed_experts.llama(path, limit, tokens, timeout=PATIENCE))  # noqa: B023
    mine = found["file"]
    if not all(peer.all):
        notes.append(f"{case}: llama.cpp had no token in time")
    rows = [compare(SUITE, case, "speed", "tokens/s", mine, peer.all if all(peer.all) else [], LLAMA.name(STREAMED), 20, threads=THREADS, died=peer.died)]
    if "bundle" in ways:
        rows.append(compare(SUITE, case, "speed", "tokens/s", mine, found["bundle"], "bundle", 0.9, threads=THREADS))
    rows.append(compare(SUITE, case, "anonymous and mapped, peak", "MB", held, [limit / 1e6] * len(held), "limit", 1.0, False, THREADS))
    if "bundle" in ways:
        notes.append(f"{name}: the bundle has {size(bundle) / 1e9:.2f} GB, of 4 bits in groups of 64")
    notes.append(f"{name}: {size(path) / 1e9:.2f} GB; the control group holds page cache too, and the file is evicted before each run")
    return rows
