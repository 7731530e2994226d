"""Other families beside llama.cpp on the same file: latent attention (GLM-4.7-Flash), a mixture with a shared expert (GLM-4.5-Air) and MXFP4 experts with windows and sinks (gpt-oss-20b), on the
CPU and, where there is one, on an NVIDIA GPU. Random weights of real dimensions, fewer layers. The goals are those that the project set itself."""

import json

import machine as host
import peers
from chart import Chart
from findings import Pick, bars, goals, having, said
from llama_cuda import LLAMA as CUDA
from llama_cuda import llama as llama_cuda
from models import evict, quickly
from peers import LLAMA, SLUICE, Died, Peer
from results import compare
from scratch import Failed, output, say
from streamed_experts import DEPTH, REQUEST, bound
from suites import kernels

TITLE = "Families: latent attention, shared experts, MXFP4"
SUITE = "families"
CONTEXT, GENERATED, PROMPT, THREADS = kernels.CONTEXT, kernels.GENERATED, kernels.PROMPT, kernels.THREADS
FLASH, AIR, GPT_OSS = "8 layers of GLM-4.7-Flash", "4 layers of GLM-4.5-Air", "8 layers of gpt-oss-20b"
FILES = {FLASH: ("latent", "Q4_0"), AIR: ("air", "Q4_0"), GPT_OSS: ("gpt-oss", "Q8_0-MXFP4")}
DECODE, PREFILL, KEPT = 1.3, 1.5, 1.5
# Experts from disk, in as much memory as leaves those of gpt-oss-120b the room that they have in 24 GB: a third of them.
LARGE, LIMIT, STREAMED, CHOSEN = "4 layers of gpt-oss-120b", 4_000_000_000, 0.85, 4
# Positions behind which a token of latent attention is decoded: what llama.cpp takes as a prompt first, which is hours on two cores for 32,768.
DEEP = {"CPU": 4096, "GPU": 32768}
PICKS = [
    *(Pick(f"Decode, {name}, {where}", f"decode, {name}, {where}", "speed", "llama.cpp") for name in FILES for where in DEEP),
    *(Pick(f"Prompt, {name}, {where}", f"prefill {PROMPT}, {name}, {where}", "speed", "llama.cpp") for name in FILES for where in DEEP),
    *(Pick(f"Speed kept at {deep:,}, {FLASH}, {where}", f"decode at {deep:,}, {FLASH}, {where}", "speed kept", "llama.cpp") for where, deep in DEEP.items()),
]


def prepare():
    peers.build_sluice()
    peers.make_environment("gguf", "numpy")
    LLAMA.make()
    if host.gpu():
        CUDA.make()


def versions():
    return peers.versions_of(CUDA if host.gpu() else LLAMA)


def device():
    return {"GPU": host.gpu() or "none"}


def picks(_):
    """Rows that charts show."""
    return PICKS


def charts(rows):
    under = f"Speed over llama.cpp's on the same file; prompts of {PROMPT} tokens; random weights of real dimensions, in memory."
    return {"": Chart("Other families, beside llama.cpp", bars(rows, PICKS), under=under)}


def found(rows):
    """What the figures say, a line each."""
    peer = "llama.cpp"
    found = []
    for where in DEEP:
        own = [r for r in rows if r.case.endswith(where)]
        found += said(f"{where}: decode runs at {{spread}} times llama.cpp's speed, in {{cases}}; goals met: {{goals}}.", having(own, "decode,", "speed", peer))
        found += said(f"{where}: prompts run at {{spread}} times its speed; goals met: {{goals}}.", having(own, "prefill", "speed", peer))
        found += said(f"{where}: behind a long context latent attention keeps {{spread}} times as much of its speed as llama.cpp does; goals met: {{goals}}.", having(own, "decode at", "speed kept", peer))
    found += said("With a third of its experts in memory gpt-oss-120b decodes at {percent} of what disk and processor allow; goals met: {goals}.", having(rows, f"decode, {LARGE}"))
    return [*found, f"All goals together: {goals(rows)} met."]


def cases(quick):
    return ([] if quick else [f"{LARGE}, CPU"]) + [f"{name}, {where}" for where in DEEP for name in (FILES if not quick else [FLASH]) if where == "CPU" or host.gpu()]


