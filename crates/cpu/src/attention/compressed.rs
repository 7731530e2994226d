//! Compressed attention on the CPU: entries, which are averages of cached rows, and attention over the rows of windows and over entries.

use sluice_backend::{CompressLayer, CompressedLayer, KvLayout, RotaryFrequencies, StepInputs};
use sluice_kernels::attention::{
    self, Head, KvShape, KvView, PARTITION, Pooled, Run, attend_partition, average_rows, join, store_row,
};
use sluice_kernels::{norm, rotary};

use super::index::{IndexWork, TOKENS};
use super::selected::HEADS;
use super::{Blocks, kv_shape};
use crate::exec::ExecContext;
use crate::memory::{Parts, Place, grow, part};

/// The tensors of what makes entries.
pub struct CompressOperands<'a> {
    pub values: Place,
    pub logits: Place,
    pub bias: Place,
    /// Weight and epsilon.
    pub norm: (Place, f32),
    pub frequencies: &'a RotaryFrequencies,
}

/// A group's rows as keys with their values in them.
fn shape_of_rows(layout: &KvLayout, layer: usize) -> KvShape {
    KvShape { v_dim: layout.k_dim, values_in_keys: true, ..kv_shape(layout, layer) }
}

/// Stores rows and their logits, and makes the entries of windows that end with a token of the step.
pub fn compress(
    mut context: ExecContext,
    inputs: &StepInputs,
    (rows, entries): (Blocks, Blocks),
    operands: &CompressOperands,
    layer: &CompressLayer,
) {
    let (dim, series, rate) = (layer.dim(), layer.series(), layer.rate);
    let shape = shape_of_rows(&rows.layout, layer.rows.layer);
    let (slots, positions) = (inputs.slots(layer.rows.group), inputs.positions());
    let frequencies = operands.frequencies;
    let pairs = frequencies.inv_freq.len();
    context.reserve(0, 2 * dim, 0, 0);
    let ExecContext { isa, pool, workers, .. } = context;
    // 1. rows
    let bytes = Parts::new(&mut *rows.bytes);
    pool.run(slots.len().div_ceil(TOKENS), &|task, _| {
        for (t, &slot) in slots.iter().enumerate().skip(task * TOKENS).take(TOKENS) {
            for (of, from) in [operands.values, operands.logits].into_iter().enumerate() {
                for i in 0..series {
                    let head = of * series + i;
                    let (to, scale) = (shape.k_at(slot as usize, head), shape.k_scale_at(slot as usize, head));
                    // SAFETY: this task alone has this token's slot, and nobody writes what goes there.
                    unsafe {
                        let row = from.get(t, i * dim..(i + 1) * dim);
                        store_row(isa, shape.kv_type, row, bytes.get(to), bytes.get(scale));
                    }
                }
            }
        }
    });
    // 2. entries
    let every = entries.layout.every;
    let (kv, to_shape) = (KvView { bytes: rows.bytes, shape }, shape_of_rows(&entries.layout, layer.entries.layer));
    let (bytes, entry_slots) = (Parts::new(entries.bytes), inputs.slots(layer.entries.group));
    // SAFETY: weights are written once, at load.
    let (bias, weight) = unsafe { (operands.bias.get(0, 0..series * rate * dim), operands.norm.0.get(0, 0..dim)) };
    let workers = &*workers;
    pool.run(slots.len(), &|t, thread| {
        let next = positions[t] as usize + 1;
        if !next.is_multiple_of(rate) {
            return;
        }
        let table = inputs.table(layer.rows.group, inputs.sequence_of(t));
        let own = next - rate;
        // Of the first window there is nothing before.
        let before = if series == 2 && own > 0 { rate } else { 0 };
        let rows = (0..before + rate).map(|i| {
            let of = if i < before { 0 } else { series - 1 };
            Pooled { position: own + i - before, heads: [of, series + of] }
        });
        let bias = &bias[((series - 1) * rate - before) * dim..];
        // SAFETY: one borrow, by the task that runs as this thread; it alone has this token's entry.
        unsafe {
            let (entry, angles) = part(&mut workers.get(thread).row, 2 * dim).split_at_mut(dim);
            average_rows(isa, &kv, table, rows, Some(bias), entry);
            norm::rms_norm_in_place(isa, entry, Some(weight), operands.norm.1);
            let (cos, sin) = angles[..2 * pairs].split_at_mut(pairs);
            frequencies.angles(own as u32, cos, sin);
            rotary::rotate_pairs(isa, entry, cos, sin, false);
            let slot = entry_slots[t] as usize / every;
            let (to, scale) = (to_shape.k_at(slot, 0), to_shape.k_scale_at(slot, 0));
            store_row(isa, to_shape.kv_type, entry, bytes.get(to), bytes.get(scale));
        }
    });
}

/// The tensors of compressed attention.
pub struct AttendOperands {
    pub q: Place,
    pub row: Place,
    pub out: Place,
    pub sinks: Place,
}

/// The most partitions that a token sees: of its window, and of entries of a context of `reach` positions.
pub fn most_parts(layer: &CompressedLayer, reach: usize) -> usize {
    let window = layer.window.div_ceil(PARTITION) + 1;
    let entries = layer.entries.map_or(0, |of| of.top.unwrap_or(usize::MAX).min(reach / of.rate));
    window + entries.div_ceil(PARTITION)
}

