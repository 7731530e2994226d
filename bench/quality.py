#!/usr/bin/env python3
"""What quantisation, fewer experts and activation modes cost the demo model: perplexity of its held-out text.

    bench/quality.py CHECKPOINT [--text FILE] [--scratch FOLDER]

CHECKPOINT is the unpacked demo checkpoint (bf16). Packs it at each width with `sluice pack`, measures each with `sluice eval ppl` (windows of 512)
and writes docs/results/quality.md and quality.json. Takes a quarter of an hour on two cores.
"""
import argparse, json, pathlib, subprocess, tempfile

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

    out = ROOT / "docs/results"
    out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    (out / "quality.json").write_text(json.dumps({"commit": commit, "rows": rows}, indent=1) + "\n")
    lines = [
        "# Quality of the demo model",
        "",
        f"Perplexity of its held-out text ({rows[0]['text_tokens']:,} tokens, windows of {rows[0]['window']}), by `bench/quality.py` at commit {commit}.",
        "Plain rounding to MLX's affine groups, everything quantised, unless it says otherwise. The reference implementation gives 2.8617 nats for the first row,",
        "2.8872, 2.9822 and 3.1102 for 6, 4 and 3 experts (`tests/golden/demo-ppl.json`).",
        "",
        "| model | MB | perplexity | nats per token | against bf16 |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        change = (r["perplexity"] / base - 1) * 100
        lines.append(f"| {r['what']} | {r['MB']} | {r['perplexity']:.3f} | {r['nats_per_token']:.4f} | {change:+.2f} % |")
    (out / "quality.md").write_text("\n".join(lines) + "\n")
    print((out / "quality.md").read_text())


if __name__ == "__main__":
    main()
