//! What a device keeps for a model: tensors, weights, mixtures of experts, and caches.

use anyhow::Result;
use sluice_store::{Bytes, Loading, Memory};

use crate::{
    DeviceMemory, ExpertOptions, KvLayout, KvPool, Lookahead, MatrixId, MatrixSource, MemoryClass, Moe, MoeId,
    NgramTable, Operations, RotaryFrequencies, RotaryId, RowOptions, StepInputs, StepScratch, Tensor,
};

/// Tensors, weights and other handles, which are made once when a model is loaded. Nothing here is called between [`crate::Backend::begin`] and
/// [`crate::Backend::end`].
pub trait Resources {
    // 1. Handles

    /// A zeroed buffer of `[rows, cols]` f32. Its memory is committed when it is touched.
    ///
    /// # Errors
    /// Without memory for it.
    fn alloc(&mut self, class: MemoryClass, rows: usize, cols: usize) -> Result<Tensor>;
    /// Copies host values, `[rows, cols]` dense, into a tensor.
    fn upload(&mut self, values: &[f32], to: Tensor);
    /// Copies a tensor to the host, `[rows, cols]` dense. For calibration, tests and [`crate::Backend::hidden`]; no step needs it.
    fn download(&mut self, t: Tensor, out: &mut [f32]);
    /// Registers a weight matrix in place, without copying it.
    ///
    /// # Errors
    /// When its planes do not have the lengths that its format and shape need.
    fn matrix(&mut self, source: MatrixSource) -> Result<MatrixId>;
    /// Registers a rotary embedding for positions below `positions`. Angles of a position are computed once, when a step first reaches it.
    ///
    /// # Errors
    /// Without memory for the angles.
    fn rotary(&mut self, frequencies: &RotaryFrequencies, positions: usize) -> Result<RotaryId>;
    /// Registers a mixture of experts. Mixtures are registered in the order in which a step runs them. `follows`: the mixture of the layer right before this
    /// one, which may predict and prefetch this one's experts.
    ///
    /// # Errors
    /// When the device cannot compute it.
    fn moe(&mut self, moe: Moe, follows: Option<MoeId>) -> Result<MoeId>;

    // 2. Weights that are read, streamed or copied

    /// Reads weights to the memory that the device computes in. Returns at once; a step waits for each weight that it needs. `order`: the byte ranges of the
    /// load's files that hold matrices which do not stay on disk, in about the order to read them.
    ///
    /// # Errors
    /// Without memory for them.
    fn read_weights(&mut self, loading: &Loading, order: &[&Bytes]) -> Result<()> {
        loading.start(order.iter().copied());
        Ok(())
    }
    /// From here on keeps the experts of all mixtures as `options` say, and reads the others when tokens want them. Otherwise experts are used in place, where
    /// their files are mapped.
    ///
    /// # Errors
    /// When the budget holds fewer experts than one token wants, or without memory.
    fn stream_experts(&mut self, options: &ExpertOptions, lookahead: Lookahead) -> Result<()>;
    /// From here on reads the rows of this table, which only [`Operations::embed`] takes and once in a step, when tokens want them. Its bytes are not loaded. No
    /// step was planned yet.
    ///
    /// # Errors
    /// Without memory for rows, or when the table is in no file.
    fn stream_table(&mut self, table: MatrixId, options: &RowOptions) -> Result<()>;
    /// The same of a table that only [`Operations::embed_ngrams`] takes.
    ///
    /// # Errors
    /// As for [`Resources::stream_table`].
    fn stream_ngrams(&mut self, table: &NgramTable, options: &RowOptions) -> Result<()>;
    /// Reads some streamed experts into free slots. Returns whether there may be more to read.
    fn fill_experts(&mut self) -> bool {
        false
    }
    /// The number of memory nodes that are each to have a copy of the weights, for threads that are bound there. 1: no copies are wanted.
    fn weight_copies(&self) -> usize {
        1
    }
    /// From here on copies weights to each of these nodes: before each step some of those that have been read, until all are copied. `loading` reads them
    /// and has not begun. Returns a line that says what will be done.
    fn replicate_weights(&mut self, _loading: Option<&Loading>) -> Option<String> {
        None
    }
    /// Copies some weights now, as the beginning of a step does. For idle times. Returns whether there were any to copy.
    fn copy_weights(&mut self) -> bool {
        false
    }

