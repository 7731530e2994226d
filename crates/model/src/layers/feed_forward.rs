//! Feed-forward layers: a dense gated one, or a mixture of experts.

use anyhow::{Result, anyhow, bail};
use sluice_backend::{
    Elementwise, Mlp, Moe, MoeId, Norm, Operations, Projection, Routing, Scoring, SharedExpert, Tensor,
};

use super::latent_experts::LatentMixture;
use super::ordered::{Inputs, Output};
use crate::description::{
    BESIDE_NORMS, CORRECTION_BIAS, DenseActivation, Description, EXPERT_SCALES, FeedForwardDescription, LatentExperts,
    MoeDescription, ROUTER_SCALE, RouterScoring, TOKEN_EXPERTS,
};
use crate::weights::Weights;

/// Activations between the projections of dense layers that no fused operation computes: `[max_tokens, intermediate]` each.
#[derive(Clone, Copy)]
pub struct FeedForwardScratch {
    gate: Tensor,
    up: Tensor,
    /// What a mixture beside a dense part puts out: `[max_tokens, hidden]`.
    mixed: Option<Tensor>,
    /// What experts behind a projection take and put out: `[max_tokens, size]` each.
    latent: Option<[Tensor; 2]>,
}

impl FeedForwardScratch {
    /// As wide as the widest such layer; `None` where there is none.
    pub fn alloc(w: &mut Weights, d: &Description) -> Result<Option<FeedForwardScratch>> {
        let width = |layer: &FeedForwardDescription| match layer {
            FeedForwardDescription::Dense { intermediate, activation, .. } if is_plain(d, *activation) => {
                Some(*intermediate)
            }
            FeedForwardDescription::Beside { intermediate, .. } => Some(*intermediate),
            FeedForwardDescription::Moe(moe) if has_shared_apart(moe) => moe.shared.map(|s| s.intermediate),
            _ => None,
        };
        let beside = |layer: &FeedForwardDescription| matches!(layer, FeedForwardDescription::Beside { .. });
        let has_beside = d.layers.iter().any(|layer| beside(&layer.feed_forward));
        let Some(width) = d.layers.iter().filter_map(|layer| width(&layer.feed_forward)).max() else { return Ok(None) };
        let mixed = if has_beside { Some(w.scratch(d.hidden)?) } else { None };
        let latent = match d.moe_layers().filter_map(|moe| moe.latent).map(|latent| latent.size).max() {
            Some(size) => Some([w.scratch(size)?, w.scratch(size)?]),
            None => None,
        };
        Ok(Some(FeedForwardScratch { gate: w.scratch(width)?, up: w.scratch(width)?, mixed, latent }))
    }
}

/// Whether dense layers are several operations: no fused one has another activation than SiLU, or norms what is put out.
fn is_plain(d: &Description, activation: DenseActivation) -> bool {
    activation != DenseActivation::Silu || d.output_norms
}

/// Whether a shared expert is added behind the routed ones.
fn has_shared_apart(moe: &MoeDescription) -> bool {
    DenseActivation::of_shared(moe.activation).is_some()
}

/// A dense layer with another activation than SiLU, with a norm on what it puts out, or with columns in an order of their own.
pub struct PlainDense {
    activation: DenseActivation,
    /// Of gate and up, or of up alone.
    inputs: Inputs,
    gate: Tensor,
    up: Tensor,
    down: Output,
}

impl PlainDense {
    fn load(
        w: &mut Weights,
        (at, part): (usize, &str),
        norm: Option<Norm>,
        (scratch, intermediate, activation): (FeedForwardScratch, usize, DenseActivation),
        branch: Option<(Tensor, Norm)>,
    ) -> Result<PlainDense> {
        let inner = [scratch.gate, scratch.up].map(|t| t.columns(0..intermediate));
        if activation == DenseActivation::SquaredRelu {
            let [up, down] = ["up_proj", "down_proj"].map(|name| w.linear(at, &format!("{part}.{name}")));
            let [out, unused] = inner;
            let inputs = Inputs::new(w, norm, vec![Projection { linear: up?, out }])?;
            return Ok(PlainDense { activation, inputs, gate: out, up: unused, down: Output::new(w, down?, branch)? });
        }
        let mlp = w.ordered_mlp(at, part)?;
        PlainDense::new(w, mlp, norm, (inner, activation), branch)
    }

