//! Feed-forward parts on the CPU: dense, and routed experts grouped so that an expert is computed for all its tokens together.
//!
//! There are two rounds of tasks. The first computes row blocks of every expert's gate and up projections, and combines and encodes them.
//! In the second, each task owns a block of output rows and adds up the experts in ascending number. Experts that are read from disk go through both rounds in waves.
//! In ascending order, sums are carried from wave to wave; otherwise each expert's output is kept until all have been read. The sums are the same, term by term.

use sluice_kernels::elementwise;
use sluice_kernels::format::{ActivationFormat, MAX_PLANES};
use sluice_kernels::matrix::Matrix;

use super::activation::{self, Biases};
use crate::encoded::{Encoded, Needs};
use crate::exec::{ExecContext, Worker};
use crate::matmul::{MAX_TASK_ROWS, block_rows, tile};
use crate::memory::{Place, Weight, part};
use sluice_backend::{ExpertKind, ExpertMatrix, ExpertPart, Experts, Linear, Mlp, Routing};

/// A projection: rows of a registered matrix, or a copy of them in memory.
#[derive(Clone, Copy)]
pub struct Operand {
    pub weight: usize,
    row: usize,
    rows: usize,
    read: Option<[RawBytes; MAX_PLANES]>,
}

/// The address and length of a plane in memory.
#[derive(Clone, Copy)]
struct RawBytes(*const u8, usize);

// SAFETY: an address; the maker of an operand guarantees what lies there.
unsafe impl Send for RawBytes {}
// SAFETY: as above.
unsafe impl Sync for RawBytes {}

impl Operand {
    pub fn new(weight: usize, row: usize, rows: usize) -> Operand {
        Operand { weight, row, rows, read: None }
    }

    pub fn of(linear: &Linear) -> Operand {
        Operand::new(linear.matrix.number(), linear.rows.start, linear.rows.len())
    }

    /// The same rows, read from a copy in memory, plane by plane.
    ///
    /// # Safety
    /// The memory does not change while the results of [`Operand::matrix`] are used.
    unsafe fn read_to(self, arrays: [&[u8]; MAX_PLANES]) -> Operand {
        Operand { read: Some(arrays.map(|a| RawBytes(a.as_ptr(), a.len()))), ..self }
    }

    /// The matrix for a thread of node `node`, and the index of the first row in it.
    fn matrix<'a>(&self, weights: &'a [Weight], node: usize) -> (Matrix<'a>, usize) {
        let weight = &weights[self.weight];
        let Some(arrays) = &self.read else { return (weight.matrix(node), self.row) };
        // SAFETY: as the maker of the operand has guaranteed.
        let array = |RawBytes(start, len): &RawBytes| unsafe { std::slice::from_raw_parts(*start, *len) };
        let arrays = arrays.iter().map(array).take(weight.arrays());
        let matrix = Matrix::new(weight.format(), self.rows, weight.cols(), arrays);
        (matrix.expect("as long as these rows are in the checkpoint"), 0)
    }
}

/// One gated unit: an expert with its tokens, or a dense layer with all of them.
#[derive(Clone, Copy)]
pub struct GatedFfn {
    pub gate: Operand,
    pub up: Operand,
    pub down: Operand,
    pub intermediate: usize,
    pub kind: ExpertKind,
    pub biases: Option<Biases>,
    /// Its first token in the order list, which is also its first row of activations.
    pub from: usize,
    pub tokens: usize,
    /// Tasks before this unit's in the first round.
    pub first_task: usize,
}

impl GatedFfn {
    /// Rows of the matrices for each element of the hidden activations: 2 where `gate` has those of gate and up, which take turns, and `up` none.
    fn rows_per_element(&self) -> usize {
        if self.up.rows == 0 && self.kind != ExpertKind::SquaredRelu { 2 } else { 1 }
    }

    /// Its down projection alone.
    pub fn down_projection(&self) -> DownProjection {
        let bias = self.biases.map(|b| b.down);
        DownProjection { operand: self.down, rows: self.from..self.from + self.tokens, to: self.from, bias }
    }