    // 3. Memory of steps

    /// The memory that steps like this one, and all shorter ones, need beyond [`Resources::alloc`]. `step` takes `inputs` through a model with the operations
    /// that it is given, which compute nothing. `layouts`: of the cache groups. `streamed`: experts are read from disk.
    fn step_scratch(
        &self,
        layouts: &[KvLayout],
        inputs: &StepInputs,
        streamed: bool,
        step: &mut dyn FnMut(&mut dyn Operations),
    ) -> StepScratch;
    /// The device's own memory, if it does not compute in the host's. Then buffers, caches and [`Resources::step_scratch`] are in it.
    fn device_memory(&self) -> Option<DeviceMemory> {
        None
    }
    /// Weights that a device reads where the host has them; `streamed`: without experts.
    fn read_in_place(&self, _streamed: bool) -> Vec<Bytes> {
        Vec::new()
    }
    /// Promises that steps have at most `tokens` of the `rows` tokens that scratch was allocated for. The rest is never touched and does not count as used.
    fn limit_steps(&mut self, tokens: usize, rows: usize);

    // 4. Recording

    /// Measures the time of each phase from here on (`on`), or stops. Measuring may slow a device down.
    fn profile(&mut self, on: bool);
    /// Starts to record what routers choose, for [`crate::Outcome::routed`].
    fn record_routing(&mut self);
}

/// Keys and values in blocks, and recurrent states. Nothing here is called between [`crate::Backend::begin`] and [`crate::Backend::end`].
pub trait Caches {
    /// The next cache group's pool of `blocks` zeroed blocks. Reserves addresses only, see [`Caches::commit_kv`].
    ///
    /// # Errors
    /// When the addresses cannot be reserved.
    fn alloc_kv(&mut self, layout: KvLayout, blocks: usize) -> Result<KvPool>;
    /// Makes the first `blocks` blocks of a pool usable for good, at the same addresses.
    ///
    /// # Errors
    /// Without memory for them.
    fn commit_kv(&mut self, pool: &KvPool, blocks: usize) -> Result<()>;
    /// `to = from` for each pair of blocks (from, to), in this order.
    fn copy_blocks(&mut self, pool: &KvPool, pairs: &[(u32, u32)]);
    /// Copies a block, [`KvLayout::block_bytes`] bytes, to the host.
    fn read_block(&mut self, pool: &KvPool, block: u32, out: &mut [u8]);
    /// Copies a block, [`KvLayout::block_bytes`] bytes, from the host.
    fn write_block(&mut self, pool: &KvPool, block: u32, bytes: &[u8]);
    /// Host memory that blocks and states are copied to and from. Locked where that makes copies faster.
    ///
    /// # Errors
    /// Without memory.
    fn lend_memory(&mut self, bytes: usize) -> std::io::Result<Box<dyn Memory>> {
        sluice_store::host_memory(bytes)
    }
    /// The recurrent states of all layers together: `len` f32 for each of `rows` sequences.
    ///
    /// # Errors
    /// Without memory for them, or when they were allocated before.
    fn alloc_states(&mut self, rows: usize, len: usize) -> Result<()>;
    /// Row `to = from`.
    fn copy_state(&mut self, from: u32, to: u32);
    /// Row `row = 0`.
    fn zero_state(&mut self, row: u32);
    /// Copies a state, `[len]`, to the host.
    fn read_state(&mut self, row: u32, out: &mut [f32]);
    /// Copies a state, `[len]`, from the host.
    fn write_state(&mut self, row: u32, state: &[f32]);
}
