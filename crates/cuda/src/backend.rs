//! The backend: what is set up once, caches, and steps, operation by operation.
//!
//! An operation only enqueues. What goes wrong on the way is kept, nothing more is enqueued, and the step ends with all its rows failed.

use std::sync::Arc;

use anyhow::{Error, Result, ensure};
use sluice_backend::{
    Activations, AttentionLayer, Backend, BufferId, Caches, Capacity, DeltaLayer, Device, DeviceMemory, DeviceSampling,
    ExpertOptions, Failed, KvLayout, KvPool, Linear, Logits, Lookahead, MatrixId, MatrixSource, MemoryClass, MemoryUse,
    Mlp, Moe, MoeId, Norm, Operations, Outcome, Phase, Profile, Projection, Resources, RotaryFrequencies, RotaryId,
    Routing, StepInputs, StepScratch, Streamed, Tensor,
};
use sluice_cpu::Pool as Threads;
use sluice_store::{Bytes, Loading};

use crate::attention::{self, RotaryTable};
use crate::driver::Gpu;
use crate::host_split::{Computes, Host};
use crate::kernels::Kernel;
use crate::loading;
use crate::matmul::{Encoded, Input, Product, Source, encode, multiply, multiply_rows};
use crate::memory::{Memory, Pinned, Reserved, Scratch, bytes_of, bytes_of_mut};
use crate::mixture::{Mixtures, operands};
use crate::parameters::{self as p, number};
use crate::sizing::ScratchPlanner;
use crate::step::Step;
use crate::streaming::{RESERVE, Streaming, least_bytes};
use crate::streams::Locked;
use crate::timing::Timing;
use crate::weights::{Needs, Weight, Weights};
use crate::{delta_net, sampling};

#[cfg(feature = "tuning")]
thread_local! {
    static BEGAN: std::cell::Cell<Option<std::time::Instant>> = const { std::cell::Cell::new(None) };
}

/// A buffer of f32.
struct Buffer {
    class: MemoryClass,
    memory: Memory,
    elements: usize,
}

/// The blocks of a cache group.
pub(crate) struct Pool {
    pub layout: KvLayout,
    pub memory: Reserved,
    blocks: usize,
}

/// An NVIDIA GPU. See the crate.
pub struct Cuda {
    // Fields are dropped in this order: nothing may lose its memory while work is under way, and `Drop` waits for that first.
    pub(crate) mode: Activations,
    buffers: Vec<Buffer>,
    pub(crate) weights: Weights,
    pub(crate) rotary: Vec<RotaryTable>,
    pub(crate) kv: Vec<Pool>,
    /// `[rows, state]`
    pub(crate) states: Option<Tensor>,
    pub(crate) inputs: StepInputs,
    pub(crate) step: Step,
    pub(crate) mixtures: Mixtures,
    pub(crate) delta: delta_net::DeltaWork,
    pub(crate) attention: attention::AttentionWork,
    pub(crate) encoded: Encoded,
    hidden: Encoded,
    gates: Scratch,
    ups: Scratch,
    /// `[rows, vocabulary]`, and their copy on the host, which is made when it is asked for.
    pub(crate) logits: Scratch,
    host_logits: Pinned,
    copied: bool,
    pub(crate) left: Logits,
    pub(crate) drawing: sampling::SamplingWork,
    /// Who computes experts that the device does not have, where it does.
    pub(crate) host: Option<Host>,
    pub(crate) computes: Option<Computes>,
    /// Who looks at logits.
    threads: Option<Threads>,
    /// Bytes of the device that were free at first.
    pub(crate) free: u64,
    /// What went wrong first.
    error: Option<Arc<Error>>,
    timing: Option<Timing>,
    pub(crate) gpu: Gpu,
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.mixtures.ask_no_more();
        let _ = self.wait();
        #[cfg(feature = "tuning")]
        self.gpu.device.print_stamps();
    }
}

