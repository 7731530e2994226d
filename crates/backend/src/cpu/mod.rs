//! The CPU backend: buffers in anonymous memory, weights where their files are mapped or on each node of memory, a pool of threads.

mod attention;
mod delta_net;
mod experts;
mod matmul;
mod memory;
mod mixture;
mod offload;
mod replicas;
mod scratch;
mod streaming;
mod thread_tuner;

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use sluice_kernels::format::Activations;
use sluice_kernels::{Isa, affine, norm};
use sluice_store::Loading;

use crate::affinity::{CoreBinding, Mask};
use crate::numa::{Numa, Processors};
use crate::pool::Pool;
use crate::{
    AttentionLayer, Backend, BufferId, Caches, Capacity, DeltaLayer, Device, ExpertOptions, KvLayout, KvPool, Linear,
    Logits, Lookahead, MatrixId, MatrixSource, MemoryClass, MemoryUse, Mlp, Moe, MoeId, Norm, Operations, Outcome,
    Phase, Profile, Projection, Resources, RotaryFrequencies, RotaryId, Routing, StepInputs, StepScratch, Streamed,
    Tensor,
};
use matmul::{Encoded, Product, Worker};
use memory::{Buffer, PerThread, Place, RotaryTable, Weight};
use mixture::HostMixture;
pub use offload::{HostExperts, OffloadedExpert};
use replicas::Replicas;

use thread_tuner::{ThreadTuner, Waits};

/// A backend's [`ExecContext`]: a macro, because the borrows are of single fields.
macro_rules! context {
    ($cpu:ident) => {
        $crate::cpu::matmul::ExecContext {
            isa: $cpu.isa,
            mode: $cpu.mode,
            weights: &$cpu.weights,
            buffers: &$cpu.buffers,
            pool: &mut $cpu.pool,
            workers: &mut $cpu.workers,
        }
    };
}

/// The CPU.
pub struct Cpu {
    isa: Isa,
    mode: Activations,
    pool: Pool,
    crowd: ThreadTuner,
    waits: Waits,
    /// When the step under way began.
    began: Instant,
    /// Of the thread that computes steps, where threads are bound; what is to be said about that.
    seat: Option<CoreBinding>,
    bound: Option<String>,
    buffers: Vec<Buffer>,
    weights: Vec<Weight>,
    /// Where threads are on several nodes of memory and are to read weights of their own.
    replicas: Option<Replicas>,
    rotary: Vec<RotaryTable>,
    /// One for each cache group.
    kv: Vec<KvPool>,
    /// `[rows, state]`
    states: Option<Tensor>,
    workers: PerThread<Worker>,
    inputs: StepInputs,
    /// Encoded inputs, and hidden activations of dense parts.
    encoded: Encoded,
    hidden: Encoded,
    products: Vec<Product>,
    /// 0, 1, 2, ..: token lists that take every row.
    counting: Vec<u32>,
    attention: attention::AttentionWork,
    delta: delta_net::DeltaWork,
    mixture: HostMixture,
    /// `[rows, vocabulary]`
    logits: Vec<f32>,
    left: Logits,
    profile: Option<Profile>,
}

