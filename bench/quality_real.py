#!/usr/bin/env python3
"""What rounding on the way costs real models: perplexity of a held-out text with every type of activations, keys and values, and both kinds of attention.

    bench/quality_real.py HELDOUT [--windows N] [--sluice BINARY]
    bench/run all --redraw      # the page anew, from quality-real.json

HELDOUT is the demo checkpoint's heldout.txt. Measures the models that `scripts/real-models` fetches, and the demo as it ships, with `sluice eval ppl` (windows of 1024), and writes
docs/results/quality-real.md and quality-real.json. Two windows, on one thread, take a quarter of an hour of an idle core (AMD Zen 4); more say more.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import real_models
from chart import Amounts, Bar, Chart
from results import RESULTS, lines, top
from scratch import ROOT, output, say

NAME = "quality-real"
WINDOW = 1024
DEMO = "demo as it ships"
# Activations, keys and values, attention; the first is what the others are compared with.
OPTIONS = [
    ("f32", "f32", "f32"),
    ("f32", "bf16", "f32"),
    ("f32", "int8", "f32"),
    ("f32", "int8", "int8"),
    ("f32", "int16", "int16"),
    ("bf16", "f32", "f32"),
    ("int8", "f32", "f32"),
    ("int8", "bf16", "f32"),
    ("int8", "int8", "f32"),
    ("int8", "int8", "int8"),
    ("int8", "int16", "int16"),
    ("int11", "f32", "f32"),
    ("int11", "int16", "int16"),
]
DEFAULT = ("int8", "bf16", "f32")


def paths():
    """Models by what people call them."""
    return {title: real_models.path(name) for name, title in real_models.MODELS.items()} | {DEMO: ROOT / "models" / "demo"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sluice", type=Path, help="use this binary instead of building one")
    args = parser.parse_args()
    binary = args.sluice or ROOT / "target" / "release" / "sluice"
    if not args.sluice:
        subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "sluice"], check=True, cwd=ROOT)
    rows = []
    for model, path in paths().items():
        if not path.exists():
            say(f"left out: {model}, {path} is not there")
            continue
        for activations, kv, attention in OPTIONS:
            flags = ["--activations", activations, "--kv-type", kv, "--attention", attention]
            say(f"{model} {' '.join(flags)}")
            command = [binary, "eval", "ppl", path, "--text", args.heldout, "--window", WINDOW, "--windows", args.windows, "--threads", args.threads, "--json", *flags]
            rows.append({"model": model, "activations": activations, "kv": kv, "attention": attention, **json.loads(output(command))})
    commit = output(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]).strip()
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{NAME}.json").write_text(json.dumps({"commit": commit, "notes": [], "rows": rows}, indent=1) + "\n")
    print(redraw().read_text())


def percent(x):
    return f"{100 * x:+.2f} %"


def redraw():
    """The page and its chart, from quality-real.json."""
    data = json.loads((RESULTS / f"{NAME}.json").read_text())
    rows = data["rows"]
    by = {(r["model"], (r["activations"], r["kv"], r["attention"])): r for r in rows}
    models = list(dict.fromkeys(r["model"] for r in rows))
    cost = lambda model, option: math.expm1(by[model, option]["nats_per_token"] - by[model, OPTIONS[0]]["nats_per_token"])  # noqa: E731
    each = lambda option: ", ".join(f"{percent(cost(m, option))} ({m})" for m in models)  # noqa: E731
    found = [
        f"The defaults (activations in int8, keys and values in bf16) cost {each(DEFAULT)}.",
        f"Keys and values in int8 cost {each(('f32', 'int8', 'f32'))}: what the demo model says of them does not hold for others.",
        f"Attention on integers, with them, costs {each(('f32', 'int8', 'int8'))}.",
        f"Keys, values and attention on integers of 16 bits cost {each(('f32', 'int16', 'int16'))}.",
        f"Keys and values in bf16 cost {each(('f32', 'bf16', 'f32'))}.",
        f"Activations in int11 cost {each(('int11', 'f32', 'f32'))}.",
    ]
    name = lambda option: f"activations {option[0]}, KV {option[1]}" + {"int8": ", attention on integers", "int16": ", attention on integers of 16 bits"}.get(option[2], "")  # noqa: E731
    most = {option: max(models, key=lambda m: cost(m, option)) for option in OPTIONS[1:]}
    bars = [Bar(name(option), max(0.0, 100 * cost(m, option)), f"{percent(cost(m, option))}, {m}") for option, m in most.items()]
    chart = Chart("What rounding costs the model that it costs most", bars, Amounts("%", 2), "Perplexity above that with f32 activations, keys and values; less is better.", ("perplexity",))
    page = top(NAME, "Quality of real models", {"": chart}, found)
    windows = rows[0]["windows"]
    page += f"\nPerplexity of {windows} windows of {WINDOW} tokens of the demo's held-out text, by `bench/quality_real.py HELDOUT --windows {windows}` at commit {data['commit']}{''.join('; ' + n for n in data['notes'])}.\n"
    page += "Each row is one `sluice eval ppl MODEL --text HELDOUT --window 1024 --windows N --activations A --kv-type K --attention T`. The same windows are scored in all rows of a model, so that their\n"
    page += "differences are much smaller than the perplexity's own error; with two windows, what is below about 0.3 % is noise, whatever its sign. Models' tokens differ, and so do their perplexities.\n\n"
    head = ["activations", "KV", "attention", *models]
    cell = lambda m, option: f"{by[m, option]['perplexity']:.4f} ({percent(cost(m, option))})"  # noqa: E731
    page += lines(head, [[*option, *(cell(m, option) for m in models)] for option in OPTIONS])
    path = RESULTS / f"{NAME}.md"
    path.write_text(page)
    return path


if __name__ == "__main__":
    main()
