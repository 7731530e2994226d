//! What the metadata of families with several residual streams says, in the config keys of each.

use anyhow::{Result, ensure};
use serde_json::{Map, Value as Json, json};

use super::family::{ensure_gating, mixture_with_shared};
use super::keys::Keys;
use super::latent;
use super::metadata::{Array, Value};

type Config = Map<String, Json>;

/// llama.cpp's number for the root of a softplus of each logit.
const ROOT_SOFTPLUS: u64 = 4;

/// Streams that exchange what they have.
fn exchanged(keys: &Keys, config: &mut Config) -> Result<()> {
    config.insert("hc_mult".into(), json!(keys.size("hyper_connection.count")?));
    config.insert("hc_sinkhorn_iters".into(), json!(keys.size("hyper_connection.sinkhorn_iterations")?));
    if let Some(eps) = keys.float_if("hyper_connection.epsilon")? {
        config.insert("hc_eps".into(), json!(eps));
    }
    Ok(())
}

/// The limit of SwiGLU, which must be the same in all layers and for all experts.
fn limit(keys: &Keys, layers: u64) -> Result<Option<f64>> {
    let (experts, shared) = ("swiglu_clamp_exp", "swiglu_clamp_shexp");
    let each = |name: &str| -> Result<Option<Vec<f64>>> {
        let key = keys.key(name);
        if let Some(Value::Array(_)) = keys.metadata.get(&key) {
            let all = keys.metadata.floats(&key)?.unwrap_or_default();
            return Ok(Some(all.into_iter().take(layers as usize).map(f64::from).collect()));
        }
        Ok(keys.metadata.float(&key)?.map(|limit| vec![limit]))
    };
    let Some(all) = each(experts)? else { return Ok(None) };
    let first = all.first().copied().unwrap_or(0.0);
    for (name, all) in [(shared, each(shared)?.unwrap_or_default()), (experts, all)] {
        let alike = all.iter().all(|limit| *limit == first);
        ensure!(alike, keys.wrong(name, "differs from layer to layer, or from that of experts: that is not supported"));
    }
    Ok(Some(first).filter(|&limit| limit > 0.0))
}

/// GLM-5.3-Flash.
pub fn glm(keys: &Keys, layers: u64, (heads, rotated): (u64, u64), config: &mut Config) -> Result<()> {
    latent::sizes(keys, (heads, rotated), config)?;
    latent::channel_delta(keys, layers, "indexed_attention", config)?;
    latent::mixture(keys, &[0, super::family::SIGMOID], config)?;
    latent::indexer(keys, layers, config)?;
    config.insert("index_kpool".into(), json!(keys.size("attention.indexer.kpool")?));
    let tail = keys.metadata.flag(&keys.key("attention.indexer.kpool_select_tail"))?;
    config.insert("index_kpool_always_select_tail".into(), json!(tail.unwrap_or(true)));
    exchanged(keys, config)?;
    // Without one there is none.
    config.insert("swiglu_limit".into(), json!(limit(keys, layers)?.unwrap_or(f32::MAX.into())));
    Ok(())
}

/// DeepSeek-V4.
pub fn deepseek(keys: &Keys, layers: u64, rotated: u64, config: &mut Config) -> Result<()> {
    const RATIOS: &str = "attention.compress_ratios";
    // 1. attention
    for (ours, theirs) in [
        ("q_lora_rank", "attention.q_lora_rank"),
        ("sliding_window", "attention.sliding_window"),
        ("o_groups", "attention.output_group_count"),
        ("o_lora_rank", "attention.output_lora_rank"),
        ("index_n_heads", "attention.indexer.head_count"),
        ("index_head_dim", "attention.indexer.key_length"),
        ("index_topk", "attention.indexer.top_k"),
    ] {
        config.insert(ours.into(), json!(keys.size(theirs)?));
    }
    config.insert("qk_rope_head_dim".into(), json!(rotated));
    if let Some(theta) = keys.float_if("attention.compress_rope_freq_base")? {
        config.insert("compress_rope_theta".into(), json!(theta));
    }
    // 2. kinds of layers: those with an indexer have entries of two windows
    let ratios = keys.metadata.integers(&keys.key(RATIOS))?.unwrap_or_default();
    if (ratios.len() as u64) < layers {
        return Err(keys.wrong(RATIOS, &format!("has {} values for {layers} layers", ratios.len())));
    }
    let (mut kinds, mut rates) = (Vec::new(), Config::new());
    for (layer, &ratio) in ratios.iter().enumerate().take(layers as usize) {
        let kind = match keys.has(&format!("blk.{layer}.indexer_compressor_kv.weight")) {
            _ if ratio == 0 => "sliding_attention",
            true => "compressed_sparse_attention",
            false => "heavily_compressed_attention",
        };
        kinds.push(kind);
        if ratio != 0 && *rates.entry(kind).or_insert(json!(ratio)) != json!(ratio) {
            return Err(keys.wrong(RATIOS, "differs in layers of one kind, which is not supported"));
        }
    }
    config.insert("layer_types".into(), json!(kinds));
    config.insert("compress_rates".into(), Json::Object(rates));
    // 3. mixtures
    mixture_with_shared(keys, config)?;
    ensure_gating(keys, &[ROOT_SOFTPLUS])?;
    config.insert("num_hash_layers".into(), json!(keys.size_if("hash_layer_count")?.unwrap_or(0)));
    let none = || keys.wrong("swiglu_clamp_exp", "is missing or 0, which is not supported");
    config.insert("swiglu_limit".into(), json!(limit(keys, layers)?.ok_or_else(none)?));
    exchanged(keys, config)
}

