"""Charts of the pages of docs/results that are written by hand: what they show is read from the pages themselves, so that no figure stands in two places. Standard library only."""

import re
from statistics import median

from chart import Amounts, Bar, Chart, Ratios
from results import RESULTS

# Only whole steps: single kernels are in the page.
STEPS = re.compile(r"^((?:decode|prefill|demo)[^:\n]*): new/old ([\d.]+) \(([\d.]+)-([\d.]+)\)", re.M)
EDGES = re.compile(r"^\| (\w+) \| [^|]+ \| (\d+) \| ([\d,]+)([^|]*) \| (\d+) \|$", re.M)


# Single changes whose figures stand side by side: what each was, and where the page has those without it and those with it.
LIST = r"((?:[\d.]+, )*[\d.]+)"
CHANGES = [
    ("One scale per group of 64, prompt, 0.6B", rf"prefill of 512: 0\.6B {LIST} to {LIST} tokens/s"),
    ("The same, mixture of experts", rf"MoE {LIST} to {LIST}, hybrid"),
    ("The same, hybrid", rf"hybrid {LIST} to {LIST} \(same run"),
    ("One token in four streams, bf16, one thread", rf"bf16 {LIST} to {LIST}; two threads"),
    ("Idle helpers fetch ahead, 4 bit (not kept)", rf"pairs without and with: {LIST} and {LIST} tokens/s"),
    ("The same, bf16 (not kept)", rf"tokens/s; bf16 {LIST} and {LIST}\. Not understood"),
    ("Rows across lanes, prompt, bf16", rf"two threads: {LIST} to {LIST} tokens/s\."),
    ("A waiting thread polls, streamed", rf"at 4\.4 times the limit {LIST} and {LIST} \(compute"),
    ("Reads linked, streamed prompt", rf"Found:\*\* {LIST} to {LIST} tokens/s; 4, 8, 16, 32 lanes"),
    ("Look-ahead again, five choices, streamed", rf"at twice the limit {LIST} tokens/s without, with three [\d., ]+, five {LIST}"),
]


def experiments(page):
    bars = []
    for name, pattern in CHANGES:
        [(before, after)] = re.findall(pattern, page)
        was, now = (median(map(float, figures.split(", "))) for figures in (before, after))
        bars.append(Bar(name, now / was, other="not kept" in name))
    under = "Times the speed without it: of those whose figures stand side by side here, median over median; one to five runs each, mostly on busy machines."
    return Chart("What single changes gained", bars, Ratios(), under, ("kept", "not kept"))


def seam(page):
    bars = [Bar(name, float(ratio), low=float(low), high=float(high)) for name, ratio, low, high in STEPS.findall(page)]
    return Chart("The step as an object, beside the commit before", bars, Ratios(), "Times the old speed, median of five rounds. Rounds of one program differ by up to 40 %.")


def fuzzing(page):
    bars = []
    for edge, minutes, runs, how, finds in EDGES.findall(page):
        millions = int(runs.replace(",", "")) / 1e6
        bars.append(Bar(f"{edge}, {minutes} min{how and ', seeds changed at random'}", millions, f"{millions:.1f} million" + (f", {finds} found" if int(finds) else ""), other=bool(how)))
    under = "Executions on one core; each edge is what reads one kind of file."
    return Chart("What was fuzzed, and how often", bars, Amounts("million"), under, ("libFuzzer", "without a fuzzer"))


FORMS = re.compile(r"^\| ([^|]+) \| [\d.]+ \| ([\d.]+) \(([\d.]+)–([\d.]+)\) \| [\d.]+ \|$", re.M)


def agents(page):
    bars = [Bar(name.replace("`", ""), float(ratio), low=float(low), high=float(high), goal=0.95, missed=float(ratio) < 0.95) for name, ratio, low, high in FORMS.findall(page)]
    return Chart("What a form costs, eight requests at once", bars, Ratios(), "Times the tokens/s of free text in the same round; median of seven rounds.")


SCHEMAS = re.compile(r"^\| ([\w-]+) \| (\d+) \| (\d+) \| \d+ of \d+ \| \d+ of \d+ \|$", re.M)


def conformance(page):
    files = sorted(((name, int(all_of), int(compiled)) for name, all_of, compiled in SCHEMAS.findall(page)), key=lambda f: -f[1])
    bars = [Bar(name, compiled, f"{compiled} of {all_of}", whole=all_of) for name, all_of, compiled in files[:12]]
    under = "The twelve largest files of the JSON Schema Test Suite, draft 2020-12. What is not compiled is refused by name."
    return Chart("Schemas that answers can be held to", bars, Amounts("schemas"), under, ("compiled", "in the suite"))


KERNELS = re.compile(r"^\| ([^|`]+?)(?: \(`[^|]*`\))? \| ([\d.]+) \| ([\d.]+) \| [^|]*\|", re.M)


def profile(page):
    small, large = page.partition("## Several tokens")[0].split("| kernel (8B")
    rows = [("0.6B", row) for row in KERNELS.findall(small)] + [("8B", row) for row in KERNELS.findall(large)]
    bars = [Bar(f"{model}, {name}", float(before) / float(now), other=model == "8B") for model, (name, before, now) in rows]
    return Chart("Kernels of a token on the GPU", bars, Ratios(), "Times the speed of the kernels before, one H200, 4 bit, depth 128.", ("0.6B", "8B"))


def redraw():
    """The charts of all."""
    for name, drawn in (("seam", seam), ("fuzzing", fuzzing), ("experiments", experiments), ("agents", agents), ("serving-conformance", conformance), ("gpu-profile", profile)):
        drawn((RESULTS / f"{name}.md").read_text()).write(RESULTS / name)
        yield RESULTS / f"{name}-light.svg"
