//! The configs of random tiny models, and the keys that only some families' files have.

use serde_json::{Value, json};

use super::super::writer::{F32, Gguf};
use super::{latent, streams};

/// Tables of LongRoPE.
const FACTORS: [(&str, [f32; 4]); 2] = [("long_factor", [1.0, 1.5, 2.0, 3.0]), ("short_factor", [1.0, 1.0, 1.25, 1.5])];

/// Which of Gemma 4's layers have a window.
const GEMMA4_LAYERS: [i32; 5] = [1, 0, 1, 1, 0];

/// Layers with Mamba-2.
const HYBRID_LAYERS: [&str; 3] = ["mamba", "attention", "mamba"];
const NEMOTRON_LAYERS: [&str; 5] = ["mamba", "moe", "attention", "mlp", "mamba"];

/// The config of an architecture's model.
pub fn config(model_type: &str) -> Value {
    let mut config = json!({
        "model_type": model_type, "hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": model_type != "qwen3", "rope_theta": 5000.0,
    });
    let known = latent::config(model_type).or_else(|| streams::config(model_type));
    let more = known.unwrap_or_else(|| match model_type {
        "llama" => json!({"attention_bias": true}),
        "gemma3_text" => json!({
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "sliding_window": 7,
            "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0,
        }),
        "gemma2" => json!({
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "sliding_window": 7,
            "attn_logit_softcapping": 20.0, "final_logit_softcapping": 12.0,
        }),
        "gemma4_text" => json!({
            "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 7, "num_hidden_layers": 5, "global_head_dim": 32,
            "num_global_key_value_heads": 1, "attention_k_eq_v": true, "num_kv_shared_layers": 2, "use_double_wide_mlp": true,
            "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 64, "final_logit_softcapping": 15.0,
            "enable_moe_block": true, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20,
            "layer_types": GEMMA4_LAYERS.map(|kind| if kind == 1 { "sliding_attention" } else { "full_attention" }),
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        }),
        "qwen2" | "qwen3" => json!({}),
        "gpt_oss" => json!({
            "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20, "sliding_window": 7,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": false,
            },
        }),
        "mixtral" => json!({"num_local_experts": 6, "num_experts_per_tok": 2}),
        "ministral3" => json!({
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
            },
        }),
        "phi3" => json!({
            "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16,
            "rope_scaling": {
                "rope_type": "longrope", FACTORS[0].0: FACTORS[0].1, FACTORS[1].0: FACTORS[1].1,
                "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
            },
        }),
        "granite" => json!({
            "attention_bias": true, "embedding_multiplier": 3.0, "residual_multiplier": 0.25,
            "attention_multiplier": 0.25, "logits_scaling": 8.0,
        }),
        "granitemoe" => json!({
            "intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.25, "attention_multiplier": 0.25, "logits_scaling": 8.0,
        }),
        "granitemoehybrid" => json!({
            "intermediate_size": 20, "shared_intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2,
            "layer_types": HYBRID_LAYERS, "position_embedding_type": "nope", "mamba_n_heads": 4, "mamba_d_head": 16,
            "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_expand": 2, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.25, "attention_multiplier": 0.25, "logits_scaling": 8.0,
        }),
        "nemotron_h" => json!({
            "num_hidden_layers": 5, "layers_block_type": NEMOTRON_LAYERS, "mamba_num_heads": 6, "mamba_head_dim": 12,
            "n_groups": 3, "ssm_state_size": 10, "n_routed_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24,
            "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 2.5,
            "norm_topk_prob": true, "moe_latent_size": 16,
        }),
        "smollm3" => json!({"num_hidden_layers": 4}),
        "olmo3" => json!({
            "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }),
        "minimax_m2" => json!({
            "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20, "rotary_dim": 8,
        }),
        "glm4" => json!({"attention_bias": true, "partial_rotary_factor": 0.5}),
        "glm4_moe" => json!({
            "attention_bias": true, "partial_rotary_factor": 0.5, "n_routed_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 20, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "use_qk_norm": true,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
        }),
        _ => json!({
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": true,
            "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
            "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
            "full_attention_interval": 2, "partial_rotary_factor": 0.5,
        }),
    });
    let (config_map, Value::Object(more)) = (config.as_object_mut().unwrap(), more) else { unreachable!() };
    config_map.extend(more);
    if model_type == "qwen3_moe" {
        config_map.remove("partial_rotary_factor");
    }
    config
}

/// The sizes of Mamba-2: heads, their elements together, groups, elements of a state, taps.
fn mamba(file: &mut Gguf, key: &dyn Fn(&str) -> String, sizes: [u32; 5]) {
    let names = ["time_step_rank", "inner_size", "group_count", "state_size", "conv_kernel"];
    for (name, size) in names.into_iter().zip(sizes) {
        file.u32(&key(&format!("ssm.{name}")), size);
    }
}

