#!/usr/bin/env python3
"""What fewer experts per token cost a model: perplexity of a text by `--experts-per-token`, which changes the model's output.

    bench/experts_per_token.py MODEL TEXT [--k 8,6,4,3,2] [--sluice BINARY]

MODEL is a mixture's folder (the unpacked demo checkpoint, say, with its held-out text). Writes docs/results/experts-per-token.md and .json;
`bench/run all --redraw` writes the page anew.
"""

import argparse
import json
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from chart import Amounts, Bar, Chart  # noqa: E402
from results import RESULTS, lines, top  # noqa: E402

NAME = "experts-per-token"
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
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    data = {"commit": commit, "model": args.model.name, "text": args.text.name, "own": own, "rows": rows}
    (RESULTS / f"{NAME}.json").write_text(json.dumps(data, indent=1) + "\n")
    print(redraw().read_text())


def redraw():
    """The page and its chart, from experts-per-token.json."""
    data = json.loads((RESULTS / f"{NAME}.json").read_text())
    rows, own = data["rows"], data["own"]
    base = next(r["perplexity"] for r in rows if r["k"] == own)
    cost = lambda r: 100 * (r["perplexity"] / base - 1)  # noqa: E731
    fewer = [r for r in rows if r["k"] < own]
    found = [
        f"Fewer experts per token than the model's own {own} cost perplexity: " + ", ".join(f"{cost(r):+.1f} % with {r['k']}" for r in fewer) + ".",
        "It is lossy, and happens only with `--experts-per-token`. [experts.md](experts.md) has the gain in speed when experts are read from disk.",
    ]
    bars = [Bar(f"{r['k']} experts per token", cost(r), f"+{cost(r):.2f} %") for r in rows]
    chart = Chart("What fewer experts per token cost", bars, Amounts("%"), f"Perplexity of the demo model's held-out text, against its own {own}; less is better.")
    page = top(NAME, "Fewer experts per token", {"": chart}, found)
    page += f"\nPerplexity of {data['text']} ({rows[0]['tokens']:,} tokens, windows of 512) by `--experts-per-token`; the model's own number is {own}.\n"
    page += f"By `bench/experts_per_token.py` with {data['model']} at commit {data['commit']}.\n\n"
    page += lines(["experts per token", "perplexity", "against the model's own"], [[str(r["k"]), f"{r['perplexity']:.3f}", f"{cost(r):+.2f} %"] for r in rows])
    path = RESULTS / f"{NAME}.md"
    path.write_text(page)
    return path


if __name__ == "__main__":
    main()
