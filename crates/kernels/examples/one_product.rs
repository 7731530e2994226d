//! One matrix product again and again, for those who count instructions (`bench/arm64/count.py`): `one_product FORMAT ROWS COLUMNS TOKENS TIMES`. FORMAT is a type
//! of GGUF's blocks, or `affine4`. Prints a sum of what comes out.

use sluice_kernels::Isa;
use sluice_kernels::activations::encode_int8;
use sluice_kernels::format::{Activations, BlockFormat, Float, WeightFormat};
use sluice_kernels::input::Input;
use sluice_kernels::matmul::{matmul, scratch_bytes};
use sluice_kernels::matrix::Matrix;
use sluice_kernels::scratch::Scratch;

fn main() {
    let mut args = std::env::args().skip(1);
    let name = args.next().expect("a format");
    let mut number = || args.next().and_then(|n| n.parse::<usize>().ok()).expect("a number");
    let (rows, cols, tokens, times) = (number(), number(), number(), number());
    let isa = Isa::from_env().expect("an instruction set");
    let affine = WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 };
    let blocks = BlockFormat::ALL.into_iter().find(|blocks| blocks.name().eq_ignore_ascii_case(&name));
    let format = blocks.map_or(affine, WeightFormat::Blocks);
    assert!(blocks.is_some() || name == "affine4", "no format {name}");

    let planes = format.planes(cols).expect("whole groups");
    // Small numbers, whatever they are read as: 0x3c3c is a scale of about 0.01.
    let mut bytes: Vec<Vec<u8>> = planes.iter().map(|plane| vec![0x3c; rows * plane.row_bytes]).collect();
    if let WeightFormat::Blocks(blocks) = format {
        blocks.set_size(&mut bytes[0], 1.0);
    }
    let w = Matrix::new(format, rows, cols, bytes.iter().map(|plane| &plane[..])).expect("a matrix");
    let x: Vec<f32> = (0..tokens * cols).map(|i| ((i * 7919) % 1009) as f32 / 504.5 - 1.0).collect();
    let (mut q, mut s, mut m) = (vec![0; x.len()], vec![0.0; x.len() / 32], vec![0.0; x.len() / 32]);
    encode_int8(isa, &x, &mut q, &mut s, &mut m);
    let input = Input::Int8 { q: &q, scales: &s, sums: &m };
    let all: Vec<u32> = (0..tokens as u32).collect();
    let mut scratch = Scratch::with_bytes(scratch_bytes(format, cols, rows, tokens, Activations::Int8));
    let mut out = vec![0.0; rows * tokens];
    for _ in 0..times {
        matmul(isa, &w, 0..rows, input, &all, &mut out, &mut scratch);
    }
    println!("{isa} {:e}", out.iter().map(|&y| f64::from(y)).sum::<f64>());
}
