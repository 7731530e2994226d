//! One partition of attention for many query rows: keys and values are widened once and laid out for all of them.
//!
//! Keys are transposed, with positions across a register, so that sixteen scores share a register and none is summed horizontally: each lane of the
//! lane dot is a register of its own here, and the tree adds registers. The order of every sum is that of [`super::partition`].

// Iterators come with closures, which may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use std::marker::PhantomData;

use super::join::join_sums;
use super::kv::{Bf16, F16, F32, Int8, KvElement, KvShape, KvType};
use super::paged::{KvScales, PARTITION, Paged};
use super::partition::{QueryRow, Rule, weights};
use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::math::exp;
use crate::rows::RowsMut;

/// Columns of a panel of widened values: a partition's panel fits the first-level cache, which rows a power of two apart do not.
const PANEL: usize = 32;
/// Positions of a panel of widened keys.
const ACROSS: usize = 32;
/// Rows of a tile of weighted sums; scores are in smaller tiles.
const TILE: usize = 8;
/// Query rows that are taken through a partition together: they and their scores stay in the first-level cache.
pub const BATCH: usize = 32;
/// The pairs of lanes (i, i + 8) in the order in which the tree joins them.
const PAIRS: [usize; 8] = [0, 4, 2, 6, 1, 5, 3, 7];

/// Elements of room for [`widen`].
fn widened_len(shape: &KvShape) -> usize {
    PARTITION * (padded_k(shape) + padded_v(shape))
}

fn padded_k(shape: &KvShape) -> usize {
    shape.k_dim.next_multiple_of(16)
}

fn padded_v(shape: &KvShape) -> usize {
    shape.v_dim.next_multiple_of(PANEL)
}

/// Elements of a cache line. A register that crosses one is loaded in two halves.
const LINE: usize = 16;

/// Elements of scratch for `rows` query rows.
pub fn scratch_len(shape: &KvShape, rows: usize) -> usize {
    LINE + widened_len(shape) + rows * padded_k(shape) + BATCH * (PARTITION + padded_v(shape))
}

/// Scratch, divided.
pub struct PrefillScratch<'a> {
    /// Widened keys and values.
    pub widened: &'a mut [f32],
    /// All query rows, [`PrefillScratch::q_stride`] apart.
    pub q: &'a mut [f32],
    /// Scores of all rows.
    pub scores: &'a mut [f32],
    /// Weighted sums of a batch, [`PrefillScratch::v_stride`] apart.
    pub sums: &'a mut [f32],
    /// Elements from one query to the next.
    pub q_stride: usize,
    /// Elements from one output to the next.
    pub v_stride: usize,
}

