//! Attention with grouped queries, in rounds of tasks: norms, rotation and cache writes by tokens; attention by KV heads and units of [`WorkSplit`] (which also norms and
//! rotates the queries of longer runs); and the join of partitions.

use std::ops::Range;

use sluice_backend::{AttentionLayer, StepInputs};
use sluice_kernels::attention::{self, Head, KvShape, KvView, RUNS, Run, store_row};
use sluice_kernels::hadamard::hadamard;
use sluice_kernels::rows::Rows;
use sluice_kernels::{Isa, elementwise, rotary};

use super::index::IndexWork;
use super::selected::attend_selected;
use super::work_split::{WorkSplit, run_of};
use super::{Blocks, Queries, TOKENS, kv_shape};
use crate::exec::{ExecContext, Worker};
use crate::memory::{Parts, PerThread, Place, part};
use crate::threads::Pool;

/// Buffers between the rounds of a step. Allocated once and kept.
#[derive(Default)]
pub struct AttentionWork {
    /// Queries without their gates: `[tokens, heads * head_dim]`.
    q: Vec<f32>,
    /// Parts of single tokens: `[kv_heads, parts, part_len]`.
    parts: Vec<f32>,
    work: WorkSplit,
}

impl AttentionWork {
    pub fn bytes(&self) -> usize {
        4 * (self.q.len() + self.parts.len()) + self.work.bytes()
    }

    /// Begins another step.
    pub fn begin(&mut self) {
        self.work.forget();
    }
}

/// The tensors of a layer: `[tokens, ..]` but for the sinks and the angles.
pub struct Operands {
    q: Place,
    k: Place,
    v: Place,
    out: Place,
    sinks: Option<Place>,
    /// `[positions, cosines then sines]`
    angles: Place,
    /// Weight and epsilon.
    q_norm: Option<(Place, f32)>,
    k_norm: Option<(Place, f32)>,
}

impl Operands {
    /// `angles`: of the layer's rotary embedding.
    pub fn new(context: &ExecContext, step: &AttentionLayer, angles: Place) -> Operands {
        let [q, k, v, out] = [step.q, step.k, step.v, step.out].map(|t| context.place(t));
        let sinks = step.sinks.map(|t| context.place(t));
        let [q_norm, k_norm] = [step.q_norm, step.k_norm].map(|n| n.map(|n| (context.place(n.weight), n.eps)));
        Operands { q, k, v, out, sinks, angles, q_norm, k_norm }
    }
}