/// What cannot be answered with an error: the device is lost, and with it all that was on it.
pub(crate) fn must<T, E: Into<Error>>(done: Result<T, E>) -> T {
    done.unwrap_or_else(|e| panic!("the CUDA device fails: {:#}", e.into()))
}

impl Cuda {
    /// Device `ordinal`, with activations encoded as `mode` says.
    ///
    /// # Errors
    /// In one line, where there is no such device, its driver is too old, or it is.
    pub fn new(ordinal: u32, mode: Activations) -> Result<Cuda> {
        let gpu = Gpu::open(ordinal)?;
        let (free, _) = gpu.device.memory()?;
        Ok(Cuda {
            mode,
            buffers: Vec::new(),
            weights: Weights::default(),
            rotary: Vec::new(),
            kv: Vec::new(),
            states: None,
            inputs: StepInputs::new(&[], Capacity { tokens: 0, sequences: 0, blocks: 0 }),
            step: Step::default(),
            mixtures: Mixtures::default(),
            delta: delta_net::DeltaWork::default(),
            attention: attention::AttentionWork::default(),
            encoded: Encoded::default(),
            hidden: Encoded::default(),
            gates: Scratch::default(),
            ups: Scratch::default(),
            logits: Scratch::default(),
            host_logits: Pinned::default(),
            copied: false,
            left: Logits::default(),
            drawing: sampling::SamplingWork::default(),
            host: None,
            computes: None,
            threads: None,
            free: free as u64,
            error: None,
            timing: None,
            gpu,
        })
    }

    /// The same with the host computing some of the experts that are not on the device.
    pub fn beside(mut self, host: Host) -> Cuda {
        self.host = Some(host);
        self.draw_with(host.threads);
        self
    }

    /// Bytes of all experts of its mixtures.
    pub(crate) fn bytes_of_experts(&self) -> u64 {
        let by_experts = by_experts(&self.weights, self.mixtures.registered());
        let chosen = self.weights.all.iter().zip(by_experts).filter(|(_, by)| *by);
        chosen.map(|(weight, _)| Weights::padded(weight) as u64).sum()
    }

    /// Has so many threads of the host look at logits; where the system refuses them, the caller's alone.
    pub(crate) fn draw_with(&mut self, threads: usize) {
        self.threads = Threads::new(threads).ok();
    }

    /// Whether nothing marks how long operations take, which comes between launches.
    pub(crate) fn times_nothing(&self) -> bool {
        self.timing.is_none()
    }

    /// Where a tensor lies.
    ///
    /// # Panics
    /// Where it reaches beyond its buffer.
    pub(crate) fn place(&self, t: Tensor) -> p::Tensor {
        let buffer = &self.buffers[t.buffer.number()];
        let end = if t.rows == 0 { t.offset } else { t.offset + (t.rows - 1) * t.stride + t.cols };
        assert!(end <= buffer.elements, "a tensor reaches beyond its buffer");
        p::Tensor { at: buffer.memory.at + 4 * t.offset as u64, stride: t.stride as u64 }
    }

    /// Bytes of a class's buffers.
    pub(crate) fn buffers_of(&self, class: MemoryClass) -> usize {
        self.buffers.iter().filter(|b| b.class == class).map(|b| 4 * b.elements).sum()
    }

    pub(crate) fn norm(&self, norm: &Norm) -> p::Norm {
        p::Norm { weight: self.place(norm.weight).at, eps: norm.eps, unused: 0 }
    }

    /// Launches of a step that may be enqueued while the device waits for the host, instead of as many as a driver takes: for tests.
    pub fn holding(mut self, launches: usize) -> Cuda {
        self.gpu.most_held = launches;
        self
    }

    /// Waits for all that was enqueued.
    fn wait(&self) -> Result<()> {
        Ok(self.gpu.wait(self.gpu.quiet()?)?)
    }