/// Keys that only some families have.
pub fn keys(config: &Value, file: &mut Gguf, key: &dyn Fn(&str) -> String) {
    let size = |ours: &str| config[ours].as_u64().unwrap() as u32;
    let number = |ours: &str| config[ours].as_f64().unwrap() as f32;
    match config["model_type"].as_str().unwrap() {
        "gpt_oss" => {
            for (name, ours) in [
                ("expert_count", "num_local_experts"),
                ("expert_used_count", "num_experts_per_tok"),
                ("expert_feed_forward_length", "intermediate_size"),
                ("attention.sliding_window", "sliding_window"),
            ] {
                file.u32(&key(name), size(ours));
            }
            file.string(&key("rope.scaling.type"), "yarn").f32(&key("rope.scaling.factor"), 4.0);
            file.u32(&key("rope.scaling.original_context_length"), 16);
        }
        "gemma2" => {
            file.u32(&key("attention.sliding_window"), size("sliding_window"));
            file.f32(&key("attn_logit_softcapping"), number("attn_logit_softcapping"));
            file.f32(&key("final_logit_softcapping"), number("final_logit_softcapping"));
        }
        "gemma4_text" => {
            let (width, shared) = (size("intermediate_size") as i32, size("num_kv_shared_layers") as usize);
            let widths = [0, 1, 2, 3, 4].map(|layer| if layer < 5 - shared { width } else { 2 * width });
            file.i32s(&key("feed_forward_length"), &widths);
            file.i32s(&key("attention.head_count_kv"), &GEMMA4_LAYERS.map(|kind| 1 + kind));
            file.i32s(&key("attention.sliding_window_pattern"), &GEMMA4_LAYERS);
            for (name, ours) in [
                ("attention.key_length_swa", "head_dim"),
                ("attention.value_length_swa", "head_dim"),
                ("attention.shared_kv_layers", "num_kv_shared_layers"),
                ("attention.sliding_window", "sliding_window"),
                ("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
                ("expert_count", "num_experts"),
                ("expert_used_count", "top_k_experts"),
                ("expert_feed_forward_length", "moe_intermediate_size"),
                ("rope.dimension_count", "global_head_dim"),
            ] {
                file.u32(&key(name), size(ours));
            }
            file.f32(&key("rope.freq_base_swa"), 1000.0);
            file.f32(&key("final_logit_softcapping"), number("final_logit_softcapping"));
            let factors: Vec<f32> = (0..16).map(|pair| if pair < 4 { 1.0 } else { 1e30 }).collect();
            file.floats("rope_freqs.weight", &[16], F32, &factors);
        }
        "mixtral" => {
            file.u32(&key("expert_count"), size("num_local_experts"));
            file.u32(&key("expert_used_count"), size("num_experts_per_tok"));
        }
        "ministral3" => {
            file.string(&key("rope.scaling.type"), "yarn").f32(&key("rope.scaling.factor"), 4.0);
            file.u32(&key("rope.scaling.original_context_length"), 16);
            file.f32(&key("rope.scaling.yarn_log_multiplier"), 1.0);
            file.f32(&key("attention.temperature_scale"), 0.5);
        }
        "phi3" => {
            file.u32(&key("rope.dimension_count"), size("head_dim") / 2);
            file.u32(&key("rope.scaling.original_context_length"), 16).u32(&key("attention.sliding_window"), 0);
            let attention = (1.0 + 4f64.ln() / 16f64.ln()).sqrt();
            file.f32(&key("rope.scaling.attn_factor"), attention as f32);
            for (name, factors) in FACTORS {
                let name = format!("rope_factors_{}.weight", name.strip_suffix("_factor").unwrap());
                file.floats(&name, &[4], F32, &factors);
            }
        }
        kind @ ("granite" | "granitemoe" | "granitemoehybrid") => {
            if kind == "granitemoehybrid" {
                file.i32s(
                    &key("attention.head_count_kv"),
                    &HYBRID_LAYERS.map(|kind| if kind == "mamba" { 0 } else { 2 }),
                );
                mamba(file, key, [4, 64, 2, 12, 4]);
                file.flag(&key("rope.scaling.finetuned"), false);
                file.u32(&key("expert_shared_feed_forward_length"), size("shared_intermediate_size"));
            }
            if kind != "granite" {
                file.u32(&key("expert_count"), size("num_local_experts"));
                file.u32(&key("expert_used_count"), size("num_experts_per_tok"));
            }
            file.f32(&key("embedding_scale"), number("embedding_multiplier"));
            file.f32(&key("residual_scale"), number("residual_multiplier"));
            file.f32(&key("attention.scale"), number("attention_multiplier"));
            file.f32(&key("logit_scale"), number("logits_scaling"));
        }
        "nemotron_h" => {
            let of = |kind: &str, n: i32| NEMOTRON_LAYERS.map(|own| if own == kind { n } else { 0 });
            file.i32s(&key("attention.head_count_kv"), &of("attention", 2));
            file.i32s(&key("feed_forward_length"), &of("moe", 20));
            mamba(file, key, [6, 72, 3, 10, 4]);
            // That of a width divided by heads.
            file.u32(&key("rope.dimension_count"), 8).u32(&key("expert_shared_count"), 1);
            for (name, ours) in [
                ("expert_count", "n_routed_experts"),
                ("expert_used_count", "num_experts_per_tok"),
                ("expert_feed_forward_length", "moe_intermediate_size"),
                ("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"),
                ("moe_latent_size", "moe_latent_size"),
            ] {
                file.u32(&key(name), size(ours));
            }
            file.f32(&key("expert_weights_scale"), number("routed_scaling_factor"));
            file.flag(&key("expert_weights_norm"), true);
        }
        "olmo3" => {
            file.u32(&key("attention.sliding_window"), size("sliding_window"));
            file.i32s(&key("attention.sliding_window_pattern"), &[1, 0, 1]);
        }
        "minimax_m2" => {
            file.u32(&key("rope.dimension_count"), size("rotary_dim"));
            file.u32(&key("expert_count"), size("num_local_experts"));
            file.u32(&key("expert_used_count"), size("num_experts_per_tok"));
            file.u32(&key("expert_feed_forward_length"), size("intermediate_size"));
            file.u32(&key("expert_gating_func"), 2);
        }
        "glm4" => {
            file.u32(&key("rope.dimension_count"), size("head_dim") / 2);
        }
        "glm4_moe" => {
            file.u32(&key("rope.dimension_count"), size("head_dim") / 2);
            file.u32(&key("expert_count"), size("n_routed_experts"));
            file.u32(&key("expert_used_count"), size("num_experts_per_tok"));
            file.u32(&key("expert_feed_forward_length"), size("moe_intermediate_size"));
            file.u32(&key("expert_shared_count"), size("n_shared_experts"));
            file.u32(&key("leading_dense_block_count"), size("first_k_dense_replace"));
            file.u32(&key("expert_gating_func"), 2);
            file.f32(&key("expert_weights_scale"), number("routed_scaling_factor"));
            file.flag(&key("expert_weights_norm"), true);
        }
        _ => {}
    }
}

/// What GGUF calls a part of a layer, or what is outside of them.
pub fn part(ours: &str, model_type: &str) -> &'static str {
    if let Some(part) = streams::part(ours, model_type).or_else(|| latent::part(ours, model_type)) {
        return part;
    }
    match ours {
        "self_attn.sinks" => "attn_sinks.weight",
        "layer_scalar" => "layer_output_scale.weight",
        "mlp.router_scale" => "ffn_gate_inp.scale",
        "mlp.expert_scales" => "ffn_down_exps.scale",
        "post_feedforward_layernorm_1" => "post_ffw_norm_1",
        "pre_feedforward_layernorm_2" => "pre_ffw_norm_2",
        "post_feedforward_layernorm_2" => "post_ffw_norm_2",
        "per_layer_input_gate" => "inp_gate",
        "per_layer_projection" => "proj",
        "post_per_layer_input_norm" => "post_norm",
        "embed_tokens_per_layer" => "per_layer_token_embd",
        "per_layer_model_projection" => "per_layer_model_proj",
        "per_layer_projection_norm" => "per_layer_proj_norm",
        "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "input_layernorm" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.qkv_proj" => "attn_qkv",
        "mlp.gate_up_proj" => "ffn_up",
        "mlp.gate.e_score_correction_bias" => "exp_probs_b.bias",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "mlp.gate" => "ffn_gate_inp",
        "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
        "mlp.shared_expert.gate_proj" => "ffn_gate_shexp",
        "mlp.shared_expert.up_proj" => "ffn_up_shexp",
        "mlp.shared_expert.down_proj" => "ffn_down_shexp",
        "mlp.latent_down_proj" => "ffn_latent_down",
        "mlp.latent_up_proj" => "ffn_latent_up",
        "mlp.experts.gate_proj" => "ffn_gate_exps",
        "mlp.experts.up_proj" => "ffn_up_exps",
        "mlp.experts.down_proj" => "ffn_down_exps",
        "linear_attn.in_proj_qkv" | "linear_attn.in_proj_qkvz" => "attn_qkv",
        "linear_attn.in_proj_z" => "attn_gate",
        "linear_attn.in_proj_b" => "ssm_beta",
        "linear_attn.in_proj_a" => "ssm_alpha",
        "linear_attn.in_proj_ba" => "ssm_ba",
        "linear_attn.conv1d" => "ssm_conv1d",
        "linear_attn.A_log" => "ssm_a",
        "linear_attn.dt_bias" => "ssm_dt.bias",
        "linear_attn.norm" => "ssm_norm",
        "linear_attn.out_proj" => "ssm_out",
        "mlp.shared_expert.gate_up_proj" => "ffn_up_shexp",
        "mamba.in_proj" => "ssm_in",
        "mamba.conv1d" => "ssm_conv1d",
        "mamba.A_log" => "ssm_a",
        "mamba.D" => "ssm_d",
        "mamba.dt_bias" => "ssm_dt.bias",
        "mamba.norm" => "ssm_norm",
        "mamba.out_proj" => "ssm_out",
        "embed_tokens" => "token_embd",
        "norm" => "output_norm",
        "lm_head" => "output",
        other => panic!("{other}"),
    }
}
