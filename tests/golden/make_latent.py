#!/usr/bin/env python3
"""Tiny random checkpoints of families with latent attention, as make.py's: see there.

    env/bin/python tests/golden/make_latent.py [CASE...]
"""
from make import changed, main, old_style, rope

CHECKPOINTS = {
    # ---- latent attention
    "deepseek_v3": dict(
        seed=171, dtype="bfloat16", note="latent attention under YaRN with mscale, pairs beside each other; first layer dense, groups, correction bias, scale, shared expert; old-style config, bf16",
        config=dict(model_type="deepseek_v3", vocab_size=256, hidden_size=48, intermediate_size=60, moe_intermediate_size=20, num_hidden_layers=3, num_attention_heads=6,
                    num_key_value_heads=6, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=12, n_shared_experts=1,
                    num_experts_per_tok=3, n_group=3, topk_group=2, routed_scaling_factor=1.7, first_k_dense_replace=1, num_nextn_predict_layers=0, max_position_embeddings=128,
                    rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7}),
        edit=[old_style, changed(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)],
        variants={"-plain": [rope(rope_type="default"), dict(note="no scaling of positions, nor of scores")],
                  "-halves": [changed(rope_interleave=False), dict(note="pairs half of the rotated part apart")]}),
    "deepseek_v2": dict(
        seed=172, dtype="float16", note="queries straight from the input, softmax router whose weights keep their sum, two shared experts, mscale that cancels in the angles; old-style config, f16",
        config=dict(model_type="deepseek_v2", vocab_size=256, hidden_size=40, intermediate_size=52, moe_intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=9, n_shared_experts=2,
                    num_experts_per_tok=3, topk_method="greedy", norm_topk_prob=False, first_k_dense_replace=1, max_position_embeddings=128,
                    rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707}),
        edit=[old_style, changed(scoring_func="softmax", moe_layer_freq=1, n_group=1, topk_group=1)]),
    "glm4_moe_lite": dict(
        seed=173, dtype="bfloat16", note="a latent of 40, biases, norms with two epsilons, no groups, bf16",
        config=dict(model_type="glm4_moe_lite", vocab_size=256, hidden_size=40, intermediate_size=52, moe_intermediate_size=20, num_hidden_layers=3, num_attention_heads=5,
                    num_key_value_heads=5, q_lora_rank=24, kv_lora_rank=40, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20, n_routed_experts=8, n_shared_experts=1,
                    num_experts_per_tok=2, attention_bias=True, rms_norm_eps=1e-3, routed_scaling_factor=1.8,
                    rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0})),
    "mistral4": dict(
        seed=174, dtype="bfloat16", architectures="Mistral3ForConditionalGeneration",
        note="latent attention under YaRN, queries that grow every 32 positions, softmax router, every layer a mixture; in the wrapper with a part for images, bf16",
        config=dict(model_type="mistral3", tie_word_embeddings=False, image_token_index=250,
                    vision_config=dict(model_type="pixtral", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=8, patch_size=4, image_size=16),
                    text_config=dict(
                        model_type="mistral4", vocab_size=256, hidden_size=40, intermediate_size=52, moe_intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8, n_shared_experts=1,
                        num_experts_per_tok=3, pad_token_id=0, max_position_embeddings=128,
                        rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
                                         "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}))),
}

if __name__ == "__main__":
    main(__doc__, CHECKPOINTS)
