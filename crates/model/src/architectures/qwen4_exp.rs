//! Qwen4-Exp: several residual streams with gated mixtures, GatedDeltaNet layers with gated attention in between that sees blocks which an indexer selects, a mixture of experts with a shared one, and embeddings of n-grams
//! in some layers. Reference: `modeling_qwen4_exp.py` of transformers; the text part only.

use std::sync::Arc;

use anyhow::{Result, anyhow, bail, ensure};
use serde_json::Value;
use sluice_backend::{MOST_GRAM, MOST_POOLED, MOST_STREAMS, NgramHash};

use super::glm5_next::attention_layers;
use crate::config::Config;
use crate::description::{
    AttentionDescription, DeltaDescription, Description, FeedForwardDescription, IndexDescription, LayerDescription,
    MixerDescription, MoeDescription, NgramsDescription, Outline, ProjectionLayout, SharedExpertDescription,
    StreamMixing, StreamsDescription,
};
use crate::mlx_lm::MlxLm;
use crate::options::Options;
use crate::rope;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    // 1. mixers
    let attention = AttentionDescription { index: Some(index(config)?), ..AttentionDescription::read(config, true)? };
    let delta = DeltaDescription {
        sigmoid_gate: sigmoid_gate(config)?,
        ..DeltaDescription::read(config, ProjectionLayout::Separate)?
    };
    let is_attention = match config.get("layer_types") {
        Some(_) => attention_layers(config, outline.count)?,
        None => {
            let every = config.size_or("full_attention_interval", 4)?;
            (1..=outline.count).map(|layer| layer.is_multiple_of(every)).collect()
        }
    };
    // 2. mixtures
    let renormalise = config.flag_or("norm_topk_prob", true)?;
    let shared = Some(SharedExpertDescription::read(config)?);
    let moe = MoeDescription { shared, ..MoeDescription::read(config, options.experts_per_token, renormalise)? };
    let moe = Arc::new(moe);
    let ngrams = ngrams(config, &is_attention)?;
    let layer = |is_attention: bool| LayerDescription {
        mixer: match is_attention {
            true => MixerDescription::Attention(attention),
            false => MixerDescription::DeltaNet(delta),
        },
        feed_forward: FeedForwardDescription::Moe(Arc::clone(&moe)),
    };
    let layers = is_attention.into_iter().map(layer).collect();
    // 3. streams
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, attention.head_dim, Some(1.0), context)?;
    let mlx = MlxLm { prefix: "language_model.", refuses_order: true, ..MlxLm::default() };
    let streams = Some(streams(config)?);
    let described = outline.with(config, "qwen4_exp", true, rotary, layers, mlx)?;
    Ok(Description { streams, ngrams, input_norms: false, ..described })
}

fn streams(config: &Config) -> Result<StreamsDescription> {
    let (count, rank) = (config.size_or("hc_count", 4)?, config.size_or("hc_lowrank", 320)?);
    let path = config.path().display();
    ensure!(count <= MOST_STREAMS, "{path}: `hc_count` is {count}, more than {MOST_STREAMS}");
    config.product("`hc_count` and `hidden_size`", &[count, config.size("hidden_size")?])?;
    Ok(StreamsDescription { count, mixing: StreamMixing::Gated { rank } })
}

fn index(config: &Config) -> Result<IndexDescription> {
    let path = config.path().display();
    let (heads, head_dim) = (config.size("indexer_n_heads")?, config.size("indexer_head_dim")?);
    let (top, pool) = (config.size("indexer_budget")?, config.size("indexer_compress_ratio")?);
    let kv_heads = config.size("indexer_kv_heads")?;
    ensure!(kv_heads == 1, "{path}: `indexer_kv_heads` is {kv_heads}, and only 1 is supported");
    config.product("`indexer_n_heads` and `indexer_head_dim`", &[heads + 1, head_dim])?;
    ensure!(
        MOST_POOLED.is_multiple_of(pool),
        "{path}: `indexer_compress_ratio` is {pool}, which does not divide {MOST_POOLED}: that is not supported"
    );
    ensure!(
        top.is_multiple_of(pool),
        "{path}: `indexer_budget` is {top}, which is no multiple of `indexer_compress_ratio`, {pool}"
    );
    Ok(IndexDescription { heads, head_dim, top, adjacent_pairs: false, pool: Some(pool), shared: false, split: false })
}

/// Whether delta rules have gates of sigmoids, and not of SiLU.
fn sigmoid_gate(config: &Config) -> Result<bool> {
    match config.get("output_gate_type").and_then(Value::as_str) {
        None | Some("silu" | "swish") => Ok(false),
        Some("sigmoid") => Ok(true),
        Some(other) => {
            bail!("{}: `output_gate_type` is {other:?}, expected \"silu\" or \"sigmoid\"", config.path().display())
        }
    }
}

