"""Generates with the Python package: `python_generate.py MODEL PROMPT TOKENS`, with the package in PYTHONPATH. Prints JSON: seconds of import, loading and the first token, tokens a second, and
the tokens. Nothing but the package and the standard library."""

import json
import sys
import time

begun = time.perf_counter()
import sluice  # noqa: E402

imported = time.perf_counter()
path, prompt, count = sys.argv[1:]
model, tokenizer = sluice.load(path, max_context=1024, draft="off")
loaded = time.perf_counter()
pieces, first = [], 0.0
for piece in sluice.stream_generate(model, tokenizer, prompt, max_tokens=int(count), ignore_eos=True):
    first = first or time.perf_counter()
    pieces.append(piece)
tokens = [piece.token for piece in pieces if not piece.finish_reason]
print(json.dumps({"import": imported - begun, "load": loaded - imported, "first": first - begun, "rate": pieces[-1].generation_tps, "tokens": tokens}), flush=True)
