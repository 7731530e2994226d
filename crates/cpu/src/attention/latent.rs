//! Latent attention on the CPU. Rows go into their slots, queries are taken to the space of the cached vectors, one KV head of which serves all query heads, and each
//! head's result is projected to its values.
//!
//! Of many tokens some heads are taken at a time: a query in that space is several times as long as before, and all of them together would not fit the caches.

use std::ops::Range;

use sluice_backend::{HeadRows, KvLayout, LatentKeys, LatentLayer, StepInputs};
use sluice_kernels::attention::{KvShape, store_row};
use sluice_kernels::{latent, matmul, norm};

use super::grouped::AttentionWork;
use super::index::IndexWork;
use super::selected::attend_selected;
use super::turn::Turn;
use super::{Blocks, Queries, TOKENS, kv_shape};
use crate::encoded::{Encoded, Needs};
use crate::exec::ExecContext;
use crate::matmul::block_rows;
use crate::memory::{Parts, Place, part};

/// Query rows (heads of tokens) that are taken at a time, if one head of all tokens is not more.
const ROWS: usize = 8192;
/// Tokens whose queries one task takes through a head's key projection.
const ABSORBED: usize = 64;

/// The heads that are taken at a time, of `heads` and so many tokens.
pub fn heads_at_once(heads: usize, tokens: usize) -> usize {
    let most = (ROWS / tokens.max(1)).clamp(1, heads);
    heads.div_ceil(heads.div_ceil(most))
}

/// The most query rows that steps of so many tokens, or of fewer, take at a time.
pub fn most_rows(heads: usize, tokens: usize) -> usize {
    ROWS.max(tokens).min(heads * tokens)
}

/// How many rows of a head's projection one task computes, where `heads` heads are computed at a time.
pub fn product_rows(heads: usize, rows: usize, threads: usize) -> usize {
    block_rows(heads * rows, threads).min(rows)
}

/// The layout of a layer's rows, as keys with their values in them: `rotated` elements, then the vector.
pub fn shape_of_latents(layout: &KvLayout, layer: usize, rotated: usize) -> KvShape {
    assert!(layout.kv_heads == 1 && layout.v_dim == 0, "a group of latent rows: {layout:?}");
    KvShape { v_dim: layout.k_dim - rotated, values_in_keys: true, ..kv_shape(layout, layer) }
}

/// Buffers between the rounds. Allocated once and kept.
#[derive(Default)]
pub struct LatentWork {
    /// Queries in the space of the cached rows: `[tokens, heads at a time, rotated + rank]`.
    q: Vec<f32>,
    /// What attention makes of them: `[tokens, heads at a time, rank]`.
    mixed: Vec<f32>,
    /// For each of the heads that are computed at a time, its rows among `[tokens, heads at a time]`.
    rows: Vec<u32>,
    encoded: Encoded,
}

/// The tensors of a layer, and its angles: `[positions, cosines then sines]`.
pub struct LatentOperands {
    pub q: Place,
    pub kv: Place,
    pub out: Place,
    /// Weight and epsilon.
    pub norm: (Place, f32),
    pub angles: Place,
}

impl LatentWork {
    pub fn bytes(&self) -> usize {
        4 * (self.q.len() + self.mixed.len() + self.rows.capacity()) + self.encoded.bytes()
    }

    /// Runs a layer for the tokens of `inputs`.
    pub fn run(
        &mut self,
        mut context: ExecContext,
        attention: &mut AttentionWork,
        inputs: &StepInputs,
        blocks: Blocks,
        operands: &LatentOperands,
        (layer, selected): (&LatentLayer, Option<&IndexWork>),
    ) {
        let shape = shape_of_latents(&blocks.layout, layer.layer, layer.rotated());
        assert_eq!(operands.angles.cols, layer.rotated(), "angles of all rotated elements");
        for matrix in [layer.keys.rows().matrix, layer.values.matrix] {
            context.weights[matrix.number()].wait();
        }
        let (isa, adjacent_pairs) = (context.isa, layer.adjacent_pairs);
        let turn = Turn { isa, angles: operands.angles, positions: inputs.positions(), adjacent_pairs };
        store(context.reborrow(), inputs.slots(layer.group), &shape, &mut *blocks.bytes, operands, turn);
        let (tokens, heads) = (inputs.tokens().len(), layer.heads);
        let room = most_rows(heads, tokens);
        part(&mut self.q, room * shape.k_dim);
        part(&mut self.mixed, room * layer.rank);
        self.rows.clear();
        self.rows.reserve_exact(room);
        let n = heads_at_once(heads, tokens);
        for first in (0..heads).step_by(n) {
            let some = first..(first + n).min(heads);
            self.absorb(context.reborrow(), operands, layer, (some.clone(), tokens), turn);
            let nothing = |_: usize, _: Range<usize>| {};
            let queries = Queries {
                q: Place::of_slice(&mut self.q[..tokens * some.len() * shape.k_dim], some.len() * shape.k_dim),
                out: Place::of_slice(&mut self.mixed[..tokens * some.len() * layer.rank], some.len() * layer.rank),
                heads: some.len(),
                cache_group: layer.group,
                shape,
                scale: layer.scale,
                window: None,
                softcap: None,
                sinks: None,
                prepare: &nothing,
                finish: &nothing,
            };
            let exec = (isa, &mut *context.pool, &mut *context.workers);
            match selected.filter(|of| of.selects()) {
                Some(of) => attend_selected(exec, inputs, &*blocks.bytes, &queries, of),
                None => attention.attend(exec, inputs, &*blocks.bytes, &queries),
            }
            self.project(context.reborrow(), operands.out, layer, (some, tokens));
        }
    }

