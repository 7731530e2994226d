//! What a backend keeps for a model: buffers, weights, caches, and the names by which they are known.

use std::ops::Range;

use sluice_kernels::attention::{AttentionMode, KvType};
use sluice_kernels::format::WeightFormat;
use sluice_store::Bytes;

/// What a buffer is for: memory is accounted by class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryClass {
    /// Weights used where their file is mapped.
    WeightsMapped,
    /// Weights that were copied: norms and other vectors, widened to f32; matrices that were read to memory of our own; and those that nodes of memory have a
    /// copy of each.
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

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    /// The memory of the machine.
    Host,
    /// That of an accelerator, by number.
    Accelerator(u32),
}

/// Bytes that a class takes somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    pub class: MemoryClass,
    pub device: Device,
    pub bytes: usize,
}

/// Memory of a device that computes in its own, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    pub device: Device,
    /// What was free before this backend took any, and what of that should stay free.
    pub free: u64,
    pub reserve: u64,
    /// What all weights take that are known, and of these the mixtures' experts.
    pub weights: u64,
    pub experts: u64,
    /// Bytes of a block of all cache groups, where it has only some of the layers.
    pub block: Option<usize>,
    /// What experts take at least that are not all on the device.
    pub least_experts: u64,
    /// And what they have come to take.
    pub taken_by_experts: u64,
}

/// The memory that steps need beyond what [`crate::Resources::alloc`] gave, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepScratch {
    /// However long the context is.
    pub fixed: usize,
    /// For each 128 positions of context of one sequence.
    pub per_128_positions: usize,
}

/// Names something that a backend keeps; what the number means is for the backend to know.
macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name(u32);

        impl $name {
            pub fn new(number: usize) -> $name {
                $name(u32::try_from(number).expect("fewer than 2^32"))
            }

            pub fn number(self) -> usize {
                self.0 as usize
            }
        }
    };
}

handle! {
    /// A buffer of f32 (or, for KV, of bytes).
    BufferId
}
handle! {
    /// A weight matrix.
    MatrixId
}
handle! {
    /// The angles of a way of rotary embedding, for all positions.
    RotaryId
}
handle! {
    /// A mixture of experts.
    MoeId
}

/// A row-major f32 matrix inside a buffer: `[rows, cols]`, rows `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    pub buffer: BufferId,
    /// In elements from the buffer's start.
    pub offset: usize,
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

/// A weight matrix as its checkpoint has it: `[rows, cols]` row-major, in the arrays that [`Form::parts`] lists, in that order.
#[derive(Clone, Debug)]
pub struct MatrixSource {
    pub form: WeightFormat,
    pub rows: usize,
    pub cols: usize,
    pub parts: Vec<Bytes>,
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
    pub mode: AttentionMode,
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
