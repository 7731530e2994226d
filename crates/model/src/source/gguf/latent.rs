//! What the metadata of families with latent attention says, in the config keys of each.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use serde_json::{Map, Value as Json, json};

use super::family::{SIGMOID, SOFTMAX, ensure_gating, mixture_with_shared};
use super::keys::Keys;

/// By how much queries grow with the position.
const GROWTH: &str = "attention.temperature_scale";

type Config = Map<String, Json>;

/// Sizes of latent attention with `heads` heads, of which `rotated` elements are rotated.
pub fn sizes(keys: &Keys, (heads, rotated): (u64, u64), config: &mut Config) -> Result<()> {
    // Newer files give those of what is cached, and the heads' under names of their own.
    let is_newer = keys.has("blk.0.attn_k_b.weight") || keys.size_if("attention.key_length_mla")?.is_some();
    let [key, value] = match is_newer {
        true => ["attention.key_length_mla", "attention.value_length_mla"],
        false => ["attention.key_length", "attention.value_length"],
    };
    let head = keys.size(key)?;
    let plain = head.checked_sub(rotated).filter(|&plain| plain > 0);
    let plain = plain.ok_or_else(|| keys.wrong(key, &format!("is {head}, of which {rotated} are rotated")))?;
    config.insert("num_key_value_heads".into(), json!(heads));
    config.insert("qk_nope_head_dim".into(), json!(plain));
    config.insert("qk_rope_head_dim".into(), json!(rotated));
    config.insert("v_head_dim".into(), json!(keys.size(value)?));
    config.insert("kv_lora_rank".into(), json!(keys.size("attention.kv_lora_rank")?));
    let q_rank = keys.size_if("attention.q_lora_rank")?.filter(|&rank| rank > 0);
    config.insert("q_lora_rank".into(), json!(q_rank));
    Ok(())
}

/// A mixture with a sigmoid, and defaults of what DeepSeek's kin may leave out.
pub fn mixture(keys: &Keys, kinds: &[u64], config: &mut Config) -> Result<()> {
    mixture_with_shared(keys, config)?;
    ensure_gating(keys, kinds)?;
    for (key, count) in [("n_group", 1), ("topk_group", 1)] {
        config.entry(key).or_insert(json!(count));
    }
    config.entry("routed_scaling_factor").or_insert(json!(1.0));
    Ok(())
}

/// DeepSeek-V2 and V3 and their kin, with `heads` heads of which `rotated` elements are rotated. `rope`: the scaling of positions.
pub fn deepseek(keys: &Keys, (heads, rotated): (u64, u64), rope: Option<&mut Json>, config: &mut Config) -> Result<()> {
    sizes(keys, (heads, rotated), config)?;
    config.insert("attention_bias".into(), json!(keys.has("blk.0.attn_kv_a_mqa.bias")));
    // 1. the factor of scores: a tenth of it is stored
    let mut rope = rope.and_then(Json::as_object_mut);
    if let (Some(rope), Some(tenth)) = (&mut rope, keys.float_if("rope.scaling.yarn_log_multiplier")?) {
        rope.insert("mscale".into(), json!(10.0 * tenth));
        rope.insert("mscale_all_dim".into(), json!(10.0 * tenth));
    }
    // 2. the mixture: without a kind it is V2's
    mixture(keys, &[0, SOFTMAX, SIGMOID], config)?;
    let is_softmax = keys.size_if("expert_gating_func")?.is_none_or(|kind| kind != SIGMOID);
    let growth = keys.float_if(GROWTH)?.filter(|&beta| beta != 0.0);
    if !is_softmax {
        ensure!(growth.is_none(), keys.wrong(GROWTH, "is there: queries that grow, with a router of sigmoids"));
    } else if growth.is_some() || config["norm_topk_prob"] == true {
        // Weights of V2's experts are as the softmax has them; Mistral's add up to 1.
        mistral(keys, rope, growth, config)?;
    } else {
        let method = if config["n_group"] == 1 { "greedy" } else { "group_limited_greedy" };
        config.insert("model_type".into(), json!("deepseek_v2"));
        config.insert("topk_method".into(), json!(method));
    }
    Ok(())
}

/// Mistral 4, whose queries grow with the position by `growth`.
fn mistral(keys: &Keys, rope: Option<&mut Config>, growth: Option<f64>, config: &mut Config) -> Result<()> {
    let original = keys.size_if("rope.scaling.original_context_length")?;
    let original = original.map_or_else(|| keys.size("context_length"), Ok)?;
    let theta = keys.float_if("rope.freq_base")?.unwrap_or(10_000.0);
    let plain = Config::from_iter([("rope_type".into(), json!("default")), ("rope_theta".into(), json!(theta))]);
    let mut all = rope.map(std::mem::take).unwrap_or(plain);
    all.insert("llama_4_scaling_beta".into(), json!(growth.unwrap_or(0.0)));
    all.insert("original_max_position_embeddings".into(), json!(original));
    config.insert("model_type".into(), json!("mistral4"));
    config.insert("rope_parameters".into(), Json::Object(all));
    Ok(())
}

