//! Sparse indexers on the CPU. Keys go into their slots; where a token sees more positions than are wanted, all of them are scored, by runs of positions, and the best
//! are kept for the attention behind.

use std::ops::Range;

use sluice_backend::{IndexLayer, IndexNorm, KvLayout, SelectLayer, StepInputs};
use sluice_kernels::attention::{
    KvShape, KvView, PARTITION, Pooled, average_rows, best_positions, index_scores, store_row,
};
use sluice_kernels::{elementwise, norm};

use super::turn::Turn;
use super::{Blocks, kv_shape};
use crate::exec::ExecContext;
use crate::memory::{Parts, Place, grow, part};

/// Tokens whose keys and queries one task makes.
pub(super) const TOKENS: usize = 4;
/// Positions that one task scores for a token.
const POSITIONS: usize = 8 * PARTITION;

/// What an indexer has selected, and its buffers. Allocated once and kept.
#[derive(Default)]
pub struct IndexWork {
    /// Scores of some tokens: `[tokens at a time, positions]`.
    scores: Vec<f32>,
    /// Room for the choice of each thread: `[threads, positions]`.
    keys: Vec<u64>,
    /// As many ones as there are heads, where all count once.
    ones: Vec<f32>,
    /// Slots of what each token of the step sees, in ascending position: `[tokens, most]`.
    slots: Vec<u32>,
    /// How many there are; `None`: each token sees all that is before it.
    choice: Option<Choice>,
    /// The same of entries, in place of positions: the most that a token sees.
    entries: Option<usize>,
}

/// What is scored: all pools of positions that a token sees, or positions.
struct Scored {
    q: Place,
    /// How much each head counts; without them all count once.
    weights: Option<Place>,
    heads: usize,
    scale: f32,
    /// The cache group of the keys.
    group: usize,
    /// Positions of a pool.
    size: usize,
    /// Of the keys, one for each pool.
    shape: KvShape,
}

/// How many positions tokens see of those before them.
#[derive(Clone, Copy)]
struct Choice {
    /// Those that are selected.
    top: usize,
    /// Positions of a pool.
    pool: usize,
    /// All that a token may see.
    most: usize,
}

impl Choice {
    fn of(layer: &IndexLayer) -> Choice {
        Choice { top: layer.top, pool: layer.pool_size(), most: layer.most_seen() }
    }

    /// Of the first `n`: all, or what is selected and those behind the last whole pool.
    fn seen(self, n: usize) -> usize {
        if n <= self.most { n } else { self.top + n % self.pool }
    }
}

