//! The operations that a model is written in, and the CPU that carries them out.
//!
//! A model speaks in fused layer operations over opaque buffers; host pointers exist only inside a backend. No operation reads a
//! device value back but [`Backend::route`] (which experts a token wants) and [`Backend::logits`]. A new device is one more
//! implementor of [`Backend`]; a new operation is one method here and one file per device.

mod cpu;
mod pool;
mod profile;
mod threading;

use std::ops::Range;

pub use cpu::{Cpu, Lookahead, StepScratch, Streamed};
pub use profile::{Phase, PhaseRow, Profile};
pub use sluice_kernels::attention::KvType;
pub use sluice_kernels::isa::Isa;
pub use sluice_kernels::matmul::{Activations, Float, Form};
pub use sluice_kernels::route::Scoring;
pub use sluice_kernels::{NUMERICS_VERSION, rotary::RotaryFrequencies};
use sluice_store::Bytes;
pub use sluice_store::experts::{ExpertOptions, ExpertStats};

/// Floats of a checkpoint as f32.
pub fn widen(float: Float, bytes: &[u8]) -> anyhow::Result<Vec<f32>> {
    let mut out = vec![0.0; bytes.len() / float.size()];
    if !out.is_empty() {
        let row = sluice_kernels::matmul::Matrix::new(Form::Float(float), 1, out.len(), bytes, &[], &[])?;
        sluice_kernels::affine::dequantize_row(Isa::GENERIC, &row, 0, &mut out);
    }
    Ok(out)
}

/// What a buffer is for: memory is accounted by class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryClass {
    /// Weights used where their file is mapped.
    WeightsMapped,
    /// Weights that were copied (norms and other vectors, widened to f32).
    WeightsCopied,
    /// Keys and values of attention layers.
    Kv,
    /// Recurrent states.
    State,
    /// Slots of experts that are read when tokens want them.
    Experts,
    /// Activations and everything else a step needs.
    Scratch,
}

impl MemoryClass {
    pub const ALL: [MemoryClass; 6] = [
        MemoryClass::WeightsMapped,
        MemoryClass::WeightsCopied,
        MemoryClass::Kv,
        MemoryClass::State,
        MemoryClass::Experts,
        MemoryClass::Scratch,
    ];

    pub fn name(self) -> &'static str {
        match self {
            MemoryClass::WeightsMapped => "weights_mapped",
            MemoryClass::WeightsCopied => "weights_copied",
            MemoryClass::Kv => "kv",
            MemoryClass::State => "state",
            MemoryClass::Experts => "experts",
            MemoryClass::Scratch => "scratch",
        }
    }
}

/// A buffer of f32 (or, for KV, of bytes) that a backend owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferId(u32);

/// A weight matrix that a backend knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixId(u32);

/// A row-major f32 matrix inside a buffer: `[rows, cols]`, rows `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    buffer: BufferId,
    /// In elements from the buffer's start.
    offset: usize,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl Tensor {
    /// The same rows, of the given columns only.
    pub fn columns(self, range: Range<usize>) -> Tensor {
        assert!(range.start <= range.end && range.end <= self.cols);
        Tensor { offset: self.offset + range.start, cols: range.len(), ..self }
    }

    /// The first `rows` rows.
    pub fn first_rows(self, rows: usize) -> Tensor {
        assert!(rows <= self.rows);
        Tensor { rows, ..self }
    }

    /// The given rows.
    pub fn rows(self, range: Range<usize>) -> Tensor {
        assert!(range.start <= range.end && range.end <= self.rows);
        Tensor { offset: self.offset + range.start * self.stride, rows: range.len(), ..self }
    }
}

/// A weight matrix as its checkpoint has it: `[rows, cols]` row-major in `form`. `scales` and `biases` are empty for float forms.
pub struct MatrixSource {
    pub form: Form,
    pub rows: usize,
    pub cols: usize,
    pub data: Bytes,
    pub scales: Bytes,
    pub biases: Bytes,
}

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