impl<'a> PrefillScratch<'a> {
    /// For rows too few to be widened for: scores and sums alone.
    pub fn few(shape: &KvShape, rows: usize, scratch: &'a mut [f32]) -> PrefillScratch<'a> {
        let (scores, sums) = scratch.split_at_mut(rows * PARTITION);
        PrefillScratch {
            widened: &mut [],
            q: &mut [],
            scores,
            sums: &mut sums[..rows * shape.v_dim],
            q_stride: 0,
            v_stride: 0,
        }
    }

    /// Cuts `scratch` for `rows` query rows.
    pub fn new(shape: &KvShape, rows: usize, scratch: &'a mut [f32]) -> PrefillScratch<'a> {
        let (q_stride, v_stride) = (padded_k(shape), padded_v(shape));
        // Every part is a whole number of cache lines, so all are aligned if the first is.
        let skip = scratch.as_ptr().align_offset(4 * LINE).min(LINE);
        let (widened, rest) = scratch[skip..].split_at_mut(widened_len(shape));
        let (q, rest) = rest.split_at_mut(rows * q_stride);
        let (scores, rest) = rest.split_at_mut(BATCH * PARTITION);
        PrefillScratch { widened, q, scores, sums: &mut rest[..BATCH * v_stride], q_stride, v_stride }
    }
}

/// A partition's keys and values as f32.
pub struct Widened<'a> {
    /// `[PARTITION / ACROSS, k_stride, ACROSS]`: lane by lane in the order of [`PAIRS`], and for each the pairs of elements, ascending; missing elements of the
    /// last sixteen are zeros.
    keys: *const f32,
    /// `[v_stride / PANEL, PARTITION, PANEL]`, missing columns zeros.
    values: *const f32,
    scales: Option<&'a KvScales>,
    k_stride: usize,
    v_stride: usize,
    seen: std::ops::Range<usize>,
    room: PhantomData<&'a [f32]>,
}

#[inline(always)]
unsafe fn widen_lanes<'a, V: Lanes>(from: &'a Paged, room: &'a mut [f32]) -> Widened<'a> {
    // SAFETY: `from` was checked when it was made; the shell has the instruction set.
    unsafe {
        match from.kv_type {
            KvType::F32 => widen_typed::<V, F32>(from, room),
            KvType::Bf16 => widen_typed::<V, Bf16>(from, room),
            KvType::F16 => widen_typed::<V, F16>(from, room),
            KvType::Int8 => widen_typed::<V, Int8>(from, room),
            KvType::Int16 => unreachable!("keys and values of sixteen bits are attended to on integers"),
        }
    }
}

#[inline(always)]
unsafe fn load_some<V: Lanes, T: KvElement>(p: *const u8, n: usize) -> V {
    // SAFETY: as the caller vouches.
    unsafe { if n >= 16 { T::load(p) } else { T::load_first(p, n) } }
}

#[inline(always)]
unsafe fn widen_typed<'a, V: Lanes, T: KvElement>(from: &'a Paged, room: &'a mut [f32]) -> Widened<'a> {
    let (k_dim, v_dim) = (from.k_dim, from.v_dim);
    let (k_stride, v_stride) = (k_dim.next_multiple_of(16), v_dim.next_multiple_of(PANEL));
    let chunks = k_stride / 16;
    let (keys, values) = room[..PARTITION * (k_stride + v_stride)].split_at_mut(PARTITION * k_stride);
    let (keys, values) = (keys.as_mut_ptr(), values.as_mut_ptr());
    // SAFETY: `from` was checked when it was made (keys that are not seen point to one that is); what is written is inside `room`.
    unsafe {
        for first in (from.seen.start / 16 * 16..from.seen.end).step_by(16) {
            let to = keys.add(first / ACROSS * ACROSS * k_stride + first % ACROSS);
            for c in 0..chunks {
                let mut v = [V::splat(0.0); 16];
                for i in 0..16 {
                    v[i] = load_some::<V, T>(from.keys[first + i].add(16 * c * T::SIZE), k_dim - 16 * c);
                }
                let v = V::transpose16(v);
                for (at, lane) in PAIRS.into_iter().enumerate() {
                    let to = to.add((at * chunks + c) * 2 * ACROSS);
                    v[lane].store(to);
                    v[lane + 8].store(to.add(ACROSS));
                }
            }
        }
        for i in from.seen.clone() {
            for c in (0..v_stride).step_by(16) {
                let v = match v_dim.saturating_sub(c) {
                    0 => V::splat(0.0),
                    left => load_some::<V, T>(from.values[i].add(c * T::SIZE), left),
                };
                v.store(values.add(c / PANEL * PANEL * PARTITION + i * PANEL + c % PANEL));
            }
        }
    }
    let (scales, seen) = (from.scales.as_ref(), from.seen.clone());
    Widened { keys, values, scales, k_stride, v_stride, seen, room: PhantomData }
}

simd! {
    /// Copies the keys and values that are seen to `room`, as f32 (which changes no value; scales stay apart).
    pub fn widen<'a>(from: &'a Paged, room: &'a mut [f32]) -> Widened<'a> = widen_lanes
}

#[inline(always)]
unsafe fn attend_lanes<V: Lanes>(
    at: &Widened,
    rule: Rule,
    rows: &mut [QueryRow],
    scores: &mut [f32],
    sums: &mut [f32],
) {
    assert!(rows.len() <= BATCH && scores.len() >= BATCH * PARTITION && sums.len() >= BATCH * at.v_stride);
    for row in rows.iter() {
        let v = &row.visible;
        assert!(row.q.len() == at.k_stride && (v.is_empty() || at.seen.start <= v.start && v.end <= at.seen.end));
    }
    // SAFETY: checked above and by `Widened`; the shell has the instruction set.
    unsafe {
        // 1. dot products
        for first in (0..PARTITION).step_by(ACROSS) {
            let keys = at.keys.add(first * at.k_stride);
            for (i, tile) in rows.chunks(4).enumerate() {
                let (from, to) = hull(tile);
                let (from, to) = (from.max(first), to.min(first + ACROSS));
                if from >= to {
                    continue;
                }
                let out = scores.as_mut_ptr().add(4 * i * PARTITION + first);
                if V::WIDE && from < first + 16 && to > first + 16 {
                    dots::<V, 2>(tile, keys, at.k_stride, out);
                } else {
                    if from < first + 16 {
                        dots::<V, 1>(tile, keys, at.k_stride, out);
                    }
                    if to > first + 16 {
                        dots::<V, 1>(tile, keys.add(16), at.k_stride, out.add(16));
                    }
                }
            }
        }
        // 2. weights
        for (row, scores) in rows.iter_mut().zip(scores.as_chunks_mut::<PARTITION>().0) {
            if !row.visible.is_empty() {
                (row.m, row.l) = weights::<V>(rule, at.scales, row.visible.clone(), scores);
            }
        }
        // 3. weighted sums
        for c in (0..at.v_stride).step_by(PANEL) {
            let values = at.values.add(c * PARTITION);
            for (i, tile) in rows.chunks(TILE).enumerate() {
                let p = scores.as_ptr().add(TILE * i * PARTITION);
                let out = sums.as_mut_ptr().add(TILE * i * at.v_stride + c);
                if V::WIDE {
                    weighted::<V, TILE, 2>(tile, p, values, out, at.v_stride);
                } else {
                    for half in [0, 16] {
                        for (j, tile) in tile.chunks(4).enumerate() {
                            let out = out.add(4 * j * at.v_stride + half);
                            weighted::<V, 4, 1>(tile, p.add(4 * j * PARTITION), values.add(half), out, at.v_stride);
                        }
                    }
                }
            }
        }
    }
}

simd! {
    /// Sets `m` and `l` of the rows that see something, and their weighted sums of values, `v_stride` apart. Queries have `k_stride` elements, zeros beyond
    /// their own.
    pub fn attend_rows(at: &Widened, rule: Rule, rows: &mut [QueryRow], scores: &mut [f32], sums: &mut [f32]) = attend_lanes
}

/// From the first to the last position that any of the rows sees.
#[inline(always)]
pub fn hull(rows: &[QueryRow]) -> (usize, usize) {
    let (mut from, mut to) = (PARTITION, 0);
    for row in rows {
        if !row.visible.is_empty() {
            (from, to) = (from.min(row.visible.start), to.max(row.visible.end));
        }
    }
    (from, to)
}

/// The dot products of up to four rows with `16 * P` positions.
#[inline(always)]
unsafe fn dots<V: Lanes, const P: usize>(rows: &[QueryRow], keys: *const f32, dim: usize, out: *mut f32) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut q = [rows[0].q.as_ptr(); 4];
        for (q, row) in q.iter_mut().zip(rows) {
            *q = row.q.as_ptr();
        }
        let mut total = [[V::splat(0.0); P]; 4];
        for half in 0..2 {
            let mut sum = [[V::splat(0.0); P]; 4];
            for quarter in 0..2 {
                let at = 4 * half + 2 * quarter;
                let two = add(pair::<V, P>(q, at, keys, dim), pair::<V, P>(q, at + 1, keys, dim));
                sum = if quarter == 0 { two } else { add(sum, two) };
            }
            total = if half == 0 { sum } else { add(total, sum) };
        }
        for i in 0..rows.len() {
            for j in 0..P {
                total[i][j].store(out.add(i * PARTITION + 16 * j));
            }
        }
    }
}

