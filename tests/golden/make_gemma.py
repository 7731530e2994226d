#!/usr/bin/env python3
"""Tiny random checkpoints of the Gemma families, as make.py's: see there.

    env/bin/python tests/golden/make_gemma.py [CASE...]
"""
from make import changed, main, old_style, without

GEMMA4_VISION = {"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
                 "patch_size": 4, "position_embedding_size": 16}
GEMMA4_AUDIO = {"model_type": "gemma4_audio", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 2], "output_proj_dims": 16}
GEMMA4_PATCHES = {"model_type": "gemma4_unified_vision", "patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16}
# The reference puts another token in the place of these, even where there is no image.
GEMMA4_IDS = dict(image_token_id=1000, video_token_id=1001, audio_token_id=1002, boi_token_id=1003, eoi_token_id=1004, boa_token_id=1005, eoa_token_index=1006)


def as_published(config):
    """Gemma 4's config as it stands on the hub: what full layers have of their own is said once, not for each. Layers without a window are those by default."""
    text = {k: v for k, v in config["text_config"].items() if k not in ("per_layer_config", "layer_types")}
    own = next(iter(config["text_config"]["per_layer_config"].values()))
    return config | {"text_config": text | {"global_head_dim": own["head_dim"], "num_global_key_value_heads": own["num_key_value_heads"]}}


CHECKPOINTS = {
    # ---- Gemma 3
    "gemma3": dict(
        seed=91, dtype="float32", note="two windows of 24 with positions of their own, query_pre_attn_scalar, positions divided by 8 in the full layer, f32",
        config=dict(model_type="gemma3_text", vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
                    head_dim=24, query_pre_attn_scalar=20, sliding_window=24, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                    rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                                     "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}),
        variants={"-old": [without("layer_types", "rope_parameters"),
                           changed(sliding_window_pattern=2, rope_theta=1000000.0, rope_local_base_freq=10000.0, rope_scaling={"rope_type": "linear", "factor": 8.0}),
                           dict(note="the same with older keys")]}),
    # ---- Gemma 2
    "gemma2": dict(
        seed=215, dtype="float32", note="a window of 24 in every other layer, capped scores and logits, query_pre_attn_scalar, f32",
        config=dict(model_type="gemma2", vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
                    query_pre_attn_scalar=20, sliding_window=24, attn_logit_softcapping=2.0, final_logit_softcapping=4.0,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        edit=[old_style, without("layer_types")],
        variants={"-uncapped": [changed(attn_logit_softcapping=None, final_logit_softcapping=None), dict(note="neither scores nor logits are capped")]}),
    # ---- Gemma 4
    "gemma4": dict(
        seed=211, dtype="float32", note="windows of 24, full layers with wider heads, fewer of them and K = V, a quarter of them rotated, capped logits, f32",
        config=dict(model_type="gemma4_text", vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                    global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=24, final_logit_softcapping=4.0, hidden_size_per_layer_input=0,
                    layer_types=["sliding_attention", "full_attention"] * 2),
        variants={"-uncapped": [changed(final_logit_softcapping=None), dict(note="logits without a cap")]}),
    "gemma4_moe": dict(
        seed=212, dtype="float32", architectures="Gemma4ForConditionalGeneration", note="a dense part and a mixture side by side, K = V; in the wrapper with a part for images, f32",
        config=dict(model_type="gemma4", vision_config=GEMMA4_VISION, **GEMMA4_IDS, text_config=dict(
            model_type="gemma4_text", vocab_size=256, hidden_size=40, intermediate_size=52, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=24, final_logit_softcapping=20.0, hidden_size_per_layer_input=0,
            enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=20, layer_types=["sliding_attention", "sliding_attention", "full_attention"]))),
    "gemma4_per_layer": dict(
        seed=213, dtype="float32", architectures="Gemma4ForConditionalGeneration",
        note="embeddings for each layer, two layers that share keys and values and are twice as wide; in the wrapper with parts for images and sound, f32",
        config=dict(model_type="gemma4", vision_config=GEMMA4_VISION, audio_config=GEMMA4_AUDIO, **GEMMA4_IDS, text_config=dict(
            model_type="gemma4_text", vocab_size=256, vocab_size_per_layer_input=256, hidden_size=40, intermediate_size=52, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=1, head_dim=16, global_head_dim=32, sliding_window=24, final_logit_softcapping=20.0, hidden_size_per_layer_input=12, num_kv_shared_layers=3,
            use_double_wide_mlp=True, layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]))),
    "gemma4_unified": dict(
        seed=215, dtype="float32", architectures="Gemma4UnifiedForConditionalGeneration", note="windows and heads by default, K = V; in the wrapper without towers, f32",
        config=dict(model_type="gemma4_unified", vision_config=GEMMA4_PATCHES, audio_config={"audio_embed_dim": 16}, **GEMMA4_IDS, text_config=dict(
            model_type="gemma4_unified_text", vocab_size=256, hidden_size=40, intermediate_size=52, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=24, final_logit_softcapping=20.0)),
        edit=[as_published]),
}

if __name__ == "__main__":
    main(__doc__, CHECKPOINTS)