    /// The unit with its matrices in the memory that the expert was read to: all planes of its operands, in order.
    ///
    /// # Safety
    /// The memory does not change while the unit is used.
    pub unsafe fn read_to<'a>(self, array: impl Fn(usize) -> &'a [u8]) -> GatedFfn {
        let read = |(i, operand): (usize, Operand)| {
            // SAFETY: as the caller vouches.
            unsafe { operand.read_to(std::array::from_fn(|part| array(i * MAX_PLANES + part))) }
        };
        let mut operands = [self.gate, self.up, self.down].into_iter().enumerate().map(read);
        let mut next = || operands.next().expect("as many as went in");
        GatedFfn { gate: next(), up: next(), down: next(), ..self }
    }
}

/// The tokens of each used expert, in ascending expert number. Kept between steps so that nothing is allocated.
#[derive(Default)]
pub struct Grouping {
    pub units: Vec<GatedFfn>,
    /// Row of x of each (expert, token) pair.
    pub order: Vec<u32>,
    pub weights: Vec<f32>,
    /// The experts that are used, ascending, and the tokens of each.
    pub wanted: Vec<u32>,
    pub tokens: Vec<u32>,
    counts: Vec<u32>,
}

fn operand(part: &ExpertPart, expert: usize) -> Operand {
    match &part.matrix {
        ExpertMatrix::Stacked { matrix, stride, offset, .. } => {
            Operand::new(matrix.number(), expert * stride + offset, part.rows)
        }
        ExpertMatrix::Single(all) => Operand::new(all[expert].number(), 0, part.rows),
    }
}

/// Gate, up and down projection of an expert. Where rows of gate and up take turns, the first has both and the second none. Without gates, the first is up.
pub fn operands(experts: &Experts, expert: usize) -> [Operand; 3] {
    if let [up, down] = &experts.parts[..] {
        let up = operand(up, expert);
        return [up, Operand { rows: 0, ..up }, operand(down, expert)];
    }
    let [gate, up, down] = &experts.parts[..] else { panic!("{:?} has two or three projections", experts.kind) };
    match experts.interleaved().expect("checked when it was registered") {
        Some((matrix, rows)) => {
            let both = Operand::new(matrix.number(), expert * rows, rows);
            [both, Operand { rows: 0, ..both }, operand(down, expert)]
        }
        None => [gate, up, down].map(|part| operand(part, expert)),
    }
}

impl Operand {
    /// Its bytes in the checkpoint: the planes of its format.
    pub fn bytes(&self, weights: &[Weight]) -> [sluice_store::Bytes; MAX_PLANES] {
        weights[self.weight].rows_bytes(self.row..self.row + self.rows)
    }
}

