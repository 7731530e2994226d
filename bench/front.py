"""The README's charts: a few ratios of each suite that has results, and the tiers of streamed mixtures. Standard library only."""

import importlib

import results
from chart import Chart
from findings import bars
from scratch import ROOT

PICTURES = ROOT / "docs" / "pictures"
SUITES = ("kernels", "formats", "loading", "experts", "serving", "prompt_cache", "drafts", "gpu", "many_cores")
UNDER = "Speed over the peer's, or its latency over ours, at 4 bit and equal threads, or on the same GPU; medians. Random weights of real dimensions; the 30B-A3B has 22 layers."


def measured():
    """Suites that have results, with their first lines and rows."""
    for name in SUITES:
        suite = importlib.import_module(f"suites.{name}")
        if known := results.load(suite.SUITE):
            yield suite, *known


def charts():
    """By name. The first says on which machine and at which commits it was measured."""
    shown, machines, commits, drawn = [], [], [], {}
    for suite, head, rows in measured():
        found = bars(rows, suite.picks(rows), front=True)
        if found:
            shown += found
            machines.append(results.where(head["machine"]))
            commits.append(head["machine"]["commit"].replace(" with uncommitted changes", "+"))
        if hasattr(suite, "tiers_chart"):
            drawn["tiers"] = suite.tiers_chart(suite.tiers(rows, front=True))
    # A processor may stand beside a GPU in one entry, and alone in another.
    once = dict.fromkeys(part for machine in machines for part in machine.split("; "))
    where = f"{'; '.join(once)}; {', '.join(dict.fromkeys(commits))}."
    return {"ratios": Chart("Sluice beside llama.cpp", shown, under=f"{UNDER}\n{where}"), **drawn}


def write():
    """docs/pictures/NAME-light.svg and -dark.svg."""
    for name, chart in charts().items():
        if chart.bars:
            chart.write(PICTURES / name)
    return PICTURES / "ratios-light.svg"
