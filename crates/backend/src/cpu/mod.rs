//! The CPU backend: buffers in anonymous memory, weights where their files are mapped, a pool of threads.

mod attention;
mod delta_net;
mod experts;
mod matmul;
mod memory;
mod scratch;
mod streaming;

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use sluice_kernels::matmul::{Activations, Encoding};
use sluice_kernels::{Isa, affine, norm, route};

use crate::pool::Pool;
use crate::{
    AttentionStep, Backend, BufferId, DeltaStep, ExpertOptions, Experts, Foresight, KvLayout, KvPool, Linear, MatrixId,
    MatrixSource, MemoryClass, Mlp, NextMixture, Norm, Phase, Profile, Projection, RotaryFrequencies, Routed, Routing,
    Scoring, SharedExpert, Tensor,
};
use matmul::{Encoded, Job, Needs, Worker};
use memory::{Buffer, Parts, PerThread, Place, Weight};

/// A backend's [`Crew`]: a macro, because the borrows are of single fields.
macro_rules! crew {
    ($cpu:ident) => {
        $crate::cpu::matmul::Crew {
            isa: $cpu.isa,
            mode: $cpu.mode,
            weights: &$cpu.weights,
            pool: &mut $cpu.pool,
            workers: &mut $cpu.workers,
        }
    };
}
use crew;
pub use scratch::StepScratch;
pub use streaming::{Lookahead, Streamed};