    /// The queries of some heads in the space of the cached rows.
    fn absorb(
        &mut self,
        mut context: ExecContext,
        operands: &LatentOperands,
        layer: &LatentLayer,
        (heads, tokens): (Range<usize>, usize),
        turn: Turn,
    ) {
        let (isa, n, rotated, plain) = (context.isa, heads.len(), layer.rotated(), layer.plain());
        let (first, width, dim) = (heads.start, plain + rotated, rotated + layer.rank);
        let (given, q) = (operands.q, Place::of_slice(&mut self.q[..tokens * n * dim], n * dim));
        let turn_one = |t: usize, i: usize| {
            // SAFETY: one task makes the query of a token's head, and nobody writes what it is made of.
            unsafe {
                let from = given.get(t, (first + i) * width + plain..(first + i + 1) * width);
                turn.token(t, from, q.get_mut(t, i * dim..i * dim + rotated));
            }
        };
        match layer.keys {
            LatentKeys::Rows(keys) => {
                context.reserve(0, 0, latent::scratch_len(layer.rank), 0);
                let ExecContext { weights, pool, workers, .. } = context;
                let (weight, workers, runs) = (&weights[keys.matrix.number()], &*workers, tokens.div_ceil(ABSORBED));
                pool.run(n * runs, &|task, thread| {
                    let (i, some) = (task / runs, task % runs * ABSORBED);
                    let some = some..(some + ABSORBED).min(tokens);
                    let cols = (first + i) * width..(first + i) * width + plain;
                    // SAFETY: one borrow, by the task that runs as this thread; it alone makes the queries of these tokens for this head.
                    unsafe {
                        let worker = workers.get(thread);
                        let from = given.part(some.clone(), cols).as_rows();
                        let mut to = q.part(some.clone(), i * dim + rotated..(i + 1) * dim).as_rows_mut();
                        let scratch = part(&mut worker.floats, latent::scratch_len(layer.rank));
                        latent::absorb(isa, &weight.matrix(worker.node), keys.of(first + i), from, &mut to, scratch);
                    }
                    some.for_each(|t| turn_one(t, i));
                });
            }
            LatentKeys::Columns(keys) => {
                let room = most_rows(layer.heads, tokens);
                let of = |t: usize, i: usize| (given, t, (first + i) * width..(first + i) * width + plain);
                self.encode(context.reborrow(), keys, room, (tokens, n, plain), &of, &turn_one);
                let to = |i: usize| q.part(0..tokens, i * dim + rotated..(i + 1) * dim);
                self.products(context, keys, first, (tokens, n), &to);
            }
        }
    }

    /// The values of some heads: what attention made for them, projected.
    fn project(
        &mut self,
        mut context: ExecContext,
        out: Place,
        layer: &LatentLayer,
        (heads, tokens): (Range<usize>, usize),
    ) {
        let (n, rank, v_dim) = (heads.len(), layer.rank, layer.v_dim());
        let mixed = Place::of_slice(&mut self.mixed[..tokens * n * rank], n * rank);
        let of = |t: usize, i: usize| (mixed, t, i * rank..(i + 1) * rank);
        let room = most_rows(layer.heads, tokens);
        self.encode(context.reborrow(), layer.values, room, (tokens, n, rank), &of, &|_, _| {});
        let to = |i: usize| out.part(0..tokens, (heads.start + i) * v_dim..(heads.start + i + 1) * v_dim);
        self.products(context, layer.values, heads.start, (tokens, n), &to);
    }

