"""transformers on the CPU: `with_transformers.py FOLDER THREADS PROMPT CONTEXT TOKENS`, with the Python of the peers' environment. Prints JSON: tokens per second of a
prompt of PROMPT tokens, and of TOKENS single tokens behind a context (0 leaves one out)."""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
folder = sys.argv[1]
threads, prompt, context, tokens = map(int, sys.argv[2:])
torch.set_num_threads(threads)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
ids = torch.randint(0, model.config.vocab_size, (1, max(prompt, context) + tokens + 2))
out = {}


def feed(start, n, cache):
    return model(ids[:, start : start + n], past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values


with torch.inference_mode():
    if prompt:
        feed(0, prompt, None)
        start = time.perf_counter()
        feed(0, prompt, None)
        out["prefill"] = prompt / (time.perf_counter() - start)
    if tokens:
        cache = feed(0, context, None)
        cache = feed(context, 1, cache)
        start = time.perf_counter()
        for i in range(tokens):
            cache = feed(context + 1 + i, 1, cache)
        out["decode"] = tokens / (time.perf_counter() - start)
print(json.dumps(out))