impl Cpu {
    /// `threads` threads, with the arithmetic of `isa` and activations encoded as `mode` says.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn new(isa: Isa, threads: usize, mode: Activations) -> Result<Cpu> {
        let pool = Pool::new(threads).with_context(|| format!("cannot start {threads} threads"))?;
        Ok(Cpu {
            isa,
            mode,
            workers: PerThread::new(pool.threads()),
            crowd: ThreadTuner::new(pool.threads()),
            waits: Waits::new(pool.threads()),
            began: Instant::now(),
            seat: None,
            bound: None,
            pool,
            buffers: Vec::new(),
            weights: Vec::new(),
            replicas: None,
            rotary: Vec::new(),
            kv: Vec::new(),
            states: None,
            inputs: StepInputs::new(&[], Capacity { tokens: 0, sequences: 0, blocks: 0 }),
            encoded: Encoded::default(),
            hidden: Encoded::default(),
            products: Vec::new(),
            counting: Vec::new(),
            attention: attention::AttentionWork::default(),
            delta: delta_net::DeltaWork::default(),
            mixture: HostMixture::default(),
            logits: Vec::new(),
            left: Logits::default(),
            profile: None,
        })
    }

    /// Binds threads to some of these processors as `numa` says, on machines of several nodes: the calling thread of a step while it is computed, the others for good.
    ///
    /// # Errors
    /// When a processor is not this process's.
    pub fn bind(&mut self, here: &Processors, numa: Numa) -> Result<()> {
        let threads = self.pool.threads();
        let Some(processors) = here.of_threads(numa, threads) else { return Ok(()) };
        self.bind_to(&processors)?;
        self.bound = Some(here.describe(numa, threads));
        if numa == Numa::Replicate {
            let nodes: Vec<usize> = processors.iter().filter_map(|p| here.node_of(*p)).collect();
            self.replicas = Replicas::new(&nodes);
            for (worker, node) in self.workers.iter_mut().zip(&nodes) {
                let known = self.replicas.iter().flat_map(Replicas::nodes);
                worker.node = known.take_while(|known| *known != node).count();
            }
        }
        Ok(())
    }

    /// Thread t to `processors[t]`.
    fn bind_to(&mut self, processors: &[usize]) -> Result<()> {
        self.seat = Some(CoreBinding::at(processors[0]));
        for (thread, &processor) in processors.iter().enumerate().skip(1) {
            let bound = Mask::from_processors([processor]).bind(self.pool.wait_for_number(thread));
            bound.with_context(|| format!("cannot bind a thread to processor {processor}"))?;
        }
        Ok(())
    }

    /// Copies a portion of the weights, where they are to be copied. Whether there was any; the calling thread has its seat.
    fn copy_portion(&mut self) -> bool {
        self.replicas.as_mut().is_some_and(|r| r.copy_some(&mut self.weights, &mut self.pool, &self.workers))
    }

    /// Whether the step under way is of so few tokens that its rounds are short.
    fn is_short(&self) -> bool {
        self.inputs.tokens().len() <= thread_tuner::SHORT
    }

    fn place(&self, t: Tensor) -> Place {
        Place::new(&self.buffers[t.buffer.number()], t)
    }

    /// The weight of a norm.
    fn norm_weight(&self, norm: &Norm) -> (&'static [f32], f32) {
        let place = self.place(norm.weight);
        // SAFETY: weights are written once, at load, and their buffers live as long as the backend; the slice is not kept
        // beyond the operation.
        (unsafe { place.get(0, 0..place.cols) }, norm.eps)
    }

    fn count_to(&mut self, n: usize) {
        let from = self.counting.len();
        self.counting.extend((from..n).map(|i| i as u32));
    }

    /// The state in this row.
    fn state(&self, row: u32) -> Place {
        let states = self.states.expect("a pool of states");
        self.place(states.rows(row as usize..row as usize + 1))
    }

    /// The bytes of a block.
    fn block(&mut self, pool: &KvPool, block: u32) -> &mut [u8] {
        let len = pool.layout.block_bytes();
        &mut self.buffers[pool.buffer.number()].as_bytes_mut()[block as usize * len..][..len]
    }

    /// Runs the listed products on all rows of what was encoded.
    fn run_products(&mut self, tokens: usize) {
        self.count_to(tokens);
        matmul::run_products(context!(self), &mut self.products, &self.encoded, &self.counting[..tokens]);
        self.products.clear();
    }

    /// Records a phase that used these matrices once for each of `tokens` tokens.
    fn record(&mut self, phase: Phase, since: Instant, used: impl Iterator<Item = (usize, usize)>, tokens: usize) {
        let Some(profile) = &mut self.profile else { return };
        let (mut bytes, mut macs) = (0, 0);
        for (weight, rows) in used {
            let w = &self.weights[weight];
            bytes += (rows * w.bytes_per_row()) as u64;
            macs += (rows * w.cols() * tokens) as u64;
        }
        profile.add(phase, since.elapsed(), bytes, macs);
    }
}

/// Rows of an embedding that is not there yet which are worth a read each.
const FEW_ROWS: usize = 64;
/// Floats of a state that a thread copies at once.
const PIECE: usize = 1 << 17;

fn linear_rows(l: &Linear) -> (usize, usize) {
    (l.matrix.number(), l.rows.len())
}