    /// Carries an operation out, unless the step has failed already.
    pub(crate) fn enqueue(&mut self, operation: impl FnOnce(&mut Cuda) -> Result<()>) {
        if self.error.is_some() {
            return;
        }
        let room = if self.gpu.is_full() { self.answer_now() } else { Ok(()) };
        if let Err(error) = room.and_then(|()| operation(self)) {
            self.error = Some(Arc::new(error));
            // What was gathered is of no use any more, and what has asked goes on.
            self.mixtures.ask_no_more();
            self.gpu.abandon();
        }
    }

    /// The same, for a phase that uses these matrices once for each of `tokens` tokens.
    fn phase(
        &mut self,
        phase: Phase,
        used: &[&Linear],
        tokens: usize,
        operation: impl FnOnce(&mut Cuda) -> Result<()>,
    ) {
        self.phase_with(phase, |own| own.work(used, tokens), operation);
    }

    /// The same, for one whose bytes of weights and multiply-adds `work` tells, where anybody wants to know.
    fn phase_with(
        &mut self,
        phase: Phase,
        work: impl FnOnce(&Cuda) -> (u64, u64),
        operation: impl FnOnce(&mut Cuda) -> Result<()>,
    ) {
        let operation = |own: &mut Cuda| {
            operation(own)?;
            if phase != Phase::Attention {
                own.encoded.left_of = None;
            }
            Ok(())
        };
        if self.timing.is_none() {
            return self.enqueue(operation);
        }
        let (bytes, macs) = work(self);
        let mark = |own: &mut Cuda, ends| match &mut own.timing {
            Some(timing) => timing.mark(&own.gpu, ends),
            None => Ok(()),
        };
        self.enqueue(|own| {
            mark(own, None)?;
            operation(own)?;
            mark(own, Some((phase, bytes, macs)))
        });
    }

    /// Encodes the rows of `x`, normed where a norm is given.
    fn encode(&mut self, x: Tensor, norm: Option<&Norm>, needs: Needs) -> Result<()> {
        let norm = norm.map_or(p::Norm::default(), |n| self.norm(n));
        let source = Source { x: self.place(x), norm, rows: x.rows, cols: x.cols, ..Source::default() };
        encode(&self.gpu, source, needs, &mut self.encoded)
    }

    /// Products of `x`, normed where a norm is given.
    fn encoded(&mut self, x: Tensor, norm: Option<&Norm>, products: &[Product]) -> Result<()> {
        let norm = norm.map_or(p::Norm::default(), |n| self.norm(n));
        let mut encoded = std::mem::take(&mut self.encoded);
        let done = self.encode_and_multiply(self.place(x), norm, products, &mut encoded);
        self.encoded = encoded;
        done
    }

    /// The bytes of a block.
    fn block(&self, pool: &KvPool, block: u32) -> (u64, usize) {
        let len = pool.layout.block_bytes();
        let own = &self.kv[pool.buffer.number()];
        assert!((block as usize + 1) * len <= own.memory.committed, "block {block} is not committed");
        (own.memory.at + u64::from(block) * len as u64, len)
    }

    /// The state in this row.
    fn state(&self, row: u32) -> (u64, usize) {
        let states = self.states.expect("a pool of states");
        (self.place(states.rows(row as usize..row as usize + 1)).at, 4 * states.cols)
    }
}

/// What each row of a tensor is, as runs of bytes: one run where rows lie behind one another.
pub(crate) fn runs(t: Tensor, place: p::Tensor) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let dense = t.stride == t.cols || t.rows == 1;
    let (count, len) = if dense { (1, t.rows * t.cols) } else { (t.rows, t.cols) };
    (0..count).map(move |row| (place.at + 4 * row as u64 * place.stride, row * len..(row + 1) * len))
}

/// Of each matrix, whether it is of experts.
pub(crate) fn by_experts<'a>(weights: &Weights, mixtures: impl Iterator<Item = &'a Moe>) -> Vec<bool> {
    let mut by_experts = vec![false; weights.all.len()];
    for moe in mixtures {
        let all = (0..moe.experts.count).flat_map(|e| operands(&moe.experts, e));
        all.for_each(|operand| by_experts[operand.weight] = true);
    }
    by_experts
}