/// The CPU.
pub struct Cpu {
    isa: Isa,
    mode: Activations,
    pool: Pool,
    buffers: Vec<Buffer>,
    weights: Vec<Weight>,
    workers: PerThread<Worker>,
    /// Encoded inputs, hidden activations of routed experts and of the dense or shared part.
    encoded: Encoded,
    hidden: Encoded,
    shared_hidden: Encoded,
    jobs: Vec<Job>,
    plan: experts::Plan,
    /// Router logits `[tokens, experts]` and the shared expert's gates `[tokens, 1]`.
    router_logits: Vec<f32>,
    shared_gates: Vec<f32>,
    /// 0, 1, 2, ..: token lists that take every row.
    counting: Vec<u32>,
    attention: attention::Work,
    delta: delta_net::Work,
    profile: Option<Profile>,
    routed: Option<Vec<Routed>>,
    streaming: Option<streaming::Streaming>,
    guess: streaming::Guess,
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
            pool,
            buffers: Vec::new(),
            weights: Vec::new(),
            encoded: Encoded::default(),
            hidden: Encoded::default(),
            shared_hidden: Encoded::default(),
            jobs: Vec::new(),
            plan: experts::Plan::default(),
            router_logits: Vec::new(),
            shared_gates: Vec::new(),
            counting: Vec::new(),
            attention: attention::Work::default(),
            delta: delta_net::Work::default(),
            profile: None,
            routed: None,
            streaming: None,
            guess: streaming::Guess::default(),
        })
    }

    /// Starts to measure the time of each phase.
    pub fn start_profile(&mut self) {
        self.profile = Some(Profile::default());
    }

    /// From here on these layers' experts are read when tokens want them, instead of being used where their files are mapped. `layers` are all that have
    /// experts, in order; a token wants at most `k` of a layer.
    ///
    /// # Errors
    /// When the budget holds fewer experts than a token wants, or there is no memory.
    pub fn stream_experts(
        &mut self,
        layers: &[&Experts],
        k: usize,
        options: &ExpertOptions,
        lookahead: Lookahead,
    ) -> Result<()> {
        self.streaming = Some(streaming::Streaming::open(&mut self.weights, layers, k, options, lookahead)?);
        // Helpers are there when a read is over.
        self.pool.set_spin(sluice_store::experts::SPIN);
        Ok(())
    }

    /// What streamed experts took since the last call, and how they are read; `None` where none are.
    pub fn take_streamed(&mut self) -> Option<Streamed> {
        self.streaming.as_mut().map(streaming::Streaming::take)
    }

    /// What reading experts fell back on, a clause each.
    pub fn streaming_notes(&self) -> &[String] {
        self.streaming.as_ref().map_or(&[], |s| s.store.notes())
    }

    /// Which rows of the last step lack experts that could not be read, and why; nothing where all was there. The other rows are as they should be.
    pub fn take_failure(&mut self) -> Option<(Vec<u32>, sluice_store::Error)> {
        self.streaming.as_mut()?.take_failure()
    }

    /// Starts to record what routers choose.
    pub fn record_routing(&mut self) {
        self.routed = Some(Vec::new());
    }

    /// What routers chose since the last call, in the order of the steps and their layers; nothing where it is not recorded.
    pub fn take_routing(&mut self) -> Vec<Routed> {
        self.routed.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn place(&mut self, t: Tensor) -> Place {
        Place::new(&mut self.buffers[t.buffer.0 as usize], t)
    }

    /// The weight of a norm.
    fn norm_weight(&mut self, norm: &Norm) -> (&'static [f32], f32) {
        let place = self.place(norm.weight);
        // SAFETY: weights are written once, at load, and their buffers live as long as the backend; the slice is not kept
        // beyond the operation.
        (unsafe { place.get(0, 0..place.cols) }, norm.eps)
    }

    fn count_to(&mut self, n: usize) {
        let from = self.counting.len();
        self.counting.extend((from..n).map(|i| i as u32));
    }

    fn needs(&self, linears: impl IntoIterator<Item = MatrixId>) -> Needs {
        Needs::of(linears.into_iter().map(|m| self.weights[m.0 as usize].form().encoding(self.mode)))
    }

    /// Encodes `x` (after `norm`) for matrices with these needs.
    fn encode(&mut self, x: Place, norm: Option<Norm>, needs: Needs) {
        let norm = norm.map(|n| self.norm_weight(&n));
        let crew = crew!(self);
        matmul::encode(crew, x, norm, needs, &mut self.encoded);
    }

    /// Waits for the weights of some linears: here and not in the tasks, so that threads with nothing to do leave the processor to those
    /// that read.
    fn wait_for<'a>(&self, linears: impl IntoIterator<Item = &'a Linear>) {
        linears.into_iter().for_each(|l| self.weights[l.matrix.0 as usize].wait());
    }

    /// Starts a list of jobs; `job` adds one.
    fn job(&mut self, linear: &Linear, out: Place, add: bool) {
        let bias = linear.bias.map(|b| self.place(b));
        let (weight, row) = (linear.matrix.0 as usize, linear.rows.start);
        let rows = linear.rows.len();
        self.jobs.push(Job { weight, row, rows, out, bias, add, first_task: 0 });
    }

    /// Runs the listed jobs on all rows of what was encoded.
    fn run_jobs(&mut self, mode: Activations, tokens: usize) {
        self.count_to(tokens);
        let crew = matmul::Crew { mode, ..crew!(self) };
        matmul::run_jobs(crew, &mut self.jobs, &self.encoded, &self.counting[..tokens]);
        self.jobs.clear();
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
        profile.add(phase, since, bytes, macs);
    }

    /// First round of a dense gated part: its hidden activations into `shared_hidden`. What it reads is in `encoded`.
    fn dense_gate_up(&mut self, mlp: &Mlp, tokens: usize) {
        self.count_to(tokens);
        let mut unit = [experts::Unit {
            gate: experts::Operand::of(&mlp.gate),
            up: experts::Operand::of(&mlp.up),
            down: experts::Operand::of(&mlp.down),
            intermediate: mlp.gate.rows.len(),
            from: 0,
            tokens,
            first_task: 0,
        }];
        let crew = crew!(self);
        let order = &self.counting[..tokens];
        let needs = experts::hidden_needs(&crew, &unit);
        self.shared_hidden.reset(tokens, mlp.gate.rows.len(), needs);
        experts::gate_up(crew, &mut unit, order, &self.encoded, needs, &mut self.shared_hidden);
    }
}

/// Rows of an embedding that is not there yet which are worth a read each.
const FEW_ROWS: usize = 64;

fn linear_rows(l: &Linear) -> (usize, usize) {
    (l.matrix.0 as usize, l.rows.len())
}

