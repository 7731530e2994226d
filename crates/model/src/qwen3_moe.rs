//! Qwen3-MoE: Qwen3's attention, a mixture of experts in most layers. Reference: `modeling_qwen3_moe.py` of transformers.

use anyhow::Result;

use crate::decoder::Decoder;
use crate::layers::{FeedForward, Moe};
use crate::weights::Weights;
use crate::{Config, Options, qwen3};

pub(crate) fn build(config: &Config, w: &mut Weights, options: &Options) -> Result<Decoder> {
    let eps = config.norm_eps()?;
    let k = options.experts_per_token.map_or_else(|| config.size("num_experts_per_tok"), Ok)?;
    let renormalise = config.flag_or("norm_topk_prob", false)?;
    let sparse = SparseLayers::read(config)?;
    let experts = Some((expert_count(config)?, k));
    qwen3::build_with(config, w, options, "qwen3_moe", experts, &mut |w, layer, module, hidden| {
        let norm = w.norm(&format!("{module}.post_attention_layernorm"), hidden, eps, false)?;
        let module = format!("{module}.mlp");
        if sparse.has(layer) {
            return Ok(FeedForward::Moe { norm, moe: Box::new(Moe::load(w, config, &module, k, renormalise, None)?) });
        }
        let mlp = w.mlp(&module, hidden, config.size("intermediate_size")?)?;
        Ok(FeedForward::Dense { norm, mlp: Box::new(mlp) })
    })
}

/// Experts per layer: `num_experts`, or `num_local_experts` as newer versions of the reference write it.
pub(crate) fn expert_count(config: &Config) -> Result<usize> {
    let key = if config.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    config.size(key)
}

/// Which layers have experts: `decoder_sparse_step` and `mlp_only_layers`.
pub(crate) struct SparseLayers {
    step: usize,
    dense: Vec<usize>,
}

impl SparseLayers {
    pub(crate) fn read(config: &Config) -> Result<SparseLayers> {
        Ok(SparseLayers { step: config.size_or("decoder_sparse_step", 1)?, dense: config.indices("mlp_only_layers")? })
    }

    pub(crate) fn has(&self, layer: usize) -> bool {
        !self.dense.contains(&layer) && (layer + 1).is_multiple_of(self.step)
    }
}
