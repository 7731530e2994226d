//! A partition's keys and values in quads, as products of bytes take them.

// Iterators come with closures, which may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use std::marker::PhantomData;
use std::ops::Range;

use super::room::{HEADER, PANEL, QUADS, bytes_of, k_quads, padded_v};
use crate::attention::kv::KvType;
use crate::attention::paged::{AHEAD, KvScales, PARTITION, Paged};
use crate::dispatch::simd;
use crate::instructions::bytes::Bytes;

/// A partition's keys and values as quads.
pub struct Packed<'a> {
    /// `[planes, PARTITION / PANEL, k_quads, PANEL, 4]`: four elements of each position, their highest bits turned, zeros (as turned) beyond its elements.
    pub(super) keys: *const u8,
    /// `[planes, v_stride / PANEL, PARTITION / 4, PANEL, 4]`: four positions of each column, missing columns zeros.
    pub(super) values: *const u8,
    pub(super) scales: &'a KvScales,
    pub(super) planes: usize,
    pub(super) k_quads: usize,
    pub(super) v_stride: usize,
    pub(super) seen: Range<usize>,
    room: PhantomData<&'a [f32]>,
}

impl Packed<'_> {
    /// Words of a query.
    pub(super) fn q_stride(&self) -> usize {
        HEADER + self.planes * self.k_quads
    }

    /// Bytes of a plane of keys.
    pub(super) fn k_plane(&self) -> usize {
        4 * PARTITION * self.k_quads
    }

    /// Bytes of a plane of values.
    pub(super) fn v_plane(&self) -> usize {
        PARTITION * self.v_stride
    }
}

/// How many planes keys and values have, and their scales.
pub(super) fn planes_of<'a>(from: &'a Paged) -> (usize, &'a KvScales) {
    match (from.kv_type, &from.scales) {
        (KvType::Int8, Some(scales)) => (1, scales),
        (KvType::Int16, Some(scales)) => (2, scales),
        _ => panic!("attention on integers needs keys and values that are integers"),
    }
}

/// The first `n` of `N` bytes, the rest zeros.
#[inline(always)]
pub(super) unsafe fn padded<const N: usize>(p: *const u8, n: usize) -> [u8; N] {
    let mut bytes = [0; N];
    // SAFETY: the caller vouches for `n` bytes at `p`.
    unsafe { std::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), n.min(N)) };
    bytes
}

/// Columns from `c` on, of four positions: sixteen, or the `n` that there are, and zeros.
#[inline(always)]
pub(super) unsafe fn columns<V: Bytes>(rows: [*const u8; 4], c: usize, n: usize) -> V::Quads {
    let [p, q, r, s] = rows;
    // SAFETY: the caller vouches for them.
    unsafe {
        if n >= 16 {
            return V::interleave([p.add(c), q.add(c), r.add(c), s.add(c)]);
        }
        let [p, q, r, s] = [p, q, r, s].map(|row| padded::<16>(row.add(c), n));
        V::interleave([p.as_ptr(), q.as_ptr(), r.as_ptr(), s.as_ptr()])
    }
}

#[inline(always)]
unsafe fn pack_lanes<'a, V: Bytes>(from: &'a Paged, room: &'a mut [f32]) -> Packed<'a> {
    let (k_dim, v_dim) = (from.k_dim, from.v_dim);
    let (k_quads, v_stride) = (k_quads(k_dim), padded_v(v_dim));
    let (planes, scales) = planes_of(from);
    let (k_plane, v_plane) = (4 * PARTITION * k_quads, PARTITION * v_stride);
    let (keys, values) = bytes_of(room)[..planes * (k_plane + v_plane)].split_at_mut(planes * k_plane);
    let (keys, values) = (keys.as_mut_ptr(), values.as_mut_ptr());
    let seen = from.seen.clone();
    // SAFETY: `from` was checked when it was made (what is not seen points into the pool, to a row's length of bytes: `planes` times its elements); what is written is
    // inside `room`; the shell has the instruction set.
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
            for plane in 0..planes {
                let to = keys.add(plane * k_plane + first / PANEL * k_quads * QUADS + first % PANEL * 4);
                for c in 0..k_quads / 16 {
                    let mut v = [V::splat(0.0); 16];
                    for i in 0..16 {
                        V::prefetch(ahead(first + i).wrapping_add(plane * k_dim + 64 * c));
                        let key = from.keys[first + i].add(plane * k_dim + 64 * c);
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
        }
        for quad in seen.start / 4..seen.end.div_ceil(4) {
            let rows = [0, 1, 2, 3].map(|i| from.values[4 * quad + i]);
            for i in 0..4 {
                let ahead = from.values[4 * quad + i + AHEAD];
                for line in (0..planes * v_dim).step_by(64) {
                    V::prefetch(ahead.wrapping_add(line));
                }
            }
            for plane in 0..planes {
                let (rows, values) = (rows.map(|row| row.add(plane * from.v_plane)), values.add(plane * v_plane));
                let mut c = 0;
                while c < v_stride {
                    let to = values.add((c / PANEL * (PARTITION / 4) + quad) * QUADS + c % PANEL * 4);
                    match v_dim.saturating_sub(c) {
                        64.. if c % PANEL == 0 => {
                            let four = V::interleave64(rows.map(|row| row.add(c)));
                            let next = to.add(PARTITION / 4 * QUADS);
                            V::store_quads(four[0], to);
                            V::store_quads(four[1], to.add(64));
                            V::store_quads(four[2], next);
                            V::store_quads(four[3], next.add(64));
                            c += 48;
                        }
                        0 => to.write_bytes(0, 64),
                        n => V::store_quads(columns::<V>(rows, c, n), to),
                    }
                    c += 16;
                }
            }
        }
    }
    Packed { keys, values, scales, planes, k_quads, v_stride, seen, room: PhantomData }
}

simd! {
    /// Lays the keys and values that are seen out in `room`.
    pub fn pack<'a>(from: &'a Paged, room: &'a mut [f32]) -> Packed<'a> = pack_lanes
}
