//! A scale and bias from a group's range and nothing else: s = (max - min) / (2^bits - 1), b = min, q = round((x - b) / s). What other programs that stream
//! experts requantise by, kept as the baseline of measurements. The q are chosen before scale and bias are rounded to their stored type.

use std::array::from_fn;

use super::group::{LANES, Pair, ends, nearest, put};

/// Quantises one group, its columns in [`LANES`] lanes, to 0..=`top`. Writes its integers to `q`.
#[inline(always)]
pub fn group(x: &[[f32; LANES]], top: f32, q: &mut [u8]) -> Pair {
    let (low, high) = ends(x);
    let s = (high - low) / top;
    // All alike: the bias is their value.
    let of = |x: &[f32; LANES]| from_fn(|i| if s > 0.0 { nearest((x[i] - low) / s, top) } else { 0.0 });
    put(q, of, x);
    Pair { s, b: low }
}

#[cfg(test)]
mod tests {
    use crate::Isa;
    use crate::affine;
    use crate::format::Float;
    use crate::quantize::{Rounding, quantize};

    #[test]
    fn least_and_greatest_are_kept_and_the_rest_is_nearest() {
        let x: Vec<f32> = (0..64).map(|i| (i * 37 % 64) as f32 / 16.0 - 2.0).collect();
        let (mut data, mut s, mut b) = ([0; 16], [0; 4], [0; 4]);
        quantize(Isa::GENERIC, Rounding::Range, &x, 2, 64, Float::F32, &mut data, &mut s, &mut b);
        let (s, b) = (f32::from_le_bytes(s), f32::from_le_bytes(b));
        assert_eq!((s, b), (63.0 / 16.0 / 3.0, -2.0));
        let mut q = [0; 64];
        affine::unpack(2, &data, &mut q);
        for (x, &q) in x.iter().zip(&q) {
            assert!((x - (q as f32 * s + b)).abs() <= s / 2.0 * 1.0001, "{x} as {q}");
        }
        assert!(q.contains(&0) && q.contains(&3));
    }

    #[test]
    fn a_group_of_one_value_is_its_bias() {
        let (mut data, mut s, mut b) = ([1; 16], [1; 2], [1; 2]);
        quantize(Isa::GENERIC, Rounding::Range, &[0.5; 64], 2, 64, Float::Bf16, &mut data, &mut s, &mut b);
        assert_eq!((data, s, b), ([0; 16], [0; 2], half::bf16::from_f32(0.5).to_le_bytes()));
    }
}
