//! One partition of attention for a few query rows, straight from the cache: scores, their softmax, the weighted sum of values.
//!
//! Rows and positions are worked in tiles that fit the registers, and in an order that keeps what is used again in the first-level
//! cache. Tiles never change a result, since each score is one lane dot and each weighted sum runs over its row's visible
//! positions in ascending order.

// Iterators come with closures, which may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::kv::{Bf16, F16, F32, Int8, KvElement, KvType};
use super::paged::{AHEAD, KvScales, PARTITION, Paged};
use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::math::{exp, tanh};

/// The most query rows of one call.
pub const ROWS: usize = 32;

/// So many rows that they and their scores stay in the first-level cache.
pub fn rows_at_once(k_dim: usize) -> usize {
    (4096 / k_dim).clamp(8, ROWS)
}

/// What is done to a score before the softmax.
#[derive(Clone, Copy)]
pub struct Rule {
    /// Scores are multiplied by it.
    pub scale: f32,
    /// Scores become `cap * tanh(s / cap)`.
    pub softcap: Option<f32>,
}

/// One query row: a query head of a token.
#[derive(Clone)]
pub struct QueryRow<'a> {
    /// The query, `[k_dim]`.
    pub q: &'a [f32],
    /// The positions that it sees, from the partition's start.
    pub visible: Range<usize>,
    /// The greatest visible score and the sum of weights; set by [`partition`] where something is visible.
    pub m: f32,
    /// The sum of weights.
    pub l: f32,
}

impl<'a> QueryRow<'a> {
    /// A row without a query.
    pub const EMPTY: QueryRow<'static> = QueryRow { q: &[], visible: 0..0, m: 0.0, l: 0.0 };

