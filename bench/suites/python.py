"""The Python package beside the program, and `load_file` beside other readers of safetensors. The goals are those that the project set itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import peers
import real_models
from chart import Chart
from findings import Pick, bars, goals, having, said
from peers import PLAIN, PYTHON, SLUICE, Peer, answer
from results import compare
from scratch import DIR, ROOT, need_free, say
from suites.loading import prepare as in_cache

TITLE = "Python: generation and loading of tensors"
SUITE = "python"
THREADS = len(os.sched_getaffinity(0))
PROMPT, GENERATED = "Once upon a time there was a king who", 128
# Bytes of the file of tensors, and of each tensor in it: those of a model of 2 billion parameters in bf16.
FILE, TENSOR = 4_000_000_000, 32 << 20
READERS = {"safetensors": "safetensors", "fastsafetensors": "fastsafetensors, copied through the page cache", "runai_model_streamer": "runai-model-streamer", "disk": "disk alone"}
# Ratios of times, ours over theirs.
GOALS = {"safetensors": 1 / 1.5, "disk": 1 / 0.9}
MODELS = {"smollm2": "SmolLM2-135M, Q4_1", "qwen2_5_coder": "Qwen2.5-Coder-0.5B, Q4_K_M"}
READ, FIRST, RATE, START = "all tensors there", "first token", "generation", "import and load beyond the program's start"
# The folder with the package, and what must be installed beside torch.
PACKAGE = Path(os.environ["BENCH_PACKAGE"]) if "BENCH_PACKAGE" in os.environ else None
NEEDED = ["safetensors", "fastsafetensors", "runai-model-streamer"]


def picks(rows):
    return [Pick(f"{state}, beside {READERS[name].split(',')[0]}", f"4 GB of bf16, {state}", READ, READERS[name]) for state in ("cold", "warm") for name in READERS if name != "disk"]


def charts(rows):
    return {"": Chart("Time to load 4 GB of tensors into torch", bars(rows, picks(rows)), under="Time of other readers over sluice.load_file's, until every page of every tensor is in memory. Cold: nothing of the file in the page cache.")}


def found(rows):
    cold = [r for r in having(rows, figure=READ) if "cold" in r.case]
    return [
        *said("Cold, `load_file` takes {percent} of the time of safetensors; goals met: {goals}.", [r for r in cold if r.peer_name == "safetensors"]),
        *said("It takes {percent} of what the disk alone takes; goals met: {goals}.", [r for r in cold if r.peer_name == "disk alone"]),
        *said("`stream_generate` runs at {percent} of the program's speed; goals met: {goals}.", having(rows, figure=RATE)),
        *said("Import and load take {percent} of the allowed 150 ms beyond the program's start; goals met: {goals}.", having(rows, figure=START)),
        f"All goals together: {goals(rows)} met.",
    ]


def cases(quick):
    return ["load_file", *(list(MODELS)[:1] if quick else MODELS)]


def package():
    return PACKAGE or ROOT / "target" / "python-release"


def prepare():
    peers.build_sluice()
    peers.make_environment()
    if PACKAGE is None and subprocess.run([ROOT / "scripts" / "python-package", "--profile", "release"], stdout=subprocess.DEVNULL).returncode != 0:
        sys.exit("bench: the Python package does not build")
    if "BENCH_PYTHON" not in os.environ:
        for name in NEEDED:
            # A reader that cannot be installed gets a row that says so.
            subprocess.run([PYTHON, "-m", "pip", "install", "-q", name], capture_output=True)


def versions():
    found = {"sluice": subprocess.run([SLUICE, "--version"], capture_output=True, text=True, check=True).stdout.removeprefix("sluice").strip()}
    asked = "import importlib.metadata as m, sys\nfor n in sys.argv[1:]:\n  try: print(n, m.version(n))\n  except m.PackageNotFoundError: pass"
    lines = subprocess.run([PYTHON, "-c", asked, "torch", *NEEDED], capture_output=True, text=True).stdout.splitlines()
    return found | dict(line.split(" ", 1) for line in lines)


def run(names, quick, rounds, parts):
    rows, notes = [], []
    for name in names:
        rows += parts.measure(name, (lambda: loads(rounds)) if name == "load_file" else (lambda: generates(name, rounds, notes)), notes)  # noqa: B023
    notes.append("cold: dropped from the page cache; a cache of the host's beneath a virtual disk cannot be dropped")
    return rows, notes


def output(command):
    """Runs one of our scripts with the package in its path, and parses the JSON that it prints."""
    return answer(["env", f"PYTHONPATH={package()}", "PYTHONDONTWRITEBYTECODE=1", *command], lambda text: json.loads(text.splitlines()[-1]))


# --- tensors


def tensors():
    """A file of random numbers as bf16."""
    path = DIR / "models" / f"tensors-{FILE // 10**9}g.safetensors"
    if not path.exists():
        need_free(FILE, path.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        say(f"making {path.name}")
        count = FILE // TENSOR
        header = {f"layers.{i}.weight": {"dtype": "BF16", "shape": [TENSOR // 8192, 4096], "data_offsets": [i * TENSOR, (i + 1) * TENSOR]} for i in range(count)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        unfinished = path.with_suffix(".part")
        with open(unfinished, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            # Exponents in the middle, so that no number is special.
            block = bytes(b if i % 2 == 0 else b % 16 + 56 for i, b in enumerate(os.urandom(1 << 20)))
            for i in range(count):
                file.write((block[i:] + block[:i]) * (TENSOR >> 20))
        unfinished.rename(path)
    return path


def loads(rounds):
    path, rows = tensors(), []
    for state in ("cold", "warm"):
        case, own, others, sums = f"4 GB of bf16, {state}", [], {name: Peer() for name in READERS if (name, state) != ("disk", "warm")}, set()

        def seconds(loader):
            in_cache(path, state)  # noqa: B023
            got = output([PYTHON, ROOT / "bench" / "python_load.py", loader, path])
            if loader != "disk":
                sums.add(got["sum"])  # noqa: B023
            return got["seconds"]

        for _ in range(rounds):
            say(case)
            own.append(seconds("sluice"))
            for name, peer in others.items():
                peer.measure(lambda: seconds(name))  # noqa: B023
        assert len(sums) == 1, f"{case}: other bytes"
        for name, peer in others.items():
            rows.append(compare(SUITE, case, READ, "s", own, peer.all, READERS[name], GOALS.get(name) if state == "cold" else None, False, THREADS, died=peer.died))
    return rows


# --- tokens


def program(path):
    """What the program measures, and the seconds from its start to its first token."""
    command = [SLUICE, "run", "-m", path, "-p", PROMPT, "--raw", "--temperature", "0", "-n", GENERATED, "-c", 1024, "--ignore-eos", *PLAIN, "--json"]
    return answer(command, json.loads)


def generates(name, rounds, notes):
    path = real_models.path(name)
    if not path.exists():
        notes.append(f"not measured: {name}, which is not there (scripts/real-models)")
        return []
    case, ours, theirs = MODELS[name], [], []
    for _ in range(rounds):
        say(case)
        ours.append(output([PYTHON, ROOT / "bench" / "python_generate.py", path, PROMPT, GENERATED]))
        theirs.append(program(path))
        assert ours[-1]["tokens"] == theirs[-1]["tokens"], f"{case}: other tokens than the program's"
    of = lambda row: row["stats"]["generation"]  # noqa: E731
    rates = [(of(row)["tokens"] - 1) / of(row)["seconds"] for row in theirs]
    firsts = [row["stats"]["first_token_seconds"]["from_start"] for row in theirs]
    beyond = [max(1e3 * (a["first"] - b), 0.1) for a, b in zip(ours, firsts)]
    return [
        compare(SUITE, case, RATE, "tokens/s", [row["rate"] for row in ours], rates, "the program", 0.98, True, THREADS),
        compare(SUITE, case, FIRST, "s", [row["first"] for row in ours], firsts, "the program", None, False, THREADS),
        compare(SUITE, case, START, "ms", beyond, [150.0] * rounds, "limit", 1.0, False, THREADS),
    ]