/// The tensors of a layer, and its angles.
pub struct IndexOperands {
    pub q: Place,
    pub k: Place,
    pub weights: Option<Place>,
    /// Where logits weigh the keys of pools: those, and what is added to them.
    pub logits: Option<[Place; 2]>,
    /// Weight and bias; that of pools has no bias.
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
        4 * (self.scores.len() + self.slots.len() + self.ones.len()) + 8 * self.keys.len()
    }

    /// Whether tokens of this step see only what was selected for them.
    pub fn selects(&self) -> bool {
        self.choice.is_some()
    }

    /// The slots that token `t` of a step sees, which is at `position`; `None`: those of all positions up to its own.
    pub fn seen(&self, t: usize, position: usize) -> Option<&[u32]> {
        self.choice.map(|of| &self.slots[t * of.most..t * of.most + of.seen(position + 1)])
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
        if layer.pool.is_some() {
            store_pools(context.reborrow(), inputs, &shape, &mut *blocks.bytes, (operands, layer), turn);
        }
        let (tokens, threads) = (inputs.tokens().len(), context.pool.threads());
        self.choice = (inputs.reach() > layer.most_seen()).then(|| Choice::of(layer));
        if self.choice.is_none() {
            return;
        }
        self.make_room(tokens, threads, blocks.bytes.len() / shape.block_bytes * shape.block_tokens, inputs.reach());
        if operands.weights.is_none() {
            self.ones.resize(layer.heads, 1.0);
        }
        grow(&mut self.slots, tokens * layer.most_seen());
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

    /// Room for scores of a step that reaches to `reach` positions.
    fn make_room(&mut self, tokens: usize, threads: usize, longest: usize, reach: usize) {
        // For the longest context that there may be; memory is committed when it is used.
        let most = sizes(tokens, threads, longest);
        self.scores.reserve_exact(most.0.saturating_sub(self.scores.len()));
        self.keys.reserve_exact(most.1.saturating_sub(self.keys.len()));
        let (scores, keys) = sizes(tokens, threads, reach);
        grow(&mut self.scores, scores);
        grow(&mut self.keys, keys);
    }

    /// The rows of the entries that token `t` of a step sees, of `n` there are; `None`: all.
    pub fn seen_entries(&self, t: usize, n: usize) -> Option<&[u32]> {
        self.entries.map(|top| &self.slots[t * top..t * top + n.min(top)])
    }

    /// Selects entries for the tokens of `inputs`. `kv_bytes`: of the keys; `entries`: the layout of what is selected.
    pub fn select_entries(
        &mut self,
        mut context: ExecContext,
        inputs: &StepInputs,
        (keys, kv_bytes, entries): (&KvLayout, &[u8], &KvLayout),
        [q, weights]: [Place; 2],
        layer: &SelectLayer,
    ) {
        let (rate, top) = (layer.rate, layer.top);
        self.entries = (inputs.reach() / rate > top).then_some(top);
        if self.entries.is_none() {
            return;
        }
        let shape = KvShape {
            v_dim: keys.k_dim,
            values_in_keys: true,
            every: rate / keys.every,
            ..kv_shape(keys, layer.keys.layer)
        };
        let (tokens, threads) = (inputs.tokens().len(), context.pool.threads());
        let blocks = kv_bytes.len() / shape.block_bytes;
        self.make_room(tokens, threads, blocks * keys.block_tokens, inputs.reach());
        grow(&mut self.slots, tokens * top);
        let (heads, scale, group) = (layer.heads, layer.scale, layer.keys.group);
        let scored = Scored { q, weights: Some(weights), heads, scale, group, size: rate, shape };
        let at_once = tokens.min(threads);
        let positions = inputs.reach().next_multiple_of(PARTITION);
        for first in (0..tokens).step_by(at_once) {
            let some = first..(first + at_once).min(tokens);
            let scores = self.score(context.reborrow(), inputs, kv_bytes, &scored, some.clone());
            let (rooms, lists) = (Parts::new(&mut self.keys[..]), Parts::new(&mut self.slots[..]));
            context.pool.run(some.len(), &|i, thread| {
                let t = some.start + i;
                let n = (inputs.positions()[t] as usize + 1) / rate;
                let table = inputs.table(layer.entries_group, inputs.sequence_of(t));
                // SAFETY: a thread alone uses its room, and a task its token's list; scores are only read now.
                unsafe {
                    let list = lists.get(t * top..t * top + n.min(top));
                    if n <= top {
                        list.iter_mut().zip(0..).for_each(|(entry, e)| *entry = e);
                    } else {
                        let room = rooms.get(thread * positions..(thread + 1) * positions);
                        best_positions(scores.get(i, 0..n), room, list);
                    }
                    list.iter_mut().for_each(|entry| *entry = row_of_entry(table, entries, rate, *entry));
                }
            });
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
        let eps = match layer.norm {
            IndexNorm::Tokens(norm) => Some(norm.scale.eps),
            IndexNorm::Pools(_) => None,
        };
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
                    if let Some(eps) = eps {
                        norm::layer_norm_in_place(isa, key, weight, bias, eps);
                        turned(key);
                    }
                    let (to, scale) = (shape.k_at(slot as usize, 0), shape.k_scale_at(slot as usize, 0));
                    store_row(isa, shape.kv_type, key, kv_bytes.get(to), kv_bytes.get(scale));
                    if let Some([logits, _]) = operands.logits {
                        let (to, scale) = (shape.k_at(slot as usize, 1), shape.k_scale_at(slot as usize, 1));
                        store_row(isa, shape.kv_type, logits.get(t, 0..dim), kv_bytes.get(to), kv_bytes.get(scale));
                    }
                    operands.q.get_mut(t, 0..heads * dim).chunks_exact_mut(dim).for_each(&mut turned);
                    if let Some(weights) = operands.weights {
                        elementwise::scale(isa, layer.weight_scale, weights.get_mut(t, 0..heads));
                    }
                }
            }
        });
    }

    /// Scores all that some tokens see: `[tokens, positions]`.
    fn score(
        &mut self,
        context: ExecContext,
        inputs: &StepInputs,
        kv_bytes: &[u8],
        scored: &Scored,
        some: Range<usize>,
    ) -> Place {
        let &Scored { q, weights, heads, scale, group, size, shape } = scored;
        let positions = inputs.reach().next_multiple_of(PARTITION);
        let ExecContext { isa, pool, .. } = context;
        let kv = KvView { bytes: kv_bytes, shape };
        let (scores, ones) = (Place::of_slice(&mut self.scores[..some.len() * positions], positions), &self.ones);
        let runs = positions.div_ceil(POSITIONS);
        pool.run(some.len() * runs, &|task, _| {
            let (i, from) = (task / runs, task % runs * POSITIONS);
            let t = some.start + i;
            let run = from..(from + POSITIONS).min((inputs.positions()[t] as usize + 1) / size);
            if run.is_empty() {
                return;
            }
            // SAFETY: this task alone writes these scores; queries and weights are only read now.
            unsafe {
                let q = q.get(t, 0..heads * shape.k_dim);
                let weights = weights.map_or(&ones[..], |weights| weights.get(t, 0..heads));
                let to = scores.get_mut(i, run.clone());
                index_scores(isa, &kv, inputs.table(group, inputs.sequence_of(t)), (q, weights, scale), run, to);
            }
        });
        scores
    }

    /// Scores all positions, or pools of them, that some tokens see, and selects the best.
    #[allow(clippy::too_many_arguments)]
    fn select(
        &mut self,
        mut context: ExecContext,
        inputs: &StepInputs,
        kv_bytes: &[u8],
        (operands, layer): (&IndexOperands, &IndexLayer),
        shape: KvShape,
        (first, at_once): (usize, usize),
        row_block: usize,
    ) {
        let (tokens, choice) = (inputs.tokens().len(), Choice::of(layer));
        let some = first..(first + at_once).min(tokens);
        let positions = inputs.reach().next_multiple_of(PARTITION);
        // What is scored of each token: whole pools.
        let seen = |t: usize| (inputs.positions()[t] as usize + 1) / choice.pool;
        // 1. scores
        let scored = Scored {
            q: operands.q,
            weights: operands.weights,
            heads: layer.heads,
            scale: layer.scale,
            group: layer.group,
            size: choice.pool,
            shape: KvShape { every: choice.pool, ..shape },
        };
        let scores = self.score(context.reborrow(), inputs, kv_bytes, &scored, some.clone());
        let pool = context.pool;
        // 2. choices
        let (rooms, lists) = (Parts::new(&mut self.keys[..]), Parts::new(&mut self.slots[..]));
        pool.run(some.len(), &|i, thread| {
            let t = some.start + i;
            let (n, table) = (seen(t), inputs.table(layer.rows_group, inputs.sequence_of(t)));
            // SAFETY: a thread alone uses its room, and a task its token's list; scores are only read now.
            unsafe {
                let (all, wanted) = (inputs.positions()[t] as usize + 1, choice.top / choice.pool);
                let list = lists.get(t * choice.most..t * choice.most + choice.seen(all));
                if n <= wanted {
                    list.iter_mut().zip(0..).for_each(|(position, p)| *position = p);
                } else {
                    let room = rooms.get(thread * positions..(thread + 1) * positions);
                    best_positions(scores.get(i, 0..n), room, &mut list[..wanted]);
                    // Pools become their positions, the last first, and then come those behind all pools.
                    for i in (0..wanted * choice.pool).rev() {
                        list[i] = list[i / choice.pool] * choice.pool as u32 + (i % choice.pool) as u32;
                    }
                    list[wanted * choice.pool..].iter_mut().zip(n * choice.pool..).for_each(|(to, p)| *to = p as u32);
                }
                for slot in list {
                    let position = *slot as usize;
                    *slot = table[position / row_block] * row_block as u32 + (position % row_block) as u32;
                }
            }
        });
    }
}

