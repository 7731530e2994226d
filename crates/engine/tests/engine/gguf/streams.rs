//! Families with several residual streams: the configs of random tiny models, and what their files call keys and parts.

use serde_json::{Value, json};
use sluice_model::Description;

use super::latent;
use super::writer::Gguf;

/// Positions of an entry in DeepSeek-V4's layers, 0 where there are none.
const RATIOS: [i32; 4] = [0, 4, 8, 4];

/// Rows of Qwen4-Exp's table: the four primes from 90 on together.
pub const NGRAM_ROWS: usize = 97 + 101 + 103 + 107;

/// The config of an architecture's model, beside what all have.
pub fn config(model_type: &str) -> Option<Value> {
    Some(match model_type {
        "glm5_next" => json!({
            "num_hidden_layers": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 0, "mla_use_nope": true, "v_head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 20, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
            "norm_topk_prob": true, "scoring_func": "sigmoid", "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8,
            "index_kpool": 4, "indexer_types": ["full", "full", "shared", "full"], "hc_mult": 4, "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6, "swiglu_limit": 1.5, "tie_word_embeddings": false,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
            "linear_attn_config": {
                "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "gate_lower_bound": -4.0,
            },
        }),
        "deepseek_v4" => json!({
            "num_hidden_layers": 4, "num_key_value_heads": 1, "q_lora_rank": 24, "qk_rope_head_dim": 8, "sliding_window": 7,
            "o_groups": 2, "o_lora_rank": 12, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 3,
            "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 1,
            "routed_scaling_factor": 2.5, "norm_topk_prob": true, "scoring_func": "sqrtsoftplus", "swiglu_limit": 1.5,
            "num_hash_layers": 1, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "compress_rope_theta": 3000.0,
            "layer_types": RATIOS.map(|ratio| match ratio {
                0 => "sliding_attention",
                4 => "compressed_sparse_attention",
                _ => "heavily_compressed_attention",
            }),
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "tie_word_embeddings": false,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        }),
        "qwen4_exp_text" => json!({
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": true,
            "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
            "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
            "full_attention_interval": 2, "partial_rotary_factor": 0.5, "output_gate_type": "sigmoid", "hc_count": 4,
            "hc_lowrank": 12, "indexer_n_heads": 4, "indexer_head_dim": 16, "indexer_kv_heads": 1, "indexer_budget": 8,
            "indexer_compress_ratio": 4, "ple_layer_ids": [3], "ngram_size": 3, "heads_per_ngram": 2, "ple_embed_dim": 128,
            "ple_conv_kernel_size": 4, "ngram_vocab_size_base": 90, "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 1, "eos_token_id": 21, "tie_word_embeddings": false,
        }),
        _ => return None,
    })
}

/// The keys of such a family; whether it is one.
pub fn keys(config: &Value, description: &Description, file: &mut Gguf, key: &dyn Fn(&str) -> String) -> bool {
    let size = |ours: &str| config[ours].as_u64().unwrap() as u32;
    let layers = size("num_hidden_layers") as usize;
    let clamps = |file: &mut Gguf| {
        let limits = vec![config["swiglu_limit"].as_f64().unwrap() as f32; layers];
        file.f32s(&key("swiglu_clamp_exp"), &limits).f32s(&key("swiglu_clamp_shexp"), &limits);
        file.u32(&key("hyper_connection.count"), size("hc_mult"));
        file.u32(&key("hyper_connection.sinkhorn_iterations"), size("hc_sinkhorn_iters"));
        file.f32(&key("hyper_connection.epsilon"), config["hc_eps"].as_f64().unwrap() as f32);
        file.flag(&key("expert_weights_norm"), true);
    };
    match config["model_type"].as_str().unwrap() {
        "glm5_next" => {
            latent::sizes(config, file, key);
            latent::delta(config, file, key);
            clamps(file);
            file.u32(&key("expert_gating_func"), 2).u32(&key("attention.indexer.kpool"), size("index_kpool"));
            file.flag(&key("attention.indexer.kpool_select_tail"), true);
        }
        "deepseek_v4" => {
            latent::sizes(config, file, key);
            clamps(file);
            file.u32(&key("expert_gating_func"), 4).u32(&key("hash_layer_count"), size("num_hash_layers"));
            file.u32(&key("attention.sliding_window"), size("sliding_window"));
            file.u32(&key("attention.output_group_count"), size("o_groups"));
            file.u32(&key("attention.output_lora_rank"), size("o_lora_rank"));
            file.i32s(&key("attention.compress_ratios"), &RATIOS);
            file.f32(&key("attention.compress_rope_freq_base"), 3000.0);
            file.string(&key("rope.scaling.type"), "yarn").f32(&key("rope.scaling.factor"), 4.0);
            file.u32(&key("rope.scaling.original_context_length"), 16);
        }
        "qwen4_exp_text" => {
            for (name, ours) in [
                ("hyper_connection.count", "hc_count"),
                ("hyper_connection.low_rank", "hc_lowrank"),
                ("attention.indexer.head_count", "indexer_n_heads"),
                ("attention.indexer.key_length", "indexer_head_dim"),
                ("attention.indexer.top_k", "indexer_budget"),
                ("ple.ngram_size", "ngram_size"),
                ("ple.heads_per_ngram", "heads_per_ngram"),
                ("ple.conv_kernel", "ple_conv_kernel_size"),
                ("ple.eos_token_id", "eos_token_id"),
            ] {
                file.u32(&key(name), size(ours));
            }
            let ratio = |layer: usize| if layer % 2 == 1 { size("indexer_compress_ratio") as i32 } else { 0 };
            file.i32s(&key("attention.compress_ratios"), &(0..layers).map(ratio).collect::<Vec<_>>());
            let (layer, hash) = &description.ngrams.as_ref().unwrap().layers[0];
            file.i32s(&key("ple.layers"), &[*layer as i32]);
            let (multipliers, sizes) = hash.numbers();
            let before: Vec<u64> = (0..sizes.len()).map(|head| sizes[..head].iter().sum()).collect();
            for (name, numbers) in
                [("ple.layer_multipliers", multipliers), ("ple.head_vocab_sizes", sizes), ("ple.head_offsets", &before)]
            {
                let bytes: Vec<Vec<u8>> = numbers.iter().map(|x| x.to_le_bytes().to_vec()).collect();
                file.array(&key(name), 10, &bytes);
            }
            file.u32(&key("embedding_length_per_layer_input"), size("ple_embed_dim") / sizes.len() as u32);
        }
        _ => return false,
    }
    true
}

