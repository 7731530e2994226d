#!/usr/bin/env python3
"""Tiny random checkpoints, quantised as their producers' programs do it, and logits by transformers in float32 on the dequantised weights.

    python tests/golden/make_quantized.py [CASE...]

Writes `quantized/CASE/`: config.json, model.safetensors, and logits.f32 (little-endian, [tokens, vocabulary]); and `quantized/cases.json`. Who quantises, and who says what
the values are: compressed-tensors and MLX their own packages, FP8 of blocks transformers; FP8 of rows, ModelOpt, AWQ and GPTQ the code below, which is checked against
`awq/utils/packing_utils.py` of autoawq and `auto_gptq/nn_modules/qlinear/qlinear_cuda.py` of auto-gptq where these packages can be found.

Needs requirements-quantized.txt beside requirements.txt. Takes seconds.
"""
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

OUT = Path(__file__).resolve().parent / "quantized"
TOKENS = [5, 17, 42, 1, 9, 33, 60, 2, 8, 25, 44, 61, 3, 3, 12, 50]
DENSE = dict(
    model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=96, intermediate_size=160, num_hidden_layers=1, vocab_size=64, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_theta=5000.0,
)
# Four blocks, of which three are not whole.
BLOCKS = DENSE | dict(hidden_size=160)
MOE = DENSE | dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], hidden_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
    decoder_sparse_step=1, mlp_only_layers=[],
)
MINIMAX = DENSE | dict(
    model_type="minimax_m2", architectures=["MiniMaxM2ForCausalLM"], hidden_size=64, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, rotary_dim=16,
    bos_token_id=1, eos_token_id=2,
)
GLM = DENSE | dict(
    model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2, n_routed_experts=4,
    num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5, partial_rotary_factor=0.5, use_qk_norm=True,
)
# Latent attention, whose blocks of kv_b_proj are no whole heads.
LATENT = {k: v for k, v in DENSE.items() if k != "head_dim"} | dict(
    model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2, n_routed_experts=4,
    num_key_value_heads=2, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.5, num_nextn_predict_layers=0,
    q_lora_rank=32, kv_lora_rank=160, qk_nope_head_dim=80, qk_rope_head_dim=16, v_head_dim=64,
)
# Compressed attention, of all three kinds of layers.
V4 = dict(
    model_type="deepseek_v4", architectures=["DeepseekV4ForCausalLM"], hidden_size=64, moe_intermediate_size=32, num_hidden_layers=3, vocab_size=64, num_attention_heads=4,
    num_key_value_heads=1, head_dim=64, qk_rope_head_dim=16, q_lora_rank=32, o_groups=2, o_lora_rank=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
    routed_scaling_factor=1.5, compress_ratios=[0, 4, 128], compress_rate_hca=8, num_hash_layers=1, sliding_window=6, index_n_heads=2, index_head_dim=32, index_topk=2,
    hc_mult=2, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=5000.0, tie_word_embeddings=False,
)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nearest_e2m1(x):
    """Codes of the nearest numbers of four bits."""
    return (x.unsqueeze(-1) - E2M1).abs().argmin(-1).to(torch.uint8)


def nibbles(codes):
    return codes[..., 0::2] | codes[..., 1::2] << 4


def packed_words(values, bits, order=None):
    """int32 words of consecutive values of the last axis, the first in the lowest bits, or in this order."""
    per = 32 // bits
    values = values.to(torch.int64).reshape(*values.shape[:-1], -1, per)
    words = sum(values[..., k] << (bits * i) for i, k in enumerate(order or range(per)))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def grouped(w, group):
    return w.reshape(w.shape[0], -1, group)


# ---------------------------------------------------------------- methods: weight -> (tensors by their leaf, values as f32)

