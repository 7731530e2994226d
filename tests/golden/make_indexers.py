#!/usr/bin/env python3
"""Tiny random checkpoints of families whose attention is over positions that an indexer selects, as make.py's: see there. Another seed is needed where scores of an indexer are nearly a
tie, too.

    env/bin/python tests/golden/make_indexers.py [CASE...]
"""
import torch

import make
from make import NearTie, changed, main, old_style, without

MARGIN = 2e-5  # of the greatest score of an indexer, between the last selected and the first other
MLA = dict(vocab_size=256, hidden_size=48, intermediate_size=60, moe_intermediate_size=20, num_attention_heads=6, num_key_value_heads=6, q_lora_rank=24, kv_lora_rank=32,
           qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=12, n_shared_experts=1, num_experts_per_tok=3, max_position_embeddings=128)
GLM_IMAGES = dict(image_token_id=250, video_token_id=251, image_start_token_id=252, image_end_token_id=253, video_start_token_id=254, video_end_token_id=255,
                  vision_config=dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, image_size=16, out_hidden_size=40, projection_intermediate_size=24))
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def published(name, tensor):
    """Names outside of layers as DeepSeek publishes them; transformers writes its own there."""
    name = name.removeprefix("model.")
    return {{"embed_tokens.weight": "embed.weight"}.get(name, name.replace("hc_head.hc_", "hc_head_")): tensor}


def hub_keys(config):
    """The keys of DeepSeek's own config, in the place of lists that transformers makes of them."""
    scaling = {k: v for k, v in config["rope_parameters"]["compress"].items() if k not in ("rope_type", "rope_theta", "partial_rotary_factor", "attention_factor")}
    rates = config["compress_rates"]
    return config | {"compress_ratios": [{SLIDING: 0, SPARSE: 4, HEAVY: 128}[kind] for kind in config["layer_types"]], "compress_rate_csa": rates[SPARSE], "compress_rate_hca": rates[HEAVY],
                     "num_hash_layers": config["mlp_layer_types"].count("hash_moe"), "rope_scaling": scaling | {"type": "yarn"}}

QWEN_VISION = dict(model_type="qwen4_exp_vision", depth=1, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, out_hidden_size=40, num_position_embeddings=16)


def in_text(**values):
    return lambda config: config | {"text_config": config["text_config"] | values}