/// Qwen4-Exp: its streams, indexers and n-grams.
pub fn qwen(keys: &Keys, config: &mut Config) -> Result<()> {
    const RATIOS: &str = "attention.compress_ratios";
    for (ours, theirs) in [
        ("hc_count", "hyper_connection.count"),
        ("hc_lowrank", "hyper_connection.low_rank"),
        ("indexer_n_heads", "attention.indexer.head_count"),
        ("indexer_head_dim", "attention.indexer.key_length"),
        ("indexer_budget", "attention.indexer.top_k"),
        ("indexer_compress_ratio", RATIOS),
    ] {
        let size = keys.size(theirs)?;
        ensure!(size > 0, keys.wrong(theirs, "is 0, which is not supported"));
        config.insert(ours.into(), json!(size));
    }
    config.insert("indexer_kv_heads".into(), json!(1));
    // No key says so: llama.cpp knows no other.
    config.insert("output_gate_type".into(), json!("sigmoid"));
    ngrams(keys, config)
}

/// The layer whose n-grams are in the table of a file, if there is one.
pub fn ngram_layer(keys: &Keys) -> Result<Option<u64>> {
    const LAYERS: &str = "ple.layers";
    let layers = keys.metadata.integers(&keys.key(LAYERS))?.unwrap_or_default();
    match layers[..] {
        [] => Ok(None),
        [layer] => u64::try_from(layer).map(Some).map_err(|_| keys.wrong(LAYERS, "has numbers below 0")),
        _ => Err(keys.wrong(LAYERS, &format!("has {} layers, and files have the table of one", layers.len()))),
    }
}

fn ngrams(keys: &Keys, config: &mut Config) -> Result<()> {
    const OFFSETS: &str = "ple.head_offsets";
    let Some(layer) = ngram_layer(keys)? else { return Ok(()) };
    config.insert("ple_layer_ids".into(), json!([layer.saturating_add(1)]));
    for (ours, theirs) in [
        ("ngram_size", "ple.ngram_size"),
        ("heads_per_ngram", "ple.heads_per_ngram"),
        ("ple_conv_kernel_size", "ple.conv_kernel"),
        ("eos_token_id", "ple.eos_token_id"),
    ] {
        config.insert(ours.into(), json!(keys.size(theirs)?));
    }
    // 1. what makes rows of n-grams
    let multipliers = numbers(keys, "ple.layer_multipliers")?;
    let sizes = numbers(keys, "ple.head_vocab_sizes")?;
    let before = sizes.iter().scan(0u64, |sum, size| {
        let own = *sum;
        *sum = sum.saturating_add(*size);
        Some(own)
    });
    let follow = numbers(keys, OFFSETS)?.into_iter().eq(before);
    ensure!(follow, keys.wrong(OFFSETS, "does not follow from the sizes of heads"));
    let width = keys.size("embedding_length_per_layer_input")?.saturating_mul(sizes.len() as u64);
    config.insert("ple_embed_dim".into(), json!(width));
    config.insert("ngram_multipliers".into(), json!(multipliers));
    config.insert("ngram_head_sizes".into(), json!(sizes));
    // 2. the table, in one part with some rows to spare
    let rows = keys.tensor("per_layer_token_embd.weight")?.shape.first().copied().unwrap_or(0) as u64;
    let used: u64 = sizes.iter().fold(0, |sum, size| sum.saturating_add(*size));
    let divides = |by: &u64| used.checked_next_multiple_of(*by) == Some(rows);
    let divisor = (0..=24).map(|bits| 1 << bits).find(divides).unwrap_or(1);
    config.insert("make_ngram_vocab_size_divisible_by".into(), json!(divisor));
    config.insert("split_ngram_parts".into(), json!(1));
    Ok(())
}

/// Whole numbers, all bits of which count.
fn numbers(keys: &Keys, name: &str) -> Result<Vec<u64>> {
    let key = keys.key(name);
    if let Some(Value::Array(Array::U64(all))) = keys.metadata.get(&key) {
        return Ok(all.clone());
    }
    let all = keys.metadata.integers(&key)?.ok_or_else(|| keys.wrong(name, "is missing"))?;
    let all: Result<_, _> = all.into_iter().map(u64::try_from).collect();
    all.map_err(|_| keys.wrong(name, "has numbers below 0"))
}
