"""Drafts on an NVIDIA GPU: pairs of random weights whose agreement is planted (`planted.py`), for speed at real dimensions, a trained MTP head, and look-up for prose, which is the default.
The goals are those that the project set itself."""

import machine as host
import peers
from chart import Chart
from findings import Pick, bars, goals, having, said
from models import planted as pair_of
from planted import start
from results import compare
from scratch import say
from suites import drafts
from suites.drafts import GOVERNED, HEAD, NO_SLOWER, OFF

TITLE, SUITE = "Drafts on a GPU", "drafts-gpu"
LARGE, MIXTURE, SMALL = "8b", "qwen3-30b-a3b@12", "dense"
DENSE_PAIR, MIXTURE_PAIR = "Qwen3-8B and 0.6B", "12 layers of Qwen3-30B-A3B, and 0.6B"
# How often the smaller model is right: the goal.
DENSE_GOALS, MIXTURE_GOALS = {0.8: 1.6, 0.4: NO_SLOWER, 0.0: NO_SLOWER}, {0.8: NO_SLOWER, 0.0: NO_SLOWER}
FIXED = ("2", "4", "6", "8")
# By case of `bench/run drafts`: who drafts, and the goal.
PROSE = {
    "prose greedy smollm2": ("ngram", NO_SLOWER),
    "prose sampled smollm2": ("ngram", NO_SLOWER),
    f"prose greedy {HEAD}": (HEAD, NO_SLOWER),
    f"prose sampled {HEAD}": (HEAD, NO_SLOWER),
}
BEST = "speed, the best fixed width"

PICKS = [
    *(Pick(f"{case}, as many as pay", case, "speed", OFF) for case in (f"{DENSE_PAIR}, {share:.0%} right" for share in DENSE_GOALS)),
    Pick(f"{DENSE_PAIR}, 80% right, the best fixed width", f"{DENSE_PAIR}, 80% right", BEST, OFF),
    *(Pick(case, case, "speed", OFF) for case in (f"{MIXTURE_PAIR}, {share:.0%} right" for share in MIXTURE_GOALS)),
    *(Pick(drafts.title(name), drafts.title(name), "speed", OFF) for name in PROSE),
]


def picks(_):
    """Rows that charts show."""
    return PICKS


def charts(rows):
    return {"": Chart("Answers on a GPU with drafts, beside none", bars(rows, PICKS), under="Tokens per second of an answer over those of the same answer without drafts.")}


def found(rows):
    """What the figures say, a line each."""
    chosen = [r for r in having(rows, figure="speed", peer=OFF) if r.figure == "speed"]
    pairs, fixed = [r for r in chosen if "right" in r.case], having(rows, figure=BEST, peer=OFF)
    return [
        *said("A small model whose guesses are right as often as planted, with as many drafts as pay: {spread} times as fast as without, in {cases}; goals met: {goals}.", pairs),
        *said("With the best of a few fixed numbers of drafts: {spread} times, in {cases}.", fixed),
        *said("What the governor chooses is {spread} times as fast as the better of that and no drafts; goals met: {goals}.", having(rows, figure="speed, as many as pay")),
        *said("Prose is written {spread} times as fast by look-up, which is the default, or with a trained head, in {cases}; goals met: {goals}.", having(chosen, "prose")),
        f"Answers that differ from those without drafts: {sum(r.ours for r in rows if r.figure == 'other tokens'):.0f}.",
        f"All goals together: {goals(rows)} met.",
    ]


def absent():
    """Why this cannot be measured here."""
    return None if host.gpu() else "there is no NVIDIA GPU here, or no driver for one (nvidia-smi finds none)"


def prepare():
    peers.build_sluice()
    peers.make_environment()


def versions():
    return peers.versions_of()


def device():
    return {"GPU": host.gpu()}


MEASURED = {
    **{f"pair dense {share}": lambda rounds, quick, share=share: paired(LARGE, DENSE_PAIR, share, DENSE_GOALS[share], rounds, quick) for share in DENSE_GOALS},
    **{f"pair mixture {share}": lambda rounds, quick, share=share: paired(MIXTURE, MIXTURE_PAIR, share, MIXTURE_GOALS[share], rounds, quick) for share in MIXTURE_GOALS},
    **{name: lambda rounds, quick, name=name: prose(name, rounds, quick) for name in PROSE},
}


def cases(quick):
    return [name for name in MEASURED if not quick or name == "pair dense 0.8"]


def run(names, quick, rounds, parts):
    rows, notes = [], []
    for name in names:
        say(name)
        rows += parts.measure(name, lambda name=name: MEASURED[name](rounds, quick), notes)
    notes.append("one answer after the other, with and without drafts by turns, in one process for pairs: tokens after the first over their time")
    notes.append(f"pairs: random weights, 4 bits, real dimensions; how often the small model is right is planted (`bench/planted.py`). Fixed widths: {', '.join(FIXED)} drafted tokens a step, whether they pay or not")
    return rows, notes


def paired(target, name, share, goal, rounds, quick):
    """As many drafts as pay, and the best fixed number of them, beside none."""
    case = f"{name}, {share:.0%} right"
    how = ["--device", "cuda", "--widths", ",".join(("off", *FIXED, "auto")), "--tokens", 50 if quick else 200, "--rounds", rounds, "--prompt", start(share)]
    lines = drafts.drafted(pair_of(target, "q4", "planted"), pair_of(SMALL, "q4", "drafter"), *how)
    speeds = {width: line["tokens_per_second"]["all"] for width, line in lines.items()}
    fastest = lambda widths: max(widths, key=lambda width: lines[width]["tokens_per_second"]["median"])  # noqa: E731
    best, better = fastest(FIXED), fastest(("off", *FIXED))
    return [
        *drafts.pair_rows(case, lines, goal, SUITE),
        compare(SUITE, case, BEST, "tokens/s", speeds[best], speeds["off"], f"{OFF} ({best} drafted)"),
        compare(SUITE, case, "speed, as many as pay", "tokens/s", speeds["auto"], speeds[better], f"the best of widths off, {', '.join(FIXED)} ({better})", GOVERNED),
    ]


def prose(name, rounds, quick):
    draft, goal = PROSE[name]
    return drafts.compared(name, rounds, quick, goal=goal, suite=SUITE, draft=draft, more=("--device", "cuda"))