    /// A row that has seen nothing yet.
    pub fn new(q: &'a [f32], visible: Range<usize>) -> QueryRow<'a> {
        // Beyond the partition, or not yet in it: nothing.
        let visible = if visible.start >= visible.end { 0..0 } else { visible };
        QueryRow { q, visible, m: 0.0, l: 0.0 }
    }
}

#[inline(always)]
unsafe fn partition_lanes<V: Lanes>(
    at: &Paged,
    rule: Rule,
    rows: &mut [QueryRow],
    scores: &mut [f32],
    sums: &mut [f32],
) {
    assert!(rows.len() <= ROWS && scores.len() >= rows.len() * PARTITION && sums.len() >= rows.len() * at.v_dim);
    assert!(rows.iter().all(|r| r.visible.is_empty() || r.q.len() == at.k_dim));
    assert!(
        rows.iter().all(|r| r.visible.is_empty() || at.seen.start <= r.visible.start && r.visible.end <= at.seen.end)
    );
    // SAFETY: checked above and by `Located::new`; the shell has the instruction set.
    unsafe {
        match at.kv_type {
            KvType::F32 => typed::<V, F32>(at, rule, rows, scores, sums),
            KvType::Bf16 => typed::<V, Bf16>(at, rule, rows, scores, sums),
            KvType::F16 => typed::<V, F16>(at, rule, rows, scores, sums),
            KvType::Int8 => typed::<V, Int8>(at, rule, rows, scores, sums),
            KvType::Int16 => unreachable!("keys and values of sixteen bits are attended to on integers"),
        }
    }
}

simd! {
    /// Sets `m` and `l` of the rows that see something, and their weighted sums of values: row r's are `sums[r * v_dim..][..v_dim]`. `scores`
    /// has room for [`PARTITION`] per row.
    pub fn partition(at: &Paged, rule: Rule, rows: &mut [QueryRow], scores: &mut [f32], sums: &mut [f32]) = partition_lanes
}

#[inline(always)]
unsafe fn typed<V: Lanes, T: KvElement>(
    at: &Paged,
    rule: Rule,
    rows: &mut [QueryRow],
    scores: &mut [f32],
    sums: &mut [f32],
) {
    let seen = rows.iter().filter(|r| !r.visible.is_empty());
    let Some(from) = seen.clone().map(|r| r.visible.start).min() else { return };
    let to = seen.map(|r| r.visible.end).max().unwrap_or(0);
    // SAFETY: as the caller vouches.
    unsafe {
        // 1. scores, sixteen positions at a time for all rows
        let blocks = from / 16..to.div_ceil(16);
        for block in blocks.clone() {
            // The keys of positions that come later, or the first values.
            let later = block + AHEAD / 16;
            let ahead = if later < blocks.end {
                at.keys[16 * later]
            } else {
                at.values[(from + 16 * (later - blocks.end)).min(to - 1)]
            };
            let keys: &[*const u8; 16] = at.keys[16 * block..].first_chunk().expect("a partition is whole blocks");
            let mut r = 0;
            while r < rows.len() {
                let n = tile_rows(rows.len() - r, 4);
                let tile = &rows[r..r + n];
                if tile.iter().any(|r| r.visible.start < 16 * block + 16 && r.visible.end > 16 * block) {
                    let out = scores.as_mut_ptr().add(r * PARTITION + 16 * block);
                    match (n, r == 0) {
                        (4, true) => score_tile::<V, T, 4, 4, true>(tile, keys, at.k_dim, out, ahead),
                        (4, false) => score_tile::<V, T, 4, 4, false>(tile, keys, at.k_dim, out, ahead),
                        (2, true) => score_tile::<V, T, 2, 8, true>(tile, keys, at.k_dim, out, ahead),
                        (2, false) => score_tile::<V, T, 2, 8, false>(tile, keys, at.k_dim, out, ahead),
                        (_, true) => score_tile::<V, T, 1, 16, true>(tile, keys, at.k_dim, out, ahead),
                        (_, false) => score_tile::<V, T, 1, 16, false>(tile, keys, at.k_dim, out, ahead),
                    }
                }
                r += n;
            }
        }
        // 2. weights
        for (row, scores) in rows.iter_mut().zip(scores.as_chunks_mut::<PARTITION>().0) {
            if !row.visible.is_empty() {
                (row.m, row.l) = weights::<V>(rule, at.scales.as_ref(), row.visible.clone(), scores);
            }
        }
        // 3. weighted sums, some columns at a time for all rows: as many accumulators as there are registers for
        sums[..rows.len() * at.v_dim].fill(0.0);
        let values = &at.values;
        let mut sum = Sum { rows, scores: scores.as_ptr(), sums: sums.as_mut_ptr(), values, v_dim: at.v_dim };
        let few = rows.len() <= 2;
        let mut c = 0;
        if few && V::WIDE {
            while c + 128 <= at.v_dim {
                sum.columns::<V, T, 8>(c, 2);
                c += 128;
            }
        }
        if few || (V::WIDE && rows.len() < 8) {
            while c + 64 <= at.v_dim {
                sum.columns::<V, T, 4>(c, if V::WIDE { 4 } else { 1 });
                c += 64;
            }
        }
        while c + 32 <= at.v_dim {
            sum.columns::<V, T, 2>(c, if V::WIDE { 8 } else { 2 });
            c += 32;
        }
        if c + 16 <= at.v_dim {
            sum.columns::<V, T, 1>(c, 4);
            c += 16;
        }
        if c < at.v_dim {
            sum.last_columns::<V, T>(c);
        }
    }
}

/// Rows of the next tile: a power of two, of at most `most`.
#[inline(always)]
pub fn tile_rows(left: usize, most: usize) -> usize {
    let mut n = most;
    while n > left {
        n /= 2;
    }
    n
}

/// The sixteen lanes of each of `Q` times `K` dot products. With `A`, as many bytes are prefetched from `ahead` on.
#[inline(always)]
unsafe fn dots<V: Lanes, T: KvElement, const Q: usize, const K: usize, const A: bool>(
    q: [*const f32; Q],
    k: [*const u8; K],
    dim: usize,
    ahead: *const u8,
) -> [[V; K]; Q] {
    let whole = dim / 16 * 16;
    // SAFETY: `dim` elements at each pointer; the caller vouches for the instruction set.
    unsafe {
        let mut acc = [[V::splat(0.0); K]; Q];
        for d in (0..whole).step_by(16) {
            let mut x = [V::splat(0.0); Q];
            for i in 0..Q {
                x[i] = V::load(q[i].add(d));
            }
            if A {
                for line in 0..(K * T::SIZE).div_ceil(4) {
                    V::prefetch(ahead.wrapping_add(d * K * T::SIZE + 64 * line));
                }
            }
            for j in 0..K {
                let k = T::load::<V>(k[j].add(d * T::SIZE));
                for i in 0..Q {
                    acc[i][j] = x[i].fma(k, acc[i][j]);
                }
            }
        }
        if whole < dim {
            let n = dim - whole;
            for j in 0..K {
                let k = T::load_first::<V>(k[j].add(whole * T::SIZE), n);
                for i in 0..Q {
                    acc[i][j] = V::load_first(q[i].add(whole), n).fma(k, acc[i][j]);
                }
            }
        }
        acc
    }
}

/// Sixteen scores of each of `Q` rows, [`PARTITION`] apart, in tiles of `K` positions; `Q` times `K` is 16.
#[inline(always)]
pub unsafe fn score_tile<V: Lanes, T: KvElement, const Q: usize, const K: usize, const A: bool>(
    rows: &[QueryRow],
    keys: &[*const u8; 16],
    dim: usize,
    out: *mut f32,
    ahead: *const u8,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut q = [std::ptr::null(); Q];
        for i in 0..Q {
            q[i] = rows.get_unchecked(i).q.as_ptr();
        }
        for (c, keys) in keys.as_chunks::<K>().0.iter().enumerate() {
            let mut acc = [V::splat(0.0); 16];
            let row = dim * T::SIZE;
            let ahead = ahead.wrapping_add(c * K * row);
            if V::WIDE {
                let tile = dots::<V, T, Q, K, A>(q, *keys, dim, ahead);
                for i in 0..16 {
                    acc[i] = tile[i / K][i % K];
                }
            } else if Q == 1 {
                for j in (0..K).step_by(4) {
                    let keys = [keys[j], keys[j + 1], keys[j + 2], keys[j + 3]];
                    let [tile] = dots::<V, T, 1, 4, A>([q[0]], keys, dim, ahead.wrapping_add(j * row));
                    acc[j..j + 4].copy_from_slice(&tile);
                }
            } else {
                for i in (0..Q).step_by(2) {
                    for j in (0..K).step_by(2) {
                        let (q, keys) = ([q[i], q[i + 1]], [keys[j], keys[j + 1]]);
                        let tile = if A && i == 0 {
                            dots::<V, T, 2, 2, true>(q, keys, dim, ahead.wrapping_add(j * row))
                        } else {
                            dots::<V, T, 2, 2, false>(q, keys, dim, ahead)
                        };
                        acc[i * K + j..][..2].copy_from_slice(&tile[0]);
                        acc[(i + 1) * K + j..][..2].copy_from_slice(&tile[1]);
                    }
                }
            }
            let sums = V::sum16(acc).to_array();
            for i in 0..Q {
                std::ptr::copy_nonoverlapping(sums.as_ptr().add(K * i), out.add(i * PARTITION + K * c), K);
            }
        }
    }
}

