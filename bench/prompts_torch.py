"""Plain torch in bf16: `prompts_torch.py SHAPE ROUNDS TOKENS...`, on a GPU. Prompts through a dense model of that shape with random weights, as its own libraries compute it: products by
cuBLAS, attention by flash attention, logits of the last token; no cache is written. Prints {tokens: [tokens per second of each round]}."""

import json
import sys
import time

import torch
from shapes import config
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

c = config(sys.argv[1])
rounds, prompts = int(sys.argv[2]), [int(n) for n in sys.argv[3:]]
hidden, inner, heads, kv, size = (c[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"))


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


qkv, out, gate_up, down = zip(*((random((heads + 2 * kv) * size, hidden), random(hidden, heads * size), random(2 * inner, hidden), random(hidden, inner)) for _ in range(c["num_hidden_layers"])))
head = random(c["vocab_size"], hidden)


def norm(x):
    return rms_norm(x, x.shape[-1:])


def attend(x, layer):
    parts = (norm(x) @ qkv[layer].T).split([heads * size, kv * size, kv * size], -1)
    q, k, v = (part.view(len(x), -1, size).transpose(0, 1)[None] for part in parts)
    o = scaled_dot_product_attention(norm(q), norm(k), v, is_causal=True, enable_gqa=True)
    return x + o[0].transpose(0, 1).reshape(len(x), -1) @ out[layer].T


@torch.no_grad()
def logits(x):
    for layer in range(len(qkv)):
        x = attend(x, layer)
        gate, up = (norm(x) @ gate_up[layer].T).chunk(2, -1)
        x = x + (silu(gate) * up) @ down[layer].T
    return norm(x[-1:]) @ head.T


def seconds(x):
    torch.cuda.synchronize()
    began = time.perf_counter()
    logits(x)
    torch.cuda.synchronize()
    return time.perf_counter() - began


found = {}
for n in prompts:
    x = random(n, hidden)
    # The first two choose kernels.
    found[n] = [n / s for s in [seconds(x) for _ in range(rounds + 2)][2:]]
print(json.dumps(found))
