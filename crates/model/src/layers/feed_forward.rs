//! Feed-forward layers: a dense gated one, or a mixture of experts.

use anyhow::{Result, anyhow};
use sluice_backend::{Mlp, Moe, MoeId, Norm, Operations, Routing, SharedExpert, Tensor};

use crate::description::{CORRECTION_BIAS, FeedForwardDescription};
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
                    Some(shared) => Some(SharedExpert {
                        mlp: w.mlp(at, "mlp.shared_expert")?,
                        gate: shared.gated.then(|| w.linear(at, "mlp.shared_expert_gate")).transpose()?,
                    }),
                    None => None,
                };
                let correction = match d.router.correction_bias {
                    true => w.host_vector(at, CORRECTION_BIAS)?,
                    false => Vec::new(),
                };
                let scoring = d.router.scoring(correction).map_err(|what| anyhow!("{what}"))?;
                let moe = Moe { norm, router, scoring, experts, shared };
                Ok(FeedForward::Moe(w.backend().moe(moe, before)?))
            }
        }
    }

    /// The mixture, if it is one.
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

    /// The same without the routed experts. In a mixture their input goes to `normed`, and the experts that each token would have taken are returned.
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
