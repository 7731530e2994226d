//! Sparse indexers (DeepSeek-V3.2): how much each cached position matters to a token, by small keys of their own, and which positions are the best.
//!
//! Sums are those of attention's scores: a lane dot for each head. Heads are added in ascending number, so that positions, tokens and threads may be split at will.

// Iterators come with closures, which may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::kv::{Bf16, F16, F32, Int8, KvElement, KvType, KvView};
use super::paged::{PARTITION, Paged};
use super::partition::{QueryRow, score_tile, tile_rows};
use crate::Isa;
use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;

/// Heads of a tile.
const HEADS: usize = 4;

#[inline(always)]
unsafe fn scores_lanes<V: Lanes>(at: &Paged, scale: f32, q: &[f32], weights: &[f32], out: &mut [f32]) {
    assert!(q.len() == weights.len() * at.k_dim && out.len() == PARTITION, "queries of {} heads", weights.len());
    // SAFETY: checked above and by `Paged::new`; the shell has the instruction set.
    unsafe {
        match at.kv_type {
            KvType::F32 => typed::<V, F32>(at, scale, q, weights, out),
            KvType::Bf16 => typed::<V, Bf16>(at, scale, q, weights, out),
            KvType::F16 => typed::<V, F16>(at, scale, q, weights, out),
            KvType::Int8 => typed::<V, Int8>(at, scale, q, weights, out),
            KvType::Int16 => unreachable!("keys of an indexer have no sixteen-bit integers"),
        }
    }
}

#[inline(always)]
unsafe fn typed<V: Lanes, T: KvElement>(at: &Paged, scale: f32, q: &[f32], weights: &[f32], out: &mut [f32]) {
    let (dim, heads) = (at.k_dim, weights.len());
    let nothing = at.keys[0];
    for block in at.seen.start / 16..at.seen.end.div_ceil(16) {
        let keys: &[*const u8; 16] = at.keys[16 * block..].first_chunk().expect("a partition is whole blocks");
        // SAFETY: as the caller vouches; a tile writes sixteen dot products of each of its rows, `PARTITION` apart.
        unsafe {
            let key_scales = match &at.scales {
                Some(scales) => V::load(scales.k.as_ptr().add(16 * block)),
                None => V::splat(1.0),
            };
            let mut sum = V::splat(0.0);
            let mut h = 0;
            while h < heads {
                let n = tile_rows(heads - h, HEADS);
                let mut rows = [const { QueryRow::EMPTY }; HEADS];
                for i in 0..n {
                    rows[i].q = &q[(h + i) * dim..(h + i + 1) * dim];
                }
                let mut dots = [0f32; HEADS * PARTITION];
                let to = dots.as_mut_ptr();
                match n {
                    4 => score_tile::<V, T, 4, 4, false>(&rows, keys, dim, to, nothing),
                    2 => score_tile::<V, T, 2, 8, false>(&rows, keys, dim, to, nothing),
                    _ => score_tile::<V, T, 1, 16, false>(&rows, keys, dim, to, nothing),
                }
                for i in 0..n {
                    let mut s = V::load(dots.as_ptr().add(i * PARTITION));
                    if at.scales.is_some() {
                        s = s.mul(key_scales);
                    }
                    // Zero comes first so that a NaN passes.
                    s = V::splat(0.0).max(s.mul(V::splat(scale)));
                    sum = V::splat(weights[h + i]).fma(s, sum);
                }
                h += n;
            }
            sum.store(out.as_mut_ptr().add(16 * block));
        }
    }
}

simd! {
    /// Those of the positions of a partition that are seen: `out[i] = sum over heads of weights[h] * max(scale * dot(q[h], key i), 0)`. `q`: `[heads, k_dim]`.
    fn partition_scores(at: &Paged, scale: f32, q: &[f32], weights: &[f32], out: &mut [f32]) = scores_lanes
}

/// The scores of `positions` for one token. `q`: `[heads, k_dim]`; `weights`: `[heads]`; `out`: one for each position. The first is at the start of a partition.
///
/// # Panics
/// When a position is not in the table, and with keys of sixteen-bit integers.
pub fn index_scores(
    isa: Isa,
    kv: &KvView,
    table: &[u32],
    (q, weights, scale): (&[f32], &[f32], f32),
    positions: Range<usize>,
    out: &mut [f32],
) {
    assert!(positions.start.is_multiple_of(PARTITION) && out.len() == positions.len(), "scores of {positions:?}");
    let mut all = [0f32; PARTITION];
    for base in positions.clone().step_by(PARTITION) {
        let n = PARTITION.min(positions.end - base);
        let at = Paged::new(kv, table, 0, base, 0..n);
        partition_scores(isa, &at, scale, q, weights, &mut all);
        out[base - positions.start..][..n].copy_from_slice(&all[..n]);
    }
}

/// The positions of the `out.len()` best of `scores`, ascending; of equal ones the lower positions. What is no number comes last. `room`: at least one for each score.
///
/// # Panics
/// With fewer scores than are wanted.
pub fn best_positions(scores: &[f32], room: &mut [u64], out: &mut [u32]) {
    assert!(out.len() <= scores.len(), "{} of {} positions", out.len(), scores.len());
    // The better, the smaller; and then the earlier.
    let keys = &mut room[..scores.len()];
    for (position, (key, score)) in keys.iter_mut().zip(scores).enumerate() {
        let bits = score.to_bits();
        let ascending = if score.is_nan() { 0 } else { bits ^ ((bits as i32 >> 31) as u32 | 0x8000_0000) };
        *key = u64::from(!ascending) << 32 | position as u64;
    }
    if let Some(last) = out.len().checked_sub(1) {
        keys.select_nth_unstable(last);
    }
    for (to, key) in out.iter_mut().zip(keys) {
        *to = *key as u32;
    }
    out.sort_unstable();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_are_chosen_and_the_earlier_of_equals() {
        let scores = [1.0, f32::NAN, -3.0, 2.0, 1.0, 0.0, -0.0, 1.0, f32::INFINITY];
        let best = |n: usize| {
            let mut out = vec![0; n];
            best_positions(&scores, &mut [0; 9], &mut out);
            out
        };
        assert_eq!(best(1), [8]);
        assert_eq!(best(3), [0, 3, 8]);
        assert_eq!(best(4), [0, 3, 4, 8]);
        assert_eq!(best(6), [0, 3, 4, 5, 7, 8]);
        assert_eq!(best(8), [0, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(best(9), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(best(0), [0; 0]);
    }
}
