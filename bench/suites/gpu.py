"""Decode, prompts, many sequences, experts in several tiers and first tokens on an NVIDIA GPU, beside llama.cpp's CUDA backend at equal bits. The goals are those that the project set
itself for its GPU backend. Both measure all rounds of a case in one process, ours first."""

import json
import re
import subprocess
import time
from functools import cache
from pathlib import Path

import machine as host
import peers
from chart import Chart
from findings import Pick, bars, goals, having, joined, said
from llama_cuda import LLAMA, THREADS, by_parallel, first_line, llama
from models import evict, quickly
from peers import PLAIN, SLUICE, Died, Peer, answer
from results import compare
from scratch import Failed, output, say
from servers import metric, server
from shapes import config
from stored_prompts import ask, prompt

TITLE, SUITE = "GPU: decode, prompts, experts in tiers, first tokens", "gpu"
CONTEXT, GENERATED, DEEP = 128, 128, 8192
TORCH = "torch in bf16"
SEQUENCES, FINE_SEQUENCES = "8 to 64 sequences at once: {spread} times its speed; goals met: {goals}.", "With `--activations int11 --attention int16`: {spread} times."
SMALL, LARGE, MIXTURE, SIX, HYBRID = "Qwen3-0.6B", "8B", "30B-A3B", "6 layers of 30B-A3B", "Next of 48 layers"
SHAPES = {SMALL: "dense", LARGE: "8b", MIXTURE: "30b-a3b", SIX: "moe", HYBRID: "next-48"}
# GGUF files that both take as they are.
FILES = [(LARGE, "Q4_K_M"), (SIX, "Q4_K_M"), (SIX, "UD-Q2_K"), (SIX, "MXFP4"), (SMALL, "Q4_K_M"), (SMALL, "Q8_0"), (SMALL, "IQ4_XS")]
OF_FILES = [("decode", False, "GGUF files as they are: decode {spread} times its speed; goals met: {goals}."), ("prompt", False, "Their prompts: {spread} times; goals met: {goals}."), ("", True, FINE_SEQUENCES)]
# Integers of 11 bits for products and of 16 for attention: nearer to f32 than int8, and the fastest mode for prompts.
FINE = ("--activations", "int11", "--attention", "int16")
FINELY = ", int11 and int16"
TO_COME = 34
# Bytes of the device's memory: keys and values of some 2,000 tokens of the mixture, of which scratch takes a part.
LONGER = 192_000_000
# Conversations that take turns, tokens of each, and for how many tokens together the device has room.
TAKING_TURNS, OF_EACH, ROOM = 4, 4096, 8192

PICKS = [
    *(
        Pick(f"Decode, {name}", f"decode, {name}", "speed", "llama.cpp", front=front)
        for name, front in (
            (f"{SMALL}, 4 bit", "GPU: decode, 0.6B"),
            (f"{SMALL}, bf16", ""),
            (f"{LARGE}, 4 bit", "GPU: decode, 8B"),
            (f"{MIXTURE}, 4 bit", "GPU: decode, 30B-A3B"),
            (f"{HYBRID}, 4 bit", ""),
        )
    ),
    Pick(f"Decode at {DEEP:,}, {SMALL}", f"decode at {DEEP:,}, {SMALL}, 4 bit", "speed", "llama.cpp"),
    *(Pick(f"Prompt of {n:,}, {name}", f"prefill {n:,}, {name}, 4 bit", "speed", "llama.cpp", front="GPU: prompt, 8B" if (n, name) == (2048, LARGE) else "") for name in (LARGE, MIXTURE, HYBRID) for n in (512, 2048)),
    *(
        Pick(f"Prompt of {n:,}, {LARGE}{FINELY}", f"prefill {n:,}, {LARGE}, 4 bit{FINELY}", "speed", "llama.cpp", front="GPU: prompt, 8B, int11" if n == 2048 else "")
        for n in (512, 2048, 8192, 32768)
    ),
    *(Pick(f"Prompt of {n:,}, {MIXTURE}{FINELY}", f"prefill {n:,}, {MIXTURE}, 4 bit{FINELY}", "speed", "llama.cpp") for n in (2048, 8192)),
    *(Pick(f"{n} sequences, {LARGE}", f"{n} sequences, {LARGE}, 4 bit", "speed", "llama.cpp") for n in (8, 32, 64)),
    *(Pick(f"{n} sequences, {MIXTURE}", f"{n} sequences, {MIXTURE}, 4 bit", "speed", "llama.cpp") for n in (8, 32)),
    *(Pick(f"Decode, {share} of the experts in VRAM", f"decode, {share} of the experts in VRAM, {MIXTURE}", "speed", "llama.cpp") for share in ("none", "a quarter", "half")),
    Pick("Prompt of 4,096, experts in RAM", f"prefill 4,096, experts in RAM, {MIXTURE}", "speed", "llama.cpp"),
    *(Pick(f"First token, {state}", f"first token, {state}, {MIXTURE}", "from the start", "llama.cpp", less=True) for state in ("cold", "warm")),
]