    /// `inner`: where gate and up go.
    fn new(
        w: &mut Weights,
        mlp: Mlp,
        norm: Option<Norm>,
        (inner, activation): ([Tensor; 2], DenseActivation),
        branch: Option<(Tensor, Norm)>,
    ) -> Result<PlainDense> {
        let [gate, up] = inner;
        let projections = vec![Projection { linear: mlp.gate, out: gate }, Projection { linear: mlp.up, out: up }];
        let (inputs, down) = (Inputs::new(w, norm, projections)?, Output::new(w, mlp.down, branch)?);
        Ok(PlainDense { activation, inputs, gate, up, down })
    }

    /// What goes into the last projection.
    fn hidden(&self, backend: &mut dyn Operations, x: Tensor) -> Tensor {
        self.inputs.forward(backend, x);
        let [gate, up] = [self.gate, self.up].map(|t| t.first_rows(x.rows));
        backend.elementwise(&match self.activation {
            DenseActivation::Gelu => Elementwise::GeGlu { gate, up },
            DenseActivation::Silu => Elementwise::SwiGlu { gate, up },
            DenseActivation::ClampedSilu { limit } => Elementwise::ClampedSwiGlu { gate, up, limit },
            DenseActivation::SiTu { beta, linear } => Elementwise::SiTu { gate, up, beta, linear },
            DenseActivation::SquaredRelu => Elementwise::SquaredRelu { x: gate },
        });
        gate
    }
}

/// A dense part and a mixture side by side.
pub struct Beside {
    dense: PlainDense,
    /// What the dense part puts out, then the sum of both, and the norm of each: `[max_tokens, hidden]`.
    sum: Tensor,
    dense_norm: Norm,
    sum_norm: Norm,
    moe: MoeId,
    /// What the mixture puts out, `[max_tokens, hidden]`, and its norm.
    mixed: (Tensor, Norm),
}

impl Beside {
    /// `out += norm(norm(dense(norm(x))) + norm(mixture(norm(x))))`
    fn forward(&self, backend: &mut dyn Operations, x: Tensor, out: Tensor) {
        let [sum, mixed] = [self.sum, self.mixed.0].map(|t| t.first_rows(x.rows));
        // 1. the dense part
        let hidden = self.dense.hidden(backend, x);
        self.dense.down.put(backend, hidden, sum);
        backend.elementwise(&Elementwise::Norm { x: sum, norm: self.dense_norm, out: sum });
        // 2. the mixture
        backend.elementwise(&Elementwise::Zero { out: mixed });
        backend.mixture(x, self.moe, mixed);
        // 3. their sum
        backend.elementwise(&Elementwise::AddNormed { x: mixed, norm: self.mixed.1, residual: sum });
        backend.elementwise(&Elementwise::AddNormed { x: sum, norm: self.sum_norm, residual: out });
    }
}

