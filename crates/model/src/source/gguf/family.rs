//! What only some families' metadata says, in the config keys of each.

use anyhow::{Result, bail};
use serde_json::{Map, Value as Json, json};

use super::keys::Keys;
use super::metadata::Value;

type Config = Map<String, Json>;

/// llama.cpp's numbers for a softmax and for a sigmoid of each logit.
pub const SOFTMAX: u64 = 1;
pub const SIGMOID: u64 = 2;

/// Refuses a router of another kind than these.
pub fn ensure_gating(keys: &Keys, kinds: &[u64]) -> Result<()> {
    const NAME: &str = "expert_gating_func";
    match keys.size_if(NAME)? {
        Some(other) if !kinds.contains(&other) => Err(keys.wrong(NAME, &format!("is {other}, which is not supported"))),
        _ => Ok(()),
    }
}

/// Refuses weights that are multiplied by something.
fn ensure_unscaled(keys: &Keys) -> Result<()> {
    const NAME: &str = "expert_weights_scale";
    match keys.float_if(NAME)?.filter(|&scale| scale != 0.0 && scale != 1.0) {
        Some(other) => Err(keys.wrong(NAME, &format!("is {other}, which is not supported"))),
        None => Ok(()),
    }
}

/// Llama with experts.
pub fn mixtral(keys: &Keys, config: &mut Config) -> Result<()> {
    ensure_gating(keys, &[0, SOFTMAX])?;
    ensure_unscaled(keys)?;
    config.insert("model_type".into(), json!("mixtral"));
    config.insert("num_local_experts".into(), json!(keys.size("expert_count")?));
    config.insert("num_experts_per_tok".into(), json!(keys.size("expert_used_count")?));
    Ok(())
}

/// Mistral 3's text part is Mistral's, or Ministral 3's if its queries grow.
pub fn mistral3(keys: &Keys, theta: f64, config: &mut Config) -> Result<()> {
    // None has a window that metadata could tell.
    config.insert("sliding_window".into(), Json::Null);
    let Some(beta) = keys.float_if("attention.temperature_scale")?.filter(|&beta| beta != 0.0) else { return Ok(()) };
    let original = keys.size("rope.scaling.original_context_length")?;
    let (factor, scale) = (keys.float_if("rope.scaling.factor")?, keys.float_if("rope.scaling.yarn_log_multiplier")?);
    let mut rope = json!({
        "rope_type": "yarn", "rope_theta": theta, "factor": factor.unwrap_or(1.0), "mscale": 1.0,
        "mscale_all_dim": scale.unwrap_or(0.0), "original_max_position_embeddings": original,
        "llama_4_scaling_beta": beta,
    });
    for (ours, theirs) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
        if let Some(beta) = keys.float_if(&format!("rope.scaling.{theirs}"))? {
            rope[ours] = json!(beta);
        }
    }
    config.insert("model_type".into(), json!("ministral3"));
    config.insert("rope_parameters".into(), rope);
    // Replaces what was made of the same keys before.
    config.insert("rope_scaling".into(), Json::Null);
    Ok(())
}

/// The factors that Granite multiplies with.
pub fn granite(keys: &Keys, config: &mut Config) -> Result<()> {
    for (ours, theirs) in [
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("attention_multiplier", "attention.scale"),
        ("logits_scaling", "logit_scale"),
    ] {
        if let Some(factor) = keys.float_if(theirs)?.filter(|&factor| factor != 0.0) {
            config.insert(ours.into(), json!(factor));
        }
    }
    // Scores are multiplied by one over the root of a head's size where nothing is said.
    if !config.contains_key("attention_multiplier") {
        let head_dim = match keys.size_if("attention.key_length")? {
            Some(length) => length,
            None => keys.size("embedding_length")? / keys.size("attention.head_count")?.max(1),
        };
        config.insert("attention_multiplier".into(), json!(1.0 / (head_dim as f64).sqrt()));
    }
    // llama.cpp's switch for positions in this family.
    if keys.metadata.flag(&keys.key("rope.scaling.finetuned"))? == Some(false) {
        config.insert("position_embedding_type".into(), json!("nope"));
    }
    Ok(())
}