#[inline(always)]
unsafe fn add<V: Lanes, const P: usize>(a: [[V; P]; 4], b: [[V; P]; 4]) -> [[V; P]; 4] {
    let mut sum = a;
    for i in 0..4 {
        for j in 0..P {
            // SAFETY: as the caller vouches.
            sum[i][j] = unsafe { a[i][j].add(b[i][j]) };
        }
    }
    sum
}

/// The sum of a pair of lanes, the one at `at` in [`PAIRS`].
#[inline(always)]
unsafe fn pair<V: Lanes, const P: usize>(q: [*const f32; 4], at: usize, keys: *const f32, dim: usize) -> [[V; P]; 4] {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut low = [[V::splat(0.0); P]; 4];
        let mut high = low;
        let (keys, lane) = (keys.add(at * (dim / 8) * ACROSS), PAIRS[at]);
        if V::WIDE {
            for c in 0..dim / 16 {
                multiply_add(&mut low, q, 16 * c + lane, keys.add(2 * c * ACROSS));
                multiply_add(&mut high, q, 16 * c + lane + 8, keys.add((2 * c + 1) * ACROSS));
            }
        } else {
            for c in 0..dim / 16 {
                multiply_add(&mut low, q, 16 * c + lane, keys.add(2 * c * ACROSS));
            }
            for c in 0..dim / 16 {
                multiply_add(&mut high, q, 16 * c + lane + 8, keys.add((2 * c + 1) * ACROSS));
            }
        }
        add(low, high)
    }
}

/// `sums += q[element] * keys`
#[inline(always)]
unsafe fn multiply_add<V: Lanes, const P: usize>(
    sums: &mut [[V; P]; 4],
    q: [*const f32; 4],
    element: usize,
    keys: *const f32,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut k = [V::splat(0.0); P];
        for j in 0..P {
            k[j] = V::load(keys.add(16 * j));
        }
        for i in 0..4 {
            let q = V::splat(*q[i].add(element));
            for j in 0..P {
                sums[i][j] = q.fma(k[j], sums[i][j]);
            }
        }
    }
}

