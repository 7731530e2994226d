"""The random-weight models that are measured: their configs, and every tensor under the names of each format.

Dimensions are those of published models; layers are fewer where a whole model would not fit a small machine. A shape is one of `CONFIGS`, or a *giant*: a model that
`sluice plan` knows by name (`crates/cli/src/presets`), `@` and a number of layers, such as `qwen3.5-397b-a17b@4`. A giant's vocabulary is cut in proportion to its layers,
so that embedding and head are the same part of the file as in the whole model; or it is given, as in `qwen3.5-397b-a17b@1:16384`. Nothing here is random or written: `make_model.py` does that. Standard library
only, since the runner imports it too.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

KNOWN = Path(__file__).resolve().parent.parent / "crates" / "cli" / "src" / "presets"

VOCABULARY = 151_936
# What a giant's mixers add to the residual stream, all layers together, beside those of the usual deviation in one layer: see `make_model.py` on routing.
OUT = 2.0

# As a checkpoint's config.json has them.
CONFIGS = {
    # Qwen3-0.6B, whole.
    "dense": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
    },
    # Six layers of Qwen3-30B-A3B.
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "rope_theta": 1_000_000.0,
    },
    # Eight layers of Qwen3-Next-80B-A3B, with a quarter of its experts.
    "hybrid": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 128,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "rope_theta": 10_000_000.0,
    },
}


def _qwen3(hidden, layers, heads, wide, tied):
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": wide,
        "tie_word_embeddings": tied,
        "rope_theta": 1_000_000.0,
    }


# Whole Qwen3 models, for the suites that load them and that read GGUF.
CONFIGS["1.7b"] = _qwen3(2048, 28, 16, 6144, True)
CONFIGS["4b"] = _qwen3(2560, 36, 32, 9728, True)
CONFIGS["8b"] = _qwen3(4096, 36, 32, 12288, False)
CONFIGS["14b"] = _qwen3(5120, 40, 40, 17408, False)
# All layers of Qwen3-30B-A3B, and of Qwen3-Next-80B-A3B with a quarter of its experts (512 would be 45 GB), for the suite of GPUs.
CONFIGS["30b-a3b"] = CONFIGS["moe"] | {"num_hidden_layers": 48}
CONFIGS["next-48"] = CONFIGS["hybrid"] | {"num_hidden_layers": 48}
for _config in CONFIGS.values():
    _config.update(
        vocab_size=VOCABULARY,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=151_643,
        eos_token_id=151_645,
        dtype="bfloat16",
        torch_dtype="bfloat16",
    )
# A few layers of other families: latent attention, a mixture with shared experts, and one in MXFP4 with windows. As GGUF files alone, which both engines take.
FEWER = {"latent": ("glm-4.7-flash", 8), "air": ("glm-4.5-air", 4), "gpt-oss": ("gpt-oss-20b", 8), "gpt-oss-large": ("gpt-oss-120b", 4)}
for _name, (_whole, _layers) in FEWER.items():
    CONFIGS[_name] = json.loads((KNOWN / f"{_whole}.json").read_text()) | {"num_hidden_layers": _layers, "num_nextn_predict_layers": 0}
# llama.cpp's AMX cannot take matrices of heads in blocks: an assertion ends it.
CONFIGS["latent-bf16"] = CONFIGS["latent"] | {"heads_in": "BF16"}
# A quarter of the layers of Qwen3-8B and of Qwen3-0.6B, and of the vocabulary, so that embedding and head are the same part of them as in the whole models: a pair, of which the small one drafts.
for _name, _whole, _layers in (("8b-quarter", "8b", 9), ("0.6b-quarter", "dense", 7)):
    CONFIGS[_name] = CONFIGS[_whole] | {"num_hidden_layers": _layers, "vocab_size": VOCABULARY // 4 // 256 * 256, "tie_word_embeddings": False}


def is_giant(shape):
    return "@" in shape


@cache
def config(shape):
    """The config.json of a shape, before quantisation."""
    if not is_giant(shape):
        return CONFIGS[shape]
    name, size = shape.split("@")
    layers, _, vocabulary = size.partition(":")
    found = json.loads((KNOWN / f"{name}.json").read_text())
    of_layers = found["vocab_size"] * int(layers) // found["num_hidden_layers"] // 256 * 256
    found["vocab_size"] = int(vocabulary or max(1024, of_layers))
    found["num_hidden_layers"] = int(layers)
    return found


def is_hybrid(c):
    return "full_attention_interval" in c


def is_latent(c):
    return "kv_lora_rank" in c


def is_gpt_oss(c):
    return c["model_type"] == "gpt_oss"


@dataclass(frozen=True)
class Tensor:
    """One weight. `name` is MLX's, without `.weight` where it is a matrix; `shape` is row-major, inputs last."""

    name: str
    gguf: str
    shape: tuple
    # matrix: quantised. embedding, expert: a giant's, quantised too. router: a matrix that both formats keep finer (8 bits in MLX's,
    # f32 in GGUF's). one: a norm at one. small: a vector around zero. conv: taps of a convolution. decay, bias: vectors of the delta rule.
    kind: str = "matrix"
    # The vector shape that GGUF wants, where it differs.
    gguf_shape: tuple = ()
    # A factor on the usual deviation, or on one.
    part: float = 1.0
    # How far the first `leaning` rows (0: all) lean to what a giant's embeddings have in common.
    lean: float = 0.0
    leaning: int = 0