/// OLMo 2, or 3 where there are windows.
pub fn olmo(keys: &Keys, layers: u64, config: &mut Config) -> Result<()> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let Some(window) = keys.size_if("attention.sliding_window")?.filter(|&window| window > 0) else { return Ok(()) };
    config.insert("model_type".into(), json!("olmo3"));
    config.insert("sliding_window".into(), json!(window));
    if let Some(Value::Array(_)) = keys.metadata.get(&keys.key(PATTERN)) {
        let windowed = keys.metadata.integers(&keys.key(PATTERN))?.unwrap_or_default();
        if (windowed.len() as u64) < layers {
            return Err(keys.wrong(PATTERN, &format!("has {} values for {layers} layers", windowed.len())));
        }
        let kind = |&windowed: &i64| if windowed != 0 { "sliding_attention" } else { "full_attention" };
        config.insert("layer_types".into(), windowed.iter().take(layers as usize).map(kind).collect());
    }
    if let Some(theta) = keys.float_if("rope.freq_base_swa")? {
        let local = json!({"sliding_attention": {"rope_type": "default", "rope_theta": theta}});
        config.insert("rope_parameters".into(), local);
    }
    Ok(())
}

pub fn minimax(keys: &Keys, config: &mut Config) -> Result<()> {
    ensure_gating(keys, &[SIGMOID])?;
    ensure_unscaled(keys)?;
    config.insert("num_local_experts".into(), json!(keys.size("expert_count")?));
    config.insert("num_experts_per_tok".into(), json!(keys.size("expert_used_count")?));
    config.insert("intermediate_size".into(), json!(keys.size("expert_feed_forward_length")?));
    Ok(())
}

pub fn glm4_moe(keys: &Keys, config: &mut Config) -> Result<()> {
    ensure_gating(keys, &[0, SIGMOID])?;
    mixture_with_shared(keys, config)?;
    config.insert("use_qk_norm".into(), json!(keys.has("blk.0.attn_q_norm.weight")));
    Ok(())
}