CHECKPOINTS = {
    "deepseek_v32": dict(
        seed=191, dtype="bfloat16", note="DeepSeek-V3.2: an indexer of its own in each layer, YaRN with its factor of scores, groups of experts, bf16",
        config=dict(model_type="deepseek_v32", num_hidden_layers=3, n_group=3, topk_group=2, routed_scaling_factor=1.7, first_k_dense_replace=1, index_topk=24, index_n_heads=16,
                    index_head_dim=20, rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
                                                        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7}, **MLA),
        edit=[old_style, changed(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)]),
    "glm_moe_dsa": dict(
        seed=192, dtype="bfloat16", note="GLM-5: layers that see what the one before them has selected, pairs beside each other in the indexer, biases, bf16",
        config=dict(model_type="glm_moe_dsa", num_hidden_layers=4, n_group=1, topk_group=1, routed_scaling_factor=1.5, first_k_dense_replace=2, index_topk=19, index_n_heads=14,
                    index_head_dim=16, attention_bias=True, indexer_types=["full", "shared", "full", "shared"],
                    rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, **MLA)),
    "glm5_next": dict(
        seed=193, dtype="bfloat16", architectures="Glm5NextForConditionalGeneration",
        note="GLM-5.3-Flash: four residual streams, delta rules with bounded decays, an indexer of pools of 4 and a layer that sees what the one before it has selected, a limit of SwiGLU that is reached, with a part for "
        "images, bf16",
        config=dict(model_type="glm5_next", tie_word_embeddings=False, **GLM_IMAGES,
                    text_config=dict(model_type="glm5_next_text", num_hidden_layers=6, n_group=1, topk_group=1, routed_scaling_factor=1.5, pad_token_id=0, index_topk=20, index_kpool=4,
                                     index_n_heads=14, index_head_dim=16, swiglu_limit=1.2, linear_num_heads=3, linear_head_dim=20,
                                     layer_types=["linear_attention", "indexed_attention", "linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
                                     indexer_types=["full", "full", "full", "full", "shared", "full"], mlp_layer_types=["dense", "sparse", "dense", "sparse", "dense", "dense"],
                                     **(MLA | dict(hidden_size=40, qk_rope_head_dim=0, n_routed_experts=8))))),
    "deepseek_v4": dict(
        seed=194, dtype="bfloat16", tensors=published,
        note="DeepSeek-V4: four residual streams with a head of their own, layers with a window of 12 alone and with entries of 4 positions that an indexer selects and of 8, YaRN for these, grouped output projections, "
        "experts by the token's number in two layers, a limit of SwiGLU that is reached, names as published, bf16",
        config=dict(model_type="deepseek_v4", vocab_size=256, hidden_size=40, moe_intermediate_size=20, num_hidden_layers=4, num_attention_heads=6, head_dim=24, qk_rope_head_dim=8, q_lora_rank=24,
                    num_experts_per_tok=3, n_routed_experts=8, routed_scaling_factor=1.5, layer_types=[SLIDING, SPARSE, HEAVY, SPARSE], compress_rates={SPARSE: 4, HEAVY: 8},
                    mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"], sliding_window=12, o_groups=2, o_lora_rank=16, index_n_heads=10, index_head_dim=16, index_topk=5, swiglu_limit=1.2,
                    tie_word_embeddings=False, max_position_embeddings=128, compress_rope_theta=5000.0, rope_theta=1000.0,
                    rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}),
        variants={"-hub": [hub_keys, without("rope_parameters", "layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor"), dict(note="keys of DeepSeek's own config")]}),
    "qwen4_exp": dict(
        seed=194, dtype="bfloat16", architectures="Qwen4ExpForConditionalGeneration",
        note="Qwen4-Exp: four residual streams with gated mixtures, delta rules with sigmoid gates, gated attention to blocks of 4 that an indexer selects, embeddings of n-grams in two layers with tables in three parts "
        "each, with a part for images, bf16",
        config=dict(model_type="qwen4_exp", tie_word_embeddings=False, image_token_id=250, video_token_id=251, vision_start_token_id=252, vision_end_token_id=253, vision_config=QWEN_VISION,
                    text_config=dict(model_type="qwen4_exp_text", vocab_size=256, hidden_size=40, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                     layer_types=["linear_attention", "indexed_attention", "linear_attention", "linear_attention", "indexed_attention"], linear_num_key_heads=2,
                                     linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=8, output_gate_type="sigmoid", moe_intermediate_size=20,
                                     shared_expert_intermediate_size=24, num_experts=8, num_experts_per_tok=3, hc_count=4, hc_lowrank=12, indexer_n_heads=6, indexer_kv_heads=1,
                                     indexer_head_dim=12, indexer_budget=20, indexer_compress_ratio=4, ple_layer_ids=[1, 4], ple_embed_dim=24, ple_conv_kernel_size=4, ngram_size=3,
                                     heads_per_ngram=2, ngram_vocab_size_base=90, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=3, eos_token_id=[21, 9], pad_token_id=0,
                                     max_position_embeddings=128, rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
                                                                                   "mrope_interleaved": True})),
        variants={"-silu": [in_text(output_gate_type=None), dict(note="delta rules with SiLU gates")]}),
}


def without_ties(logits_by_steps):
    """`make.logits_by_steps` of a model whose indexers come nowhere near a tie."""
    def run(model, tokens):
        gaps, topk = [], torch.Tensor.topk
        text = model.config.get_text_config()
        pool = getattr(text, "compress_rates", {}).get(SPARSE) or getattr(text, "index_kpool", 1)

        def watched(scores, k, **arguments):
            if scores.dim() == 1 and len(scores) > k:  # of a token's blocks
                best = scores.sort(descending=True).values
                gaps.append(float((best[k - 1] - best[k]) / best[0]))
            if scores.dim() == 3 and scores.shape[1] == len(tokens) and scores.shape[-1] == len(tokens) // pool > k:  # of an indexer: [batch, tokens, positions or pools]
                best = scores.sort(dim=-1, descending=True).values
                gap = (best[..., k - 1] - best[..., k])[..., (k + 1) * pool - 1:]
                gaps.append(float(gap.min() / best[best.abs() < 1e30].abs().max()))
            return topk(scores, k, **arguments)
        torch.Tensor.topk = watched
        try:
            make.logits_whole(model, tokens)
        finally:
            torch.Tensor.topk = topk
        if min(gaps) < MARGIN:
            raise NearTie(f"a selection is nearly a tie ({min(gaps):.1e})")
        print(f"nearest tie of an indexer: {min(gaps):.1e}")
        return logits_by_steps(model, tokens)
    return run


if __name__ == "__main__":
    make.logits_by_steps = without_ties(make.logits_by_steps)
    main(__doc__, CHECKPOINTS)
