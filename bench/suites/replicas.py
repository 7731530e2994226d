"""Two replicas of the demo on Ray beside one server: what of prompts is found again, and what a request costs more. The goals are those that the project set itself."""

import os
import subprocess
from urllib.parse import urlsplit

import peers
import replica_load
from chart import Chart
from findings import Pick, bars, goals, having, said
from peers import SLUICE, Died
from results import compare
from scratch import ROOT, say
from servers import free_port, server
from suites.python import output

TITLE = "Replicas on Ray"
SUITE = "replicas"
THREADS = len(os.sched_getaffinity(0))
MODEL = ROOT / "models" / "demo"
#: An interpreter with ray[serve]; with ray[llm] and SGLang or vLLM too, for two of the three cases.
RAY = os.environ.get("BENCH_RAY")
CASES = {"own": "sluice.ray", "llm": "Ray Serve LLM", "direct": "Ray Serve LLM, direct streaming"}
HITS, MORE = "tokens of prompts that were cached", "a request, beyond one server"
# Of one server's hits; milliseconds.
KEPT, LIMIT = 0.95, 3.0


def picks(_):
    return [Pick(name, name, HITS, "one server") for name in CASES.values()]


def charts(rows):
    return {"": Chart("Cached tokens of prompts, two replicas beside one server", bars(rows, picks(rows)), under="Six questions each about eight texts, one after the other.")}


def found(rows):
    return [
        *said("Two replicas find {spread} of what one server finds of prompts again; goals met: {goals}.", having(rows, figure=HITS)),
        *said("What a request takes more than with one server is {percent} of the allowed 3 ms; goals met: {goals}.", having(rows, figure=MORE, peer="limit")),
        *said("A request through Ray's two hops to a server that answers at once takes {spread} times as long as that.", having(rows, figure=MORE, peer="Ray")),
        f"All goals together: {goals(rows)} met.",
    ]


def absent():
    return None if RAY else "BENCH_RAY names no interpreter with ray[serve]"


def cases(quick):
    return list(CASES)[: 1 if quick else None]


def prepare():
    peers.build_sluice()
    if "BENCH_PACKAGE" not in os.environ and subprocess.run([ROOT / "scripts" / "python-package", "--profile", "release"], stdout=subprocess.DEVNULL).returncode != 0:
        raise Died("the Python package does not build")


def versions():
    asked = "import importlib.metadata as m, sys\nfor n in sys.argv[1:]:\n  try: print(n, m.version(n))\n  except m.PackageNotFoundError: pass"
    lines = subprocess.run([RAY, "-c", asked, "ray", "sglang", "vllm", "fastapi"], capture_output=True, text=True).stdout.splitlines()
    sluice = subprocess.run([SLUICE, "--version"], capture_output=True, text=True, check=True).stdout.removeprefix("sluice").strip()
    return {"sluice": sluice} | dict(line.split(" ", 1) for line in lines)


def one():
    """One server, with as many threads as a replica has."""
    command = lambda port: [SLUICE, "serve", "-m", MODEL, "--port", port, "--max-context", 2048, "--parallel", 4, "--threads", 1]  # noqa: E731
    with server(command, "one") as address:
        return replica_load.measure(urlsplit(address).hostname, urlsplit(address).port)


def run(names, quick, rounds, parts):
    rows, notes = [], []
    for name in names:
        rows += parts.measure(f"{name} {rounds}", lambda name=name: measured(name, rounds), notes)
    notes.append("Ray's processes are no children of the measurement: as others on this machine it counts them too")
    return rows, notes


def measured(name, rounds):
    case, ours, alone, empty = CASES[name], [], [], []
    asked = lambda how: output([RAY, ROOT / "bench" / "ray_replicas.py", how, MODEL, free_port()])  # noqa: E731
    for _ in range(rounds):
        say(case)
        alone.append(one())
        empty.append(asked("empty"))
        try:
            ours.append(asked(name))
        except Died as died:
            return [compare(SUITE, case, HITS, "tokens", [0], [], "one server", died=str(died))]
    more = [max(a["ms"] - b["ms"], 0.01) for a, b in zip(ours, alone)]
    times = {"limit": ([LIMIT] * rounds, 1.0), "Ray alone, two hops": ([a["ms"] for a in empty], None)}
    return [
        compare(SUITE, case, HITS, "tokens", [a["cached"] for a in ours], [a["cached"] for a in alone], "one server", KEPT, True, THREADS),
        *(compare(SUITE, case, MORE, "ms", more, peer, who, goal, False, THREADS) for who, (peer, goal) in times.items()),
    ]