impl Resources for Cuda {
    fn alloc(&mut self, class: MemoryClass, rows: usize, cols: usize) -> Result<Tensor> {
        let elements = rows * cols;
        let memory = Memory::zeroed(&self.gpu, 4 * elements, class.name())?;
        let id = BufferId::new(self.buffers.len());
        self.buffers.push(Buffer { class, memory, elements });
        Ok(Tensor { buffer: id, offset: 0, rows, cols, stride: cols })
    }

    fn upload(&mut self, values: &[f32], to: Tensor) {
        assert_eq!(values.len(), to.rows * to.cols);
        self.encoded.left_of = None;
        for (at, range) in runs(to, self.place(to)) {
            // SAFETY: the tensor was checked against its buffer; waited for below.
            must(unsafe { self.gpu.write_later(at, bytes_of(&values[range])) });
        }
        must(self.wait());
    }

    fn download(&mut self, t: Tensor, out: &mut [f32]) {
        assert_eq!(out.len(), t.rows * t.cols);
        for (at, range) in runs(t, self.place(t)) {
            // SAFETY: the tensor was checked against its buffer; waited for below.
            must(unsafe { self.gpu.read_later(at, bytes_of_mut(&mut out[range])) });
        }
        must(self.wait());
    }

    fn matrix(&mut self, source: MatrixSource) -> Result<MatrixId> {
        self.weights.all.push(Weight::new(source)?);
        Ok(MatrixId::new(self.weights.all.len() - 1))
    }

    fn rotary(&mut self, frequencies: &RotaryFrequencies, positions: usize) -> Result<RotaryId> {
        self.rotary.push(RotaryTable::new(&self.gpu, frequencies, positions)?);
        Ok(RotaryId::new(self.rotary.len() - 1))
    }

    fn moe(&mut self, moe: Moe, follows: Option<MoeId>) -> Result<MoeId> {
        self.mixtures.register(&self.gpu, &self.weights, self.mode, moe, follows)
    }

    /// Experts are guessed for no token; where tokens are many, the next layer's are brought ahead that as many wanted last.
    fn stream_experts(&mut self, options: &ExpertOptions, lookahead: Lookahead) -> Result<()> {
        let how = (lookahead, self.mode, self.host);
        let (gpu, weights, mixtures) = (&self.gpu, &mut self.weights, self.mixtures.registered());
        let streaming = Streaming::open(gpu, weights, mixtures, options, how, &mut self.computes)?;
        self.mixtures.stream(streaming);
        Ok(())
    }

    fn step_scratch(
        &self,
        layouts: &[KvLayout],
        inputs: &StepInputs,
        _: bool,
        step: &mut dyn FnMut(&mut dyn Operations),
    ) -> StepScratch {
        let moes = self.mixtures.registered().collect();
        let mut sizing = ScratchPlanner::new(self.mode, (&self.weights.all, moes), layouts, inputs);
        step(&mut sizing);
        let angles: Vec<usize> = self.rotary.iter().map(|table| 8 * table.half()).collect();
        sizing.scratch(&angles)
    }

    fn device_memory(&self) -> Option<DeviceMemory> {
        let all: u64 = self.weights.all.iter().map(|weight| Weights::padded(weight) as u64).sum();
        Some(DeviceMemory {
            device: Device::Accelerator(self.gpu.device.ordinal),
            free: self.free,
            reserve: RESERVE.min(self.free / 16),
            weights: all + self.buffers_of(MemoryClass::WeightsCopied) as u64,
            experts: self.bytes_of_experts(),
            block: None,
            least_experts: least_bytes(&self.weights, self.mixtures.registered()),
            taken_by_experts: self.mixtures.bytes().1 as u64,
        })
    }

    /// The device has given the memory of longer ones already.
    fn limit_steps(&mut self, _: usize, _: usize) {}

