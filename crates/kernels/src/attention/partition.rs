//! One partition of attention for some query rows: scores, their softmax, the weighted sum of values.
//!
//! Rows and positions are worked in tiles that fit the registers; tiles never change a result, since each score is one lane dot and each
//! weighted sum runs over its row's visible positions in ascending order.

use std::marker::PhantomData;
use std::ops::Range;

use super::PARTITION;
use super::kv::{Bf16, Element, F16, F32, KvType, KvView};
use crate::lanes::Lanes;
use crate::math::{exp, tanh};

/// Query rows of one call: their scores stay in the first-level cache.
pub const ROWS: usize = 32;

/// What is done to a score before the softmax.
#[derive(Clone, Copy)]
pub struct Rule {
    pub scale: f32,
    pub softcap: Option<f32>,
}

/// One query row: a query head of a token.
#[derive(Clone)]
pub struct Slot<'a> {
    q: &'a [f32],
    /// What it sees, from the partition's start.
    pub visible: Range<usize>,
    /// The greatest visible score and the sum of weights; set by [`partition`] where something is visible.
    pub m: f32,
    pub l: f32,
}

impl<'a> Slot<'a> {
    pub const EMPTY: Slot<'static> = Slot { q: &[], visible: 0..0, m: 0.0, l: 0.0 };

    pub fn new(q: &'a [f32], visible: Range<usize>) -> Slot<'a> {
        // Beyond the partition, or not yet in it: nothing.
        let visible = if visible.start >= visible.end { 0..0 } else { visible };
        Slot { q, visible, m: 0.0, l: 0.0 }
    }
}

/// Where a partition's keys and values lie.
pub struct Located<'a> {
    keys: [*const u8; PARTITION],
    values: [*const u8; PARTITION],
    kv_type: KvType,
    k_dim: usize,
    v_dim: usize,
    pool: PhantomData<&'a [u8]>,
}

