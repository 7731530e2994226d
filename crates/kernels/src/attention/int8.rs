//! One partition of attention on integers: eight-bit keys and values are laid out once for all query rows, and both products are sums of products of bytes,
//! exact in any order.
//!
//! Sixteen positions' scores, and sixteen columns of weighted sums, share a register: four elements of a key, or four positions of a column, lie together for each
//! of its lanes, as instruction sets multiply bytes. Keys are shifted by 128, since one side of such a product is unsigned; what that adds to a score is known
//! from the query. Weights are unsigned by themselves.

// Iterators come with closures, which may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use std::marker::PhantomData;
use std::ops::Range;

use super::kv::{KvShape, KvType, store_row};
use super::paged::{AHEAD, KvScales, PARTITION, Paged};
use super::partition::{QueryRow, Rule, tile_rows, weights};
use super::prefill::{BATCH, PrefillScratch, hull};
use crate::Isa;
#[cfg(target_arch = "x86_64")]
use crate::avx512::amx::{DEEP, Tiles};
use crate::dispatch::simd;
use crate::instructions::bytes::Bytes;
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;

/// Positions, or columns of values, of a panel of quads.
const PANEL: usize = 32;
/// Bytes of a panel's quads.
const QUADS: usize = 4 * PANEL;
/// The greatest weight's integer.
const TOP: f32 = 255.0;
/// In front of a query's quads: its scale, and 128 times the sum of its integers, negative (an i32's bits).
const HEADER: usize = 2;

/// Four elements each, in whole registers of sixteen.
fn k_quads(k_dim: usize) -> usize {
    k_dim.next_multiple_of(64) / 4
}

fn padded_v(v_dim: usize) -> usize {
    v_dim.next_multiple_of(PANEL)
}

/// Words for [`pack`].
fn packed_len(shape: &KvShape) -> usize {
    PARTITION * k_quads(shape.k_dim) + PARTITION / 4 * padded_v(shape.v_dim)
}

/// Rows that there is room for at once: as many as whole tiles have, where there may be some.
fn batch(rows: usize) -> usize {
    if rows < FOR_TILES { rows } else { BATCH }
}

/// Words of scratch for `rows` query rows.
pub fn scratch_len(shape: &KvShape, rows: usize) -> usize {
    let batch = batch(rows);
    let queries = rows * (HEADER + k_quads(shape.k_dim));
    LINE + packed_len(shape) + queries + batch * (PARTITION + PARTITION / 4 + padded_v(shape.v_dim))
}

/// Words of a cache line.
const LINE: usize = 16;

/// Scratch, divided: [`PrefillScratch::widened`] is for [`pack`], [`PrefillScratch::q`] for [`quantise_query`], [`PrefillScratch::scores`] ends with the weights' bytes.
pub fn room<'a>(shape: &KvShape, rows: usize, scratch: &'a mut [f32]) -> PrefillScratch<'a> {
    let (q_stride, v_stride, batch) = (HEADER + k_quads(shape.k_dim), padded_v(shape.v_dim), batch(rows));
    let skip = scratch.as_ptr().align_offset(4 * LINE).min(LINE);
    let (widened, rest) = scratch[skip..].split_at_mut(packed_len(shape));
    let (q, rest) = rest.split_at_mut(rows * q_stride);
    let (scores, rest) = rest.split_at_mut(batch * (PARTITION + PARTITION / 4));
    PrefillScratch { widened, q, scores, sums: &mut rest[..batch * v_stride], q_stride, v_stride }
}

/// Words as bytes.
fn bytes_of(words: &mut [f32]) -> &mut [u8] {
    // SAFETY: as many bytes; both types take any bits.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), 4 * words.len()) }
}

/// A query as integers: its header and its quads, zeros beyond its elements.
pub fn quantise_query(isa: Isa, q: &[f32], to: &mut [f32]) {
    let (header, quads) = to.split_at_mut(HEADER);
    let (own, rest) = bytes_of(quads).split_at_mut(q.len());
    let mut scale = [0; 4];
    store_row(isa, KvType::Int8, q, own, &mut scale);
    rest.fill(0);
    let sum: i32 = own.iter().map(|q| i32::from(*q as i8)).sum();
    header[0] = f32::from_le_bytes(scale);
    header[1] = f32::from_bits((-128 * sum) as u32);
}