impl Grouping {
    /// Sorts the tokens of a routing by expert.
    pub fn fill(&mut self, context: &ExecContext, routing: &Routing, experts: &Experts) {
        let pairs = routing.experts.len();
        self.units.clear();
        self.units.reserve(experts.count);
        self.wanted.clear();
        self.wanted.reserve(experts.count);
        self.tokens.clear();
        self.tokens.reserve(experts.count);
        self.counts.clear();
        self.counts.resize(experts.count, 0);
        routing.experts.iter().for_each(|&e| self.counts[e as usize] += 1);
        self.order.resize(pairs, 0);
        self.weights.resize(pairs, 0.0);
        let mut from = 0;
        for (e, count) in self.counts.iter_mut().enumerate() {
            if *count > 0 {
                let [gate, up, down] = operands(experts, e);
                self.wanted.push(e as u32);
                self.tokens.push(*count);
                self.units.push(GatedFfn {
                    gate,
                    up,
                    down,
                    intermediate: experts.intermediate(),
                    kind: experts.kind,
                    biases: experts.biases.as_ref().map(|all| Biases::of(context, all, e)),
                    from,
                    tokens: *count as usize,
                    first_task: 0,
                });
            }
            // From here on it is the next free index of the expert.
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
        let words = self.order.len() + self.weights.len() + self.counts.len() + 2 * self.wanted.len();
        self.units.len() * size_of::<GatedFfn>() + 4 * words
    }
}

/// The encodings that the down projections of these units take.
pub fn hidden_needs(context: &ExecContext, units: &[GatedFfn]) -> Needs {
    Needs::of(units.iter().map(|u| context.weights[u.down.weight].format().activation_format(context.mode)))
}

/// First round of a dense gated part: the hidden activations of all its tokens.
pub fn dense_gate_up(context: ExecContext, mlp: &Mlp, x: &Encoded, tokens: &[u32], into: &mut Encoded) {
    let mut unit = [GatedFfn {
        gate: Operand::of(&mlp.gate),
        up: Operand::of(&mlp.up),
        down: Operand::of(&mlp.down),
        intermediate: mlp.gate.rows.len(),
        kind: ExpertKind::SwiGlu,
        biases: None,
        from: 0,
        tokens: tokens.len(),
        first_task: 0,
    }];
    let needs = hidden_needs(&context, &unit);
    into.reset(tokens.len(), mlp.gate.rows.len(), needs);
    gate_up(context, &mut unit, tokens, x, needs, into);
}

/// Hidden activations of one task of the first round, of `elements` in all, each of `each` rows of the matrices: whole groups of int8 activations.
pub fn gate_up_block(elements: usize, each: usize, threads: usize) -> usize {
    block_rows(each * elements, threads).next_multiple_of(32 * each) / each
}

/// Sizes every thread's scratch for these units in any combination, since they may be read in any order.
pub fn reserve(
    mut context: ExecContext,
    units: &[GatedFfn],
    shared_down: Option<Operand>,
    tokens: usize,
    width: usize,
) {
    let most = MAX_TASK_ROWS.min(width.max(units.first().map_or(0, |u| u.rows_per_element() * u.intermediate)));
    let operands = units.iter().flat_map(|u| [u.gate, u.up, u.down]).chain(shared_down);
    let kernel =
        operands.map(|o| context.weights[o.weight].scratch_bytes(most, tokens, context.mode)).max().unwrap_or(0);
    context.reserve(tokens * most, 0, (tokens * most).max(ADDED.min(width)), kernel);
}

/// The first round: `into[unit.from + i] = activation(gate(x[order[i]]), up(x[order[i]]))`, encoded for the down projections. `into` has room for
/// `[order.len(), intermediate]` in the encodings `needs`.
pub fn gate_up(
    mut context: ExecContext,
    units: &mut [GatedFfn],
    order: &[u32],
    x: &Encoded,
    needs: Needs,
    into: &mut Encoded,
) {
    let Some((intermediate, each)) = units.first().map(|u| (u.intermediate, u.rows_per_element())) else { return };
    // Whole groups of int8 activations stay in one task.
    let block = gate_up_block(units.len() * intermediate, each, context.pool.threads());
    // No unit has more tokens than the step.
    let most = x.rows();
    let (mut tasks, mut kernel) = (0, 0);
    for unit in units.iter_mut() {
        unit.first_task = tasks;
        tasks += intermediate.div_ceil(block);
        for w in [unit.gate.weight, unit.up.weight] {
            kernel = kernel.max(context.weights[w].scratch_bytes(each * block.min(intermediate), most, context.mode));
        }
    }
    context.reserve(most * each * block.min(intermediate), 0, 0, kernel);
    let ExecContext { isa, mode, weights, pool, workers, .. } = context;
    let (units, workers) = (&*units, &*workers);
    let writer = into.writer(needs.by_parts());
    pool.run(tasks, &|task, thread| {
        let unit = &units[units.partition_point(|u| u.first_task <= task) - 1];
        let from = (task - unit.first_task) * block;
        let n = block.min(intermediate - from);
        let tokens = &order[unit.from..unit.from + unit.tokens];
        // SAFETY: one borrow, by the task that runs as this thread.
        let Worker { node, kernel, tile: first, tile2: second, .. } = unsafe { workers.get(thread) };
        let mut project = |operand: Operand, out| {
            let (matrix, row) = operand.matrix(weights, *node);
            let input = x.input(weights[operand.weight].format().activation_format(mode));
            tile(isa, &matrix, row + each * from..row + each * (from + n), input, tokens, out, kernel);
        };
        let count = tokens.len() * n;
        let (gates, ups) = match each {
            1 => {
                project(unit.gate, first);
                if unit.up.rows > 0 {
                    project(unit.up, second);
                }
                (part(first, count), part(second, count))
            }
            _ => {
                project(unit.gate, first);
                let (both, gates) = (part(first, 2 * count), part(second, count));
                activation::separate(both, gates);
                (gates, &mut both[..count])
            }
        };
        if let Some(biases) = &unit.biases {
            activation::add_bias(isa, biases.gate, from, gates, n);
            activation::add_bias(isa, biases.up, from, ups, n);
        }
        activation::activate(isa, unit.kind, gates, ups);
        for (i, row) in gates.chunks_exact(n).enumerate() {
            // SAFETY: these columns of these rows are this task's alone.
            unsafe { writer.write(isa, unit.from + i, from, row) };
        }
    });
    if needs.int11 {
        // SAFETY: a task has a row of its own.
        pool.run(order.len(), &|row, _| unsafe { writer.encode_row(isa, row) });
    }
    into.lay_out(isa, needs, pool);
}

/// An expert that every token takes, after its first round: its down projection, activations and each token's weight.
pub struct SharedDown<'a> {
    pub down: Operand,
    pub hidden: &'a Encoded,
    /// `[tokens, 1]`; 1 where there is no gate.
    pub gate: Option<Place>,
    /// `0 .. tokens`
    pub tokens: &'a [u32],
}