def tensors(shape):
    """Every weight of a shape, in the order in which a model uses them."""
    c = config(shape)
    hidden, hybrid, giant = c["hidden_size"], is_hybrid(c), is_giant(shape)
    yield Tensor("model.embed_tokens", "token_embd.weight", (c["vocab_size"], hidden), "embedding" if giant else "matrix")
    for i in range(c["num_hidden_layers"]):
        at, to = f"model.layers.{i}", f"blk.{i}"
        linear = hybrid and (i + 1) % c["full_attention_interval"] != 0
        after = "ffn_norm" if c["model_type"] in ("qwen3", "qwen3_moe", "glm4_moe_lite") else "post_attention_norm"
        yield Tensor(f"{at}.input_layernorm.weight", f"{to}.attn_norm.weight", (hidden,), "one")
        part = OUT / c["num_hidden_layers"] ** 0.5 if giant else 1.0
        mixer = _latent if is_latent(c) else _biased if is_gpt_oss(c) or c.get("attention_bias") else _delta_net if linear else _attention
        yield from mixer(c, at, to, float(giant), part)
        yield Tensor(f"{at}.post_attention_layernorm.weight", f"{to}.{after}.weight", (hidden,), "one")
        yield from _feed_forward(c, i, at, to, "expert" if giant else "matrix")
    yield Tensor("model.norm.weight", "output_norm.weight", (hidden,), "one")
    if not c["tie_word_embeddings"]:
        yield Tensor("lm_head", "output.weight", (c["vocab_size"], hidden))


def _feed_forward(c, layer, at, to, kind):
    if is_gpt_oss(c):
        return _biased_experts(c, at, to)
    if "n_routed_experts" in c:
        return _dense(c, at, to) if layer < c["first_k_dense_replace"] else _shared_experts(c, at, to)
    return _experts(c, at, to, kind) if "num_experts" in c else _dense(c, at, to)


