//! Recorded calls of a backend, and their replay on another.

use sluice_backend::{
    AttentionLayer, ChannelDeltaLayer, CompressLayer, CompressedLayer, DeltaLayer, Elementwise, IndexLayer, KvLayout,
    KvPool, LatentLayer, Linear, MatrixId, MatrixSource, MemoryClass, Mlp, Moe, MoeId, NgramLayer, NgramTable, Norm,
    Projection, RotaryFrequencies, SelectLayer, StateSpaceLayer, StepInputs, StreamLayer, Tensor,
};

/// A call before the steps. Handles are the checker's.
#[derive(Clone, Debug)]
pub enum Made {
    Alloc { class: MemoryClass, rows: usize, cols: usize },
    Upload { values: Vec<f32>, to: Tensor },
    Matrix(MatrixSource),
    Rotary { frequencies: RotaryFrequencies, positions: usize },
    Moe { moe: Box<Moe>, follows: Option<MoeId> },
    AllocKv { layout: KvLayout, blocks: usize },
    CommitKv { pool: KvPool, blocks: usize },
    AllocStates { rows: usize, len: usize },
}

/// An operation of a step, with its arguments.
#[derive(Clone, Debug)]
pub enum Operation {
    Embed { table: MatrixId, out: Tensor },
    Project { x: Tensor, norm: Option<Norm>, projections: Vec<Projection> },
    ProjectAdd { x: Tensor, linear: Linear, out: Tensor },
    Attention(AttentionLayer),
    LatentAttention(LatentLayer),
    Index(IndexLayer),
    Compress(CompressLayer),
    Select(SelectLayer),
    CompressedAttention(CompressedLayer),
    DeltaNet(DeltaLayer),
    ChannelDelta(ChannelDeltaLayer),
    StateSpace(StateSpaceLayer),
    Collapse(StreamLayer),
    EmbedNgrams { table: NgramTable, out: Tensor },
    AddNgrams(NgramLayer),
    Mlp { x: Tensor, norm: Norm, mlp: Mlp, residual: Tensor },
    Elementwise(Elementwise),
    Mixture { x: Tensor, moe: MoeId, residual: Tensor },
    Logits { x: Tensor, norm: Option<Norm>, head: MatrixId, softcap: Option<f32> },
}

impl Operation {
    pub fn name(&self) -> &'static str {
        match self {
            Operation::Embed { .. } => "embed",
            Operation::Project { .. } => "project",
            Operation::ProjectAdd { .. } => "project_add",
            Operation::Attention(_) => "attention",
            Operation::LatentAttention(_) => "latent_attention",
            Operation::Index(_) => "index",
            Operation::Compress(_) => "compress",
            Operation::Select(_) => "select",
            Operation::CompressedAttention(_) => "compressed_attention",
            Operation::DeltaNet(_) => "delta_net",
            Operation::ChannelDelta(_) => "channel_delta",
            Operation::StateSpace(_) => "state_space",
            Operation::Collapse(_) => "collapse",
            Operation::EmbedNgrams { .. } => "embed_ngrams",
            Operation::AddNgrams(_) => "add_ngrams",
            Operation::Mlp { .. } => "mlp",
            Operation::Elementwise(_) => "elementwise",
            Operation::Mixture { .. } => "mixture",
            Operation::Logits { .. } => "logits",
        }
    }
}

/// The contents of the caches that a step uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CacheContents {
    pub blocks: Vec<(usize, u32, Vec<u8>)>,
    /// As bits.
    pub states: Vec<(u32, Vec<u32>)>,
}

/// A step: the calls before it, its inputs, and its results.
#[derive(Clone, Debug)]
pub struct Recording {
    pub made: Vec<Made>,
    pub inputs: StepInputs,
    pub operations: Vec<Operation>,
    pub before: CacheContents,
    pub after: CacheContents,
    /// As bits.
    pub logits: Vec<u32>,
}
