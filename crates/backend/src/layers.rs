//! The arguments of operations: the parts of a layer, over handles.

use std::ops::Range;

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