def run(names, quick, rounds, parts):
    rows, notes = [], []
    for case in names:
        name, where = case.rsplit(", ", 1)
        try:
            rows += parts.measure(case, lambda name=name, where=where: streamed(rounds) if name == LARGE else measure(name, where, rounds), notes)
        # A case that fails must not cost the others.
        except (Failed, Died, ValueError, KeyError, IndexError) as why:
            notes.append(f"not measured: {case}: {' '.join(str(why).split())[-200:]}")
            say(notes[-1])
    notes.append(f"{FLASH}: matrices of heads in Q8_0, on the CPU in bf16, since llama.cpp's AMX cannot take those in blocks")
    notes.append(f"decode: {GENERATED} tokens behind {CONTEXT}; activations in int8, KV in bf16 (Sluice) and f16 (llama.cpp; on a GPU with flash attention, -ngl 99)")
    return rows, notes


def ours(what, path, where, rounds, *more):
    """Speeds of each case of `sluice bench`, by rounds."""
    on = ("--device", "cuda") if where == "GPU" else ("--threads", THREADS)
    return [line["tokens_per_second"]["all"] for line in lines(what, path, *on, "--rounds", rounds, "--no-roofline", *more)]


def lines(what, path, *more):
    """What `sluice bench` prints."""
    return [json.loads(line) for line in output([SLUICE, "bench", what, path, "--json", *more]).splitlines()]


def theirs(path, where, rounds, prompt=0, generated=0, depths=(0,)):
    """The same of llama.cpp, and why there are none."""
    peer = Peer()
    if where == "CPU":
        for _ in range(rounds):
            peer.measure(lambda: kernels.llama(path, THREADS, prompt, generated, depths))
        return [list(of) for of in zip(*peer.all)] or [[] for _ in depths], peer.died
    peer.measure(lambda: llama_cuda(path, rounds, "-p", prompt, "-n", generated, "-d", ",".join(map(str, depths))))
    return [peer.all[0].get((prompt, generated, depth), []) if peer.all else [] for depth in depths], peer.died


def measure(name, where, rounds):
    say(f"{name}, {where}")
    shape, form = FILES[name]
    path = quickly(f"{shape}-bf16" if name == FLASH and where == "CPU" else shape, form)
    evict(path)
    llama = (CUDA if where == "GPU" else LLAMA).name("on the same file")
    depths = [CONTEXT, DEEP[where]] if name == FLASH else [CONTEXT]
    mine = ours("decode", path, where, rounds, "--context", ",".join(map(str, depths)), "--tokens", GENERATED)
    peer, died = theirs(path, where, rounds, generated=GENERATED, depths=depths)
    rows = [compare(SUITE, f"decode, {name}, {where}", "speed", "tokens/s", mine[0], peer[0], llama, DECODE, died=died)]
    if name == FLASH:
        case = f"decode at {depths[1]:,}, {name}, {where}"
        rows.append(compare(SUITE, case, "speed", "tokens/s", mine[1], peer[1], llama, None, died=died))
        kept = [[b / a for a, b in zip(*of)] for of in (mine, peer)]
        rows.append(compare(SUITE, case, "speed kept", "of 1", *kept, llama, KEPT, died=died))
    [mine] = ours("prefill", path, where, rounds, "--tokens", PROMPT)
    [peer], died = theirs(path, where, rounds, prompt=PROMPT)
    rows.append(compare(SUITE, f"prefill {PROMPT}, {name}, {where}", "speed", "tokens/s", mine, peer, llama, PREFILL, died=died))
    return rows


def streamed(rounds):
    """A mixture whose experts come from disk, beside what disk and processor allow by its own reads and times."""
    path, mine, allowed = quickly("gpt-oss-large", "Q8_0-MXFP4"), [], []
    for _ in range(rounds):
        say(LARGE)
        [disk] = lines("disk", path, "--request", REQUEST, "--depth", DEPTH, "--order", "random", "--rounds", 1)
        evict(path)
        flags = ("--experts", "slots", "--memory-budget", LIMIT, "--threads", THREADS)
        [line] = lines("decode", path, *flags, "--context", CONTEXT, "--tokens", GENERATED, "--rounds", 1, "--no-roofline")
        mine += line["tokens_per_second"]["all"]
        allowed.append(bound(line, disk["bytes_per_second"], CHOSEN)[1])
    case = f"decode, {LARGE} from disk in {LIMIT / 1e9:.0f} GB"
    return [compare(SUITE, case, "speed", "tokens/s", mine, allowed, "the longer of reads and compute", STREAMED, True, THREADS)]
