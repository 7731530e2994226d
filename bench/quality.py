#!/usr/bin/env python3
"""What quantisation, fewer experts and activation modes cost the demo model: perplexity of its held-out text.

    bench/quality.py CHECKPOINT [--text FILE] [--scratch FOLDER]
    bench/run all --redraw      # the page anew, from quality.json

CHECKPOINT is the unpacked demo checkpoint (bf16). Packs it at each width with `sluice pack`, measures each with `sluice eval ppl` (windows of 512)
and writes docs/results/quality.md and quality.json. Takes a quarter of an hour on two cores.
"""
import argparse, json, pathlib, subprocess, sys, tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from chart import Amounts, Bar, Chart
from results import RESULTS, lines, top

NAME = "quality"
ROOT = pathlib.Path(__file__).resolve().parent.parent
binary = ROOT / "target/release/sluice"


def sluice(*args):
    return subprocess.run([binary, *map(str, args)], check=True, capture_output=True, text=True).stdout


def measure(model, text, *flags):
    print(f"eval ppl {model} {' '.join(map(str, flags))}", flush=True)
    return json.loads(sluice("eval", "ppl", model, "--text", text, "--window", 512, "--json", *flags))


def megabytes(folder):
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--scratch", type=pathlib.Path)
    parser.add_argument("--sluice", type=pathlib.Path, help="use this binary instead of building one")
    args = parser.parse_args()
    text = args.text or args.checkpoint / "heldout.txt"
    scratch = args.scratch or pathlib.Path(tempfile.mkdtemp(prefix="sluice-quality-"))
    global binary
    if args.sluice:
        binary = args.sluice
    else:
        subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "sluice"], check=True, cwd=ROOT)

    rows = []

    def add(what, model, *flags):
        result = measure(model, text, *flags)
        rows.append({"what": what, "MB": round(megabytes(model), 1), **result})
        return result["perplexity"]

    exact = ("--activations", "f32")
    base = add("bf16, f32 activations", args.checkpoint, *exact)
    for kv_type in ("bf16", "int8"):
        add(f"bf16, f32 activations, {kv_type} KV", args.checkpoint, *exact, "--kv-type", kv_type)
    for k in (6, 4, 3):
        add(f"bf16, {k} experts per token instead of 8", args.checkpoint, *exact, "--experts-per-token", k)
    for bits in (8, 6, 4, 3, 2):
        packed = scratch / f"{bits}bit"
        if not packed.exists():
            sluice("pack", args.checkpoint, packed, "--bits", bits, "--group-size", 64)
        add(f"{bits} bits, groups of 64", packed, *exact)
    four = scratch / "4bit"
    for mode in ("bf16", "int8"):
        add(f"4 bits, groups of 64, {mode} activations", four, "--activations", mode)
    demo = ROOT / "models/demo"
    add("models/demo as shipped, f32 activations", demo, *exact)
    add("models/demo as shipped, default activations", demo)
    add("models/demo as shipped, default activations, int8 KV", demo, "--kv-type", "int8")

    RESULTS.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    (RESULTS / f"{NAME}.json").write_text(json.dumps({"commit": commit, "notes": [], "rows": rows}, indent=1) + "\n")
    print(redraw().read_text())


def redraw():
    """The page and its chart, from quality.json."""
    data = json.loads((RESULTS / f"{NAME}.json").read_text())
    rows = data["rows"]
    by, base = {r["what"]: r for r in rows}, rows[0]
    cost = lambda r: f"{100 * (r['perplexity'] / base['perplexity'] - 1):+.2f} %"  # noqa: E731
    bits = [by[what] for what in (f"{b} bits, groups of 64" for b in (8, 6, 4, 3, 2))]
    fewer = [by[what] for what in (f"bf16, {k} experts per token instead of 8" for k in (6, 4, 3))]
    found = [
        f"Perplexity in bf16: {base['perplexity']:.3f}, on a text outside the training data.",
        "Plain rounding of everything: " + ", ".join(f"{cost(r)} at {r['what'].partition(',')[0]}" for r in bits) + ".",
        f"int8 activations cost a model of 4 bits {100 * (by['4 bits, groups of 64, int8 activations']['perplexity'] / by['4 bits, groups of 64']['perplexity'] - 1):.2f} %, keys and values in int8 "
        f"{cost(by['bf16, f32 activations, int8 KV'])}.",
        f"Fewer experts per token: {', '.join(f'{cost(r)} with {r_k}' for r, r_k in zip(fewer, (6, 4, 3)))}, of 8.",
        f"models/demo as it ships: {by['models/demo as shipped, default activations']['MB']} MB instead of {base['MB']}, {cost(by['models/demo as shipped, default activations'])}.",
    ]
    bars = [Bar(f"{r['what']}", r["perplexity"], f"{r['perplexity']:.2f} ({cost(r)})") for r in rows]
    chart = Chart("Perplexity of the demo model", bars, Amounts(), f"Less is better; in brackets: against bf16. {base['text_tokens']:,} tokens of held-out text.", ("perplexity",))
    page = top(NAME, "Quality of the demo model", {"": chart}, found)
    page += f"\nPerplexity of its held-out text ({base['text_tokens']:,} tokens, windows of {base['window']}), by `bench/quality.py` at commit {data['commit']}{''.join('; ' + n for n in data.get('notes', []))}.\n"
    page += "Unless stated otherwise, everything is quantised by plain rounding to MLX's affine groups. The reference implementation gives 2.8617 nats for the first row,\n"
    page += "2.8872, 2.9822 and 3.1102 for 6, 4 and 3 experts (`tests/golden/demo-ppl.json`).\n\n"
    body = [[r["what"], str(r["MB"]), f"{r['perplexity']:.3f}", f"{r['nats_per_token']:.4f}", cost(r)] for r in rows]
    page += lines(["model", "MB", "perplexity", "nats per token", "against bf16"], body)
    path = RESULTS / f"{NAME}.md"
    path.write_text(page)
    return path


if __name__ == "__main__":
    main()
