//! Feed-forward layers: a dense gated one, or a mixture of experts.

use anyhow::Result;
use sluice_backend::{Backend, Mlp, Moe, MoeId, Norm, Routing, Tensor};

use crate::description::FeedForwardDescription;
use crate::weights::Weights;

/// The second half of a layer.
pub enum FeedForward {
    Dense { norm: Norm, mlp: Box<Mlp> },
    Moe(MoeId),
}

impl FeedForward {
    /// The second half of `module` (`layers.N`); `before`: the mixture of the layer right before, if it has one.
    pub fn load(
        w: &mut Weights,
        d: &FeedForwardDescription,
        module: &str,
        before: Option<MoeId>,
    ) -> Result<FeedForward> {
        let hidden = w.hidden();
        let norm = w.norm(&format!("{module}.post_attention_layernorm"), hidden)?;
        let module = format!("{module}.mlp");
        match d {
            FeedForwardDescription::Dense { intermediate } => {
                Ok(FeedForward::Dense { norm, mlp: Box::new(w.mlp(&module, hidden, *intermediate)?) })
            }
            FeedForwardDescription::Moe(d) => {
                let moe = Moe {
                    norm,
                    router: w.linear(&format!("{module}.gate"), d.count, hidden)?,
                    scoring: d.scoring.clone(),
                    experts: w.experts(&module, d.count, hidden, d.intermediate)?,
                    shared: d.shared.map(|width| w.shared_expert(&module, hidden, width)).transpose()?,
                };
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
    pub fn forward(&self, backend: &mut dyn Backend, x: Tensor) {
        match self {
            FeedForward::Dense { norm, mlp } => backend.mlp(x, *norm, mlp, x),
            FeedForward::Moe(moe) => backend.mixture(x, *moe, x),
        }
    }

    /// As [`FeedForward::forward`], without what routed experts add. In a mixture `normed` is what they would have been given, and it is returned to whom it
    /// would have gone.
    pub fn forward_but_experts(&self, backend: &mut dyn Backend, x: Tensor, normed: Tensor) -> Option<Routing> {
        match self {
            FeedForward::Dense { .. } => {
                self.forward(backend, x);
                None
            }
            FeedForward::Moe(moe) => Some(backend.mixture_but_experts(x, *moe, normed, x)),
        }
    }
}
