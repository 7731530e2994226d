//! Qwen3, dense. Reference: `modeling_qwen3.py` of transformers.

use anyhow::Result;

use crate::config::Config;
use crate::description::{
    AttentionDescription, Description, FeedForwardDescription, LayerDescription, MixerDescription, Outline,
    layer_windows,
};
use crate::mlx_lm::MlxLm;
use crate::options::Options;
use crate::rope;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let intermediate = config.size("intermediate_size")?;
    // If there is a window, layers before this one do without.
    let first = config.count_or("max_window_layers", 28)?;
    let dense = |_| Ok(FeedForwardDescription::dense(intermediate));
    let attention = AttentionDescription::read(config, false)?;
    describe_with(config, options, ("qwen3", attention), first, dense, MlxLm::default())
}

/// Attention of this kind with any feed-forward part. `first_windowed`: the first layer with a window, for configs without `layer_types`.
pub(crate) fn describe_with(
    config: &Config,
    options: &Options,
    (architecture, attention): (&'static str, AttentionDescription),
    first_windowed: usize,
    feed_forward: impl Fn(usize) -> Result<FeedForwardDescription>,
    mlx: MlxLm,
) -> Result<Description> {
    let outline = Outline::read(config)?;
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, attention.head_dim, None, context)?;
    let windows = windows(config, outline.count, first_windowed)?;
    let layer = |(i, window)| -> Result<LayerDescription> {
        let mixer = MixerDescription::Attention(AttentionDescription { window, ..attention });
        Ok(LayerDescription { mixer, feed_forward: feed_forward(i)? })
    };
    let layers = windows.into_iter().enumerate().map(layer).collect::<Result<_>>()?;
    outline.with(config, architecture, false, rotary, layers, mlx)
}

/// Each layer's sliding window, if it has one.
fn windows(config: &Config, count: usize, first: usize) -> Result<Vec<Option<usize>>> {
    let window = match config.flag_or("use_sliding_window", false)? && config.get("sliding_window").is_some() {
        true => Some(config.size("sliding_window")?),
        false => None,
    };
    layer_windows(config, count, window, |layer| layer >= first)
}
