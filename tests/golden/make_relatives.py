#!/usr/bin/env python3
"""Tiny random checkpoints of families near to Llama: Mistral, Phi, Granite, SmolLM, OLMo, MiniMax and GLM, as make.py's: see there.

    env/bin/python tests/golden/make_relatives.py [CASE...]
"""
from make import changed, main, old_style, rope, without

CHECKPOINTS = {
    # ---- Mistral
    "mistral": dict(
        seed=101, dtype="bfloat16", note="windows of 24 in all layers, old-style config without head_dim, bf16",
        config=dict(model_type="mistral", vocab_size=256, hidden_size=48, intermediate_size=76, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
                    sliding_window=24, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        edit=[old_style, without("head_dim")],
        variants={"-full": [changed(sliding_window=None), dict(note="sliding_window null: no windows")]}),
    "ministral": dict(
        seed=102, dtype="float16", note="windows of 20 in two layers of three, heads wider than the residual stream has room for, tied, f16",
        config=dict(model_type="ministral", vocab_size=256, hidden_size=40, intermediate_size=60, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                    head_dim=16, sliding_window=20, layer_types=["sliding_attention", "full_attention", "sliding_attention"], tie_word_embeddings=True,
                    rope_parameters={"rope_type": "default", "rope_theta": 100000.0})),
    "ministral3": dict(
        seed=103, dtype="bfloat16", note="YaRN and queries that grow every 32 positions, tied, bf16",
        config=dict(model_type="ministral3", vocab_size=256, hidden_size=40, intermediate_size=60, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                    head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
                    rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
                                     "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}),
        variants={"-steady": [rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.0,
                                   max_position_embeddings=128), dict(note="queries that do not grow")]}),
    "mistral3": dict(
        seed=104, dtype="bfloat16", architectures="Mistral3ForConditionalGeneration", note="Ministral 3 in the wrapper with a part for images, bf16",
        config=dict(model_type="mistral3", tie_word_embeddings=False, image_token_index=250,
                    vision_config=dict(model_type="pixtral", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=8, patch_size=4, image_size=16),
                    text_config=dict(
                        model_type="ministral3", vocab_size=256, hidden_size=40, intermediate_size=60, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                        max_position_embeddings=128, tie_word_embeddings=False,
                        rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0,
                                         "llama_4_scaling_beta": 0.3}))),
    "mixtral": dict(
        seed=105, dtype="bfloat16", note="experts under names of their own, one tensor each, bf16",
        config=dict(model_type="mixtral", vocab_size=256, hidden_size=40, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                    num_local_experts=6, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
        edit=[lambda config: {("num_local_experts" if k == "num_experts" else k): v for k, v in old_style(config).items()}]),
    # ---- Phi
    "phi3": dict(
        seed=111, dtype="bfloat16", note="q, k, v in one matrix, gate and up in another, half of a head rotated, LongRoPE's long factors, old-style config, tied, bf16",
        config=dict(model_type="phi3", vocab_size=256, hidden_size=48, intermediate_size=60, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, pad_token_id=0,
                    max_position_embeddings=128, original_max_position_embeddings=32, tie_word_embeddings=True,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
        edit=[rope(rope_type="longrope", long_factor=[1.0, 1.5, 2.0, 2.5], short_factor=[1.0, 1.0, 1.1, 1.2]), old_style],
        variants={"-plain": [old_style, without("partial_rotary_factor", "rope_scaling"), dict(note="whole heads rotated, no scaling: Phi-4")],
                  "-window": [changed(sliding_window=24), dict(note="windows of 24, half of a head rotated")]}),
    # ---- Granite
    "granite": dict(
        seed=121, dtype="bfloat16", note="factors for embedding, scores, residual stream and logits; biases of attention; tied, bf16",
        config=dict(model_type="granite", vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
                    attention_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-5, embedding_multiplier=3.0, attention_multiplier=0.35, residual_multiplier=0.6,
                    logits_scaling=6.0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "granitemoehybrid": dict(
        seed=122, dtype="bfloat16", note="Granite 4, dense: all layers attention, no experts, bf16",
        config=dict(model_type="granitemoehybrid", vocab_size=256, hidden_size=48, intermediate_size=64, shared_intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
                    num_key_value_heads=2, num_local_experts=0, num_experts_per_tok=0, layer_types=["full_attention"] * 2, position_embedding_type="rope", mamba_n_heads=4,
                    tie_word_embeddings=True, rms_norm_eps=1e-5, embedding_multiplier=2.0, attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=8.0,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        edit=[without("time_step_limit")],
        variants={"-nope": [without("time_step_limit"), changed(position_embedding_type=None), dict(note="no layer knows positions")]}),
    # ---- SmolLM3
    "smollm3": dict(
        seed=131, dtype="bfloat16", note="every third layer knows no positions, tied, bf16",
        config=dict(model_type="smollm3", vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
                    no_rope_layers=[1, 1, 0], tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                    rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
        variants={"-interval": [without("no_rope_layers", "layer_types"), changed(no_rope_layer_interval=2), dict(note="every second layer, by interval")],
                  "-window": [changed(use_sliding_window=True, sliding_window=20, layer_types=["full_attention", "sliding_attention", "sliding_attention"]),
                              dict(note="windows of 20 by layer_types")]}),
    # ---- OLMo
    "olmo2": dict(
        seed=141, dtype="bfloat16", note="norms over all of q and k, and of what layers put out alone; bf16",
        config=dict(model_type="olmo2", vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
                    rms_norm_eps=1e-6, eos_token_id=2, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}), edit=[old_style]),
    "olmo3": dict(
        seed=142, dtype="bfloat16", note="the same with windows of 20, and YaRN in layers without; bf16",
        config=dict(model_type="olmo3", vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
                    sliding_window=20, layer_types=["sliding_attention", "full_attention", "sliding_attention"], eos_token_id=2, max_position_embeddings=128,
                    rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                                     "full_attention": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32,
                                                        "attention_factor": 1.2}}),
        variants={"-old": [without("rope_parameters"), changed(rope_theta=500000.0, rope_scaling={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.2}), dict(note="with older keys, and the usual theta")]}),
    # ---- MiniMax
    "minimax_m2": dict(
        seed=151, dtype="bfloat16", note="norms over all of q and k, half of a head rotated, sigmoid router with a correction bias, old-style config, bf16",
        config=dict(model_type="minimax_m2", vocab_size=256, hidden_size=40, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                    num_local_experts=8, num_experts_per_tok=3, bos_token_id=1, eos_token_id=2,
                    rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}),
        edit=[lambda config: {("num_local_experts" if k == "num_experts" else k): v for k, v in old_style(config).items() if k != "partial_rotary_factor"},
              changed(rotary_dim=8, scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True, shared_intermediate_size=0)]),
    # ---- GLM
    "glm4": dict(
        seed=161, dtype="bfloat16", note="norms before and after both halves of a layer, pairs beside each other in half of a head, biases of q, k, v; bf16",
        config=dict(model_type="glm4", vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                    attention_bias=True, pad_token_id=0, eos_token_id=2, rms_norm_eps=1e-5,
                    rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5})),
    "glm4_moe": dict(
        seed=162, dtype="bfloat16", note="first layer dense, groups, correction bias, scale, shared expert, norms of q and k, half of a head rotated, old-style config, bf16",
        config=dict(model_type="glm4_moe", vocab_size=256, hidden_size=40, intermediate_size=52, moe_intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=16, n_routed_experts=12, n_shared_experts=2, num_experts_per_tok=3, n_group=3, topk_group=2, routed_scaling_factor=1.7,
                    first_k_dense_replace=1, use_qk_norm=True, attention_bias=True, num_nextn_predict_layers=0,
                    rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}),
        edit=[old_style],
        variants={"-ungrouped": [changed(n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0), dict(note="no groups, weights not normalised")]}),
}

if __name__ == "__main__":
    main(__doc__, CHECKPOINTS)