/// Turns the visible dot products of a row into weights `exp(s - m)`, times the scales of the values; returns m and the lane sum of the
/// weights without those scales.
#[inline(always)]
pub unsafe fn weights<V: Lanes>(
    rule: Rule,
    scales: Option<&KvScales>,
    visible: Range<usize>,
    scores: &mut [f32; PARTITION],
) -> (f32, f32) {
    if visible == (0..PARTITION) {
        // SAFETY: as the caller vouches.
        return unsafe { all_weights::<V>(rule, scales, scores) };
    }
    let blocks = visible.start / 16 * 16..visible.end.next_multiple_of(16);
    let p = scores.as_mut_ptr();
    // SAFETY: whole registers inside the partition; the caller vouches for the instruction set.
    unsafe {
        for i in blocks.clone().step_by(16) {
            let mut s = V::load(p.add(i));
            if let Some(scales) = scales {
                s = s.mul(V::load(scales.k.as_ptr().add(i)));
            }
            s = s.mul(V::splat(rule.scale));
            if let Some(cap) = rule.softcap {
                s = tanh(s.div(V::splat(cap))).mul(V::splat(cap));
            }
            s.store(p.add(i));
        }
        // The first and last register may hold positions that are not visible. They count as -inf for the maximum, and then as 0 for the sum.
        scores[blocks.start..visible.start].fill(f32::NEG_INFINITY);
        scores[visible.end..blocks.end].fill(f32::NEG_INFINITY);
        let p = scores.as_mut_ptr();
        let mut top = V::splat(f32::NEG_INFINITY);
        for i in blocks.clone().step_by(16) {
            top = V::load(p.add(i)).max(top);
        }
        let m = top.max_lane();
        for i in blocks.clone().step_by(16) {
            exp(V::load(p.add(i)).sub(V::splat(m))).store(p.add(i));
        }
        scores[blocks.start..visible.start].fill(0.0);
        scores[visible.end..blocks.end].fill(0.0);
        let p = scores.as_mut_ptr();
        let mut l = V::splat(0.0);
        for i in blocks.step_by(16) {
            let e = V::load(p.add(i));
            l = l.add(e);
            if let Some(scales) = scales {
                e.mul(V::load(scales.v.as_ptr().add(i))).store(p.add(i));
            }
        }
        (m, l.sum())
    }
}

