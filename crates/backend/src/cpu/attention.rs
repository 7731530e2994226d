//! Paged attention on the CPU. Rounds of tasks: norms, rotation and cache writes by tokens; attention by KV heads and runs of queries (which it
//! norms and turns), or, for single tokens with few KV heads, by partitions that are joined afterwards.

use std::ops::Range;

use sluice_kernels::attention::{self, Head, KvShape, KvView, store_row};
use sluice_kernels::rows::Rows;
use sluice_kernels::{elementwise, rotary};

use super::Cpu;
use super::matmul::part;
use super::memory::{Parts, Place};
use crate::{AttentionLayer, KvLayout};

/// Tokens that one task norms, rotates and stores.
const TOKENS: usize = 4;
/// Query rows (heads of tokens) that one task takes through the cache together, at most and at least: the more, the less often keys and
/// values are widened, as long as they stay in the second-level cache; the fewer, the better threads share the work.
pub const ROWS: std::ops::RangeInclusive<usize> = 128..=256;
/// So many tasks per thread are enough to share.
const TASKS: usize = 8;

/// What a step keeps between its rounds; allocated at the first and then kept.
#[derive(Default)]
pub struct Work {
    /// Queries without their gates: `[tokens, heads * head_dim]`.
    q: Vec<f32>,
    /// Parts of single tokens, task by task.
    parts: Vec<f32>,
    tasks: Vec<Task>,
}

impl Work {
    pub fn bytes(&self) -> usize {
        4 * (self.q.len() + self.parts.len()) + self.tasks.capacity() * size_of::<Task>()
    }
}

/// A piece of attention: one KV head of one sequence, and some of its queries, or one partition of its only one.
#[derive(Clone, Copy)]
pub struct Task {
    sequence: usize,
    kv_head: usize,
    /// Of the sequence's new tokens.
    first: usize,
    tokens: usize,
    partition: Option<usize>,
    /// Where its part begins.
    part: usize,
}

pub fn kv_shape(layout: &KvLayout, layer: usize) -> KvShape {
    let KvLayout { kv_heads, k_dim, v_dim, kv_type, block_tokens, .. } = *layout;
    let k_offset = layer * layout.layer_bytes();
    let v_offset = k_offset + kv_type.bytes(kv_heads * block_tokens, k_dim);
    KvShape { block_bytes: layout.block_bytes(), k_offset, v_offset, block_tokens, kv_heads, k_dim, v_dim, kv_type }
}

