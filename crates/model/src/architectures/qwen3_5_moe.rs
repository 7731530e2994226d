//! Qwen3.5-MoE: the hybrid of Qwen3.5 with a mixture of experts and a shared one in every layer. Reference:
//! `modeling_qwen3_5_moe.py` of transformers; the text part only.

use std::sync::Arc;

use anyhow::Result;

use super::qwen3_next;
use crate::config::Config;
use crate::description::{
    Description, FeedForwardDescription, MoeDescription, ProjectionLayout, SharedExpertDescription,
};
use crate::mlx_lm::MlxLm;
use crate::options::Options;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let shared = Some(SharedExpertDescription::read(config)?);
    // This architecture always divides by the sum; its config has no `norm_topk_prob`.
    let moe = Arc::new(MoeDescription { shared, ..MoeDescription::read(config, options.experts_per_token, true)? });
    let mixture = |_| Ok(FeedForwardDescription::Moe(Arc::clone(&moe)));
    // `mlx_lm` expects the prefix of text-only checkpoints, too.
    let mlx = MlxLm { prefix: "language_model.", ..MlxLm::default() };
    qwen3_next::describe_hybrid(config, options, "qwen3_5_moe", ProjectionLayout::Separate, mixture, mlx)
}
