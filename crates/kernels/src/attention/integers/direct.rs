//! Both products of attention on integers for a few rows, straight from the cache: keys one by one, each with its own sums across a register, and values interleaved in
//! registers.

// Iterators come with closures, which may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::pack::{columns, padded};
use super::room::{Batch, HEADER, k_quads, padded_v};
use crate::attention::paged::{AHEAD, PARTITION, Paged};
use crate::attention::partition::{QueryRow, tile_rows};
use crate::attention::prefill::hull;
use crate::dispatch::simd;
use crate::instructions::bytes::Bytes;

#[inline(always)]
unsafe fn dots_lanes<V: Bytes>(at: &Paged, planes: usize, batch: &mut Batch) {
    let (from, to) = hull(batch.rows);
    for first in (from / 16 * 16..to).step_by(16) {
        let mut r = 0;
        while r < batch.rows.len() {
            let tile = tile_rows(batch.rows.len() - r, if V::WIDE { 2 } else { 1 });
            // SAFETY: checked by `Batch` and by `Paged`; the shell has the instruction set.
            unsafe {
                let (rows, out) = (&batch.rows[r..r + tile], batch.scores.as_mut_ptr().add(r * PARTITION + first));
                match (planes, tile) {
                    (1, 2) => dots::<V, 1, 2>(rows, at, first, r == 0, out),
                    (1, _) => dots::<V, 1, 1>(rows, at, first, r == 0, out),
                    (_, 2) => dots::<V, 2, 2>(rows, at, first, r == 0, out),
                    (_, _) => dots::<V, 2, 1>(rows, at, first, r == 0, out),
                }
            }
            r += tile;
        }
    }
}

simd! {
    pub(super) fn dots_of_all(at: &Paged, planes: usize, batch: &mut Batch) = dots_lanes
}

/// The dot products of `R` rows with sixteen positions, whose keys have `P` planes. `asks`: keys of positions that come later, or the first values, are asked for before
/// they are wanted.
#[inline(always)]
unsafe fn dots<V: Bytes, const P: usize, const R: usize>(
    rows: &[QueryRow],
    at: &Paged,
    first: usize,
    asks: bool,
    out: *mut f32,
) {
    let (dim, plane) = (at.k_dim, 4 * k_quads(at.k_dim));
    let seen = &at.seen;
    // SAFETY: as the caller vouches; a prefetch may have any address.
    unsafe {
        let mut q = [std::ptr::null::<u8>(); R];
        for r in 0..R {
            q[r] = rows.get_unchecked(r).q.as_ptr().add(HEADER).cast();
        }
        let mut sums = [[V::start(0); 16]; R];
        for i in 0..16 {
            if asks {
                let later = first + i + AHEAD;
                let ahead = if later < seen.end {
                    at.keys[later]
                } else {
                    at.values[(seen.start + later - seen.end).min(seen.end - 1)]
                };
                for line in (0..P * dim).step_by(64) {
                    V::prefetch(ahead.wrapping_add(line));
                }
            }
            let key = *at.keys.get_unchecked(first + i);
            let (mut high, mut low) = ([V::start(0); R], [V::start(0); R]);
            for c in (0..dim / 64 * 64).step_by(64) {
                multiply::<V, P, R>(&mut high, &mut low, key.add(c), dim, q, c, plane);
            }
            if dim % 64 > 0 {
                let (c, mut rest) = (dim / 64 * 64, [[0; 64]; P]);
                for p in 0..P {
                    rest[p] = padded(key.add(p * dim + c), dim - c);
                }
                multiply::<V, P, R>(&mut high, &mut low, rest.as_ptr().cast(), 64, q, c, plane);
            }
            for r in 0..R {
                sums[r][i] = if P == 2 { V::join_sums(high[r], low[r]) } else { high[r] };
            }
        }
        for r in 0..R {
            let more = V::start(rows.get_unchecked(r).q.get_unchecked(1).to_bits() as i32);
            V::from_sums(V::add_sums(V::total16(sums[r]), more)).store(out.add(r * PARTITION));
        }
    }
}

/// 64 elements of a key, whose planes are `apart`, with those of `R` queries from `c` on.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn multiply<V: Bytes, const P: usize, const R: usize>(
    high: &mut [V::Sums; R],
    low: &mut [V::Sums; R],
    key: *const u8,
    apart: usize,
    q: [*const u8; R],
    c: usize,
    plane: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let k = V::load_flipped(key);
        for r in 0..R {
            high[r] = V::multiply_quads(high[r], k, V::load_quads(q[r].add(c)));
        }
        if P == 2 {
            let k_low = V::load_flipped(key.add(apart));
            for r in 0..R {
                low[r] = V::multiply_quads(low[r], k_low, V::load_quads(q[r].add(c)));
                low[r] = V::multiply_quads(low[r], k, V::load_quads(q[r].add(plane + c)));
            }
        }
    }
}