def fp8_blocks(scale_dtype=torch.float32, power=False):
    def quantize(w):
        from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

        rows, cols = w.shape
        padded = torch.zeros(-(-rows // 128) * 128, -(-cols // 128) * 128)
        padded[:rows, :cols] = w
        blocks = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        scale = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-9).to(scale_dtype).float()
        if power:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        q = (blocks / scale[:, None, :, None]).clamp(-448, 448).reshape(padded.shape)[:rows, :cols].to(torch.float8_e4m3fn)
        values = _dequantize_fp8_weight(q, scale, [128, 128], torch.float32)
        stored = scale.to(torch.float8_e8m0fnu) if power else scale.to(scale_dtype)
        return {"weight": q.contiguous(), "weight_scale_inv": stored.contiguous()}, values
    return quantize


def deepseek_v4(w, of_experts):
    """FP8 of blocks, and numbers of four bits in bytes with a sign for experts; all scales are powers of 2."""
    if not of_experts:
        tensors, values = fp8_blocks(power=True)(w)
        return {"weight": tensors["weight"], "scale": tensors["weight_scale_inv"]}, values
    groups = grouped(w, 32)
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True) / 6)))
    codes = nearest_e2m1(groups / scale)
    values = (E2M1[codes.long()] * scale).reshape(w.shape)
    return {"weight": nibbles(codes.reshape(w.shape)).view(torch.int8), "scale": scale.squeeze(-1).to(torch.float8_e8m0fnu)}, values


def fp8_rows(w):
    scale = (w.abs().amax(1, keepdim=True) / 448).bfloat16()
    q = (w / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale}, q.float() * scale.float()


def modelopt_fp8(w):
    scale = w.abs().amax() / 448
    q = (w / scale).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale.reshape(()), "input_scale": torch.tensor(0.5)}, q.float() * scale


