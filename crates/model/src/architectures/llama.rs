//! Llama: attention without norms on q and k, dense feed-forward layers. Reference: `modeling_llama.py` of transformers.

use anyhow::Result;

use crate::config::Config;
use crate::description::{
    AttentionDescription, Description, FeedForwardDescription, LayerDescription, MixerDescription, Outline,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    let attention = AttentionDescription { normed: false, ..AttentionDescription::read(config, false)? };
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, attention.head_dim, None, context)?;
    let layer = LayerDescription {
        mixer: MixerDescription::Attention(attention),
        feed_forward: FeedForwardDescription::dense(config.size("intermediate_size")?),
    };
    let layers = vec![layer; outline.count];
    outline.with(config, "llama", false, rotary, layers, MlxLm::new(config, "", rotary_keys(config).into()))
}
