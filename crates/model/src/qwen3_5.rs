//! Qwen3.5, the dense hybrid. Reference: `modeling_qwen3_5.py` of transformers; the text part only.

use anyhow::Result;

use crate::description::{Description, FeedForwardDescription, ProjectionLayout};
use crate::{Config, Options, qwen3_next};

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let intermediate = config.size("intermediate_size")?;
    let dense = |_| Ok(FeedForwardDescription::Dense { intermediate });
    qwen3_next::describe_hybrid(config, options, "qwen3_5", ProjectionLayout::Separate, dense)
}
