#!/usr/bin/env python3
"""Tiny random checkpoints of families with Mamba-2 layers, and of Granite's mixtures, as make.py's: see there.

    env/bin/python tests/golden/make_hybrids.py [CASE...]
"""
from make import main, without

MAMBA = dict(mamba_num_heads=6, mamba_head_dim=20, n_groups=3, ssm_state_size=18, conv_kernel=4, expand=3, chunk_size=32)
GRANITE = dict(vocab_size=256, tie_word_embeddings=True, rms_norm_eps=1e-5, embedding_multiplier=2.0, attention_multiplier=0.3, residual_multiplier=0.5,
               logits_scaling=4.0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def by_pattern(config):
    """Layers by a pattern of letters and time steps without a bound, as Nemotron's configs on the hub have them."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    kinds = config.pop("layers_block_type", None) or config.pop("layer_types")
    config.pop("layer_types", None)
    config.pop("mtp_layers_block_type", None)
    return config | {"hybrid_override_pattern": "".join(letters[kind] for kind in kinds), "num_hidden_layers": len(kinds), "time_step_limit": [0.0, float("inf")]}


CHECKPOINTS = {
    "nemotron_h": dict(
        seed=181, dtype="bfloat16", note="Mamba-2, attention and dense layers of one block, groups of two heads, biases of the convolution, bf16",
        config=dict(model_type="nemotron_h", vocab_size=256, hidden_size=40, intermediate_size=56, layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
                    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, **MAMBA),
        edit=[without("time_step_limit")]),
    "nemotron_h_moe": dict(
        seed=182, dtype="bfloat16", note="Nemotron 3 Nano: mixtures of experts without gates beside a shared one, groups of experts, layers by a pattern, bf16",
        config=dict(model_type="nemotron_h", vocab_size=256, hidden_size=40, intermediate_size=24, layers_block_type=["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
                    num_attention_heads=4, num_key_value_heads=1, head_dim=24, max_position_embeddings=256, n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=24,
                    moe_shared_expert_intermediate_size=36, num_experts_per_tok=3, n_group=2, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True, use_bias=True, **MAMBA),
        edit=[by_pattern]),
    "nemotron_h_latent": dict(
        seed=187, dtype="bfloat16", note="Nemotron 3 Super: experts behind a projection of their own, in layers by a pattern, bf16",
        config=dict(model_type="nemotron_h", vocab_size=256, hidden_size=40, intermediate_size=24, layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
                    num_attention_heads=4, num_key_value_heads=1, head_dim=24, max_position_embeddings=256, n_routed_experts=10, n_shared_experts=1, moe_intermediate_size=28,
                    moe_shared_expert_intermediate_size=36, moe_latent_size=24, num_experts_per_tok=4, n_group=1, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True, **MAMBA),
        edit=[by_pattern]),
    "granitemoehybrid_mamba": dict(
        seed=183, dtype="bfloat16", note="Granite 4 H: Mamba-2 of one group, attention without positions, experts and a shared one, all factors, bf16",
        config=dict(model_type="granitemoehybrid", hidden_size=40, intermediate_size=20, shared_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                    num_local_experts=9, num_experts_per_tok=3, layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"], position_embedding_type="nope",
                    mamba_n_heads=5, mamba_d_state=24, mamba_expand=2, mamba_n_groups=1, mamba_d_head="auto", mamba_chunk_size=32, **GRANITE),
        edit=[without("time_step_limit")]),
    "granitemoehybrid_dense": dict(
        seed=184, dtype="bfloat16", note="Granite 4 H without experts: Mamba-2 and attention with positions, dense layers of joined gate and up, no bias of the convolution, bf16",
        config=dict(model_type="granitemoehybrid", hidden_size=48, intermediate_size=64, shared_intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
                    num_local_experts=0, num_experts_per_tok=0, layer_types=["linear_attention", "full_attention", "linear_attention"], position_embedding_type="rope",
                    mamba_n_heads=6, mamba_d_state=16, mamba_expand=2, mamba_n_groups=2, mamba_d_head=16, mamba_conv_bias=False, mamba_chunk_size=32, **GRANITE),
        edit=[without("time_step_limit")]),
    "kimi_linear": dict(
        seed=186, dtype="bfloat16", note="Kimi-Linear: delta rules with a decay for each channel, latent attention without positions, a mixture behind a dense layer, bf16",
        config=dict(model_type="kimi_linear", vocab_size=256, hidden_size=40, intermediate_size=56, moe_intermediate_size=20, num_hidden_layers=4, num_attention_heads=4,
                    num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, num_experts=8, num_experts_per_token=3, num_shared_experts=1,
                    routed_scaling_factor=1.6, linear_attn_config={"full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 20, "num_heads": 3, "short_conv_kernel_size": 4},
                    pad_token_id=0, bos_token_id=1, eos_token_id=2, model_max_length=256),
        tensors=lambda name, tensor: {name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): tensor}),
    "granitemoe": dict(
        seed=185, dtype="bfloat16", note="Granite 3's mixtures: a softmax of the chosen, experts in two stacks with names of their own, bf16",
        config=dict(model_type="granitemoe", hidden_size=48, intermediate_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, num_local_experts=7,
                    num_experts_per_tok=3, **GRANITE)),
}

if __name__ == "__main__":
    main(__doc__, CHECKPOINTS)
