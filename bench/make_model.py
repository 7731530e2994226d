"""Writes a random-weight model: `make_model.py SHAPE FORM OUT [text|pooled|planted|drafter]`, with the Python of the peers' environment. With `text` it has a vocabulary (`vocabulary.py`),
so that it can be served. With `pooled` matrices are drawn from a pool of a few random blocks, so that 17 GB take seconds: for speed it is the same. With `planted` and `drafter` it says what
`planted.py` says, as one of a pair.

FORM is `bf16`, or `q` and a number of bits from 2 to 8, for a folder with config.json and safetensors (MLX's affine quantisation, groups of 64, which Sluice and mlx-lm
read; bf16 is also what transformers reads), or `BF16`, `Q8_0`, `Q6_K`, `Q4_0`, `IQ4_XS`, `Q3_K` or `Q2_K` for a GGUF file (llama.cpp). Every matrix of a file has the same
form, the embedding and the output head too, so that the formats differ in nothing but their blocks; but `Q4_K_M` is llama.cpp's mix, `UD-Q2_K` one of 2 and 3 bits for experts, and beside `MXFP4`
both are `Q8_0`. A giant's experts may have another form than the rest: `q4-q2`,
`Q4_0-Q2_K`. Weights have a standard deviation of about
0.02, as trained ones do, but the embedding has 1: what a layer adds then stays small beside the token itself, and tokens choose different experts, as they do in a
trained model. (With 0.02 the mean over the context, alike for all tokens, drowns them, and a mixture uses a handful of its experts.) All bytes are written, so that no
file is sparse, in blocks of some megabytes, so that memory stays small however large the file.

A giant's routing repeats itself as a trained model's does. Each token's embedding is a part that all tokens have in common (COMMON) and one of its own (TOKEN). What is
common makes some experts popular at all times, since routers' rows differ in it. Queries and keys lean to the common part (LEAN), all rows alike, so that they hardly depend
on the token and the rotary embedding makes attention fade with the distance; what GatedDeltaNet writes with fades alike. So a router sees a popularity, a mean over the last
few tokens, and the token, and the second grows with the layers (shapes.OUT says how much all of them add). Measured on 256 random tokens, three times, as layers' mean (lowest
to highest): tokens next to each other share 21 % (9 to 33) of their experts with 12 layers of 30B-A3B, 21 % (19 to 23) with 4 of Qwen3.5-35B-A3B, 16 % with one of
Qwen3.5-397B-A17B; the trained demo model 30 % (17 to 47), the published 397B 8 to 34. LRU finds, with an eighth, a quarter, a half and three quarters of the experts in
memory, 32, 55, 81, 93 % with 30B-A3B and 42, 61, 84, 94 % with 35B-A3B; demo 21, 44, 70, 88. It misses 1.5 to 2.4 times as often as Belady's optimum, up to a half in memory; demo 1.5 to 2.3. With
16, 32, 64 and 128 of 512 it finds 16, 28, 42, 62 % with 397B-A17B at K = 10; published, at a smaller K, 49, 59, 68, 71. In 30 tokens 58, 40 and 30 % of the experts are used
(of 128, 256 and 512); published 43 to 57.
"""

import json
import os
import re
import sys
import zlib
from dataclasses import replace

import numpy as np

import planted
import vocabulary
from shapes import config, is_giant, is_gpt_oss, is_hybrid, is_latent, tensors

GROUP = 64
DEVIATION = 0.02
# Weights that are made at a time: a multiple of all blocks, and of a group for each of 4096 columns.
BLOCK = 1 << 24


