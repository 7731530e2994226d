//! What operations are given: the parts of a layer, over opaque buffers.

use std::ops::Range;

use sluice_kernels::route::Scoring;

use crate::memory::{MatrixId, RotaryId, Tensor};

/// Rows of a weight matrix, with an optional bias: `y = W[rows] x + b`.
#[derive(Clone, Debug)]
pub struct Linear {
    pub matrix: MatrixId,
    pub rows: Range<usize>,
    /// `[rows.len()]`
    pub bias: Option<Tensor>,
}

/// RMS norm: `weight` is `[1, cols]`, with 1 already added where the model centres it at zero.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    pub weight: Tensor,
    pub eps: f32,
}

/// One projection of a [`Backend::project`]: `out[:, ..] = linear(x)`, `out` is `[tokens, linear.rows]`.
#[derive(Clone, Debug)]
pub struct Projection {
    pub linear: Linear,
    pub out: Tensor,
}

/// One attention layer. Sources: Vaswani et al. 2017; grouped queries Ainslie et al. 2023.
#[derive(Clone, Debug)]
pub struct AttentionLayer {
    /// `[tokens, heads * (head_dim or, with `gated`, 2 head_dim: query then gate)]`; may be normed and turned in place.
    pub q: Tensor,
    /// `[tokens, kv_heads * head_dim]`; as `q`.
    pub k: Tensor,
    /// `[tokens, kv_heads * head_dim]`
    pub v: Tensor,
    /// `[tokens, heads * head_dim]`
    pub out: Tensor,
    pub heads: usize,
    /// Each head of `q` is followed by a gate: the output is multiplied by its sigmoid.
    pub gated: bool,
    /// Over each head of q and k, before the rotation.
    pub q_norm: Option<Norm>,
    pub k_norm: Option<Norm>,
    pub rotary: RotaryId,
    /// Which of the step's cache groups, and which layer of it.
    pub group: usize,
    pub layer: usize,
    pub scale: f32,
    /// Only the last so many positions are visible, the token's own among them.
    pub window: Option<usize>,
    /// Scores become `cap * tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// `[1, heads]`: one more term of each head's softmax, which has no value.
    pub sinks: Option<Tensor>,
}

/// The shape of a GatedDeltaNet layer (Yang et al. 2024, as in Qwen3-Next).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Taps of the short convolution.
    pub taps: usize,
}

impl DeltaShape {
    /// Channels of the convolution: q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
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
    pub shape: DeltaShape,
    /// `[tokens, channels]`: q, k, v before the convolution.
    pub qkv: Tensor,
    /// `[tokens, value_heads * value_dim]`
    pub z: Tensor,
    /// `[tokens, value_heads]` each
    pub b: Tensor,
    pub a: Tensor,
    /// `[tokens, value_heads * value_dim]`
    pub out: Tensor,
    /// `[taps, channels]`: the oldest tap first.
    pub conv: Tensor,
    /// `[1, value_heads]` each
    pub a_log: Tensor,
    pub dt_bias: Tensor,
    pub norm: Norm,
    /// Which recurrent layer it is.
    pub layer: usize,
}

/// A dense feed-forward layer: `down(silu(gate(x)) * up(x))`. Gate and up have no bias.
#[derive(Clone, Debug)]
pub struct Mlp {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

/// An expert that every token takes, scaled by the sigmoid of `gate` (a `[1, hidden]` matrix) where there is one. Its projections have no bias.
#[derive(Clone, Debug)]
pub struct SharedExpert {
    pub mlp: Mlp,
    pub gate: Option<Linear>,
}

/// Where one projection of every expert lies: in one stacked matrix, or in a matrix each.
#[derive(Clone, Debug)]
pub enum ExpertMatrix {
    /// Expert e has rows `e * stride + offset ..` of it.
    Stacked {
        matrix: MatrixId,
        stride: usize,
        offset: usize,
    },
    Single(Vec<MatrixId>),
}

/// What an expert does with its projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertKind {
    /// Parts are gate, up and down: `down(silu(gate(x)) * up(x))`.
    SwiGlu,
}

/// One projection of every expert of a layer: `[rows, cols]` each.
#[derive(Clone, Debug)]
pub struct ExpertPart {
    pub matrix: ExpertMatrix,
    pub rows: usize,
    pub cols: usize,
}

/// The experts of a layer.
#[derive(Clone, Debug)]
pub struct Experts {
    pub count: usize,
    pub kind: ExpertKind,
    /// As `kind` says.
    pub parts: Vec<ExpertPart>,
}

impl Experts {
    /// Elements of an expert's input and output.
    pub fn hidden(&self) -> usize {
        self.parts[0].cols
    }

    /// Elements of what lies between.
    pub fn intermediate(&self) -> usize {
        self.parts[0].rows
    }
}

/// A mixture of experts: `x += sum of weight * expert(norm(x))` over those that its router chooses, and the shared one.
#[derive(Clone, Debug)]
pub struct Moe {
    pub norm: Norm,
    pub router: Linear,
    pub scoring: Scoring,
    pub experts: Experts,
    pub shared: Option<SharedExpert>,
}

/// Which experts each token takes, and with what weight.
#[derive(Clone, Debug, Default)]
pub struct Routing {
    /// Experts per token.
    pub k: usize,
    /// `[tokens, k]`, ascending within a token.
    pub experts: Vec<u32>,
    /// `[tokens, k]`
    pub weights: Vec<f32>,
}

/// What a router chose when a step came to its layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// Number of the mixture, in the order in which a step comes to them.
    pub layer: usize,
    /// Experts per token.
    pub k: usize,
    /// `[tokens, k]`, ascending within a token.
    pub experts: Vec<u32>,
    /// The same as its router would have chosen from what came to the layer before; empty for the first.
    pub guessed: Vec<u32>,
}
