//! Qwen2 and Qwen2.5, dense: biases on queries, keys and values, no norms on them. Reference: `modeling_qwen2.py` of transformers.

use anyhow::Result;

use super::qwen3;
use crate::config::Config;
use crate::description::{AttentionBiases, AttentionDescription, Description, FeedForwardDescription};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let intermediate = config.size("intermediate_size")?;
    // If there is a window, layers before this one do without.
    let first = config.count_or("max_window_layers", 28)?;
    let dense = |_| Ok(FeedForwardDescription::dense(intermediate));
    let attention = AttentionDescription::read(config, false)?;
    let attention = AttentionDescription { normed: false, biases: AttentionBiases::Inputs, ..attention };
    let mlx = MlxLm::new(config, "", rotary_keys(config).into());
    qwen3::describe_with(config, options, ("qwen2", attention), first, dense, mlx)
}