impl Resources for Cpu {
    fn alloc(&mut self, class: MemoryClass, rows: usize, cols: usize) -> Result<Tensor> {
        let id = BufferId::new(self.buffers.len());
        self.buffers.push(Buffer::zeroed(class, rows * cols * size_of::<f32>())?);
        Ok(Tensor { buffer: id, offset: 0, rows, cols, stride: cols })
    }

    fn upload(&mut self, values: &[f32], to: Tensor) {
        assert_eq!(values.len(), to.rows * to.cols);
        let place = self.place(to);
        for (row, values) in values.chunks_exact(to.cols.max(1)).enumerate() {
            // SAFETY: `&mut self`: no operation is running.
            unsafe { place.get_mut(row, 0..to.cols) }.copy_from_slice(values);
        }
    }

    fn download(&mut self, t: Tensor, out: &mut [f32]) {
        assert_eq!(out.len(), t.rows * t.cols);
        let place = self.place(t);
        for (row, out) in out.chunks_exact_mut(t.cols.max(1)).enumerate() {
            // SAFETY: `&mut self`: no operation is running.
            out.copy_from_slice(unsafe { place.get(row, 0..t.cols) });
        }
    }

    fn matrix(&mut self, source: MatrixSource) -> Result<MatrixId> {
        ensure!(source.rows > 0 && source.cols > 0, "an empty matrix");
        self.weights.push(Weight::new(source)?);
        Ok(MatrixId::new(self.weights.len() - 1))
    }

    fn rotary(&mut self, frequencies: &RotaryFrequencies, positions: usize) -> Result<RotaryId> {
        self.rotary.push(RotaryTable::new(frequencies, positions)?);
        Ok(RotaryId::new(self.rotary.len() - 1))
    }

    fn moe(&mut self, moe: Moe, follows: Option<MoeId>) -> Result<MoeId> {
        Ok(self.mixture.register(moe, follows))
    }

    fn stream_experts(&mut self, options: &ExpertOptions, lookahead: Lookahead) -> Result<()> {
        self.mixture.stream(&mut self.weights, options, lookahead)?;
        // Helpers keep spinning, to be there when a read completes.
        self.pool.set_spin(sluice_experts::SPIN);
        Ok(())
    }

    fn weight_copies(&self) -> usize {
        self.replicas.as_ref().map_or(1, |replicas| replicas.nodes().len())
    }

    fn replicate_weights(&mut self, loading: Option<&Loading>) -> Option<String> {
        self.replicas.as_mut().map(|replicas| replicas.begin(loading))
    }

    fn copy_weights(&mut self) -> bool {
        self.seat.iter_mut().for_each(CoreBinding::take);
        let copied = self.copy_portion();
        self.seat.iter_mut().for_each(CoreBinding::leave);
        copied
    }

    fn profile(&mut self, on: bool) {
        self.profile = on.then(Profile::default);
    }

    fn record_routing(&mut self) {
        self.mixture.record_routing();
    }

    fn step_scratch(
        &self,
        layouts: &[KvLayout],
        inputs: &StepInputs,
        streamed: bool,
        step: &mut dyn FnMut(&mut dyn Operations),
    ) -> StepScratch {
        let mut sizing = scratch::ScratchPlanner::new(self, layouts, inputs, streamed);
        step(&mut sizing);
        sizing.scratch()
    }

    fn limit_steps(&mut self, tokens: usize, rows: usize) {
        for buffer in self.buffers.iter_mut().filter(|b| b.class == MemoryClass::Scratch) {
            buffer.committed = buffer.bytes / rows.max(1) * tokens;
        }
    }

    fn fill_experts(&mut self) -> bool {
        self.mixture.streaming_mut().is_some_and(|streaming| streaming.store.warm_up())
    }
}

impl Caches for Cpu {
    fn alloc_kv(&mut self, layout: KvLayout, blocks: usize) -> Result<KvPool> {
        let id = BufferId::new(self.buffers.len());
        let bytes =
            layout.block_bytes().checked_mul(blocks).context("the KV cache is larger than the address space")?;
        self.buffers.push(Buffer::reserved(MemoryClass::Kv, bytes)?);
        self.kv.push(KvPool { buffer: id, layout });
        Ok(KvPool { buffer: id, layout })
    }

    fn commit_kv(&mut self, pool: &KvPool, blocks: usize) -> Result<()> {
        self.buffers[pool.buffer.number()].commit(blocks * pool.layout.block_bytes(), &mut self.pool)
    }