impl Cpu {
    pub(super) fn run_attention(&mut self, step: &AttentionLayer) {
        let (isa, threads) = (self.isa, self.pool.threads());
        let pool = self.kv[step.group];
        let layout = pool.layout;
        let (dim, v_dim, kv_heads) = (layout.k_dim, layout.v_dim, layout.kv_heads);
        let (heads, group) = (step.heads, step.heads / layout.kv_heads);
        let shape = kv_shape(&layout, step.layer);
        let [q_in, k, v, out] = [step.q, step.k, step.v, step.out].map(|t| self.place(t));
        let sinks = step.sinks.map(|t| self.place(t));
        let angles = self.rotary[step.rotary.number()].place();
        let [q_norm, k_norm] = [step.q_norm, step.k_norm].map(|n| n.map(|n| self.norm_weight(&n)));
        let inputs = &self.inputs;
        let tokens = inputs.tokens().len();
        let Work { q, parts, tasks } = &mut self.attention;
        // Queries are turned where they lie, unless gates lie between them.
        let q = if step.gated { Place::of_slice(part(q, tokens * heads * dim), heads * dim) } else { q_in };
        let q_width = if step.gated { 2 * dim } else { dim };
        let half = angles.cols / 2;
        let (slots, positions) = (inputs.slots(step.group), inputs.positions());
        let kv_bytes = self.buffers[pool.buffer.number()].as_bytes_mut();

        // 1. norms, rotation; keys and values into their slots
        let pool_bytes = Parts::new(&mut *kv_bytes);
        let turn = |head: &mut [f32], norm: Option<(&[f32], f32)>, cos: &[f32], sin: &[f32]| match norm {
            Some((weight, eps)) => rotary::norm_rotate(isa, head, Some(weight), eps, cos, sin),
            None => rotary::rotate(isa, head, cos, sin),
        };
        let turn_queries = |t: usize, heads: Range<usize>| {
            for h in heads {
                // SAFETY: one task turns the queries of a token's head.
                unsafe {
                    let (cos, sin) = angles.get(positions[t] as usize, 0..2 * half).split_at(half);
                    let head = q.get_mut(t, h * dim..(h + 1) * dim);
                    if step.gated {
                        head.copy_from_slice(q_in.get(t, h * q_width..h * q_width + dim));
                    }
                    turn(head, q_norm, cos, sin);
                }
            }
        };
        // Queries of a run of tokens are turned by the task that uses them, while they are in its cache; those of a single token, which
        // several tasks may share, now.
        let alone = |t: usize| inputs.rows(inputs.sequence_of(t)).len() == 1;
        self.pool.run(tokens.div_ceil(TOKENS), &|task, _| {
            for (t, &slot) in slots.iter().enumerate().skip(task * TOKENS).take(TOKENS) {
                // SAFETY: this task alone uses this token's rows and its slot, which no other token has.
                unsafe {
                    let (cos, sin) = angles.get(positions[t] as usize, 0..2 * half).split_at(half);
                    if alone(t) {
                        turn_queries(t, 0..heads);
                    }
                    for h in 0..kv_heads {
                        let head = k.get_mut(t, h * dim..(h + 1) * dim);
                        turn(head, k_norm, cos, sin);
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
        // 2. attention
        let kv_bytes = &*kv_bytes;
        let head = |sequence: usize, kv_head: usize| Head {
            kv: KvView { bytes: kv_bytes, shape },
            table: inputs.table(step.group, sequence),
            kv_head,
            group,
            scale: step.scale,
            window: step.window,
            softcap: step.softcap,
            // SAFETY: weights are written once, at load.
            sinks: sinks.map(|s| unsafe { s.get(0, kv_head * group..(kv_head + 1) * group) }),
        };
        let gate = |t: usize, kv_head: usize| {
            if !step.gated {
                return;
            }
            for h in kv_head * group..(kv_head + 1) * group {
                // SAFETY: the task that computed this token's heads alone uses them.
                unsafe {
                    let gate = q_in.get(t, h * q_width + dim..(h + 1) * q_width);
                    elementwise::sigmoid_mul(isa, gate, out.get_mut(t, h * v_dim..(h + 1) * v_dim));
                }
            }
        };
        // Few heads for many threads: single tokens are split by partitions.
        let split = inputs.sequences() * kv_heads < 2 * threads && threads > 1;
        let part_len = group * (v_dim + 2);
        tasks.clear();
        // Room for as many parts as there can ever be; memory is committed when it is used.
        let room = kv_bytes.len() / layout.block_bytes() * layout.block_tokens;
        let most = kv_heads * (room.div_ceil(attention::PARTITION) + inputs.sequences() + tokens);
        tasks.reserve(most);
        if split {
            parts.reserve((most * part_len).saturating_sub(parts.len()));
        }
        let runs =
            |queries: usize| -> usize { (0..inputs.sequences()).map(|s| inputs.rows(s).len().div_ceil(queries)).sum() };
        let mut queries = (ROWS.end() / group).max(1);
        while queries > 1 && queries * group > *ROWS.start() && kv_heads * runs(queries) < TASKS * threads {
            queries = queries.div_ceil(2);
        }
        let mut part_end = 0;
        for sequence in 0..inputs.sequences() {
            let queries_of = inputs.rows(sequence).len();
            let partitions = head(sequence, 0).partitions(inputs.position(sequence));
            if queries_of == 1 && split && partitions.len() > 1 {
                for kv_head in 0..kv_heads {
                    for p in partitions.clone() {
                        tasks.push(Task { sequence, kv_head, first: 0, tokens: 1, partition: Some(p), part: part_end });
                        part_end += part_len;
                    }
                }
                continue;
            }
            // The longest first: the last queries, which see most.
            for i in (0..queries_of.div_ceil(queries)).rev() {
                let (first, tokens) = (i * queries, queries.min(queries_of - i * queries));
                for kv_head in 0..kv_heads {
                    tasks.push(Task { sequence, kv_head, first, tokens, partition: None, part: part_end });
                }
            }
        }
        let part_room = Parts::new(part(parts, part_end));
        let most = tasks.iter().map(|t| t.tokens).max().unwrap_or(0);
        let scratch_len = attention::scratch_len(&shape, group, most);
        self.workers.reserve(0, 0, scratch_len, 0);
        let (tasks, workers) = (&*tasks, &self.workers);
        self.pool.run(tasks.len(), &|task, thread| {
            let task = &tasks[task];
            let (own, position) = (inputs.rows(task.sequence), inputs.position(task.sequence));
            let head = head(task.sequence, task.kv_head);
            // SAFETY: one borrow, by the task that runs as this thread.
            let scratch = part(unsafe { &mut workers.get(thread).floats }, head.scratch_len(task.tokens));
            let from = own.start + task.first;
            let rows = from..from + task.tokens;
            let width = group * dim;
            if own.len() > 1 {
                rows.clone().for_each(|t| turn_queries(t, task.kv_head * group..(task.kv_head + 1) * group));
            }
            // SAFETY: these queries are only read now.
            let queries: Rows =
                unsafe { q.part(rows.clone(), task.kv_head * width..(task.kv_head + 1) * width).as_rows() };
            if let Some(p) = task.partition {
                // SAFETY: this task alone writes its part.
                let part = unsafe { part_room.get(task.part..task.part + part_len) };
                attention::attend_partition(isa, &head, queries.row(0), position, p, part, scratch);
                return;
            }
            let cols = task.kv_head * group * v_dim..(task.kv_head + 1) * group * v_dim;
            // SAFETY: this task alone writes these heads of these tokens.
            let mut to = unsafe { out.part(rows.clone(), cols).as_rows_mut() };
            attention::attend(isa, &head, queries, position + task.first, &mut to, scratch);
            rows.for_each(|t| gate(t, task.kv_head));
        });
        // 3. join what was split
        let mut at = 0;
        while at < tasks.len() {
            let first = &tasks[at];
            let same = |t: &&Task| (t.sequence, t.kv_head) == (first.sequence, first.kv_head);
            let run = tasks[at..].iter().take_while(same).count();
            at += run;
            if first.partition.is_some() {
                let row = inputs.rows(first.sequence).start;
                let cols = first.kv_head * group * v_dim..(first.kv_head + 1) * group * v_dim;
                // SAFETY: no task is under way.
                let (parts, to) =
                    unsafe { (part_room.get(first.part..first.part + run * part_len), out.get_mut(row, cols)) };
                attention::join(isa, &head(first.sequence, first.kv_head), parts, to);
                gate(row, first.kv_head);
            }
        }
    }
}
