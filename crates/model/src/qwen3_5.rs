//! Qwen3.5, the dense hybrid. Reference: `modeling_qwen3_5.py` of transformers; the text part only.

use anyhow::Result;

use crate::description::{Description, FeedForwardDescription, ProjectionLayout};
use crate::mlx::Mlx;
use crate::{Config, Options, qwen3_next};

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let intermediate = config.size("intermediate_size")?;
    let dense = |_| Ok(FeedForwardDescription::Dense { intermediate });
    // Also where the checkpoint has no other part.
    let mlx = Mlx { prefix: "language_model.", ..Mlx::default() };
    qwen3_next::describe_hybrid(config, options, "qwen3_5", ProjectionLayout::Separate, dense, mlx)
}