def _latent(c, at, to, *_):
    hidden, heads, rank, q_rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["q_lora_rank"]
    plain, rotated, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    name = f"{at}.self_attn"
    yield Tensor(f"{name}.q_a_proj", f"{to}.attn_q_a.weight", (q_rank, hidden))
    yield Tensor(f"{name}.q_a_layernorm.weight", f"{to}.attn_q_a_norm.weight", (q_rank,), "one")
    yield Tensor(f"{name}.q_b_proj", f"{to}.attn_q_b.weight", (heads * (plain + rotated), q_rank))
    yield Tensor(f"{name}.kv_a_proj_with_mqa", f"{to}.attn_kv_a_mqa.weight", (rank + rotated, hidden))
    yield Tensor(f"{name}.kv_a_layernorm.weight", f"{to}.attn_kv_a_norm.weight", (rank,), "one")
    yield Tensor(f"{name}.embed_q", f"{to}.attn_k_b.weight", (heads, rank, plain))
    yield Tensor(f"{name}.unembed_out", f"{to}.attn_v_b.weight", (heads, v, rank))
    yield Tensor(f"{name}.o_proj", f"{to}.attn_output.weight", (hidden, heads * v))


def _biased(c, at, to, *_):
    hidden, dim = c["hidden_size"], c["head_dim"]
    for part, rows in (("q", c["num_attention_heads"] * dim), ("k", c["num_key_value_heads"] * dim), ("v", c["num_key_value_heads"] * dim)):
        yield Tensor(f"{at}.self_attn.{part}_proj", f"{to}.attn_{part}.weight", (rows, hidden))
        yield Tensor(f"{at}.self_attn.{part}_proj.bias", f"{to}.attn_{part}.bias", (rows,), "small")
    yield Tensor(f"{at}.self_attn.o_proj", f"{to}.attn_output.weight", (hidden, c["num_attention_heads"] * dim))
    if is_gpt_oss(c):
        yield Tensor(f"{at}.self_attn.o_proj.bias", f"{to}.attn_output.bias", (hidden,), "small")
        yield Tensor(f"{at}.self_attn.sinks", f"{to}.attn_sinks.weight", (c["num_attention_heads"],), "small")


def _attention(c, at, to, lean, part):
    hidden, dim, gated = c["hidden_size"], c["head_dim"], is_hybrid(c)
    # Where few of the dimensions turn with the distance, they have to say it louder.
    louder = 2.0 if gated and lean else 1.0
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    yield Tensor(f"{at}.self_attn.q_proj", f"{to}.attn_q.weight", (2 * q if gated else q, hidden), lean=lean)
    yield Tensor(f"{at}.self_attn.k_proj", f"{to}.attn_k.weight", (kv, hidden), lean=lean)
    yield Tensor(f"{at}.self_attn.v_proj", f"{to}.attn_v.weight", (kv, hidden))
    yield Tensor(f"{at}.self_attn.q_norm.weight", f"{to}.attn_q_norm.weight", (dim,), "one", part=louder)
    yield Tensor(f"{at}.self_attn.k_norm.weight", f"{to}.attn_k_norm.weight", (dim,), "one")
    yield Tensor(f"{at}.self_attn.o_proj", f"{to}.attn_output.weight", (hidden, q), part=part)


def _delta_net(c, at, to, lean, part):
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values, taps = heads * c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
    channels, name = 2 * keys + values, f"{at}.linear_attn"
    if c["model_type"] == "qwen3_next":
        # GGUF has qkvz as two tensors, of which the first is the larger: the maker splits it.
        yield Tensor(f"{name}.in_proj_qkvz", f"{to}.attn_qkv.weight+{to}.attn_gate.weight", (channels + values, hidden))
        yield Tensor(f"{name}.in_proj_ba", f"{to}.ssm_ba.weight", (2 * heads, hidden))
    else:
        yield Tensor(f"{name}.in_proj_qkv", f"{to}.attn_qkv.weight", (channels, hidden), lean=lean, leaning=2 * keys)
        yield Tensor(f"{name}.in_proj_z", f"{to}.attn_gate.weight", (values, hidden), lean=lean)
        yield Tensor(f"{name}.in_proj_b", f"{to}.ssm_beta.weight", (heads, hidden), lean=-0.4 * lean)
        yield Tensor(f"{name}.in_proj_a", f"{to}.ssm_alpha.weight", (heads, hidden))
    yield Tensor(f"{name}.conv1d.weight", f"{to}.ssm_conv1d.weight", (channels, taps, 1), "conv", (channels, taps))
    yield Tensor(f"{name}.A_log", f"{to}.ssm_a", (heads,), "decay")
    yield Tensor(f"{name}.dt_bias", f"{to}.ssm_dt.bias", (heads,), "bias")
    yield Tensor(f"{name}.norm.weight", f"{to}.ssm_norm.weight", (c["linear_value_head_dim"],), "one")
    yield Tensor(f"{name}.out_proj", f"{to}.ssm_out.weight", (hidden, values), part=part)


