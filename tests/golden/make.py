#!/usr/bin/env python3
"""Tiny random checkpoints and their golden logits, by transformers in float32.

    python -m venv env && env/bin/pip install -r tests/golden/requirements.txt
    env/bin/python tests/golden/make.py [CASE...]       # this file's cases: Hugging Face safetensors
    env/bin/python tests/golden/make_mlx.py [CASE...]   # the MLX-quantised ones; make_gemma.py and so on: other families

Writes, beside this file, a folder per checkpoint, one little-endian f32 file of logits per case, and the list of all in cases.json; README.md says what is in them.
Every case: a prompt of 70 random tokens in one forward pass, then 16 single steps on the cache; 86 rows of logits, row i after token i (a variant of a
config on the same weights: the last 17 rows only). The script
insists that the whole sequence in one pass gives the same, that each kind of layer matters to the result, and that no routing decision is a near-tie.
"""
import argparse
import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
PROMPT, STEPS = 70, 16
ZERO_CENTRED = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "gemma2", "gemma3")  # y = x / rms(x) * (1 + weight)
MARGIN = 7e-4  # between the last chosen and the first unchosen router logit, at every position of every layer
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(2)


# ---------------------------------------------------------------- weights

def fill(name, shape, family, generator):
    """A random tensor whose size keeps activations, gates and routing lively: std 1/sqrt(columns) for matrices, norms around their neutral value."""
    def normal(mean, std):
        return mean + std * torch.randn(shape, generator=generator)
    leaf = name.rsplit(".", 2)[-2] if name.endswith((".weight", ".bias")) else name.rsplit(".", 1)[-1]
    if any(part in name for part in (".visual.", "vision_tower.", "multi_modal_projector.", "audio_tower.", "embed_vision.", "embed_audio.")) or name.startswith("mtp."):
        return normal(0.0, 0.1)
    if leaf == "A_log":  # decay rates between 0.03 and 3, so that some heads remember and others forget
        return torch.empty(shape).uniform_(-3.5, 1.1, generator=generator)
    if leaf == "dt_bias":
        return normal(-1.0, 1.0)
    if leaf == "D":
        return normal(1.0, 0.5)
    if leaf == "conv1d":
        return normal(0.2, 0.5)
    if name.endswith("linear_attn.norm.weight"):
        return normal(1.0, 0.3)
    if "norm" in leaf:
        return normal(0.0 if family in ZERO_CENTRED else 1.0, 0.3)
    if name.endswith((".bias", "_bias")):
        return normal(0.0, 0.3)
    if leaf == "index_kpool_compress_ape":
        return normal(0.0, 1.0)
    if leaf == "sinks":
        return normal(0.5, 1.0)
    if leaf in ("embed_tokens", "embed_tokens_per_layer", "embeddings"):
        return normal(0.0, 0.4)
    if leaf in ("scale", "per_expert_scale"):  # Gemma 4's router
        return normal(1.0, 0.3)
    if name.endswith("router.proj.weight"):
        leaf = "router"
    gain = {"gate": 3.0, "router": 3.0, "shared_expert_gate": 2.0, "in_proj_ba": 1.5, "in_proj_a": 1.5, "in_proj_b": 1.5, "lm_head": 2.0}.get(leaf, 1.3)
    if leaf in ("q_proj", "k_proj", "qkv_proj", "q_b_proj", "kv_b_proj"):
        gain = 1.8
    # gpt-oss has its experts by columns.
    return normal(0.0, gain * shape[-2 if family == "gpt_oss" and ".experts." in name else -1] ** -0.5)