def picks(_):
    """Rows that charts show."""
    return PICKS


def charts(rows):
    under = "Speed over llama.cpp's, or its latency over ours, at equal bits on one GPU; random weights of real dimensions."
    return {"": Chart("On a GPU, beside llama.cpp", bars(rows, PICKS), under=under)}


def found(rows):
    """What the figures say, a line each."""
    peer, kept = "llama.cpp", having(rows, figure="speed kept", peer="llama.cpp")
    every, rows = rows, [r for r in rows if r.figure != "speed kept"]
    bits = [r for r in rows if r.figure == "logits equal"]
    return [
        *said("Decode runs at {spread} times llama.cpp's speed with everything in VRAM, in {cases}; goals met: {goals}.", having([r for r in rows if " of the experts " not in r.case], "decode", "speed", peer)),
        *joined(
            said("Weights that a token uses are read at {percent} of the device's bandwidth; goals met: {goals}.", having(rows, "decode", "weights read")),
            said("At 8,192 tokens of context decode keeps {spread} times as much of its speed as llama.cpp does.", kept),
        ),
        *said("Prompts run at {spread} times its speed, in {cases}; goals met: {goals}.", [r for r in having(rows, "prefill", "speed", peer) if FINELY not in r.case]),
        *joined(
            said("With `--activations int11 --attention int16`, which is nearer to f32, prompts run at {spread} times its speed, in {cases}; goals met: {goals}.", [r for r in having(rows, "prefill", "speed", peer) if FINELY in r.case]),
            said("In this mode they run at {spread} of torch's speed in bf16; goals met: {goals}.", [r for r in having(rows, "prefill", "speed", TORCH) if FINELY in r.case]),
        ),
        *joined(*(said(text, [r for r in having(rows, f"GGUF: {what}") if (FINELY in r.case) == finely]) for what, finely, text in OF_FILES)),
        *joined(*(said(text, [r for r in having(rows, figure="speed", peer=peer) if " sequences," in r.case and (FINELY in r.case) == finely]) for text, finely in ((SEQUENCES, False), (FINE_SEQUENCES, True)))),
        *said("With some or all of the experts in RAM decode runs at {spread} times its speed; goals met: {goals}.", [r for r in having(rows, "decode", "speed", peer) if " of the experts " in r.case]),
        *said("Keys and values that no longer fit the device come back from host memory. Time to first token is {spread} times lower than when they are recomputed.", having(rows, figure="TTFT, from memory", peer="computed"), less=True),
        *said("A model larger than all its memory reads experts at {percent} of the disk's bandwidth; goals met: {goals}.", having(rows, "larger than", "experts read")),
        *said("Time to first token of a new process, cold and warm, is {spread} times lower than llama.cpp's.", having(rows, "first token", "from the start", peer), less=True),
        *said("The GPU's logits equal the CPU's, or those of a mixture entirely in VRAM, bit for bit in {count} of {tried} cases.", [r for r in bits if r.ours == 1], tried=len(bits)),
        f"All goals together: {goals(every)} met.",
    ]


def absent():
    """Why this cannot be measured here."""
    return None if host.gpu() else "there is no NVIDIA GPU here, or no driver for one (nvidia-smi finds none)"


def prepare():
    peers.build_sluice()
    peers.make_environment()
    LLAMA.make()