/// Buffers of compressed attention. Allocated once and kept.
#[derive(Default)]
pub struct CompressedWork {
    /// Results of partitions: `[threads, most_parts, part_len]`.
    parts: Vec<f32>,
}

impl CompressedWork {
    pub fn bytes(&self) -> usize {
        4 * self.parts.len()
    }

    /// Stores rows, and attends over those of windows and over entries.
    pub fn attend(
        &mut self,
        mut context: ExecContext,
        inputs: &StepInputs,
        (rows, entries): (Blocks, Option<(KvLayout, &[u8])>),
        operands: &AttendOperands,
        (layer, selected): (&CompressedLayer, &IndexWork),
    ) {
        let (dim, heads) = (layer.dim(), layer.heads);
        let (tokens, positions) = (inputs.tokens().len(), inputs.positions());
        let shape = shape_of_rows(&rows.layout, layer.rows.layer);
        let of_entries = layer.entries.zip(entries).map(|(of, (layout, bytes))| {
            let shape = shape_of_rows(&layout, of.cache.layer);
            (of, bytes, KvShape { every: of.rate / layout.every, ..shape })
        });
        let (most, group) = (HEADS.min(heads), heads.div_ceil(HEADS));
        context.reserve(0, 0, attention::scratch_len(&shape, most, 1), 0);
        // Room for the longest context that there may be; memory is committed when it is used.
        let threads = context.pool.threads();
        let longest = rows.bytes.len() / shape.block_bytes * shape.block_tokens;
        let [room, most_room] = [inputs.reach(), longest].map(|reach| most_parts(layer, reach) * most * (dim + 2));
        self.parts.reserve_exact((threads * most_room).saturating_sub(self.parts.len()));
        grow(&mut self.parts, threads * room);
        let rooms = Parts::new(&mut self.parts[..]);
        let ExecContext { isa, pool, workers, .. } = context;
        // 1. rows
        let (slots, bytes) = (inputs.slots(layer.rows.group), Parts::new(&mut *rows.bytes));
        pool.run(tokens.div_ceil(TOKENS), &|task, _| {
            for (t, &slot) in slots.iter().enumerate().skip(task * TOKENS).take(TOKENS) {
                let (to, scale) = (shape.k_at(slot as usize, 0), shape.k_scale_at(slot as usize, 0));
                // SAFETY: this task alone has this token's slot, and nobody writes what goes there.
                unsafe { store_row(isa, shape.kv_type, operands.row.get(t, 0..dim), bytes.get(to), bytes.get(scale)) };
            }
        });
        // 2. attention: partitions of the window, then of entries
        let (kv, workers) = (KvView { bytes: rows.bytes, shape }, &*workers);
        // SAFETY: weights are written once, at load.
        let sinks = unsafe { operands.sinks.get(0, 0..heads) };
        pool.run(tokens * group, &|task, thread| {
            let (t, from) = (task / group, task % group * HEADS);
            let some = from..(from + HEADS).min(heads);
            let (position, sequence) = (positions[t] as usize, inputs.sequence_of(t));
            let head = Head {
                kv,
                kv_head: 0,
                group: some.len(),
                scale: layer.scale,
                window: Some(layer.window),
                softcap: None,
                sinks: Some(&sinks[some.clone()]),
            };
            let len = head.part_len();
            // SAFETY: one borrow, by the task that runs as this thread; it alone writes what comes of these heads of this token, whose queries are only read now.
            unsafe {
                let scratch = part(&mut workers.get(thread).floats, head.scratch_len(1));
                let parts = rooms.get(thread * room..(thread + 1) * room);
                let q = operands.q.part(0..tokens, some.start * dim..some.end * dim).as_rows();
                let mut made = 0;
                let mut attend = |head: &Head, table: &[u32], position: usize, parts: &mut [f32]| {
                    let run = Run { table, position, row: t, tokens: 1 };
                    for p in head.partitions(position) {
                        let to = &mut parts[made * len..(made + 1) * len];
                        attend_partition(isa, head, &[run], q, p, to, scratch);
                        made += 1;
                    }
                };
                attend(&head, inputs.table(layer.rows.group, sequence), position, parts);
                if let Some((of, bytes, shape)) = of_entries {
                    let n = (position + 1) / of.rate;
                    let chosen = of.top.and_then(|_| selected.seen_entries(t, n));
                    let by_slot = chosen.is_some();
                    let table = chosen.unwrap_or_else(|| inputs.table(of.cache.group, sequence));
                    let every = if by_slot { 1 } else { shape.every };
                    let kv = KvView { bytes, shape: KvShape { by_slot, every, ..shape } };
                    let seen = if by_slot { table.len() } else { n };
                    if seen > 0 {
                        attend(&Head { kv, window: None, ..head }, table, seen - 1, parts);
                    }
                }
                let out = operands.out.get_mut(t, some.start * dim..some.end * dim);
                join(isa, &head, parts[..made * len].chunks_exact(len), out);
            }
        });
    }
}
