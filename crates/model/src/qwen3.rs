//! Qwen3, dense. Reference: `modeling_qwen3.py` of transformers.

use anyhow::{Result, bail, ensure};

use crate::decoder::{CacheGroup, CacheKind, Decoder, Layer, Mixer, Outline, Scratch, Spec};
use crate::layers::{Attention, AttentionShape, FeedForward};
use crate::weights::Weights;
use crate::{Config, Options, rope};

pub(crate) fn build(config: &Config, w: &mut Weights, options: &Options) -> Result<Decoder> {
    let intermediate = config.size("intermediate_size")?;
    build_with(config, w, options, "qwen3", None, &mut |w, _, module, hidden| {
        let eps = config.norm_eps()?;
        let norm = w.norm(&format!("{module}.post_attention_layernorm"), hidden, eps, false)?;
        Ok(FeedForward::Dense { norm, mlp: Box::new(w.mlp(&format!("{module}.mlp"), hidden, intermediate)?) })
    })
}

type BuildFeedForward<'a> = &'a mut dyn FnMut(&mut Weights, usize, &str, usize) -> Result<FeedForward>;

/// Qwen3's attention with any feed-forward part, which `feed_forward(weights, layer, module, hidden)` loads.
pub(crate) fn build_with(
    config: &Config,
    w: &mut Weights,
    options: &Options,
    architecture: &'static str,
    experts: Option<(usize, usize)>,
    feed_forward: BuildFeedForward,
) -> Result<Decoder> {
    let count = config.layers()?;
    let outline = Outline::read(config, false)?;
    let shape = AttentionShape::read(config, false)?;
    let max_context = config.size_or("max_position_embeddings", 32768)?;
    let context = options.context.unwrap_or(max_context);
    let rotary = rope::frequencies(config, shape.head_dim, 1.0, 10000.0, context)?;
    let rotated = 2 * rotary.inv_freq.len();
    let scratch = Scratch::alloc(w.backend(), options.max_tokens, outline.hidden, shape, rotated, None)?;

    // Layers that attend to everything and layers with a window are two cache groups.
    let windows = windows(config, count, experts.is_some())?;
    let mut groups: Vec<CacheGroup> = Vec::new();
    let mut layers = Vec::with_capacity(count);
    for (i, window) in windows.into_iter().enumerate() {
        let kind = window.map_or(CacheKind::Full, CacheKind::Window);
        let group = groups.iter().position(|g| g.kind == kind).unwrap_or_else(|| {
            let (kv_heads, dim) = (shape.kv_heads, shape.head_dim);
            groups.push(CacheGroup { kind, layers: 0, kv_heads, k_dim: dim, v_dim: dim });
            groups.len() - 1
        });
        let place = (group, groups[group].layers);
        groups[group].layers += 1;
        let module = format!("layers.{i}");
        let attention = Attention::load(w, &scratch, &module, shape, outline.eps, false, window, place)?;
        let feed_forward = feed_forward(w, i, &module, outline.hidden)?;
        layers.push(Layer { mixer: Mixer::Attention(attention), feed_forward });
    }
    let (vocabulary, working_type) = (config.size("vocab_size")?, w.working_type()?);
    let spec =
        Spec { architecture, vocabulary, layers: count, max_context, groups, state_len: 0, experts, working_type };
    outline.finish(w, spec, scratch, rotary, layers)
}

/// Each layer's sliding window, if it has one.
fn windows(config: &Config, count: usize, experts: bool) -> Result<Vec<Option<usize>>> {
    let window = match config.flag_or("use_sliding_window", false)? && config.get("sliding_window").is_some() {
        true => Some(config.size("sliding_window")?),
        false => None,
    };
    let Some(types) = config.strings("layer_types")? else {
        // Qwen3-MoE does not look at `max_window_layers`: there a window holds for all layers.
        let first = if experts { 0 } else { config.count_or("max_window_layers", 28)? };
        return Ok((0..count).map(|i| window.filter(|_| i >= first)).collect());
    };
    ensure!(types.len() == count, "config.json: {} layer_types for {count} layers", types.len());
    types
        .into_iter()
        .map(|kind| match (kind, window) {
            ("full_attention", _) => Ok(None),
            ("sliding_attention", Some(w)) => Ok(Some(w)),
            ("sliding_attention", None) => bail!("config.json: sliding_attention layers, but no sliding_window"),
            (other, _) => bail!("config.json: layer type {other:?} is not Qwen3's"),
        })
        .collect()
}
