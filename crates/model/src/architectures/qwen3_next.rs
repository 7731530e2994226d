//! Qwen3-Next: GatedDeltaNet layers with gated attention in between, a mixture of experts with a shared one. Reference:
//! `modeling_qwen3_next.py` of transformers.

use anyhow::{Result, bail, ensure};

use super::qwen3_moe::sparse_layers;
use crate::config::Config;
use crate::description::{
    AttentionDescription, DeltaDescription, Description, FeedForwardDescription, LayerDescription, MixerDescription,
    MoeDescription, Outline, ProjectionLayout, SharedExpertDescription,
};
use crate::mlx_lm::{MlxLm, mixture_keys};
use crate::options::Options;
use crate::rope;

/// The default part of a head that is rotated.
const PARTIAL: f64 = 0.25;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let renormalise = config.flag_or("norm_topk_prob", true)?;
    let shared = Some(SharedExpertDescription::read(config)?);
    let moe = MoeDescription { shared, ..MoeDescription::read(config, options.experts_per_token, renormalise)? };
    let mlx = MlxLm::new(config, "", mixture_keys(config, Some(PARTIAL), true));
    describe_hybrid(config, options, "qwen3_next", ProjectionLayout::ByKeyHead, sparse_layers(config, moe)?, mlx)
}

/// The hybrid stack of Qwen3-Next and Qwen3.5. Attention layers are those of `layer_types`, or every `full_attention_interval`-th.
pub(crate) fn describe_hybrid(
    config: &Config,
    options: &Options,
    architecture: &'static str,
    layout: ProjectionLayout,
    feed_forward: impl Fn(usize) -> Result<FeedForwardDescription>,
    mlx: MlxLm,
) -> Result<Description> {
    let outline = Outline::read(config)?;
    let attention = AttentionDescription::read(config, true)?;
    let delta = DeltaDescription::read(config, layout)?;
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, attention.head_dim, Some(PARTIAL), context)?;
    let layer = |(i, is_attention)| -> Result<LayerDescription> {
        let mixer = match is_attention {
            true => MixerDescription::Attention(attention),
            false => MixerDescription::DeltaNet(delta),
        };
        Ok(LayerDescription { mixer, feed_forward: feed_forward(i)? })
    };
    let is_attention = attention_layers(config, outline.count)?;
    let mlx = mlx.ordered(config, &is_attention);
    let layers = is_attention.into_iter().enumerate().map(layer).collect::<Result<_>>()?;
    outline.with(config, architecture, true, rotary, layers, mlx)
}

/// For each layer, whether it is attention.
fn attention_layers(config: &Config, count: usize) -> Result<Vec<bool>> {
    let Some(types) = config.strings("layer_types")? else {
        let every = config.size_or("full_attention_interval", 4)?;
        return Ok((0..count).map(|i| (i + 1).is_multiple_of(every)).collect());
    };
    ensure!(types.len() == count, "config.json: {} layer_types for {count} layers", types.len());
    types
        .into_iter()
        .map(|kind| match kind {
            "full_attention" => Ok(true),
            "linear_attention" => Ok(false),
            other => bail!("config.json: layer type {other:?} is not known here"),
        })
        .collect()
}
