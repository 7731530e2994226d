#!/usr/bin/env python3
"""MLX-quantised tiny checkpoints, written by mlx_lm's own conversion, and their golden logits. See make.py for the environment and the shape of a case.

    env/bin/python tests/golden/make_mlx.py [CASE...]

Two references for each, both of the last 17 rows: `logits` by transformers in float32 on the dequantised weights (scale * q + bias in float32, names and
layouts mapped back), and `logits_mlx` by mlx_lm on its CPU build with scales, biases and norms widened to float32, so that both compute the same function.
cases.json also says how far mlx_lm's plain run, in the file's own dtype, lies from them.
"""
import argparse
import json
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import torch
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from transformers import AutoConfig, AutoModelForCausalLM

import make
from make import HERE, LF, PROMPT, edit_tensors, examine, logits_by_steps, logits_whole, record, seeded, spread, tokens_of

mx.set_default_device(mx.cpu)
WIDTHS = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]


# ---------------------------------------------------------------- how modules are quantised (mlx_lm's quant_predicate: path, module -> bool or parameters)

def every_width():
    """Walks through all 18 pairs of bits and group size, module after module; layer 2 stays unquantised but for its down_proj."""
    count = iter(range(10 ** 6))
    def predicate(path, module):
        if ".layers.2." in path and "down_proj" not in path:
            return False
        bits, group = WIDTHS[(7 * next(count)) % len(WIDTHS)]
        return {"bits": bits, "group_size": group}
    return predicate


def overrides(rules, default=None):
    """The first (end of path, parameters) that fits; otherwise the architecture's own predicate (8-bit routers)."""
    def predicate(path, module):
        for end, parameters in rules:
            if path.endswith(end):
                return parameters
        return default(path, module) if default else True
    return predicate


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = dict(linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4)

CHECKPOINTS = {
    "mlx_qwen3": dict(
        seed=61, dtype="bfloat16", bits=4, group=64, note="4 bits, groups of 64, scales bf16, tied (the embedding is quantised too)",
        config=dict(model_type="qwen3", vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=10, num_key_value_heads=2,
                    head_dim=32, tie_word_embeddings=True, rope_parameters=ROPE)),
    "mlx_qwen3_widths": dict(
        seed=62, dtype="float16", bits=4, group=64, shards=2, predicate=lambda model: every_width(), explicit_false=True,
        note="all 18 pairs of bits and group size by per-layer overrides, an unquantised layer between them (named false), scales f16, untied, 2 shards",
        config=dict(model_type="qwen3", vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                    head_dim=32, tie_word_embeddings=False, rope_parameters=ROPE)),
    "mlx_llama_widths": dict(
        seed=68, dtype="float16", bits=4, group=64, shards=2, predicate=lambda model: every_width(), explicit_false=True,
        note="as mlx_qwen3_widths, with Llama 3's rotary scaling, tied",
        config=dict(model_type="llama", vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                    tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters=ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                                                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64})),
    "mlx_qwen3_moe": dict(
        seed=63, dtype="float16", bits=3, group=32, note="3 bits, groups of 32, routers 8 bits in groups of 64 (mlx_lm's default), a dense layer, scales f16",
        config=dict(model_type="qwen3_moe", vocab_size=256, hidden_size=128, intermediate_size=160, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[1], decoder_sparse_step=1,
                    tie_word_embeddings=False, rope_parameters=ROPE)),
    "mlx_qwen3_moe_asking": dict(
        seed=69, dtype="float16", bits=4, group=64,
        note="256 columns and 64 hidden, what the kernels for one token's mixture take, which ask the host for experts; a dense layer between two mixtures",
        config=dict(model_type="qwen3_moe", vocab_size=256, hidden_size=256, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=32, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[1], decoder_sparse_step=1,
                    tie_word_embeddings=True, rope_parameters=ROPE)),
    "mlx_qwen3_next": dict(
        seed=64, dtype="float32", bits=5, group=64, note="5 bits, groups of 64, scales f32, attention biases (so that a module has bias and biases)",
        config=dict(model_type="qwen3_next", vocab_size=256, hidden_size=128, intermediate_size=64, moe_intermediate_size=64, shared_expert_intermediate_size=64,
                    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
                    mlp_only_layers=[], layer_types=LF, attention_bias=True, tie_word_embeddings=True, rope_parameters=ROPE | {"partial_rotary_factor": 0.25}, **LINEAR),
        edit=[make.old_style, make.by_interval(2), make.changed(mlp_only_layers=[])]),
    "mlx_qwen3_next_plain": dict(
        seed=67, dtype="float16", note="MLX layouts without quantisation, f16: only the shape of conv1d tells that the norms already hold 1 + weight",
        config=dict(model_type="qwen3_next", vocab_size=256, hidden_size=40, intermediate_size=56, moe_intermediate_size=20, shared_expert_intermediate_size=24,
                    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True,
                    mlp_only_layers=[], layer_types=LF, tie_word_embeddings=True, rope_parameters=ROPE | {"partial_rotary_factor": 0.5}, **LINEAR),
        edit=[make.old_style, make.by_interval(2), make.changed(mlp_only_layers=[])]),
    "mlx_qwen3_5": dict(
        seed=65, dtype="bfloat16", bits=6, group=128, wrapper=True, vision=True,
        note="6 bits, groups of 128, scales bf16, A_log f32, converted from the multimodal wrapper, vision_tower tensors to skip",
        config=dict(model_type="qwen3_5_text", vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
                    head_dim=32, tie_word_embeddings=True, layer_types=LF, rope_parameters=ROPE | {"partial_rotary_factor": 0.25, "mrope_interleaved": True,
                                                                                                   "mrope_section": [2, 1, 1]}, **LINEAR)),
    "mlx_qwen3_5_moe": dict(
        seed=66, dtype="bfloat16", bits=2, group=32, note="experts 2 bits in groups of 32, attention 8 bits, out_proj not quantised, routers 8 bits, scales bf16",
        edit=[make.changed(full_attention_interval=2, model_type="qwen3_5_moe")],  # flat: mlx_lm takes a config without text_config, but knows no *_text
        predicate=lambda model: overrides([("self_attn.q_proj", {"bits": 8, "group_size": 128}), ("self_attn.k_proj", {"bits": 8, "group_size": 32}),
                                           ("self_attn.v_proj", {"bits": 6, "group_size": 32}), ("linear_attn.out_proj", False), ("in_proj_a", False),
                                           ("in_proj_qkv", {"bits": 4, "group_size": 32}), ("lm_head", {"bits": 6, "group_size": 64}),
                                           ("embed_tokens", {"bits": 4, "group_size": 64})], model.quant_predicate),
        config=dict(model_type="qwen3_5_moe_text", vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                    moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=8, num_experts_per_tok=3, tie_word_embeddings=False,
                    layer_types=LF, rope_parameters=ROPE | {"partial_rotary_factor": 0.5}, **LINEAR)),
}


