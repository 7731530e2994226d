//! Values that are tiny, huge or not finite.

use fastrand::Rng;
use proptest::prelude::*;
use sluice_kernels::Isa;
use sluice_kernels::activations::{encode_bf16, encode_int8};
use sluice_kernels::format::{ActivationFormat, Activations, BlockFormat, Float, WeightFormat};
use sluice_kernels::input::Input;
use sluice_kernels::matmul::{matmul, scratch_bytes};
use sluice_kernels::scratch::Scratch;

use super::definition::defined;
use super::tokens::{Integers, Tokens};
use super::weights::{Weights, columns, format, mode, small_floats, unit};
use crate::guarded::Guarded;

/// Two steps of 32.
const COLS: usize = 64;

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

/// A product of two bf16, given by their bits, that stand in a column between zeros: its bits on every instruction set.
fn one_product(w: u16, x: u16, column: usize) -> Vec<u32> {
    let mut weights = Weights::random(WeightFormat::Float(Float::Bf16), 1, COLS, &mut Rng::with_seed(1));
    let (mut bytes, mut token) = (vec![0; 2 * COLS], vec![0; COLS]);
    bytes[2 * column..][..2].copy_from_slice(&w.to_le_bytes());
    token[column] = x;
    weights.planes[0] = Guarded::new(&bytes);
    let on = |isa| {
        let mut y = [0f32];
        matmul(isa, &weights.matrix(), 0..1, Input::Bf16(&token), &[0], &mut y, &mut Scratch::default());
        y[0].to_bits()
    };
    Isa::supported().into_iter().map(on).collect()
}

/// Around the smallest normal number: exact or rounded, used once more or at once the last of its lane.
#[test]
fn tiny_results_of_normal_bf16_are_the_same_everywhere() {
    // 1.fraction times a power of two.
    let number = |e: i32, fraction: u16| ((e + 127) as u16) << 7 | fraction;
    for exponent in -154..=-120 {
        for fraction in [0, 1, 127] {
            for column in [0, 1, 30, 63] {
                let all = one_product(number(exponent + 60, fraction), number(-60, fraction), column);
                assert!(all.iter().all(|&y| y == all[0]), "2^{exponent}, {fraction}, column {column}: {all:x?}");
            }
        }
    }
}

/// Bf16 below the normal numbers count as zero, whatever they are multiplied with.
#[test]
fn denormal_bf16_count_as_zero() {
    let large = 0x7200;
    for denormal in [1, 0x40, 0x7f, 0x8001, 0x807f] {
        for column in [0, 1, 30, 63] {
            for all in [one_product(denormal, large, column), one_product(large, denormal, column)] {
                assert!(all.iter().all(|y| y << 1 == 0), "{denormal:x}, column {column}: {all:x?}");
            }
        }
    }
}

/// The greatest sums of integers of 11 bits with weights in groups: all integers of a row are the least or the greatest of its type, or any, and all of a token are
/// 2^14 or its negative, or zeros, or no number.
#[test]
fn the_greatest_sums_of_11_bits_follow_the_definition() {
    let mut rng = Rng::with_seed(21);
    let e2m1 = small_floats().into_iter().filter(|format| matches!(format, WeightFormat::E2m1(_)));
    let affine = |bits| [32, 64, 128].map(|group| WeightFormat::Affine { bits, group, scale: Float::F16 });
    let affine = [2, 3, 4, 5, 6, 8].into_iter().flat_map(affine);
    for format in BlockFormat::ALL.map(WeightFormat::Blocks).into_iter().chain(e2m1).chain(affine) {
        let (rows, cols) = (19, 1280);
        let mut weights = Weights::random(format, rows, cols, &mut rng);
        let row_bytes = format.planes(cols).unwrap()[0].row_bytes;
        let mut data = weights.planes[0].bytes().to_vec();
        for (r, row) in data.chunks_exact_mut(row_bytes).enumerate() {
            // Bytes of the least and of the greatest integers, in both orders of signs.
            match [Some(0x00), Some(0xff), Some(0x77), Some(0x80), Some(0x7f), None][r % 6] {
                Some(byte) => row.fill(byte),
                None => continue,
            }
            if let WeightFormat::Blocks(blocks) = format {
                blocks.set_size(row, 1.0);
            }
        }
        weights.planes[0] = Guarded::new(&data);
        // The greatest float below 2 is rounded to 2, and then 2^14 stands for it.
        let most = 2f32.next_down();
        let x: Vec<f32> = (0..7 * cols)
            .map(|i| match (i / cols, i % cols) {
                (0, _) => most,
                (1, _) => -most,
                (2, k) if k % 2 == 0 => -most,
                (2 | 3, k) if k / 16 % 2 == 0 => most,
                (3, _) => -most,
                (4, _) => 0.0,
                (5, 700) => f32::NAN,
                _ => unit(&mut rng),
            })
            .collect();
        let (x, w, mode) = (Tokens::of(x, cols), weights.matrix(), Activations::Int11);
        assert_eq!((x.int11.n[0], x.int11.n[cols]), (1 << 14, -(1 << 14)));
        let encoding = format.activation_format(mode);
        assert_eq!(encoding, ActivationFormat::Int11);
        let bits = |y: f32| if y.is_nan() { !0 } else { y.to_bits() };
        let wanted: Vec<Vec<u32>> =
            (0..7).map(|t| (0..rows).map(|r| bits(defined(&weights, r, &x, t, encoding).0)).collect()).collect();
        assert!(wanted[5].iter().all(|&y| y == !0) && wanted[4].iter().all(|&y| y == 0));
        for isa in Isa::supported() {
            for tokens in
                [&[0][..], &[1], &[2], &[3], &[4], &[5], &[6, 1, 0], &[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6]]
            {
                for range in [0..rows, 3..4, 1..18] {
                    let mut tile = vec![0f32; tokens.len() * range.len()];
                    let mut scratch = Scratch::with_bytes(scratch_bytes(format, cols, range.len(), tokens.len(), mode));
                    matmul(isa, &w, range.clone(), x.input(encoding), tokens, &mut tile, &mut scratch);
                    for (&token, got) in tokens.iter().zip(tile.chunks_exact(range.len())) {
                        let got: Vec<u32> = got.iter().map(|&y| bits(y)).collect();
                        assert_eq!(
                            got,
                            wanted[token as usize][range.clone()],
                            "{isa} {format:?}, token {token} of {tokens:?}"
                        );
                    }
                }
            }
        }
    }
}