    fn copy_blocks(&mut self, pool: &KvPool, pairs: &[(u32, u32)]) {
        let len = pool.layout.block_bytes();
        let bytes = self.buffers[pool.buffer.number()].as_bytes_mut();
        for &(from, to) in pairs {
            bytes.copy_within(from as usize * len..(from as usize + 1) * len, to as usize * len);
        }
    }

    fn read_block(&mut self, pool: &KvPool, block: u32, out: &mut [u8]) {
        out.copy_from_slice(self.block(pool, block));
    }

    fn write_block(&mut self, pool: &KvPool, block: u32, bytes: &[u8]) {
        self.block(pool, block).copy_from_slice(bytes);
    }

    fn alloc_states(&mut self, rows: usize, len: usize) -> Result<()> {
        ensure!(self.states.is_none(), "a pool of states is there");
        self.states = Some(self.alloc(MemoryClass::State, rows, len)?);
        Ok(())
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        let (from, to) = (self.state(from), self.state(to));
        self.pool.run(to.cols.div_ceil(PIECE), &|piece, _| {
            let cols = piece * PIECE..((piece + 1) * PIECE).min(to.cols);
            // SAFETY: `&mut self`: no operation is running; two rows, or the same, which is only read then, and of each this piece.
            unsafe { to.part(0..1, cols.clone()).copy_from(from.part(0..1, cols)) };
        });
    }

    fn zero_state(&mut self, row: u32) {
        let state = self.state(row);
        // SAFETY: `&mut self`: no operation is running.
        unsafe { state.get_mut(0, 0..state.cols) }.fill(0.0);
    }

    fn read_state(&mut self, row: u32, out: &mut [f32]) {
        let state = self.state(row);
        // SAFETY: `&mut self`: no operation is running.
        out.copy_from_slice(unsafe { state.get(0, 0..state.cols) });
    }

    fn write_state(&mut self, row: u32, from: &[f32]) {
        let state = self.state(row);
        assert_eq!(from.len(), state.cols);
        self.pool.run(from.len().div_ceil(PIECE), &|piece, _| {
            let cols = piece * PIECE..((piece + 1) * PIECE).min(from.len());
            // SAFETY: `&mut self`: no operation is running; this piece is this task's alone.
            unsafe { state.get_mut(0, cols.clone()) }.copy_from_slice(&from[cols]);
        });
    }
}