def modelopt_nvfp4(w):
    whole = w.abs().amax() / (6 * 448)
    scale = (grouped(w, 16).abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    real = scale.float() * whole
    codes = nearest_e2m1((grouped(w, 16) / real[..., None]).reshape(w.shape))
    values = (grouped(E2M1[codes.long()], 16) * real[..., None]).reshape(w.shape)
    return {"weight": nibbles(codes), "weight_scale": scale, "weight_scale_2": whole.reshape(()), "input_scale": torch.tensor(0.5)}, values


def compressed_tensors(scale_dtype=torch.bfloat16, format=None, **arguments):
    def quantize(w):
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        args = QuantizationArgs(**arguments)
        activations = QuantizationArgs(num_bits=8, type="float", dynamic=True, strategy="token") if format == "float-quantized" else None
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
        compressor = BaseCompressor.get_value_from_registry(format)
        parts = grouped(w, args.group_size or w.shape[1])
        low, high = parts.amin(-1), parts.amax(-1)
        state = {"weight": w.clone()}
        if format == "nvfp4-pack-quantized":
            whole = 448 * 6 / w.abs().amax()
            scale = (torch.maximum(-low, high) / 6 * whole).to(torch.float8_e4m3fn).float()
            state |= {"weight_global_scale": whole.reshape(1), "weight_scale": scale}
        elif format.startswith("mx"):
            # As the specification has it: the exponent of the greatest value less that of the greatest number.
            greatest = 2 if format.startswith("mxfp4") else 8
            state["weight_scale"] = torch.exp2(torch.floor(torch.log2(torch.maximum(-low, high))) - greatest)
        else:
            scale, zero = calculate_qparams(low, high, args)
            state["weight_scale"] = scale.to(scale_dtype)
            if not args.symmetric:
                state["weight_zero_point"] = zero.to(torch.int8)
        stored = compressor.compress(state, scheme)
        # Values in f32: what the product of the numbers in the file is.
        wide = {k: v.float() if v.dtype in (torch.bfloat16, torch.float16) else v for k, v in stored.items()}
        values = compressor.decompress(wide, scheme)["weight"].float()
        if format == "nvfp4-pack-quantized":
            # What it does before it rounds to bf16.
            from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
            from compressed_tensors.quantization.lifecycle.forward import dequantize

            unpacked = unpack_fp4_from_uint8(stored["weight_packed"], *w.shape, dtype=torch.float32)
            scales, whole = stored["weight_scale"].float(), stored["weight_global_scale"]
            values = dequantize(unpacked, scales, args=args, global_scale=whole, dtype=torch.float32)
        return {k: v.contiguous() for k, v in stored.items()}, values
    return quantize


def installed(package, path):
    """A file of an installed package as a module, without what the package imports; `None` where it is not installed."""
    found = importlib.util.find_spec(package)
    if found is None:
        print(f"  {package} is not installed: not compared with it", file=sys.stderr)
        return None
    spec = importlib.util.spec_from_file_location("producer", Path(list(found.submodule_search_locations)[0]) / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def integers(w, bits, group, symmetric):
    """q, scales and zero points, [rows, cols], [rows, groups], [rows, groups]; scales are of f16."""
    parts = grouped(w, group)
    most = 2**bits - 1
    if symmetric:
        scale = (parts.abs().amax(-1) * 2 / most).half().float()
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = ((high - low) / most).half().float()
        zero = torch.round(-low / scale).clamp(1, most)
    q = (torch.round(parts / scale[..., None]) + zero[..., None]).clamp(0, most).reshape(w.shape)
    return q, scale, zero


def awq(group=32):
    def quantize(w):
        q, scale, zero = integers(w, 4, group, False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        stored = {"qweight": packed_words(q.t(), 4, order), "qzeros": packed_words(zero.t(), 4, order), "scales": scale.t().half().contiguous()}
        values = ((grouped(q, group) - zero[..., None]) * scale[..., None]).reshape(w.shape)
        if producer := installed("awq", "utils/packing_utils.py"):
            theirs = producer.dequantize_gemm(stored["qweight"], stored["qzeros"], stored["scales"].float(), 4, group)
            assert torch.equal(theirs.t(), values)
        return stored, values
    return quantize


class Orders:
    """The order of columns by activations, and with it the group of each. Two matrices of the same shape, one after the other, have the same inputs and so the same order, as gate and up have."""

    def __init__(self):
        self.seen = {}

    def of(self, shape):
        count = self.seen[shape] = self.seen.get(shape, -1) + 1
        seed = 1000 * shape[0] + shape[1] + 7919 * (count // 2)
        return torch.randperm(shape[1], generator=torch.Generator().manual_seed(seed))


def in_activation_order(w, order, bits, group, symmetric):
    """As `integers`, with groups of columns in this order: q in the order of w, and the group of each column."""
    q, scale, zero = integers(w[:, order], bits, group, symmetric)
    back = torch.argsort(order)
    return q[:, back].contiguous(), scale, zero, (back // group).to(torch.int32)


def gptq(bits=4, group=32, symmetric=True, version=1, orders=None):
    def quantize(w):
        if orders is None:
            (q, scale, zero), groups = integers(w, bits, group, symmetric), (torch.arange(w.shape[1]) // group).to(torch.int32)
        else:
            q, scale, zero, groups = in_activation_order(w, orders.of(tuple(w.shape)), bits, group, symmetric)
        stored = {
            "qweight": packed_words(q, bits).t().contiguous(), "qzeros": packed_words(zero.t() - int(version == 1), bits), "scales": scale.t().half().contiguous(),
            "g_idx": groups,
        }
        values = (q - zero[:, groups.long()]) * scale[:, groups.long()]
        if version == 1 and (producer := installed("auto_gptq", "nn_modules/qlinear/qlinear_cuda.py")):
            layer = producer.QuantLinear(bits, group, w.shape[1], w.shape[0], bias=False, weight_dtype=torch.float32)
            layer.qweight, layer.qzeros, layer.scales, layer.g_idx = stored["qweight"], stored["qzeros"], stored["scales"].float(), stored["g_idx"]
            layer.autogptq_cuda_available = False
            assert torch.equal(layer.forward(torch.eye(w.shape[1])).t(), values)
        return stored, values
    return quantize


def packed_in_activation_order(group, symmetric, orders):
    """compressed-tensors with `actorder: group`, which its package could until version 0.20."""
    def quantize(w):
        q, scale, zero, groups = in_activation_order(w, orders.of(tuple(w.shape)), 4, group, symmetric)
        stored = {"weight_packed": packed_words(q, 4), "weight_scale": scale.half(), "weight_shape": torch.tensor(w.shape), "weight_g_idx": groups}
        if not symmetric:
            stored["weight_zero_point"] = packed_words(zero.t(), 4).t().contiguous()
        values = (q - zero[:, groups.long()]) * scale[:, groups.long()]
        try:
            from compressed_tensors.compressors.quantized_compressors.pack_quantized import unpack_from_int32
            from compressed_tensors.quantization.lifecycle.forward import dequantize
        except ImportError:
            print("  compressed-tensors of before 0.20 is not installed: not compared with it", file=sys.stderr)
        else:
            zeros = None if symmetric else unpack_from_int32(stored["weight_zero_point"], 4, scale.shape, packed_dim=0)
            theirs = dequantize(unpack_from_int32(stored["weight_packed"], 4, w.shape), scale, zeros, g_idx=groups)
            assert torch.equal(theirs.float(), values)
        return stored, values
    return quantize


def mlx(mode):
    def quantize(w):
        import mlx.core as mx
        import numpy as np

        mx.set_default_device(mx.cpu)
        packed, scales = mx.quantize(mx.array(w.numpy()), mode=mode)[:2]
        values = torch.from_numpy(np.array(mx.dequantize(packed, scales, mode=mode, dtype=mx.float32)))
        return {"weight": torch.from_numpy(np.array(packed)), "scales": torch.from_numpy(np.array(scales))}, values
    return quantize


def packed(**arguments):
    """A format of compressed-tensors: the method and its config."""
    format = arguments.pop("format")
    arguments = {"num_bits": 4} | arguments
    weights = dict(type="int", symmetric=True, strategy="group", group_size=None, block_structure=None, actorder=None)
    weights |= {k: "torch.uint8" if v is torch.uint8 else v for k, v in arguments.items()}
    weights.pop("scale_dtype", None) if arguments.get("scale_dtype") is not torch.uint8 else None
    config = {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"], "quantization_status": "compressed",
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}}}
    return compressed_tensors(format=format, **arguments), config


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
FP8_ROWS = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": {
    "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}}}}
NVFP4 = dict(type="float", strategy="tensor_group", group_size=16)

# name: (model, (method, quantization_config))
CASES = {
    "fp8_blocks": (BLOCKS, (fp8_blocks(), FP8)),
    "fp8_blocks_bf16": (BLOCKS, (fp8_blocks(torch.bfloat16), FP8)),
    "fp8_blocks_ue8m0": (BLOCKS, (fp8_blocks(power=True), FP8 | {"scale_fmt": "ue8m0"})),
    "fp8_experts": (MOE, (fp8_blocks(), FP8)),
    "fp8_minimax_m2": (MINIMAX, (fp8_blocks(), FP8)),
    "fp8_glm4_moe": (GLM, (fp8_rows, FP8_ROWS)),
    "fp8_deepseek_v3": (LATENT, (fp8_blocks(), FP8)),
    "fp8_deepseek_v4": (V4, (deepseek_v4, FP8 | {"scale_fmt": "ue8m0"})),
    "gptq_deepseek_v3": (LATENT, (gptq(), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True})),
    "w4a16_deepseek_v3": (LATENT, packed(format="pack-quantized", group_size=32)),
    "fp8_channels": (DENSE, packed(format="float-quantized", num_bits=8, type="float", strategy="channel")),
    "fp8_modelopt": (DENSE, (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]})),
    "w4a16": (DENSE, packed(format="pack-quantized", group_size=32)),
    "w4a16_asymmetric": (DENSE, packed(format="pack-quantized", group_size=32, symmetric=False, scale_dtype=torch.float16)),
    "w8a16_channels": (DENSE, packed(format="pack-quantized", num_bits=8, strategy="channel")),
    "w4a16_experts": (MOE, packed(format="pack-quantized", group_size=32)),
    "awq": (DENSE, (awq(), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True})),
    "gptq": (DENSE, (gptq(), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True})),
    "gptq_v2": (DENSE, (gptq(8, 32, False, 2), {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": False, "checkpoint_format": "gptq_v2"})),
    "gptq_experts": (MOE, (gptq(), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True})),
    "gptq_act_order": (DENSE, (gptq(orders=Orders()), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True})),
    "gptq_act_order_experts": (MOE | dict(moe_intermediate_size=64), (gptq(8, 32, False, orders=Orders()), {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True, "sym": False})),
    "w4a16_act_order": (DENSE, (packed_in_activation_order(32, False, Orders()), packed(format="pack-quantized", group_size=32, symmetric=False, actorder="group")[1])),
    "w4a16_act_order_experts": (MOE | dict(moe_intermediate_size=64), (packed_in_activation_order(32, True, Orders()), packed(format="pack-quantized", group_size=32, actorder="group")[1])),
    "nvfp4_modelopt": (DENSE, (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]})),
    "nvfp4": (DENSE, packed(format="nvfp4-pack-quantized", **NVFP4)),
    "nvfp4_experts": (MOE, packed(format="nvfp4-pack-quantized", **NVFP4)),
    "mxfp4": (DENSE, packed(format="mxfp4-pack-quantized", type="float", group_size=32, scale_dtype=torch.uint8)),
    "mxfp8": (DENSE, packed(format="mxfp8-quantized", num_bits=8, type="float", group_size=32, scale_dtype=torch.uint8)),
    **{f"mlx_{mode}": (DENSE, (mlx(mode), {"mode": mode, "bits": bits, "group_size": group})) for mode, bits, group in
       [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]},
}