def build(config, seed):
    """The architecture's own text model, or its multimodal wrapper where the config has a vision part, with `fill`ed weights in float32."""
    if hasattr(config, "vision_config"):
        cls = getattr(transformers, config.architectures[0])
        model = cls._from_config(config, attn_implementation="eager")
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    family = config.model_type.removesuffix("_text")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fill(name, tuple(parameter.shape), family, generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("tid2eid"):
                buffer.copy_(torch.stack([torch.randperm(config.n_routed_experts, generator=generator)[:buffer.shape[1]] for _ in buffer]))
            if name.endswith("layer_scalar"):
                buffer.copy_(0.6 + 0.5 * torch.rand(buffer.shape, generator=generator))
    return model.float().eval()


def edit_tensors(folder, change):
    """Rewrites each safetensors file of a folder through `change(name, tensor) -> {name: tensor}`, keeping the index in step."""
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text()) if index_path.exists() else None
    for path in sorted(folder.glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(path).items():
            tensors.update(change(name, tensor))
        save_file(tensors, path, metadata={"format": "pt"})
        if index:
            index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != path.name} | dict.fromkeys(tensors, path.name)
    if index:
        index_path.write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


# ---------------------------------------------------------------- the reference

class NearTie(Exception):
    """Another seed is needed: rounding could choose another expert."""


def tokens_of(seed, vocab):
    return torch.randint(0, vocab, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(seed + 1000)).tolist()


@torch.no_grad()
def logits_by_steps(model, tokens):
    """[86, vocab]: the prompt in one pass, then one token at a time on the cache."""
    out = model(input_ids=torch.tensor([tokens[:PROMPT]]), use_cache=True)
    rows, cache = [out.logits[0]], out.past_key_values
    for token in tokens[PROMPT:]:
        out = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0])
    return torch.cat(rows).float()


@torch.no_grad()
def logits_whole(model, tokens):
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def spread(logits):
    """The logits' range, by which every tolerance is measured."""
    return float(logits.max() - logits.min())


def margin(router, given, logits):
    """How near a router's choice comes to a tie, at the nearest token: of logits, or of the scores of sigmoid routers with what is added to them."""
    def gap(scores, k):
        best = scores.sort(descending=True).values
        return best[:, k - 1:k + 1].diff().abs().min()
    if hasattr(router, "per_expert_scale"):  # Gemma 4's gives probabilities
        return gap(logits.log(), router.config.top_k_experts)
    bias = given[1] if len(given) > 1 else getattr(router, "e_score_correction_bias", None)
    if bias is None:
        return gap(logits, router.top_k)
    scores = getattr(router, "score_fn", torch.sigmoid)(logits) + bias
    groups, top = getattr(router, "num_group", 1), getattr(router, "topk_group", 1)
    if groups == 1:
        return gap(scores, router.top_k)
    by_group = scores.view(len(scores), groups, -1)
    sums = by_group.topk(2, dim=-1).values.sum(-1)
    chosen = torch.zeros_like(sums).scatter_(1, sums.topk(top, dim=-1).indices, 1).bool()
    return torch.minimum(gap(sums, top), gap(by_group.masked_fill(~chosen.unsqueeze(-1), -1e9).flatten(1), router.top_k))


@torch.no_grad()
def examine(name, model, tokens, reference):
    """How much each kind of layer matters, and how near the routers come to a tie. Complains where a case would test too little."""
    facts = {}
    for what, pattern in {"attention": ("self_attn.o_proj.weight", "self_attn.o_b_proj.weight", "mixer.o_proj.weight"), "linear attention": "linear_attn.out_proj.weight",
                          "state space": ("mamba.out_proj.weight", "mixer.out_proj.weight"), "mlp": ("mlp.down_proj.weight", "mixer.down_proj.weight"),
                          "experts": ("mlp.experts.down_proj", ".experts.down_proj"), "per-layer embeddings": "embed_tokens_per_layer.weight",
                          "n-grams": "ngram_embedding.weight", "convolution of n-grams": "ple.conv1d.weight",
                          "shared expert": ("mlp.shared_expert.down_proj.weight", "mlp.shared_experts.down_proj.weight", "mixer.shared_experts.down_proj.weight"),
                          "shared mlp": "shared_mlp.output_linear.weight"}.items():
        hit = [p for n, p in model.named_parameters() if n.endswith(pattern) and "visual" not in n and "vision_tower" not in n]
        if not hit:
            continue
        kept = [p.clone() for p in hit]
        for p in hit:
            p.zero_()
        facts[what] = round(float((logits_whole(model, tokens) - reference).abs().max()) / spread(reference), 3)
        for p, k in zip(hit, kept):
            p.copy_(k)
        assert facts[what] > 0.05, f"{name}: {what} hardly matters ({facts[what]})"
    margins = []
    routers = [m for n, m in model.named_modules() if type(m).__name__.lower().endswith(("topkrouter", "gemma4textrouter"))]
    hooks = [r.register_forward_hook(lambda r, given, out: margins.append(margin(r, given, out[0].float()))) for r in routers]
    logits_whole(model, tokens)
    for hook in hooks:
        hook.remove()
    if margins:
        facts["router margin"] = round(float(min(margins)), 5)
        if facts["router margin"] < MARGIN:
            raise NearTie(f"{name}: a routing decision is nearly a tie ({facts['router margin']})")
    return facts