    /// Encodes `cols` elements of each token and head, at the place that `of` names, as the matrix of `rows` takes them. `also` is called for each.
    fn encode(
        &mut self,
        context: ExecContext,
        rows: HeadRows,
        room: usize,
        (tokens, n, cols): (usize, usize, usize),
        of: &(dyn Fn(usize, usize) -> (Place, usize, Range<usize>) + Sync),
        also: &(dyn Fn(usize, usize) + Sync),
    ) {
        let needs = Needs::of([context.weights[rows.matrix.number()].format().activation_format(context.mode)]);
        // Room for what any step of as many tokens may take.
        self.encoded.reset(room, cols, needs);
        self.encoded.reset(tokens * n, cols, needs);
        let (isa, writer) = (context.isa, self.encoded.writer(needs));
        let tasks = tokens * n;
        const EACH: usize = 16;
        context.pool.run(tasks.div_ceil(EACH), &|task, _| {
            for row in task * EACH..((task + 1) * EACH).min(tasks) {
                let (t, i) = (row / n, row % n);
                let (place, t, cols) = of(t, i);
                // SAFETY: this task alone writes this row, and nobody writes what it is made of.
                unsafe { writer.write(isa, row, 0, place.get(t, cols)) };
                also(t, i);
            }
        });
        self.encoded.lay_out(isa, needs, context.pool);
    }

    /// Products of each head's rows with its encoded elements, to the place that `to` names: `[tokens, rows]`.
    fn products(
        &mut self,
        mut context: ExecContext,
        rows: HeadRows,
        first: usize,
        (tokens, n): (usize, usize),
        to: &(dyn Fn(usize) -> Place + Sync),
    ) {
        self.rows.clear();
        self.rows.extend((0..n).flat_map(|i| (0..tokens).map(move |t| (t * n + i) as u32)));
        let block = product_rows(n, rows.rows, context.pool.threads());
        let weight = &context.weights[rows.matrix.number()];
        context.reserve(tokens * block, 0, 0, weight.scratch_bytes(block, tokens, context.mode));
        let ExecContext { isa, mode, pool, workers, .. } = context;
        let (list, encoded, workers, blocks) = (&self.rows, &self.encoded, &*workers, rows.rows.div_ceil(block));
        let input = encoded.input(weight.format().activation_format(mode));
        pool.run(n * blocks, &|task, thread| {
            let (i, from) = (task / blocks, task % blocks * block);
            let count = block.min(rows.rows - from);
            // SAFETY: one borrow, by the task that runs as this thread.
            let worker = unsafe { workers.get(thread) };
            let tile = part(&mut worker.tile, tokens * count);
            let at = rows.of(first + i).start + from;
            let list = &list[i * tokens..(i + 1) * tokens];
            matmul::matmul(isa, &weight.matrix(worker.node), at..at + count, input, list, tile, &mut worker.kernel);
            let to = to(i);
            for (t, tile) in tile.chunks_exact(count).enumerate() {
                // SAFETY: these columns are this task's alone.
                unsafe { to.get_mut(t, from..from + count) }.copy_from_slice(tile);
            }
        });
    }
}

/// Norms the vectors of a step's tokens, turns their keys, and writes both into their slots.
fn store(
    mut context: ExecContext,
    slots: &[u64],
    shape: &KvShape,
    kv_bytes: &mut [u8],
    operands: &LatentOperands,
    turn: Turn,
) {
    let (tokens, dim, rank) = (slots.len(), shape.k_dim, shape.v_dim);
    context.reserve(0, dim, 0, 0);
    let ExecContext { isa, pool, workers, .. } = context;
    let (workers, kv, kv_bytes) = (&*workers, operands.kv, Parts::new(kv_bytes));
    // SAFETY: weights are written once, at load.
    let (weight, eps) = (unsafe { operands.norm.0.get(0, 0..rank) }, operands.norm.1);
    pool.run(tokens.div_ceil(TOKENS), &|task, thread| {
        for (t, &slot) in slots.iter().enumerate().skip(task * TOKENS).take(TOKENS) {
            // SAFETY: one borrow, by the task that runs as this thread; it alone has this token's slot, and nobody writes what goes there.
            unsafe {
                let row = part(&mut workers.get(thread).row, dim);
                let (turned, vector) = row.split_at_mut(dim - rank);
                turn.token(t, kv.get(t, rank..dim), turned);
                norm::rms_norm(isa, kv.get(t, 0..rank), weight, eps, vector);
                let (to, scale) = (shape.k_at(slot as usize, 0), shape.k_scale_at(slot as usize, 0));
                store_row(isa, shape.kv_type, row, kv_bytes.get(to), kv_bytes.get(scale));
            }
        }
    });
}
