#!/usr/bin/env python3
"""The tiny random checkpoint of Kimi-K3, as make.py's: see there. transformers has no such model, so the reference is a program of its own, in float32, of what llama.cpp's
`kimi-k3` computes. Its logits were checked against llama.cpp's on the same weights as float32 (README.md).

    env/bin/python tests/golden/make_kimi_k3.py
"""
import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from make import E2M1, HERE, MARGIN, PROMPT, STEPS, fill, record, spread, tokens_of

SEED = 193
TEXT = dict(
    model_type="kimi_linear", vocab_size=256, hidden_size=40, intermediate_size=56, num_hidden_layers=5, num_attention_heads=3, num_key_value_heads=3, hidden_act="situ",
    activation_situ_beta=1.5, activation_situ_linear_beta=2.5, rms_norm_eps=1e-5, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    mla_use_nope=True, mla_use_output_gate=True, first_k_dense_replace=1, moe_layer_freq=1, moe_intermediate_size=32, num_experts=8, num_experts_per_token=3, num_shared_experts=1,
    moe_router_activation_func="sigmoid", moe_renormalize=True, num_expert_group=1, topk_group=1, topk_method="noaux_tc", use_grouped_topk=True, routed_scaling_factor=1.6,
    routed_expert_hidden_size=32, latent_moe_use_norm=True, attn_res_block_size=2, tie_word_embeddings=False, max_position_embeddings=256, num_nextn_predict_layers=0,
    linear_attn_config={"full_attn_layers": [3, 5], "kda_layers": [1, 2, 4], "head_dim": 16, "num_heads": 3, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
                        "gate_lower_bound": -5.0},
    quantization_config={"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
                         "config_groups": {"group_0": {"targets": ["Linear"], "format": "mxfp4-pack-quantized",
                                                       "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}}}})
CONFIG = dict(architectures=["KimiK3ForConditionalGeneration"], model_type="kimi_k3", dtype="bfloat16", text_config=TEXT)
PREFIX = "language_model."


def shapes(c):
    """Every tensor of the text model by its published name."""
    hidden, heads, latent, width = c["hidden_size"], c["num_attention_heads"], c["routed_expert_hidden_size"], c["moe_intermediate_size"]
    delta = c["linear_attn_config"]
    inner, taps = delta["num_heads"] * delta["head_dim"], delta["short_conv_kernel_size"]
    nope, rope, values = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    all = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "lm_head.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,),
           "model.output_attn_res_norm.weight": (hidden,), "model.output_attn_res_proj.weight": (1, hidden)}
    for layer in range(c["num_hidden_layers"]):
        of = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        for half in ("self_attention", "mlp"):
            of |= {f"{half}_res_norm.weight": (hidden,), f"{half}_res_proj.weight": (1, hidden)}
        if layer + 1 in delta["full_attn_layers"]:
            attention = {"q_a_proj.weight": (c["q_lora_rank"], hidden), "q_a_layernorm.weight": (c["q_lora_rank"],), "q_b_proj.weight": (heads * (nope + rope), c["q_lora_rank"]),
                         "kv_a_proj_with_mqa.weight": (c["kv_lora_rank"] + rope, hidden), "kv_a_layernorm.weight": (c["kv_lora_rank"],),
                         "kv_b_proj.weight": (heads * (nope + values), c["kv_lora_rank"]), "g_proj.weight": (heads * values, hidden), "o_proj.weight": (hidden, heads * values)}
        else:
            attention = {f"{part}_proj.weight": (inner, hidden) for part in "qkvg"} | {f"{part}_conv1d.weight": (inner, 1, taps) for part in "qkv"}
            # There are as many rates as a head has elements; those of the heads come first.
            attention |= {"f_a_proj.weight": (delta["head_dim"], hidden), "f_b_proj.weight": (inner, delta["head_dim"]), "b_proj.weight": (delta["num_heads"], hidden),
                          "A_log": (delta["head_dim"],), "dt_bias": (inner,), "o_norm.weight": (delta["head_dim"],), "o_proj.weight": (hidden, inner)}
        of |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        gated = lambda part, names, cols, rows: {f"{part}.{name}.weight": (cols, rows) if name == names[2] else (rows, cols) for name in names}
        projections = ("gate_proj", "up_proj", "down_proj")
        if layer < c["first_k_dense_replace"]:
            of |= gated("mlp", projections, hidden, c["intermediate_size"])
        else:
            of |= {"block_sparse_moe.gate.weight": (c["num_experts"], hidden), "block_sparse_moe.gate.e_score_correction_bias": (c["num_experts"],),
                   "block_sparse_moe.routed_expert_down_proj.weight": (latent, hidden), "block_sparse_moe.routed_expert_up_proj.weight": (hidden, latent),
                   "block_sparse_moe.routed_expert_norm.weight": (latent,)}
            of |= gated("block_sparse_moe.shared_experts", projections, hidden, width * c["num_shared_experts"])
            for expert in range(c["num_experts"]):
                of |= gated(f"block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"), latent, width)
        all |= {f"model.layers.{layer}.{name}": shape for name, shape in of.items()}
    return all


def pack(tensor):
    """Numbers of four bits, two in a byte, the powers of two of each 32 of them, and the values that they stand for."""
    groups = tensor.unflatten(-1, (-1, 32))
    exponents = (torch.floor(torch.log2(groups.abs().amax(-1))) - 2).clamp(-127, 127)
    codes = (groups / torch.exp2(exponents)[..., None]).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    values = (E2M1[codes] * torch.exp2(exponents)[..., None]).flatten(-2)
    codes = codes.flatten(-2).to(torch.uint8)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous(), (exponents + 127).to(torch.uint8), values


def weights(c):
    """What the file has, and what it stands for in float32."""
    generator, stored, values = torch.Generator().manual_seed(SEED), {}, {}
    for name, shape in shapes(c).items():
        tensor = 0.2 * torch.randn(shape, generator=generator) if name.endswith("e_score_correction_bias") else fill(name, shape, "kimi_k3", generator)
        if ".experts." in name:
            packed, scales, values[name] = pack(tensor)
            module = PREFIX + name.removesuffix(".weight")
            stored |= {f"{module}.weight_packed": packed, f"{module}.weight_scale": scales}
            continue
        kept = tensor if name.endswith(("A_log", "dt_bias", "e_score_correction_bias")) else tensor.bfloat16()
        stored[PREFIX + name], values[name] = kept, kept.float()
    return stored, values


class Reference:
    def __init__(self, c, w):
        self.c, self.w, self.margins = c, w, []

    def rms(self, x, weight):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * weight

    def situ(self, gate, up):
        beta, linear = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear * torch.tanh(up / linear)

    def feed_forward(self, x, part, names=("gate_proj", "up_proj", "down_proj")):
        gate, up, down = (self.w[f"{part}.{name}.weight"] for name in names)
        return self.situ(x @ gate.T, x @ up.T) @ down.T

    def mixed(self, kept, x, part):
        """The mixture of the streams that were kept and of the present one: scores are of normed streams, what is summed is not."""
        streams = torch.stack([*kept, x])
        scores = self.rms(streams, self.w[f"{part}_norm.weight"]) @ self.w[f"{part}_proj.weight"][0]
        return (scores.softmax(0)[..., None] * streams).sum(0)

    def delta(self, x, part):
        c, w = self.c["linear_attn_config"], self.w
        heads, dim, taps = c["num_heads"], c["head_dim"], c["short_conv_kernel_size"]

        def convolved(name):
            y = (x @ w[f"{part}.{name}_proj.weight"].T).T[None]
            y = F.conv1d(F.pad(y, (taps - 1, 0)), w[f"{part}.{name}_conv1d.weight"], groups=heads * dim)
            return F.silu(y[0].T).unflatten(-1, (heads, dim))
        q, k, v = (convolved(name) for name in "qkv")
        q, k = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        f = (x @ w[f"{part}.f_a_proj.weight"].T @ w[f"{part}.f_b_proj.weight"].T + w[f"{part}.dt_bias"]).unflatten(-1, (heads, dim))
        decay = torch.exp(c["gate_lower_bound"] * torch.sigmoid(w[f"{part}.A_log"][:heads].exp()[:, None] * f))
        write = torch.sigmoid(x @ w[f"{part}.b_proj.weight"].T)
        state, out = torch.zeros(heads, dim, dim), []
        for t in range(len(x)):
            state = state * decay[t][..., None]
            change = write[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][..., None] * change[:, None]
            out.append(torch.einsum("hk,hkv->hv", q[t] * dim ** -0.5, state))
        gate = torch.sigmoid(x @ w[f"{part}.g_proj.weight"].T).unflatten(-1, (heads, dim))
        return (self.rms(torch.stack(out), w[f"{part}.o_norm.weight"]) * gate).flatten(-2) @ w[f"{part}.o_proj.weight"].T

    def attention(self, x, part):
        c, w = self.c, self.w
        heads, nope, values, rank = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
        q = self.rms(x @ w[f"{part}.q_a_proj.weight"].T, w[f"{part}.q_a_layernorm.weight"]) @ w[f"{part}.q_b_proj.weight"].T
        small, shared = (x @ w[f"{part}.kv_a_proj_with_mqa.weight"].T).split([rank, c["qk_rope_head_dim"]], -1)
        kv = self.rms(small, w[f"{part}.kv_a_layernorm.weight"]) @ w[f"{part}.kv_b_proj.weight"].T
        k, v = kv.unflatten(-1, (heads, nope + values)).split([nope, values], -1)
        k = torch.cat([k, shared[:, None].expand(-1, heads, -1)], -1)
        q = q.unflatten(-1, (heads, -1))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        scores = scores + torch.full(scores.shape[1:], float("-inf")).triu(1)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(-2)
        return (out * torch.sigmoid(x @ w[f"{part}.g_proj.weight"].T)) @ w[f"{part}.o_proj.weight"].T

    def mixture(self, x, part):
        c, w = self.c, self.w
        scores = torch.sigmoid(x @ w[f"{part}.gate.weight"].T)
        choice = scores + w[f"{part}.gate.e_score_correction_bias"]
        best = choice.sort(descending=True).values
        k = c["num_experts_per_token"]
        self.margins.append((best[:, k - 1] - best[:, k]).min())
        chosen = choice.topk(k).indices
        factors = scores.gather(1, chosen)
        factors = factors / factors.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        small, routed = x @ w[f"{part}.routed_expert_down_proj.weight"].T, []
        for t in range(len(x)):
            each = [factor * self.feed_forward(small[t], f"{part}.experts.{e}", ("w1", "w3", "w2")) for e, factor in zip(chosen[t].tolist(), factors[t])]
            routed.append(sum(each))
        routed = self.rms(torch.stack(routed), w[f"{part}.routed_expert_norm.weight"]) @ w[f"{part}.routed_expert_up_proj.weight"].T
        return routed + self.feed_forward(x, f"{part}.shared_experts")

    @torch.no_grad()
    def logits(self, tokens):
        c, w, kept = self.c, self.w, []
        x = w["model.embed_tokens.weight"][tokens]
        for layer in range(c["num_hidden_layers"]):
            part = f"model.layers.{layer}"
            y = self.rms(self.mixed(kept, x, f"{part}.self_attention_res"), w[f"{part}.input_layernorm.weight"])
            is_attention = layer + 1 in c["linear_attn_config"]["full_attn_layers"]
            y = (self.attention if is_attention else self.delta)(y, f"{part}.self_attn")
            if layer % c["attn_res_block_size"] == 0:
                kept.append(x)
                x = y
            else:
                x = x + y
            y = self.rms(self.mixed(kept, x, f"{part}.mlp_res"), w[f"{part}.post_attention_layernorm.weight"])
            x = x + (self.feed_forward(y, f"{part}.mlp") if layer < c["first_k_dense_replace"] else self.mixture(y, f"{part}.block_sparse_moe"))
        return self.rms(self.mixed(kept, x, "model.output_attn_res"), w["model.norm.weight"]) @ w["lm_head.weight"].T


def examine(w, tokens, logits):
    """How much each part matters: the result without it."""
    parts = {"attention": (".kv_b_proj.weight",), "linear attention": (".b_proj.weight", ".dt_bias"), "mlp": (".mlp.down_proj.weight",), "experts": (".routed_expert_up_proj.weight",),
             "shared expert": (".shared_experts.down_proj.weight",), "attention residuals": ("_res_proj.weight",), "gates": (".g_proj.weight",),
             "norm of experts": (".routed_expert_norm.weight",)}
    facts = {}
    for what, ends in parts.items():
        value = (lambda t: torch.ones_like(t)) if what.startswith("norm") else torch.zeros_like
        changed = {name: value(tensor) if name.endswith(ends) else tensor for name, tensor in w.items()}
        facts[what] = round(float((Reference(TEXT, changed).logits(tokens) - logits).abs().max()) / spread(logits), 3)
        assert facts[what] > 0.05, f"{what} hardly matters ({facts[what]})"
    return facts


if __name__ == "__main__":
    stored, values = weights(TEXT)
    tokens = tokens_of(SEED, TEXT["vocab_size"])
    reference = Reference(TEXT, values)
    logits = reference.logits(tokens)
    margin = round(float(min(reference.margins)), 5)
    assert margin > MARGIN, f"a routing decision is nearly a tie ({margin}): another seed is needed"
    facts = examine(values, tokens, logits) | {"router margin": margin}
    folder = HERE / "kimi_k3"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1, sort_keys=True) + "\n")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    record({"name": "kimi_k3", "folder": "kimi_k3", "config": "config.json", "model_type": "kimi_k3", "reference": "make_kimi_k3.py float32", "tokens": tokens, "first": 0,
            "vocab": TEXT["vocab_size"], "logits": "kimi_k3/logits.f32", "mode": "whole", "drift": None, "matters": facts,
            "note": "Kimi-K3: attention residuals, experts behind a projection in MXFP4 (compressed-tensors), SiTU, gated latent attention, bounded decays, bf16"}, logits)
    print(f"kimi_k3 range {spread(logits):.2f} std {logits.std():.2f} {facts}")
