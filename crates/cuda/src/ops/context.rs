//! What every operation is given: the device's stream, the model's tensors and caches on it, and the inputs of the step.

use sluice_backend::{Activations, Capacity, KvLayout, KvPool, MemoryClass, Norm, StepInputs, Tensor};

use crate::device::memory::{DeviceBuffer, VirtualRange};
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::ops::rotary::RotaryTable;
use crate::ops::step::StepTables;
use crate::parameters as p;
use crate::weights::Weights;

/// A buffer of f32.
pub struct Buffer {
    pub class: MemoryClass,
    pub memory: DeviceBuffer,
    pub elements: usize,
}

/// The blocks of a cache group.
pub struct KvBlocks {
    pub layout: KvLayout,
    pub memory: VirtualRange,
    /// The most blocks that can be committed.
    pub blocks: usize,
}

/// A device and what a model has on it.
pub struct Context {
    pub mode: Activations,
    pub buffers: Vec<Buffer>,
    pub weights: Weights,
    pub rotary: Vec<RotaryTable>,
    pub kv: Vec<KvBlocks>,
    /// `[rows, state]`, if the model has recurrent layers
    pub states: Option<Tensor>,
    /// The inputs of the present step, on the host and on the device.
    pub inputs: StepInputs,
    pub step: StepTables,
    pub gpu: Gpu,
}

impl Context {
    pub fn new(gpu: Gpu, mode: Activations) -> Context {
        Context {
            mode,
            buffers: Vec::new(),
            weights: Weights::default(),
            rotary: Vec::new(),
            kv: Vec::new(),
            states: None,
            inputs: StepInputs::new(&[], Capacity { tokens: 0, sequences: 0, blocks: 0 }),
            step: StepTables::default(),
            gpu,
        }
    }

    /// A tensor's address and stride on the device.
    ///
    /// # Panics
    /// If it reaches beyond its buffer.
    pub fn place(&self, t: Tensor) -> p::Tensor {
        let buffer = &self.buffers[t.buffer.number()];
        let end = if t.rows == 0 { t.offset } else { t.offset + (t.rows - 1) * t.stride + t.cols };
        assert!(end <= buffer.elements, "a tensor reaches beyond its buffer");
        p::Tensor { at: buffer.memory.at + 4 * t.offset as u64, stride: t.stride as u64 }
    }

    pub fn norm(&self, norm: &Norm) -> p::Norm {
        p::Norm { weight: self.place(norm.weight).at, eps: norm.eps, unused: 0 }
    }

    /// Bytes of a class's buffers.
    pub fn bytes_of_class(&self, class: MemoryClass) -> usize {
        self.buffers.iter().filter(|b| b.class == class).map(|b| 4 * b.elements).sum()
    }

    /// Address and bytes of a block of keys and values.
    pub fn kv_block(&self, pool: &KvPool, block: u32) -> (Address, usize) {
        let len = pool.layout.block_bytes();
        let own = &self.kv[pool.buffer.number()];
        assert!((block as usize + 1) * len <= own.memory.committed, "block {block} is not committed");
        (own.memory.at + u64::from(block) * len as u64, len)
    }

    /// Address and bytes of a row of the pool of states.
    pub fn state_row(&self, row: u32) -> (Address, usize) {
        let states = self.states.expect("a pool of states");
        (self.place(states.rows(row as usize..row as usize + 1)).at, 4 * states.cols)
    }
}

/// The contiguous pieces of a tensor: device address and range of its elements in row order. It is one piece if rows are adjacent.
pub fn contiguous_pieces(t: Tensor, place: p::Tensor) -> impl Iterator<Item = (Address, std::ops::Range<usize>)> {
    let dense = t.stride == t.cols || t.rows == 1;
    let (count, len) = if dense { (1, t.rows * t.cols) } else { (t.rows, t.cols) };
    (0..count).map(move |row| (place.at + 4 * row as u64 * place.stride, row * len..(row + 1) * len))
}