impl Operations for Cpu {
    fn embed(&mut self, table: MatrixId, out: Tensor) {
        let t0 = Instant::now();
        let place = self.place(out);
        let weight = &self.weights[table.number()];
        let tokens = self.inputs.tokens();
        // A few rows are read by themselves; for many it is better to wait for the whole matrix.
        if !weight.is_ready() && tokens.len() <= FEW_ROWS {
            let isa = self.isa;
            self.pool.run(tokens.len(), &|row, _| {
                // SAFETY: this task alone writes this row.
                weight.row_now(isa, tokens[row] as usize, unsafe { place.get_mut(row, 0..place.cols) });
            });
            let tokens = tokens.len();
            self.record(Phase::Embed, t0, std::iter::once((table.number(), tokens)), 0);
            return;
        }
        weight.wait();
        // SAFETY: no task is running, and the calling thread is the first.
        let matrix = weight.matrix(unsafe { self.workers.get(0) }.node);
        for (row, &token) in tokens.iter().enumerate() {
            // SAFETY: `&mut self`: no operation is running.
            let out = unsafe { place.get_mut(row, 0..place.cols) };
            affine::dequantize_row(self.isa, &matrix, token as usize, out);
        }
        let tokens = tokens.len();
        self.record(Phase::Embed, t0, std::iter::once((table.number(), tokens)), 0);
    }

    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]) {
        let t0 = Instant::now();
        let (tokens, x, context) = (x.rows, self.place(x), context!(self));
        let needs = context.needs(projections.iter().map(|p| p.linear.matrix));
        context.wait_for(projections.iter().map(|p| &p.linear));
        self.products.extend(projections.iter().map(|p| context.product(&p.linear, context.place(p.out), false)));
        matmul::encode(context, x, norm.as_ref(), needs, &mut self.encoded);
        self.run_products(tokens);
        self.record(Phase::Project, t0, projections.iter().map(|p| linear_rows(&p.linear)), tokens);
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor) {
        let t0 = Instant::now();
        let (tokens, x, context) = (x.rows, self.place(x), context!(self));
        context.wait_for([linear]);
        self.products.push(context.product(linear, context.place(out), true));
        let needs = context.needs([linear.matrix]);
        matmul::encode(context, x, None, needs, &mut self.encoded);
        self.run_products(tokens);
        self.record(Phase::Project, t0, std::iter::once(linear_rows(linear)), tokens);
    }

    fn attention(&mut self, layer: &AttentionLayer) {
        let t0 = Instant::now();
        self.run_attention(layer);
        self.record(Phase::Attention, t0, std::iter::empty(), 0);
    }

    fn delta_net(&mut self, layer: &DeltaLayer) {
        let t0 = Instant::now();
        self.run_delta_net(layer);
        self.record(Phase::DeltaNet, t0, std::iter::empty(), 0);
    }

    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor) {
        let t0 = Instant::now();
        let (tokens, x, residual) = (x.rows, self.place(x), self.place(residual));
        self.count_to(tokens);
        let mut context = context!(self);
        context.wait_for([&mlp.gate, &mlp.up, &mlp.down]);
        let needs = context.needs([mlp.gate.matrix, mlp.up.matrix]);
        matmul::encode(context.again(), x, Some(&norm), needs, &mut self.encoded);
        let counting = &self.counting[..tokens];
        experts::dense_gate_up(context.again(), mlp, &self.encoded, counting, &mut self.hidden);
        let down = context.product(&mlp.down, residual, true);
        matmul::run_products(context, &mut [down], &self.hidden, counting);
        self.record(Phase::Mlp, t0, [&mlp.gate, &mlp.up, &mlp.down].into_iter().map(linear_rows), tokens);
    }

    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor) {
        let (x, residual) = (self.place(x), self.place(residual));
        self.mixture.run(context!(self), moe.number(), x, residual, self.profile.as_mut());
    }

    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, normed: Tensor, residual: Tensor) -> Routing {
        let (x, normed, residual) = (self.place(x), self.place(normed), self.place(residual));
        self.mixture.run_but_experts(context!(self), moe.number(), x, normed, residual)
    }

    fn logits(&mut self, x: Tensor, norm: Norm, head: MatrixId) {
        let t0 = Instant::now();
        let (x, vocabulary) = (self.place(x), self.weights[head.number()].rows());
        let (weight, eps) = self.norm_weight(&norm);
        let needs = context!(self).needs([head]);
        // 1. norm and encode the wanted rows
        let rows = self.inputs.wanted();
        let count = rows.len();
        self.encoded.reset(count, x.cols, needs);
        self.workers.reserve(0, x.cols, 0, 0);
        let (writer, isa, workers) = (self.encoded.writer(needs), self.isa, &self.workers);
        self.pool.run(count, &|task, thread| {
            // SAFETY: one borrow, by the task that runs as this thread; x is not written meanwhile; this task alone writes row `task`.
            unsafe {
                let normed = matmul::part(&mut workers.get(thread).row, x.cols);
                norm::rms_norm(isa, x.get(rows[task] as usize, 0..x.cols), weight, eps, normed);
                writer.write(isa, task, 0, normed);
            }
        });
        // 2. head
        let out = Place::of_slice(matmul::part(&mut self.logits, count * vocabulary), vocabulary);
        let linear = Linear { matrix: head, rows: 0..vocabulary, bias: None };
        let context = context!(self);
        context.wait_for([&linear]);
        self.products.push(context.product(&linear, out, false));
        self.run_products(count);
        self.left = Logits { rows: count, vocabulary };
        self.record(Phase::Head, t0, std::iter::once((head.number(), vocabulary)), count);
    }
}

impl Backend for Cpu {
    fn begin(&mut self, inputs: &StepInputs) {
        // Reuses what earlier steps allocated.
        self.inputs.clone_from(inputs);
        self.seat.iter_mut().for_each(CoreBinding::take);
        self.copy_portion();
        self.began = Instant::now();
        self.pool.use_threads(if self.is_short() { self.crowd.chosen() } else { self.pool.threads() });
        self.attention.begin();
        self.left = Logits::default();
        for table in &mut self.rotary {
            table.fill(self.inputs.positions(), &mut self.pool);
        }
    }

