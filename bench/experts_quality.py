#!/usr/bin/env python3
"""What quantised experts cost the demo model, all else bf16, by recipe and bits: perplexity of its held-out text.

    bench/experts_quality.py CHECKPOINT --calibration FILE [--bits 2,3,4] [--tokens N] [--scratch FOLDER] [--sluice BINARY]

CHECKPOINT is the unpacked demo checkpoint (bf16). Each width is packed in groups of 64 by the range of each group (s = (max - min) / (2^bits - 1), b = min), by MLX's
rounding, by the search for least squares, and by what the experts see when the model reads the calibration text (which `bench/calibration_text.py` makes; a text that shares
60 characters with the held-out one is refused). Each is measured by `sluice eval ppl` (f32 activations, windows of 512). Writes docs/results/experts-quality.md and .json;
what is in the scratch folder already is not packed or measured again. `bench/run all --redraw` writes the page anew.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from calibration_text import shares, windows  # noqa: E402
from chart import Amounts, Bar, Chart  # noqa: E402
from results import RESULTS, lines, top  # noqa: E402

NAME = "experts-quality"
ROOT = pathlib.Path(__file__).resolve().parent.parent
MLX = "MLX's rounding"
GOALS = {2: 8.0, 3: 2.0, 4: 0.5}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("--calibration", type=pathlib.Path, required=True)
    parser.add_argument("--bits", default="2,3,4")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--scratch", type=pathlib.Path)
    parser.add_argument("--sluice", default=str(ROOT / "target/release/sluice"), help="the program, or a command line that ends with it")
    args = parser.parse_args()
    scratch = args.scratch or pathlib.Path(tempfile.mkdtemp(prefix="sluice-quality-"))
    scratch.mkdir(parents=True, exist_ok=True)
    heldout = args.checkpoint / "heldout.txt"
    if shared := shares(args.calibration.read_text(), windows(heldout.read_text())):
        raise SystemExit(f"{args.calibration} shares text with the held-out one: {shared!r}")

    def sluice(*what):
        return subprocess.run([*args.sluice.split(), *map(str, what)], check=True, capture_output=True, text=True).stdout

    def once(name, make):
        path = scratch / name
        if not path.exists():
            result = make()
            path.write_text(json.dumps(result))
        return json.loads(path.read_text())

    def measure(model, name):
        print(f"eval ppl {model}", flush=True)
        return once(f"{name}.json", lambda: json.loads(sluice("eval", "ppl", model, "--text", heldout, "--window", 512, "--json", "--activations", "f32")))

    base = measure(args.checkpoint, "bf16")
    rows = []
    for bits in map(int, args.bits.split(",")):
        recipes = {
            "minimum and maximum": ["--min-max"],
            MLX: [],
            "search for least squares": ["--search"],
            "what experts see": ["--calibration", args.calibration, "--calibration-tokens", args.tokens],
        }
        for recipe, flags in recipes.items():
            name = f"{bits}bit-{recipe.replace(' ', '-')}" + (f"-{args.tokens}" if args.calibration in flags else "")
            folder = scratch / name

            def pack():
                print(f"pack {folder}", flush=True)
                sluice("pack", args.checkpoint, folder, "--bits", "none", "--experts-bits", bits, "--layout", "bundle", *flags)
                return "packed"

            once(f"{name}.pack.json", pack)
            result = measure(folder, name)
            size = sum(f.stat().st_size for f in folder.glob("experts-*.safetensors"))
            cost = 100 * (result["perplexity"] / base["perplexity"] - 1)
            rows.append({"bits": bits, "recipe": recipe, "expert_bytes": size, "against_bf16": cost, "goal": GOALS[bits], **result})

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    data = {"commit": commit, "calibration_tokens": args.tokens, "bf16": base, "rows": rows}
    (RESULTS / f"{NAME}.json").write_text(json.dumps(data, indent=1) + "\n")
    print(redraw().read_text())


def redraw():
    """The page and its chart, from experts-quality.json."""
    data = json.loads((RESULTS / f"{NAME}.json").read_text())
    base, rows = data["bf16"], data["rows"]
    best = lambda r: r["recipe"] == "what experts see"  # noqa: E731
    met = lambda r: r["against_bf16"] <= r["goal"]  # noqa: E731
    of = lambda bits, recipe: next(r["against_bf16"] for r in rows if (r["bits"], r["recipe"]) == (bits, recipe))  # noqa: E731
    widths = sorted({r["bits"] for r in rows})
    found = [
        f"{bits} bits: {of(bits, 'what experts see'):+.2f} % perplexity by what experts see, {of(bits, 'search for least squares'):+.2f} % by a search for least squares, "
        f"{of(bits, MLX):+.2f} % by MLX's rounding, {of(bits, 'minimum and maximum'):+.2f} % by each group's range."
        for bits in widths
    ]
    found.append(f"Goals for the best recipe met: {sum(met(r) for r in rows if best(r))} of {len(widths)}.")
    found.append(f"It reads {data['calibration_tokens']:,} tokens of calibration, from texts outside the held-out one. All recipes give files of the same size.")
    bars = [
        Bar(f"{r['bits']} bits, {r['recipe']}", r["against_bf16"], f"+{r['against_bf16']:.2f} %", goal=r["goal"] if best(r) else None, missed=best(r) and not met(r))
        for r in rows
    ]
    chart = Chart("What quantised experts cost", bars, Amounts("%"), "Perplexity of the demo model's held-out text, against bf16; less is better. Only experts are quantised, in groups of 64.")
    page = top(NAME, "Quality of quantised experts", {"": chart}, found)
    page += f"\nPerplexity of the demo model's held-out text ({base['text_tokens']:,} tokens, windows of 512, f32 activations) with experts in groups of 64 and all else bf16, by\n"
    page += f"`bench/experts_quality.py` at commit {data['commit']}. bf16 itself: {base['perplexity']:.3f}.\n\n"
    body = []
    for r in rows:
        goal = [f"+{r['goal']:.1f} %", "yes" if met(r) else "no"] if best(r) else ["-", "-"]
        body.append([str(r["bits"]), r["recipe"], f"{r['expert_bytes'] / 1e6:.1f}", f"{r['perplexity']:.3f}", f"{r['against_bf16']:+.2f} %", *goal])
    page += lines(["bits", "recipe", "MB of experts", "perplexity", "against bf16", "goal for the best", "met"], body)
    path = RESULTS / f"{NAME}.md"
    path.write_text(page)
    return path


if __name__ == "__main__":
    main()