/// A mixture with shared experts behind some dense layers.
pub fn mixture_with_shared(keys: &Keys, config: &mut Config) -> Result<()> {
    for (ours, theirs) in [
        ("n_routed_experts", "expert_count"),
        ("num_experts_per_tok", "expert_used_count"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("n_shared_experts", "expert_shared_count"),
    ] {
        config.insert(ours.into(), json!(keys.size(theirs)?));
    }
    for (ours, theirs) in [("n_group", "expert_group_count"), ("topk_group", "expert_group_used_count")] {
        if let Some(count) = keys.size_if(theirs)?.filter(|&count| count > 0) {
            config.insert(ours.into(), json!(count));
        }
    }
    config.insert("first_k_dense_replace".into(), json!(keys.size_if("leading_dense_block_count")?.unwrap_or(0)));
    let normalised = keys.metadata.flag(&keys.key("expert_weights_norm"))?;
    config.insert("norm_topk_prob".into(), json!(normalised.unwrap_or(false)));
    if let Some(scale) = keys.float_if("expert_weights_scale")?.filter(|&scale| scale != 0.0) {
        config.insert("routed_scaling_factor".into(), json!(scale));
    }
    Ok(())
}

/// Gemma 4: layers of two kinds, which have heads of their own sizes and numbers. `head_dim`: of those without a window. `factors`: the table of what frequencies
/// are divided by, which says with huge ones which pairs are not turned.
pub fn gemma4(
    keys: &Keys,
    (layers, heads, head_dim): (u64, u64, u64),
    theta: f64,
    factors: Option<&[f32]>,
    config: &mut Config,
) -> Result<()> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    /// What converters write for pairs that are not turned; far above any factor.
    const UNTURNED: f32 = 1e20;
    let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);
    // 1. kinds of layers
    let windowed = keys.metadata.integers(&keys.key(PATTERN))?.unwrap_or_default();
    if windowed.len() as u64 != layers {
        return Err(keys.wrong(PATTERN, &format!("has {} values for {layers} layers", windowed.len())));
    }
    let is_windowed: Vec<bool> = windowed.iter().map(|&kind| kind != 0).collect();
    let kind = |&windowed: &bool| if windowed { "sliding_attention" } else { "full_attention" };
    set("layer_types", is_windowed.iter().map(kind).collect());
    set("sliding_window", json!(keys.size("attention.sliding_window")?));
    let of_window = keys.size("attention.key_length_swa")?;
    if keys.size_if("attention.value_length_swa")?.is_some_and(|length| length != of_window) {
        return Err(keys.wrong("attention.value_length_swa", "differs from that of keys, which is not supported"));
    }
    set("head_dim", json!(of_window));
    let kv_heads = keys.sizes("attention.head_count_kv", layers)?.unwrap_or_else(|| vec![heads; layers as usize]);
    let of_kind = |windowed: bool| kv_heads.iter().zip(&is_windowed).find(|(_, of)| **of == windowed).map(|(n, _)| *n);
    let [local, full] = [true, false].map(|windowed| of_kind(windowed).unwrap_or(heads));
    if kv_heads.iter().zip(&is_windowed).any(|(n, windowed)| *n != if *windowed { local } else { full }) {
        return Err(keys.wrong("attention.head_count_kv", "differs in layers of one kind, which is not supported"));
    }
    set("num_key_value_heads", json!(local));
    let of_full = json!({"head_dim": head_dim, "num_key_value_heads": full});
    let full_layers = || (0..layers as usize).filter(|&layer| !is_windowed[layer]);
    let own: Config = full_layers().map(|layer| (layer.to_string(), of_full.clone())).collect();
    set("per_layer_config", Json::Object(own));
    // Values of their own are told by their tensors.
    let shared = keys.size_if("attention.shared_kv_layers")?.unwrap_or(0);
    set("num_kv_shared_layers", json!(shared));
    let storing = (0..layers.saturating_sub(shared)).find(|&layer| !is_windowed[layer as usize]);
    let has_values = storing.is_none_or(|layer| keys.has(&format!("blk.{layer}.attn_v.weight")));
    set("attention_k_eq_v", json!(!has_values));
    // 2. the second halves
    let widths = keys.sizes("feed_forward_length", layers)?.unwrap_or_default();
    let (first, last) = (widths.first().copied().unwrap_or(0), widths.last().copied().unwrap_or(0));
    let wide = shared > 0 && last == 2 * first;
    let width = |layer: u64| if wide && layer >= layers.saturating_sub(shared) { 2 * first } else { first };
    if widths.iter().zip(0..).any(|(own, layer)| *own != width(layer)) {
        return Err(
            keys.wrong("feed_forward_length", "is neither the same in all layers nor twice that in the last ones")
        );
    }
    set("intermediate_size", json!(first));
    set("use_double_wide_mlp", json!(wide));
    set("hidden_activation", json!("gelu_pytorch_tanh"));
    if keys.has("blk.0.ffn_gate_inp.weight") {
        ensure_gating(keys, &[0, SOFTMAX])?;
        ensure_unscaled(keys)?;
        set("enable_moe_block", json!(true));
        set("num_experts", json!(keys.size("expert_count")?));
        set("top_k_experts", json!(keys.size("expert_used_count")?));
        set("moe_intermediate_size", json!(keys.size("expert_feed_forward_length")?));
    }
    // 3. embeddings, positions, logits
    let per_layer = keys.size_if("embedding_length_per_layer_input")?.unwrap_or(0);
    set("hidden_size_per_layer_input", json!(per_layer));
    if per_layer > 0 {
        set("vocab_size_per_layer_input", json!(keys.tensor("per_layer_token_embd.weight")?.shape.first()));
    }
    let turned = match factors {
        None => 1.0,
        Some(all) => {
            let turned = all.iter().take_while(|&&factor| factor == 1.0).count();
            if all.len() as u64 != head_dim / 2 || all[turned..].iter().any(|&factor| factor < UNTURNED) {
                let path = keys.metadata.path().display();
                bail!("{path}: tensor \"rope_freqs.weight\": factors of another kind than Gemma 4's are not supported");
            }
            turned as f64 / all.len().max(1) as f64
        }
    };
    let local_theta = keys.float_if("rope.freq_base_swa")?.unwrap_or(10_000.0);
    set(
        "rope_parameters",
        json!({
            "full_attention": {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": turned},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        }),
    );
    if let Some(cap) = keys.float_if("final_logit_softcapping")?.filter(|&cap| cap != 0.0) {
        set("final_logit_softcapping", json!(cap));
    }
    Ok(())
}
