//! Rotary position embeddings: the angles of a position, and the rotation of a head, with its norm where it has one.
//!
//! Heads are rotated in halves (`rotate_half` of transformers): element i of the first half pairs with element i of the second. Interleaved
//! multimodal sections are the same for text, whose three position numbers are equal.

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::norm::rms_in_place_lanes;

/// How fast each pair of elements turns (Su et al. 2021).
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryFrequencies {
    /// Radians per position, `[rotary_dim / 2]`.
    pub inv_freq: Vec<f32>,
    /// Cosines and sines are multiplied by it (YaRN's `mscale`, Peng et al. 2023); 1 elsewhere.
    pub scaling: f32,
}

impl RotaryFrequencies {
    /// The cosines and sines of `position`, each `[inv_freq.len()]`: the angle is an f32 product as in the reference, its sine and
    /// cosine come from `libm` in f64 and are rounded, then scaled.
    pub fn angles(&self, position: u32, cos: &mut [f32], sin: &mut [f32]) {
        let n = self.inv_freq.len();
        assert!(cos.len() == n && sin.len() == n, "{n} frequencies, {} cosines, {} sines", cos.len(), sin.len());
        for (i, f) in self.inv_freq.iter().enumerate() {
            let (s, c) = libm::sincos((position as f32 * f) as f64);
            cos[i] = c as f32 * self.scaling;
            sin[i] = s as f32 * self.scaling;
        }
    }
}

#[inline(always)]
unsafe fn rotate_lanes<V: Lanes>(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let n = cos.len();
    assert!(sin.len() == n && 2 * n <= head.len(), "{n} cosines, {} sines, head of {}", sin.len(), head.len());
    let (first, second) = (head.as_mut_ptr(), head[n..].as_mut_ptr());
    let whole = n / 16 * 16;
    // SAFETY: both halves, `cos` and `sin` have `n` elements; the shell has the instruction set.
    unsafe {
        for i in (0..whole).step_by(16) {
            let (x, y) = (V::load(first.add(i)), V::load(second.add(i)));
            let (c, s) = (V::load(cos.as_ptr().add(i)), V::load(sin.as_ptr().add(i)));
            y.fma(V::splat(0.0).sub(s), x.mul(c)).store(first.add(i));
            x.fma(s, y.mul(c)).store(second.add(i));
        }
        let (i, left) = (whole, n - whole);
        if left > 0 {
            let (x, y) = (V::load_first(first.add(i), left), V::load_first(second.add(i), left));
            let (c, s) = (V::load_first(cos.as_ptr().add(i), left), V::load_first(sin.as_ptr().add(i), left));
            y.fma(V::splat(0.0).sub(s), x.mul(c)).store_first(first.add(i), left);
            x.fma(s, y.mul(c)).store_first(second.add(i), left);
        }
    }
}

// No iterator adapters: their closures may be compiled without the instruction set of the kernel around them. Pairs are taken one by one, and the compiler makes registers of them.
#[allow(clippy::needless_range_loop, clippy::extra_unused_type_parameters)]
#[inline(always)]
unsafe fn rotate_pairs_lanes<V: Lanes>(head: &mut [f32], cos: &[f32], sin: &[f32], back: bool) {
    let n = cos.len();
    assert!(sin.len() == n && 2 * n <= head.len(), "{n} cosines, {} sines, head of {}", sin.len(), head.len());
    let from = head.len() - 2 * n;
    for i in 0..n {
        let (x, y) = (head[from + 2 * i], head[from + 2 * i + 1]);
        let sin = if back { 0.0 - sin[i] } else { sin[i] };
        head[from + 2 * i] = y.mul_add(0.0 - sin, x * cos[i]);
        head[from + 2 * i + 1] = x.mul_add(sin, y * cos[i]);
    }
}

#[inline(always)]
unsafe fn norm_rotate_lanes<V: Lanes>(head: &mut [f32], w: Option<&[f32]>, eps: f32, cos: &[f32], sin: &[f32]) {
    // SAFETY: both check their lengths; the shell has the instruction set.
    unsafe {
        rms_in_place_lanes::<V>(head, w, eps);
        rotate_lanes::<V>(head, cos, sin);
    }
}