/// [`weights`] where all is visible: in registers.
#[inline(always)]
unsafe fn all_weights<V: Lanes>(rule: Rule, scales: Option<&KvScales>, scores: &mut [f32; PARTITION]) -> (f32, f32) {
    const N: usize = PARTITION / 16;
    let p = scores.as_mut_ptr();
    // SAFETY: whole registers of the partition; the caller vouches for the instruction set.
    unsafe {
        let mut s = [V::splat(0.0); N];
        let mut top = V::splat(f32::NEG_INFINITY);
        for i in 0..N {
            s[i] = V::load(p.add(16 * i));
            if let Some(scales) = scales {
                s[i] = s[i].mul(V::load(scales.k.as_ptr().add(16 * i)));
            }
            s[i] = s[i].mul(V::splat(rule.scale));
            if let Some(cap) = rule.softcap {
                s[i] = tanh(s[i].div(V::splat(cap))).mul(V::splat(cap));
            }
            top = s[i].max(top);
        }
        let m = top.max_lane();
        let mut l = V::splat(0.0);
        for i in 0..N {
            let e = exp(s[i].sub(V::splat(m)));
            l = l.add(e);
            let p = p.add(16 * i);
            match scales {
                None => e.store(p),
                Some(scales) => e.mul(V::load(scales.v.as_ptr().add(16 * i))).store(p),
            }
        }
        (m, l.sum())
    }
}

/// The weighted sums of values of all rows.
struct Sum<'a, 'b> {
    rows: &'a [QueryRow<'b>],
    scores: *const f32,
    sums: *mut f32,
    values: &'a [*const u8; PARTITION + AHEAD],
    v_dim: usize,
}

impl Sum<'_, '_> {
    /// Column c of the value at a position, or of what is to be prefetched, at most [`AHEAD`] beyond the partition.
    #[inline(always)]
    unsafe fn value<T: KvElement>(&self, position: usize, c: usize) -> *const u8 {
        // SAFETY: the caller vouches for the position; a prefetch may have any address.
        unsafe { self.values.get_unchecked(position) }.wrapping_add(c * T::SIZE)
    }