/// A partition's keys and values as quads.
pub struct Packed<'a> {
    /// `[PARTITION / PANEL, k_quads, PANEL, 4]`: four elements of each position, their highest bits turned, zeros (as turned) beyond its elements.
    keys: *const u8,
    /// `[v_stride / PANEL, PARTITION / 4, PANEL, 4]`: four positions of each column, missing columns zeros.
    values: *const u8,
    scales: &'a KvScales,
    k_quads: usize,
    v_stride: usize,
    seen: Range<usize>,
    room: PhantomData<&'a [f32]>,
}

/// The first `n` of `N` bytes, the rest zeros.
#[inline(always)]
unsafe fn padded<const N: usize>(p: *const u8, n: usize) -> [u8; N] {
    let mut bytes = [0; N];
    // SAFETY: the caller vouches for `n` bytes at `p`.
    unsafe { std::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), n.min(N)) };
    bytes
}

#[inline(always)]
unsafe fn pack_lanes<'a, V: Bytes>(from: &'a Paged, room: &'a mut [f32]) -> Packed<'a> {
    let (k_dim, v_dim) = (from.k_dim, from.v_dim);
    let (k_quads, v_stride) = (k_quads(k_dim), padded_v(v_dim));
    let Some(scales) = from.scales.as_ref().filter(|_| from.kv_type == KvType::Int8) else {
        panic!("attention on integers needs keys and values of eight bits");
    };
    let (keys, values) =
        bytes_of(room)[..4 * PARTITION * k_quads + PARTITION * v_stride].split_at_mut(4 * PARTITION * k_quads);
    let (keys, values) = (keys.as_mut_ptr(), values.as_mut_ptr());
    let seen = from.seen.clone();
    // SAFETY: `from` was checked when it was made (what is not seen points into the pool, to a row's length of bytes); what is written is inside `room`; the
    // shell has the instruction set.
    unsafe {
        // Keys of positions that come later, or the first values, are asked for before they are wanted.
        let ahead = |position: usize| {
            let later = position + AHEAD;
            if later < seen.end {
                from.keys[later]
            } else {
                from.values[(seen.start + later - seen.end).min(seen.end - 1)]
            }
        };
        for first in (seen.start / 16 * 16..seen.end).step_by(16) {
            let to = keys.add(first / PANEL * k_quads * QUADS + first % PANEL * 4);
            for c in 0..k_quads / 16 {
                let mut v = [V::splat(0.0); 16];
                for i in 0..16 {
                    V::prefetch(ahead(first + i).wrapping_add(64 * c));
                    let key = from.keys[first + i].add(64 * c);
                    v[i] = match k_dim - 64 * c {
                        64.. => V::load(key.cast()),
                        n => V::load(padded::<64>(key, n).as_ptr().cast()),
                    };
                }
                let v = V::transpose16(v);
                for i in 0..16 {
                    v[i].store_flipped(to.add((16 * c + i) * QUADS));
                }
            }
        }
        for quad in seen.start / 4..seen.end.div_ceil(4) {
            let rows = [0, 1, 2, 3].map(|i| from.values[4 * quad + i]);
            for i in 0..4 {
                let ahead = from.values[4 * quad + i + AHEAD];
                for line in (0..v_dim).step_by(64) {
                    V::prefetch(ahead.wrapping_add(line));
                }
            }
            for c in (0..v_stride).step_by(16) {
                let to = values.add((c / PANEL * (PARTITION / 4) + quad) * QUADS + c % PANEL * 4);
                match v_dim.saturating_sub(c) {
                    16.. => V::interleave(rows.map(|row| row.add(c)), to),
                    0 => to.write_bytes(0, 64),
                    n => {
                        let rows = rows.map(|row| padded::<16>(row.add(c), n));
                        V::interleave([rows[0].as_ptr(), rows[1].as_ptr(), rows[2].as_ptr(), rows[3].as_ptr()], to);
                    }
                }
            }
        }
    }
    Packed { keys, values, scales, k_quads, v_stride, seen, room: PhantomData }
}

simd! {
    /// Lays the keys and values that are seen out in `room`.
    pub fn pack<'a>(from: &'a Paged, room: &'a mut [f32]) -> Packed<'a> = pack_lanes
}