/// Sums of a layer that is computed in several waves: `[tokens, hidden]`.
#[derive(Clone, Copy)]
pub struct Carry {
    pub sums: Place,
    /// The sums start at zero.
    pub first: bool,
    /// The shared expert and the residual follow.
    pub last: bool,
}

/// The second round: `residual[t] += sum over t's experts of weight * down(hidden) + gate * shared down`. With a carry, only these units are added,
/// to the sums of the carry.
#[allow(clippy::too_many_arguments)]
pub fn down_and_add(
    mut context: ExecContext,
    units: &[GatedFfn],
    grouping: &Grouping,
    rows_of_pairs: &[u32],
    hidden: &Encoded,
    shared: Option<SharedDown>,
    carry: Option<Carry>,
    residual: Place,
) {
    let (tokens, width) = (residual.rows, residual.cols);
    let block = block_rows(width, context.pool.threads());
    let downs = units.iter().map(|u| u.down.weight).chain(shared.iter().map(|s| s.down.weight));
    let kernel =
        downs.map(|w| context.weights[w].scratch_bytes(block.min(width), tokens, context.mode)).max().unwrap_or(0);
    context.reserve(tokens * block.min(width), 0, tokens * block.min(width), kernel);
    let ExecContext { isa, mode, weights, pool, workers, .. } = context;
    let workers = &*workers;
    pool.run(width.div_ceil(block), &|task, thread| {
        let from = task * block;
        let n = block.min(width - from);
        // SAFETY: one borrow, by the task that runs as this thread.
        let Worker { node, kernel, tile: out, floats, .. } = unsafe { workers.get(thread) };
        let sum = part(floats, tokens * n);
        match carry {
            Some(c) if !c.first => sum.chunks_exact_mut(n).enumerate().for_each(|(t, sum)| {
                // SAFETY: these columns are this task's alone.
                sum.copy_from_slice(unsafe { c.sums.get(t, from..from + n) });
            }),
            _ => sum.fill(0.0),
        }
        let encoding = |w: usize| -> ActivationFormat { weights[w].format().activation_format(mode) };
        // 1. routed experts, ascending
        for unit in units {
            let (matrix, row) = unit.down.matrix(weights, *node);
            let rows = row + from..row + from + n;
            let pairs = unit.from..unit.from + unit.tokens;
            let input = hidden.input(encoding(unit.down.weight));
            let y = tile(isa, &matrix, rows, input, &rows_of_pairs[pairs.clone()], out, kernel);
            if let Some(biases) = &unit.biases {
                activation::add_bias(isa, biases.down, from, y, n);
            }
            for (pair, y) in pairs.zip(y.chunks_exact(n)) {
                let t = grouping.order[pair] as usize;
                elementwise::scale_add(isa, grouping.weights[pair], y, &mut sum[t * n..(t + 1) * n]);
            }
        }
        if let Some(c) = carry.filter(|c| !c.last) {
            for (t, sum) in sum.chunks_exact(n).enumerate() {
                // SAFETY: these columns are this task's alone.
                unsafe { c.sums.get_mut(t, from..from + n) }.copy_from_slice(sum);
            }
            return;
        }
        // 2. the shared one
        if let Some(s) = &shared {
            let (matrix, row) = s.down.matrix(weights, *node);
            let input = s.hidden.input(encoding(s.down.weight));
            let y = tile(isa, &matrix, row + from..row + from + n, input, s.tokens, out, kernel);
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

/// A down projection without the sum.
pub struct DownProjection {
    pub operand: Operand,
    /// Its part of the list of rows.
    pub rows: std::ops::Range<usize>,
    /// The first row of its outputs.
    pub to: usize,
    /// `[1, hidden]`
    pub bias: Option<Place>,
}

/// Down projections without the sum: `outputs[to + i] = down(hidden[rows[i]])` for each, where `outputs` is `[.., hidden]`.
pub fn down(mut context: ExecContext, downs: &[DownProjection], rows: &[u32], hidden: &Encoded, outputs: Place) {
    let width = outputs.cols;
    let block = block_rows(downs.len() * width, context.pool.threads()).min(width);
    let per_unit = width.div_ceil(block);
    let most = downs.iter().map(|d| d.rows.len()).max().unwrap_or(0);
    let scratch = |d: &DownProjection| context.weights[d.operand.weight].scratch_bytes(block, most, context.mode);
    let kernel = downs.iter().map(scratch).max();
    context.reserve(most * block, 0, 0, kernel.unwrap_or(0));
    let ExecContext { isa, mode, weights, pool, workers, .. } = context;
    let workers = &*workers;
    pool.run(downs.len() * per_unit, &|task, thread| {
        let DownProjection { operand, rows: own, to, bias } = &downs[task / per_unit];
        let from = task % per_unit * block;
        let n = block.min(width - from);
        // SAFETY: one borrow, by the task that runs as this thread.
        let Worker { node, kernel, tile: out, .. } = unsafe { workers.get(thread) };
        let (matrix, row) = operand.matrix(weights, *node);
        let input = hidden.input(weights[operand.weight].format().activation_format(mode));
        let y = tile(isa, &matrix, row + from..row + from + n, input, &rows[own.clone()], out, kernel);
        if let Some(bias) = bias {
            activation::add_bias(isa, *bias, from, y, n);
        }
        for (i, y) in y.chunks_exact(n).enumerate() {
            // SAFETY: these columns of these rows are this task's alone.
            unsafe { outputs.get_mut(to + i, from..from + n) }.copy_from_slice(y);
        }
    });
}

/// Columns that one task of [`add`] takes.
pub const ADDED: usize = 512;

/// Adds up the outputs of [`down`]: as [`down_and_add`], with routed outputs in `outputs[pair]` and the shared expert's in `outputs[pairs + t]`.
pub fn add(
    mut context: ExecContext,
    units: impl Iterator<Item = GatedFfn> + Clone + Sync,
    grouping: &Grouping,
    outputs: Place,
    shared: Option<Option<Place>>,
    residual: Place,
) {
    let (tokens, width) = (residual.rows, residual.cols);
    let block = ADDED.min(width);
    context.reserve(0, 0, block, 0);
    let ExecContext { isa, pool, workers, .. } = context;
    let workers = &*workers;
    let blocks = width.div_ceil(block);
    pool.run(tokens * blocks, &|task, thread| {
        let (t, from) = (task / blocks, task % blocks * block);
        let n = block.min(width - from);
        // SAFETY: one borrow, by the task that runs as this thread.
        let Worker { floats, .. } = unsafe { workers.get(thread) };
        let sum = part(floats, n);
        sum.fill(0.0);
        // SAFETY: outputs and gates are not written in this round; these columns of the residual are this task's alone.
        unsafe {
            for unit in units.clone() {
                for pair in unit.from..unit.from + unit.tokens {
                    if grouping.order[pair] as usize == t {
                        elementwise::scale_add(isa, grouping.weights[pair], outputs.get(pair, from..from + n), sum);
                    }
                }
            }
            if let Some(gates) = shared {
                let gate = gates.map_or(1.0, |g| g.get(t, 0..1)[0]);
                elementwise::scale_add(isa, gate, outputs.get(grouping.order.len() + t, from..from + n), sum);
            }
            let out = residual.get_mut(t, from..from + n);
            out.iter_mut().zip(&*sum).for_each(|(o, s)| *o += s);
        }
    });
}