/// The row of an entry in its group, by the group's block table.
pub fn row_of_entry(table: &[u32], layout: &KvLayout, rate: usize, entry: u32) -> u32 {
    let last = entry as usize * rate + rate - 1;
    let (block, within) = (last / layout.block_tokens, last % layout.block_tokens);
    table[block] * layout.block_rows() as u32 + (within / layout.every) as u32
}

/// Where a token is the last of its pool, the pool's key takes the place of the token's own. `k`: the tokens' keys, which are stored by now and make room for those of pools.
fn store_pools(
    mut context: ExecContext,
    inputs: &StepInputs,
    shape: &KvShape,
    kv_bytes: &mut [u8],
    (operands, layer): (&IndexOperands, &IndexLayer),
    turn: Turn,
) {
    let (dim, rotated, slots, size) = (shape.k_dim, operands.angles.cols, inputs.slots(layer.group), layer.pool_size());
    context.reserve(0, dim, 0, 0);
    let ExecContext { isa, pool, workers, .. } = context;
    let (workers, k) = (&*workers, operands.k);
    let is_last = |t: usize| (inputs.positions()[t] as usize + 1).is_multiple_of(size);
    // SAFETY: weights are written once, at load.
    let bias = operands.logits.map(|[_, bias]| unsafe { bias.get(0, 0..size * dim) });
    let norm = match layer.norm {
        IndexNorm::Tokens(_) => None,
        // SAFETY: as above.
        IndexNorm::Pools(norm) => Some((unsafe { operands.norm[0].get(0, 0..dim) }, norm.eps)),
    };
    let kv = KvView { bytes: &*kv_bytes, shape: *shape };
    pool.run(slots.len(), &|t, thread| {
        if !is_last(t) {
            return;
        }
        let (table, first) =
            (inputs.table(layer.group, inputs.sequence_of(t)), inputs.positions()[t] as usize + 1 - size);
        let rows = (0..size).map(|i| Pooled { position: first + i, heads: [0, 1] });
        // SAFETY: one borrow, by the task that runs as this thread; it alone uses this token's row.
        let (key, row) = unsafe { (k.get_mut(t, 0..dim), part(&mut workers.get(thread).row, dim)) };
        average_rows(isa, &kv, table, rows, bias, key);
        if let Some((weight, eps)) = norm {
            norm::rms_norm_in_place(isa, key, Some(weight), eps);
            row.copy_from_slice(key);
            turn.at(first, &row[..rotated], &mut key[..rotated]);
        }
    });
    let kv_bytes = Parts::new(kv_bytes);
    pool.run(slots.len().div_ceil(TOKENS), &|task, _| {
        for t in (task * TOKENS..((task + 1) * TOKENS).min(slots.len())).filter(|t| is_last(*t)) {
            let (to, scale) = (shape.k_at(slots[t] as usize, 0), shape.k_scale_at(slots[t] as usize, 0));
            // SAFETY: this task alone has this token's row and slot.
            unsafe { store_row(isa, shape.kv_type, k.get(t, 0..dim), kv_bytes.get(to), kv_bytes.get(scale)) };
        }
    });
}
