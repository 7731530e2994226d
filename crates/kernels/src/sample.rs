//! The weights that a token is drawn by: exponentials in whole numbers, so that their sums are exact in any order, the same on every machine.

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::isa::Isa;

/// The weight of the most likely token. A token lighter than 1e-12 of it is never drawn, and 2^24 of them do not overflow.
pub const ONE: f64 = (1u64 << 40) as f64;

/// exp(x) in units of 1 / `ONE`, for x of 0 or less. Additions and multiplications only, so that it is the same on every machine; the
/// relative error is below 1e-13.
#[inline(always)]
pub fn weight(x: f64) -> u64 {
    /// Adding this to a small number rounds it to a whole one.
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    const LN2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    // Below -40 nothing is left in these units, also of -inf.
    let x = if x > -40.0 { x } else { -40.0 };
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW; // |r| <= ln(2) / 2
    // Taylor's series up to r^12 / 12!
    let mut sum = 1.0 / 479_001_600.0;
    for term in [
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        sum = sum * r + term;
    }
    // 2^n * ONE, made of bits; n is at least -58.
    let power = f64::from_bits(((shifted.to_bits() as i64 - ROUND.to_bits() as i64 + 1023 + 40) as u64) << 52);
    // The whole part: behind 2^52 a number has no other bits.
    const WHOLE: f64 = (1u64 << 52) as f64;
    (sum * power + WHOLE).to_bits() - WHOLE.to_bits()
}

simd! {
    /// The highest of `logits`, -inf where there is none; and whether one of them is no number.
    pub fn highest(logits: &[f32]) -> (f32, bool) = highest_lanes
}

simd! {
    /// The sum of the weights of `(logit - highest) * scale`, at most 2^24 of them.
    pub fn total(logits: &[f32], highest: f32, scale: f64) -> u64 = total_lanes
}

/// `out[i]` = the weight of `(logits[i] - highest) * scale`.
///
/// # Panics
/// When the lengths differ.
pub fn weights(isa: Isa, logits: &[f32], highest: f32, scale: f64, out: &mut [u64]) {
    assert_eq!(logits.len(), out.len());
    weights_checked(isa, logits, highest, scale, out);
}

simd! { fn weights_checked(logits: &[f32], highest: f32, scale: f64, out: &mut [u64]) = weights_lanes }

// Plain loops over groups, no lanes by name, which the compiler turns into the instructions of the shell around them. No iterator adapters: their closures may be compiled without.

/// Logits that are looked at side by side.
const GROUP: usize = 16;

/// # Safety
/// The instruction set of `V` is available.
#[allow(clippy::needless_range_loop, clippy::extra_unused_type_parameters)]
#[inline(always)]
unsafe fn highest_lanes<V: Lanes>(logits: &[f32]) -> (f32, bool) {
    let (groups, tail) = logits.as_chunks::<GROUP>();
    let mut highest = [f32::NEG_INFINITY; GROUP];
    let mut bad = [0u32; GROUP];
    for group in groups {
        for i in 0..GROUP {
            highest[i] = if group[i] > highest[i] { group[i] } else { highest[i] };
            bad[i] |= u32::from(group[i].is_nan());
        }
    }
    for i in 0..tail.len() {
        highest[0] = if tail[i] > highest[0] { tail[i] } else { highest[0] };
        bad[0] |= u32::from(tail[i].is_nan());
    }
    let (mut top, mut any) = (highest[0], bad[0]);
    for i in 1..GROUP {
        top = if highest[i] > top { highest[i] } else { top };
        any |= bad[i];
    }
    (top, any != 0)
}

/// # Safety
/// As for [`highest_lanes`].
#[allow(clippy::needless_range_loop, clippy::extra_unused_type_parameters)]
#[inline(always)]
unsafe fn total_lanes<V: Lanes>(logits: &[f32], highest: f32, scale: f64) -> u64 {
    let (groups, tail) = logits.as_chunks::<GROUP>();
    let mut sums = [0u64; GROUP];
    for group in groups {
        for i in 0..GROUP {
            sums[i] += weight((f64::from(group[i]) - f64::from(highest)) * scale);
        }
    }
    let mut sum = 0;
    for i in 0..GROUP {
        sum += sums[i];
    }
    for i in 0..tail.len() {
        sum += weight((f64::from(tail[i]) - f64::from(highest)) * scale);
    }
    sum
}

/// # Safety
/// As for [`highest_lanes`].
#[allow(clippy::needless_range_loop, clippy::extra_unused_type_parameters)]
#[inline(always)]
unsafe fn weights_lanes<V: Lanes>(logits: &[f32], highest: f32, scale: f64, out: &mut [u64]) {
    for i in 0..out.len() {
        out[i] = weight((f64::from(logits[i]) - f64::from(highest)) * scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_random::random;

    #[test]
    fn weights_are_exponentials() {
        assert_eq!(weight(0.0), 1 << 40);
        assert_eq!((weight(f64::NEG_INFINITY), weight(-1e300)), (0, 0));
        for i in 0..100_000 {
            let x = -f64::from(i) * 3e-4;
            let exact = libm::exp(x) * ONE;
            assert!((weight(x) as f64 - exact).abs() <= 1.0 + exact * 1e-13, "exp({x}): {} and {exact}", weight(x));
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_numbers() {
        for n in [2, 15, 16, 17, 40, 1000] {
            let mut logits: Vec<f32> = random(n, 5).iter().map(|x| 10.0 * x).collect();
            logits[n / 2] = f32::NEG_INFINITY;
            let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let expected: Vec<u64> =
                logits.iter().map(|x| weight((f64::from(*x) - f64::from(highest)) * 0.7)).collect();
            for isa in Isa::supported() {
                assert_eq!(super::highest(isa, &logits), (highest, false));
                assert_eq!(total(isa, &logits, highest, 0.7), expected.iter().sum::<u64>());
                let mut out = vec![0; n];
                weights(isa, &logits, highest, 0.7, &mut out);
                assert_eq!(out, expected);
                for at in [0, n / 3, n - 1] {
                    let mut bad = logits.clone();
                    bad[at] = f32::NAN;
                    assert!(super::highest(isa, &bad).1, "{n} {at}");
                }
            }
        }
    }
}
