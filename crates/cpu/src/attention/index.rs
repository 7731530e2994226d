//! Sparse indexers on the CPU. Keys go into their slots; where a token sees more positions than are wanted, all of them are scored, by runs of positions, and the best
//! are kept for the attention behind.

use sluice_backend::{IndexLayer, StepInputs};
use sluice_kernels::attention::{KvShape, KvView, PARTITION, best_positions, index_scores, store_row};
use sluice_kernels::{elementwise, norm};

use super::turn::Turn;
use super::{Blocks, kv_shape};
use crate::exec::ExecContext;
use crate::memory::{Parts, Place, grow, part};

/// Tokens whose keys and queries one task makes.
const TOKENS: usize = 4;
/// Positions that one task scores for a token.
const POSITIONS: usize = 8 * PARTITION;

/// What an indexer has selected, and its buffers. Allocated once and kept.
#[derive(Default)]
pub struct IndexWork {
    /// Scores of some tokens: `[tokens at a time, positions]`.
    scores: Vec<f32>,
    /// Room for the choice of each thread: `[threads, positions]`.
    keys: Vec<u64>,
    /// Slots of what each token of the step sees, in ascending position: `[tokens, top]`.
    slots: Vec<u32>,
    /// The most of them; `None`: each token sees all that is before it.
    top: Option<usize>,
}

/// The tensors of a layer, and its angles.
pub struct IndexOperands {
    pub q: Place,
    pub k: Place,
    pub weights: Place,
    /// Weight and bias.
    pub norm: [Place; 2],
    pub angles: Place,
}

/// Elements of scores, and of room for choices, of a step of so many tokens that reaches to `reach` positions.
pub fn sizes(tokens: usize, threads: usize, reach: usize) -> (usize, usize) {
    let positions = reach.next_multiple_of(PARTITION);
    (tokens.min(threads) * positions, threads * positions)
}

impl IndexWork {
    pub fn bytes(&self) -> usize {
        4 * (self.scores.len() + self.slots.len()) + 8 * self.keys.len()
    }

    /// Whether tokens of this step see only what was selected for them.
    pub fn selects(&self) -> bool {
        self.top.is_some()
    }

    /// The slots that token `t` of a step sees, which is at `position`; `None`: those of all positions up to its own.
    pub fn seen(&self, t: usize, position: usize) -> Option<&[u32]> {
        self.top.map(|top| &self.slots[t * top..t * top + top.min(position + 1)])
    }

    /// Runs a layer for the tokens of `inputs`.
    pub fn run(
        &mut self,
        mut context: ExecContext,
        inputs: &StepInputs,
        blocks: Blocks,
        operands: &IndexOperands,
        layer: &IndexLayer,
        // Positions of a block of the rows that are selected.
        row_block: usize,
    ) {
        let dim = layer.dim();
        let shape = KvShape { v_dim: dim, values_in_keys: true, ..kv_shape(&blocks.layout, layer.layer) };
        let turn = Turn {
            isa: context.isa,
            angles: operands.angles,
            positions: inputs.positions(),
            adjacent_pairs: layer.adjacent_pairs,
        };
        self.store(context.reborrow(), inputs.slots(layer.group), &shape, &mut *blocks.bytes, (operands, layer), turn);
        let (tokens, threads) = (inputs.tokens().len(), context.pool.threads());
        self.top = (inputs.reach() > layer.top).then_some(layer.top);
        if self.top.is_none() {
            return;
        }
        // Room for the longest context that there may be; memory is committed when it is used.
        let most = sizes(tokens, threads, blocks.bytes.len() / shape.block_bytes * shape.block_tokens);
        self.scores.reserve_exact(most.0.saturating_sub(self.scores.len()));
        self.keys.reserve_exact(most.1.saturating_sub(self.keys.len()));
        let (scores, keys) = sizes(tokens, threads, inputs.reach());
        grow(&mut self.scores, scores);
        grow(&mut self.keys, keys);
        grow(&mut self.slots, tokens * layer.top);
        let at_once = tokens.min(threads);
        for first in (0..tokens).step_by(at_once) {
            self.select(
                context.reborrow(),
                inputs,
                &*blocks.bytes,
                (operands, layer),
                shape,
                (first, at_once),
                row_block,
            );
        }
    }

