"""Writes a random-weight model: `make_model.py SHAPE FORM OUT`, with the Python of the peers' environment.

FORM is `bf16`, or `q` and a number of bits from 2 to 8, for a folder with config.json and safetensors (MLX's affine quantisation, groups of 64, which Sluice and mlx-lm
read; bf16 is also what transformers reads), or `BF16`, `Q8_0`, `Q6_K`, `Q4_0`, `Q3_K` or `Q2_K` for a GGUF file (llama.cpp). Every matrix of a file has the same
form, the embedding and the output head too, so that the formats differ in nothing but their blocks. Weights have a standard deviation of about
0.02, as trained ones do, but the embedding has 1: what a layer adds then stays small beside the token itself, and tokens choose different experts, as they do in a
trained model. (With 0.02 the mean over the context, alike for all tokens, drowns them, and a mixture uses a handful of its experts.) All bytes are written, so that no
file is sparse.
"""

import json
import os
import sys

import numpy as np

from shapes import CONFIGS, tensors

GROUP = 64
DEVIATION = 0.02
random = np.random.default_rng(0)


def random_bytes(n):
    return np.frombuffer(random.bytes(n), np.uint8)


def deviation(name):
    return 1.0 if "embd" in name or "embed" in name else DEVIATION


def bf16(x):
    """f32 to bf16's bits, to the nearest."""
    return ((np.asarray(x, np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def random_bf16(n, deviation):
    # A random sign and mantissa: magnitudes from a power of two to the next, 1/64 for 0.02.
    exponent = 127 + round(np.log2(deviation / 1.53))
    return random_bytes(2 * n).view(np.uint16) & 0x807F | np.uint16(exponent << 7)


def vector(kind, shape):
    n = int(np.prod(shape))
    match kind:
        case "one":
            values = np.ones(n)
        case "conv":
            values = random.normal(0, 0.5, n)
        case "decay":  # A_log
            values = np.log(random.uniform(1, 16, n))
        case "bias":
            values = random.uniform(-4, 1, n)
    return values.astype(np.float32).reshape(shape)


# --- safetensors


def parts(t, form):
    """(name, dtype, shape, maker of the bytes) of each tensor in the file."""
    if t.kind not in ("matrix", "router"):
        yield t.name, "BF16", t.shape, lambda: bf16(vector(t.kind, t.shape))
        return
    if form == "bf16":
        yield f"{t.name}.weight", "BF16", t.shape, lambda: random_bf16(int(np.prod(t.shape)), deviation(t.name))
        return
    bits = 8 if t.kind == "router" else int(form[1:])
    *lead, cols = t.shape
    packed, groups = (*lead, cols * bits // 32), (*lead, cols // GROUP)
    scale = deviation(t.name) * 12**0.5 / 2**bits
    scales = bf16(random.uniform(0.7, 1.3, int(np.prod(groups))) * scale)
    biases = bf16((scales.astype(np.uint32) << 16).view(np.float32) * (-(2**bits - 1) / 2))
    yield f"{t.name}.weight", "U32", packed, lambda: random_bytes(4 * int(np.prod(packed)))
    yield f"{t.name}.scales", "BF16", groups, lambda: scales
    yield f"{t.name}.biases", "BF16", groups, lambda: biases


def write_folder(shape, form, out):
    os.makedirs(out, exist_ok=True)
    config = dict(CONFIGS[shape])
    if form != "bf16":
        config["quantization"] = {"group_size": GROUP, "bits": int(form[1:])}
        for t in tensors(shape):
            if t.kind == "router":
                config["quantization"][t.name] = {"group_size": GROUP, "bits": 8}
        config["quantization_config"] = config["quantization"]
    with open(f"{out}/config.json", "w") as f:
        json.dump(config, f, indent=2)
    all_parts = [p for t in tensors(shape) for p in parts(t, form)]
    header, at = {"__metadata__": {"format": "mlx"}}, 0
    for name, dtype, dims, _ in all_parts:
        size = int(np.prod(dims)) * {"U32": 4, "BF16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": list(dims), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(f"{out}/model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, _, _, make in all_parts:
            f.write(np.ascontiguousarray(make()).tobytes())


# --- GGUF


def blocks(kind, n, deviation):
    """`n` weights in a format of GGML's: `[blocks, bytes of a block]`."""

    def f16(low, high, count):
        return random.uniform(low, high, (count, 1)).astype(np.float16).view(np.uint8).reshape(count, 2)

    match kind:
        case "BF16":
            return random_bf16(n, deviation).view(np.uint8)
        case "Q8_0":  # d, 32 times i8
            count, d = n // 32, deviation / 74
            return np.hstack([f16(0.7 * d, 1.3 * d, count), random_bytes(count * 32).reshape(count, 32)])
        case "Q4_0":  # d, 32 times 4 bits; w = d (q - 8)
            count, d = n // 32, deviation / 4.6
            return np.hstack([f16(0.7 * d, 1.3 * d, count), random_bytes(count * 16).reshape(count, 16)])
        case "Q6_K":  # 256 times 6 bits, 16 scales of 8 bits, d; w = d scale (q - 32)
            count, d = n // 256, deviation / 1350
            return np.hstack([random_bytes(count * 208).reshape(count, 208), f16(0.7 * d, 1.3 * d, count)])
        case "Q3_K":  # 256 times 3 bits, 16 scales of 6 bits, d; w = d (scale - 32) (q - 4)
            count, d = n // 256, deviation / 42
            return np.hstack([random_bytes(count * 108).reshape(count, 108), f16(0.7 * d, 1.3 * d, count)])
        case "Q2_K":  # 16 scales and minima of 4 bits each, 256 times 2 bits, d, dmin
            count, d = n // 256, deviation / 12
            rest = random_bytes(count * 80).reshape(count, 80)
            return np.hstack([rest, f16(0.7 * d, 1.3 * d, count), f16(1.0 * d, 2.0 * d, count)])


def write_gguf(shape, form, out):
    import gguf

    c = CONFIGS[shape]
    arch = c["model_type"].replace("_", "")
    w = gguf.GGUFWriter(out, arch)
    w.add_name(f"random {shape}")
    w.add_vocab_size(c["vocab_size"])
    w.add_tokenizer_model("no_vocab")
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c["rope_theta"])
    if "num_experts" in c:
        w.add_expert_count(c["num_experts"])
        w.add_expert_used_count(c["num_experts_per_tok"])
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if shape == "hybrid":
        w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
        w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
        w.add_ssm_state_size(c["linear_key_head_dim"])
        w.add_ssm_group_count(c["linear_num_key_heads"])
        w.add_ssm_time_step_rank(c["linear_num_value_heads"])
        w.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
        w.add_full_attention_interval(c["full_attention_interval"])
        w.add_rope_dimension_count(int(c["head_dim"] * c["partial_rotary_factor"]))
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_file_type(gguf.LlamaFileType["MOSTLY_Q3_K_M" if form == "Q3_K" else f"MOSTLY_{form}"])

    quant = gguf.GGMLQuantizationType[form]
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    makers = []
    for t in tensors(shape):
        if t.kind == "matrix":
            for name, dims in halves(c, t):
                n = int(np.prod(dims))
                w.add_tensor_info(
                    name, (*dims[:-1], dims[-1] // per_block * block_bytes), np.dtype(np.uint8), n // per_block * block_bytes, quant
                )
                makers.append(lambda n=n, d=deviation(name): blocks(form, n, d))
        else:
            dims = t.gguf_shape or t.shape
            w.add_tensor_info(t.gguf, dims, np.dtype(np.float32), 4 * int(np.prod(dims)))
            makers.append(lambda t=t, dims=dims: float_tensor(t, dims))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for make in makers:
        w.write_tensor_data(np.ascontiguousarray(make()))
    w.close()


def halves(c, t):
    """The tensors of GGUF that a matrix is: one, or (qkvz) two."""
    names = t.gguf.split("+")
    if len(names) == 1:
        return [(names[0], t.shape)]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    rows, cols = t.shape
    return [(names[0], (rows - values, cols)), (names[1], (values, cols))]


def float_tensor(t, dims):
    if t.kind == "router":
        return random.normal(0, DEVIATION, dims).astype(np.float32)
    values = vector(t.kind, dims)
    return -np.exp(values) if t.kind == "decay" else values


def main():
    shape, form, out = sys.argv[1:]
    unfinished = out + ".part"
    if form[0].islower():
        write_folder(shape, form, unfinished)
    else:
        write_gguf(shape, form, unfinished)
    os.rename(unfinished, out)


main()
