//! OLMo 2 and 3: norms over all of q and of k, and of what both halves of a layer put out instead of what they take in. In OLMo 3 most layers have windows, and
//! positions that are not stretched. Reference: `modeling_olmo2.py` and `modeling_olmo3.py` of transformers.

use anyhow::Result;

use crate::config::Config;
use crate::description::{
    AttentionDescription, Description, FULL, FeedForwardDescription, LayerDescription, MixerDescription, Outline,
    WINDOWED, layer_windows,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

/// OLMo 2.
pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    let context = options.context.unwrap_or(outline.max_context);
    let windows = vec![None; outline.count];
    describe_with(config, outline, "olmo2", windows, |head_dim| rope::rotary(config, head_dim, None, context))
}

/// OLMo 3.
pub(crate) fn describe_3(config: &Config, options: &Options) -> Result<Description> {
    const THETA: (&str, f64) = ("rope_theta", 500_000.0);
    let outline = Outline::read(config)?;
    let context = options.context.unwrap_or(outline.max_context);
    let window = config.size_or_null("sliding_window", Some(4096))?;
    let windows = layer_windows(config, outline.count, window, |layer| !(layer + 1).is_multiple_of(4))?;
    let of = |kind, head_dim| rope::rotary_of_layers(config, kind, THETA, head_dim, context);
    let described = describe_with(config, outline, "olmo3", windows, |head_dim| of(FULL, head_dim))?;
    let head_dim = described.attention_layers().next().map_or(0, |attention| attention.head_dim);
    let local = of(WINDOWED, head_dim)?;
    Ok(Description { window_rotary: Some(local.frequencies), ..described })
}

fn describe_with(
    config: &Config,
    outline: Outline,
    architecture: &'static str,
    windows: Vec<Option<usize>>,
    rotary: impl Fn(usize) -> Result<rope::Rotary>,
) -> Result<Description> {
    let attention = AttentionDescription { whole_norms: true, ..AttentionDescription::read(config, false)? };
    let rotary = rotary(attention.head_dim)?;
    let intermediate = config.size("intermediate_size")?;
    let layer = |window| LayerDescription {
        mixer: MixerDescription::Attention(AttentionDescription { window, ..attention }),
        feed_forward: FeedForwardDescription::dense(intermediate),
    };
    let layers = windows.into_iter().map(layer).collect();
    let mlx = MlxLm::new(config, "", rotary_keys(config).into());
    let described = outline.with(config, architecture, false, rotary, layers, mlx)?;
    Ok(Description { input_norms: false, output_norms: true, ..described })
}