def _dense(c, at, to):
    hidden, wide = c["hidden_size"], c["intermediate_size"]
    yield Tensor(f"{at}.mlp.gate_proj", f"{to}.ffn_gate.weight", (wide, hidden))
    yield Tensor(f"{at}.mlp.up_proj", f"{to}.ffn_up.weight", (wide, hidden))
    yield Tensor(f"{at}.mlp.down_proj", f"{to}.ffn_down.weight", (hidden, wide))


def _experts(c, at, to, kind):
    hidden, wide, n = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    yield Tensor(f"{at}.mlp.gate", f"{to}.ffn_gate_inp.weight", (n, hidden), "router")
    yield Tensor(f"{at}.mlp.switch_mlp.gate_proj", f"{to}.ffn_gate_exps.weight", (n, wide, hidden), kind)
    yield Tensor(f"{at}.mlp.switch_mlp.up_proj", f"{to}.ffn_up_exps.weight", (n, wide, hidden), kind)
    yield Tensor(f"{at}.mlp.switch_mlp.down_proj", f"{to}.ffn_down_exps.weight", (n, hidden, wide), kind)
    shared = c.get("shared_expert_intermediate_size")
    if shared:
        name = f"{at}.mlp.shared_expert"
        yield Tensor(f"{name}_gate", f"{to}.ffn_gate_inp_shexp.weight", (1, hidden), "router", (hidden,))
        yield Tensor(f"{name}.gate_proj", f"{to}.ffn_gate_shexp.weight", (shared, hidden))
        yield Tensor(f"{name}.up_proj", f"{to}.ffn_up_shexp.weight", (shared, hidden))
        yield Tensor(f"{name}.down_proj", f"{to}.ffn_down_shexp.weight", (hidden, shared))


def _shared_experts(c, at, to):
    hidden, wide, n = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    yield Tensor(f"{at}.mlp.gate", f"{to}.ffn_gate_inp.weight", (n, hidden), "router")
    yield Tensor(f"{at}.mlp.gate.e_score_correction_bias", f"{to}.exp_probs_b.bias", (n,), "small")
    for part, rows, cols in (("gate", wide, hidden), ("up", wide, hidden), ("down", hidden, wide)):
        yield Tensor(f"{at}.mlp.switch_mlp.{part}_proj", f"{to}.ffn_{part}_exps.weight", (n, rows, cols))
    shared = wide * c["n_shared_experts"]
    for part, rows, cols in (("gate", shared, hidden), ("up", shared, hidden), ("down", hidden, shared)):
        yield Tensor(f"{at}.mlp.shared_experts.{part}_proj", f"{to}.ffn_{part}_shexp.weight", (rows, cols))


def _biased_experts(c, at, to):
    hidden, wide, n = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    yield Tensor(f"{at}.mlp.router", f"{to}.ffn_gate_inp.weight", (n, hidden), "router")
    yield Tensor(f"{at}.mlp.router.bias", f"{to}.ffn_gate_inp.bias", (n,), "small")
    for part, rows, cols in (("gate", wide, hidden), ("up", wide, hidden), ("down", hidden, wide)):
        yield Tensor(f"{at}.mlp.experts.{part}_proj", f"{to}.ffn_{part}_exps.weight", (n, rows, cols), "expert")
        yield Tensor(f"{at}.mlp.experts.{part}_proj_bias", f"{to}.ffn_{part}_exps.bias", (n, rows), "small")