/// What [`attend_integers`] fills for some rows.
struct Batch<'a, 'q> {
    rows: &'a mut [QueryRow<'q>],
    /// `[rows, PARTITION]`
    scores: &'a mut [f32],
    /// Weights as integers, `[rows, PARTITION]`.
    bytes: &'a mut [u8],
    /// Of those.
    scales: [f32; BATCH],
    /// `[rows, v_stride]`
    sums: &'a mut [f32],
}

/// Sets `m` and `l` of the rows that see something, and their weighted sums of values, `v_stride` apart. Queries are as [`quantise_query`] leaves them; `scores` has room
/// for five quarters of [`PARTITION`] per row.
pub fn attend_integers(isa: Isa, at: &Packed, rule: Rule, rows: &mut [QueryRow], scores: &mut [f32], sums: &mut [f32]) {
    let n = rows.len();
    assert!(n <= BATCH && scores.len() >= n * (PARTITION + PARTITION / 4) && sums.len() >= n * at.v_stride);
    for row in rows.iter() {
        let v = &row.visible;
        assert!(
            row.q.len() == HEADER + at.k_quads && (v.is_empty() || at.seen.start <= v.start && v.end <= at.seen.end)
        );
    }
    let (scores, bytes) = scores.split_at_mut(scores.len() / 5 * 4);
    let mut batch = Batch { rows, scores, bytes: bytes_of(bytes), scales: [0.0; BATCH], sums };
    #[cfg(target_arch = "x86_64")]
    if isa.level() == Level::Amx && fills_tiles(at, &batch) {
        // SAFETY: checked by `fills_tiles`, and an `Isa` of this level is made only where it is supported.
        let tiles = unsafe { Tiles::whole() };
        // SAFETY: as above.
        unsafe { dots_by_tiles(&tiles, at, &mut batch) };
        weigh(isa, at, rule, &mut batch, true);
        // SAFETY: as above.
        unsafe { sums_by_tiles(&tiles, at, &mut batch) };
        scale_sums(isa, &mut batch, at.v_stride);
        return;
    }
    dots_of_all(isa, at, &mut batch);
    weigh(isa, at, rule, &mut batch, false);
    sums_of_all(isa, at, &mut batch);
}

/// Whether there are rows enough for tiles of 32, and room for as many.
#[cfg(target_arch = "x86_64")]
fn fills_tiles(at: &Packed, batch: &Batch) -> bool {
    let q = |i: usize| batch.rows[i].q.as_ptr();
    let stride = HEADER + at.k_quads;
    let room =
        batch.scores.len() == BATCH * PARTITION && batch.sums.len() == BATCH * at.v_stride && stride <= PARTITION;
    room && batch.rows.len() >= FOR_TILES && (1..batch.rows.len()).all(|i| q(i) == q(0).wrapping_add(i * stride))
}

/// From so many rows on, tiles are quicker, though some of their rows multiply nothing.
const FOR_TILES: usize = 8;

/// The dot products of all rows, as integers, without what is known from the query.
///
/// # Safety
/// [`fills_tiles`]. Rows of queries that are not there are read from the scratch behind them.
#[cfg(target_arch = "x86_64")]
unsafe fn dots_by_tiles(tiles: &Tiles, at: &Packed, batch: &mut Batch) {
    let (from, to) = hull(batch.rows);
    for first in (0..PARTITION).step_by(PANEL) {
        if from < first + PANEL && to > first {
            // SAFETY: the caller's.
            unsafe {
                let q = batch.rows[0].q.as_ptr().add(HEADER).cast();
                let keys = at.keys.add(first * at.k_quads * 4);
                let out = batch.scores.as_mut_ptr().add(first).cast();
                tiles.products::<true>(
                    (q, 4 * (HEADER + at.k_quads)),
                    keys,
                    4 * at.k_quads / DEEP,
                    (out, 4 * PARTITION),
                );
            }
        }
    }
}

/// The weighted sums of all rows, as integers.
///
/// # Safety
/// [`fills_tiles`].
#[cfg(target_arch = "x86_64")]
unsafe fn sums_by_tiles(tiles: &Tiles, at: &Packed, batch: &mut Batch) {
    for c in (0..at.v_stride).step_by(PANEL) {
        // SAFETY: the caller's.
        unsafe {
            let (weights, values) = (batch.bytes.as_ptr(), at.values.add(c * PARTITION));
            let out = batch.sums.as_mut_ptr().add(c).cast();
            tiles.products::<false>((weights, PARTITION), values, PARTITION / DEEP, (out, 4 * at.v_stride));
        }
    }
}

