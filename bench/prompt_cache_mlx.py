"""mlx-lm's prompt cache on the CPU: `prompt_cache_mlx.py FOLDER THREADS DTYPE TOKENS FILE`, with the Python of the peers' environment. Saves a cache of TOKENS tokens in FILE if
there is none, and says `ready`; then, for each line that it reads, loads it and computes one token behind it, and prints the milliseconds that both took together. The cache's keys
and values are random: computing so many takes minutes here, and only reading them is timed."""

import json
import os
import sys
import time
from pathlib import Path

folder, threads, dtype, tokens, file = sys.argv[1:]
# MLX has no setting for threads.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import KVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

mx.set_default_device(mx.cpu)
mx.random.seed(0)
dtype = getattr(mx, dtype)
config = json.loads((Path(folder) / "config.json").read_text())
# It knows the text part of such models by the whole's name, under another prefix.
changed = {}
if config["model_type"].endswith("_text"):
    named = {f"language_model.{key}" if isinstance(value, (dict, bool)) else key: value for key, value in config.get("quantization", {}).items()}
    changed = {"model_type": config["model_type"].removesuffix("_text"), "quantization": named, "quantization_config": named}
model, _ = load_model(Path(folder), model_config=changed)
model.set_dtype(dtype)


def feed(cache, ids):
    """The likeliest token behind them."""
    return mx.argmax(model(mx.array([ids]), cache=cache)[:, -1], axis=-1).item()


cache = make_prompt_cache(model)
feed(cache, list(range(300, 308)))
if not Path(file).exists():
    for part in cache:
        if isinstance(part, KVCache):
            shapes = [(*x.shape[:2], int(tokens), x.shape[3]) for x in part.state[:2]]
            part.state = (*[mx.random.normal(s).astype(dtype) for s in shapes], int(tokens))
    save_prompt_cache(file, cache)
del cache
print("ready", flush=True)
for _ in sys.stdin:
    begun = time.perf_counter()
    feed(load_prompt_cache(file), [308])
    print(1e3 * (time.perf_counter() - begun), flush=True)
