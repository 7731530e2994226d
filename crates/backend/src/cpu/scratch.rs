//! How much scratch steps take, known before any of it is taken: [`Sizing`] stands in for the CPU while a model goes through a step, computes nothing, and
//! notes how far each operation would grow each of the CPU's buffers.
//!
//! It has to say the same as the operations do: a test in `engine/tests/budget.rs` holds the two together on models of every kind.

use sluice_kernels::attention;
use sluice_kernels::matmul::{Activations, Encoding};

use super::experts::{ADDED, Unit};
use super::matmul::{GROUP, MOST_ROWS, Needs, SMALL, block_rows};
use super::memory::Weight;
use super::streaming::FEW_PAIRS;
use super::{Cpu, attention as tasks};
use crate::{
    AttentionStep, Backend, DeltaStep, ExpertMatrix, Experts, Foresight, KvLayout, KvPool, Linear, MatrixId,
    MatrixSource, MemoryClass, Mlp, NextMixture, Norm, Profile, Projection, RotaryFrequencies, Routing, Scoring,
    SharedExpert, Tensor,
};

/// What steps need beside what [`Backend::alloc`] gave, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepScratch {
    /// However long the context.
    pub fixed: usize,
    /// For each 128 positions of one sequence that it has grown to.
    pub per_128_positions: usize,
}

impl Cpu {
    /// What steps like this one need, and all shorter ones. `step` is to take a batch through a model with the backend that it is given, of which the tokens
    /// and the sequences count and nothing else. `streamed`: experts are read from disk.
    pub fn step_scratch(&self, streamed: bool, step: impl FnOnce(&mut dyn Backend)) -> StepScratch {
        let (mode, threads) = (self.mode, self.pool.threads());
        let mut sizing = Sizing { mode, threads, weights: &self.weights, streamed, sizes: Sizes::default() };
        step(&mut sizing);
        StepScratch { fixed: sizing.sizes.bytes(threads), per_128_positions: sizing.sizes.per_128_positions }
    }

    /// Steps take `tokens` tokens at most of the `rows` that scratch was allocated for: what lies behind is never touched, and does not count.
    pub fn limit_steps(&mut self, tokens: usize, rows: usize) {
        for buffer in self.buffers.iter_mut().filter(|b| b.class == MemoryClass::Scratch) {
            buffer.committed = buffer.bytes / rows.max(1) * tokens;
        }
    }
}

/// Elements of activations in each encoding.
#[derive(Default)]
struct EncodedSize {
    f32: usize,
    bf16: usize,
    int8: usize,
}

impl EncodedSize {
    fn reset(&mut self, rows: usize, cols: usize, needs: Needs) {
        let n = rows * cols;
        for (size, needed) in [(&mut self.f32, needs.f32), (&mut self.bf16, needs.bf16), (&mut self.int8, needs.int8)] {
            *size = (*size).max(if needed { n } else { 0 });
        }
    }

    fn bytes(&self) -> usize {
        4 * self.f32 + 2 * self.bf16 + self.int8 + 8 * (self.int8 / GROUP)
    }
}

/// The CPU's buffers, in elements unless said otherwise.
#[derive(Default)]
struct Sizes {
    encoded: EncodedSize,
    hidden: EncodedSize,
    shared_hidden: EncodedSize,
    /// Of each thread: kernels' scratch in bytes, tiles (of which there are two), a row, floats.
    kernel: usize,
    tile: usize,
    row: usize,
    floats: usize,
    counting: usize,
    router_logits: usize,
    shared_gates: usize,
    /// Sums or outputs that are kept while experts are read; guesses.
    kept: usize,
    guess: usize,
    /// In bytes.
    plan: usize,
    attention: usize,
    delta: usize,
    per_128_positions: usize,
}

fn grow(size: &mut usize, to: usize) {
    *size = (*size).max(to);
}

impl Sizes {
    fn bytes(&self, threads: usize) -> usize {
        let worker = self.kernel.next_multiple_of(64) + 4 * (2 * self.tile + self.row + self.floats);
        let encoded = self.encoded.bytes() + self.hidden.bytes() + self.shared_hidden.bytes();
        let lists = self.counting + self.router_logits + self.shared_gates + self.kept + self.guess;
        encoded + threads * worker + 4 * lists + self.plan + self.attention + self.delta
    }
}

/// The stand-in.
struct Sizing<'a> {
    mode: Activations,
    threads: usize,
    weights: &'a [Weight],
    streamed: bool,
    sizes: Sizes,
}

/// A weight matrix, and how many of its rows are used.
fn used(linear: &Linear) -> (usize, usize) {
    (linear.matrix.0 as usize, linear.rows.len())
}

/// The matrices that one projection of all experts lies in.
fn matrices(matrix: &ExpertMatrix) -> &[MatrixId] {
    match matrix {
        ExpertMatrix::Stacked { matrix, .. } => std::slice::from_ref(matrix),
        ExpertMatrix::Single(all) => all,
    }
}