    fn profile(&mut self, on: bool) {
        self.timing = on.then(Timing::default);
    }

    fn record_routing(&mut self) {
        self.mixtures.record_routing();
    }

    fn read_weights(&mut self, loading: &Loading, _: &[&Bytes]) -> Result<()> {
        let new = self.weights.place(&self.gpu)?;
        self.weights.expect(loading::begin(loading, new.into_iter().collect())?);
        Ok(())
    }

    fn fill_experts(&mut self) -> bool {
        let mut more = false;
        self.enqueue(|own| {
            if let Some(streaming) = own.mixtures.streaming_mut() {
                more = streaming.fill(&own.weights)?;
            }
            Ok(())
        });
        more
    }
}

impl Caches for Cuda {
    fn alloc_kv(&mut self, layout: KvLayout, blocks: usize) -> Result<KvPool> {
        let bytes = layout.block_bytes().checked_mul(blocks);
        ensure!(bytes.is_some_and(|b| b < 1 << 46), "the KV cache is larger than the address space");
        let memory = Reserved::new(&self.gpu, bytes.unwrap_or(0), MemoryClass::Kv.name())?;
        let id = BufferId::new(self.kv.len());
        self.kv.push(Pool { layout, memory, blocks });
        Ok(KvPool { buffer: id, layout })
    }

    fn commit_kv(&mut self, pool: &KvPool, blocks: usize) -> Result<()> {
        let own = &mut self.kv[pool.buffer.number()];
        assert!(blocks <= own.blocks, "{blocks} blocks of {}", own.blocks);
        own.memory.commit(&self.gpu, blocks * pool.layout.block_bytes(), MemoryClass::Kv.name())
    }

    fn copy_blocks(&mut self, pool: &KvPool, pairs: &[(u32, u32)]) {
        for &(from, to) in pairs {
            let ((from, len), (to, _)) = (self.block(pool, from), self.block(pool, to));
            // SAFETY: two blocks, or the same, in what is committed.
            must(unsafe { self.gpu.copy(from, to, len) });
        }
    }

    fn read_block(&mut self, pool: &KvPool, block: u32, out: &mut [u8]) {
        let (at, len) = self.block(pool, block);
        assert_eq!(out.len(), len);
        // SAFETY: as long as a block that is committed.
        must(unsafe { self.gpu.read(at, out, must(self.gpu.quiet())) });
    }

    fn write_block(&mut self, pool: &KvPool, block: u32, bytes: &[u8]) {
        let (at, len) = self.block(pool, block);
        assert_eq!(bytes.len(), len);
        // SAFETY: as long as a block that is committed.
        must(unsafe { self.gpu.write(at, bytes, must(self.gpu.quiet())) });
    }

    fn lend_memory(&mut self, bytes: usize) -> std::io::Result<Box<dyn sluice_store::Memory>> {
        Ok(Box::new(Locked::new(&self.gpu.device, bytes)?))
    }

    fn alloc_states(&mut self, rows: usize, len: usize) -> Result<()> {
        ensure!(self.states.is_none(), "a pool of states is there");
        self.states = Some(self.alloc(MemoryClass::State, rows, len)?);
        Ok(())
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        let ((from, len), (to, _)) = (self.state(from), self.state(to));
        // SAFETY: two rows of the pool, or the same.
        must(unsafe { self.gpu.copy(from, to, len) });
    }

    fn zero_state(&mut self, row: u32) {
        let (at, len) = self.state(row);
        // SAFETY: a row of the pool.
        must(unsafe { self.gpu.zero(at, len) });
    }

    fn read_state(&mut self, row: u32, out: &mut [f32]) {
        let (at, len) = self.state(row);
        assert_eq!(4 * out.len(), len);
        // SAFETY: as long as a row of the pool.
        must(unsafe { self.gpu.read(at, bytes_of_mut(out), must(self.gpu.quiet())) });
    }

