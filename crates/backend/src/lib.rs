//! The operations a model is written in, and the CPU that carries them out.
//!
//! A model speaks in fused layer operations over opaque buffers; host pointers exist only inside a backend. Between [`Backend::begin`] and
//! [`Backend::end`] operations are only enqueued, and none gives a value back: what a step leaves is its [`Outcome`] and a handle to logits. A new device
//! is one more implementor of [`Backend`], in a crate of its own; a new operation is one method here and one file per device.

mod affinity;
mod cpu;
mod memory;
mod numa;
mod operations;
mod pool;
mod profile;
mod step;
mod threading;

pub use cpu::{Cpu, HostExperts, Lookahead, OffloadedExpert, StepScratch, Streamed};
pub use memory::*;
pub use numa::{Numa, Processors, default_threads};
pub use operations::*;
pub use pool::Pool;
pub use profile::{Phase, PhaseRow, Profile};
pub use sluice_experts::{ExpertOptions, ExpertStats};
pub use sluice_kernels::attention::{AttentionMode, KvType};
pub use sluice_kernels::format::{Activations, Float, WeightFormat};
pub use sluice_kernels::isa::Isa;
pub use sluice_kernels::route::Scoring;
pub use sluice_kernels::sample;
pub use sluice_kernels::{NUMERICS_VERSION, rotary::RotaryFrequencies};
pub use step::{Capacity, Failed, Logits, Outcome, SequenceInput, StepInputs, Wanted};

use sluice_store::{Bytes, Loading, Memory};

/// Floats of a checkpoint as f32.
pub fn widen(float: Float, bytes: &[u8]) -> anyhow::Result<Vec<f32>> {
    let mut out = vec![0.0; bytes.len() / float.size()];
    if !out.is_empty() {
        let row = sluice_kernels::matrix::Matrix::new(WeightFormat::Float(float), 1, out.len(), [bytes])?;
        sluice_kernels::affine::dequantize_row(Isa::GENERIC, &row, 0, &mut out);
    }
    Ok(out)
}

/// The operations of a model step. Shapes are given at the arguments; `tokens` is the number of rows of the step, and
/// tensors that are written may have more rows than that.
/// Results do not depend on how tokens are divided among steps (`docs/numerics.md`).
///
/// Tensors may be parts of larger ones, at any offset and stride; what lies around them stays as it is. Between [`Backend::begin`] and [`Backend::end`]
/// nothing is registered, written or read back. `crates/conformance` holds implementors to all of this.
pub trait Backend: Send {
    // 1. What is set up once

