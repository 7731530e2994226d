//! Qwen3.5, the dense hybrid. Reference: `modeling_qwen3_5.py` of transformers; the text part only.

use anyhow::Result;

use crate::decoder::Decoder;
use crate::layers::{FeedForward, ProjectionLayout};
use crate::weights::Weights;
use crate::{Config, Options, qwen3_next};

pub(crate) fn build(config: &Config, w: &mut Weights, options: &Options) -> Result<Decoder> {
    let eps = config.norm_eps()?;
    let intermediate = config.size("intermediate_size")?;
    let layout = ProjectionLayout::Separate;
    qwen3_next::build_hybrid(config, w, options, "qwen3_5", layout, None, &mut |w, _, module, hidden| {
        let norm = w.norm(&format!("{module}.post_attention_layernorm"), hidden, eps, true)?;
        Ok(FeedForward::Dense { norm, mlp: Box::new(w.mlp(&format!("{module}.mlp"), hidden, intermediate)?) })
    })
}
