//! Both products of attention on integers, for all rows of a batch.

// Iterators come with closures, which may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::pack::Packed;
use super::room::{Batch, HEADER, PANEL, QUADS};
#[cfg(target_arch = "x86_64")]
use super::room::{FOR_TILES, score_len};
#[cfg(target_arch = "x86_64")]
use crate::Isa;
use crate::attention::paged::PARTITION;
use crate::attention::partition::{QueryRow, tile_rows};
#[cfg(target_arch = "x86_64")]
use crate::attention::prefill::BATCH;
use crate::attention::prefill::hull;
#[cfg(target_arch = "x86_64")]
use crate::avx512::amx::{DEEP, Tiles};
use crate::dispatch::simd;
use crate::instructions::bytes::Bytes;

/// Whether there are rows enough for tiles of 32, and room for as many.
#[cfg(target_arch = "x86_64")]
pub(super) fn fills_tiles(at: &Packed, batch: &Batch) -> bool {
    let q = |i: usize| batch.rows[i].q.as_ptr();
    let stride = at.q_stride();
    let room = batch.scores.len() == BATCH * PARTITION
        && batch.sums.len() == BATCH * at.v_stride
        && stride <= score_len(at.planes);
    room && batch.rows.len() >= FOR_TILES && (1..batch.rows.len()).all(|i| q(i) == q(0).wrapping_add(i * stride))
}

/// Products of low bytes' planes, before they join those of high bytes.
#[cfg(target_arch = "x86_64")]
#[repr(align(64))]
struct Low([i32; BATCH * PANEL]);

/// The dot products of all rows, as integers, without what is known from the query.
///
/// # Safety
/// [`fills_tiles`], and the machine has tiles. Rows of queries that are not there are read from the scratch behind them.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn dots_by_tiles(isa: Isa, tiles: &Tiles, at: &Packed, batch: &mut Batch) {
    let (from, to) = hull(batch.rows);
    for first in (0..PARTITION).step_by(PANEL) {
        if from < first + PANEL && to > first {
            // SAFETY: the caller's.
            unsafe {
                let q = batch.rows[0].q.as_ptr().add(HEADER).cast::<u8>();
                let keys = at.keys.add(first * at.k_quads * 4);
                let out: *mut i32 = batch.scores.as_mut_ptr().add(first).cast();
                let (stride, deep) = (4 * at.q_stride(), 4 * at.k_quads / DEEP);
                tiles.products::<true>(&[(q, keys)], stride, deep, (out, 4 * PARTITION));
                if at.planes == 2 {
                    let mut low = Low([0; BATCH * PANEL]);
                    let mixed = [(q, keys.add(at.k_plane())), (q.add(4 * at.k_quads), keys)];
                    tiles.products::<true>(&mixed, stride, deep, (low.0.as_mut_ptr(), 4 * PANEL));
                    join_low(isa, out, PARTITION, &low);
                }
            }
        }
    }
}

