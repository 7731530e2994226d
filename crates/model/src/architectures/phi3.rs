//! Phi-3 and Phi-4: Llama's layers with one matrix for q, k and v and one for gate and up; a part of a head may be rotated. Reference: `modeling_phi3.py` of
//! transformers.

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::config::Config;
use crate::description::{
    AttentionBiases, AttentionDescription, Description, FeedForwardDescription, LayerDescription, MixerDescription,
    Outline,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    // The reference takes this name for LongRoPE in this architecture alone.
    let kind = ["rope_parameters", "rope_scaling"].iter().find_map(|key| {
        let rope = config.get(key)?;
        rope.get("rope_type").or_else(|| rope.get("type"))?.as_str()
    });
    ensure!(kind != Some("yarn"), "{}: rope type \"yarn\" is not Phi-3's", config.path().display());
    let outline = Outline::read(config)?;
    let attention = AttentionDescription {
        normed: false,
        joined: true,
        biases: AttentionBiases::None,
        window: config.size_or_null("sliding_window", None)?,
        ..AttentionDescription::read(config, false)?
    };
    let layer = LayerDescription {
        mixer: MixerDescription::Attention(attention),
        feed_forward: FeedForwardDescription::joined(config.size("intermediate_size")?),
    };
    let layers = vec![layer; outline.count];
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, attention.head_dim, Some(1.0), context)?;
    let partial = config.get("rope_parameters").and_then(|rope| rope.get("partial_rotary_factor")).cloned();
    let mut keys: Vec<(&str, Option<Value>)> = rotary_keys(config).into();
    keys.push(("partial_rotary_factor", partial));
    outline.with(config, "phi3", false, rotary, layers, MlxLm::new(config, "", keys))
}
