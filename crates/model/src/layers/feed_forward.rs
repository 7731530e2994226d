//! Feed-forward layers: a dense gated one, or a mixture of experts.

use anyhow::{Result, anyhow, bail};
use sluice_backend::{
    Elementwise, Linear, Mlp, Moe, MoeId, Norm, Operations, Projection, Routing, SharedExpert, Tensor,
};

use super::attention::add_branch;
use crate::description::{CORRECTION_BIAS, DenseActivation, Description, FeedForwardDescription};
use crate::weights::Weights;

/// Activations between the projections of dense layers that no fused operation computes: `[max_tokens, intermediate]` each.
#[derive(Clone, Copy)]
pub struct FeedForwardScratch {
    gate: Tensor,
    up: Tensor,
}

impl FeedForwardScratch {
    /// As wide as the widest such layer; `None` where there is none.
    pub fn alloc(w: &mut Weights, d: &Description) -> Result<Option<FeedForwardScratch>> {
        let width = |layer: &FeedForwardDescription| match layer {
            FeedForwardDescription::Dense { intermediate, activation, .. } if is_plain(d, *activation) => {
                Some(*intermediate)
            }
            FeedForwardDescription::Dense { .. } | FeedForwardDescription::Moe(_) => None,
        };
        let Some(width) = d.layers.iter().filter_map(|layer| width(&layer.feed_forward)).max() else { return Ok(None) };
        Ok(Some(FeedForwardScratch { gate: w.scratch(width)?, up: w.scratch(width)? }))
    }
}

/// Whether dense layers are several operations: no fused one has GELU, or norms what is put out.
fn is_plain(d: &Description, activation: DenseActivation) -> bool {
    activation == DenseActivation::Gelu || d.output_norms
}

/// A dense layer with GELU, or with a norm on what it puts out.
pub struct PlainDense {
    /// Of its input, if that is normed.
    norm: Option<Norm>,
    activation: DenseActivation,
    inputs: [Projection; 2],
    down: Linear,
    branch: Option<(Tensor, Norm)>,
}

/// The second half of a layer.
pub enum FeedForward {
    Dense { norm: Norm, mlp: Box<Mlp> },
    Plain(Box<PlainDense>),
    Moe(MoeId),
}

impl FeedForward {
    /// The second half of layer `at`; `before`: the mixture of the layer right before, if it has one.
    pub fn load(
        w: &mut Weights,
        model: &Description,
        (scratch, branch): (Option<FeedForwardScratch>, Option<Tensor>),
        at: usize,
        before: Option<MoeId>,
    ) -> Result<FeedForward> {
        let d = &model.layer(at).expect("a layer of this model").feed_forward;
        let (norm, branch) = match branch {
            Some(to) => {
                let norm = if model.input_norms { Some(w.norm(at, "pre_feedforward_layernorm")?) } else { None };
                (norm, Some((to, w.norm(at, "post_feedforward_layernorm")?)))
            }
            None => (Some(w.norm(at, "post_attention_layernorm")?), None),
        };
        let norm_of_input = || norm.ok_or_else(|| anyhow!("layer {at}: its input has no norm"));
        match d {
            FeedForwardDescription::Dense { intermediate, activation, .. } if is_plain(model, *activation) => {
                let Mlp { gate, up, down } = w.mlp(at, "mlp")?;
                let scratch = scratch.expect("scratch of such layers");
                let [to_gate, to_up] = [scratch.gate, scratch.up].map(|t| t.columns(0..*intermediate));
                let inputs = [Projection { linear: gate, out: to_gate }, Projection { linear: up, out: to_up }];
                Ok(FeedForward::Plain(Box::new(PlainDense { norm, activation: *activation, inputs, down, branch })))
            }
            _ if branch.is_some() => {
                bail!("layer {at}: a norm of what this feed-forward part puts out is not supported")
            }
            FeedForwardDescription::Dense { .. } => {
                Ok(FeedForward::Dense { norm: norm_of_input()?, mlp: Box::new(w.mlp(at, "mlp")?) })
            }
            FeedForwardDescription::Moe(d) => {
                let norm = norm_of_input()?;
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
            FeedForward::Dense { .. } | FeedForward::Plain(_) => None,
            FeedForward::Moe(moe) => Some(*moe),
        }
    }

    /// `x += feed_forward(norm(x))`
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor) {
        match self {
            FeedForward::Dense { norm, mlp } => backend.mlp(x, *norm, mlp, x),
            FeedForward::Plain(dense) => {
                backend.project(x, dense.norm, &dense.inputs);
                let [gate, up] = [0, 1].map(|i| dense.inputs[i].out.first_rows(x.rows));
                backend.elementwise(&match dense.activation {
                    DenseActivation::Gelu => Elementwise::GeGlu { gate, up },
                    DenseActivation::Silu => Elementwise::SwiGlu { gate, up },
                });
                add_branch(backend, gate, &dense.down, dense.branch, x);
            }
            FeedForward::Moe(moe) => backend.mixture(x, *moe, x),
        }
    }

    /// The same without the routed experts. In a mixture their input goes to `normed`, and the experts that each token would have taken are returned.
    pub fn forward_but_experts(&self, backend: &mut dyn Operations, x: Tensor, normed: Tensor) -> Option<Routing> {
        match self {
            FeedForward::Dense { .. } | FeedForward::Plain(_) => {
                self.forward(backend, x);
                None
            }
            FeedForward::Moe(moe) => Some(backend.mixture_but_experts(x, *moe, normed, x)),
        }
    }
}