impl Backend for Cpu {
    fn alloc(&mut self, class: MemoryClass, rows: usize, cols: usize) -> Result<Tensor> {
        let id = BufferId(self.buffers.len() as u32);
        self.buffers.push(Buffer::zeroed(class, rows * cols * size_of::<f32>())?);
        Ok(Tensor { buffer: id, offset: 0, rows, cols, stride: cols })
    }

    fn alloc_kv(&mut self, layout: KvLayout, blocks: usize) -> Result<KvPool> {
        let id = BufferId(self.buffers.len() as u32);
        let bytes =
            layout.block_bytes().checked_mul(blocks).context("the KV cache is larger than the address space")?;
        self.buffers.push(Buffer::reserved(MemoryClass::Kv, bytes)?);
        Ok(KvPool { buffer: id, layout })
    }

    fn commit_kv(&mut self, pool: &KvPool, blocks: usize) -> Result<()> {
        self.buffers[pool.buffer.0 as usize].commit(blocks * pool.layout.block_bytes())
    }

    fn upload(&mut self, values: &[f32], to: Tensor) {
        assert_eq!(values.len(), to.rows * to.cols);
        let place = self.place(to);
        for (row, values) in values.chunks_exact(to.cols.max(1)).enumerate() {
            // SAFETY: `&mut self`: no operation is under way.
            unsafe { place.get_mut(row, 0..to.cols) }.copy_from_slice(values);
        }
    }

    fn download(&mut self, t: Tensor, out: &mut [f32]) {
        assert_eq!(out.len(), t.rows * t.cols);
        let place = self.place(t);
        for (row, out) in out.chunks_exact_mut(t.cols.max(1)).enumerate() {
            // SAFETY: `&mut self`: no operation is under way.
            out.copy_from_slice(unsafe { place.get(row, 0..t.cols) });
        }
    }

    fn matrix(&mut self, source: MatrixSource) -> Result<MatrixId> {
        ensure!(source.rows > 0 && source.cols > 0, "an empty matrix");
        self.weights.push(Weight::new(source)?);
        Ok(MatrixId(self.weights.len() as u32 - 1))
    }

    fn zero(&mut self, t: Tensor) {
        let place = self.place(t);
        for row in 0..t.rows {
            // SAFETY: `&mut self`: no operation is under way.
            unsafe { place.get_mut(row, 0..t.cols) }.fill(0.0);
        }
    }

    fn embed(&mut self, table: MatrixId, tokens: &[u32], out: Tensor) {
        let t0 = Instant::now();
        let place = self.place(out);
        let weight = &self.weights[table.0 as usize];
        // A few rows are read by themselves; for many the whole matrix may as well come first.
        if !weight.is_ready() && tokens.len() <= FEW_ROWS {
            self.pool.run(tokens.len(), &|row, _| {
                // SAFETY: this task alone writes this row.
                weight.row_now(self.isa, tokens[row] as usize, unsafe { place.get_mut(row, 0..place.cols) });
            });
            self.record(Phase::Embed, t0, std::iter::once((table.0 as usize, tokens.len())), 0);
            return;
        }
        weight.wait();
        let matrix = weight.matrix();
        for (row, &token) in tokens.iter().enumerate() {
            // SAFETY: `&mut self`: no operation is under way.
            let out = unsafe { place.get_mut(row, 0..place.cols) };
            affine::dequantize_row(self.isa, &matrix, token as usize, out);
        }
        self.record(Phase::Embed, t0, std::iter::once((table.0 as usize, tokens.len())), 0);
    }

    fn rotary(&mut self, frequencies: &RotaryFrequencies, positions: &[u32], out: Tensor) {
        let t0 = Instant::now();
        let place = self.place(out);
        let half = frequencies.inv_freq.len();
        self.pool.run(positions.len().div_ceil(16), &|task, _| {
            for (row, &position) in positions.iter().enumerate().skip(task * 16).take(16) {
                // SAFETY: this task alone writes this row.
                let (cos, sin) = unsafe { place.get_mut(row, 0..2 * half) }.split_at_mut(half);
                frequencies.angles(position, cos, sin);
            }
        });
        self.record(Phase::Embed, t0, std::iter::empty(), 0);
    }

