//! GLM-4.7-Flash: DeepSeek-V3's layers with GLM's mixture in all of them but the first. Reference: `modeling_glm4_moe_lite.py` of transformers.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};

use super::{deepseek, glm4_moe};
use crate::config::Config;
use crate::description::{
    AttentionDescription, Description, FeedForwardDescription, LayerDescription, MixerDescription, Outline,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    let read = AttentionDescription::read_latent(config, 768)?;
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, config.size("qk_rope_head_dim")?, Some(1.0), context)?;
    let attention = deepseek::scaled(read, &rotary);
    let moe = Arc::new(glm4_moe::mixture(config, options, (1, 1), 1.8)?);
    let mut layers = Vec::with_capacity(outline.count);
    for is_dense in dense_layers(config, outline.count, 1)? {
        let feed_forward = match is_dense {
            true => FeedForwardDescription::dense(config.size("intermediate_size")?),
            false => FeedForwardDescription::Moe(Arc::clone(&moe)),
        };
        layers.push(LayerDescription { mixer: MixerDescription::Attention(attention), feed_forward });
    }
    let mlx = MlxLm::new(config, "", rotary_keys(config).into());
    let described = outline.with(config, "glm4_moe_lite", false, rotary, layers, mlx)?;
    Ok(Description { spelling: glm4_moe::SPELLING, ..described })
}

/// Which layers are dense: by `mlp_layer_types`, or the first `first_k_dense_replace`, by default `first`.
pub(super) fn dense_layers(config: &Config, count: usize, first: usize) -> Result<Vec<bool>> {
    let path = config.path().display();
    let Some(types) = config.strings("mlp_layer_types")? else {
        let dense = config.count_or("first_k_dense_replace", first)?;
        return Ok((0..count).map(|layer| layer < dense).collect());
    };
    ensure!(types.len() == count, "{path}: {} mlp_layer_types for {count} layers", types.len());
    types
        .into_iter()
        .map(|kind| match kind {
            "dense" => Ok(true),
            "sparse" => Ok(false),
            other => bail!("{path}: a feed-forward part of type {other:?} is not known here"),
        })
        .collect()
}