def load_reference(folder, config_file="config.json"):
    """The checkpoint as transformers itself reads it, weights widened to float32."""
    config = AutoConfig.for_model(**json.loads((folder / config_file).read_text()))
    cls = getattr(transformers, config.architectures[0])
    model, info = cls.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    return model.eval()


# ---------------------------------------------------------------- the list of cases

def record(case, logits):
    """Writes a case's logits and puts it into cases.json, which stays sorted by name."""
    path = HERE / case["logits"]
    case["rows"] = len(logits) - case["first"]
    logits[case["first"]:].numpy().astype("<f4").tofile(path)
    case["range"] = round(spread(logits), 4)
    listing = HERE / "cases.json"
    cases = json.loads(listing.read_text())["cases"] if listing.exists() else []
    cases = sorted([c for c in cases if c["name"] != case["name"]] + [case], key=lambda c: c["name"])
    listing.write_text('{"prompt": %d, "steps": %d, "cases": [\n' % (PROMPT, STEPS) + ",\n".join(json.dumps(c) for c in cases) + "\n]}\n")


def run_case(folder_name, suffix, tokens, note, exact_by_steps=True):
    """Records one config file of a folder. `exact_by_steps=False`: rotary frequencies that depend on the length seen so far; only one whole pass has a meaning."""
    folder = HERE / folder_name
    config_file = f"config{suffix}.json"
    model = load_reference(folder, config_file)
    whole = logits_whole(model, tokens)
    if exact_by_steps:
        logits = logits_by_steps(load_reference(folder, config_file), tokens)
        drift = float((logits - whole).abs().max())
        assert drift < 1e-4 * max(1.0, spread(whole)), f"{folder_name}{suffix}: whole pass and steps differ by {drift}"
    else:
        logits, drift = whole, None
    facts = examine(folder_name + suffix, model, tokens, whole)
    config = json.loads((folder / config_file).read_text())
    record({"name": folder_name + suffix, "folder": folder_name, "config": config_file, "model_type": config["model_type"], "reference": "transformers float32",
            "tokens": tokens, "first": PROMPT - 1 if suffix else 0, "vocab": logits.shape[1], "logits": f"{folder_name}/logits{suffix}.f32",
            "mode": "steps" if exact_by_steps else "whole", "drift": drift, "matters": facts, "note": note}, logits)
    print(f"{folder_name + suffix:40} range {spread(logits):7.2f} std {logits.std():.2f} drift {drift} {facts}", flush=True)
    return logits


# ---------------------------------------------------------------- shapes of config.json

def old_style(config):
    """config.json as hub checkpoints from before transformers 5 have it: rope_theta, rope_scaling and torch_dtype at the top."""
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    if "num_local_experts" in config:  # transformers 5 writes this for qwen3_moe
        config["num_experts"] = config.pop("num_local_experts")
    config["transformers_version"] = "4.57.0"
    return config


def by_interval(interval):
    """Layer types by `full_attention_interval` instead of a list, as Qwen3-Next's hub config has them."""
    def change(config):
        config.pop("layer_types")
        config["full_attention_interval"] = interval
        return config
    return change


