//! Mixtral: Mistral's attention, a mixture of experts in every layer. Reference: `modeling_mixtral.py` of transformers.

use std::sync::Arc;

use anyhow::Result;

use super::mistral;
use crate::config::Config;
use crate::description::{
    AttentionDescription, Description, FeedForwardDescription, LayerDescription, MixerDescription, MoeDescription,
    Outline,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

/// What its checkpoints call gate, up and down of an expert.
pub(crate) const EXPERT_SPELLING: [&str; 3] = ["w1", "w3", "w2"];

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    let window = config.size_or_null("sliding_window", None)?;
    let attention = AttentionDescription { window, ..mistral::attention(config)? };
    let keys = ("num_local_experts", "intermediate_size");
    let moe = Arc::new(MoeDescription::read_keys(config, keys, options.experts_per_token, true)?);
    let layer = LayerDescription {
        mixer: MixerDescription::Attention(attention),
        feed_forward: FeedForwardDescription::Moe(moe),
    };
    let layers = vec![layer; outline.count];
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary_or(config, attention.head_dim, (None, 1e6), context)?;
    let mlx = MlxLm::new(config, "", rotary_keys(config).into());
    let described = outline.with(config, "mixtral", false, rotary, layers, mlx)?;
    Ok(Description { spelling: &[("mlp", "block_sparse_moe")], expert_spelling: EXPERT_SPELLING, ..described })
}