    fn write_state(&mut self, row: u32, state: &[f32]) {
        let (at, len) = self.state(row);
        assert_eq!(4 * state.len(), len);
        // SAFETY: as long as a row of the pool.
        must(unsafe { self.gpu.write(at, bytes_of(state), must(self.gpu.quiet())) });
    }
}

impl Operations for Cuda {
    fn embed(&mut self, table: MatrixId, out: Tensor) {
        let (weight, tokens) = (&self.weights.all[table.number()], self.inputs.tokens());
        let (rows, cols) = (weight.rows(), weight.cols());
        assert!(out.rows >= tokens.len() && out.cols == cols, "rows of {cols} into {out:?}");
        assert!(tokens.iter().all(|t| (*t as usize) < rows), "a token beyond {rows}");
        let linear = Linear { matrix: table, rows: 0..tokens.len().min(rows), bias: None };
        self.phase(Phase::Embed, &[&linear], 0, |own| {
            let table = own.weights.all[table.number()].at_row(0, own.mode);
            let rows = number(own.inputs.tokens().len());
            let (tokens, out) = (own.step.tokens, own.place(out));
            let parameters = p::Embed { table, tokens, out, rows, cols: number(cols) };
            // SAFETY: tokens and the tensor were checked.
            unsafe { own.gpu.launch(Kernel::Embed, [rows, 1, 1], 256, 0, &parameters)? };
            Ok(())
        });
    }

    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]) {
        let used: Vec<&Linear> = projections.iter().map(|p| &p.linear).collect();
        self.phase(Phase::Project, &used, x.rows, |own| {
            for Projection { linear, out } in projections {
                assert!(out.rows >= x.rows && out.cols == linear.rows.len(), "{:?} into {out:?}", linear.rows);
            }
            let products = own.products(projections, x.rows);
            own.encoded(x, norm.as_ref(), &products)
        });
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor) {
        assert!(out.rows >= x.rows && out.cols == linear.rows.len(), "{:?} into {out:?}", linear.rows);
        self.phase(Phase::Project, &[linear], x.rows, |own| {
            let product = own.product(linear, x.rows, own.place(out), true, own.mode);
            own.encoded(x, None, &[product])
        });
    }

    fn attention(&mut self, layer: &AttentionLayer) {
        self.phase(Phase::Attention, &[], 0, |own| own.run_attention(layer));
    }

    fn delta_net(&mut self, layer: &DeltaLayer) {
        self.phase(Phase::DeltaNet, &[], 0, |own| own.run_delta_net(layer));
    }

    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor) {
        let Mlp { gate, up, down } = mlp;
        assert!(residual.rows >= x.rows && residual.cols == down.rows.len(), "{:?} into {residual:?}", down.rows);
        self.phase(Phase::Mlp, &[gate, up, down], x.rows, |own| {
            let intermediate = gate.rows.len();
            let [gates, ups] = [&mut own.gates, &mut own.ups].map(|s| s.room(&own.gpu, 4 * x.rows * intermediate));
            let room = [gates?, ups?].map(|at| p::Tensor::dense(at, intermediate));
            let [gates, ups] = room;
            let both = [(gate, gates), (up, ups)].map(|(l, out)| own.product(l, x.rows, out, false, own.mode));
            let last = own.product(down, x.rows, own.place(residual), true, own.mode);
            let input = Input::Floats { x: own.place(x), norm: own.norm(&norm), rows: x.rows };
            let mut hidden = std::mem::take(&mut own.hidden);
            let done = if multiply_rows(&own.gpu, input, &both, true)? {
                own.encode_and_multiply(gates, p::Norm::default(), &[last], &mut hidden)
            } else {
                own.encode(x, Some(&norm), own.needs(gate, own.mode).and(own.needs(up, own.mode)))?;
                own.gated(&both, &[last], &own.encoded, &mut hidden)
            };
            own.hidden = hidden;
            done
        });
    }

    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor) {
        assert_eq!((x.rows, x.cols), (residual.rows, residual.cols), "as much comes out as goes in");
        let number = moe.number();
        let work = |own: &Cuda| own.work_of_mixture(&own.mixtures.all[number].moe, x.rows);
        self.phase_with(Phase::Experts, work, |own| own.run_mixture(x, number, residual));
    }

    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, normed: Tensor, residual: Tensor) -> Routing {
        let mut routing = Routing::default();
        self.encoded.left_of = None;
        self.enqueue(|own| {
            routing = own.run_mixture_but_experts(x, moe.number(), normed, residual)?;
            Ok(())
        });
        routing
    }

    fn logits(&mut self, x: Tensor, norm: Norm, head: MatrixId) {
        let (vocabulary, rows) = (self.weights.all[head.number()].rows(), self.inputs.wanted().len());
        assert!(self.inputs.wanted().last().is_none_or(|last| (*last as usize) < x.rows), "a row that is not there");
        self.copied = false;
        if rows == 0 {
            self.left = Logits { rows, vocabulary };
            return;
        }
        let linear = Linear { matrix: head, rows: 0..vocabulary, bias: None };
        self.phase(Phase::Head, &[&linear], rows, |own| {
            let (norm, taken) = (own.norm(&norm), own.step.wanted);
            let at = own.logits.room(&own.gpu, 4 * rows * vocabulary)?;
            let product = own.product(&linear, rows, p::Tensor::dense(at, vocabulary), false, own.mode);
            // Where all rows are wanted, they lie there as they are taken.
            let all = rows == own.inputs.tokens().len();
            let input = Input::Floats { x: own.place(x), norm, rows };
            if !all || !multiply_rows(&own.gpu, input, &[product], false)? {
                let source = Source { x: own.place(x), norm, taken, rows, cols: x.cols, ..Source::default() };
                encode(&own.gpu, source, own.needs(&linear, own.mode), &mut own.encoded)?;
                multiply(&own.gpu, &[product], &own.encoded)?;
            }
            own.left = Logits { rows, vocabulary };
            own.drawing.look(&own.gpu, at, own.left)
        });
    }
}

