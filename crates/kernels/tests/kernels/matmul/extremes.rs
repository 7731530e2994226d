//! Values that are tiny, huge or not finite.

use fastrand::Rng;
use proptest::prelude::*;
use sluice_kernels::Isa;
use sluice_kernels::activations::{encode_bf16, encode_int8};
use sluice_kernels::format::{ActivationFormat, WeightFormat};
use sluice_kernels::matmul::matmul;
use sluice_kernels::scratch::Scratch;

use super::tokens::{Integers, Tokens};
use super::weights::{Weights, columns, format, mode, unit};
use crate::guarded::Guarded;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Scales, biases, weights and activations that are tiny, huge or not finite: same values everywhere (NaN compares by being NaN).
    #[test]
    fn extreme_values_give_the_same_everywhere(format in format(), mode in mode(), n in 1usize..50, seed in 1u64..) {
        let mut rng = Rng::with_seed(seed);
        let (rows, cols) = (5, columns(format, &mut rng));
        let mut weights = Weights::random(format, rows, cols, &mut rng);
        // Blocks are random bytes, units and all.
        if let WeightFormat::Blocks(_) = format {
            let mut any = weights.planes[0].bytes().to_vec();
            rng.fill(&mut any);
            weights.planes[0] = Guarded::new(&any);
        }
        let wild = |rng: &mut Rng| match rng.usize(..12) {
            0 => f32::from_bits(rng.u64(..) as u32),
            1 => f32::INFINITY,
            2 => f32::from_bits(rng.u64(..) as u32 & 0x80ff_ffff),
            3 => f32::from_bits(0x0080_0000 | rng.u64(..) as u32 & 0x8000_0003),
            _ => unit(rng) * 2f32.powi(-60 - rng.usize(..10) as i32),
        };
        let mut bytes = |old: &Guarded| {
            let mut bytes = old.bytes().to_vec();
            for four in bytes.chunks_exact_mut(4) {
                four.copy_from_slice(&wild(&mut rng).to_le_bytes());
            }
            Guarded::new(&bytes)
        };
        // All that are floats; the packed integers of formats in groups are not.
        let first = usize::from(!matches!(format, WeightFormat::Float(_) | WeightFormat::Fp8(_)));
        for part in &mut weights.planes[first..] {
            *part = bytes(part);
        }
        let values: Vec<f32> = (0..n * cols).map(|_| wild(&mut rng)).collect();
        let (w, encoding) = (weights.matrix(), format.activation_format(mode));
        let tokens: Vec<u32> = (0..n as u32).collect();
        let groups = if encoding == ActivationFormat::Int8 { values.len() / 32 } else { 0 };
        let mut first: Option<(Tokens, Vec<u32>)> = None;
        for isa in Isa::supported() {
            let mut x = Tokens {
                bf16: vec![0; values.len()],
                q: vec![0; groups * 32],
                scales: vec![0.0; groups],
                sums: vec![0.0; groups],
                int11: Integers::of(isa, &values, cols),
                f32: values.clone(),
            };
            encode_bf16(isa, &values, &mut x.bf16);
            encode_int8(isa, &values[..groups * 32], &mut x.q, &mut x.scales, &mut x.sums);
            let mut tile = vec![0f32; rows * n];
            matmul(isa, &w, 0..rows, x.input(encoding), &tokens, &mut tile, &mut Scratch::default());
            let bits: Vec<u32> = tile.iter().map(|y| if y.is_nan() { !0 } else { y.to_bits() }).collect();
            let numbers = |x: &[f32]| -> Vec<u32> { x.iter().map(|x| x.to_bits()).collect() };
            match &first {
                None => first = Some((x, bits)),
                Some((oracle, wanted)) => {
                    prop_assert_eq!(&x.bf16, &oracle.bf16);
                    prop_assert_eq!(&x.q, &oracle.q);
                    prop_assert_eq!(numbers(&x.scales), numbers(&oracle.scales));
                    prop_assert_eq!(numbers(&x.sums), numbers(&oracle.sums));
                    prop_assert_eq!(&x.int11.n, &oracle.int11.n);
                    prop_assert_eq!(numbers(&x.int11.steps), numbers(&oracle.int11.steps));
                    prop_assert_eq!(numbers(&x.int11.sums), numbers(&oracle.int11.sums));
                    prop_assert_eq!(numbers(&x.int11.scales), numbers(&oracle.int11.scales));
                    prop_assert_eq!(&bits, wanted, "{} {:?} {:?}", isa, format, encoding);
                }
            }
        }
    }
}
