//! Blocks against the values of the gguf package (`make_blocks_golden.py` wrote the file).

use sluice_kernels::Isa;
use sluice_kernels::affine::dequantize_row;
use sluice_kernels::format::{BlockFormat, WeightFormat};
use sluice_kernels::matrix::Matrix;

const BLOCKS: usize = 4096;

/// The maker's bytes: splitmix64 from seed 1.
fn random_bytes(n: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(n + 8);
    let mut state = 1u64;
    while bytes.len() < n {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        bytes.extend((z ^ z >> 31).to_le_bytes());
    }
    bytes.truncate(n);
    bytes
}

/// Where the f16 units of a block are.
fn units(name: &str) -> &'static [usize] {
    match name {
        "Q4_1" | "Q5_1" | "Q4_K" | "Q5_K" => &[0, 2],
        "Q2_K" => &[80, 82],
        "Q3_K" => &[108],
        "Q6_K" => &[208],
        "IQ1_M" | "MXFP4" | "NVFP4" => &[],
        _ => &[0],
    }
}

/// One pattern for every NaN, and for both zeros.
fn bits(x: f32) -> u32 {
    if x.is_nan() {
        0x7fc0_0000
    } else if x == 0.0 {
        0
    } else {
        x.to_bits()
    }
}

#[test]
fn blocks_have_the_values_of_the_gguf_package() {
    let golden = include_str!("../blocks_golden.txt");
    assert_eq!(golden.lines().count(), BlockFormat::ALL.len());
    for line in golden.lines() {
        let mut words = line.split(' ');
        let mut word = || words.next().expect("a word");
        let name = word();
        let format = BlockFormat::ALL.into_iter().find(|format| format.name() == name).expect("a type of ours");
        let (columns, size) = (format.block_columns(), format.block_bytes());
        assert_eq!([word(), word()], [columns, size].map(|n| n.to_string()), "{name}");
        let total = u64::from_str_radix(word(), 16).unwrap();
        let first: Vec<u32> = words.map(|word| u32::from_str_radix(word, 16).unwrap()).collect();
        let mut blocks = random_bytes(BLOCKS * size);
        for block in blocks.chunks_exact_mut(size).step_by(2) {
            for at in units(name) {
                block[at + 1] = block[at + 1] & 0x9f | 0x20;
            }
        }
        let w = Matrix::new(WeightFormat::Blocks(format), BLOCKS / 64, 64 * columns, [&blocks[..]]).unwrap();
        for isa in Isa::supported() {
            let (mut row, mut sum, mut i) = (vec![0f32; 64 * columns], 0u64, 0u64);
            for r in 0..w.rows() {
                dequantize_row(isa, &w, r, &mut row);
                if r == 0 {
                    let got: Vec<u32> = row[..columns].iter().map(|&x| bits(x)).collect();
                    assert_eq!(got, first, "{name}, {isa}");
                }
                for &x in &row {
                    sum = sum.wrapping_add(u64::from(bits(x)).wrapping_mul(2 * i + 1));
                    i += 1;
                }
            }
            assert_eq!(sum, total, "{name}, {isa}: the first block is right, another one is not");
        }
    }
}