fn ngrams(config: &Config, is_attention: &[bool]) -> Result<Option<NgramsDescription>> {
    let path = config.path().display();
    let wrong = |key: &str, wanted: &str| {
        anyhow!("{path}: `{key}` is {}, expected {wanted}", config.get(key).unwrap_or(&Value::Null))
    };
    let whole = |key: &str, default: u64| match config.get(key) {
        None => Ok(default),
        Some(value) => value.as_u64().ok_or_else(|| wrong(key, "a whole number")),
    };
    // 1. which layers, counted from 1
    let ids = match config.get("ple_layer_ids") {
        None => return Ok(None),
        Some(value) => value.as_array().ok_or_else(|| wrong("ple_layer_ids", "a list of numbers of layers"))?,
    };
    let layer = |id: &Value| {
        let layer = id.as_u64().and_then(|id| usize::try_from(id).ok()?.checked_sub(1));
        layer.filter(|layer| is_attention.get(*layer) == Some(&false))
    };
    let layers = ids.iter().map(layer).collect::<Option<Vec<usize>>>();
    let mut layers =
        layers.ok_or_else(|| wrong("ple_layer_ids", "numbers of layers of linear attention, from 1 on"))?;
    layers.sort_unstable();
    layers.dedup();
    if layers.is_empty() {
        return Ok(None);
    }
    // 2. n-grams and their rows
    let (size, heads_per_gram) = (config.size_or("ngram_size", 3)?, config.size_or("heads_per_ngram", 8)?);
    ensure!((2..=MOST_GRAM).contains(&size), "{path}: `ngram_size` is {size}, expected 2 to {MOST_GRAM}");
    let heads = config.product("`ngram_size` and `heads_per_ngram`", &[size - 1, heads_per_gram])?;
    ensure!(heads <= 1024, "{path}: {heads} heads of n-grams are more than 1024");
    let width = config.size_or("ple_embed_dim", config.size("hidden_size")?)?;
    ensure!(
        width.is_multiple_of(heads),
        "{path}: `ple_embed_dim` is {width}, which {heads} heads of n-grams do not divide"
    );
    let base = whole("ngram_vocab_size_base", 20_000_000)?;
    ensure!(
        base >= 2 && base.saturating_mul(heads as u64) < 1 << 31,
        "{path}: `ngram_vocab_size_base` is {base}, which makes tables that are not supported"
    );
    // 3. the end of a text
    let end = config.get("eos_token_id").map(|value| value.as_array().map_or(Some(value), |all| all.first()));
    let end = end.flatten().and_then(Value::as_u64).and_then(|end| u32::try_from(end).ok());
    let end = end.ok_or_else(|| wrong("eos_token_id", "the number of a token, which n-grams need"))?;
    let taps = config.size_or("ple_conv_kernel_size", 4)?;
    ensure!(taps <= 64, "{path}: `ple_conv_kernel_size` is {taps}, more than 64");
    // 4. what makes rows, in GGUF files the numbers themselves
    let (vocabulary, seed) = (config.size("vocab_size")?, whole("seed", 1234)?);
    let stored = stored_hash(config, (size, heads), end)?;
    ensure!(stored.is_none() || layers.len() == 1, "{path}: `ngram_multipliers` of {} layers", layers.len());
    let made = |number| NgramHash::new(number, (size, heads_per_gram), base, vocabulary, seed, end);
    let hash = |number| stored.clone().unwrap_or_else(|| made(number));
    let layers = layers.into_iter().enumerate().map(|(number, layer)| (layer, Arc::new(hash(number)))).collect();
    Ok(Some(NgramsDescription {
        layers,
        width,
        taps,
        divisor: config.size_or("make_ngram_vocab_size_divisible_by", 128)?,
        parts: config.size_or("split_ngram_parts", 512)?,
    }))
}

/// The hash that a config has the numbers of.
fn stored_hash(config: &Config, (size, heads): (usize, usize), end: u32) -> Result<Option<NgramHash>> {
    let numbers = |key: &str| {
        let all = config.get(key)?.as_array()?;
        all.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>()
    };
    let (Some(multipliers), Some(sizes)) = (numbers("ngram_multipliers"), numbers("ngram_head_sizes")) else {
        return Ok(None);
    };
    let fits = (multipliers.len(), sizes.len()) == (size, heads);
    let hash = NgramHash::of_numbers(multipliers, sizes, end).filter(|_| fits);
    hash.map(Some)
        .ok_or_else(|| anyhow!("{}: `ngram_multipliers` and `ngram_head_sizes` do not fit", config.path().display()))
}