/// The weighted sums of all rows, as integers.
///
/// # Safety
/// As for [`dots_by_tiles`].
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn sums_by_tiles(isa: Isa, tiles: &Tiles, at: &Packed, batch: &mut Batch) {
    for c in (0..at.v_stride).step_by(PANEL) {
        // SAFETY: the caller's.
        unsafe {
            let (weights, values) = (batch.bytes.as_ptr(), at.values.add(c * PARTITION));
            let out: *mut i32 = batch.sums.as_mut_ptr().add(c).cast();
            let (stride, deep) = (at.planes * PARTITION, PARTITION / DEEP);
            tiles.products::<false>(&[(weights, values)], stride, deep, (out, 4 * at.v_stride));
            if at.planes == 2 {
                let mut low = Low([0; BATCH * PANEL]);
                let mixed = [(weights, values.add(at.v_plane())), (weights.add(PARTITION), values)];
                tiles.products::<false>(&mixed, stride, deep, (low.0.as_mut_ptr(), 4 * PANEL));
                join_low(isa, out, at.v_stride, &low);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn join_low_lanes<V: Bytes>(out: *mut i32, stride: usize, low: &Low) {
    for row in 0..BATCH {
        for i in (0..PANEL).step_by(16) {
            // SAFETY: `fills_tiles` has room for as many rows; the shell has the instruction set.
            unsafe {
                let at = out.add(row * stride + i);
                let low = V::load_sums(low.0.as_ptr().add(row * PANEL + i), 0);
                V::store_sums(V::join_sums(V::load_sums(at, 0), low), at);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
simd! {
    fn join_low(out: *mut i32, stride: usize, low: &Low) = join_low_lanes
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn scale_lanes<V: Bytes>(batch: &mut Batch, v_stride: usize) {
    for (sums, scale) in batch.sums.chunks_exact_mut(v_stride).zip(batch.scales).take(batch.rows.len()) {
        // SAFETY: whole registers of the row; the shell has the instruction set.
        unsafe { convert::<V>(sums, 0, V::splat(scale)) };
    }
}

#[cfg(target_arch = "x86_64")]
simd! {
    pub(super) fn scale_sums(batch: &mut Batch, v_stride: usize) = scale_lanes
}

/// Integers plus `more`, as floats times `scale`, in place.
#[inline(always)]
pub(super) unsafe fn convert<V: Bytes>(sums: &mut [f32], more: i32, scale: V) {
    for i in (0..sums.len()).step_by(16) {
        // SAFETY: the caller vouches for whole registers and the instruction set.
        unsafe {
            let at = sums.as_mut_ptr().add(i);
            V::from_sums(V::load_sums(at.cast(), more)).mul(scale).store(at);
        }
    }
}

/// Rows of a tile: as many as there are registers for their sums.
fn most_rows<V: Bytes>(planes: usize) -> usize {
    if V::WIDE { 8 / planes } else { 2 / planes }
}

#[inline(always)]
unsafe fn dots_lanes<V: Bytes>(at: &Packed, batch: &mut Batch) {
    let n = batch.rows.len();
    for first in (0..PARTITION).step_by(PANEL) {
        let mut r = 0;
        while r < n {
            let tile = tile_rows(n - r, most_rows::<V>(at.planes));
            let rows = &batch.rows[r..r + tile];
            let (from, to) = hull(rows);
            if from < first + PANEL && to > first {
                // SAFETY: checked by `attend_integers` and by `Packed`; the shell has the instruction set.
                unsafe {
                    let out = batch.scores.as_mut_ptr().add(r * PARTITION + first);
                    match (tile, at.planes) {
                        (8, 1) => dots::<V, 8>(rows, at, first, out),
                        (4, 1) => dots::<V, 4>(rows, at, first, out),
                        (2, 1) => dots::<V, 2>(rows, at, first, out),
                        (_, 1) => dots::<V, 1>(rows, at, first, out),
                        (4, _) => dots_of_two::<V, 4>(rows, at, first, out),
                        (2, _) => dots_of_two::<V, 2>(rows, at, first, out),
                        _ => dots_of_two::<V, 1>(rows, at, first, out),
                    }
                }
            }
            r += tile;
        }
    }
}

simd! {
    pub(super) fn dots_of_all(at: &Packed, batch: &mut Batch) = dots_lanes
}

#[inline(always)]
unsafe fn sums_lanes<V: Bytes>(at: &Packed, batch: &mut Batch) {
    let n = batch.rows.len();
    for c in (0..at.v_stride).step_by(PANEL) {
        let mut r = 0;
        while r < n {
            let tile = tile_rows(n - r, most_rows::<V>(at.planes));
            let (from, to) = hull(&batch.rows[r..r + tile]);
            if from < to {
                let quads = from / 4..to.div_ceil(4);
                // SAFETY: checked by `attend_integers` and by `Packed`; the shell has the instruction set.
                unsafe {
                    let p = batch.bytes.as_ptr().add(r * at.planes * PARTITION);
                    let scales = &batch.scales[r..r + tile];
                    let out = batch.sums.as_mut_ptr().add(r * at.v_stride + c);
                    match (tile, at.planes) {
                        (8, 1) => weighted::<V, 8>(quads, p, scales, at, c, out),
                        (4, 1) => weighted::<V, 4>(quads, p, scales, at, c, out),
                        (2, 1) => weighted::<V, 2>(quads, p, scales, at, c, out),
                        (_, 1) => weighted::<V, 1>(quads, p, scales, at, c, out),
                        (4, _) => weighted_of_two::<V, 4>(quads, p, scales, at, c, out),
                        (2, _) => weighted_of_two::<V, 2>(quads, p, scales, at, c, out),
                        _ => weighted_of_two::<V, 1>(quads, p, scales, at, c, out),
                    }
                }
            }
            r += tile;
        }
    }
}

simd! {
    pub(super) fn sums_of_all(at: &Packed, batch: &mut Batch) = sums_lanes
}

/// Sixteen quads and sixteen more.
#[inline(always)]
unsafe fn load_panel<V: Bytes>(p: *const u8) -> [V::Quads; 2] {
    // SAFETY: as the caller vouches.
    unsafe { [V::load_quads(p), V::load_quads(p.add(64))] }
}

/// The dot products of `R` rows with a panel of positions, from `first` on.
#[inline(always)]
unsafe fn dots<V: Bytes, const R: usize>(rows: &[QueryRow], at: &Packed, first: usize, out: *mut f32) {
    // SAFETY: as the caller vouches.
    unsafe {
        let keys = at.keys.add(first * at.k_quads * 4);
        let mut q = [std::ptr::null::<i32>(); R];
        let mut sums = [[V::start(0); 2]; R];
        for i in 0..R {
            let query = rows.get_unchecked(i).q;
            q[i] = query.as_ptr().add(HEADER).cast();
            sums[i] = [V::start(query.get_unchecked(1).to_bits() as i32); 2];
        }
        for quad in 0..at.k_quads {
            let k = load_panel::<V>(keys.add(quad * QUADS));
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

/// The same of two planes.
#[inline(always)]
unsafe fn dots_of_two<V: Bytes, const R: usize>(rows: &[QueryRow], at: &Packed, first: usize, out: *mut f32) {
    // SAFETY: as the caller vouches.
    unsafe {
        let keys = at.keys.add(first * at.k_quads * 4);
        let low_keys = keys.add(at.k_plane());
        let mut q = [std::ptr::null::<i32>(); R];
        let (mut high, mut low) = ([[V::start(0); 2]; R], [[V::start(0); 2]; R]);
        for i in 0..R {
            let query = rows.get_unchecked(i).q;
            q[i] = query.as_ptr().add(HEADER).cast();
            low[i] = [V::start(query.get_unchecked(1).to_bits() as i32); 2];
        }
        for quad in 0..at.k_quads {
            let k = load_panel::<V>(keys.add(quad * QUADS));
            let k_low = load_panel::<V>(low_keys.add(quad * QUADS));
            for i in 0..R {
                let (q, q_low) = (q[i].add(quad).read(), q[i].add(at.k_quads + quad).read());
                for j in 0..2 {
                    high[i][j] = V::multiply_unsigned(high[i][j], k[j], q);
                    low[i][j] = V::multiply_unsigned(low[i][j], k_low[j], q);
                    low[i][j] = V::multiply_unsigned(low[i][j], k[j], q_low);
                }
            }
        }
        for i in 0..R {
            for j in 0..2 {
                V::from_sums(V::join_sums(high[i][j], low[i][j])).store(out.add(i * PARTITION + 16 * j));
            }
        }
    }
}

/// The weighted sums of `R` rows over a panel of columns, from `c` on.
#[inline(always)]
unsafe fn weighted<V: Bytes, const R: usize>(
    quads: Range<usize>,
    p: *const u8,
    scales: &[f32],
    at: &Packed,
    c: usize,
    out: *mut f32,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let values = at.values.add(c * PARTITION);
        let mut sums = [[V::start(0); 2]; R];
        for quad in quads {
            let v = load_panel::<V>(values.add(quad * QUADS));
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
                V::from_sums(sums[i][j]).mul(scale).store(out.add(i * at.v_stride + 16 * j));
            }
        }
    }
}

/// The same of two planes.
#[inline(always)]
unsafe fn weighted_of_two<V: Bytes, const R: usize>(
    quads: Range<usize>,
    p: *const u8,
    scales: &[f32],
    at: &Packed,
    c: usize,
    out: *mut f32,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let values = at.values.add(c * PARTITION);
        let low_values = values.add(at.v_plane());
        let (mut high, mut low) = ([[V::start(0); 2]; R], [[V::start(0); 2]; R]);
        for quad in quads {
            let v = load_panel::<V>(values.add(quad * QUADS));
            let v_low = load_panel::<V>(low_values.add(quad * QUADS));
            for i in 0..R {
                let p = p.add(2 * i * PARTITION + 4 * quad).cast::<i32>();
                let (p, p_low) = (p.read_unaligned(), p.byte_add(PARTITION).read_unaligned());
                for j in 0..2 {
                    high[i][j] = V::multiply_signed(high[i][j], v[j], p);
                    low[i][j] = V::multiply_signed(low[i][j], v_low[j], p);
                    low[i][j] = V::multiply_signed(low[i][j], v[j], p_low);
                }
            }
        }
        for i in 0..R {
            let scale = V::splat(*scales.get_unchecked(i));
            for j in 0..2 {
                let sums = V::join_sums(high[i][j], low[i][j]);
                V::from_sums(sums).mul(scale).store(out.add(i * at.v_stride + 16 * j));
            }
        }
    }
}
