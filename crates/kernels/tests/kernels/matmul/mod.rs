//! Every kernel against the definition of its sums, and against itself beside other tokens.

mod definition;
mod extremes;
mod rows;
mod tokens;
mod weights;

use fastrand::Rng;
use proptest::prelude::*;
use sluice_kernels::Isa;
use sluice_kernels::format::{ActivationFormat, Activations, BlockFormat, Float, MatrixError, WeightFormat};
use sluice_kernels::matmul::{matmul, scratch_bytes};
use sluice_kernels::matrix::Matrix;
use sluice_kernels::scratch::Scratch;

use definition::defined;
use tokens::Tokens;
use weights::{Weights, columns, format, group_of, mode, small_floats};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_kernel_follows_the_definition(format in format(), mode in mode(), rows in 1usize..80, n in 1usize..20, seed in 1u64..) {
        let mut rng = Rng::with_seed(seed);
        let cols = columns(format, &mut rng);
        let weights = Weights::random(format, rows, cols, &mut rng);
        let (w, x) = (weights.matrix(), Tokens::random(n, cols, &mut rng));
        let encoding = format.activation_format(mode);
        let wanted: Vec<(f32, f64)> =
            (0..n).flat_map(|t| (0..rows).map(move |r| (t, r))).map(|(t, r)| defined(&weights, r, &x, t, encoding)).collect();
        for isa in Isa::supported() {
            for _ in 0..4 {
                let start = rng.usize(..rows);
                let range = start..start + 1 + rng.usize(..(rows - start));
                let count = if rng.usize(..2) == 0 { 1 + rng.usize(..4) } else { 1 + rng.usize(..50) };
                let tokens: Vec<u32> = (0..count).map(|_| rng.usize(..n) as u32).collect();
                let mut scratch = Scratch::with_bytes(scratch_bytes(format, cols, range.len(), tokens.len(), mode));
                let ahead = scratch.bytes();
                let mut tile = vec![f32::NAN; tokens.len() * range.len()];
                matmul(isa, &w, range.clone(), x.input(encoding), &tokens, &mut tile, &mut scratch);
                prop_assert_eq!(scratch.bytes(), ahead, "the scratch grew");
                for (i, &t) in tokens.iter().enumerate() {
                    for (r, row) in range.clone().enumerate() {
                        let (got, wanted) = (tile[i * range.len() + r], wanted[t as usize * rows + row]);
                        prop_assert_eq!(got.to_bits(), wanted.0.to_bits(),
                            "{} {:?} {:?} {} columns, rows {:?}, {} tokens: row {} of token {}: {} not {}",
                            isa, format, encoding, cols, &range, tokens.len(), row, t, got, wanted.0);
                        prop_assert!((got as f64 - wanted.1).abs() < 1e-3, "{} is not {}", got, wanted.1);
                    }
                }
            }
        }
    }
}

/// A token's products do not depend on how many others share the call, which decides between kernels and how these divide tokens, rows and columns.
#[test]
fn integer_products_are_the_same_beside_any_number_of_tokens() {
    let mut rng = Rng::with_seed(13);
    let affine = |bits| [32, 64, 128].map(|group| WeightFormat::Affine { bits, group, scale: Float::Bf16 });
    let formats = [2, 3, 4, 5, 6, 8].into_iter().flat_map(affine).chain(BlockFormat::ALL.map(WeightFormat::Blocks));
    let formats = formats.chain(
        small_floats()
            .into_iter()
            .filter(|format| format.activation_format(Activations::Int8) == ActivationFormat::Int8),
    );
    for format in formats.chain([Float::F16, Float::Bf16].map(WeightFormat::Float)) {
        let group = match format {
            WeightFormat::Float(_) => 1,
            WeightFormat::Blocks(blocks) => blocks.block_columns(),
            _ => group_of(format),
        };
        // Rows and columns that end inside of every tile, and rows of a tile's second half only.
        for (rows, cols) in [(53, 544usize.next_multiple_of(group)), (7, 2 * group), (32, 1024)] {
            let weights = Weights::random(format, rows, cols, &mut rng);
            let (w, x) = (weights.matrix(), Tokens::random(33, cols, &mut rng));
            for mode in [Activations::Int8, Activations::Int11] {
                let product = |isa: Isa, tokens: &[u32]| {
                    let mut tile = vec![f32::NAN; tokens.len() * rows];
                    let mut scratch = Scratch::with_bytes(scratch_bytes(format, cols, rows, tokens.len(), mode));
                    let x = x.input(format.activation_format(mode));
                    matmul(isa, &w, 0..rows, x, tokens, &mut tile, &mut scratch);
                    tile.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
                };
                let all: Vec<u32> = (0..33).rev().collect();
                let wanted = product(Isa::GENERIC, &all);
                for isa in Isa::supported() {
                    for n in 1..=33 {
                        let got = product(isa, &all[..n]);
                        assert_eq!(got, wanted[..n * rows], "{isa} {mode:?} {format:?}, {rows} x {cols}, {n} tokens");
                    }
                }
            }
        }
    }
}

#[test]
fn a_wrong_length_is_an_error() {
    let format = WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 };
    let (data, scales) = (vec![0u8; 2 * 64], vec![0u8; 2 * 2 * 2]);
    let new = |format, rows, cols| Matrix::new(format, rows, cols, [&data[..], &scales, &scales]).map(|_| ());
    assert_eq!(new(format, 2, 128), Ok(()));
    assert_eq!(new(format, 3, 128), Err(MatrixError::Length { part: "weight", got: 128, wanted: 192 }));
    assert_eq!(new(format, 2, 96), Err(MatrixError::Columns { cols: 96, group: 64 }));
    assert_eq!(new(format, usize::MAX, 128), Err(MatrixError::TooBig { rows: usize::MAX, cols: 128 }));
    assert_eq!(new(WeightFormat::Affine { bits: 7, group: 64, scale: Float::Bf16 }, 2, 128), Err(MatrixError::Bits(7)));
    assert_eq!(
        new(WeightFormat::Affine { bits: 4, group: 16, scale: Float::Bf16 }, 2, 128),
        Err(MatrixError::Group(16))
    );
    assert_eq!(new(WeightFormat::Float(Float::Bf16), 1, 64), Err(MatrixError::Parts { got: 3, wanted: 1 }));
    assert_eq!(Matrix::new(format, 2, 128, [&data[..], &scales]).err(), Some(MatrixError::Parts { got: 2, wanted: 3 }));
}