# ---------------------------------------------------------------- conversion, as mlx_lm.convert does it

def write_original(folder, spec):
    """The tiny Hugging Face checkpoint that is then converted; not kept."""
    config = AutoConfig.for_model(**json.loads(json.dumps(spec["config"])))
    model = make.build(config, spec["seed"]).to(getattr(torch, spec["dtype"]))
    family = config.model_type
    model.save_pretrained(folder, save_original_format=not family.startswith("qwen3_5"))
    if family.startswith("qwen3_5"):
        edit_tensors(folder, make.widen_state)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    for edit in spec.get("edit", [make.old_style] if not family.startswith("qwen3_5") else [make.changed(full_attention_interval=2)]):
        written = edit(written)
    if spec.get("wrapper"):
        edit_tensors(folder, lambda name, tensor: {name.replace("model.", "model.language_model.", 1): tensor})
        written = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": written, "tie_word_embeddings": True,
                   "vision_config": dict(make.VISION), **make.IDS}
    path.write_text(json.dumps(written))
    return config


def convert(original, folder, spec):
    model, config = mlx_lm.utils.load_model(original)
    dtype, keep = getattr(mx, spec["dtype"]), getattr(model, "cast_predicate", lambda _: True)
    model.update(tree_map_with_path(lambda k, v: v.astype(dtype) if keep(k) and mx.issubdtype(v.dtype, mx.floating) else v, model.parameters()))
    predicate = spec["predicate"](model) if "predicate" in spec else None
    if "bits" in spec:
        model, config = mlx_lm.utils.quantize_model(model, config, spec["group"], spec["bits"], quant_predicate=predicate)
    if spec.get("explicit_false"):  # mlx_lm leaves unquantised modules unnamed; other writers name them false, and its loader takes both
        for path, module in model.named_modules():
            if isinstance(module, (mlx_lm.utils.nn.Linear, mlx_lm.utils.nn.Embedding)):
                config["quantization"][path] = False
    if spec.get("shards", 1) > 1:
        def two(weights):
            names, half = list(weights), len(weights) // 2
            return [{k: weights[k] for k in names[:half]}, {k: weights[k] for k in names[half:]}]
        kept, mlx_lm.utils.make_shards = mlx_lm.utils.make_shards, two
        mlx_lm.utils.save_model(folder, model)
        mlx_lm.utils.make_shards = kept
    else:
        mlx_lm.utils.save_model(folder, model)
    mlx_lm.utils.save_config(config, folder / "config.json")
    if spec.get("vision"):  # what mlx_vlm's conversions keep beside the text part
        weights = mx.load(str(folder / "model.safetensors"))
        weights["vision_tower.patch_embed.proj.weight"] = mx.ones((4, 2, 2, 2, 3), dtype=dtype)
        weights["vision_tower.blocks.0.norm1.weight"] = mx.ones((16,), dtype=dtype)
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"] = dict.fromkeys(sorted(weights), "model.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))


