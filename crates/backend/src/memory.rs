//! Handles of buffers, weights and caches, and the memory that they take.

use std::ops::Range;

use sluice_kernels::attention::{AttentionMode, KvType};
use sluice_kernels::format::WeightFormat;
use sluice_kernels::hadamard::hadamard_run;
use sluice_store::Bytes;

/// What a buffer is for: memory is accounted by class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryClass {
    /// Weights that are used in their mapped file.
    WeightsMapped,
    /// Weights that were copied: norms and other vectors, widened to f32; matrices that were read into our own memory; and copies for memory nodes.
    WeightsCopied,
    /// Keys and values of attention layers.
    Kv,
    /// Recurrent states.
    State,
    /// Slots of streamed experts.
    Experts,
    /// Activations and everything else a step needs.
    Scratch,
}

impl MemoryClass {
    /// All classes.
    pub const ALL: [MemoryClass; 6] = [
        MemoryClass::WeightsMapped,
        MemoryClass::WeightsCopied,
        MemoryClass::Kv,
        MemoryClass::State,
        MemoryClass::Experts,
        MemoryClass::Scratch,
    ];

    /// The name in reports and metrics.
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
    /// The memory of an accelerator, by number.
    Accelerator(u32),
}

/// Bytes of a class on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// What it is for.
    pub class: MemoryClass,
    /// Where it is.
    pub device: Device,
    /// How much.
    pub bytes: usize,
}

/// Whether a device reads weights and experts where the host has them, instead of copies in memory of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unified {
    /// If it has no memory of its own.
    #[default]
    Auto,
    /// Also if it has.
    On,
    /// It has copies.
    Off,
}

/// Memory of a device that computes in its own, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The device.
    pub device: Device,
    /// Free memory before this backend took any.
    pub free: u64,
    /// How much of that should stay free.
    pub reserve: u64,
    /// It reads weights and experts where the host has them ([`Unified`]), so one limit is for both.
    pub shared: bool,
    /// Bytes of all registered weights, without those that it reads where the host has them.
    pub weights: u64,
    /// How much of that experts take.
    pub experts: u64,
    /// Bytes of a block of all cache groups, if the device has only some of the layers.
    pub block: Option<usize>,
    /// The least that experts take if not all are on the device.
    pub least_experts: u64,
    /// Streamed experts are read from the host's slots, and only their tables are on the device.
    pub experts_in_place: bool,
    /// What experts take now.
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

/// A handle. Only the backend knows what its number means.
macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name(u32);

        impl $name {
            /// The handle with this number.
            pub fn new(number: usize) -> $name {
                $name(u32::try_from(number).expect("fewer than 2^32"))
            }

            /// Its number.
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
    /// The angles of a rotary embedding, for all positions.
    RotaryId
}
handle! {
    /// A mixture of experts.
    MoeId
}

/// A row-major f32 matrix inside a buffer: `[rows, cols]`, rows `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// The buffer.
    pub buffer: BufferId,
    /// In elements from the buffer's start.
    pub offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements from one row to the next.
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

/// A weight matrix in its checkpoint's bytes: `[rows, cols]` row-major, in the planes that [`WeightFormat::planes`] lists, in that order.
#[derive(Clone, Debug)]
pub struct MatrixSource {
    /// The format.
    pub format: WeightFormat,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The planes.
    pub planes: Vec<Bytes>,
}

/// How one cache group's blocks are laid out: a block is one extent that holds, for each layer of the group, K
/// `[kv_heads, block_tokens, k_dim]` and then V `[kv_heads, block_tokens, v_dim]`, each followed by its scales `[kv_heads, block_tokens]` where the
/// type has them. With values of no elements it holds K alone: values are parts of keys (latent attention).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Attention layers of the group.
    pub layers: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a key.
    pub k_dim: usize,
    /// Elements of a value; 0 where it is a part of its key.
    pub v_dim: usize,
    /// Their stored type.
    pub kv_type: KvType,
    /// The arithmetic of attention.
    pub mode: AttentionMode,
    /// Positions of a block.
    pub block_tokens: usize,
    /// Positions that have one row together, which divide those of a block; 1: each has its own.
    pub every: usize,
}

impl KvLayout {
    /// Rows of a block for each KV head. Slots divided by [`KvLayout::every`] count them.
    pub fn block_rows(&self) -> usize {
        self.block_tokens / self.every
    }

    /// Bytes of one layer in a block.
    pub fn layer_bytes(&self) -> usize {
        let rows = self.kv_heads * self.block_rows();
        let values = if self.v_dim > 0 { self.kv_type.bytes(rows, self.v_dim) } else { 0 };
        self.kv_type.bytes(rows, self.k_dim) + values
    }

    /// Elements of queries and keys that are transformed together before keys are rounded, so that no large one makes the step of all others coarse
    /// ([`sluice_kernels::hadamard`]); 1 where none are: keys of more than eight bits, and those that values are parts of.
    pub fn hadamard_run(&self) -> usize {
        let is_rounded = self.kv_type == KvType::Int8 && self.v_dim > 0;
        if is_rounded { hadamard_run(self.k_dim) } else { 1 }
    }

    /// Bytes of a block: all layers, rounded up to 4 KiB.
    pub fn block_bytes(&self) -> usize {
        (self.layers * self.layer_bytes()).next_multiple_of(4096)
    }
}

/// The blocks of one cache group.
#[derive(Clone, Copy, Debug)]
pub struct KvPool {
    /// The buffer.
    pub buffer: BufferId,
    /// The layout of a block.
    pub layout: KvLayout,
}