impl Sizing<'_> {
    fn encoding(&self, matrix: MatrixId) -> Encoding {
        self.weights[matrix.0 as usize].form().encoding(self.mode)
    }

    fn encode(&mut self, rows: usize, cols: usize, needs: Needs) {
        self.sizes.encoded.reset(rows, cols, needs);
        grow(&mut self.sizes.row, cols);
    }

    fn kernel(&mut self, weight: usize, rows: usize, tokens: usize, mode: Activations) {
        grow(&mut self.sizes.kernel, self.weights[weight].scratch_bytes(rows, tokens, mode));
    }

    /// As `matmul::run_jobs` of matrices with `cols` columns.
    fn jobs(
        &mut self,
        mode: Activations,
        jobs: impl Iterator<Item = (usize, usize)> + Clone,
        cols: usize,
        tokens: usize,
    ) {
        grow(&mut self.sizes.counting, tokens);
        let all: usize = jobs.clone().map(|(_, rows)| rows).sum();
        let block = block_rows(all, self.threads);
        // So few tokens that one thread does it all at once.
        let few = (SMALL / (all * cols).max(1)).min(tokens);
        for (weight, rows) in jobs {
            for (n, tokens) in [(block.min(rows), tokens), (rows, few)] {
                grow(&mut self.sizes.tile, tokens * n);
                self.kernel(weight, n, tokens, mode);
            }
        }
    }

    /// As `experts::gate_up` of `units` units.
    fn gate_up(&mut self, weights: impl Iterator<Item = MatrixId>, units: usize, intermediate: usize, tokens: usize) {
        let block = block_rows(units * intermediate, self.threads).next_multiple_of(32).min(intermediate);
        grow(&mut self.sizes.tile, tokens * block);
        weights.for_each(|w| self.kernel(w.0 as usize, block, tokens, self.mode));
    }

    /// As `Cpu::dense_gate_up`.
    fn dense_gate_up(&mut self, mlp: &Mlp, tokens: usize) {
        grow(&mut self.sizes.counting, tokens);
        let needs = Needs::of([self.encoding(mlp.down.matrix)]);
        self.sizes.shared_hidden.reset(tokens, mlp.gate.rows.len(), needs);
        self.gate_up([mlp.gate.matrix, mlp.up.matrix].into_iter(), 1, mlp.gate.rows.len(), tokens);
    }
}