#[inline(always)]
unsafe fn sums_lanes<V: Bytes>(at: &Paged, planes: usize, batch: &mut Batch) {
    let mut r = 0;
    while r < batch.rows.len() {
        let tile = tile_rows(batch.rows.len() - r, if V::WIDE { 2 } else { 1 });
        let (from, to) = hull(&batch.rows[r..r + tile]);
        if from < to {
            let quads = from / 4..to.div_ceil(4);
            // SAFETY: checked by `Batch` and by `Paged`; the shell has the instruction set.
            unsafe {
                match (tile, planes) {
                    (2, 1) => weighted::<V, 2, 1>(quads, at, batch, r),
                    (_, 1) => weighted::<V, 1, 1>(quads, at, batch, r),
                    (2, _) => weighted::<V, 2, 2>(quads, at, batch, r),
                    _ => weighted::<V, 1, 2>(quads, at, batch, r),
                }
            }
        }
        r += tile;
    }
}

simd! {
    pub(super) fn sums_of_all(at: &Paged, planes: usize, batch: &mut Batch) = sums_lanes
}

/// The weighted sums of `R` rows from `r` on, of values that have `P` planes.
#[inline(always)]
unsafe fn weighted<V: Bytes, const R: usize, const P: usize>(
    quads: Range<usize>,
    at: &Paged,
    batch: &mut Batch,
    r: usize,
) {
    let mut c = 0;
    // SAFETY: as the caller vouches.
    unsafe {
        if V::WIDE {
            while c + 64 <= at.v_dim {
                columns_of::<V, R, P, 4>(quads.clone(), at, batch, r, c);
                c += 64;
            }
        }
        while c < at.v_dim {
            columns_of::<V, R, P, 1>(quads.clone(), at, batch, r, c);
            c += 16;
        }
    }
}

/// `C` registers of columns from `c` on: four, or one, which may be the last.
#[inline(always)]
unsafe fn columns_of<V: Bytes, const R: usize, const P: usize, const C: usize>(
    quads: Range<usize>,
    at: &Paged,
    batch: &mut Batch,
    r: usize,
    c: usize,
) {
    let (v_dim, v_plane, v_stride) = (at.v_dim, at.v_plane, padded_v(at.v_dim));
    // SAFETY: as the caller vouches; a prefetch may have any address.
    unsafe {
        let p = batch.bytes.as_ptr().add(r * P * PARTITION);
        let (mut high, mut low) = ([[V::start(0); C]; R], [[V::start(0); C]; R]);
        for quad in quads {
            let mut rows = [std::ptr::null(); 4];
            for i in 0..4 {
                rows[i] = at.values.get_unchecked(4 * quad + i).add(c);
                if r == 0 && c.is_multiple_of(64) {
                    let ahead = at.values.get_unchecked(4 * quad + i + AHEAD).wrapping_add(c);
                    for plane in 0..P {
                        V::prefetch(ahead.wrapping_add(plane * v_plane));
                    }
                }
            }
            let v = some_columns::<V, C>(rows, v_dim - c);
            let mut weights = [0; R];
            for i in 0..R {
                weights[i] = p.add(i * P * PARTITION + 4 * quad).cast::<i32>().read_unaligned();
                for j in 0..C {
                    high[i][j] = V::multiply_signed(high[i][j], v[j], weights[i]);
                }
                if P == 2 {
                    let weights = p.add((2 * i + 1) * PARTITION + 4 * quad).cast::<i32>().read_unaligned();
                    for j in 0..C {
                        low[i][j] = V::multiply_signed(low[i][j], v[j], weights);
                    }
                }
            }
            if P == 2 {
                let v_low = some_columns::<V, C>(rows.map(|row| row.add(v_plane)), v_dim - c);
                for i in 0..R {
                    for j in 0..C {
                        low[i][j] = V::multiply_signed(low[i][j], v_low[j], weights[i]);
                    }
                }
            }
        }
        for i in 0..R {
            let scale = V::splat(batch.scales[r + i]);
            let mut sums = [V::start(0); 4];
            for j in 0..C {
                sums[j] = if P == 2 { V::join_sums(high[i][j], low[i][j]) } else { high[i][j] };
            }
            if C == 4 {
                sums = V::in_order(sums);
            }
            for j in 0..C {
                let out = batch.sums.as_mut_ptr().add((r + i) * v_stride + c + 16 * j);
                V::from_sums(sums[j]).mul(scale).store(out);
            }
        }
    }
}

/// `C` registers of `left` columns or fewer: four are in the order that [`Bytes::in_order`] takes.
#[inline(always)]
unsafe fn some_columns<V: Bytes, const C: usize>(rows: [*const u8; 4], left: usize) -> [V::Quads; C] {
    // SAFETY: as the caller vouches.
    unsafe {
        if C == 4 {
            let four = V::interleave_quarters(rows);
            let mut v = [four[0]; C];
            v[..C].copy_from_slice(&four[..C]);
            v
        } else {
            [columns::<V>(rows, 0, left); C]
        }
    }
}