impl Backend for Cuda {
    fn begin(&mut self, inputs: &StepInputs) {
        #[cfg(feature = "tuning")]
        BEGAN.set(Some(std::time::Instant::now()));
        // Reuses what earlier steps allocated.
        self.inputs.clone_from(inputs);
        self.left = Logits::default();
        self.encoded.left_of = None;
        self.drawing.forget();
        self.enqueue(|own| {
            own.weights.bring(&own.gpu)?;
            own.mixtures.bring(&own.gpu, &own.weights, own.mode)?;
            own.rotary.iter_mut().try_for_each(|table| table.fill(&own.gpu, own.inputs.positions()))?;
            own.step.begin(&own.gpu, &own.inputs, own.kv.len())?;
            own.gpu.begin_step();
            Ok(())
        });
    }

    fn end(&mut self) -> Outcome {
        #[cfg(feature = "tuning")]
        let gathered = std::time::Instant::now();
        self.enqueue(|own| {
            own.carry_out()?;
            own.host_logits.room(&own.gpu, 4 * own.left.rows * own.left.vocabulary)?;
            own.drawing.bring(&own.gpu)?;
            own.wait()?;
            own.timing.as_mut().map_or(Ok(()), Timing::end)
        });
        #[cfg(feature = "tuning")]
        if std::env::var_os("SLUICE_CUDA_TIMES").is_some() {
            let before = BEGAN.get().map_or(0, |began| gathered.duration_since(began).as_micros());
            eprintln!("step: {before} us gathering, {} us carried out", gathered.elapsed().as_micros());
        }
        // Whatever went wrong, nobody uses experts any more.
        self.mixtures.ask_no_more();
        let settled = self.wait().and_then(|()| self.mixtures.settle(&self.gpu, &self.weights));
        self.enqueue(|_| settled);
        let (mut failed, routed, synchronisations) = self.mixtures.end();
        if let Some(why) = self.error.take() {
            let rows = (0..number(self.inputs.tokens().len())).collect();
            failed = vec![Failed { rows, why }];
        }
        Outcome { logits: self.left, failed, routed, synchronisations }
    }