    /// `C` registers of columns from `c` on, in tiles of at most `most` rows.
    #[inline(always)]
    unsafe fn columns<V: Lanes, T: KvElement, const C: usize>(&mut self, c: usize, most: usize) {
        let mut r = 0;
        while r < self.rows.len() {
            let n = tile_rows(self.rows.len() - r, most);
            let tile = &self.rows[r..r + n];
            // Positions that all rows of the tile see are summed together; those before and after, row by row.
            let from = tile.iter().map(|r| r.visible.start).max().unwrap_or(0);
            let to = tile.iter().map(|r| r.visible.end).min().unwrap_or(0);
            let common = if from < to { from..to } else { 0..0 };
            // SAFETY: as the caller vouches.
            unsafe {
                for (i, row) in tile.iter().enumerate() {
                    let end = if common.is_empty() { row.visible.end } else { from };
                    self.tile::<V, T, 1, C>(r + i, row.visible.start..end, c);
                }
                if !common.is_empty() {
                    match n {
                        8 => self.tile::<V, T, 8, C>(r, common.clone(), c),
                        4 => self.tile::<V, T, 4, C>(r, common.clone(), c),
                        2 => self.tile::<V, T, 2, C>(r, common.clone(), c),
                        _ => self.tile::<V, T, 1, C>(r, common.clone(), c),
                    }
                    for (i, row) in tile.iter().enumerate() {
                        self.tile::<V, T, 1, C>(r + i, to..row.visible.end, c);
                    }
                }
            }
            r += n;
        }
    }

    /// `o = fma(p, v, o)` in ascending position, for `Q` rows from `r` on.
    #[inline(always)]
    unsafe fn tile<V: Lanes, T: KvElement, const Q: usize, const C: usize>(
        &mut self,
        r: usize,
        at: Range<usize>,
        c: usize,
    ) {
        if at.is_empty() {
            return;
        }
        // SAFETY: as the caller vouches.
        unsafe {
            let o = self.sums.add(r * self.v_dim + c);
            let p = self.scores.add(r * PARTITION);
            let mut acc = [[V::splat(0.0); C]; Q];
            for i in 0..Q {
                for j in 0..C {
                    acc[i][j] = V::load(o.add(i * self.v_dim + 16 * j));
                }
            }
            for position in at {
                let row = self.value::<T>(position, c);
                if r == 0 {
                    let ahead = self.value::<T>(position + AHEAD, c);
                    for line in 0..(C * T::SIZE).div_ceil(4) {
                        V::prefetch(ahead.wrapping_add(64 * line));
                    }
                }
                let mut v = [V::splat(0.0); C];
                for j in 0..C {
                    v[j] = T::load(row.add(16 * j * T::SIZE));
                }
                for i in 0..Q {
                    let p = V::splat(*p.add(i * PARTITION + position));
                    for j in 0..C {
                        acc[i][j] = p.fma(v[j], acc[i][j]);
                    }
                }
            }
            for i in 0..Q {
                for j in 0..C {
                    acc[i][j].store(o.add(i * self.v_dim + 16 * j));
                }
            }
        }
    }

    /// The columns from `c` on, fewer than sixteen.
    #[inline(always)]
    unsafe fn last_columns<V: Lanes, T: KvElement>(&mut self, c: usize) {
        let n = self.v_dim - c;
        for (r, row) in self.rows.iter().enumerate() {
            // SAFETY: as the caller vouches.
            unsafe {
                let o = self.sums.add(r * self.v_dim + c);
                let mut acc = V::load_first(o, n);
                for position in row.visible.clone() {
                    let v = T::load_first::<V>(self.value::<T>(position, c), n);
                    acc = V::splat(*self.scores.add(r * PARTITION + position)).fma(v, acc);
                }
                acc.store_first(o, n);
            }
        }
    }
}
