//! From dot products to weights as integers.

use std::ops::Range;

use super::products::convert;
use super::room::Batch;
use crate::attention::paged::{KvScales, PARTITION};
use crate::attention::partition::{Rule, weights};
use crate::dispatch::simd;
use crate::instructions::bytes::Bytes;

#[inline(always)]
unsafe fn weigh_lanes<V: Bytes>(planes: usize, scales: &KvScales, rule: Rule, batch: &mut Batch, raw: bool) {
    let scores = batch.scores.as_chunks_mut::<PARTITION>().0;
    for (i, (row, scores)) in batch.rows.iter_mut().zip(scores).enumerate() {
        if row.visible.is_empty() {
            continue;
        }
        let (scale, more) = (row.q[0], row.q[1].to_bits() as i32);
        let bytes = &mut batch.bytes[i * planes * PARTITION..];
        // SAFETY: whole registers; the shell has the instruction set.
        unsafe {
            if raw {
                convert::<V>(scores, more, V::splat(1.0));
            }
            let rule = Rule { scale: rule.scale * scale, ..rule };
            (row.m, row.l) = weights::<V>(rule, Some(scales), row.visible.clone(), scores);
            batch.scales[i] = match planes {
                1 => quantise_weights::<V, 1>(row.visible.clone(), scores, bytes),
                _ => 256.0 * quantise_weights::<V, 2>(row.visible.clone(), scores, bytes),
            };
        }
    }
}

simd! {
    /// From dot products (integers still, and without what is known from the query, where they are `raw`) to weights as integers.
    pub(super) fn weigh(planes: usize, scales: &KvScales, rule: Rule, batch: &mut Batch, raw: bool) = weigh_lanes
}

/// A row's visible weights as integers of `P` bytes, zeros around them; returns their scale. A weight that is not finite stays visible, as a scale of NaN.
#[inline(always)]
unsafe fn quantise_weights<V: Bytes, const P: usize>(
    visible: Range<usize>,
    weights: &mut [f32; PARTITION],
    bytes: &mut [u8],
) -> f32 {
    // The greatest weight's integer.
    let top = if P == 1 { 255.0 } else { 65535.0 };
    let blocks = visible.start / 16 * 16..visible.end.next_multiple_of(16);
    // Positions that are not visible may have scales that are not finite.
    weights[blocks.start..visible.start].fill(0.0);
    weights[visible.end..blocks.end].fill(0.0);
    for plane in bytes[..P * PARTITION].chunks_exact_mut(PARTITION) {
        plane[..blocks.start].fill(0);
        plane[blocks.end..].fill(0);
    }
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
            bytes[..P * PARTITION].fill(0);
            return f32::NAN;
        }
        let a = greatest.max_lane();
        let inv = top / a;
        let inv = V::splat(if inv.is_finite() { inv } else { 0.0 });
        for i in blocks.step_by(16) {
            let (n, to) = (V::load(w.add(i)).mul(inv), bytes.as_mut_ptr().add(i));
            if P == 1 {
                n.store_rounded_u8(to);
            } else {
                n.store_rounded_u16(to, to.add(PARTITION));
            }
        }
        a / top
    }
}