# Behind each other: what transformers calls parts of DeepSeek-V4, and its publisher.
V4_NAMES = [
    ("model.", ""), ("compressor.indexer.scorer.weights_proj", "indexer.weights_proj"), ("compressor.indexer.q_b_proj", "indexer.wq_b"), ("compressor.indexer.", "indexer.compressor."),
    ("compressor.gate_proj", "compressor.wgate"), ("self_attn.", "attn."), ("q_a_proj", "wq_a"), ("q_b_proj", "wq_b"), ("kv_proj", "wkv"), ("o_a_proj", "wo_a"), ("o_b_proj", "wo_b"),
    ("q_a_norm", "q_norm"), ("kv_norm", "norm"), ("position_bias", "ape"), ("sinks", "attn_sink"), ("mlp.", "ffn."), ("gate.e_score_correction_bias", "gate.bias"), (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."), (".down_proj.", ".w2."), ("attn_hc.", "hc_attn_"), ("ffn_hc.", "hc_ffn_"), ("hc_head.hc_", "hc_head_"), ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"), ("embed_tokens", "embed"), ("lm_head", "head"),
]


def published(name, model_type):
    """What published checkpoints call a tensor."""
    if model_type == "deepseek_v4":
        for theirs, ours in V4_NAMES:
            name = name.replace(theirs, ours)
        return name
    if model_type != "minimax_m2":
        return name
    for ours, theirs in [(".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2.")]:
        name = name.replace(ours, theirs)
    return name