impl<'a> Located<'a> {
    /// Looks the positions `base + seen` up and checks that they lie in the pool. The other entries point to the last of them.
    pub fn new(kv: &KvView<'a>, table: &[u32], kv_head: usize, base: usize, seen: Range<usize>) -> Located<'a> {
        let s = &kv.shape;
        let (mut keys, mut values) = ([kv.bytes.as_ptr(); PARTITION], [kv.bytes.as_ptr(); PARTITION]);
        let mut i = seen.start;
        while i < seen.end {
            // The rest of a block: its rows lie one after the other.
            let (block, token) = ((base + i) / s.block_tokens, (base + i) % s.block_tokens);
            let n = (s.block_tokens - token).min(seen.end - i);
            let slot = table[block] as usize * s.block_tokens + token;
            let (k, v) = (s.k_at(slot, kv_head), s.v_at(slot, kv_head));
            let (k_row, v_row) = (k.len(), v.len());
            let k = &kv.bytes[k.start..k.start + n * k_row];
            let v = &kv.bytes[v.start..v.start + n * v_row];
            for j in 0..n {
                keys[i + j] = k[j * k_row..].as_ptr();
                values[i + j] = v[j * v_row..].as_ptr();
            }
            i += n;
        }
        // Tiles of positions read a little beyond what is seen, and forget it.
        let last = keys[seen.end - 1];
        keys[..seen.start].fill(last);
        keys[seen.end..].fill(last);
        Located { keys, values, kv_type: s.kv_type, k_dim: s.k_dim, v_dim: s.v_dim, pool: PhantomData }
    }

    /// Copies keys and values of the positions `seen` to `room` as f32 (which changes no value) and points there.
    #[inline(always)]
    pub unsafe fn widen<V: Lanes>(&mut self, seen: Range<usize>, room: &'a mut [f32]) {
        let (k_dim, v_dim) = (self.k_dim, self.v_dim);
        if self.kv_type == KvType::F32 {
            return;
        }
        let (keys, values) = room[..PARTITION * (k_dim + v_dim)].split_at_mut(PARTITION * k_dim);
        for i in seen.clone() {
            let (k, v) = (&mut keys[i * k_dim..(i + 1) * k_dim], &mut values[i * v_dim..(i + 1) * v_dim]);
            // SAFETY: `new` checked that the rows lie in the pool; the caller vouches for the instruction set.
            unsafe {
                match self.kv_type {
                    KvType::F32 => unreachable!("checked above"),
                    KvType::Bf16 => {
                        widen_row::<V, Bf16>(self.keys[i], k);
                        widen_row::<V, Bf16>(self.values[i], v);
                    }
                    KvType::F16 => {
                        widen_row::<V, F16>(self.keys[i], k);
                        widen_row::<V, F16>(self.values[i], v);
                    }
                }
            }
        }
        let last = seen.end - 1;
        for i in 0..PARTITION {
            let key = if seen.contains(&i) { i } else { last };
            self.keys[i] = keys[key * k_dim..].as_ptr().cast();
            self.values[i] = values[i * v_dim..].as_ptr().cast();
        }
        self.kv_type = KvType::F32;
    }
}

#[inline(always)]
unsafe fn widen_row<V: Lanes, T: Element>(from: *const u8, to: &mut [f32]) {
    let (n, whole) = (to.len(), to.len() / 16 * 16);
    let to = to.as_mut_ptr();
    // SAFETY: `n` elements at both; the caller vouches for the instruction set.
    unsafe {
        for i in (0..whole).step_by(16) {
            T::load::<V>(from.add(i * T::SIZE)).store(to.add(i));
        }
        if whole < n {
            T::load_first::<V>(from.add(whole * T::SIZE), n - whole).store_first(to.add(whole), n - whole);
        }
    }
}

/// Sets `m` and `l` of the rows that see something, and their weighted sums of values: row r's are `sums[r * v_dim..][..v_dim]`. `scores`
/// has room for [`PARTITION`] per row.
#[inline(always)]
pub unsafe fn partition<V: Lanes>(at: &Located, rule: Rule, rows: &mut [Slot], scores: &mut [f32], sums: &mut [f32]) {
    assert!(rows.len() <= ROWS && scores.len() >= rows.len() * PARTITION && sums.len() >= rows.len() * at.v_dim);
    assert!(rows.iter().all(|r| r.q.len() == at.k_dim && r.visible.end <= PARTITION));
    // SAFETY: checked above and by `Located::new`; the caller vouches for the instruction set.
    unsafe {
        match at.kv_type {
            KvType::F32 => typed::<V, F32>(at, rule, rows, scores, sums),
            KvType::Bf16 => typed::<V, Bf16>(at, rule, rows, scores, sums),
            KvType::F16 => typed::<V, F16>(at, rule, rows, scores, sums),
        }
    }
}

#[inline(always)]
unsafe fn typed<V: Lanes, T: Element>(
    at: &Located,
    rule: Rule,
    rows: &mut [Slot],
    scores: &mut [f32],
    sums: &mut [f32],
) {
    // SAFETY: as the caller vouches.
    unsafe {
        // 1. scores, sixteen positions at a time for all rows
        let seen = rows.iter().filter(|r| !r.visible.is_empty());
        let Some(from) = seen.clone().map(|r| r.visible.start).min() else { return };
        let to = seen.map(|r| r.visible.end).max().unwrap_or(0);
        for block in from / 16..to.div_ceil(16) {
            let keys: &[*const u8; 16] = at.keys[16 * block..].first_chunk().expect("a partition is whole blocks");
            let sees = |r: &Slot| r.visible.start < 16 * block + 16 && r.visible.end > 16 * block;
            let mut r = 0;
            while r < rows.len() {
                let out = scores.as_mut_ptr().add(r * PARTITION + 16 * block);
                let q = |i: usize| rows[r + i].q.as_ptr();
                let left = rows.len() - r;
                let n = if left >= 4 { 4 } else { left.min(2) };
                if rows[r..r + n].iter().any(sees) {
                    match n {
                        4 => scores_of_four::<V, T>([q(0), q(1), q(2), q(3)], keys, at.k_dim, out),
                        2 => scores_of_two::<V, T>([q(0), q(1)], keys, at.k_dim, out),
                        _ => scores_of_one::<V, T>(q(0), keys, at.k_dim, out),
                    }
                }
                r += n;
            }
        }
        // 2. weights
        for (row, scores) in rows.iter_mut().zip(scores.as_chunks_mut::<PARTITION>().0) {
            if !row.visible.is_empty() {
                (row.m, row.l) = weights::<V>(rule, row.visible.clone(), scores);
            }
        }
        // 3. weighted sums
        sums[..rows.len() * at.v_dim].fill(0.0);
        let mut r = 0;
        while r < rows.len() {
            let o = |i: usize| sums.as_ptr().add((r + i) * at.v_dim).cast_mut();
            let p = |i: usize| scores.as_ptr().add((r + i) * PARTITION);
            let left = rows.len() - r;
            let n = if left >= 4 && V::WIDE { 4 } else { left.min(2) };
            let tile = &rows[r..r + n];
            // Positions that all rows of the tile see are summed together; those before and after, row by row.
            let from = tile.iter().map(|r| r.visible.start).max().unwrap_or(0);
            let to = tile.iter().map(|r| r.visible.end).min().unwrap_or(0);
            let common = if from < to { from..to } else { 0..0 };
            if !common.is_empty() {
                for (i, row) in tile.iter().enumerate() {
                    sum_values::<V, T, 1>(
                        [o(i)],
                        [p(i)],
                        &at.values[row.visible.start..from],
                        row.visible.start,
                        at.v_dim,
                    );
                }
                let values = &at.values[common.clone()];
                match n {
                    4 => {
                        let (o, p) = ([o(0), o(1), o(2), o(3)], [p(0), p(1), p(2), p(3)]);
                        sum_values::<V, T, 4>(o, p, values, from, at.v_dim);
                    }
                    2 => sum_values::<V, T, 2>([o(0), o(1)], [p(0), p(1)], values, from, at.v_dim),
                    _ => sum_values::<V, T, 1>([o(0)], [p(0)], values, from, at.v_dim),
                }
            }
            for (i, row) in tile.iter().enumerate() {
                let from = if common.is_empty() { row.visible.start } else { to };
                sum_values::<V, T, 1>([o(i)], [p(i)], &at.values[from..row.visible.end], from, at.v_dim);
            }
            r += n;
        }
    }
}

/// The sixteen lanes of each of `Q` times `K` dot products.
#[inline(always)]
unsafe fn dots<V: Lanes, T: Element, const Q: usize, const K: usize>(
    q: [*const f32; Q],
    k: [*const u8; K],
    dim: usize,
) -> [[V; K]; Q] {
    let whole = dim / 16 * 16;
    // SAFETY: `dim` elements at each pointer; the caller vouches for the instruction set.
    unsafe {
        let mut acc = [[V::splat(0.0); K]; Q];
        for d in (0..whole).step_by(16) {
            let q: [V; Q] = std::array::from_fn(|i| V::load(q[i].add(d)));
            for j in 0..K {
                let k = T::load::<V>(k[j].add(d * T::SIZE));
                for i in 0..Q {
                    acc[i][j] = q[i].fma(k, acc[i][j]);
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

/// Sixteen scores of one row.
#[inline(always)]
unsafe fn scores_of_one<V: Lanes, T: Element>(q: *const f32, keys: &[*const u8; 16], dim: usize, out: *mut f32) {
    // SAFETY: as the caller vouches.
    unsafe {
        let acc = if V::WIDE {
            let [acc] = dots::<V, T, 1, 16>([q], *keys, dim);
            acc
        } else {
            let mut acc = [V::splat(0.0); 16];
            for (acc, keys) in acc.as_chunks_mut::<4>().0.iter_mut().zip(keys.as_chunks::<4>().0) {
                [*acc] = dots::<V, T, 1, 4>([q], *keys, dim);
            }
            acc
        };
        V::sum16(acc).store(out);
    }
}

/// Sixteen scores of each of two rows, whose scores lie [`PARTITION`] apart.
#[inline(always)]
unsafe fn scores_of_two<V: Lanes, T: Element>(q: [*const f32; 2], keys: &[*const u8; 16], dim: usize, out: *mut f32) {
    // SAFETY: as the caller vouches.
    unsafe {
        for (h, keys) in keys.as_chunks::<8>().0.iter().enumerate() {
            let mut acc = [[V::splat(0.0); 8]; 2];
            if V::WIDE {
                acc = dots::<V, T, 2, 8>(q, *keys, dim);
            } else {
                for (c, keys) in keys.as_chunks::<2>().0.iter().enumerate() {
                    let part = dots::<V, T, 2, 2>(q, *keys, dim);
                    for i in 0..2 {
                        [acc[i][2 * c], acc[i][2 * c + 1]] = part[i];
                    }
                }
            }
            let sums = V::sum16(std::array::from_fn(|i| acc[i / 8][i % 8])).to_array();
            for i in 0..2 {
                std::ptr::copy_nonoverlapping(sums.as_ptr().add(8 * i), out.add(i * PARTITION + 8 * h), 8);
            }
        }
    }
}

/// As [`scores_of_two`], of four rows.
#[inline(always)]
unsafe fn scores_of_four<V: Lanes, T: Element>(q: [*const f32; 4], keys: &[*const u8; 16], dim: usize, out: *mut f32) {
    // SAFETY: as the caller vouches.
    unsafe {
        for (c, keys) in keys.as_chunks::<4>().0.iter().enumerate() {
            let mut acc = [[V::splat(0.0); 4]; 4];
            if V::WIDE {
                acc = dots::<V, T, 4, 4>(q, *keys, dim);
            } else {
                for (a, b) in [(0, 0), (0, 2), (2, 0), (2, 2)] {
                    let part = dots::<V, T, 2, 2>([q[a], q[a + 1]], [keys[b], keys[b + 1]], dim);
                    for i in 0..2 {
                        [acc[a + i][b], acc[a + i][b + 1]] = part[i];
                    }
                }
            }
            let sums = V::sum16(std::array::from_fn(|i| acc[i / 4][i % 4])).to_array();
            for i in 0..4 {
                std::ptr::copy_nonoverlapping(sums.as_ptr().add(4 * i), out.add(i * PARTITION + 4 * c), 4);
            }
        }
    }
}

/// Turns the visible scores of a row into weights `exp(s - m)`; returns m and the lane sum of the weights.
#[inline(always)]
unsafe fn weights<V: Lanes>(rule: Rule, visible: Range<usize>, scores: &mut [f32; PARTITION]) -> (f32, f32) {
    let blocks = visible.start / 16 * 16..visible.end.next_multiple_of(16);
    let p = scores.as_mut_ptr();
    // SAFETY: whole registers inside the partition; the caller vouches for the instruction set.
    unsafe {
        for i in blocks.clone().step_by(16) {
            let mut s = V::load(p.add(i)).mul(V::splat(rule.scale));
            if let Some(cap) = rule.softcap {
                s = tanh(s.div(V::splat(cap))).mul(V::splat(cap));
            }
            s.store(p.add(i));
        }
        // The first and last register may hold what is not visible: first -inf, for the maximum, then 0, for the sum.
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
        let p = scores.as_ptr();
        let mut l = V::splat(0.0);
        for i in blocks.step_by(16) {
            l = l.add(V::load(p.add(i)));
        }
        (m, l.sum())
    }
}

/// `o[q] += p[q][from + i] * values[i]` in ascending i, for `Q` rows.
#[inline(always)]
unsafe fn sum_values<V: Lanes, T: Element, const Q: usize>(
    o: [*mut f32; Q],
    p: [*const f32; Q],
    values: &[*const u8],
    from: usize,
    dim: usize,
) {
    if values.is_empty() {
        return;
    }
    let mut c = 0;
    // SAFETY: as the caller vouches; columns from `c` on are inside `dim`.
    unsafe {
        let p = p.map(|p| p.add(from));
        // As many accumulators as there are registers for.
        if V::WIDE && Q <= 2 {
            while c + 128 <= dim {
                columns::<V, T, Q, 8>(o, p, values, c);
                c += 128;
            }
        }
        if V::WIDE || Q == 1 {
            while c + 64 <= dim {
                columns::<V, T, Q, 4>(o, p, values, c);
                c += 64;
            }
        }
        while c + 32 <= dim {
            columns::<V, T, Q, 2>(o, p, values, c);
            c += 32;
        }
        if c + 16 <= dim {
            columns::<V, T, Q, 1>(o, p, values, c);
            c += 16;
        }
        if c < dim {
            let n = dim - c;
            for q in 0..Q {
                let mut acc = V::load_first(o[q].add(c), n);
                for (i, v) in values.iter().enumerate() {
                    acc = V::splat(*p[q].add(i)).fma(T::load_first::<V>(v.add(c * T::SIZE), n), acc);
                }
                acc.store_first(o[q].add(c), n);
            }
        }
    }
}

/// [`sum_values`] of `C` registers of columns from `c` on.
#[inline(always)]
unsafe fn columns<V: Lanes, T: Element, const Q: usize, const C: usize>(
    o: [*mut f32; Q],
    p: [*const f32; Q],
    values: &[*const u8],
    c: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut acc: [[V; C]; Q] = std::array::from_fn(|q| std::array::from_fn(|j| V::load(o[q].add(c + 16 * j))));
        for (i, v) in values.iter().enumerate() {
            let v: [V; C] = std::array::from_fn(|j| T::load(v.add((c + 16 * j) * T::SIZE)));
            for q in 0..Q {
                let p = V::splat(*p[q].add(i));
                for j in 0..C {
                    acc[q][j] = p.fma(v[j], acc[q][j]);
                }
            }
        }
        for q in 0..Q {
            for j in 0..C {
                acc[q][j].store(o[q].add(c + 16 * j));
            }
        }
    }
}
