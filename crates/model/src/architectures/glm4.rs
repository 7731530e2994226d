//! GLM-4 of 2025, dense: norms before and after both halves of a layer, one matrix for gate and up, half of a head rotated, its pairs beside each other. Reference:
//! `modeling_glm4.py` of transformers.

use anyhow::Result;

use crate::config::Config;
use crate::description::{
    AttentionBiases, AttentionDescription, Description, FeedForwardDescription, LayerDescription, MixerDescription,
    Outline,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

/// The default part of a head that is rotated.
const PARTIAL: f64 = 0.5;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    let attention = AttentionDescription {
        normed: false,
        adjacent_pairs: true,
        biases: match config.flag_or("attention_bias", true)? {
            true => AttentionBiases::Inputs,
            false => AttentionBiases::None,
        },
        ..AttentionDescription::read_with_heads_of(config, config.size_or("head_dim", 128)?)?
    };
    let layer = LayerDescription {
        mixer: MixerDescription::Attention(attention),
        feed_forward: FeedForwardDescription::joined(config.size("intermediate_size")?),
    };
    let layers = vec![layer; outline.count];
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, attention.head_dim, Some(PARTIAL), context)?;
    let mlx = MlxLm::new(config, "", rotary_keys(config).into());
    let described = outline.with(config, "glm4", false, rotary, layers, mlx)?;
    Ok(Description {
        output_norms: true,
        // The norms between the halves of a layer: theirs before the second half has the name that ours after the first one has.
        spelling: &[
            ("post_attention_layernorm", "post_self_attn_layernorm"),
            ("pre_feedforward_layernorm", "post_attention_layernorm"),
            ("post_feedforward_layernorm", "post_mlp_layernorm"),
        ],
        ..described
    })
}