def make(name, config, method, quantization):
    torch.manual_seed(48)
    torch.set_num_threads(1)
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").float().eval()
    stored, values, is_v4 = {}, {}, config["model_type"] == "deepseek_v4"
    for key, w in model.state_dict().items():
        if key == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if key.endswith("tid2eid"):
            values[key] = stored[key] = torch.stack([torch.randperm(config["n_routed_experts"])[:w.shape[1]] for _ in w])
            continue
        w = (torch.randn(w.shape) * (0.1 if w.dim() > 1 else 0.02) + (1 if w.dim() == 1 else 0)).bfloat16().float()
        if key.endswith("e_score_correction_bias"):
            w = (w - 1) * 5
        values[key] = w
        if w.dim() == 3:
            # transformers keeps a layer's experts in two stacks; published checkpoints have a tensor for each.
            prefix, half = key.rsplit(".", 1)[0], w.shape[1] // 2
            parts = [("gate_proj", slice(0, half)), ("up_proj", slice(half, None))] if key.endswith("gate_up_proj") else [("down_proj", slice(None))]
            for e in range(w.shape[0]):
                for part, rows in parts:
                    tensors, values[key][e, rows] = method(w[e, rows].contiguous(), *[True][:is_v4])
                    stored |= {f"{prefix}.{e}.{part}.{leaf}": t for leaf, t in tensors.items()}
        elif w.dim() == 2 and "_proj" in key and not (is_v4 and ("compressor" in key and "q_b_proj" not in key)):
            tensors, values[key] = method(w, *[False][:is_v4])
            stored |= {f"{key[:-len('weight')]}{leaf}": t for leaf, t in tensors.items()}
        else:
            stored[key] = w.bfloat16()
    missing = model.load_state_dict(values, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys, missing
    model.tie_weights()
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    stored = {published(key, config["model_type"]): t for key, t in stored.items()}
    of_mlx = name.startswith("mlx")
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors", metadata={"format": "mlx" if of_mlx else "pt"})
    written = config | {"torch_dtype": "bfloat16", ("quantization" if of_mlx else "quantization_config"): quantization}
    (folder / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    (folder / "logits.f32").write_bytes(logits.float().numpy().astype("<f4").tobytes())
    return {"name": name, "range": round(float(logits.max() - logits.min()), 4)}


def main():
    index = OUT / "cases.json"
    known = {case["name"]: case for case in json.loads(index.read_text())["cases"]} if index.exists() else {}
    for name in sys.argv[1:] or list(CASES):
        config, (method, quantization) = CASES[name]
        known[name] = make(name, config, method, quantization)
        print(known[name], flush=True)
    lines = ",\n".join(json.dumps(known[name]) for name in CASES if name in known)
    index.write_text(f'{{"tokens": {json.dumps(TOKENS)}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
