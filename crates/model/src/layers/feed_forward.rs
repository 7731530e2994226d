//! Feed-forward layers: a dense gated one, or a mixture of experts.

use anyhow::Result;
use sluice_backend::{Mlp, Moe, MoeId, Norm, Operations, Routing, SharedExpert, Tensor};

use crate::description::FeedForwardDescription;
use crate::weights::Weights;

/// The second half of a layer.
pub enum FeedForward {
    Dense { norm: Norm, mlp: Box<Mlp> },
    Moe(MoeId),
}

impl FeedForward {
    /// The second half of layer `at`; `before`: the mixture of the layer right before, if it has one.
    pub fn load(w: &mut Weights, d: &FeedForwardDescription, at: usize, before: Option<MoeId>) -> Result<FeedForward> {
        let norm = w.norm(at, "post_attention_layernorm")?;
        match d {
            FeedForwardDescription::Dense { .. } => Ok(FeedForward::Dense { norm, mlp: Box::new(w.mlp(at, "mlp")?) }),
            FeedForwardDescription::Moe(d) => {
                let router = w.linear(at, "mlp.gate")?;
                let experts = w.experts(at)?;
                let shared = match d.shared {
                    Some(_) => Some(SharedExpert {
                        mlp: w.mlp(at, "mlp.shared_expert")?,
                        gate: Some(w.linear(at, "mlp.shared_expert_gate")?),
                    }),
                    None => None,
                };
                let moe = Moe { norm, router, scoring: d.scoring.clone(), experts, shared };
                Ok(FeedForward::Moe(w.backend().moe(moe, before)?))
            }
        }
    }

    pub fn moe(&self) -> Option<MoeId> {
        match self {
            FeedForward::Dense { .. } => None,
            FeedForward::Moe(moe) => Some(*moe),
        }
    }

    /// `x += feed_forward(norm(x))`
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor) {
        match self {
            FeedForward::Dense { norm, mlp } => backend.mlp(x, *norm, mlp, x),
            FeedForward::Moe(moe) => backend.mixture(x, *moe, x),
        }
    }

    /// As [`FeedForward::forward`], without what routed experts add. In a mixture `normed` is what they would have been given, and it is returned to whom it
    /// would have gone.
    pub fn forward_but_experts(&self, backend: &mut dyn Operations, x: Tensor, normed: Tensor) -> Option<Routing> {
        match self {
            FeedForward::Dense { .. } => {
                self.forward(backend, x);
                None
            }
            FeedForward::Moe(moe) => Some(backend.mixture_but_experts(x, *moe, normed, x)),
        }
    }
}
