//! Activations as integers of 11 significant bits (`docs/numerics.md`).

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;

/// Columns that share an exponent.
pub const GROUP: usize = 64;
/// Columns of a sum.
pub const HALF: usize = 32;
/// Sizes from here on, 2^122, are treated as infinite.
const TOO_BIG: u32 = (122 + 127) << 23;
/// The least exponents of a token and of a group.
const LEAST_TOKEN: i32 = -100;
const LEAST_GROUP: i32 = -20;
/// A power of two that keeps sums of products with q * 2^-20 exact.
const SHIFT: i32 = 20;

/// 2^e of a normal number.
#[inline(always)]
fn power(e: i32) -> f32 {
    f32::from_bits(((e + 127) as u32) << 23)
}

/// The least e with `x < 2^e`, for the bits of a normal number that is not negative; -126 below.
#[inline(always)]
fn exponent(bits: u32) -> i32 {
    (bits >> 23) as i32 - 126
}

#[inline(always)]
fn greatest_size(x: &[f32]) -> u32 {
    x.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7fff_ffff))
}

/// `_V` only names the instruction set that this is compiled for.
#[allow(clippy::extra_unused_type_parameters)]
#[inline(always)]
unsafe fn encode_lanes<_V: Lanes>(
    x: &[f32],
    cols: usize,
    n: &mut [i16],
    steps: &mut [f32],
    sums: &mut [f32],
    scales: &mut [f32],
) {
    assert!(x.len() == scales.len() * cols, "whole tokens");
    let (groups, halves) = (cols.div_ceil(GROUP), cols / HALF);
    assert!(n.len() == x.len() && steps.len() == scales.len() * groups && sums.len() == scales.len() * halves);
    for (t, scale) in scales.iter_mut().enumerate() {
        let (x, n) = (&x[t * cols..][..cols], &mut n[t * cols..][..cols]);
        let (steps, sums) = (&mut steps[t * groups..][..groups], &mut sums[t * halves..][..halves]);
        let most = greatest_size(x);
        if most >= TOO_BIG {
            n.fill(0);
            steps.fill(0.0);
            sums.fill(0.0);
            *scale = f32::NAN;
            continue;
        }
        let token = exponent(most).max(LEAST_TOKEN);
        let inv = power(15 - token);
        *scale = power(token - 15 + SHIFT);
        for (g, (x, n)) in x.chunks(GROUP).zip(n.chunks_mut(GROUP)).enumerate() {
            let size = f32::from_bits(greatest_size(x)) * inv;
            let e = (exponent(size.to_bits()) - 14).max(LEAST_GROUP);
            let (up, least) = (power(-e), (e + 127) << 23);
            for (x, n) in x.iter().zip(n.iter_mut()) {
                let u = x * inv;
                // The distance of integers of 11 bits around u, at least 2^e, as the bits of a float; to it u is rounded by an addition.
                let distance = ((u.to_bits() & 0x7f80_0000) as i32 - (10 << 23)).max(least);
                let magic = f32::from_bits((distance + (23 << 23)) as u32 | 0x40_0000);
                *n = (((u + magic) - magic) * up) as i32 as i16;
            }
            steps[g] = power(e - SHIFT);
            for (h, n) in n.chunks_exact(HALF).enumerate() {
                sums[2 * g + h] = n.iter().map(|n| i32::from(*n)).sum::<i32>() as f32 * steps[g];
            }
        }
    }
}

