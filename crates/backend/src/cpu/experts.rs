//! Feed-forward parts on the CPU: dense, and routed experts grouped so that all tokens of one expert go through it together.
//!
//! Two rounds of tasks. In the first, row blocks of every expert's gate and up projections, combined and encoded where they are computed.
//! In the second, each task owns a block of output rows and adds the experts up in ascending number.

use sluice_kernels::elementwise;
use sluice_kernels::matmul::Encoding;

use super::matmul::{Crew, Encoded, Needs, Worker, block_rows, part, tile};
use super::memory::Place;
use crate::{ExpertMatrix, Experts, Routing};

/// One gated unit: an expert with its tokens, or a dense layer with all of them.
#[derive(Clone, Copy)]
pub struct Unit {
    /// Matrix and first row of each projection.
    pub gate: (usize, usize),
    pub up: (usize, usize),
    pub down: (usize, usize),
    pub intermediate: usize,
    /// Its tokens: this many from here in the order list, and its activations' rows.
    pub from: usize,
    pub tokens: usize,
    /// Tasks before this unit's in the first round.
    pub first_task: usize,
}

/// The tokens of each used expert, in ascending expert number. Kept between steps so that nothing is allocated.
#[derive(Default)]
pub struct Plan {
    pub units: Vec<Unit>,
    /// Row of x of each (expert, token) pair.
    pub order: Vec<u32>,
    pub weights: Vec<f32>,
    counts: Vec<u32>,
}

fn place(matrix: &ExpertMatrix, expert: usize) -> (usize, usize) {
    match matrix {
        ExpertMatrix::Stacked { matrix, stride, offset } => (matrix.0 as usize, expert * stride + offset),
        ExpertMatrix::Single(all) => (all[expert].0 as usize, 0),
    }
}

impl Plan {
    /// Sorts the tokens of a routing by expert.
    pub fn fill(&mut self, routing: &Routing, experts: &Experts) {
        let pairs = routing.experts.len();
        self.units.clear();
        self.units.reserve(experts.count);
        self.counts.clear();
        self.counts.resize(experts.count, 0);
        routing.experts.iter().for_each(|&e| self.counts[e as usize] += 1);
        self.order.resize(pairs, 0);
        self.weights.resize(pairs, 0.0);
        let mut from = 0;
        for (e, count) in self.counts.iter_mut().enumerate() {
            if *count > 0 {
                self.units.push(Unit {
                    gate: place(&experts.gate, e),
                    up: place(&experts.up, e),
                    down: place(&experts.down, e),
                    intermediate: experts.intermediate,
                    from,
                    tokens: *count as usize,
                    first_task: 0,
                });
            }
            // From here on the next free place of the expert.
            let n = *count;
            *count = from as u32;
            from += n as usize;
        }
        for (pair, &e) in routing.experts.iter().enumerate() {
            let at = self.counts[e as usize] as usize;
            self.counts[e as usize] += 1;
            self.order[at] = (pair / routing.k) as u32;
            self.weights[at] = routing.weights[pair];
        }
    }

    pub fn bytes(&self) -> usize {
        self.units.len() * size_of::<Unit>() + 4 * (self.order.len() + self.weights.len() + self.counts.len())
    }
}