/// The new tokens of one sequence in a step.
#[derive(Clone, Debug)]
pub struct SequenceSlice {
    /// Which rows of the batch they are.
    pub rows: Range<usize>,
    /// Position of the first of them; the others follow.
    pub position: usize,
    /// Block tables, one for each cache group that has positions (block numbers in ascending position).
    pub tables: Vec<Vec<u32>>,
    /// The sequence's slot in the pool of recurrent states.
    pub state_slot: usize,
}

/// What one model step computes: the new tokens of some sequences. Prefill and decode are the same step with different lengths.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// `[tokens]`, sequence after sequence.
    pub tokens: Vec<u32>,
    /// `[tokens]`
    pub positions: Vec<u32>,
    /// Per cache group that has positions: `[tokens]`, block number times block size plus offset, where each token's keys and values go.
    pub slots: Vec<Vec<u64>>,
    pub sequences: Vec<SequenceSlice>,
}

/// How one cache group's blocks are laid out: a block is one extent that holds, for each layer of the group, K
/// `[kv_heads, block_tokens, k_dim]` and then V `[kv_heads, block_tokens, v_dim]`, each followed by its scales `[kv_heads, block_tokens]` where the
/// type has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub layers: usize,
    pub kv_heads: usize,
    pub k_dim: usize,
    pub v_dim: usize,
    pub kv_type: KvType,
    pub block_tokens: usize,
}

impl KvLayout {
    pub fn layer_bytes(&self) -> usize {
        let rows = self.kv_heads * self.block_tokens;
        self.kv_type.bytes(rows, self.k_dim) + self.kv_type.bytes(rows, self.v_dim)
    }

    /// Bytes of a block: all layers, rounded up to 4 KiB.
    pub fn block_bytes(&self) -> usize {
        (self.layers * self.layer_bytes()).next_multiple_of(4096)
    }
}

/// The blocks of one cache group.
#[derive(Clone, Copy, Debug)]
pub struct KvPool {
    pub buffer: BufferId,
    pub layout: KvLayout,
}

impl KvPool {
    /// A pool without blocks, for whoever asks only how blocks would be laid out.
    pub fn empty(layout: KvLayout) -> KvPool {
        KvPool { buffer: BufferId(u32::MAX), layout }
    }
}

/// One attention layer's part of a step. Sources: Vaswani et al. 2017; grouped queries Ainslie et al. 2023.
pub struct AttentionStep<'a> {
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
    /// From [`Backend::rotary`].
    pub rotary: Tensor,
    pub pool: KvPool,
    /// Which of the batch's block tables.
    pub group: usize,
    /// Which layer of the cache group.
    pub layer: usize,
    pub scale: f32,
    /// Only the last so many positions are visible, the token's own among them.
    pub window: Option<usize>,
    pub batch: &'a Batch,
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

/// One GatedDeltaNet layer's part of a step.
pub struct DeltaStep<'a> {
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
    /// All sequences' states: `[slots, layers * state_len]`.
    pub states: Tensor,
    pub layer: usize,
    pub batch: &'a Batch,
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

/// What a router chose when a step came to its layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// As [`Experts::layer`].
    pub layer: usize,
    /// Experts per token.
    pub k: usize,
    /// `[tokens, k]`, ascending within a token.
    pub experts: Vec<u32>,
    /// The same as its router would have chosen from what came to the layer before; empty for the first.
    pub guessed: Vec<u32>,
}

/// The experts of a layer, each `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Debug)]
pub struct Experts {
    /// Number among the layers that have experts.
    pub layer: usize,
    pub gate: ExpertMatrix,
    pub up: ExpertMatrix,
    pub down: ExpertMatrix,
    pub count: usize,
    pub hidden: usize,
    pub intermediate: usize,
}

/// A dense feed-forward layer: `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Debug)]
pub struct Mlp {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

/// An expert that every token takes, scaled by the sigmoid of `gate` (a `[1, hidden]` matrix) where there is one.
#[derive(Clone, Debug)]
pub struct SharedExpert {
    pub mlp: Mlp,
    pub gate: Option<Linear>,
}

/// The mixture of experts after this layer.
#[derive(Clone, Copy, Debug)]
pub struct NextMixture<'a> {
    pub norm: Norm,
    pub router: &'a Linear,
    pub scoring: &'a Scoring,
    pub experts: &'a Experts,
}

