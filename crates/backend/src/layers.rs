//! The arguments of operations: the parts of a layer, over handles.

use std::ops::Range;

use sluice_kernels::route::Scoring;

use crate::memory::{MatrixId, RotaryId, Tensor};

/// Rows of a weight matrix, with an optional bias: `y = W[rows] x + b`.
#[derive(Clone, Debug)]
pub struct Linear {
    /// The matrix.
    pub matrix: MatrixId,
    /// The rows of it that are used.
    pub rows: Range<usize>,
    /// `[rows.len()]`
    pub bias: Option<Tensor>,
}

/// RMS norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// `[1, cols]`, with 1 already added where the model centres it at zero.
    pub weight: Tensor,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// One projection of a [`Operations::project`](crate::Operations::project): `out[:, ..] = linear(x)`, `out` is `[tokens, linear.rows]`.
#[derive(Clone, Debug)]
pub struct Projection {
    /// The weights.
    pub linear: Linear,
    /// `[tokens, linear.rows]`
    pub out: Tensor,
}

/// One attention layer. Sources: Vaswani et al. 2017; grouped queries Ainslie et al. 2023.
#[derive(Clone, Debug)]
pub struct AttentionLayer {
    /// `[tokens, heads * (head_dim or, with `gated`, 2 head_dim: query then gate)]`; may be normalised and rotated in place.
    pub q: Tensor,
    /// `[tokens, kv_heads * head_dim]`; as `q`.
    pub k: Tensor,
    /// `[tokens, kv_heads * head_dim]`
    pub v: Tensor,
    /// `[tokens, heads * head_dim]`
    pub out: Tensor,
    /// Query heads.
    pub heads: usize,
    /// Each head of `q` is followed by a gate: the output is multiplied by its sigmoid.
    pub gated: bool,
    /// The norm of each head of q and k, before the rotation.
    pub q_norm: Option<Norm>,
    /// As `q_norm`.
    pub k_norm: Option<Norm>,
    /// The rotary embedding of queries and keys.
    pub rotary: RotaryId,
    /// The cache group.
    pub group: usize,
    /// The layer in that cache group.
    pub layer: usize,
    /// Keys and values are those that an earlier layer of the model has stored there (Gemma 3n): `k`, `v` and `k_norm` are not used.
    pub shared: bool,
    /// Scores are multiplied by it.
    pub scale: f32,
    /// The number of last positions that a token sees, its own among them. `None`: all.
    pub window: Option<usize>,
    /// Scores become `cap * tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// `[1, heads]`: an additional term of each head's softmax, without a value.
    pub sinks: Option<Tensor>,
    /// A token sees what the last [`Operations::index`](crate::Operations::index) of the step has selected of this layer's cache group. Such a layer has no window.
    pub selected: bool,
}

/// A factor for each position.
#[derive(Clone, Copy, Debug)]
pub struct RowFactors {
    /// `[1, steps]`: the factor of position p is element `p / period`, or the last one if there are fewer.
    pub table: Tensor,
    /// Positions that share a factor.
    pub period: usize,
}