impl Backend for Sizing<'_> {
    fn alloc(&mut self, _: MemoryClass, _: usize, _: usize) -> anyhow::Result<Tensor> {
        unreachable!("a step allocates no tensors")
    }

    fn alloc_kv(&mut self, _: KvLayout, _: usize) -> anyhow::Result<KvPool> {
        unreachable!("a step allocates no pools")
    }

    fn commit_kv(&mut self, _: &KvPool, _: usize) -> anyhow::Result<()> {
        Ok(())
    }

    fn upload(&mut self, _: &[f32], _: Tensor) {}

    fn download(&mut self, _: Tensor, _: &mut [f32]) {}

    fn matrix(&mut self, _: MatrixSource) -> anyhow::Result<MatrixId> {
        unreachable!("a step makes no matrices")
    }

    fn zero(&mut self, _: Tensor) {}

    fn embed(&mut self, _: MatrixId, _: &[u32], _: Tensor) {}

    fn rotary(&mut self, _: &RotaryFrequencies, _: &[u32], _: Tensor) {}

    fn norm(&mut self, _: Tensor, _: Norm, _: Tensor) {}

    fn project(&mut self, x: Tensor, _: Option<Norm>, projections: &[Projection]) {
        let needs = Needs::of(projections.iter().map(|p| self.encoding(p.linear.matrix)));
        self.encode(x.rows, x.cols, needs);
        self.jobs(self.mode, projections.iter().map(|p| used(&p.linear)), x.cols, x.rows);
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, _: Tensor) {
        self.encode(x.rows, x.cols, Needs::of([self.encoding(linear.matrix)]));
        self.jobs(self.mode, std::iter::once(used(linear)), x.cols, x.rows);
    }

    fn attention(&mut self, step: &AttentionStep) {
        let KvLayout { k_dim, v_dim, kv_heads, .. } = step.pool.layout;
        let (tokens, sequences) = (step.batch.tokens.len(), step.batch.sequences.len());
        let (group, task) = (step.heads / kv_heads, size_of::<tasks::Task>());
        let queries = (tasks::ROWS.end() / group).max(1).min(tokens);
        grow(
            &mut self.sizes.floats,
            attention::scratch_len(&tasks::kv_shape(&step.pool.layout, step.layer), group, queries),
        );
        let q = if step.gated { 4 * tokens * step.heads * k_dim } else { 0 };
        // Single tokens of few sequences are split by partitions, each of which leaves a part.
        let part = if self.threads > 1 && kv_heads < 2 * self.threads { 4 * group * (v_dim + 2) } else { 0 };
        grow(&mut self.sizes.per_128_positions, kv_heads * (part + task));
        grow(&mut self.sizes.attention, q + kv_heads * (sequences * part + (sequences + tokens) * task));
    }

    fn delta_net(&mut self, step: &DeltaStep) {
        let tokens = step.batch.tokens.len();
        grow(&mut self.sizes.delta, 4 * tokens * (step.shape.channels() + 2 * step.shape.value_heads));
    }

    fn mlp(&mut self, x: Tensor, _: Norm, mlp: &Mlp, _: Tensor) {
        let needs = Needs::of([mlp.gate.matrix, mlp.up.matrix].map(|m| self.encoding(m)));
        self.encode(x.rows, x.cols, needs);
        self.dense_gate_up(mlp, x.rows);
        self.jobs(self.mode, std::iter::once(used(&mlp.down)), mlp.gate.rows.len(), x.rows);
    }

    fn route(&mut self, x: Tensor, router: &Linear, _: &Scoring, _: &mut Routing) {
        self.encode(x.rows, x.cols, Needs::of([Encoding::F32]));
        grow(&mut self.sizes.router_logits, x.rows * router.rows.len());
        self.jobs(Activations::F32, std::iter::once(used(router)), x.cols, x.rows);
    }

    fn fetch(&mut self, _: &Routing, _: &Experts) {}

    fn foresee(&mut self, x: Tensor, next: NextMixture, _: Foresight) {
        if self.streamed {
            let k = next.scoring.k();
            let tokens = x.rows.min(FEW_PAIRS / k.max(1));
            grow(&mut self.sizes.guess, tokens * (next.router.rows.len() + 2 * k));
        }
    }

    fn experts(
        &mut self,
        x: Tensor,
        routing: &Routing,
        experts: &Experts,
        shared: Option<&SharedExpert>,
        residual: Tensor,
    ) {
        let (tokens, width) = (x.rows, residual.cols);
        let (pairs, intermediate) = (tokens * routing.k, experts.intermediate);
        let first = || matrices(&experts.gate).iter().chain(matrices(&experts.up)).copied();
        let downs = || matrices(&experts.down).iter().copied();
        // 1. encoded inputs and hidden activations
        let mut needs = Needs::of(first().map(|m| self.encoding(m)));
        if let Some(s) = shared {
            [&s.mlp.gate, &s.mlp.up].iter().for_each(|l| needs.add(self.encoding(l.matrix)));
            needs.f32 |= s.gate.is_some();
        }
        self.encode(tokens, x.cols, needs);
        if let Some(s) = shared {
            if let Some(gate) = &s.gate {
                grow(&mut self.sizes.shared_gates, tokens);
                self.jobs(Activations::F32, std::iter::once(used(gate)), x.cols, tokens);
            }
            self.dense_gate_up(&s.mlp, tokens);
        }
        grow(&mut self.sizes.counting, tokens.max(pairs));
        let hidden = Needs::of(downs().map(|m| self.encoding(m)));
        self.sizes.hidden.reset(pairs, intermediate, hidden);
        // 2. both rounds, with every expert in use
        let all_downs = || downs().chain(shared.map(|s| s.mlp.down.matrix));
        self.gate_up(first(), experts.count, intermediate, tokens);
        let block = block_rows(width, self.threads).min(width);
        all_downs().for_each(|m| self.kernel(m.0 as usize, block, tokens, self.mode));
        grow(&mut self.sizes.tile, tokens * block);
        grow(&mut self.sizes.floats, tokens * block);
        // 3. what experts from disk need beyond
        if self.streamed {
            let most = MOST_ROWS.min(width.max(intermediate));
            first().chain(all_downs()).for_each(|m| self.kernel(m.0 as usize, most, tokens, self.mode));
            grow(&mut self.sizes.tile, tokens * most);
            grow(&mut self.sizes.floats, (tokens * most).max(ADDED.min(width)));
            let outputs = pairs.min(FEW_PAIRS) + tokens.min(FEW_PAIRS);
            grow(&mut self.sizes.kept, tokens.max(outputs) * width);
        }
        let count = experts.count.min(pairs);
        grow(&mut self.sizes.plan, count * (size_of::<Unit>() + 8) + 4 * (2 * pairs + experts.count));
    }

    fn logits(&mut self, x: Tensor, _: Norm, head: MatrixId, rows: &[u32], _: &mut [f32]) {
        self.encode(rows.len(), x.cols, Needs::of([self.encoding(head)]));
        let vocabulary = self.weights[head.0 as usize].rows();
        self.jobs(self.mode, std::iter::once((head.0 as usize, vocabulary)), x.cols, rows.len());
    }

    fn memory(&mut self, _: MemoryClass) -> usize {
        0
    }

    fn take_profile(&mut self) -> Profile {
        Profile::default()
    }
}