/// When the next layer's experts are guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foresight {
    /// Before this layer's experts have had their say.
    Early,
    /// With only the next layer's mixing of tokens in between.
    Late,
}

/// The operations of a model step. Shapes are given at the arguments; `tokens` is the number of rows of the batch, and
/// tensors that are written may have more rows than that.
/// Results do not depend on how tokens are divided among steps (`docs/numerics.md`).
pub trait Backend: Send {
    /// A zeroed buffer of `[rows, cols]` f32, committed when touched.
    fn alloc(&mut self, class: MemoryClass, rows: usize, cols: usize) -> anyhow::Result<Tensor>;
    /// A zeroed pool of `blocks` blocks: addresses only, until [`Backend::commit_kv`].
    fn alloc_kv(&mut self, layout: KvLayout, blocks: usize) -> anyhow::Result<KvPool>;
    /// Makes the first `blocks` blocks of a pool usable: resident, where they are, for good.
    fn commit_kv(&mut self, pool: &KvPool, blocks: usize) -> anyhow::Result<()>;
    /// Copies host values into a tensor.
    fn upload(&mut self, values: &[f32], to: Tensor);
    /// Copies a tensor to the host, `[rows, cols]` dense. For calibration and tests: no step does it.
    fn download(&mut self, t: Tensor, out: &mut [f32]);
    /// Makes a weight matrix known, where it lies.
    fn matrix(&mut self, source: MatrixSource) -> anyhow::Result<MatrixId>;
    fn zero(&mut self, t: Tensor);

    /// `out[t] = table[tokens[t]]`
    fn embed(&mut self, table: MatrixId, tokens: &[u32], out: Tensor);
    /// Cosines and then sines of each position's angles: `out` is `[tokens, 2 * frequencies]`.
    fn rotary(&mut self, frequencies: &RotaryFrequencies, positions: &[u32], out: Tensor);
    /// `out = norm(x)`
    fn norm(&mut self, x: Tensor, norm: Norm, out: Tensor);
    /// Norm and projections that share it.
    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]);
    /// `out += linear(x)`
    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor);
    /// q/k norm, rotation, keys and values into their slots, attention over the block tables, output gate.
    fn attention(&mut self, step: &AttentionStep);
    /// Short convolution, gates, delta rule, gated norm.
    fn delta_net(&mut self, step: &DeltaStep);
    /// `residual += mlp(norm(x))`
    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor);
    /// Which experts the rows of `x` (normed) take. The one read-back of a layer.
    fn route(&mut self, x: Tensor, router: &Linear, scoring: &Scoring, routing: &mut Routing);
    /// Says which experts [`Backend::experts`] will be called with next: where they are not in memory, they begin to come.
    fn fetch(&mut self, routing: &Routing, experts: &Experts);
    /// Applies the next layer's norm and router to `x`, to guess which of its experts will be wanted. Changes no result, and does nothing where all experts
    /// are in memory. Between [`Backend::fetch`] and [`Backend::experts`], where it costs time that is waited anyway, and again after them, where it knows better.
    fn foresee(&mut self, x: Tensor, next: NextMixture, sight: Foresight);
    /// `residual += sum of the routed experts of x + shared expert of x`; `x` is normed, the experts were fetched.
    fn experts(
        &mut self,
        x: Tensor,
        routing: &Routing,
        experts: &Experts,
        shared: Option<&SharedExpert>,
        residual: Tensor,
    );
    /// `out[i] = head(norm(x[rows[i]]))`, on the host: `[rows, vocabulary]`.
    fn logits(&mut self, x: Tensor, norm: Norm, head: MatrixId, rows: &[u32], out: &mut [f32]);

    /// Bytes by class.
    fn memory(&mut self, class: MemoryClass) -> usize;
    /// Time and bytes by phase since the last call, when profiling.
    fn take_profile(&mut self) -> Profile;
}
