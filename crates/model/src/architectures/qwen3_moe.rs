//! Qwen3-MoE: Qwen3's attention, a mixture of experts in most layers. Reference: `modeling_qwen3_moe.py` of transformers.

use std::sync::Arc;

use anyhow::Result;

use super::qwen3;
use crate::config::Config;
use crate::description::{AttentionDescription, Description, FeedForwardDescription, MoeDescription};
use crate::mlx_lm::{MlxLm, mixture_keys};
use crate::options::Options;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let renormalise = config.flag_or("norm_topk_prob", false)?;
    let moe = MoeDescription::read(config, options.experts_per_token, renormalise)?;
    let feed_forward = sparse_layers(config, moe)?;
    // Unlike Qwen3, this reference does not look at `max_window_layers`: a window holds for all layers.
    let mlx = MlxLm::new(config, "", mixture_keys(config, None, false));
    let attention = AttentionDescription::read(config, false)?;
    qwen3::describe_with(config, options, ("qwen3_moe", attention), 0, feed_forward, mlx)
}

/// Which layers are mixtures, by `decoder_sparse_step` and `mlp_only_layers`; the others are dense.
pub(crate) fn sparse_layers(
    config: &Config,
    moe: MoeDescription,
) -> Result<impl Fn(usize) -> Result<FeedForwardDescription>> {
    let moe = Arc::new(moe);
    let (step, dense) = (config.size_or("decoder_sparse_step", 1)?, config.indices("mlp_only_layers")?);
    Ok(move |layer: usize| {
        let sparse = !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
        Ok(match sparse {
            true => FeedForwardDescription::Moe(Arc::clone(&moe)),
            false => FeedForwardDescription::dense(config.size("intermediate_size")?),
        })
    })
}