    /// A zeroed buffer of `[rows, cols]` f32, committed when touched.
    fn alloc(&mut self, class: MemoryClass, rows: usize, cols: usize) -> anyhow::Result<Tensor>;
    /// Copies host values into a tensor.
    fn upload(&mut self, values: &[f32], to: Tensor);
    /// Copies a tensor to the host, `[rows, cols]` dense. For calibration, tests and [`Backend::hidden`]: no step does it.
    fn download(&mut self, t: Tensor, out: &mut [f32]);
    /// Registers a weight matrix where it lies, without copying it.
    fn matrix(&mut self, source: MatrixSource) -> anyhow::Result<MatrixId>;
    /// Registers a rotary embedding, for positions below `positions`. Angles of a position are computed and uploaded once, when a step first reaches it.
    fn rotary(&mut self, frequencies: &RotaryFrequencies, positions: usize) -> anyhow::Result<RotaryId>;
    /// Registers a mixture of experts, in the order in which steps come to them. `follows`: the mixture of the layer right before, which may look ahead to
    /// what this one will want.
    fn moe(&mut self, moe: Moe, follows: Option<MoeId>) -> anyhow::Result<MoeId>;
    /// From here on the experts of all mixtures are kept as `options` say and otherwise read when tokens want them, instead of being used where their files
    /// are mapped.
    ///
    /// # Errors
    /// When the budget holds fewer experts than a token wants, or there is no memory.
    fn stream_experts(&mut self, options: &ExpertOptions, lookahead: Lookahead) -> anyhow::Result<()>;
    /// Reads some of the experts that are streamed and not in memory, as far as there is any that is free. Whether there may be more.
    fn fill_experts(&mut self) -> bool {
        false
    }
    /// What steps like this one need beside what [`Backend::alloc`] gave, and all shorter ones. `step` takes `inputs` through a model with the backend that it
    /// is given, which computes nothing; `layouts`: of the cache groups. `streamed`: experts are read from disk.
    fn step_scratch(
        &self,
        layouts: &[KvLayout],
        inputs: &StepInputs,
        streamed: bool,
        step: &mut dyn FnMut(&mut dyn Backend),
    ) -> StepScratch;
    /// The memory that it computes in, where that is not the host's: then this is what buffers, caches and [`Backend::step_scratch`] are in.
    fn device_memory(&self) -> Option<DeviceMemory> {
        None
    }
    /// Has weights read, in about this order, to where it computes with them, and returns: steps wait for what they come to. `order`: what of the load's files
    /// matrices lie in that do not stay on disk.
    ///
    /// # Errors
    /// Where there is no memory for them.
    fn read_weights(&mut self, loading: &Loading, order: &[&Bytes]) -> anyhow::Result<()> {
        loading.start(order.iter().copied());
        Ok(())
    }
    /// Nodes of this machine's memory that are each to have a copy of the weights, for threads that are bound there; 1: no copies are wanted.
    fn weight_copies(&self) -> usize {
        1
    }
    /// From here on weights are copied to each of these nodes: some before each step, of those that are there, until all are copied. `loading`: what reads
    /// them; it has not begun. Says what will be done, in a line.
    fn replicate_weights(&mut self, _loading: Option<&Loading>) -> Option<String> {
        None
    }
    /// Copies some of the weights that are there and are to be copied, as a step begins with: for when nobody wants one. Whether there were any.
    fn copy_weights(&mut self) -> bool {
        false
    }
    /// Steps take `tokens` tokens at most of the `rows` that scratch was allocated for: what lies behind is never touched, and does not count.
    fn limit_steps(&mut self, tokens: usize, rows: usize);
    /// Measures the time of each phase from here on, or no longer. A device may be slower meanwhile.
    fn profile(&mut self, on: bool);
    /// Starts to record what routers choose.
    fn record_routing(&mut self);

    // 2. Caches

    /// A zeroed pool of `blocks` blocks, the next cache group's: addresses only, until [`Backend::commit_kv`].
    fn alloc_kv(&mut self, layout: KvLayout, blocks: usize) -> anyhow::Result<KvPool>;
    /// Makes the first `blocks` blocks of a pool usable: resident, where they are, for good.
    fn commit_kv(&mut self, pool: &KvPool, blocks: usize) -> anyhow::Result<()>;
    /// `to = from` for each pair of blocks (from, to), in this order.
    fn copy_blocks(&mut self, pool: &KvPool, pairs: &[(u32, u32)]);
    /// The bytes of a block, `[KvLayout::block_bytes]`, to the host.
    fn read_block(&mut self, pool: &KvPool, block: u32, out: &mut [u8]);
    /// The same, from the host.
    fn write_block(&mut self, pool: &KvPool, block: u32, bytes: &[u8]);
    /// Memory of the host that blocks and states are copied to and back from: locked, where that is quicker.
    ///
    /// # Errors
    /// When there is none.
    fn lend_memory(&mut self, bytes: usize) -> std::io::Result<Box<dyn Memory>> {
        sluice_store::host_memory(bytes)
    }
    /// Room for the recurrent states of all layers together, `len` f32 for each of `rows` sequences.
    fn alloc_states(&mut self, rows: usize, len: usize) -> anyhow::Result<()>;
    /// Row `to = from`.
    fn copy_state(&mut self, from: u32, to: u32);
    fn zero_state(&mut self, row: u32);
    /// A state, `[len]`, to the host.
    fn read_state(&mut self, row: u32, out: &mut [f32]);
    /// The same, from the host.
    fn write_state(&mut self, row: u32, state: &[f32]);

    // 3. A step