simd! {
    /// Encodes tokens of `cols` columns. `x`, `n`: [tokens, cols]; `steps`: [tokens, cols / 64, rounded up], `sums` of whole halves: [tokens, cols / 32],
    /// `scales`: `[tokens]`, as [`Int11`](crate::input::Int11) has them. A token with a NaN, an infinity or a size of 2^122 or more has integers of 0 and a NaN as its scale.
    pub fn encode_int11(x: &[f32], cols: usize, n: &mut [i16], steps: &mut [f32], sums: &mut [f32], scales: &mut [f32]) = encode_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::test_random::bits;
    use fastrand::Rng;

    /// What an element becomes, from f64s and words of `docs/numerics.md`: the integer, and the exponents of its group and token.
    fn defined(x: &[f32], k: usize) -> (i16, i32, i32) {
        let exponent = |x: f64| if x == 0.0 { i32::MIN / 2 } else { x.log2().floor() as i32 + 1 };
        let most = |x: &[f32]| x.iter().fold(0f64, |m, x| m.max(x.abs() as f64));
        let token = exponent(most(x)).max(-100);
        let at = k / 64 * 64;
        let group = &x[at..(at + 64).min(x.len())];
        let tok = 2f64.powi(token - 15);
        let e = (exponent(most(group) / tok) - 14).max(-20);
        let v = x[k] as f64 / tok / 2f64.powi(e);
        let drop = 2f64.powi((exponent(v.abs()) - 11).max(0));
        (((v / drop).round_ties_even() * drop) as i16, e, token)
    }

    #[test]
    fn tokens_are_encoded_as_defined_everywhere() {
        let mut rng = Rng::with_seed(5);
        for case in 0..60 {
            let (tokens, cols) =
                (1 + rng.usize(..3), if case % 7 == 0 { 1 + rng.usize(..200) } else { 32 * (1 + rng.usize(..9)) });
            let x: Vec<f32> = (0..tokens * cols)
                .map(|i| {
                    let v = (2.0 * rng.f32() - 1.0) * 2f32.powi(-(rng.i32(0..1 + case % 40)));
                    match case % 6 {
                        0 => v * 2f32.powi(-110),
                        1 if i % 5 == 0 => 0.0,
                        2 => f32::from_bits(rng.u32(..) & 0x80ff_ffff),
                        // Halves of the last bit: ties.
                        3 => (rng.i32(-4096..4096) as f32) * 2f32.powi(rng.i32(-9..3)),
                        4 => v * 2f32.powi(121),
                        _ => v,
                    }
                })
                .collect();
            for isa in Isa::supported() {
                let (groups, halves) = (cols.div_ceil(64), cols / 32);
                let (mut n, mut steps) = (vec![0; x.len()], vec![0.0; tokens * groups]);
                let (mut sums, mut scales) = (vec![0.0; tokens * halves], vec![0.0; tokens]);
                encode_int11(isa, &x, cols, &mut n, &mut steps, &mut sums, &mut scales);
                for t in 0..tokens {
                    let x = &x[t * cols..][..cols];
                    for k in 0..cols {
                        let (wanted, e, token) = defined(x, k);
                        assert_eq!(n[t * cols + k], wanted, "{isa} case {case}: {}", x[k]);
                        assert_eq!(steps[t * groups + k / 64], 2f32.powi(e - 20));
                        assert_eq!(scales[t], 2f32.powi(token + 5));
                    }
                    for h in 0..halves {
                        let sum: i32 = n[t * cols + h * 32..][..32].iter().map(|n| *n as i32).sum();
                        assert_eq!(sums[t * halves + h], sum as f32 * steps[t * groups + h / 2]);
                    }
                }
            }
        }
    }

    #[test]
    fn a_token_that_is_not_finite_has_a_nan_and_no_other_has() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 2f32.powi(122), f32::MAX] {
            for isa in Isa::supported() {
                let mut x = vec![1.0; 192];
                x[100] = bad;
                let (mut n, mut steps, mut sums, mut scales) = ([7; 192], [7.0; 3], [7.0; 6], [0.0; 3]);
                encode_int11(isa, &x, 64, &mut n, &mut steps, &mut sums, &mut scales);
                assert!(scales[1].is_nan() && n[64..128] == [0; 64] && sums[2..4] == [0.0; 2]);
                assert_eq!(bits(&[scales[0], scales[2]]), bits(&[64.0; 2]));
                assert_eq!((n[0], n[191], steps[0], sums[5]), (8192, 8192, 2f32.powi(-19), 0.5));
            }
        }
    }
}