/// The second half of a layer.
pub enum FeedForward {
    Dense {
        norm: Norm,
        mlp: Box<Mlp>,
    },
    Plain(Box<PlainDense>),
    Moe(MoeId),
    Beside(Box<Beside>),
    /// A mixture, and a shared expert that no fused operation has.
    Shared(Box<(MoeId, PlainDense)>),
    /// The same with experts behind a projection of their own.
    Latent(Box<(LatentMixture, PlainDense)>),
    /// The layer has none.
    None,
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
        let layer = model.layer(at).expect("a layer of this model");
        let (d, is_one_block) = (&layer.feed_forward, layer.is_one_block());
        if matches!(d, FeedForwardDescription::None) {
            return Ok(FeedForward::None);
        }
        let (norm, branch) = match branch {
            Some(to) => {
                let norm = if model.input_norms { Some(w.norm(at, "pre_feedforward_layernorm")?) } else { None };
                (norm, Some((to, w.norm(at, "post_feedforward_layernorm")?)))
            }
            None if is_one_block => (Some(w.norm(at, "input_layernorm")?), None),
            None if model.input_norms => (Some(w.norm(at, "post_attention_layernorm")?), None),
            None => (None, None),
        };
        let norm_of_input = || norm.ok_or_else(|| anyhow!("layer {at}: its input has no norm"));
        match d {
            FeedForwardDescription::Dense { intermediate, activation, .. } if is_plain(model, *activation) => {
                let scratch = scratch.expect("scratch of such layers");
                let dense = PlainDense::load(w, (at, "mlp"), norm, (scratch, *intermediate, *activation), branch)?;
                Ok(FeedForward::Plain(Box::new(dense)))
            }
            FeedForwardDescription::Beside { intermediate, activation, moe } => {
                let scratch = scratch.expect("scratch of such layers");
                let (sum, sum_norm) = branch.ok_or_else(|| anyhow!("layer {at}: what it puts out has no norm"))?;
                let to_mixed = scratch.mixed.expect("of such layers");
                let dense = PlainDense::load(w, (at, "mlp"), norm, (scratch, *intermediate, *activation), None)?;
                let [dense_norm, before_moe, after_moe] = BESIDE_NORMS;
                let (dense_norm, mixed) = (w.norm(at, dense_norm)?, (to_mixed, w.norm(at, after_moe)?));
                let norm = w.norm(at, before_moe)?;
                let moe = load_mixture(w, at, moe, (Some(norm), None), before)?;
                Ok(FeedForward::Beside(Box::new(Beside { dense, sum, dense_norm, sum_norm, moe, mixed })))
            }
            _ if branch.is_some() => {
                bail!("layer {at}: a norm of what this feed-forward part puts out is not supported")
            }
            FeedForwardDescription::Dense { .. } => {
                let (norm, mlp) = (norm_of_input()?, w.ordered_mlp(at, "mlp")?);
                // No fused operation gathers what goes into its products.
                if [&mlp.gate, &mlp.up, &mlp.down].into_iter().any(|linear| w.order_of(linear).is_some()) {
                    let inner = w.gate_and_up(mlp.gate.rows.len())?;
                    let dense = PlainDense::new(w, mlp, Some(norm), (inner, DenseActivation::Silu), None)?;
                    return Ok(FeedForward::Plain(Box::new(dense)));
                }
                Ok(FeedForward::Dense { norm, mlp: Box::new(mlp) })
            }
            FeedForwardDescription::Moe(d) if d.shared.is_some() && has_shared_apart(d) => {
                let activation = DenseActivation::of_shared(d.activation).expect("of such layers");
                let scratch = scratch.expect("scratch of such layers");
                let width = d.shared.map_or(0, |s| s.intermediate);
                let sizes = (scratch, width, activation);
                let shared = PlainDense::load(w, (at, "mlp.shared_expert"), norm, sizes, None)?;
                let routed = MoeDescription { shared: None, ..MoeDescription::clone(d) };
                if let Some(LatentExperts { size, normed }) = d.latent {
                    let inside = scratch.latent.expect("of such layers").map(|t| t.columns(0..size));
                    let moe = load_mixture(w, at, &routed, (norm, Some(inside[0])), before)?;
                    let mixture = LatentMixture::load(w, at, moe, norm, (inside, normed))?;
                    return Ok(FeedForward::Latent(Box::new((mixture, shared))));
                }
                Ok(FeedForward::Shared(Box::new((load_mixture(w, at, &routed, (norm, None), before)?, shared))))
            }
            FeedForwardDescription::None => Ok(FeedForward::None),
            FeedForwardDescription::Moe(d) => Ok(FeedForward::Moe(load_mixture(w, at, d, (norm, None), before)?)),
        }
    }

    /// The mixture, if it is one.
    pub fn moe(&self) -> Option<MoeId> {
        match self {
            FeedForward::Dense { .. } | FeedForward::Plain(_) | FeedForward::None => None,
            FeedForward::Moe(moe) => Some(*moe),
            FeedForward::Shared(both) => Some(both.0),
            FeedForward::Latent(both) => Some(both.0.moe()),
            FeedForward::Beside(both) => Some(both.moe),
        }
    }

    /// `out += feed_forward(norm(x))`
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor, out: Tensor) {
        match self {
            FeedForward::Dense { norm, mlp } => backend.mlp(x, *norm, mlp, out),
            FeedForward::Plain(dense) => {
                let hidden = dense.hidden(backend, x);
                dense.down.add(backend, hidden, out);
            }
            FeedForward::Moe(moe) => backend.mixture(x, *moe, out),
            FeedForward::Beside(both) => both.forward(backend, x, out),
            FeedForward::Shared(both) => {
                // The shared expert's input is that of the routed ones, which they change.
                let hidden = both.1.hidden(backend, x);
                backend.mixture(x, both.0, out);
                both.1.down.add(backend, hidden, out);
            }
            FeedForward::Latent(both) => {
                let hidden = both.1.hidden(backend, x);
                both.0.forward(backend, x, out);
                both.1.down.add(backend, hidden, out);
            }
            FeedForward::None => {}
        }
    }

    /// The same without the routed experts, of a layer that has nothing beside its mixture. In a mixture their input goes to `normed`, and the experts that each token would have taken are returned.
    pub fn forward_but_experts(&self, backend: &mut dyn Operations, x: Tensor, normed: Tensor) -> Option<Routing> {
        match self {
            FeedForward::Dense { .. } | FeedForward::Plain(_) | FeedForward::Beside(_) | FeedForward::None => {
                self.forward(backend, x, x);
                None
            }
            // Packing refuses to calibrate such experts.
            FeedForward::Latent(_) => panic!("routed experts behind a projection, which they are no sum without"),
            FeedForward::Moe(moe) => Some(backend.mixture_but_experts(x, *moe, normed, x)),
            FeedForward::Shared(both) => {
                let hidden = both.1.hidden(backend, x);
                let routing = backend.mixture_but_experts(x, both.0, normed, x);
                both.1.down.add(backend, hidden, x);
                Some(routing)
            }
        }
    }
}