def versions():
    said = subprocess.run([peers.PYTHON, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    return {**peers.versions_of(LLAMA), "torch": said.stdout.strip() or "missing"}


def device():
    return {"GPU": host.gpu()}


MEASURED = {
    "limits": lambda rounds: [*device_limits(rounds)],
    f"{SMALL}: 4 bit": lambda rounds: decode(SMALL, "q4", "Q4_0", rounds, 2.5, deep=True),
    f"{SMALL}: bf16": lambda rounds: decode(SMALL, "bf16", "BF16", rounds, 2.5),
    f"{SMALL}: bf16 prompts": lambda rounds: prompts_of_bf16(rounds),
    f"{SMALL}: bits": lambda _: bits(SMALL, "q4", ("int8", "bf16", "f32")) + bits(SMALL, "bf16", ("int8", "f32", "int11")),
    f"{LARGE}: decode": lambda rounds: decode(LARGE, "q4", "Q4_0", rounds, 2.1, of_limit=0.6, matrices=lambda _: 0.85),
    f"{LARGE}: decode, int11": lambda rounds: decode_finely(rounds),
    f"{LARGE}: prompts": lambda rounds: prefill(LARGE, rounds, 1.2),
    f"{LARGE}: prompts, int11": lambda rounds: prefill_finely(LARGE, {512: 2.0, 2048: 2.2, 8192: 2.0, 32768: 2.0}, rounds, 0.5),
    f"{LARGE}: sequences": lambda rounds: sequences(LARGE, {8: 1.8, 32: 1.8, 64: 2.0}, rounds),
    f"{LARGE}: returning": lambda rounds: returning(rounds),
    f"{HYBRID}: decode": lambda rounds: decode(HYBRID, "q4", "Q4_0", rounds, 2.8),
    f"{HYBRID}: prompts": lambda rounds: prefill(HYBRID, rounds, None),
    f"{HYBRID}: bits": lambda _: bits(HYBRID, "q4", ("int8",)),
    f"{MIXTURE}: decode": lambda rounds: decode(MIXTURE, "q4", "Q4_0", rounds, 2.4, matrices=lambda phase: 0.6 if phase == "experts" else None),
    f"{MIXTURE}: prompts": lambda rounds: prefill(MIXTURE, rounds, 1.3),
    f"{MIXTURE}: prompts, int11": lambda rounds: prefill_finely(MIXTURE, {2048: 1.8, 8192: 1.8}, rounds),
    f"{MIXTURE}: sequences": lambda rounds: sequences(MIXTURE, {8: 2.0, 32: 1.5}, rounds),
    f"{MIXTURE}: experts, none": lambda rounds: experts("none", 0.0, 48, rounds, 2.0),
    f"{MIXTURE}: experts, half": lambda rounds: experts("half", 0.5, 24, rounds, 3.0),
    f"{MIXTURE}: experts, a quarter": lambda rounds: experts("a quarter", 0.25, 36, rounds, None),
    f"{MIXTURE}: experts, prompt": lambda rounds: prompt_of_experts(rounds),
    f"{MIXTURE}: first token": lambda rounds: first_token(rounds),
    f"{MIXTURE}: larger than memory": lambda rounds: larger(rounds),
    f"{MIXTURE}: bits": lambda _: bits(MIXTURE, "q4", ("int8",)) + bits_of_tiers(),
} | {f"GGUF: {name} {form}": lambda rounds, name=name, form=form: of_file(name, form, rounds) for name, form in FILES}
QUICK = ("limits", f"{SMALL}: 4 bit", f"{SMALL}: bits")


def cases(quick):
    return [name for name in MEASURED if not quick or name in QUICK]


def run(names, quick, rounds, parts):
    rows, notes = [], []
    for name in names:
        say(name)
        began = time.monotonic()
        try:
            rows += parts.measure(name, lambda name=name: MEASURED[name](rounds), notes)
        # A case that fails must not cost the others. It is not kept, so the next run tries it again.
        except (Failed, Died, ValueError, KeyError, IndexError, TypeError) as why:
            notes.append(f"not measured: {name}: {' '.join(str(why).split())[-200:]}")
            say(notes[-1])
        say(f"{name}: {time.monotonic() - began:.0f} s")
    notes.append(f"decode: {GENERATED} tokens behind {CONTEXT} unless it says otherwise, all rounds in one process; KV in bf16 (Sluice) and f16 (llama.cpp, with flash attention, -ngl 99)")
    return rows, notes


# --- one measurement each


def ours(what, path, rounds, *more, device="cuda", **environment):
    """The lines of `sluice bench`."""
    command = [SLUICE, "bench", what, path, "--device", device, "--rounds", rounds, "--no-roofline", "--json", *more]
    return [json.loads(line) for line in output(command, **environment).splitlines()]


def speeds(line):
    return line["tokens_per_second"]["all"]


def beside(rounds, path, *options):
    """A peer's answer, or why there is none."""
    peer = Peer()
    peer.measure(lambda: llama(path, rounds, *options))
    return (lambda *test: peer.all[0].get(test, []) if peer.all else []), peer.died


@cache
def limits():
    """Figures of the device and of the processor beside it: bytes per second and operations per second, medians."""
    found = {}
    for more in (["--device", "cuda"], ["--threads", THREADS]):
        line = json.loads(output([SLUICE, "bench", "roofline", "--rounds", 5, "--json", *more]).splitlines()[-1])
        found["device" if "device" in line else "host"] = {k: v for k, v in line.items() if isinstance(v, dict) and v}
    return found


def limit(where, name):
    return limits()[where][name]["median"]


# --- figures


def device_limits(_):
    scales = {"bytes_per_second": ("GB/s", 1e9), "operations_per_second": ("TOPS", 1e12), "seconds": ("us", 1e-6)}
    names = {"up": "from pinned memory", "down": "to pinned memory", "read": "read"}
    for where, figures in limits().items():
        for name, values in figures.items():
            ending = next(e for e in scales if name.endswith(e))
            (unit, scale), what = scales[ending], name.removesuffix("_" + ending)
            yield compare(SUITE, f"limits of the {where}", names.get(what, what.replace("_", " ")), unit, [v / scale for v in values["all"]], None, "")


def decode(name, form, theirs, rounds, goal, deep=False, of_limit=None, matrices=None):
    """`matrices`: the goal of each phase that reads weights, of the device's bandwidth."""
    folder, file, words = quickly(SHAPES[name], form), quickly(SHAPES[name], theirs), "bf16" if form == "bf16" else "4 bit"
    depths = [CONTEXT, DEEP] if deep else [CONTEXT]
    lines = ours("decode", folder, rounds, "--context", ",".join(map(str, depths)), "--tokens", GENERATED)
    peer, died = beside(rounds, file, "-p", 0, "-n", GENERATED, "-d", ",".join(map(str, depths)))
    rows, case = [], f"decode, {name}, {words}"
    for depth, line in zip(depths, lines):
        at = case if depth == CONTEXT else f"decode at {depth:,}, {name}, {words}"
        rows.append(compare(SUITE, at, "speed", "tokens/s", speeds(line), peer(0, GENERATED, depth), LLAMA.name(theirs), goal, died=died))
        read = [s * (line["weight_bytes_per_token"] + (line["cache_bytes_per_token"] if depth > CONTEXT else 0)) / 1e9 for s in speeds(line)]
        what = "weights read" if depth == CONTEXT else "weights, keys and values read"
        rows.append(compare(SUITE, at, what, "GB/s", read, [limit("device", "read_bytes_per_second") / 1e9] * len(read), "read limit", of_limit if depth == CONTEXT else None))
    if deep:
        rows.append(compare(SUITE, f"decode at {DEEP:,}, {name}, {words}", "speed kept", "tokens/s", speeds(lines[1]), speeds(lines[0]), f"own at {CONTEXT}", 0.8))
        theirs_kept = [b / a for a, b in zip(peer(0, GENERATED, CONTEXT), peer(0, GENERATED, DEEP))]
        kept = [b / a for a, b in zip(speeds(lines[0]), speeds(lines[1]))]
        rows.append(compare(SUITE, f"decode at {DEEP:,}, {name}, {words}", "speed kept", "of 1", kept, theirs_kept, LLAMA.name(theirs), died=died))
    if matrices:
        for phase, of in lines[0]["phases"].items():
            # Only a row of the embedding is read: a few kilobytes.
            if of["weight_bytes"] and of["seconds"] and phase != "embed":
                rate = of["weight_bytes"] / of["seconds"] / 1e9
                rows.append(compare(SUITE, f"matrices of a token, {name}, {words}", phase.replace("_", " "), "GB/s", [rate], [limit("device", "read_bytes_per_second") / 1e9], "read limit", matrices(phase)))
    return rows


def prefill(name, rounds, goal):
    prompts, folder = (512, 2048), quickly(SHAPES[name], "q4")
    lines, integers = (ours("prefill", folder, rounds, "--tokens", ",".join(map(str, prompts)), *more) for more in ((), ("--attention", "int8")))
    peer, died = beside(rounds, quickly(SHAPES[name], "Q4_0"), "-p", "512,2048", "-n", 0, "-ub", 2048)
    rows = []
    for n, line, lossy in zip(prompts, lines, integers):
        case = f"prefill {n:,}, {name}, 4 bit"
        rows.append(compare(SUITE, case, "speed", "tokens/s", speeds(line), peer(n, 0, 0), LLAMA.name("Q4_0"), goal, died=died))
        done = [x / 1e12 for x in line["operations_per_second"]["all"]]
        rows.append(compare(SUITE, case, "operations", "TOPS", done, [limit("device", "int8_operations_per_second") / 1e12] * len(done), "int8 peak"))
        rows.append(compare(SUITE, f"{case}, attention on integers", "lossy speed", "tokens/s", speeds(lossy), peer(n, 0, 0), LLAMA.name("Q4_0"), died=died))
    return rows


def of_file(name, form, rounds):
    """Decode and a prompt of 512 tokens, of the same file, with integers of 8 bits and with finer ones."""
    file, rows = quickly(SHAPES[name], form), []
    for what, own, goal, options, test in (
        ("decode", ("decode", file, rounds, "--context", CONTEXT, "--tokens", GENERATED), 1.3, ("-p", 0, "-n", GENERATED, "-d", CONTEXT), (0, GENERATED, CONTEXT)),
        ("prompt of 512", ("prefill", file, rounds, "--tokens", 512), 2.0, ("-p", 512, "-n", 0), (512, 0, 0)),
    ):
        peer, died = beside(rounds, file, *options)
        for how, more, aim in (("", (), goal), (FINELY, FINE, None)):
            [line] = ours(*own, *more)
            rows.append(compare(SUITE, f"GGUF: {what}, {name} {form}{how}", "speed", "tokens/s", speeds(line), peer(*test), LLAMA.name("on the same file"), aim, died=died))
    return rows


@cache
def torch(shape, rounds, *prompts):
    """Tokens per second of plain torch in bf16, by tokens of the prompt, and why there are none."""
    peer = Peer()
    command = [peers.PYTHON, Path(__file__).parent.parent / "prompts_torch.py", shape, rounds, *prompts]
    peer.measure(lambda: answer(command, lambda text: json.loads(text.splitlines()[-1])))
    return (lambda n: peer.all[0].get(str(n), []) if peer.all else []), peer.died


def prefill_finely(name, goals, rounds, of_torch=None):
    """Prompts up to a long one with finer integers, beside llama.cpp, and where there is a goal for it beside torch in bf16."""
    lines = ours("prefill", quickly(SHAPES[name], "q4"), rounds, "--tokens", (prompts := ",".join(map(str, goals))), *FINE)
    peer, died = beside(rounds, quickly(SHAPES[name], "Q4_0"), "-p", prompts, "-n", 0, "-b", 2048, "-ub", 2048)
    other, without = torch(SHAPES[name], rounds, *goals) if of_torch else (None, "")
    rows = []
    for line, (n, goal) in zip(lines, goals.items()):
        theirs = [(peer(n, 0, 0), LLAMA.name("Q4_0"), goal, died), *([(other(n), TORCH, of_torch, without)] if of_torch else [])]
        rows += [compare(SUITE, f"prefill {n:,}, {name}, 4 bit{FINELY}", "speed", "tokens/s", speeds(line), peer, who, aim, died=why) for peer, who, aim, why in theirs]
    return rows


def decode_finely(rounds):
    """A token with finer integers, beside llama.cpp and beside integers of 8 bits."""
    folder, case = quickly(SHAPES[LARGE], "q4"), f"decode, {LARGE}, 4 bit{FINELY}"
    fine, usual = (ours("decode", folder, rounds, "--context", CONTEXT, "--tokens", GENERATED, *more)[0] for more in (FINE, ()))
    peer, died = beside(rounds, quickly(SHAPES[LARGE], "Q4_0"), "-p", 0, "-n", GENERATED, "-d", CONTEXT)
    return [
        compare(SUITE, case, "speed", "tokens/s", speeds(fine), peer(0, GENERATED, CONTEXT), LLAMA.name("Q4_0"), died=died),
        compare(SUITE, case, "speed", "tokens/s", speeds(fine), speeds(usual), "int8", 0.98),
    ]


def prompts_of_bf16(rounds):
    """A prompt through weights in bf16, beside llama.cpp and beside torch."""
    n, case = 2048, f"prefill 2,048, {SMALL}, bf16{FINELY}"
    [line] = ours("prefill", quickly(SHAPES[SMALL], "bf16"), rounds, "--tokens", n, *FINE)
    peer, died = beside(rounds, quickly(SHAPES[SMALL], "BF16"), "-p", n, "-n", 0, "-ub", 2048)
    other, without = torch(SHAPES[SMALL], rounds, n)
    return [
        compare(SUITE, case, "speed", "tokens/s", speeds(line), peer(n, 0, 0), LLAMA.name("BF16"), 1.0, died=died),
        compare(SUITE, case, "speed", "tokens/s", speeds(line), other(n), TORCH, died=without),
    ]


def sequences(name, goals, rounds):
    """Decode of several sequences, each behind a prompt of its own, with integers of 8 bits and with finer ones."""
    folder, file = quickly(SHAPES[name], "q4"), quickly(SHAPES[name], "Q4_0")
    many = ",".join(map(str, goals))
    # llama-batched-bench measures once: its rounds are processes, and ours rounds of one.
    usual, fine = (ours("decode", folder, rounds, "--sequences", many, "--context", CONTEXT, "--tokens", 32, *more) for more in ((), FINE))
    peer = Peer()
    room = max(goals) * (CONTEXT + GENERATED) + 512
    command = [LLAMA.program("llama-batched-bench"), "-m", file, "-ngl", 99, "-fa", "on", "-c", room, "-npp", CONTEXT, "-ntg", GENERATED, "-npl", many, "--output-format", "jsonl"]
    for _ in range(rounds):
        peer.measure(lambda: LLAMA.attempt(lambda _: answer(command, by_parallel)))
    rows = []
    for line, finer, (n, goal) in zip(usual, fine, goals.items()):
        for of, how, aim in ((line, "", goal), (finer, FINELY, None)):
            rows.append(compare(SUITE, f"{n} sequences, {name}, 4 bit{how}", "speed", "tokens/s together", speeds(of), [one[n] for one in peer.all], LLAMA.name("Q4_0"), aim, died=peer.died))
    return rows


def expert_bytes(shape):
    """Bytes of all experts together, at 4 bits in groups of 64."""
    c = config(shape)
    return c["num_hidden_layers"] * c["num_experts"] * 3 * c["hidden_size"] * c["moe_intermediate_size"] * 9 // 16


@cache
def least(rounds):
    """Bytes of the device's memory with which the mixture goes through so many rounds: a bit more than what `sluice` says it starts with when it is given next to nothing."""
    try:
        ours("decode", quickly(SHAPES[MIXTURE], "q4"), rounds, "--gpu-memory", "100M", "--context", CONTEXT, "--tokens", GENERATED)
    except Failed as why:
        return smallest(str(why))
    return 100_000_000


def smallest(text):
    """The bytes that a refusal names, and LONGER."""
    if not (found := re.search(r"the smallest that would do is --gpu-memory ([\d.]+)([MG])", text)):
        raise Failed(text)
    # What a refusal counts is the shortest context that is worth a start; ours are a bit longer.
    return int(float(found[1]) * {"M": 1e6, "G": 1e9}[found[2]]) + LONGER


def experts(words, share, layers, rounds, goal):
    """Decode with a share of the experts' bytes in the device's memory and the others in pinned memory; llama.cpp has those of `layers` layers on the CPU."""
    folder, file = quickly(SHAPES[MIXTURE], "q4"), quickly(SHAPES[MIXTURE], "Q4_0")
    memory = least(rounds) + int(share * expert_bytes(SHAPES[MIXTURE]))
    [line] = ours("decode", folder, rounds, "--gpu-memory", memory, "--context", CONTEXT, "--tokens", GENERATED, "--fill-experts")
    peer, died = beside(rounds, file, "-p", 0, "-n", GENERATED, "-d", CONTEXT, "-ncmoe", layers)
    mine, theirs, case = speeds(line), peer(0, GENERATED, CONTEXT), f"decode, {words} of the experts in VRAM, {MIXTURE}"
    rows = [compare(SUITE, case, "speed", "tokens/s", mine, theirs, LLAMA.name(f"Q4_0, experts of {layers} layers on the CPU"), goal, died=died)]
    return rows + tiers(case, line) + allowed(case, line, mine, rounds)


@cache
def whole(rounds):
    """Tokens per second with all experts in the device's memory, a median."""
    [line] = ours("decode", quickly(SHAPES[MIXTURE], "q4"), rounds, "--context", CONTEXT, "--tokens", GENERATED)
    return line["tokens_per_second"]["median"]


def tiers(case, line):
    """Figures of the tiers: experts found on the device, and experts held there."""
    held = line["experts"].get("device")
    if not held or not held["hit_rate"]:
        return []
    return [
        compare(SUITE, case, "found in VRAM", "%", [100 * held["hit_rate"]], None, ""),
        compare(SUITE, case, "experts in VRAM", "%", [100 * held["slots"] / line["experts"]["experts"]], None, ""),
    ]


def allowed(case, line, mine, rounds):
    """What the tiers allow: misses of the device over its link and the processor's memory together, and no more than with none of them."""
    held = line["experts"].get("device")
    if not held or not held["hit_rate"]:
        return []
    missed = line["experts"]["wanted_bytes_per_token"] * (1 - held["hit_rate"])
    moved = (limit("device", "up_bytes_per_second") + limit("host", "read_bytes_per_second")) / missed if missed else float("inf")
    bound = min(moved, whole(rounds))
    return [compare(SUITE, case, "speed", "tokens/s", mine, [bound] * len(mine), "bound of device, link and memory", 0.8)]


def prompt_of_experts(rounds):
    folder, file, case = quickly(SHAPES[MIXTURE], "q4"), quickly(SHAPES[MIXTURE], "Q4_0"), f"prefill 4,096, experts in RAM, {MIXTURE}"
    [line] = ours("prefill", folder, rounds, "--tokens", 4096, "--gpu-memory", least(rounds) + int(4e9), "--chunk", 4096, "--fill-experts")
    peer, died = beside(rounds, file, "-p", 4096, "-n", 0, "-b", 4096, "-ub", 4096, "-ncmoe", 48)
    return [compare(SUITE, case, "speed", "tokens/s", speeds(line), peer(4096, 0, 0), LLAMA.name("Q4_0, experts on the CPU"), 3.0, died=died)]


def returning(rounds):
    """First tokens of conversations that go on in turn, where the device has room for the keys and values of half of them: they come back from this machine's memory, or are computed again."""
    shape, case = SHAPES[LARGE], f"{TAKING_TURNS} conversations of {OF_EACH:,} tokens in turn, {LARGE}, 4 bit"
    c = config(shape)
    of_token = 4 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]
    folder = quickly(shape, "q4", "text")
    serve = lambda *more: lambda port: [SLUICE, "serve", folder, "--port", port, "--parallel", TAKING_TURNS, "--max-context", OF_EACH + 512, "--device", "cuda", *PLAIN, *more]  # noqa: E731
    refused = subprocess.run([str(word) for word in serve("--gpu-memory", "100M")(0)], capture_output=True, text=True)
    memory = smallest(refused.stderr) + ROOM * of_token
    found = {}
    for words, more in (("spilled", ("--gpu-memory", memory, "--kv-spill", "16G")), ("lost", ("--gpu-memory", memory)), ("kept", ())):
        with server(serve(*more), f"returning-{words}") as address:
            conversations = [prompt(shape, f"returning {k}", OF_EACH) for k in range(TAKING_TURNS)]
            ask(address, prompt(shape, "warm", 64))
            found[words] = []
            for turn in range(rounds + 1):
                for k in range(TAKING_TURNS):
                    conversations[k] += prompt(shape, f"turn {turn} of {k}", 32)
                    answer = ask(address, conversations[k])
                    # In the first turn there is nothing yet that could come back.
                    if turn:
                        found[words].append(answer.ttft)
            returned = metric(address, "sluice:kv_returned_tokens") if words == "spilled" else 0
            say(f"{words}: {found[words]}, {returned:.0f} tokens came back")
            if words == "spilled" and returned < rounds * TAKING_TURNS * OF_EACH // 2:
                raise Failed(f"bench: only {returned:.0f} tokens came back")
    return [compare(SUITE, case, "TTFT, from memory of this machine", "ms", found["spilled"], found[words], name, above=False) for words, name in (("lost", "computed again"), ("kept", "all of them in VRAM"))]


# Bytes for experts on the device, and on the host, of the model's 17 GB. With the first nearly all wanted experts are found; with the second the disk decides.
SCARCE = {"8 GB": (2e9, "6G"), "2.5 GB": (5e8, "2G")}


def larger(rounds):
    """Memory here and there holds less than the experts: the disk gives what is missing."""
    folder, c = quickly(SHAPES[MIXTURE], "q4"), config(SHAPES[MIXTURE])
    request = c["hidden_size"] * c["moe_intermediate_size"] // 2
    rows = []
    for room, (device, host) in SCARCE.items():
        case = f"larger than memory, {MIXTURE} in {room}"
        evict(folder)
        memory = least(rounds) + int(device)
        [line] = ours("decode", folder, rounds, "--gpu-memory", memory, "--memory-budget", host, "--context", CONTEXT, "--tokens", 64, "--fill-experts")
        command = [SLUICE, "bench", "disk", folder, "--request", request, "--depth", 16, "--order", "random", "--seconds", 1, "--rounds", 3, "--json"]
        disk = json.loads(output(command).splitlines()[-1])["bytes_per_second"] / 1e9
        read = [s * line["experts"]["read_bytes_per_token"] / 1e9 for s in speeds(line)]
        rows += [
            compare(SUITE, case, "speed", "tokens/s", speeds(line), None, ""),
            compare(SUITE, case, "experts read", "GB/s", read, [disk] * len(read), "disk", 0.85),
            *tiers(case, line),
        ]
    return rows


def first_token(rounds):
    """From the start of a process to its first token, behind a prompt of TO_COME tokens."""
    folder, file, name = quickly(SHAPES[MIXTURE], "q4"), quickly(SHAPES[MIXTURE], "Q4_0"), MIXTURE
    command = [SLUICE, "bench", "load", folder, "--modes", "auto", "--rounds", rounds, "--prompt", TO_COME, "--tokens", 2, "--device", "cuda", "--json"]
    lines, rows = {line["state"]: line for line in map(json.loads, output(command).splitlines())}, []
    for state, way in (("cold", "dio"), ("warm", "mmap")):
        peer, mine = Peer(), lines[state]["first_token_seconds"]["all"]
        for _ in mine:
            peer.measure(lambda: LLAMA.attempt(lambda bench: first_line(bench, file, TO_COME, way, state)))
        case = f"first token, {state}, {name}"
        rows.append(compare(SUITE, case, "from the start", "s", mine, peer.all, LLAMA.name(f"Q4_0, {way}"), above=False, died=peer.died))
        if state == "cold":
            read, disk = [lines[state]["bytes"] / t / 1e9 for t in mine], [x / 1e9 for x in lines[state]["disk_bytes_per_second"]["all"]]
            rows.append(compare(SUITE, case, "bytes of the model over it", "GB/s", read, disk, "disk", 0.9))
        else:
            rows.append(compare(SUITE, case, "from the start", "s", mine, [1.0] * len(mine), "a second", 1.0, above=False))
    return rows


def bits(name, form, modes):
    """Whether the logits behind a prompt and of a few tokens after it are those of the CPU, bit by bit."""
    rows, folder = [], quickly(SHAPES[name], form)
    for mode in modes:
        found = [ours("decode", folder, 1, "--activations", mode, "--context", 32, "--tokens", 8, device=device)[0]["logits"] for device in ("cuda", "cpu")]
        rows.append(compare(SUITE, f"bits, {name}, {'bf16' if form == 'bf16' else '4 bit'}, activations {mode}", "logits equal", "of 1", [float(found[0] == found[1])], [1.0], "the CPU", 1.0))
    return rows


def bits_of_tiers():
    """The same of a mixture some of whose experts the device has not, beside one that has them all."""
    folder, rows = quickly(SHAPES[MIXTURE], "q4"), []
    every, least_memory = expert_bytes(SHAPES[MIXTURE]), least(1)
    [wanted] = ours("decode", folder, 1, "--context", CONTEXT, "--tokens", GENERATED)
    for words, share in (("none", 0.0), ("half", 0.5)):
        [found] = ours("decode", folder, 1, "--gpu-memory", least_memory + int(share * every), "--context", CONTEXT, "--tokens", GENERATED)
        rows.append(compare(SUITE, f"bits, {MIXTURE}, 4 bit, {words} of the experts in VRAM", "logits equal", "of 1", [float(found["logits"] == wanted["logits"])], [1.0], "all in VRAM", 1.0))
    return rows