/// The first round: `into[unit.from + i] = silu(gate(x[order[i]])) * up(x[order[i]])`, encoded for the down projections.
pub fn gate_up(mut crew: Crew, units: &mut [Unit], order: &[u32], x: &Encoded, into: &mut Encoded) {
    let Some(intermediate) = units.first().map(|u| u.intermediate) else { return };
    let needs = Needs::of(units.iter().map(|u| crew.weights[u.down.0].form().encoding(crew.mode)));
    into.reset(order.len(), intermediate, needs);
    // Whole groups of int8 activations stay in one task.
    let block = block_rows(units.len() * intermediate, crew.pool.threads()).next_multiple_of(32);
    // No unit has more tokens than the step.
    let most = x.rows();
    let (mut tasks, mut kernel) = (0, 0);
    for unit in units.iter_mut() {
        unit.first_task = tasks;
        tasks += intermediate.div_ceil(block);
        for (w, _) in [unit.gate, unit.up] {
            kernel = kernel.max(crew.weights[w].scratch_bytes(block.min(intermediate), most, crew.mode));
        }
    }
    crew.reserve(most * block.min(intermediate), 0, 0, kernel);
    let Crew { isa, mode, weights, pool, workers } = crew;
    let (units, workers) = (&*units, &*workers);
    let writer = into.writer(needs);
    pool.run(tasks, &|task, thread| {
        let unit = &units[units.partition_point(|u| u.first_task <= task) - 1];
        let from = (task - unit.first_task) * block;
        let n = block.min(intermediate - from);
        let tokens = &order[unit.from..unit.from + unit.tokens];
        // SAFETY: one borrow, by the task that runs as this thread.
        let Worker { kernel, tile: gates, tile2: ups, .. } = unsafe { workers.get(thread) };
        let mut project = |(weight, row): (usize, usize), out| {
            let (w, first) = (&weights[weight], row + from);
            tile(isa, &w.matrix(), first..first + n, x.input(w.form().encoding(mode)), tokens, out, kernel);
        };
        project(unit.gate, gates);
        project(unit.up, ups);
        let (gates, ups) = (part(gates, tokens.len() * n), part(ups, tokens.len() * n));
        elementwise::swiglu_in_place(isa, gates, ups);
        for (i, row) in gates.chunks_exact(n).enumerate() {
            // SAFETY: these columns of these rows are this task's alone.
            unsafe { writer.write(isa, unit.from + i, from, row) };
        }
    });
}

/// An expert that every token takes, after its first round: its down projection, activations and each token's weight.
pub struct SharedDown<'a> {
    pub down: (usize, usize),
    pub hidden: &'a Encoded,
    /// `[tokens, 1]`; 1 where there is no gate.
    pub gate: Option<Place>,
    /// `0 .. tokens`
    pub tokens: &'a [u32],
}

/// The second round: `residual[t] += sum over t's experts of weight * down(hidden) + gate * shared down`.
pub fn down_and_add(
    mut crew: Crew,
    plan: &Plan,
    rows_of_pairs: &[u32],
    hidden: &Encoded,
    shared: Option<SharedDown>,
    residual: Place,
) {
    let (tokens, width) = (residual.rows, residual.cols);
    let block = block_rows(width, crew.pool.threads());
    let downs = plan.units.iter().map(|u| u.down.0).chain(shared.iter().map(|s| s.down.0));
    let kernel = downs.map(|w| crew.weights[w].scratch_bytes(block.min(width), tokens, crew.mode)).max().unwrap_or(0);
    crew.reserve(tokens * block.min(width), 0, tokens * block.min(width), kernel);
    let Crew { isa, mode, weights, pool, workers } = crew;
    let workers = &*workers;
    pool.run(width.div_ceil(block), &|task, thread| {
        let from = task * block;
        let n = block.min(width - from);
        // SAFETY: one borrow, by the task that runs as this thread.
        let Worker { kernel, tile: out, floats, .. } = unsafe { workers.get(thread) };
        let sum = part(floats, tokens * n);
        sum.fill(0.0);
        let encoding = |w: usize| -> Encoding { weights[w].form().encoding(mode) };
        // 1. routed experts, ascending
        for unit in &plan.units {
            let (w, row) = (unit.down.0, unit.down.1 + from);
            let pairs = unit.from..unit.from + unit.tokens;
            let input = hidden.input(encoding(w));
            let y = tile(isa, &weights[w].matrix(), row..row + n, input, &rows_of_pairs[pairs.clone()], out, kernel);
            for (pair, y) in pairs.zip(y.chunks_exact(n)) {
                let t = plan.order[pair] as usize;
                elementwise::scale_add(isa, plan.weights[pair], y, &mut sum[t * n..(t + 1) * n]);
            }
        }
        // 2. the shared one
        if let Some(s) = &shared {
            let (w, row) = (s.down.0, s.down.1 + from);
            let y = tile(isa, &weights[w].matrix(), row..row + n, s.hidden.input(encoding(w)), s.tokens, out, kernel);
            for (t, y) in y.chunks_exact(n).enumerate() {
                // SAFETY: the gates are not written in this round.
                let gate = s.gate.map_or(1.0, |g| unsafe { g.get(t, 0..1) }[0]);
                elementwise::scale_add(isa, gate, y, &mut sum[t * n..(t + 1) * n]);
            }
        }
        // 3. residual
        for (t, sum) in sum.chunks_exact(n).enumerate() {
            // SAFETY: these columns are this task's alone.
            let out = unsafe { residual.get_mut(t, from..from + n) };
            out.iter_mut().zip(sum).for_each(|(o, s)| *o += s);
        }
    });
}
