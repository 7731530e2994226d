#!/usr/bin/env python3
"""What quantised experts cost the demo model, all else bf16, by recipe and bits: perplexity of its held-out text.

    bench/experts_quality.py CHECKPOINT --calibration FILE [--bits 2,3,4] [--tokens N] [--scratch FOLDER] [--sluice BINARY]

CHECKPOINT is the unpacked demo checkpoint (bf16). Each width is packed in groups of 64 by the range of each group (s = (max - min) / (2^bits - 1), b = min), by MLX's
rounding, by the search for least squares, and by what the experts see when the model reads the calibration text (which `bench/calibration_text.py` makes; a text that shares
60 characters with the held-out one is refused). Each is measured by `sluice eval ppl` (f32 activations, windows of 512). Writes docs/results/experts-quality.md and .json;
what is in the scratch folder already is not packed or measured again.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

from calibration_text import shares, windows

ROOT = pathlib.Path(__file__).resolve().parent.parent
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
            "MLX's rounding": [],
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
    out = ROOT / "docs/results/experts-quality"
    out.with_suffix(".json").write_text(json.dumps({"commit": commit, "calibration_tokens": args.tokens, "bf16": base, "rows": rows}, indent=1) + "\n")
    lines = [
        "# Quality of quantised experts",
        "",
        f"Perplexity of the demo model's held-out text ({base['text_tokens']:,} tokens, windows of 512, f32 activations) with experts in groups of 64 and all else bf16, by",
        f"`bench/experts_quality.py` at commit {commit}; {args.tokens:,} tokens of calibration, from texts that are not in the held-out ones. bf16 itself: {base['perplexity']:.3f}.",
        "",
        "| bits | recipe | MB of experts | perplexity | against bf16 | goal for the best | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        best = r["recipe"] == "what experts see"
        goal, met = (f"+{r['goal']:.1f} %", "yes" if r["against_bf16"] <= r["goal"] else "no") if best else ("-", "-")
        lines.append(f"| {r['bits']} | {r['recipe']} | {r['expert_bytes'] / 1e6:.1f} | {r['perplexity']:.3f} | {r['against_bf16']:+.2f} % | {goal} | {met} |")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


main()
