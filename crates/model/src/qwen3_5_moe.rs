//! Qwen3.5-MoE: the hybrid of Qwen3.5 with a mixture of experts and a shared one in every layer. Reference:
//! `modeling_qwen3_5_moe.py` of transformers; the text part only.

use std::sync::Arc;

use anyhow::Result;

use crate::description::{Description, FeedForwardDescription, MoeDescription, ProjectionLayout};
use crate::mlx::Mlx;
use crate::{Config, Options, qwen3_next};

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let shared = Some(config.size("shared_expert_intermediate_size")?);
    // This architecture always divides by the sum; its config has no `norm_topk_prob`.
    let moe = Arc::new(MoeDescription { shared, ..MoeDescription::read(config, options.experts_per_token, true)? });
    let mixture = |_| Ok(FeedForwardDescription::Moe(Arc::clone(&moe)));
    // Also where the checkpoint has no other part.
    let mlx = Mlx { prefix: "language_model.", ..Mlx::default() };
    qwen3_next::describe_hybrid(config, options, "qwen3_5_moe", ProjectionLayout::Separate, mixture, mlx)
}
