//! The arguments of mixtures of experts.

use sluice_kernels::route::Scoring;

use crate::layers::{Linear, Mlp, Norm};
use crate::memory::{MatrixId, Tensor};

/// An expert that every token takes, scaled by the sigmoid of `gate` (a `[1, hidden]` matrix) where there is one. Its projections have no bias.
#[derive(Clone, Debug)]
pub struct SharedExpert {
    /// The expert.
    pub mlp: Mlp,
    /// `[1, hidden]`: its sigmoid scales the expert.
    pub gate: Option<Linear>,
}

/// The place of one projection of all experts: one stacked matrix, or a matrix each.
#[derive(Clone, Debug)]
pub enum ExpertMatrix {
    /// Expert e has rows `e * stride + offset ..` of it.
    Stacked {
        /// The matrix of all experts.
        matrix: MatrixId,
        /// Rows from one expert to the next.
        stride: usize,
        /// The first row of expert 0.
        offset: usize,
        /// Rows of the matrix from one row of an expert to its next: 2 where those of gate and up take turns (gpt-oss), else 1.
        step: usize,
    },
    /// A matrix for each expert.
    Single(Vec<MatrixId>),
}

impl ExpertMatrix {
    /// Rows of the matrix from one row of an expert to its next.
    pub fn step(&self) -> usize {
        match self {
            ExpertMatrix::Stacked { step, .. } => *step,
            ExpertMatrix::Single(_) => 1,
        }
    }
}

/// What an expert computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertKind {
    /// Parts are gate, up and down: `down(silu(gate(x)) * up(x))`.
    SwiGlu,
    /// The same parts: `down(gelu(gate(x)) * up(x))`, GELU in its tanh form (Gemma 4).
    GeGlu,
    /// The same parts. With `g = min(gate(x), limit)` and `u = clamp(up(x), -limit, limit)`: `down((u + added) * (g * sigmoid(g * alpha)))` (gpt-oss; GLM-5.3 with alpha 1 and nothing added).
    ClampedSwiGlu {
        /// What the gate is multiplied by within the sigmoid.
        alpha: f32,
        /// The bound of gate and up.
        limit: f32,
        /// What is added to up.
        added: f32,
    },
    /// The same parts. With g and u of both: `down((beta * tanh(g / beta) * sigmoid(g)) * (linear * tanh(u / linear)))` (Kimi-K3).
    SiTu {
        /// The bound of what the gate is multiplied by its sigmoid.
        beta: f32,
        /// The bound of up.
        linear: f32,
    },
    /// Parts are up and down, without a gate: `down(max(up(x), 0)^2)` (Nemotron-H).
    SquaredRelu,
}

/// What is added to the projections of a layer's experts: a row for each expert.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBiases {
    /// `[experts, intermediate]`
    pub gate: Tensor,
    /// `[experts, intermediate]`
    pub up: Tensor,
    /// `[experts, hidden]`
    pub down: Tensor,
}

/// One projection of every expert of a layer: `[rows, cols]` each.
#[derive(Clone, Debug)]
pub struct ExpertPart {
    /// Where it is.
    pub matrix: ExpertMatrix,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

/// The experts of a layer.
#[derive(Clone, Debug)]
pub struct Experts {
    /// The number of experts.
    pub count: usize,
    /// What each computes.
    pub kind: ExpertKind,
    /// The projections, in the order that `kind` says.
    pub parts: Vec<ExpertPart>,
    /// What is added to their results, if anything is.
    pub biases: Option<ExpertBiases>,
    /// The order in which the first two projections of each expert take the input, if not its own: `[experts, hidden]`, as in [`Elementwise::Gather`].
    pub order: Option<Tensor>,
}

impl Experts {
    /// Elements of an expert's input and output.
    pub fn hidden(&self) -> usize {
        self.parts[0].cols
    }

    /// Elements of an expert's hidden activations.
    pub fn intermediate(&self) -> usize {
        self.parts[0].rows
    }

    /// The matrix in which the rows of gate and up take turns, and the rows of an expert in it; `None` if each is by itself.
    ///
    /// # Errors
    /// Rows that are apart in another way than one of gate followed by one of up.
    pub fn interleaved(&self) -> Result<Option<(MatrixId, usize)>, String> {
        let [gate, up, down] = &self.parts[..] else { return Ok(None) };
        if [gate, up, down].iter().all(|part| part.matrix.step() == 1) {
            return Ok(None);
        }
        match (&gate.matrix, &up.matrix) {
            (
                &ExpertMatrix::Stacked { matrix, stride, offset: 0, step: 2 },
                &ExpertMatrix::Stacked { matrix: other, stride: others, offset: 1, step: 2 },
            ) if matrix == other && stride == others && stride == 2 * gate.rows && down.matrix.step() == 1 => {
                Ok(Some((matrix, stride)))
            }
            _ => Err("experts whose rows are apart".to_owned()),
        }
    }
}

/// A mixture of experts: `x += sum of weight * expert(norm(x))` over the experts that its router chooses, and the shared expert.
#[derive(Clone, Debug)]
pub struct Moe {
    /// Norm of the input; `None`: it is taken as it is.
    pub norm: Option<Norm>,
    /// Norm of the router's input, where it has one of its own (Gemma 4).
    pub router_norm: Option<Norm>,
    /// `[tokens, hidden of the experts]`: what routed experts take, where it is made of the input by a projection before (Nemotron 3 Super). They add to as many columns, and
    /// no shared expert is a part of the mixture.
    pub latent: Option<Tensor>,
    /// `[experts, hidden]`
    pub router: Linear,
    /// How router logits become experts and weights.
    pub scoring: Scoring,
    /// The routed experts.
    pub experts: Experts,
    /// The expert that every token takes.
    pub shared: Option<SharedExpert>,
}

impl Moe {
    /// The norm of the router's input: its own, or that of the mixture.
    pub fn norm_of_router(&self) -> Option<&Norm> {
        self.router_norm.as_ref().or(self.norm.as_ref())
    }
}

/// The experts of each token, and their weights.
#[derive(Clone, Debug, Default)]
pub struct Routing {
    /// Experts per token.
    pub k: usize,
    /// `[tokens, k]`, ascending within a token.
    pub experts: Vec<u32>,
    /// `[tokens, k]`
    pub weights: Vec<f32>,
}

/// The choice of a router in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// The mixture, by its number in the order of registration.
    pub layer: usize,
    /// Experts per token.
    pub k: usize,
    /// `[tokens, k]`, ascending within a token.
    pub experts: Vec<u32>,
    /// The experts that its router would have chosen from the input of the layer before. Empty for the first mixture.
    pub guessed: Vec<u32>,
}