/// The mixture `d` of layer `at`, whose input goes through `norm`; `latent`: what its experts take in place of that; `before`: the mixture of the layer right before.
fn load_mixture(
    w: &mut Weights,
    at: usize,
    d: &MoeDescription,
    (norm, latent): (Option<Norm>, Option<Tensor>),
    before: Option<MoeId>,
) -> Result<MoeId> {
    let router_norm = if d.router.own_norm { Some(w.router_norm(at, ROUTER_SCALE)?) } else { None };
    let router = w.linear(at, "mlp.gate")?;
    let experts = w.experts(at)?;
    let shared = match d.shared {
        Some(shared) => Some(SharedExpert {
            mlp: w.mlp(at, "mlp.shared_expert")?,
            gate: shared.gated.then(|| w.linear(at, "mlp.shared_expert_gate")).transpose()?,
        }),
        None => None,
    };
    let stored = match (d.router.correction_bias, d.router.expert_scales) {
        (true, _) => w.host_vector(at, CORRECTION_BIAS)?,
        (false, true) => w.host_vector(at, EXPERT_SCALES)?,
        (false, false) => Vec::new(),
    };
    let scoring = match d.router.scoring {
        RouterScoring::ByToken { .. } => {
            let table = w.numbers(at, TOKEN_EXPERTS)?.into();
            Scoring::ByToken { k: d.router.k, table, scale: d.router.scale }
        }
        _ => d.router.scoring(stored).map_err(|what| anyhow!("{what}"))?,
    };
    scoring.check(d.count).map_err(|what| anyhow!("layer {at}: {what}"))?;
    w.backend().moe(Moe { norm, router_norm, latent, router, scoring, experts, shared }, before)
}