impl AttentionWork {
    /// Runs a layer for the tokens of `inputs`.
    pub fn run(
        &mut self,
        (isa, pool, workers): (Isa, &mut Pool, &mut PerThread<Worker>),
        inputs: &StepInputs,
        blocks: Blocks,
        operands: Operands,
        (step, selected): (&AttentionLayer, Option<&IndexWork>),
    ) {
        let layout = blocks.layout;
        let (dim, v_dim, kv_heads, heads) = (layout.k_dim, layout.v_dim, layout.kv_heads, step.heads);
        let shape = kv_shape(&layout, step.layer);
        let Operands { q: q_in, k, v, out, sinks, angles, q_norm, k_norm } = operands;
        // SAFETY: weights are written once, at load.
        let [q_norm, k_norm] = [q_norm, k_norm].map(|n| n.map(|(w, eps)| (unsafe { w.get(0, 0..w.cols) }, eps)));
        let tokens = inputs.tokens().len();
        // Queries are rotated in place, unless they are interleaved with gates.
        let q = if step.gated { Place::of_slice(part(&mut self.q, tokens * heads * dim), heads * dim) } else { q_in };
        let q_width = if step.gated { 2 * dim } else { dim };
        let half = angles.cols / 2;
        let (slots, positions) = (inputs.slots(step.group), inputs.positions());
        let run = layout.hadamard_run();
        let kv_bytes = blocks.bytes;

        // 1. norms, rotation; keys and values into their slots
        let pool_bytes = Parts::new(&mut *kv_bytes);
        let norm_and_rotate = |head: &mut [f32], norm: Option<(&[f32], f32)>, cos: &[f32], sin: &[f32]| {
            match norm {
                Some((weight, eps)) => rotary::norm_rotate(isa, head, Some(weight), eps, cos, sin),
                None => rotary::rotate(isa, head, cos, sin),
            }
            if run > 1 {
                hadamard(isa, head);
            }
        };
        let rotate_queries = |t: usize, heads: Range<usize>| {
            for h in heads {
                // SAFETY: one task turns the queries of a token's head.
                unsafe {
                    let (cos, sin) = angles.get(positions[t] as usize, 0..2 * half).split_at(half);
                    let head = q.get_mut(t, h * dim..(h + 1) * dim);
                    if step.gated {
                        head.copy_from_slice(q_in.get(t, h * q_width..h * q_width + dim));
                    }
                    norm_and_rotate(head, q_norm, cos, sin);
                }
            }
        };
        // The queries of a run of tokens are rotated by the task that uses them, while they are in its cache. Those of a single token, which
        // several tasks may share, are rotated now.
        let alone = |t: usize| inputs.rows(inputs.sequence_of(t)).len() == 1;
        pool.run(tokens.div_ceil(TOKENS), &|task, _| {
            for (t, &slot) in slots.iter().enumerate().skip(task * TOKENS).take(TOKENS) {
                // SAFETY: this task alone uses this token's rows and its slot, which no other token has.
                unsafe {
                    let (cos, sin) = angles.get(positions[t] as usize, 0..2 * half).split_at(half);
                    if alone(t) {
                        rotate_queries(t, 0..heads);
                    }
                    let own = if step.shared { 0 } else { kv_heads };
                    for h in 0..own {
                        let head = k.get_mut(t, h * dim..(h + 1) * dim);
                        norm_and_rotate(head, k_norm, cos, sin);
                        let slot = slot as usize;
                        let (row, scale) = (shape.k_at(slot, h), shape.k_scale_at(slot, h));
                        store_row(isa, layout.kv_type, head, pool_bytes.get(row), pool_bytes.get(scale));
                        let value = v.get(t, h * v_dim..(h + 1) * v_dim);
                        let (row, scale) = (shape.v_at(slot, h), shape.v_scale_at(slot, h));
                        store_row(isa, layout.kv_type, value, pool_bytes.get(row), pool_bytes.get(scale));
                    }
                }
            }
        });
        // 2. attention, and the gates
        let gate = |t: usize, heads: Range<usize>| {
            if !step.gated {
                return;
            }
            for h in heads {
                // SAFETY: the task that computed this token's heads alone uses them.
                unsafe {
                    let gate = q_in.get(t, h * q_width + dim..(h + 1) * q_width);
                    elementwise::sigmoid_mul(isa, gate, out.get_mut(t, h * v_dim..(h + 1) * v_dim));
                }
            }
        };
        let queries = Queries {
            q,
            out,
            heads,
            cache_group: step.group,
            shape,
            // A power of two, so that it is exact.
            scale: step.scale / run as f32,
            window: step.window,
            softcap: step.softcap,
            sinks,
            prepare: &rotate_queries,
            finish: &gate,
        };
        match selected.filter(|of| of.selects()) {
            Some(of) => attend_selected((isa, pool, workers), inputs, kv_bytes, &queries, of),
            None => self.attend((isa, pool, workers), inputs, kv_bytes, &queries),
        }
    }