    fn end(&mut self) -> Outcome {
        let (failed, routed, synchronisations) = self.mixture.end();
        if self.is_short() {
            let (pool, waits) = (&self.pool, &mut self.waits);
            self.crowd.step(self.began.elapsed(), |threads| waits.read(pool, threads));
        }
        self.seat.iter_mut().for_each(CoreBinding::leave);
        Outcome { logits: self.left, failed, routed, synchronisations }
    }

    fn read_logits(&mut self, logits: Logits) -> &[f32] {
        assert_eq!(logits, self.left, "logits of the last step");
        &self.logits[..logits.rows * logits.vocabulary]
    }

    fn each_logits(&mut self, logits: Logits, each: &(dyn Fn(usize, usize, &[f32]) + Sync)) {
        assert_eq!(logits, self.left, "logits of the last step");
        let (all, vocabulary) = (&self.logits, logits.vocabulary);
        let one = |row: usize, thread| each(row, thread, &all[row * vocabulary..(row + 1) * vocabulary]);
        self.pool.run(logits.rows, &one);
    }

    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn take_profile(&mut self) -> Profile {
        self.profile.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn take_streamed(&mut self) -> Option<Streamed> {
        self.mixture.streaming_mut().map(streaming::Streaming::take)
    }

    fn notes(&self) -> Vec<String> {
        let streaming = self.mixture.streaming().into_iter().flat_map(|s| s.store.notes().to_vec());
        let failed = self.replicas.as_ref().and_then(Replicas::failed);
        self.bound.iter().chain(failed).cloned().chain(streaming).collect()
    }

    fn memory(&mut self) -> Vec<MemoryUse> {
        let of = |class| -> usize { self.buffers.iter().filter(|b| b.class == class).map(|b| b.committed).sum() };
        let weights = |mapped: bool| -> usize {
            // What was mapped is left once it is copied.
            let of = |w: &&Weight| !w.streamed && w.is_mapped() == mapped && !(mapped && w.is_copied());
            self.weights.iter().filter(of).map(Weight::bytes).sum()
        };
        let copies = self.replicas.as_ref().map_or(0, Replicas::bytes);
        let scratch = self.encoded.bytes() + self.hidden.bytes() + self.mixture.scratch_bytes();
        let scratch = scratch + self.workers.iter_mut().map(|w| w.bytes()).sum::<usize>() + 4 * self.counting.len();
        let scratch = scratch + self.rotary.iter().map(RotaryTable::bytes).sum::<usize>();
        let scratch = scratch + self.attention.bytes() + self.delta.bytes();
        let bytes = |class| match class {
            MemoryClass::WeightsMapped => of(class) + weights(true),
            MemoryClass::WeightsCopied => of(class) + weights(false) + copies,
            MemoryClass::Scratch => of(class) + scratch,
            MemoryClass::Experts => self.mixture.streaming().map_or(0, |s| s.store.bytes()),
            MemoryClass::Kv | MemoryClass::State => of(class),
        };
        MemoryClass::ALL.map(|class| MemoryUse { class, device: Device::Host, bytes: bytes(class) }).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::affinity::current;

    #[test]
    fn threads_run_where_they_are_bound() {
        let mask = Mask::of(0).unwrap();
        let all = mask.processors();
        let mut cpu = Cpu::new(Isa::GENERIC, 4, Activations::F32).unwrap();
        let processors: Vec<usize> = all.iter().rev().copied().cycle().take(4).collect();
        cpu.bind_to(&processors).unwrap();
        let empty = StepInputs::new(&[], Capacity { tokens: 0, sequences: 0, blocks: 0 });
        for _ in 0..3 {
            cpu.begin(&empty);
            cpu.pool.use_threads(4);
            // Each waits for all, so that each takes one.
            let together = std::sync::Barrier::new(4);
            cpu.pool.run(4, &|_, thread| {
                together.wait();
                assert_eq!(current(), processors[thread]);
            });
            cpu.end();
            assert!(Mask::of(0).unwrap() == mask, "the caller is bound no longer than a step");
        }
        for (thread, processor) in processors.iter().enumerate().skip(1) {
            let number = cpu.pool.number(thread).unwrap();
            assert_eq!(Mask::of(number).unwrap().processors(), [*processor]);
        }
        assert!(cpu.bind_to(&[0, 8191]).is_err());
    }
}