class Source:
    """Random numbers of one tensor's part, the same whenever they are asked for."""

    def __init__(self, name):
        self.name, self.start, self.drawn = name, zlib.crc32(name.encode()), 0
        self.bits = np.random.SFC64(self.start)
        self.random = np.random.Generator(self.bits)

    def bytes(self, n):
        return random_bytes(self, n)

    def new_bytes(self, n):
        return self.bits.random_raw(-(-n // 8)).view(np.uint8)[:n]


def random_bytes(source, n):
    return source.new_bytes(n)


def blocks_of(n):
    """How many weights each block of `n` has."""
    return [min(BLOCK, n - at) for at in range(0, n, BLOCK)]


def bf16(x):
    """f32 to bf16's bits, to the nearest."""
    return ((np.asarray(x, np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def widened(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


# Of a planted model, what it says, if it is one: by token, the one whose embedding is its row of the head.
ROWS = None
# How much larger its embedding is than what a layer adds, so that the token can still be told behind all layers. A giant's layers add little.
LOUD = 16.0


def deviation(t):
    if t.name.endswith("embed_tokens"):
        return TOKEN if t.kind == "embedding" else 1.0 if ROWS is None else LOUD
    return DEVIATION * t.part


def random_bf16(source, n, deviation):
    # A random sign and mantissa: magnitudes from a power of two to the next, 1/64 for 0.02.
    exponent = 127 + round(np.log2(deviation / 1.53))
    return source.bytes(2 * n).view(np.uint16) & 0x807F | np.uint16(exponent << 7)


# A giant's routing: the part of its embeddings that all tokens have in common, each token's own, and how far what leans leans to the common one.
COMMON, TOKEN, LEAN = 0.2, 0.9, 20.0
MATRICES = ("matrix", "embedding", "expert", "router")


def is_shifted(t):
    return t.kind == "embedding" or t.lean != 0


def shifts(t, per):
    """What is added to each `per` weights of a tensor, block by block: a direction that its rows have in common."""
    rows, cols = t.shape
    u = Source("common").random.normal(0, 1, cols // GROUP)
    u *= (COMMON if t.kind == "embedding" else t.lean * LEAN / cols) / np.sqrt(np.mean(u * u))
    one = np.repeat(u, GROUP // per).astype(np.float32)
    at, leaning = 0, t.leaning or rows
    for k in blocks_of(rows * cols):
        here = np.arange(at, at + k // cols)
        yield np.where(here[:, None] < leaning, one, np.float32(0)).reshape(-1)
        at += k // cols


# What is drawn from the pool: most of the bytes. Attention and routers are each layer's own: where layers share them, what they add to a token adds up, and all tokens
# come to want the same experts.
POOL, POOLED = 8, re.compile(r"mlp.*_proj|ffn_(gate|up|down)")


def pooled(make):
    """The same as `make(source, ...)`, but most matrices take their bytes from a pool. The source's name says at which block of the pool they begin."""
    pools = {}

    def drawn(source, *more):
        if not POOLED.search(source.name):
            return make(source, *more)
        if more not in pools:
            pools[more] = [make(Source(f"{more} {i}"), *more) for i in range(POOL)]
        source.drawn += 1
        return pools[more][(source.start + source.drawn) % POOL]

    return drawn


def vector(t, shape):
    n, random = int(np.prod(shape)), Source(t.name).random
    match t.kind:
        case "one":
            values = np.full(n, t.part)
        case "conv":
            values = random.normal(0, 0.5, n)
        case "decay":  # A_log
            values = np.log(random.uniform(1, 16, n))
        case "bias":
            values = random.uniform(-4, 1, n)
        case "small":
            values = random.normal(0, DEVIATION, n)
    return values.astype(np.float32).reshape(shape)


# --- safetensors


def reordered(made, rows):
    """An embedding's rows in the order of a planted head."""
    return np.concatenate([np.ascontiguousarray(block).reshape(-1) for block in made]).reshape(rows, -1)[ROWS]


def parts(shape, t, form):
    """(name, dtype, shape, maker) of each tensor in the file; a maker yields its bytes, block by block."""
    if t.kind not in MATRICES:
        yield t.name, "BF16", t.shape, lambda: [bf16(vector(t, t.shape))]
        return
    if t.name == "lm_head" and ROWS is not None:
        # The head's rows are those of the embedding, in another order.
        [embedding] = (e for e in tensors(shape) if e.name.endswith("embed_tokens"))
        for name, dtype, dims, make in parts(shape, embedding, form):
            yield name.replace(embedding.name, t.name), dtype, dims, lambda make=make, rows=dims[0]: [reordered(make(), rows)]
        return
    n = int(np.prod(t.shape))
    if form == "bf16":

        def plain():
            source = Source(t.name)
            return (random_bf16(source, k, deviation(t)) for k in blocks_of(n))

        yield f"{t.name}.weight", "BF16", t.shape, plain
        return
    bits = bits_of(t, form)
    *lead, cols = t.shape
    packed, groups = (*lead, cols * bits // 32), (*lead, cols // GROUP)
    # Scales are 256 numbers around the one that gives the deviation, drawn by a byte each.
    scales = bf16(np.linspace(0.7, 1.3, 256) * deviation(t) * 12**0.5 / 2**bits)
    biases = bf16(widened(scales) * (-(2**bits - 1) / 2))

    def weights():
        source = Source(t.name)
        return (source.bytes(k * bits // 8) for k in blocks_of(n))

    def drawn(table):
        source = Source(f"{t.name}.scales")
        return (table[source.bytes(k // GROUP)] for k in blocks_of(n))

    def shifted():
        return (bf16(widened(b) + shift) for b, shift in zip(drawn(biases), shifts(t, GROUP)))

    yield f"{t.name}.weight", "U32", packed, weights
    yield f"{t.name}.scales", "BF16", groups, lambda: drawn(scales)
    yield f"{t.name}.biases", "BF16", groups, shifted if is_shifted(t) else lambda: drawn(biases)


def parted(form):
    """A form of the rest and one of experts; a mix has a dash in its own name."""
    return (form, "", "") if form.startswith("UD-") else form.partition("-")


def bits_of(t, form):
    """In a form such as `q4`, or `q4-q2`: of the rest and of experts."""
    rest, _, experts = parted(form)
    return 8 if t.kind == "router" else int((experts if experts and t.kind == "expert" else rest)[1:])


def write_folder(shape, form, out):
    os.makedirs(out, exist_ok=True)
    written = dict(config(shape))
    if form != "bf16":
        usual = int(form.partition("-")[0][1:])
        written["quantization"] = {"group_size": GROUP, "bits": usual}
        for t in tensors(shape):
            if t.kind in MATRICES and bits_of(t, form) != usual:
                written["quantization"][t.name] = {"group_size": GROUP, "bits": bits_of(t, form)}
        written["quantization_config"] = written["quantization"]
    with open(f"{out}/config.json", "w") as f:
        json.dump(written, f, indent=2)
    all_parts = [p for t in tensors(shape) for p in parts(shape, t, form)]
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
            for block in make():
                f.write(np.ascontiguousarray(block).data)


# --- GGUF


def blocks(source, kind, n, deviation, common=None):
    """`n` weights in a format of GGML's: `[blocks, bytes of a block]`. `common`: what is added to each block of 32."""

    def f16(low, high):
        return np.linspace(low, high, 256).astype(np.float16)[source.bytes(count)]

    def laid(*columns):
        """Columns side by side: some random bytes, or an f16 for each block."""
        wide = [c if isinstance(c, int) else 2 for c in columns]
        out, at = np.empty((count, sum(wide)), np.uint8), 0
        for c, w in zip(columns, wide):
            out[:, at : at + w] = source.bytes(count * c).reshape(count, c) if isinstance(c, int) else c.view(np.uint8).reshape(count, 2)
            at += w
        return out

    count = n // (32 if kind in ("Q8_0", "Q4_0", "Q4_1", "MXFP4") else 256)
    match kind:
        case "BF16":
            return random_bf16(source, n, deviation).view(np.uint8)
        case "Q8_0":  # d, 32 times i8
            d = deviation / 74
            return laid(f16(0.7 * d, 1.3 * d), 32)
        case "Q4_0":  # d, 32 times 4 bits; w = d (q - 8)
            d = f16(0.7 * deviation / 4.6, 1.3 * deviation / 4.6)
            # Scales of either sign, as quantisers write them. With one sign the mean of -8 to 7, which is not 0, would make all tokens alike.
            return laid(np.where(source.bytes(count) & 1, -d, d), 16)
        case "Q4_1":  # d, m, 32 times 4 bits; w = d q + m
            d = f16(0.7 * deviation / 4.6, 1.3 * deviation / 4.6)
            return laid(d, (common - 7.5 * d.astype(np.float32)).astype(np.float16), 16)
        case "Q6_K":  # 256 times 6 bits, 16 scales of 8 bits, d; w = d scale (q - 32)
            d = deviation / 1350
            return laid(208, f16(0.7 * d, 1.3 * d))
        case "Q3_K":  # 256 times 3 bits, 16 scales of 6 bits, d; w = d (scale - 32) (q - 4)
            d = deviation / 42
            return laid(108, f16(0.7 * d, 1.3 * d))
        case "Q2_K":  # 16 scales and minima of 4 bits each, 256 times 2 bits, d, dmin
            d = deviation / 12
            return laid(80, f16(0.7 * d, 1.3 * d), f16(1.0 * d, 2.0 * d))
        case "Q4_K":  # d, dmin, 8 scales and minima of 6 bits each, 256 times 4 bits; w = d scale q - dmin minimum
            d = deviation / 257
            return laid(f16(0.7 * d, 1.3 * d), f16(5.2 * d, 9.8 * d), 12 + 128)
        case "Q5_K":  # the same with 5 bits
            d = deviation / 524
            return laid(f16(0.7 * d, 1.3 * d), f16(10.8 * d, 20.2 * d), 12 + 32 + 128)
        case "IQ4_XS":  # d, 8 scales of 6 bits, 256 times an index into 16 numbers; w = d (scale - 32) number
            d = deviation / 1247
            return laid(f16(0.7 * d, 1.3 * d), 6 + 128)
        case "MXFP4":  # an exponent, 32 times e2m1; w = 2^(exponent - 127) number
            out = source.bytes(count * 17).reshape(count, 17).copy()
            out[:, 0] = 127 + round(np.log2(deviation / 2.93)) - (out[:, 0] & 1)
            return out
        case "IQ2_XXS" | "IQ3_XXS":  # d, 256 numbers by indices into a codebook, signs and scales of 4 bits
            d, wide = (deviation / 47, 64) if kind == "IQ2_XXS" else (deviation / 152, 96)
            return laid(f16(0.7 * d, 1.3 * d), wide)


def write_gguf(shape, form, out, text):
    import gguf

    c = config(shape)
    arch = {"glm4_moe_lite": "deepseek2", "gpt_oss": "gpt-oss"}.get(c["model_type"]) or c["model_type"].removesuffix("_text").replace("_", "")
    rope_theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
    w = gguf.GGUFWriter(out, arch)
    w.add_name(f"random {shape}")
    w.add_vocab_size(c["vocab_size"])
    if text:
        vocabulary.add_to(w, c["vocab_size"])
    else:
        w.add_tokenizer_model("no_vocab")
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c.get("intermediate_size", 0))
    w.add_head_count(c["num_attention_heads"])
    if is_latent(c):
        add_latent(w, c)
    else:
        w.add_head_count_kv(c["num_key_value_heads"])
        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(rope_theta)
    if experts_of(c):
        w.add_expert_count(experts_of(c))
        w.add_expert_used_count(c["num_experts_per_tok"])
        w.add_expert_feed_forward_length(c.get("moe_intermediate_size") or c["intermediate_size"])
    if "n_routed_experts" in c:
        w.add_expert_shared_count(c["n_shared_experts"])
        w.add_expert_weights_scale(c["routed_scaling_factor"])
        w.add_expert_weights_norm(c["norm_topk_prob"])
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        w.add_leading_dense_block_count(c["first_k_dense_replace"])
        if not is_latent(c):
            w.add_rope_dimension_count(int(c["head_dim"] * c["partial_rotary_factor"]))
    if is_gpt_oss(c):
        yarn = c["rope_scaling"]
        w.add_sliding_window(c["sliding_window"])
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(yarn["factor"])
        w.add_rope_scaling_orig_ctx_len(yarn["original_max_position_embeddings"])
    if is_hybrid(c):
        w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
        w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
        w.add_ssm_state_size(c["linear_key_head_dim"])
        w.add_ssm_group_count(c["linear_num_key_heads"])
        w.add_ssm_time_step_rank(c["linear_num_value_heads"])
        w.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
        w.add_full_attention_interval(c["full_attention_interval"])
        if arch == "qwen35moe":
            # Text counts alike in time, height and width.
            w.add_rope_dimension_sections([11, 11, 10, 0])
        w.add_rope_dimension_count(int(c["head_dim"] * c["partial_rotary_factor"]))
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    rest, _, experts = parted(form)
    w.add_file_type(gguf.LlamaFileType["MOSTLY_" + {"Q3_K": "Q3_K_M", "MXFP4": "MXFP4_MOE", "UD-Q2_K": "Q2_K"}.get(rest, rest)])

    makers = []
    for t in tensors(shape):
        if t.kind in MATRICES and t.kind != "router":
            # Shifted tensors need a minimum in each block.
            kind = "Q4_1" if is_shifted(t) else kind_of(t, c["num_hidden_layers"], experts if experts and t.kind == "expert" else rest)
            if len(t.shape) == 3 and "attn" in t.gguf:
                kind = c.get("heads_in", kind)
            quant = gguf.GGMLQuantizationType[kind]
            per_block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
            for name, dims in halves(c, t):
                n = int(np.prod(dims))
                w.add_tensor_info(name, (*dims[:-1], dims[-1] // per_block * block_bytes), np.dtype(np.uint8), n // per_block * block_bytes, quant)
                makers.append(lambda t=t, name=name, n=n, kind=kind: matrix(t, name, n, kind))
        else:
            dims = t.gguf_shape or t.shape
            w.add_tensor_info(t.gguf, dims, np.dtype(np.float32), 4 * int(np.prod(dims)))
            makers.append(lambda t=t, dims=dims: [float_tensor(t, dims)])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    # As GGUFWriter.write_tensor_data does, but in blocks.
    [file] = w.fout
    w.write_padding(file, file.tell())
    for make in makers:
        begin = file.tell()
        for block in make():
            file.write(np.ascontiguousarray(block).data)
        w.write_padding(file, file.tell() - begin)
    w.close()


def experts_of(c):
    """How many experts a mixture has, whatever its family calls them."""
    return c.get("num_experts") or c.get("n_routed_experts") or c.get("num_local_experts")


def add_latent(w, c):
    """Rows of latent attention, as one KV head has them, and heads as they are before."""
    rank, rotated, plain = c["kv_lora_rank"], c["qk_rope_head_dim"], c["qk_nope_head_dim"]
    w.add_head_count_kv(1)
    w.add_key_length(rank + rotated)
    w.add_value_length(rank)
    w.add_key_length_mla(plain + rotated)
    w.add_value_length_mla(c["v_head_dim"])
    w.add_q_lora_rank(c["q_lora_rank"])
    w.add_kv_lora_rank(rank)
    w.add_rope_dimension_count(rotated)


def kind_of(t, layers, form):
    """The format of a tensor in llama.cpp's mixes: more bits for values, for what leaves feed-forward layers at both ends and in every third between, and for the embedding and the head."""
    ends = t.gguf in ("token_embd.weight", "output.weight")
    part = t.gguf.rpartition(".")[0].rpartition(".")[2]
    if part in ("attn_k_b", "attn_v_b"):
        return "Q8_0"
    if form == "MXFP4":
        return "Q8_0" if ends else form
    if form == "UD-Q2_K":
        return {"ffn_gate_exps": "IQ2_XXS", "ffn_up_exps": "IQ2_XXS", "ffn_down_exps": "IQ3_XXS"}.get(part, "Q6_K" if ends else "Q5_K")
    if form != "Q4_K_M":
        return form
    layer = 0 if ends else int(t.gguf.split(".")[1])
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "Q6_K" if ends or more and part in ("attn_v", "ffn_down", "ffn_down_exps") else "Q4_K"


def matrix(t, name, n, kind):
    if t.name == "lm_head" and ROWS is not None:
        of_embedding = replace(t, name="model.embed_tokens")
        return [reordered(matrix(of_embedding, "token_embd.weight", n, kind), t.shape[0])]
    source = Source(name)
    if not is_shifted(t):
        return (blocks(source, kind, k, deviation(t)) for k in blocks_of(n))
    return (blocks(source, kind, k, deviation(t), shift) for k, shift in zip(blocks_of(n), shifts(t, 32)))


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
        return Source(t.name).random.normal(0, DEVIATION, dims).astype(np.float32)
    values = vector(t, dims)
    return -np.exp(values) if t.kind == "decay" else values


def main():
    shape, form, out, *text = sys.argv[1:]
    if "pooled" in text:
        text.remove("pooled")
        globals().update({name: pooled(globals()[name]) for name in ("random_bytes", "random_bf16", "blocks")})
    for kind in {"planted", "drafter"} & set(text):
        text.remove(kind)
        assert not (form[0].isupper() and is_giant(shape)), "a giant's embedding has blocks of another kind than its head"
        config(shape)["tie_word_embeddings"] = False
        globals()["ROWS"] = planted.rows(config(shape)["vocab_size"], kind == "drafter")
    unfinished = out + ".part"
    if form[0].isupper():
        write_gguf(shape, form, unfinished, text)
    else:
        write_folder(shape, form, unfinished)
        if text:
            vocabulary.write_beside(unfinished, config(shape)["vocab_size"])
    os.rename(unfinished, out)


if __name__ == "__main__":
    main()