/// Work on each element or head between the fused operations. Every tensor has a row for each token of the step.
#[derive(Clone, Copy, Debug)]
pub enum Elementwise {
    /// `x *= by`
    Scale {
        /// `[tokens, cols]`
        x: Tensor,
        /// The factor.
        by: f32,
    },
    /// `gate = gelu(gate) * up`, GELU in its tanh form (Hendrycks and Gimpel 2016).
    GeGlu {
        /// `[tokens, cols]`
        gate: Tensor,
        /// `[tokens, cols]`
        up: Tensor,
    },
    /// `gate = silu(gate) * up` (Shazeer 2020).
    SwiGlu {
        /// `[tokens, cols]`
        gate: Tensor,
        /// `[tokens, cols]`
        up: Tensor,
    },
    /// `gate = silu(g) * u` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)` (GLM-5.3).
    ClampedSwiGlu {
        /// `[tokens, cols]`
        gate: Tensor,
        /// `[tokens, cols]`
        up: Tensor,
        /// The bound of gate and up.
        limit: f32,
    },
    /// `gate = (beta * tanh(gate / beta) * sigmoid(gate)) * (linear * tanh(up / linear))` (Kimi-K3).
    SiTu {
        /// `[tokens, cols]`
        gate: Tensor,
        /// `[tokens, cols]`
        up: Tensor,
        /// The bound of what the gate is multiplied by its sigmoid.
        beta: f32,
        /// The bound of up.
        linear: f32,
    },
    /// `x *= sigmoid(gate)`
    SigmoidGate {
        /// `[tokens, cols]`
        x: Tensor,
        /// `[tokens, cols]`
        gate: Tensor,
    },
    /// The beginning of a block that attends to residual streams (Kimi-K3): `out` = the mixture of them by a softmax of their scores.
    AttendStreams {
        /// `[tokens, n * hidden]`, for at most 16 streams.
        streams: Tensor,
        /// A stream's score is the sum of what this norm makes of it.
        norm: Norm,
        /// `[tokens, hidden]`
        out: Tensor,
    },
    /// The end of a block between residual streams: each becomes a share of `x` and shares of all of them, by what [`Operations::collapse`](crate::Operations::collapse) has made of them before.
    Expand {
        /// `[tokens, hidden]`
        x: Tensor,
        /// `[tokens, (2 + n) * n]` for n streams.
        weights: Tensor,
        /// `[tokens, n * hidden]`
        streams: Tensor,
    },
    /// `out` = the plain mean of residual streams.
    Mean {
        /// `[tokens, n * hidden]`
        streams: Tensor,
        /// `[tokens, hidden]`
        out: Tensor,
    },
    /// `out = norm(x)`, in each run of `group` columns with its own weights: the norm has as many as `x` has columns.
    NormGroups {
        /// `[tokens, cols]`
        x: Tensor,
        /// The norm.
        norm: Norm,
        /// Columns of a run, which divide `cols`.
        group: usize,
        /// `[tokens, cols]`, which may be `x`.
        out: Tensor,
    },
    /// `x = silu(x / by)`
    DividedSilu {
        /// `[tokens, cols]`
        x: Tensor,
        /// The divisor.
        by: f32,
    },
    /// The beginning of a block between residual streams with gates: `out` = the mean of all streams, each element times the sigmoid of its gate.
    GatedMean {
        /// `[tokens, n * hidden]`
        gates: Tensor,
        /// `[tokens, n * hidden]`, normed.
        streams: Tensor,
        /// `[tokens, hidden]`
        out: Tensor,
    },
    /// The end of such a block: to each stream, `2 * sigmoid(logit / n)` times `x` is added.
    Inject {
        /// `[tokens, hidden]`
        x: Tensor,
        /// `[tokens, n]` for n streams.
        logits: Tensor,
        /// `[tokens, n * hidden]`
        streams: Tensor,
    },
    /// `x = max(x, 0)^2` (So et al. 2021).
    SquaredRelu {
        /// `[tokens, cols]`
        x: Tensor,
    },
    /// `out = 0`
    Zero {
        /// `[tokens, cols]`
        out: Tensor,
    },
    /// `out = norm(x)`, in each run of as many columns as the norm has.
    Norm {
        /// `[tokens, cols]`
        x: Tensor,
        /// The norm, over a number of columns that divides `cols`.
        norm: Norm,
        /// `[tokens, cols]`, which may be `x`.
        out: Tensor,
    },
    /// Each row of `x` is multiplied by the factor of its token's position.
    ScaleRows {
        /// `[tokens, cols]`
        x: Tensor,
        /// By position.
        factors: RowFactors,
    },
    /// `residual += norm(x)`, in each run of as many columns as the norm has; nothing is promised about `x` afterwards.
    AddNormed {
        /// `[tokens, cols]`
        x: Tensor,
        /// The norm, over a number of columns that divides `cols`.
        norm: Norm,
        /// `[tokens, cols]`
        residual: Tensor,
    },
    /// `out[:, i] = x[:, order[i]]`: inputs follow columns that are in the order of activations.
    Gather {
        /// `[tokens, any]`
        x: Tensor,
        /// `[1, cols]`: numbers of columns of `x`, below 2^24.
        order: Tensor,
        /// `[tokens, cols]`, no part of `x`.
        out: Tensor,
    },
    /// The last elements of each run of `head` columns, pairs beside each other, are turned by the angles of the token's position, or back by them (DeepSeek-V4).
    TurnPairs {
        /// `[tokens, heads * head]`
        x: Tensor,
        /// Columns of a run: at least as many as are turned.
        head: usize,
        /// The angles.
        rotary: RotaryId,
        /// Turns back.
        back: bool,
    },
    /// In each run of `head` columns, elements 2i and 2i + 1 go to i and i + head / 2.
    SplitPairs {
        /// `[tokens, heads * head]`
        x: Tensor,
        /// Even.
        head: usize,
    },
}

/// The shape of a GatedDeltaNet layer (Yang et al. 2024, as in Qwen3-Next).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values: a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements of a query and of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Taps of the short convolution.
    pub taps: usize,
    /// Value head v uses key head `v % key_heads`, as GGUF has them; otherwise `v / (value_heads / key_heads)`.
    pub tiled: bool,
}

impl DeltaShape {
    /// Channels of the convolution: q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// The key head that a value head uses.
    pub fn key_head(&self, value_head: usize) -> usize {
        if self.tiled { value_head % self.key_heads } else { value_head / (self.value_heads / self.key_heads) }
    }

    /// f32 elements of one layer's recurrent state: a matrix `[key_dim, value_dim]` per value head, then the last
    /// `taps - 1` inputs of the convolution.
    pub fn state_len(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim + (self.taps - 1) * self.channels()
    }
}

/// One GatedDeltaNet layer.
#[derive(Clone, Debug)]
pub struct DeltaLayer {
    /// Heads and dimensions.
    pub shape: DeltaShape,
    /// `[tokens, channels]`: q, k, v before the convolution.
    pub qkv: Tensor,
    /// `[tokens, value_heads * value_dim]`
    pub z: Tensor,
    /// `[tokens, value_heads]`: write strength before its sigmoid.
    pub b: Tensor,
    /// `[tokens, value_heads]`: input of the decay.
    pub a: Tensor,
    /// `[tokens, value_heads * value_dim]`
    pub out: Tensor,
    /// `[taps, channels]`: the oldest tap first.
    pub conv: Tensor,
    /// `[1, value_heads]`: what the decay's softplus is multiplied by, `-exp(A_log)`.
    pub decay: Tensor,
    /// `[1, value_heads]`: added to `a`.
    pub dt_bias: Tensor,
    /// The norm of the output, over each head.
    pub norm: Norm,
    /// What is normed is multiplied by the sigmoid of `z`, and not by its SiLU (Qwen4-Exp).
    pub sigmoid_gate: bool,
    /// The recurrent layer, counted from 0.
    pub layer: usize,
}

/// A dense feed-forward layer: `down(silu(gate(x)) * up(x))`. Gate and up have no bias.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// `[intermediate, hidden]`, goes through SiLU.
    pub gate: Linear,
    /// `[intermediate, hidden]`
    pub up: Linear,
    /// `[hidden, intermediate]`
    pub down: Linear,
}

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
