//! Rows of weights as floats.

use fastrand::Rng;
use proptest::prelude::*;
use sluice_kernels::Isa;
use sluice_kernels::affine::dequantize_row;
use sluice_kernels::format::{Fp8Scale, WeightFormat};

use super::definition::{e4m3, grouped_row};
use super::weights::{Weights, columns, format, group_of};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn rows_dequantise_alike_everywhere(format in format(), seed in 1u64..) {
        let mut rng = Rng::with_seed(seed);
        let cols = columns(format, &mut rng);
        let weights = Weights::random(format, 3, cols, &mut rng);
                let mut wanted = vec![0f32; cols];
        match format {
            WeightFormat::Float(float) => wanted.iter_mut().enumerate().for_each(|(i, x)| *x = float.read(weights.row(0, 2), i)),
            WeightFormat::Affine { group, .. } => {
                let (q, scale_and_bias) = grouped_row(&weights, 2);
                for (i, x) in wanted.iter_mut().enumerate() {
                    let (s, b) = scale_and_bias[i / group as usize];
                    *x = (q[i] as f32).mul_add(s, b);
                }
            }
            WeightFormat::E2m1(_) => {
                let (q, scale_and_bias) = grouped_row(&weights, 2);
                let group = group_of(format);
                for (i, x) in wanted.iter_mut().enumerate() {
                    *x = (q[i] as f32 - 12.0) * scale_and_bias[i / group].0;
                }
            }
            WeightFormat::Fp8(fp8) => {
                let scales = weights.row(1, 2);
                for (i, x) in wanted.iter_mut().enumerate() {
                    let g = if fp8.group == 0 { 0 } else { i / usize::from(fp8.group) };
                    let scale = match fp8.scale {
                        Fp8Scale::Float(float) => float.read(scales, g),
                        Fp8Scale::Power => 2f32.powi(i32::from(scales[g]) - 127),
                    };
                    *x = e4m3(weights.row(0, 2)[i]) * scale;
                }
            }
            WeightFormat::Blocks(blocks) => {
                let (q, scale_and_bias) = grouped_row(&weights, 2);
                let (zero, biased) = blocks.zero();
                for (i, x) in wanted.iter_mut().enumerate() {
                    let (s, b) = scale_and_bias[i / blocks.group()];
                    *x = if biased { (q[i] as f32).mul_add(s, b) } else { (q[i] as f32 - zero) * s };
                }
            }
        }
        for isa in Isa::supported() {
            let mut got = vec![f32::NAN; cols];
            dequantize_row(isa, &weights.matrix(), 2, &mut got);
            prop_assert_eq!(&got, &wanted);
        }
    }
}