/// The indexers of DeepSeek-V3.2 and of GLM-5 and its kin, by their tensors: layers without one see what the one before them has selected.
pub fn indexer(keys: &Keys, layers: u64, config: &mut Config) -> Result<()> {
    for (ours, theirs) in [("index_n_heads", "head_count"), ("index_head_dim", "key_length"), ("index_topk", "top_k")] {
        config.insert(ours.into(), json!(keys.size(&format!("attention.indexer.{theirs}"))?));
    }
    // Layers of Kimi Delta Attention have none, and nobody asks.
    let parts = ["indexer.attn_k.weight", "ssm_a"];
    let is_full = |layer| parts.iter().any(|part| keys.has(&format!("blk.{layer}.{part}")));
    let kind = |layer| if is_full(layer) { "full" } else { "shared" };
    config.insert("indexer_types".into(), (0..layers).map(kind).collect());
    Ok(())
}

/// The sizes of Kimi Delta Attention, and which layers have it: the tensors say.
pub fn channel_delta(keys: &Keys, layers: u64, attention: &str, config: &mut Config) -> Result<()> {
    let is_delta = |layer: &u64| keys.has(&format!("blk.{layer}.ssm_a"));
    let kind = |layer| if is_delta(&layer) { "linear_attention" } else { attention };
    config.insert("layer_types".into(), (0..layers).map(kind).collect());
    let Some(first) = (0..layers).find(is_delta) else { return Ok(()) };
    // No key has their number: it is that of the decays.
    let heads: usize = keys.tensor(&format!("blk.{first}.ssm_a"))?.shape.iter().product();
    let bound = keys.float_if("kda.gate_lower_bound")?;
    config.insert(
        "linear_attn_config".into(),
        json!({
            "num_heads": heads, "head_dim": keys.size("kda.head_dim")?,
            "short_conv_kernel_size": keys.size("ssm.conv_kernel")?,
            "safe_gate": bound.is_some(), "gate_lower_bound": bound,
            "use_full_rank_gate": keys.has(&format!("blk.{first}.ssm_g.weight")),
        }),
    );
    Ok(())
}

/// Kimi-Linear.
pub fn kimi(keys: &Keys, layers: u64, (heads, rotated): (u64, u64), config: &mut Config) -> Result<()> {
    sizes(keys, (heads, rotated), config)?;
    channel_delta(keys, layers, "full_attention", config)?;
    // Its weights of experts always add up to 1, and no key says so.
    mixture(keys, &[0, SIGMOID], config)?;
    config.insert("norm_topk_prob".into(), json!(true));
    let count = config["n_routed_experts"].clone();
    config.insert("num_local_experts".into(), count);
    Ok(())
}

/// Kimi-K3.
pub fn kimi_k3(keys: &Keys, layers: u64, (heads, rotated): (u64, u64), config: &mut Config) -> Result<()> {
    let is_there = |part: &str| (0..layers).any(|layer| keys.has(&format!("blk.{layer}.{part}")));
    sizes(keys, (heads, rotated), config)?;
    channel_delta(keys, layers, "full_attention", config)?;
    config.insert("mla_use_output_gate".into(), json!(is_there("attn_gate.weight")));
    mixture(keys, &[SIGMOID], config)?;
    let count = config["n_routed_experts"].clone();
    config.insert("num_local_experts".into(), count);
    if let Some(size) = keys.size_if("expert_latent_length")?.filter(|&size| size > 0) {
        config.insert("routed_expert_hidden_size".into(), json!(size));
        config.insert("latent_moe_use_norm".into(), json!(is_there("ffn_routed_norm.weight")));
    }
    config.insert("hidden_act".into(), json!("situ"));
    for (ours, theirs) in [
        ("activation_situ_beta", "activation.situ_beta"),
        ("activation_situ_linear_beta", "activation.situ_linear_beta"),
    ] {
        let bound = keys.float_if(theirs)?.ok_or_else(|| keys.wrong(theirs, "is missing"))?;
        ensure!(bound > 0.0, keys.wrong(theirs, &format!("is {bound}, which is not supported (numbers above 0 are)")));
        config.insert(ours.into(), json!(bound));
    }
    if let Some(every) = Some(keys.size("attn_res.block_size")?).filter(|&every| every > 0) {
        config.insert("attn_res_block_size".into(), json!(every));
    }
    Ok(())
}

/// The layers with latent attention.
pub fn layers(keys: &Keys) -> BTreeSet<u64> {
    let layer_of = |name: &&str| {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        layer.parse().ok().filter(|_| rest == "attn_kv_a_mqa.weight")
    };
    keys.tensors.keys().filter_map(layer_of).collect()
}