simd! {
    /// Rotates the first `2 * cos.len()` elements of `head` in place and leaves the rest: with x of the first half and y of the second,
    /// `x' = fma(y, -sin, x * cos)` and `y' = fma(x, sin, y * cos)`.
    pub fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) = rotate_lanes
}

simd! {
    /// Rotates the last `2 * cos.len()` elements of `head` where they are: with x and y beside each other, `x' = fma(y, -sin, x * cos)` and `y' = fma(x, sin, y * cos)`.
    /// `back`: with `-sin` in the place of sin.
    pub fn rotate_pairs(head: &mut [f32], cos: &[f32], sin: &[f32], back: bool) = rotate_pairs_lanes
}

simd! {
    /// RMS norm of the whole head (`w` of `None`: all ones) and then [`rotate`], in place.
    pub fn norm_rotate(head: &mut [f32], w: Option<&[f32]>, eps: f32, cos: &[f32], sin: &[f32]) = norm_rotate_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::norm::rms_norm;
    use crate::test_random::{assert_close, bits, random};
    use proptest::prelude::*;

    #[test]
    fn what_is_turned_back_is_where_it_was() {
        let (mut head, angles) = (random(20, 1), RotaryFrequencies { inv_freq: vec![1.0, 0.3, 0.01], scaling: 1.0 });
        let (before, mut cos, mut sin) = (head.clone(), [0.0; 3], [0.0; 3]);
        angles.angles(7, &mut cos, &mut sin);
        rotate_pairs(Isa::GENERIC, &mut head, &cos, &sin, false);
        assert_eq!(head[..14], before[..14]);
        assert!((head[14] - (before[14] * cos[0] - before[15] * sin[0])).abs() < 1e-6 && head[19] != before[19]);
        rotate_pairs(Isa::GENERIC, &mut head, &cos, &sin, true);
        assert!(head.iter().zip(&before).all(|(a, b)| (a - b).abs() < 1e-5));
    }

    proptest! {
        #[test]
        fn rotation_has_the_same_bits_in_every_instruction_set(n in 1usize..40, rest in 0usize..40, seed in any::<u64>()) {
            let head = random(2 * n + rest, seed);
            let w = random(2 * n + rest, seed + 1);
            let (cos, sin) = (random(n, seed + 2), random(n, seed + 3));
            let mut oracle = head.clone();
            rotate(Isa::GENERIC, &mut oracle, &cos, &sin);
            prop_assert_eq!(&oracle[2 * n..], &head[2 * n..]);
            let mut normed = vec![0.0; head.len()];
            rms_norm(Isa::GENERIC, &head, &w, 1e-6, &mut normed);
            rotate(Isa::GENERIC, &mut normed, &cos, &sin);
            for isa in Isa::supported() {
                let (mut got, mut fused) = (head.clone(), head.clone());
                rotate(isa, &mut got, &cos, &sin);
                prop_assert_eq!(bits(&got), bits(&oracle));
                norm_rotate(isa, &mut fused, Some(&w), 1e-6, &cos, &sin);
                prop_assert_eq!(bits(&fused), bits(&normed));
            }
        }
    }

    #[test]
    fn a_rotation_turns_each_pair_by_its_angle() {
        let inv_freq: Vec<f32> = (0..32).map(|i| 1e7f64.powf(-i as f64 / 32.0) as f32).collect();
        let table = RotaryFrequencies { inv_freq: inv_freq.clone(), scaling: 1.25 };
        let isa = *Isa::supported().last().unwrap();
        for position in [0, 1, 77, 131_071] {
            let (mut cos, mut sin) = (vec![0.0; 32], vec![0.0; 32]);
            table.angles(position, &mut cos, &mut sin);
            let head = random(80, 5);
            let mut got = head.clone();
            rotate(isa, &mut got, &cos, &sin);
            let mut exact: Vec<f64> = head.iter().map(|x| *x as f64).collect();
            for i in 0..32 {
                let (s, c) = ((position as f32 * inv_freq[i]) as f64).sin_cos();
                let (x, y) = (head[i] as f64, head[32 + i] as f64);
                exact[i] = 1.25 * (x * c - y * s);
                exact[32 + i] = 1.25 * (y * c + x * s);
            }
            assert_close(&got, &exact, 3e-7);
        }
    }
}
