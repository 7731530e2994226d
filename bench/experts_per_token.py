#!/usr/bin/env python3
"""What fewer experts per token cost a model: perplexity of a text by `--experts-per-token`, which changes the model's output.

    bench/experts_per_token.py MODEL TEXT [--k 8,6,4,3,2] [--sluice BINARY]

MODEL is a mixture's folder (the unpacked demo checkpoint, say, with its held-out text). Writes docs/results/experts-per-token.md and .json.
"""

import argparse
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--k", default="8,6,4,3,2")
    parser.add_argument("--sluice", default=str(ROOT / "target/release/sluice"))
    args = parser.parse_args()

    own = json.loads((args.model / "config.json").read_text())
    own = own.get("text_config", own)["num_experts_per_tok"]
    rows = []
    for k in sorted({own, *map(int, args.k.split(","))}, reverse=True):
        command = [args.sluice, "eval", "ppl", args.model, "--text", args.text, "--window", "512", "--experts-per-token", k, "--json"]
        print(f"{k} experts per token", flush=True)
        done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
        rows.append({"k": k, **json.loads(done.stdout)})
    base = next(r["perplexity"] for r in rows if r["k"] == own)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    page = [
        "# Fewer experts per token",
        "",
        f"Perplexity of {args.text.name} ({rows[0]['tokens']:,} tokens, windows of 512) by `--experts-per-token`, which changes what a model says; its own number is {own}.",
        f"By `bench/experts_per_token.py` with {args.model.name} at commit {commit}.",
        "",
        "| experts per token | perplexity | against the model's own |",
        "|---|---|---|",
        *(f"| {r['k']} | {r['perplexity']:.3f} | {100 * (r['perplexity'] / base - 1):+.2f} % |" for r in rows),
    ]
    out = ROOT / "docs/results/experts-per-token"
    out.with_suffix(".md").write_text("\n".join(page) + "\n")
    out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(page))


if __name__ == "__main__":
    main()