#[inline(always)]
unsafe fn scale_lanes<V: Bytes>(batch: &mut Batch, v_stride: usize) {
    for (sums, scale) in batch.sums.chunks_exact_mut(v_stride).zip(batch.scales).take(batch.rows.len()) {
        // SAFETY: whole registers of the row; the shell has the instruction set.
        unsafe { convert::<V>(sums, 0, V::splat(scale)) };
    }
}

simd! {
    fn scale_sums(batch: &mut Batch, v_stride: usize) = scale_lanes
}

/// Integers plus `more`, as floats times `scale`, in place.
#[inline(always)]
unsafe fn convert<V: Bytes>(sums: &mut [f32], more: i32, scale: V) {
    for i in (0..sums.len()).step_by(16) {
        // SAFETY: the caller vouches for whole registers and the instruction set.
        unsafe {
            let at = sums.as_mut_ptr().add(i);
            V::from_sums(V::load_sums(at.cast(), more)).mul(scale).store(at);
        }
    }
}

#[inline(always)]
unsafe fn dots_lanes<V: Bytes>(at: &Packed, batch: &mut Batch) {
    let n = batch.rows.len();
    for first in (0..PARTITION).step_by(PANEL) {
        let mut r = 0;
        while r < n {
            let tile = tile_rows(n - r, if V::WIDE { 8 } else { 2 });
            let rows = &batch.rows[r..r + tile];
            let (from, to) = hull(rows);
            if from < first + PANEL && to > first {
                // SAFETY: checked by `attend_integers` and by `Packed`; the shell has the instruction set.
                unsafe {
                    let keys = at.keys.add(first * at.k_quads * 4);
                    let out = batch.scores.as_mut_ptr().add(r * PARTITION + first);
                    match tile {
                        8 => dots::<V, 8>(rows, keys, at.k_quads, out),
                        4 => dots::<V, 4>(rows, keys, at.k_quads, out),
                        2 => dots::<V, 2>(rows, keys, at.k_quads, out),
                        _ => dots::<V, 1>(rows, keys, at.k_quads, out),
                    }
                }
            }
            r += tile;
        }
    }
}

simd! {
    fn dots_of_all(at: &Packed, batch: &mut Batch) = dots_lanes
}

#[inline(always)]
unsafe fn weigh_lanes<V: Bytes>(at: &Packed, rule: Rule, batch: &mut Batch, raw: bool) {
    let scores = batch.scores.as_chunks_mut::<PARTITION>().0;
    let bytes = batch.bytes.as_chunks_mut::<PARTITION>().0;
    for i in 0..batch.rows.len() {
        let row = &mut batch.rows[i];
        if row.visible.is_empty() {
            continue;
        }
        let (scale, more) = (row.q[0], row.q[1].to_bits() as i32);
        // SAFETY: whole registers; the shell has the instruction set.
        unsafe {
            if raw {
                convert::<V>(&mut scores[i], more, V::splat(1.0));
            }
            let rule = Rule { scale: rule.scale * scale, ..rule };
            (row.m, row.l) = weights::<V>(rule, Some(at.scales), row.visible.clone(), &mut scores[i]);
            batch.scales[i] = quantise_weights::<V>(row.visible.clone(), &mut scores[i], &mut bytes[i]);
        }
    }
}

simd! {
    /// From dot products (integers still, and without what is known from the query, where they are `raw`) to weights as integers.
    fn weigh(at: &Packed, rule: Rule, batch: &mut Batch, raw: bool) = weigh_lanes
}

#[inline(always)]
unsafe fn sums_lanes<V: Bytes>(at: &Packed, batch: &mut Batch) {
    let n = batch.rows.len();
    for c in (0..at.v_stride).step_by(PANEL) {
        let mut r = 0;
        while r < n {
            let tile = tile_rows(n - r, if V::WIDE { 8 } else { 2 });
            let (from, to) = hull(&batch.rows[r..r + tile]);
            if from < to {
                let quads = from / 4..to.div_ceil(4);
                // SAFETY: checked by `attend_integers` and by `Packed`; the shell has the instruction set.
                unsafe {
                    let values = at.values.add(c * PARTITION);
                    let (p, scales) = (batch.bytes.as_ptr().add(r * PARTITION), &batch.scales[r..r + tile]);
                    let out = batch.sums.as_mut_ptr().add(r * at.v_stride + c);
                    match tile {
                        8 => weighted::<V, 8>(quads, p, scales, values, out, at.v_stride),
                        4 => weighted::<V, 4>(quads, p, scales, values, out, at.v_stride),
                        2 => weighted::<V, 2>(quads, p, scales, values, out, at.v_stride),
                        _ => weighted::<V, 1>(quads, p, scales, values, out, at.v_stride),
                    }
                }
            }
            r += tile;
        }
    }
}

