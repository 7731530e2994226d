//! Qwen3.5-MoE: the hybrid of Qwen3.5 with a mixture of experts and a shared one in every layer. Reference:
//! `modeling_qwen3_5_moe.py` of transformers; the text part only.

use anyhow::Result;

use crate::decoder::Decoder;
use crate::layers::{FeedForward, Moe, ProjectionLayout};
use crate::qwen3_moe::expert_count;
use crate::weights::Weights;
use crate::{Config, Options, qwen3_next};

pub(crate) fn build(config: &Config, w: &mut Weights, options: &Options) -> Result<Decoder> {
    let eps = config.norm_eps()?;
    let k = options.experts_per_token.map_or_else(|| config.size("num_experts_per_tok"), Ok)?;
    let shared = config.size("shared_expert_intermediate_size")?;
    let experts = Some((expert_count(config)?, k));
    let layout = ProjectionLayout::Separate;
    qwen3_next::build_hybrid(config, w, options, "qwen3_5_moe", layout, experts, &mut |w, _, module, hidden| {
        let norm = w.norm(&format!("{module}.post_attention_layernorm"), hidden, eps, true)?;
        // This architecture always divides by the sum; its config has no `norm_topk_prob`.
        let moe = Moe::load(w, config, &format!("{module}.mlp"), k, true, Some(shared))?;
        Ok(FeedForward::Moe { norm, moe: Box::new(moe) })
    })
}
