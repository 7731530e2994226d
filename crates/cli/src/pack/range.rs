//! A scale and bias from a group's range and nothing else: s = (max - min) / (2^bits - 1), b = min, q = round((x - b) / s). What other programs that stream
//! experts requantise by, here to be measured beside better ways.

use sluice_kernels::affine;
use sluice_kernels::matmul::Float;

use super::search::put;

/// As `sluice_kernels::affine::quantize_row`, with the same form of output. The q are chosen before scale and bias are rounded to their stored type.
pub fn quantize_row(
    x: &[f32],
    bits: u8,
    group: u16,
    scale: Float,
    data: &mut [u8],
    scales: &mut [u8],
    biases: &mut [u8],
) {
    let top = ((1u16 << bits) - 1) as f32;
    let (size, packed) = (scale.size(), group as usize / 8 * bits as usize);
    let groups = x.chunks_exact(group as usize).zip(data.chunks_exact_mut(packed));
    for ((x, data), (s, b)) in groups.zip(scales.chunks_exact_mut(size).zip(biases.chunks_exact_mut(size))) {
        let (low, high) = x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &x| (l.min(x), h.max(x)));
        let step = (high - low) / top;
        let mut q = [0u8; 128];
        if step > 0.0 {
            for (q, x) in q.iter_mut().zip(x) {
                *q = ((x - low) / step).round_ties_even().clamp(0.0, top) as u8;
            }
        }
        affine::pack(bits, &q[..group as usize], data);
        put(scale, step, s);
        put(scale, low, b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_and_greatest_are_kept_and_the_rest_is_nearest() {
        let x: Vec<f32> = (0..64).map(|i| (i * 37 % 64) as f32 / 16.0 - 2.0).collect();
        let (mut data, mut s, mut b) = ([0; 16], [0; 4], [0; 4]);
        quantize_row(&x, 2, 64, Float::F32, &mut data, &mut s, &mut b);
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
        quantize_row(&[0.5; 64], 2, 64, Float::Bf16, &mut data, &mut s, &mut b);
        assert_eq!((data, s, b), ([0; 16], [0; 2], half::bf16::from_f32(0.5).to_le_bytes()));
    }
}