simd! {
    fn sums_of_all(at: &Packed, batch: &mut Batch) = sums_lanes
}

/// The dot products of `R` rows with a panel of positions.
#[inline(always)]
unsafe fn dots<V: Bytes, const R: usize>(rows: &[QueryRow], keys: *const u8, k_quads: usize, out: *mut f32) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut q = [std::ptr::null::<i32>(); R];
        let mut sums = [[V::start(0); 2]; R];
        for i in 0..R {
            let query = rows.get_unchecked(i).q;
            q[i] = query.as_ptr().add(HEADER).cast();
            sums[i] = [V::start(query.get_unchecked(1).to_bits() as i32); 2];
        }
        for quad in 0..k_quads {
            let k = [V::load_quads(keys.add(quad * QUADS)), V::load_quads(keys.add(quad * QUADS + 64))];
            for i in 0..R {
                let q = q[i].add(quad).read();
                for j in 0..2 {
                    sums[i][j] = V::multiply_unsigned(sums[i][j], k[j], q);
                }
            }
        }
        for i in 0..R {
            for j in 0..2 {
                V::from_sums(sums[i][j]).store(out.add(i * PARTITION + 16 * j));
            }
        }
    }
}

/// A row's visible weights as integers, zeros around them; returns their scale. A weight that is not finite stays visible, as a scale of NaN.
#[inline(always)]
unsafe fn quantise_weights<V: Bytes>(
    visible: Range<usize>,
    weights: &mut [f32; PARTITION],
    bytes: &mut [u8; PARTITION],
) -> f32 {
    let blocks = visible.start / 16 * 16..visible.end.next_multiple_of(16);
    // What is not visible may have a scale that is not finite.
    weights[blocks.start..visible.start].fill(0.0);
    weights[visible.end..blocks.end].fill(0.0);
    bytes[..blocks.start].fill(0);
    bytes[blocks.end..].fill(0);
    let w = weights.as_ptr();
    // SAFETY: whole registers inside the partition; the caller vouches for the instruction set.
    unsafe {
        let (zero, mut greatest, mut odd) = (V::splat(0.0), V::splat(0.0), V::splat(0.0));
        for i in blocks.clone().step_by(16) {
            let w = V::load(w.add(i));
            greatest = w.max(greatest);
            odd = w.fma(zero, odd);
        }
        if odd.sum().is_nan() {
            bytes[blocks].fill(0);
            return f32::NAN;
        }
        let a = greatest.max_lane();
        let inv = TOP / a;
        let inv = V::splat(if inv.is_finite() { inv } else { 0.0 });
        for i in blocks.step_by(16) {
            V::load(w.add(i)).mul(inv).store_rounded_u8(bytes.as_mut_ptr().add(i));
        }
        a / TOP
    }
}

/// The weighted sums of `R` rows over a panel of columns.
#[inline(always)]
unsafe fn weighted<V: Bytes, const R: usize>(
    quads: Range<usize>,
    p: *const u8,
    scales: &[f32],
    values: *const u8,
    out: *mut f32,
    stride: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut sums = [[V::start(0); 2]; R];
        for quad in quads {
            let v = [V::load_quads(values.add(quad * QUADS)), V::load_quads(values.add(quad * QUADS + 64))];
            for i in 0..R {
                let p = p.add(i * PARTITION + 4 * quad).cast::<i32>().read_unaligned();
                for j in 0..2 {
                    sums[i][j] = V::multiply_signed(sums[i][j], v[j], p);
                }
            }
        }
        for i in 0..R {
            let scale = V::splat(*scales.get_unchecked(i));
            for j in 0..2 {
                V::from_sums(sums[i][j]).mul(scale).store(out.add(i * stride + 16 * j));
            }
        }
    }
}