    fn norm(&mut self, x: Tensor, norm: Norm, out: Tensor) {
        let t0 = Instant::now();
        let (x, out, (weight, eps), isa) = (self.place(x), self.place(out), self.norm_weight(&norm), self.isa);
        self.pool.run(x.rows.div_ceil(4), &|task, _| {
            for row in task * 4..((task + 1) * 4).min(x.rows) {
                // SAFETY: this task alone uses these rows.
                let (x, out) = unsafe { (x.get(row, 0..x.cols), out.get_mut(row, 0..x.cols)) };
                norm::rms_norm(isa, x, weight, eps, out);
            }
        });
        self.record(Phase::Project, t0, std::iter::empty(), 0);
    }

    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]) {
        let t0 = Instant::now();
        let (tokens, x) = (x.rows, self.place(x));
        let needs = self.needs(projections.iter().map(|p| p.linear.matrix));
        self.encode(x, norm, needs);
        self.wait_for(projections.iter().map(|p| &p.linear));
        for p in projections {
            let out = self.place(p.out);
            self.job(&p.linear, out, false);
        }
        self.run_jobs(self.mode, tokens);
        self.record(Phase::Project, t0, projections.iter().map(|p| linear_rows(&p.linear)), tokens);
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor) {
        let t0 = Instant::now();
        let (tokens, x, out) = (x.rows, self.place(x), self.place(out));
        let needs = self.needs([linear.matrix]);
        self.encode(x, None, needs);
        self.wait_for([linear]);
        self.job(linear, out, true);
        self.run_jobs(self.mode, tokens);
        self.record(Phase::Project, t0, std::iter::once(linear_rows(linear)), tokens);
    }

    fn attention(&mut self, step: &AttentionStep) {
        let t0 = Instant::now();
        self.run_attention(step);
        self.record(Phase::Attention, t0, std::iter::empty(), 0);
    }

    fn delta_net(&mut self, step: &DeltaStep) {
        let t0 = Instant::now();
        self.run_delta_net(step);
        self.record(Phase::DeltaNet, t0, std::iter::empty(), 0);
    }

    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor) {
        let t0 = Instant::now();
        let (tokens, x, residual) = (x.rows, self.place(x), self.place(residual));
        let needs = self.needs([mlp.gate.matrix, mlp.up.matrix]);
        self.encode(x, Some(norm), needs);
        self.wait_for([&mlp.gate, &mlp.up]);
        self.dense_gate_up(mlp, tokens);
        self.wait_for([&mlp.down]);
        std::mem::swap(&mut self.encoded, &mut self.shared_hidden);
        self.job(&mlp.down, residual, true);
        self.run_jobs(self.mode, tokens);
        std::mem::swap(&mut self.encoded, &mut self.shared_hidden);
        self.record(Phase::Mlp, t0, [&mlp.gate, &mlp.up, &mlp.down].into_iter().map(linear_rows), tokens);
    }

    fn route(&mut self, x: Tensor, router: &Linear, scoring: &Scoring, routing: &mut Routing) {
        let t0 = Instant::now();
        let (tokens, experts, x) = (x.rows, router.rows.len(), self.place(x));
        let k = scoring.k();
        // 1. logits, always from f32 activations: a decision should not hang on their encoding
        self.encode(x, None, Needs::of([Encoding::F32]));
        self.wait_for([router]);
        let mut logits = std::mem::take(&mut self.router_logits);
        let out = Place::of_slice(matmul::part(&mut logits, tokens * experts), experts);
        self.job(router, out, false);
        self.run_jobs(Activations::F32, tokens);
        // 2. choose
        routing.k = k;
        routing.experts.resize(tokens * k, 0);
        routing.weights.resize(tokens * k, 0.0);
        let (ids, weights) = (Parts::new(&mut routing.experts), Parts::new(&mut routing.weights));
        let isa = self.isa;
        self.pool.run(tokens.div_ceil(8), &|task, _| {
            for t in task * 8..((task + 1) * 8).min(tokens) {
                // SAFETY: this task alone uses this token's parts.
                let (logits, ids, weights) = unsafe {
                    (out.get_mut(t, 0..experts), ids.get(t * k..(t + 1) * k), weights.get(t * k..(t + 1) * k))
                };
                route::route(isa, scoring, logits, ids, weights);
            }
        });
        self.router_logits = logits;
        self.record(Phase::Route, t0, std::iter::once(linear_rows(router)), tokens);
    }

    fn fetch(&mut self, routing: &Routing, experts: &Experts) {
        if let Some(routed) = &mut self.routed {
            let guessed = self.guess.layer.take_if(|l| *l == experts.layer).map(|_| self.guess.experts.clone());
            routed.push(Routed {
                layer: experts.layer,
                k: routing.k,
                experts: routing.experts.clone(),
                guessed: guessed.unwrap_or_default(),
            });
        }
        self.plan.fill(routing, experts);
        if let Some(streaming) = &mut self.streaming {
            streaming.fetch(experts.layer, &self.plan);
        }
    }

    fn foresee(&mut self, x: Tensor, next: NextMixture, sight: Foresight) {
        self.run_foresee(x, next, sight);
    }

    fn experts(
        &mut self,
        x: Tensor,
        routing: &Routing,
        experts: &Experts,
        shared: Option<&SharedExpert>,
        residual: Tensor,
    ) {
        let t0 = Instant::now();
        let (tokens, x, residual) = (x.rows, self.place(x), self.place(residual));
        let mut plan = std::mem::take(&mut self.plan);
        assert_eq!(plan.order.len(), routing.experts.len(), "experts are fetched before they are used");
        // 1. one encoding of x for all
        let ids = plan.units.iter().flat_map(|u| [u.gate.weight, u.up.weight]).map(|m| MatrixId(m as u32));
        let mut needs = self.needs(ids);
        if let Some(s) = shared {
            for e in [&s.mlp.gate, &s.mlp.up] {
                needs.add(self.weights[e.matrix.0 as usize].form().encoding(self.mode));
            }
            needs.f32 |= s.gate.is_some();
        }
        self.encode(x, None, needs);
        if self.streaming.is_none() {
            for unit in &plan.units {
                [unit.gate, unit.up, unit.down].iter().for_each(|o| self.weights[o.weight].wait());
            }
        }
        if let Some(s) = shared {
            self.wait_for([&s.mlp.gate, &s.mlp.up, &s.mlp.down].into_iter().chain(&s.gate));
        }
        // 2. hidden activations: shared expert, routed experts
        let mut gates = std::mem::take(&mut self.shared_gates);
        let mut gate_place = None;
        if let Some(s) = shared {
            if let Some(gate) = &s.gate {
                let place = Place::of_slice(matmul::part(&mut gates, tokens), 1);
                self.job(gate, place, false);
                self.run_jobs(Activations::F32, tokens);
                gate_place = Some(place);
                // SAFETY: the jobs are done; nobody else uses the gates now.
                (0..tokens).for_each(|t| unsafe {
                    let g = &mut place.get_mut(t, 0..1)[0];
                    *g = sluice_kernels::math::sigmoid1(*g);
                });
            }
            self.dense_gate_up(&s.mlp, tokens);
        }
        self.count_to(tokens.max(plan.order.len()));
        let crew = crew!(self);
        let needs = experts::hidden_needs(&crew, &plan.units);
        self.hidden.reset(plan.order.len(), experts.intermediate, needs);
        let shared_down = shared.map(|s| experts::Operand::of(&s.mlp.down));
        // Those that are read, as they come. Where all are there, they are computed together.
        let there = match self.streaming.take() {
            None => true,
            Some(mut streaming) => {
                streaming.reserve(&plan, tokens, residual.cols);
                experts::reserve(crew!(self), &plan.units, shared_down, tokens, residual.cols);
                let there = streaming.all_there(&mut plan);
                if !there {
                    self.run_streamed(&mut streaming, &mut plan, needs, shared_down, gate_place, residual);
                }
                self.streaming = Some(streaming);
                there
            }
        };
        // 3. down projections, summed
        if there {
            let crew = crew!(self);
            experts::gate_up(crew, &mut plan.units, &plan.order, &self.encoded, needs, &mut self.hidden);
            let shared_down = shared_down.map(|down| experts::SharedDown {
                down,
                hidden: &self.shared_hidden,
                gate: gate_place,
                tokens: &self.counting[..tokens],
            });
            let crew = crew!(self);
            let pairs = &self.counting[..plan.order.len()];
            experts::down_and_add(crew, &plan.units, &plan, pairs, &self.hidden, shared_down, None, residual);
            if let Some(streaming) = &mut self.streaming {
                streaming.release_all(&plan);
            }
        }
        self.shared_gates = gates;
        self.plan = plan;
        if self.profile.is_some() {
            let plan = std::mem::take(&mut self.plan);
            let (i, h) = (experts.intermediate, experts.hidden);
            let routed = plan.units.iter().flat_map(|u| [(u.gate.weight, i), (u.up.weight, i), (u.down.weight, h)]);
            let dense = shared.into_iter().flat_map(|s| [&s.mlp.gate, &s.mlp.up, &s.mlp.down].map(linear_rows));
            let pairs = plan.order.len().div_ceil(plan.units.len().max(1));
            self.record(Phase::Experts, t0, routed.chain(dense), pairs);
            self.plan = plan;
        }
    }

    fn logits(&mut self, x: Tensor, norm: Norm, head: MatrixId, rows: &[u32], out: &mut [f32]) {
        let t0 = Instant::now();
        let (x, vocabulary) = (self.place(x), self.weights[head.0 as usize].rows());
        let (weight, eps) = self.norm_weight(&norm);
        let needs = self.needs([head]);
        // 1. norm and encode the wanted rows
        self.encoded.reset(rows.len(), x.cols, needs);
        crew!(self).reserve(0, x.cols, 0, 0);
        let (writer, isa, workers) = (self.encoded.writer(needs), self.isa, &self.workers);
        self.pool.run(rows.len(), &|task, thread| {
            // SAFETY: one borrow, by the task that runs as this thread; x is not written meanwhile; this task alone writes row `task`.
            unsafe {
                let normed = matmul::part(&mut workers.get(thread).row, x.cols);
                norm::rms_norm(isa, x.get(rows[task] as usize, 0..x.cols), weight, eps, normed);
                writer.write(isa, task, 0, normed);
            }
        });
        // 2. head
        let out = Place::of_slice(out, vocabulary);
        let linear = Linear { matrix: head, rows: 0..vocabulary, bias: None };
        self.wait_for([&linear]);
        self.job(&linear, out, false);
        self.run_jobs(self.mode, rows.len());
        self.record(Phase::Head, t0, std::iter::once((head.0 as usize, vocabulary)), rows.len());
    }

    fn memory(&mut self, class: MemoryClass) -> usize {
        let buffers: usize = self.buffers.iter().filter(|b| b.class == class).map(|b| b.committed).sum();
        let weights = |mapped: bool| -> usize {
            self.weights.iter().filter(|w| !w.streamed && w.is_mapped() == mapped).map(Weight::bytes).sum()
        };
        match class {
            MemoryClass::WeightsMapped => buffers + weights(true),
            MemoryClass::WeightsCopied => buffers + weights(false),
            MemoryClass::Scratch => {
                let encoded = self.encoded.bytes() + self.hidden.bytes() + self.shared_hidden.bytes();
                let streamed = self.streaming.as_ref().map_or(0, |s| s.scratch_bytes()) + self.guess.bytes();
                let workers = self.workers.iter_mut().map(|w| w.bytes()).sum::<usize>();
                let lists = 4 * (self.router_logits.len() + self.shared_gates.len() + self.counting.len());
                buffers
                    + encoded
                    + workers
                    + lists
                    + self.plan.bytes()
                    + streamed
                    + self.attention.bytes()
                    + self.delta.bytes()
            }
            MemoryClass::Experts => self.streaming.as_ref().map_or(0, |s| s.store.bytes()),
            MemoryClass::Kv | MemoryClass::State => buffers,
        }
    }

    fn take_profile(&mut self) -> Profile {
        self.profile.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