def rope(**parameters):
    """Replaces rope_parameters' kind, keeping theta and the rotary part."""
    def change(config):
        kept = {k: v for k, v in config["rope_parameters"].items() if k in ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")}
        config["rope_parameters"] = kept | {k: v for k, v in parameters.items() if k != "max_position_embeddings"}
        config["max_position_embeddings"] = parameters.get("max_position_embeddings", config["max_position_embeddings"])
        return config
    return change


LLAMA3 = rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


def changed(**values):
    return lambda config: config | values


def renamed(old, new):
    return lambda config: {new if k == old else k: v for k, v in config.items()}


def without(*keys):
    return lambda config: {k: v for k, v in config.items() if k not in keys}


def beside(**scaling):
    """Adds `rope_scaling` to a config that has `rope_parameters`, as who follows a model card does; theta stands at the top, too."""
    return lambda config: config | {"rope_scaling": scaling, "rope_theta": config["rope_parameters"]["rope_theta"]}


def outside(**values):
    """Takes keys out of `text_config`, and puts these values beside it."""
    def change(config):
        for key in values:
            config["text_config"].pop(key)
        return config | values
    return change


def both_tied(config):
    config["text_config"]["tie_word_embeddings"] = True
    return config | {"tie_word_embeddings": True}


def as_head(name, tensor):
    """Stores the one matrix of a tied model under the head's name only."""
    return {"lm_head.weight" if name == "model.embed_tokens.weight" else name: tensor}


def hub_wrapper(interval):
    """The further keys that Qwen3.5's hub configs carry; layer_types gives way to the interval, so that both ways are covered."""
    def change(config):
        text = config["text_config"]
        text.pop("layer_types")
        text.update(full_attention_interval=interval, attn_output_gate=True, mamba_ssm_dtype="float32", mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False,
                    mlp_only_layers=[], partial_rotary_factor=text["rope_parameters"]["partial_rotary_factor"])
        return config
    return change


def add_mtp(family):
    """Adds a multi-token-prediction layer under hub names (`mtp.fc`, `mtp.layers.0...`, norms): tensors that a text run skips."""
    def change(name, tensor):
        prefix = "model.language_model." if "model.language_model." in name else "model."
        more = {}
        if name == prefix + "norm.weight":
            hidden = tensor.shape[0]
            more = {"mtp.fc.weight": torch.ones(hidden, 2 * hidden).to(tensor), "mtp.norm.weight": tensor.clone(), "mtp.pre_fc_norm_embedding.weight": tensor.clone(),
                    "mtp.pre_fc_norm_hidden.weight": tensor.clone(), "mtp.layers.0.input_layernorm.weight": tensor.clone(),
                    "mtp.layers.0.self_attn.q_norm.weight": tensor[:8].clone()}
            if family != "qwen3_5":
                more["mtp.layers.0.mlp.gate.weight"] = torch.ones(4, hidden).to(tensor)
                more["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = torch.ones(4, hidden).to(tensor)
        return {name: tensor} | more
    return change


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def as_mxfp4(name, tensor):
    """Experts as gpt-oss publishes them: by rows, numbers of four bits, two in a byte, and a power of two for each 32 of them."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    groups = tensor.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (torch.floor(torch.log2(groups.abs().amax(-1))) - 2).clamp(-127, 127)
    codes = (groups / torch.exp2(exponents)[..., None]).unsqueeze(-1).sub(E2M1).abs().argmin(-1).to(torch.uint8)
    return {name + "_blocks": (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous(), name + "_scales": (exponents + 127).to(torch.uint8).contiguous()}


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}


def widen_state(name, tensor):
    """A_log and the gated norm in float32 within a bf16 file, as Qwen3.5's hub checkpoints keep them (mamba_ssm_dtype)."""
    wide = name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
    return {name: tensor.float() * 1.001 if wide else tensor}  # so that reading it as bf16 would show


VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 20, "num_position_embeddings": 16, "patch_size": 4,
          "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}

LINEAR = dict(linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=24, linear_num_key_heads=2, linear_num_value_heads=6)
IDS = dict(image_token_id=250, video_token_id=251, vision_start_token_id=252, vision_end_token_id=253)
LF = ["linear_attention", "full_attention"]

# folder -> how to make it. `config`: the arguments of the config class. `dtype`: of the file. `shards`: how many. `stacked`: experts in one tensor per layer
# rather than one each. `edit`: changes to config.json. `variants`: further config files on the same weights.
CHECKPOINTS = {
    # ---- Qwen3, dense
    "qwen3": dict(
        seed=11, dtype="float32", shards=3, note="5 query heads per KV head, odd sizes, tied, 3 shards",
        config=dict(model_type="qwen3", vocab_size=256, hidden_size=40, intermediate_size=76, num_hidden_layers=2, num_attention_heads=10, num_key_value_heads=2,
                    head_dim=24, tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})),
    "qwen3_rope": dict(
        seed=12, dtype="bfloat16", note="YaRN, factor 4 past 32 positions, old-style config, bf16, untied",
        config=dict(model_type="qwen3", vocab_size=256, hidden_size=40, intermediate_size=60, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3,
                    head_dim=32, tie_word_embeddings=False, max_position_embeddings=128, rope_parameters={"rope_type": "default", "rope_theta": 1000.0}),
        edit=[rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), old_style],
        variants={
            "-default": [dict(note="the same weights without scaling")],
            "-yarn-tuned": [rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0, beta_slow=2.0, attention_factor=0.9, truncate=False),
                            dict(note="YaRN with its own betas and attention factor, range not rounded")],
            "-yarn-mscale": [rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=48, mscale=0.7, mscale_all_dim=0.4),
                             dict(note="YaRN with mscale and mscale_all_dim")],
            "-yarn-bare": [rope(rope_type="yarn", factor=4.0), dict(note="YaRN without original_max_position_embeddings: max_position_embeddings, 128")],
            "-yarn-outside": [rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), changed(original_max_position_embeddings=64),
                              dict(note="YaRN; original_max_position_embeddings at the top goes before that of rope_parameters")],
            "-yarn-beside": [beside(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), dict(note="rope_scaling beside rope_parameters: it counts")],
            "-linear": [rope(rope_type="linear", factor=3.0), old_style, dict(note="positions divided by 3; old-style config")],
            "-llama3": [rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
                        dict(note="Llama 3's smooth blend")],
            "-longrope": [rope(rope_type="longrope", original_max_position_embeddings=32, long_factor=[round(1.0 + 0.35 * i, 2) for i in range(16)],
                               short_factor=[round(1.0 + 0.05 * i, 2) for i in range(16)]), dict(note="long factors; attention factor from 128 / 32")],
            "-longrope-short": [rope(rope_type="longrope", original_max_position_embeddings=100, factor=2.0,
                                     long_factor=[round(1.0 + 0.35 * i, 2) for i in range(16)], short_factor=[round(1.0 + 0.05 * i, 2) for i in range(16)]),
                                dict(note="short factors: 86 tokens stay below 100; attention factor from factor 2")],
            "-dynamic": [rope(rope_type="dynamic", factor=4.0), dict(note="dynamic NTK below max_position_embeddings: no effect")],
            "-dynamic-long": [rope(rope_type="dynamic", factor=4.0, max_position_embeddings=40), dict(note="dynamic NTK past max_position_embeddings 40", by_steps=False)],
        }),
    "qwen3_window": dict(
        seed=13, dtype="float16", note="attention biases, window of 24 from layer 1 on (no layer_types in the config), rms_norm_eps 1e-3, f16",
        config=dict(model_type="qwen3", vocab_size=300, hidden_size=40, intermediate_size=60, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
                    head_dim=16, tie_word_embeddings=False, attention_bias=True, rms_norm_eps=1e-3, use_sliding_window=True, sliding_window=24,
                    max_window_layers=1, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        edit=[old_style, without("layer_types")],
        variants={"-types": [changed(layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=7), dict(note="window of 7, by layer_types")],
                  "-off": [changed(use_sliding_window=False, layer_types=["full_attention"] * 3), dict(note="use_sliding_window false: the window means nothing")]}),
    # ---- Llama
    "llama": dict(
        seed=71, dtype="bfloat16", note="Llama 3's rotary scaling, 3 query heads per KV head, tied, old-style config without head_dim, bf16",
        config=dict(model_type="llama", vocab_size=256, hidden_size=96, intermediate_size=124, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
                    tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
        edit=[LLAMA3, old_style, without("head_dim")],
        variants={"-new": [LLAMA3, dict(note="the same with rope_parameters")], "-default": [old_style, dict(note="the same weights without scaling")],
                  "-bare": [rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, max_position_embeddings=64),
                            dict(note="without original_max_position_embeddings: max_position_embeddings, 64")],
                  "-partial": [changed(partial_rotary_factor=0.5), dict(note="partial_rotary_factor means nothing to this architecture")]}),
    "llama_shared": dict(
        seed=73, dtype="bfloat16", note="tied, and the matrix bears the head's name only; bf16",
        config=dict(model_type="llama", vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                    tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        tensors=as_head),
    "llama_untied": dict(
        seed=72, dtype="float32", shards=2, note="a KV head per query head, heads wider than the residual stream has room for, attention biases, untied, 2 shards, f32",
        config=dict(model_type="llama", vocab_size=300, hidden_size=40, intermediate_size=60, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
                    attention_bias=True, tie_word_embeddings=False, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        variants={"-tied": [changed(tie_word_embeddings=True), dict(note="tie_word_embeddings, but another head is stored: it counts")],
                  "-unbiased": [changed(attention_bias=False), dict(note="attention_bias false: the stored biases do not count")]}),
    # ---- Qwen2
    "qwen2": dict(
        seed=81, dtype="bfloat16", note="biases of q, k and v, a window of 24 from layer 2 on, tied, bf16",
        config=dict(model_type="qwen2", vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
                    tie_word_embeddings=True, use_sliding_window=True, sliding_window=24, max_window_layers=2,
                    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
        edit=[old_style, without("layer_types")],
        variants={"-off": [changed(use_sliding_window=False, layer_types=["full_attention"] * 3), dict(note="use_sliding_window false, newer config")]}),
    # ---- gpt-oss
    "gpt_oss": dict(
        seed=201, dtype="bfloat16", stacked=True, note="experts by columns with rows of gate and up in turns, biases, sinks, a window of 24 in every other layer, a limit that "
        "is reached, YaRN without truncation, bf16",
        config=dict(model_type="gpt_oss", vocab_size=256, hidden_size=72, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=20,
                    num_local_experts=6, num_experts_per_tok=2, sliding_window=24, swiglu_limit=1.2, tie_word_embeddings=False, max_position_embeddings=4096, rope_parameters=
                    {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 512}),
        variants={"-hub": [old_style, without("layer_types", "swiglu_alpha"), renamed("num_experts", "num_local_experts"),
                           changed(experts_per_token=2, initial_context_length=512), dict(note="older keys, and windows by default")],
                  "-unlike": [changed(swiglu_alpha=1.0, swiglu_limit=0.6, attention_bias=True, layer_types=["full_attention", "full_attention", "sliding_attention"]),
                              dict(note="another activation, and the window in another layer")]}),
    "gpt_oss_mxfp4": dict(
        seed=202, dtype="bfloat16", stacked=True, note="MXFP4 experts as published, 320 columns: 64 more than a multiple of 256, as 2,880 are",
        config=dict(model_type="gpt_oss", vocab_size=128, hidden_size=320, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
                    num_local_experts=4, num_experts_per_tok=2, sliding_window=24, swiglu_limit=2.0, tie_word_embeddings=False, max_position_embeddings=4096, rope_parameters=
                    {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 512}),
        tensors=as_mxfp4, edit=[changed(quantization_config=MXFP4)]),
    # ---- Qwen3 mixture of experts
    "qwen3_moe": dict(
        seed=21, dtype="bfloat16", note="one tensor per expert, weights renormalised, layer 1 dense by mlp_only_layers, old-style config, bf16, tied",
        config=dict(model_type="qwen3_moe", vocab_size=256, hidden_size=56, intermediate_size=76, moe_intermediate_size=20, num_hidden_layers=3, num_attention_heads=6,
                    num_key_value_heads=2, head_dim=20, num_experts=9, num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[1], decoder_sparse_step=1,
                    tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
        edit=[old_style]),
    "qwen3_moe_stacked": dict(
        seed=22, dtype="float16", stacked=True, note="stacked experts, weights not renormalised, decoder_sparse_step 2 and mlp_only_layers [3], f16",
        config=dict(model_type="qwen3_moe", vocab_size=256, hidden_size=40, intermediate_size=52, moe_intermediate_size=20, num_hidden_layers=6, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False, mlp_only_layers=[3], decoder_sparse_step=2,
                    attention_bias=True, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        variants={"-window": [changed(use_sliding_window=True, sliding_window=16), dict(note="a window of 16 in every layer, which is what this architecture does")]}),
    # ---- Qwen3-Next
    "qwen3_next": dict(
        seed=31, dtype="float32", note="key heads 2 x 16, value heads 6 x 24, full_attention_interval 2, one dense layer, one tensor per expert, an MTP layer to skip, f32",
        config=dict(model_type="qwen3_next", vocab_size=256, hidden_size=40, intermediate_size=56, moe_intermediate_size=16, shared_expert_intermediate_size=24,
                    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True,
                    mlp_only_layers=[2], layer_types=LF + LF[:1], rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}, **LINEAR),
        edit=[old_style, by_interval(2)], tensors=add_mtp("qwen3_next"),
        variants={"-yarn": [rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), old_style, dict(note="YaRN over the rotary quarter of a head")]}),
    "qwen3_next_stacked": dict(
        seed=32, dtype="bfloat16", stacked=True, note="stacked experts, weights not renormalised, half of a head rotary, attention first, conv kernel 3, bf16",
        config=dict(model_type="qwen3_next", vocab_size=256, hidden_size=40, intermediate_size=64, moe_intermediate_size=24, shared_expert_intermediate_size=32,
                    num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, head_dim=24, num_experts=10, num_experts_per_tok=2, norm_topk_prob=False,
                    decoder_sparse_step=2, layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"], tie_word_embeddings=True,
                    rms_norm_eps=1e-4, rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
                    linear_conv_kernel_dim=3, linear_key_head_dim=24, linear_value_head_dim=16, linear_num_key_heads=3, linear_num_value_heads=3)),
    # ---- Qwen3.5, dense
    "qwen3_5": dict(
        seed=41, dtype="bfloat16", shards=2, note="hybrid, untied, 2 shards, bf16 with A_log and linear_attn.norm in f32",
        config=dict(model_type="qwen3_5_text", vocab_size=256, hidden_size=56, intermediate_size=80, num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=1,
                    head_dim=32, tie_word_embeddings=False, layer_types=["linear_attention", "full_attention", "linear_attention"],
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
                    **LINEAR),
        tensors=widen_state,
        variants={"-yarn": [rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), dict(note="YaRN beside mrope_interleaved and mrope_section")]}),
    "qwen3_5_vl": dict(
        seed=42, dtype="bfloat16", architectures="Qwen3_5ForConditionalGeneration",
        note="multimodal naming with vision and MTP tensors, tied, attention biases, rms_norm_eps 1e-3, full_attention_interval 2, bf16",
        config=dict(model_type="qwen3_5", tie_word_embeddings=True, vision_config=VISION, **IDS, text_config=dict(
            model_type="qwen3_5_text", vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, tie_word_embeddings=True, attention_bias=True, rms_norm_eps=1e-3, layer_types=LF * 2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
            linear_conv_kernel_dim=3, linear_key_head_dim=16, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)),
        edit=[hub_wrapper(2)], tensors=add_mtp("qwen3_5"),
        variants={"-outside": [hub_wrapper(2), outside(rms_norm_eps=0.1, rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
                               dict(note="norm's epsilon and rotary parameters outside of text_config do not count")]}),
    # ---- Qwen3.5 mixture of experts
    "qwen3_5_moe": dict(
        seed=51, dtype="float32", stacked=True, note="f32, tied, stacked experts, key heads 2 x 16, value heads 6 x 24",
        config=dict(model_type="qwen3_5_moe_text", vocab_size=256, hidden_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                    moe_intermediate_size=12, shared_expert_intermediate_size=20, num_experts=8, num_experts_per_tok=3, tie_word_embeddings=True,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
                    layer_types=LF, **LINEAR)),
    "qwen3_5_moe_split": dict(
        seed=52, dtype="float16", note="one tensor per expert, as save_pretrained writes it; f16, untied",
        config=dict(model_type="qwen3_5_moe_text", vocab_size=256, hidden_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
                    moe_intermediate_size=20, shared_expert_intermediate_size=12, num_experts=12, num_experts_per_tok=4, tie_word_embeddings=False,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}, layer_types=LF,
                    linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=24, linear_num_key_heads=2, linear_num_value_heads=4)),
    "qwen3_5_moe_vl": dict(
        seed=53, dtype="bfloat16", architectures="Qwen3_5MoeForConditionalGeneration", stacked=True,
        note="multimodal naming with vision and MTP tensors, stacked experts, untied, full_attention_interval 3, bf16",
        config=dict(model_type="qwen3_5_moe", tie_word_embeddings=False, vision_config=VISION, **IDS, text_config=dict(
            model_type="qwen3_5_moe_text", vocab_size=256, hidden_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, tie_word_embeddings=False, moe_intermediate_size=12, shared_expert_intermediate_size=20, num_experts=7, num_experts_per_tok=3,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
            linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4)),
        edit=[hub_wrapper(3)], tensors=add_mtp("qwen3_5_moe"),
        variants={"-tied": [hub_wrapper(3), both_tied, dict(note="tie_word_embeddings at both places, but another head is stored: it counts")]}),
}


def make_checkpoint(name, spec):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    arguments = json.loads(json.dumps(spec["config"]))
    config = AutoConfig.for_model(**arguments)
    if "architectures" in spec:
        config.architectures = [spec["architectures"]]
    model = build(config, spec["seed"])
    model = model.to(getattr(torch, spec["dtype"]))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    shards = spec.get("shards", 1)
    model.save_pretrained(folder, max_shard_size="1GB" if shards == 1 else int(size / (shards - 0.7)), save_original_format=not spec.get("stacked", False))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if "tensors" in spec:
        edit_tensors(folder, spec["tensors"])
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
    count = len(list(folder.glob("*.safetensors")))
    assert count == shards, f"{name}: {count} files instead of {shards}"
    path = folder / "config.json"
    plain = json.loads(path.read_text())
    variants = {"": spec.get("edit", [])} | spec.get("variants", {})
    for suffix, edits in variants.items():
        edited = json.loads(json.dumps(plain))
        options = {}
        for edit in edits:
            if isinstance(edit, dict):  # options of the case, not an edit
                options = edit
            else:
                edited = edit(edited)
        (folder / f"config{suffix}.json").write_text(json.dumps(edited, indent=1, sort_keys=True) + "\n")
    text = config.get_text_config()
    tokens = tokens_of(spec["seed"], text.vocab_size)
    for suffix, edits in variants.items():
        options = next((e for e in edits if isinstance(e, dict)), {})
        run_case(name, suffix, tokens, options.get("note", spec["note"]), options.get("by_steps", True))
    with safe_open(sorted(folder.glob("*.safetensors"))[0], "pt") as f:
        assert f.metadata() == {"format": "pt"}


def seeded(make, name, spec):
    """Makes a checkpoint, with further seeds until no routing decision is a near-tie."""
    while True:
        try:
            return make(name, spec)
        except NearTie as problem:
            spec = spec | {"seed": spec["seed"] + 100}
            print(f"{problem}; now seed {spec['seed']}", flush=True)


def main(doc, checkpoints):
    """The program of a file like this one."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="folders to make (all, when none is named)")
    for name in parser.parse_args().cases or checkpoints:
        seeded(make_checkpoint, name, checkpoints[name])


if __name__ == "__main__":
    main(__doc__, CHECKPOINTS)