    fn read_logits(&mut self, logits: Logits) -> &[f32] {
        assert_eq!(logits, self.left, "logits of the last step");
        if !self.copied {
            let bytes = 4 * logits.rows * logits.vocabulary;
            let (gpu, at) = (&self.gpu, self.logits.at());
            // SAFETY: as many as the head has left; waited for right here.
            must(
                self.host_logits
                    .room(gpu, bytes)
                    .and_then(|host| unsafe { Ok(gpu.read(at, &mut host[..bytes], gpu.quiet()?)?) }),
            );
            self.copied = true;
        }
        self.host_logits.floats(logits.rows * logits.vocabulary)
    }

    fn each_logits(&mut self, logits: Logits, each: &(dyn Fn(usize, usize, &[f32]) + Sync)) {
        let mut threads = self.threads.take();
        let (all, vocabulary) = (self.read_logits(logits), logits.vocabulary);
        let one = |row: usize, thread| each(row, thread, &all[row * vocabulary..(row + 1) * vocabulary]);
        match &mut threads {
            Some(threads) => threads.run(logits.rows, &one),
            None => (0..logits.rows).for_each(|row| one(row, 0)),
        }
        self.threads = threads;
    }

    fn drawing(&mut self) -> Option<&mut dyn DeviceSampling> {
        Some(self)
    }

    fn threads(&self) -> usize {
        self.threads.as_ref().map_or(1, Threads::threads)
    }

    fn take_profile(&mut self) -> Profile {
        self.timing.as_mut().map(|timing| std::mem::take(&mut timing.profile)).unwrap_or_default()
    }

    fn take_streamed(&mut self) -> Option<Streamed> {
        self.mixtures.streaming_mut().map(Streaming::take)
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.mixtures.streaming().map_or(Vec::new(), Streaming::notes);
        if !self.gpu.device.reserves && !self.kv.is_empty() {
            notes.push(format!(
                "{} cannot reserve addresses: keys and values take all their memory at once",
                self.gpu.device.name
            ));
        }
        notes
    }

    fn memory(&mut self) -> Vec<MemoryUse> {
        let device = Device::Accelerator(self.gpu.device.ordinal);
        let of = |class| self.buffers_of(class);
        let (mixture_scratch, experts) = self.mixtures.bytes();
        let scratch = [&self.gates, &self.ups, &self.logits].map(Scratch::bytes).iter().sum::<usize>();
        let scratch = scratch
            + self.encoded.bytes()
            + self.hidden.bytes()
            + self.drawing.bytes()
            + self.delta.bytes()
            + self.attention.bytes()
            + mixture_scratch;
        let (step, pinned) = self.step.bytes();
        let rotary: usize = self.rotary.iter().map(|t| t.memory.committed).sum();
        let kv = self.kv.iter().map(|pool| pool.memory.committed).sum();
        let on_device = |class| match class {
            MemoryClass::WeightsMapped => 0,
            MemoryClass::WeightsCopied => of(class) + self.weights.bytes(),
            MemoryClass::Kv => kv,
            MemoryClass::State => of(class),
            MemoryClass::Experts => experts,
            MemoryClass::Scratch => of(class) + scratch + step + rotary,
        };
        let on_host = |class| match class {
            MemoryClass::Experts => self.mixtures.streaming().map_or(0, Streaming::host_bytes),
            MemoryClass::Scratch => pinned + self.host_logits.bytes() + self.drawing.host_bytes(),
            _ => 0,
        };
        let uses = |class| {
            let host = MemoryUse { class, device: Device::Host, bytes: on_host(class) };
            [MemoryUse { class, device, bytes: on_device(class) }, host]
        };
        MemoryClass::ALL.into_iter().flat_map(uses).collect()
    }
}