    /// Attends over the cache, in units of [`WorkSplit`].
    pub(super) fn attend(
        &mut self,
        (isa, pool, workers): (Isa, &mut Pool, &mut PerThread<Worker>),
        inputs: &StepInputs,
        kv_bytes: &[u8],
        queries: &Queries,
    ) {
        let Queries { q, out, shape, sinks, prepare, finish, .. } = *queries;
        let KvShape { kv_heads, k_dim: dim, v_dim, .. } = shape;
        let (threads, group) = (pool.threads(), queries.heads / kv_heads);
        let AttentionWork { parts, work, .. } = self;
        let head = |kv_head: usize| Head {
            kv: KvView { bytes: kv_bytes, shape },
            kv_head,
            group,
            scale: queries.scale,
            window: queries.window,
            softcap: queries.softcap,
            // SAFETY: weights are written once, at load.
            sinks: sinks.map(|s| unsafe { s.get(0, kv_head * group..(kv_head + 1) * group) }),
        };
        let heads_of = |kv_head: usize| kv_head * group..(kv_head + 1) * group;
        // Room for the most parts there can be, reserved at the first step: contexts are divided only later. Memory is committed when it is used.
        let positions = kv_bytes.len() / shape.block_bytes * shape.block_tokens;
        let most = positions.div_ceil(attention::PARTITION) + inputs.sequences();
        work.fill(inputs, queries.cache_group, &head(0), threads, most);
        let (part_len, part_count) = (group * (v_dim + 2), work.parts.len());
        parts.reserve((kv_heads * most * part_len).saturating_sub(parts.len()));
        let part_room = Parts::new(part(parts, kv_heads * part_count * part_len));
        let tokens_of = |pieces: Range<usize>| work.pieces[pieces].iter().map(|p| p.tokens as usize).sum::<usize>();
        let most = work.units.iter().map(|unit| tokens_of(unit.pieces())).max().unwrap_or(0);
        workers.reserve(0, 0, attention::scratch_len(&shape, group, most), 0);
        let (work, workers) = (&*work, &*workers);
        pool.run(work.units.len() * kv_heads, &|task, thread| {
            let (unit, kv_head) = (&work.units[task / kv_heads], task % kv_heads);
            let head = head(kv_head);
            let mut runs = [Run::EMPTY; RUNS];
            let pieces = &work.pieces[unit.pieces()];
            for (run, piece) in runs.iter_mut().zip(pieces) {
                *run = run_of(inputs, queries.cache_group, piece);
                if inputs.rows(piece.sequence as usize).len() > 1 {
                    let tokens = run.row..run.row + run.tokens;
                    tokens.for_each(|t| prepare(t, heads_of(kv_head)));
                }
            }
            let runs = &runs[..pieces.len()];
            let tokens = runs.iter().map(|run| run.tokens).sum();
            // SAFETY: one borrow, by the task that runs as this thread.
            let scratch = part(unsafe { &mut workers.get(thread).floats }, head.scratch_len(tokens));
            let width = group * dim;
            // SAFETY: the queries of these runs are only read now.
            let queries: Rows =
                unsafe { q.part(0..inputs.tokens().len(), kv_head * width..(kv_head + 1) * width).as_rows() };
            if let Some(p) = unit.partition {
                let from = kv_head * part_count + unit.part as usize;
                // SAFETY: this task alone writes these parts.
                let parts = unsafe { part_room.get(from * part_len..(from + runs.len()) * part_len) };
                attention::attend_partition(isa, &head, runs, queries, p as usize, parts, scratch);
                return;
            }
            let cols = kv_head * group * v_dim..(kv_head + 1) * group * v_dim;
            // SAFETY: of these heads this task alone writes the rows of its runs, and no others.
            let mut to = unsafe { out.part(0..inputs.tokens().len(), cols).as_rows_mut() };
            attention::attend(isa, &head, runs, queries, &mut to, scratch);
            runs.iter().flat_map(|run| run.row..run.row + run.tokens).for_each(|t| finish(t, heads_of(kv_head)));
        });
        // Join what was split
        pool.run(work.splits.len() * kv_heads, &|task, _| {
            let (split, kv_head) = (&work.splits[task / kv_heads], task % kv_heads);
            let row = inputs.rows(split.sequence as usize).start;
            let parts = work.parts[split.parts.start as usize..split.parts.end as usize].iter().map(|part| {
                let at = kv_head * part_count + *part as usize;
                // SAFETY: parts are only read now.
                unsafe { &*part_room.get(at * part_len..(at + 1) * part_len) }
            });
            let cols = kv_head * group * v_dim..(kv_head + 1) * group * v_dim;
            // SAFETY: this task alone writes these heads of this token.
            attention::join(isa, &head(kv_head), parts, unsafe { out.get_mut(row, cols) });
            finish(row, heads_of(kv_head));
        });
    }
}