    /// Norms and turns keys, which go into their slots; turns queries and scales the weights of heads.
    fn store(
        &self,
        mut context: ExecContext,
        slots: &[u64],
        shape: &KvShape,
        kv_bytes: &mut [u8],
        (operands, layer): (&IndexOperands, &IndexLayer),
        turn: Turn,
    ) {
        let (dim, rotated, heads) = (layer.dim(), operands.angles.cols, layer.heads);
        context.reserve(0, dim, 0, 0);
        let ExecContext { isa, pool, workers, .. } = context;
        let (workers, kv_bytes) = (&*workers, Parts::new(kv_bytes));
        let eps = layer.norm.scale.eps;
        // SAFETY: weights are written once, at load.
        let [weight, bias] = operands.norm.map(|place| unsafe { place.get(0, 0..dim) });
        pool.run(slots.len().div_ceil(TOKENS), &|task, thread| {
            for (t, &slot) in slots.iter().enumerate().skip(task * TOKENS).take(TOKENS) {
                // SAFETY: one borrow, by the task that runs as this thread; it alone has this token's rows and its slot.
                unsafe {
                    let row = part(&mut workers.get(thread).row, dim);
                    let mut turned = |x: &mut [f32]| {
                        row.copy_from_slice(x);
                        turn.token(t, &row[..rotated], &mut x[..rotated]);
                    };
                    let key = operands.k.get_mut(t, 0..dim);
                    norm::layer_norm_in_place(isa, key, weight, bias, eps);
                    turned(key);
                    let (to, scale) = (shape.k_at(slot as usize, 0), shape.k_scale_at(slot as usize, 0));
                    store_row(isa, shape.kv_type, key, kv_bytes.get(to), kv_bytes.get(scale));
                    operands.q.get_mut(t, 0..heads * dim).chunks_exact_mut(dim).for_each(&mut turned);
                    elementwise::scale(isa, layer.weight_scale, operands.weights.get_mut(t, 0..heads));
                }
            }
        });
    }

    /// Scores all positions that some tokens see, and selects the best.
    #[allow(clippy::too_many_arguments)]
    fn select(
        &mut self,
        context: ExecContext,
        inputs: &StepInputs,
        kv_bytes: &[u8],
        (operands, layer): (&IndexOperands, &IndexLayer),
        shape: KvShape,
        (first, at_once): (usize, usize),
        row_block: usize,
    ) {
        let (tokens, dim, heads, top) = (inputs.tokens().len(), layer.dim(), layer.heads, layer.top);
        let some = first..(first + at_once).min(tokens);
        let positions = inputs.reach().next_multiple_of(PARTITION);
        let ExecContext { isa, pool, .. } = context;
        let seen = |t: usize| inputs.positions()[t] as usize + 1;
        let kv = KvView { bytes: kv_bytes, shape };
        let scores = Place::of_slice(&mut self.scores[..at_once * positions], positions);
        // 1. scores
        let runs = positions.div_ceil(POSITIONS);
        pool.run(some.len() * runs, &|task, _| {
            let (i, from) = (task / runs, task % runs * POSITIONS);
            let t = some.start + i;
            let run = from..(from + POSITIONS).min(seen(t));
            if run.is_empty() {
                return;
            }
            // SAFETY: this task alone writes these scores; queries and weights are only read now.
            unsafe {
                let (q, weights) = (operands.q.get(t, 0..heads * dim), operands.weights.get(t, 0..heads));
                let to = scores.get_mut(i, run.clone());
                let table = inputs.table(layer.group, inputs.sequence_of(t));
                index_scores(isa, &kv, table, (q, weights, layer.scale), run, to);
            }
        });
        // 2. choices
        let (rooms, lists) = (Parts::new(&mut self.keys[..]), Parts::new(&mut self.slots[..]));
        pool.run(some.len(), &|i, thread| {
            let t = some.start + i;
            let (n, table) = (seen(t), inputs.table(layer.rows_group, inputs.sequence_of(t)));
            // SAFETY: a thread alone uses its room, and a task its token's list; scores are only read now.
            unsafe {
                let list = lists.get(t * top..t * top + top.min(n));
                best_positions(scores.get(i, 0..n), rooms.get(thread * positions..(thread + 1) * positions), list);
                for slot in list {
                    let position = *slot as usize;
                    *slot = table[position / row_block] * row_block as u32 + (position % row_block) as u32;
                }
            }
        });
    }
}