/// What GGUF calls a part that only such families have; of DeepSeek-V4 also what it has in place of others.
pub fn part(ours: &str, model_type: &str) -> Option<&'static str> {
    if model_type == "deepseek_v4" {
        match ours {
            "self_attn.q_norm" => return Some("attn_q_a_norm"),
            "self_attn.indexer.wq_b" => return Some("indexer.attn_q_b"),
            _ => {}
        }
    }
    Some(match ours {
        "hc_attn_fn" => "hc_attn_fn.weight",
        "hc_attn_base" => "hc_attn_base.weight",
        "hc_attn_scale" => "hc_attn_scale.weight",
        "hc_ffn_fn" => "hc_ffn_fn.weight",
        "hc_ffn_base" => "hc_ffn_base.weight",
        "hc_ffn_scale" => "hc_ffn_scale.weight",
        "hc_head_fn" => "output_hc_fn.weight",
        "hc_head_base" => "output_hc_base.weight",
        "hc_head_scale" => "output_hc_scale.weight",
        "self_attn.indexer.index_kpool_compress_ape" => "indexer_compressor_ape.weight",
        "self_attn.indexer.index_kpool_compress_gate" => "indexer_compressor_gate.weight",
        "self_attn.wq_a" => "attn_q_a",
        "self_attn.wq_b" => "attn_q_b",
        "self_attn.wkv" => "attn_kv",
        "self_attn.norm" => "attn_kv_a_norm",
        "self_attn.wo_a" => "attn_output_a",
        "self_attn.wo_b" => "attn_output_b",
        "self_attn.attn_sink" => "attn_sinks.weight",
        "self_attn.compressor.wkv" => "attn_compressor_kv",
        "self_attn.compressor.wgate" => "attn_compressor_gate",
        "self_attn.compressor.ape" => "attn_compressor_ape.weight",
        "self_attn.compressor.norm" => "attn_compressor_norm",
        "self_attn.indexer.compressor.wkv" => "indexer_compressor_kv",
        "self_attn.indexer.compressor.wgate" => "indexer_compressor_gate",
        "self_attn.indexer.compressor.ape" => "indexer_compressor_ape.weight",
        "self_attn.indexer.compressor.norm" => "indexer_compressor_norm",
        "mlp.gate.tid2eid" => "ffn_gate_tid2eid.weight",
        "attn_hyper_connection.hc_norm" => "hc_attn_norm",
        "attn_hyper_connection.input_mix_weight_down" => "hc_attn_down",
        "attn_hyper_connection.input_mix_weight_up" => "hc_attn_up",
        "attn_hyper_connection.block_inject_weight" => "hc_attn_inject",
        "mlp_hyper_connection.hc_norm" => "hc_ffn_norm",
        "mlp_hyper_connection.input_mix_weight_down" => "hc_ffn_down",
        "mlp_hyper_connection.input_mix_weight_up" => "hc_ffn_up",
        "mlp_hyper_connection.block_inject_weight" => "hc_ffn_inject",
        "hyper_connection_mixer.hc_norm" => "output_hc_norm",
        "hyper_connection_mixer.input_mix_weight_down" => "output_hc_down",
        "hyper_connection_mixer.input_mix_weight_up" => "output_hc_up",
        "self_attn.indexer.index_qk_proj" => "indexer.q_proj",
        "self_attn.indexer.q_layernorm" => "indexer.q_norm",
        "self_attn.indexer.k_layernorm" => "indexer.k_norm",
        "ple.ple_embedding.ngram_embedding" => "per_layer_token_embd",
        "ple.key_proj" => "ple_key",
        "ple.value_proj" => "ple_value",
        "ple.norm_key" => "ple_norm_key",
        "ple.norm_query" => "ple_norm_query",
        "ple.norm_conv" => "ple_norm_conv",
        "ple.conv1d" => "ple_conv1d",
        _ => return None,
    })
}
