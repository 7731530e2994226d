//! Qwen3.5, the dense hybrid. Reference: `modeling_qwen3_5.py` of transformers; the text part only.

use anyhow::Result;

use super::qwen3_next;
use crate::config::Config;
use crate::description::{Description, FeedForwardDescription, ProjectionLayout};
use crate::mlx_lm::MlxLm;
use crate::options::Options;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let intermediate = config.size("intermediate_size")?;
    let dense = |_| Ok(FeedForwardDescription::dense(intermediate));
    // `mlx_lm` expects the prefix of text-only checkpoints, too.
    let mlx = MlxLm { prefix: "language_model.", ..MlxLm::default() };
    qwen3_next::describe_hybrid(config, options, "qwen3_5", ProjectionLayout::Separate, dense, mlx)
}