/// `o = fma(p, v, o)` in ascending position from +0, for up to `Q` rows and `16 * C` columns.
#[inline(always)]
unsafe fn weighted<V: Lanes, const Q: usize, const C: usize>(
    rows: &[QueryRow],
    p: *const f32,
    values: *const f32,
    out: *mut f32,
    stride: usize,
) {
    let (from, to) = hull(rows);
    // What all rows see (those that see nothing may compute anything). Before and after it, each position is only for some.
    let (mut starts, mut ends) = ([PARTITION; Q], [0; Q]);
    let mut common = from..to;
    for (i, row) in rows.iter().enumerate() {
        if !row.visible.is_empty() {
            (starts[i], ends[i]) = (row.visible.start, row.visible.end);
            common = common.start.max(row.visible.start)..common.end.min(row.visible.end);
        }
    }
    if common.is_empty() {
        common = to.max(from)..to;
    }
    // SAFETY: as the caller vouches.
    unsafe {
        let mut acc = [[V::splat(0.0); C]; Q];
        for position in from..common.start {
            weighted_some(&mut acc, &starts, &ends, p, values, position);
        }
        for position in common.clone() {
            let mut v = [V::splat(0.0); C];
            for j in 0..C {
                v[j] = V::load(values.add(position * PANEL + 16 * j));
            }
            for i in 0..Q {
                let p = V::splat(*p.add(i * PARTITION + position));
                for j in 0..C {
                    acc[i][j] = p.fma(v[j], acc[i][j]);
                }
            }
        }
        for position in common.end.max(common.start)..to {
            weighted_some(&mut acc, &starts, &ends, p, values, position);
        }
        for i in 0..rows.len() {
            for j in 0..C {
                acc[i][j].store(out.add(i * stride + 16 * j));
            }
        }
    }
}

/// One position, for those rows that see it.
#[inline(always)]
unsafe fn weighted_some<V: Lanes, const Q: usize, const C: usize>(
    acc: &mut [[V; C]; Q],
    starts: &[usize; Q],
    ends: &[usize; Q],
    p: *const f32,
    values: *const f32,
    position: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        for i in 0..Q {
            if starts[i] <= position && position < ends[i] {
                let p = V::splat(*p.add(i * PARTITION + position));
                for j in 0..C {
                    acc[i][j] = p.fma(V::load(values.add(position * PANEL + 16 * j)), acc[i][j]);
                }
            }
        }
    }
}

/// Where a query row's part of a partition goes.
#[derive(Clone, Copy, Default)]
pub struct Target {
    /// Among all query rows: which greatest score and sum of weights are its.
    pub row: usize,
    /// The row of the outputs, and which head of it.
    pub token: usize,
    /// The head.
    pub head: usize,
    /// Something is there already, for this one to be joined to.
    pub begun: bool,
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn join_rows_lanes<V: Lanes>(
    targets: &[Target],
    v_dim: usize,
    stride: usize,
    rows: &[QueryRow],
    m: &mut [f32],
    l: &mut [f32],
    sums: &[f32],
    out: &mut RowsMut,
) {
    let n = rows.len();
    assert!(n <= BATCH && targets.len() == n && v_dim <= stride && sums.len() >= n * stride);
    let (mut a, mut b) = ([0.0; BATCH], [0.0; BATCH]);
    for i in 0..n {
        let m = &mut m[targets[i].row];
        let top = if rows[i].m > *m { rows[i].m } else { *m };
        (a[i], b[i]) = (*m - top, rows[i].m - top);
        if targets[i].begun && !rows[i].visible.is_empty() {
            *m = top;
        }
    }
    // SAFETY: whole registers of the arrays; rows of `sums` and of `out` have at least `v_dim` elements; the shell has the instruction set.
    unsafe {
        for i in (0..n).step_by(16) {
            exp(V::load(a.as_ptr().add(i))).store(a.as_mut_ptr().add(i));
            exp(V::load(b.as_ptr().add(i))).store(b.as_mut_ptr().add(i));
        }
        for i in 0..n {
            if rows[i].visible.is_empty() {
                continue;
            }
            let Target { row, token, head, begun } = targets[i];
            let o = &mut out.row(token)[head * v_dim..(head + 1) * v_dim];
            let next = &sums[i * stride..i * stride + v_dim];
            if !begun {
                (m[row], l[row]) = (rows[i].m, rows[i].l);
                o.copy_from_slice(next);
                continue;
            }
            l[row] = l[row].mul_add(a[i], rows[i].l * b[i]);
            join_sums::<V>(a[i], b[i], o, next);
        }
    }
}

simd! {
    /// Joins some rows' part of a partition, `stride` elements apart in `sums`, to what is there already or takes it as it is: `m`, `l` per row, and `out`.
    pub fn join_rows(
        targets: &[Target], v_dim: usize, stride: usize, rows: &[QueryRow], m: &mut [f32], l: &mut [f32], sums: &[f32], out: &mut RowsMut,
    ) = join_rows_lanes
}
