"""mlx-lm on the CPU: `with_mlx.py FOLDER THREADS PROMPT CONTEXT TOKENS`, with the Python of the peers' environment. Prints JSON: tokens per second of a prompt of
PROMPT tokens, and of TOKENS single tokens behind a context (0 leaves one out). In float32, which is what its CPU build is fastest in."""

import json
import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
threads, prompt, context, tokens = map(int, sys.argv[2:])
# MLX has no setting for threads.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

mx.set_default_device(mx.cpu)
model, config = load_model(folder)
model.set_dtype(mx.float32)
mx.random.seed(0)
ids = mx.random.randint(0, config["vocab_size"], (1, max(prompt, context) + tokens + 2))
out = {}


def feed(cache, start, n):
    logits = model(ids[:, start : start + n], cache=cache)
    mx.eval(logits[:, -1], [c.state for c in cache])


if prompt:
    cache = make_prompt_cache(model)
    start = time.perf_counter()
    feed(cache, 0, prompt)
    out["prefill"] = prompt / (time.perf_counter() - start)
if tokens:
    cache = make_prompt_cache(model)
    feed(cache, 0, context)
    feed(cache, context, 1)
    start = time.perf_counter()
    for i in range(tokens):
        feed(cache, context + 1 + i, 1)
    out["decode"] = tokens / (time.perf_counter() - start)
print(json.dumps(out))