# ---------------------------------------------------------------- the two references

def logits_mlx(folder, tokens, widen):
    """[86, vocab] by mlx_lm with its own cache; `widen`: every floating parameter to float32 after loading."""
    model, _ = mlx_lm.utils.load_model(folder)
    if widen:
        model.set_dtype(mx.float32)
    cache = make_prompt_cache(model)
    rows = [model(mx.array([tokens[:PROMPT]]), cache=cache)[0]]
    rows += [model(mx.array([[token]]), cache=cache)[0] for token in tokens[PROMPT:]]
    out = mx.concatenate(rows).astype(mx.float32)
    mx.eval(out)
    return torch.tensor(out.tolist())


def dequantised(folder, family):
    """The tensors of an MLX folder in float32 under transformers' names: packed weights unpacked, convolutions [C, 1, K], zero-centred norms less 1."""
    weights = {}
    for path in folder.glob("model*.safetensors"):
        weights.update(mx.load(str(path)))
    plain = {}
    for name, value in weights.items():
        stem = name.rsplit(".", 1)[0]
        if name.startswith("vision_tower") or name.endswith((".scales", ".biases")):
            continue
        if name.endswith(".weight") and f"{stem}.scales" in weights:  # not a `bias`, which may stand beside `biases`
            scales, biases = (weights[f"{stem}.{n}"].astype(mx.float32) for n in ("scales", "biases"))
            quantization = json.loads((folder / "config.json").read_text())["quantization"]
            this = quantization.get(stem) or quantization
            assert value.shape[-1] * 32 == scales.shape[-1] * this["group_size"] * this["bits"], name
            value = mx.dequantize(value, scales, biases, group_size=this["group_size"], bits=this["bits"])
        value = torch.tensor(value.astype(mx.float32).tolist())
        name = name.removeprefix("language_model.")
        if name.endswith("conv1d.weight"):
            value = value.transpose(1, 2).contiguous()
        if family in make.ZERO_CENTRED and name.endswith(("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")):
            value = value - 1.0
        plain[name] = value
    for name in [n for n in plain if n.endswith("switch_mlp.gate_proj.weight")]:
        stem = name.removesuffix("switch_mlp.gate_proj.weight")
        plain[f"{stem}experts.gate_up_proj"] = torch.cat([plain.pop(name), plain.pop(f"{stem}switch_mlp.up_proj.weight")], dim=1)
        plain[f"{stem}experts.down_proj"] = plain.pop(f"{stem}switch_mlp.down_proj.weight")
    return plain


def make_checkpoint(name, spec):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as original:
        config = write_original(Path(original), spec)
        convert(Path(original), folder, spec)
    family = config.model_type.removesuffix("_text")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    missing, unexpected = model.load_state_dict(dequantised(folder, family), strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set()), (missing, unexpected)
    tokens = tokens_of(spec["seed"], config.vocab_size)
    logits, whole = logits_by_steps(model, tokens), logits_whole(model, tokens)
    drift = float((logits - whole).abs().max())
    assert drift < 1e-4 * spread(whole), f"{name}: whole pass and steps differ by {drift}"
    facts = examine(name, model, tokens, whole)
    wide = logits_mlx(folder, tokens, True)
    between = float((wide - logits).abs().max()) / spread(logits)
    try:
        rows = (logits_mlx(folder, tokens, False) - logits).abs().max(dim=1).values / spread(logits)
        plain = {"median row": round(float(rows.median()), 5), "worst row": round(float(rows.max()), 5)}
    except RuntimeError as problem:  # MLX's CPU build gathers unquantised experts in float32 only
        assert "only supports float32" in str(problem), problem
        plain = None
    assert between < 1e-4, f"{name}: mlx_lm in float32 and transformers differ by {between} of the range"
    wide[PROMPT - 1:].numpy().astype("<f4").tofile(folder / "logits-mlx.f32")
    record({"name": name, "folder": name, "config": "config.json", "model_type": json.loads((folder / "config.json").read_text())["model_type"],
            "reference": "transformers float32 on dequantised weights", "tokens": tokens, "first": PROMPT - 1, "vocab": logits.shape[1], "logits": f"{name}/logits.f32",
            "mode": "steps", "drift": drift, "matters": facts, "note": spec["note"], "logits_mlx": f"{name}/logits-mlx.f32",
            "mlx_float32_difference": between, "mlx_own_dtype_difference": plain}, logits)
    print(f"{name:20} range {spread(logits):7.2f} std {logits.std():.2f} drift {drift:.1e} {facts}; mlx float32 differs by {between:.1e} of the range, "
          f"mlx in {spec['dtype']} by {plain}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="folders to make (all, when none is named)")
    for name in parser.parse_args().cases or CHECKPOINTS:
        seeded(make_checkpoint, name, CHECKPOINTS[name])
