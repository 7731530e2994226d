//! Families with latent attention: the configs of random tiny models, and what their files call keys and parts.

use serde_json::{Value, json};

use super::writer::Gguf;

/// The config of an architecture's model, beside what all have.
pub fn config(model_type: &str) -> Option<Value> {
    Some(match model_type {
        "glm_moe_dsa" => json!({
            "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
            "v_head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
            "index_n_heads": 3, "index_head_dim": 8, "index_topk": 9, "indexer_types": ["full", "shared", "full"],
        }),
        // Its file's sizes are those of heads, as in files from before latents were cached.
        "deepseek_v3" => json!({
            "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
            "v_head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
            "n_shared_experts": 1, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
            "norm_topk_prob": true, "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        }),
        "deepseek_v32" => json!({
            "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
            "v_head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
            "n_shared_experts": 1, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
            "norm_topk_prob": true, "scoring_func": "sigmoid", "index_n_heads": 16, "index_head_dim": 64, "index_topk": 9,
            "tie_word_embeddings": false, "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        }),
        "mistral4" => json!({
            "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
            "v_head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
            "n_shared_experts": 1, "first_k_dense_replace": 0, "norm_topk_prob": true, "routed_scaling_factor": 1.0,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
            },
        }),
        "kimi_linear" => json!({
            "num_key_value_heads": 4, "q_lora_rank": null, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
            "v_head_dim": 16, "num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 20,
            "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
            "moe_router_activation_func": "sigmoid", "tie_word_embeddings": false, "linear_attn_config": {
                "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [2], "kda_layers": [1, 3],
            },
        }),
        "kimi_k3" => json!({
            "num_hidden_layers": 5, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 4, "v_head_dim": 16, "mla_use_nope": true, "mla_use_output_gate": true, "num_experts": 6,
            "num_experts_per_token": 2, "moe_intermediate_size": 20, "num_shared_experts": 2, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5, "moe_renormalize": true, "moe_router_activation_func": "sigmoid",
            "routed_expert_hidden_size": 16, "latent_moe_use_norm": true, "hidden_act": "situ", "activation_situ_beta": 1.5,
            "activation_situ_linear_beta": 2.5, "attn_res_block_size": 2, "tie_word_embeddings": false,
            "linear_attn_config": {
                "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [3, 5], "kda_layers": [1, 2, 4],
                "use_full_rank_gate": true, "gate_lower_bound": -5.0,
            },
        }),
        _ => return None,
    })
}

/// The keys of such a family; whether it is one.
pub fn keys(config: &Value, file: &mut Gguf, key: &dyn Fn(&str) -> String) -> bool {
    let kind = config["model_type"].as_str().unwrap();
    if !["glm_moe_dsa", "deepseek_v3", "deepseek_v32", "mistral4", "kimi_linear", "kimi_k3"].contains(&kind) {
        return false;
    }
    sizes(config, file, key);
    let rope = config.get("rope_parameters").or(config.get("rope_scaling"));
    if let Some(rope) = rope {
        let number = |name: &str| rope[name].as_f64().unwrap() as f32;
        file.string(&key("rope.scaling.type"), "yarn").f32(&key("rope.scaling.factor"), number("factor"));
        file.u32(&key("rope.scaling.original_context_length"), 16);
        file.f32(&key("rope.scaling.yarn_log_multiplier"), 0.1 * number("mscale_all_dim"));
        if kind == "mistral4" {
            file.f32(&key("attention.temperature_scale"), number("llama_4_scaling_beta"));
        }
    }
    match kind {
        // Files of Mistral's do not say what their router is.
        "mistral4" => {}
        _ => _ = file.u32(&key("expert_gating_func"), 2),
    }
    if kind.starts_with("kimi") {
        delta(config, file, key);
    }
    if kind != "kimi_linear" {
        file.flag(&key("expert_weights_norm"), true);
    }
    if kind == "kimi_k3" {
        // None on layers of Kimi Delta Attention.
        file.i32s(&key("attention.head_count_kv"), &[0, 0, 1, 0, 1]);
        let number = |name: &str| config[name].as_f64().unwrap() as f32;
        file.u32(&key("attn_res.block_size"), number("attn_res_block_size") as u32);
        file.u32(&key("expert_latent_length"), number("routed_expert_hidden_size") as u32);
        for (name, ours) in [("situ_beta", "activation_situ_beta"), ("situ_linear_beta", "activation_situ_linear_beta")]
        {
            file.f32(&key(&format!("activation.{name}")), number(ours));
        }
    }
    true
}

/// Sizes of attention, indexers and mixtures.
pub fn sizes(config: &Value, file: &mut Gguf, key: &dyn Fn(&str) -> String) {
    for (name, ours) in [
        ("rope.dimension_count", "qk_rope_head_dim"),
        ("attention.q_lora_rank", "q_lora_rank"),
        ("attention.kv_lora_rank", "kv_lora_rank"),
        ("attention.indexer.head_count", "index_n_heads"),
        ("attention.indexer.key_length", "index_head_dim"),
        ("attention.indexer.top_k", "index_topk"),
        ("expert_count", "n_routed_experts"),
        ("expert_count", "num_experts"),
        ("expert_used_count", "num_experts_per_tok"),
        ("expert_used_count", "num_experts_per_token"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_count", "n_shared_experts"),
        ("expert_shared_count", "num_shared_experts"),
        ("expert_group_count", "n_group"),
        ("expert_group_used_count", "topk_group"),
        ("leading_dense_block_count", "first_k_dense_replace"),
    ] {
        if let Some(size) = config.get(ours).and_then(Value::as_u64) {
            file.u32(&key(name), size as u32);
        }
    }
    file.f32(&key("expert_weights_scale"), config["routed_scaling_factor"].as_f64().unwrap() as f32);
}

/// Sizes of Kimi Delta Attention.
pub fn delta(config: &Value, file: &mut Gguf, key: &dyn Fn(&str) -> String) {
    let of = &config["linear_attn_config"];
    file.u32(&key("kda.head_dim"), of["head_dim"].as_u64().unwrap() as u32);
    file.u32(&key("ssm.conv_kernel"), of["short_conv_kernel_size"].as_u64().unwrap() as u32);
    if let Some(bound) = of.get("gate_lower_bound") {
        file.f32(&key("kda.gate_lower_bound"), bound.as_f64().unwrap() as f32);
    }
}

/// What GGUF calls a part of a layer that only such families have.
pub fn part(ours: &str, model_type: &str) -> Option<&'static str> {
    Some(match ours {
        "mlp.latent_down_proj" if model_type == "kimi_k3" => "ffn_routed_down",
        "mlp.latent_up_proj" if model_type == "kimi_k3" => "ffn_routed_up",
        "mlp.latent_norm" => "ffn_routed_norm",
        // With the projections of the same names.
        "self_attention_res_norm" | "self_attention_res_proj" => "attn_res_score",
        "mlp_res_norm" | "mlp_res_proj" => "ffn_res_score",
        "output_attn_res_norm" | "output_attn_res_proj" => "output_res_score",
        "self_attn.g_proj" => "attn_gate",
        "self_attn.indexer.wq_b" => "indexer.attn_q_b",
        "self_attn.indexer.wk" => "indexer.attn_k",
        "self_attn.indexer.weights_proj" => "indexer.proj",
        "self_attn.indexer.k_norm" => "indexer.k_norm",
        "self_attn.q_a_proj" => "attn_q_a",
        "self_attn.q_a_layernorm" => "attn_q_a_norm",
        "self_attn.q_b_proj" => "attn_q_b",
        "self_attn.kv_a_proj_with_mqa" => "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm" => "attn_kv_a_norm",
        "self_attn.kv_b_proj" => "attn_kv_b",
        "self_attn.q_conv1d" => "ssm_conv1d_q",
        "self_attn.k_conv1d" => "ssm_conv1d_k",
        "self_attn.v_conv1d" => "ssm_conv1d_v",
        "self_attn.f_a_proj" => "ssm_f_a",
        "self_attn.f_b_proj" => "ssm_f_b",
        "self_attn.g_a_proj" => "ssm_g_a",
        "self_attn.g_b_proj" => "ssm_g_b",
        "self_attn.b_proj" => "ssm_beta",
        "self_attn.A_log" => "ssm_a",
        "self_attn.dt_bias" => "ssm_dt.bias",
        "self_attn.o_norm" => "ssm_norm",
        _ => return None,
    })
}
