//! Mistral 4: DeepSeek-V3's layers with a softmax router, and queries that grow with the position. Reference: `modeling_mistral4.py` of transformers.

use anyhow::Result;

use super::{deepseek, glm4_moe, mistral};
use crate::config::Config;
use crate::description::{
    AttentionDescription, Description, MoeDescription, Outline, RouterDescription, RouterScoring,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

/// Mistral 3's wrapper with a part for images, which has text models of several kinds.
pub(crate) fn describe_wrapped(config: &Config, options: &Options) -> Result<Description> {
    if config.text_type() == "mistral4" { describe(config, options) } else { mistral::describe(config, options) }
}

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    let read = AttentionDescription::read_latent(config, 1024)?;
    let context = options.context.unwrap_or(outline.max_context);
    // The rotated part is given as a part of the head, and follows from the sizes of both.
    let partial = config.size("qk_rope_head_dim")? as f64 / read.head_dim as f64;
    let rotary = rope::rotary(config, read.head_dim, Some(partial), context)?;
    let read = AttentionDescription { query_growth: Some(mistral::query_growth(config)?), ..read };
    let attention = deepseek::scaled(read, &rotary);
    let read = glm4_moe::mixture(config, options, (1, 1), 1.0)?;
    let router = RouterDescription { scoring: RouterScoring::Softmax, correction_bias: false, ..read.router };
    let moe = MoeDescription { router, ..read };
    let layers = glm4_moe::dense_then_mixture(config, outline.count, 0, attention, moe)?;
    let prefix = if config.is_multimodal() { "language_model." } else { "" };
    let mlx = MlxLm::new(config, prefix, rotary_keys(config).into());
    let described = outline.with(config, "mistral4", false, rotary, layers, mlx)?;
    Ok(Description { spelling: glm4_moe::SPELLING, ..described })
}