    /// Begins a step with these tokens.
    fn begin(&mut self, inputs: &StepInputs);
    /// `out[t] = table[tokens[t]]`
    fn embed(&mut self, table: MatrixId, out: Tensor);
    /// Norm and projections that share it.
    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]);
    /// `out += linear(x)`
    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor);
    /// q/k norm, rotation, keys and values into their slots, attention over the block tables, output gate.
    fn attention(&mut self, layer: &AttentionLayer);
    /// Short convolution, gates, delta rule, gated norm.
    fn delta_net(&mut self, layer: &DeltaLayer);
    /// `residual += mlp(norm(x))`
    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor);
    /// `residual += mixture(norm(x))`: routes, fetches, looks ahead, computes and combines.
    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor);
    /// `head(norm(x[row]))` for each row that is wanted, to be read from the outcome.
    fn logits(&mut self, x: Tensor, norm: Norm, head: MatrixId);
    /// Ends the step: everything that was enqueued is done.
    fn end(&mut self) -> Outcome;

    // 4. What a step left

    /// Logits of the last step on the host, `[rows, vocabulary]`, until the next begins.
    fn read_logits(&mut self, logits: Logits) -> &[f32];
    /// `each(row, thread, logits)` for all rows of the last step's logits, side by side: `thread` is below [`Backend::threads`], and no two calls have the
    /// same at once.
    fn each_logits(&mut self, logits: Logits, each: &(dyn Fn(usize, usize, &[f32]) + Sync));
    /// What looks at the last step's logits where they lie, where there is such.
    fn drawing(&mut self) -> Option<&mut dyn DeviceSampling> {
        None
    }
    /// `norm(x)` of rows of the last step, `[rows, cols]`, on the host: each is the bits that [`Backend::logits`] gives to a head.
    fn hidden(&mut self, x: Tensor, norm: Norm, out: &mut [f32]) {
        assert_eq!(out.len(), x.rows * x.cols);
        let mut weight = vec![0.0; x.cols];
        self.download(norm.weight, &mut weight);
        self.download(x, out);
        for row in out.chunks_exact_mut(x.cols.max(1)) {
            sluice_kernels::norm::rms_norm_in_place(Isa::GENERIC, row, Some(&weight), norm.eps);
        }
    }
    /// Threads of the host that work for it.
    fn threads(&self) -> usize;
    /// Time and bytes by phase since the last call, when profiling.
    fn take_profile(&mut self) -> Profile;
    /// What streamed experts took since the last call, and how they are read; `None` where none are.
    fn take_streamed(&mut self) -> Option<Streamed>;
    /// What was fallen back on, a clause each.
    fn notes(&self) -> Vec<String>;
    /// Bytes by class and device.
    fn memory(&mut self) -> Vec<MemoryUse>;

    // 5. For calibration: a step does none of this

    /// As [`Backend::mixture`] without what the routed experts add. `normed`: what they would have been given; returns their routing.
    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, normed: Tensor, residual: Tensor) -> Routing;
}

/// Logits that are looked at by rows, by a device that holds them: what drawing a token needs, so that they need not come to the host.
pub trait DeviceSampling {
    /// The likeliest token of each row, the first of those that are; `None` where one of the row's logits is NaN, or where it was not looked for.
    fn tops(&mut self, logits: Logits) -> Option<&[Top]>;
    /// The likeliest tokens of each of these rows, of ranks up to [`MOST_RANKS`].
    fn best(&mut self, logits: Logits, of: &[Ranked]) -> &[Best];
    /// Of each of these rows the sums of the weights ([`draw::total`]) of its logits, [`DRAWN_TOGETHER`] at a time: `[of, blocks]`.
    fn sums(&mut self, logits: Logits, of: &[Scaled]) -> &[u64];
    /// Blocks of so many logits by row and number, as far as there are as many: `[of, DRAWN_TOGETHER]`.
    fn blocks(&mut self, logits: Logits, of: &[(usize, usize)]) -> &[f32];
}

/// Logits whose weights are summed at once.
pub const DRAWN_TOGETHER: usize = 1024;

/// How many of a row's likeliest tokens may be asked for.
pub const MOST_RANKS: usize = 192;

/// A row whose `rank` likeliest tokens are wanted.
#[derive(Clone, Copy, Debug)]
pub struct Ranked {
    pub row: usize,
    pub rank: usize,
}

/// All tokens of a row whose logits are at least `bar`, in any order: as many as were asked for, or more; none where there are too many.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Best {
    pub bar: f32,
    pub found: Vec<Top>,
}

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Top {
    pub logit: f32,
    pub token: u32,
}

/// A row whose weights are wanted: of `(logit - highest) * scale`.
#[derive(Clone, Copy, Debug)]
pub struct Scaled {
    pub row: usize,
    pub highest: f32,
    pub scale: f64,
}
