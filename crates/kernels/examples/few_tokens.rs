//! How fast products with a few tokens are here, on one thread and weights that no cache holds:
//! `cargo run --release -p sluice-kernels --example few_tokens [BITS GROUP COLS TOKENS,..]`.

use std::time::Instant;

use sluice_kernels::Isa;
use sluice_kernels::activations::encode_int8;
use sluice_kernels::form::{Activations, Float, Form};
use sluice_kernels::input::Input;
use sluice_kernels::matmul::{matmul, scratch_bytes};
use sluice_kernels::matrix::Matrix;
use sluice_kernels::scratch::Scratch;

/// Rows that one call takes, as a task of a step does.
const ROWS: usize = 128;
/// Bytes of packed weights.
const BYTES: usize = 96 << 20;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, or: usize| args.get(i).map_or(or, |a| a.parse().expect("a number"));
    let (bits, group, cols) = (number(0, 4), number(1, 64), number(2, 1024));
    let counts: Vec<usize> = args.get(3).map_or("1,2,3,4,5,6,7,8,10,12,16,32", String::as_str).split(',').map(|n| n.parse().expect("tokens")).collect();
    let isa = Isa::from_env().expect("an instruction set");
    let form = Form::Affine { bits: bits as u8, group: group as u16, scale: Float::Bf16 };
    let rows = BYTES / (cols / 8 * bits) / ROWS * ROWS;
    let mut rng = fastrand::Rng::with_seed(1);
    let mut data = vec![0u8; rows * (cols / 8 * bits)];
    rng.fill(&mut data);
    let scales: Vec<u8> = (0..rows * (cols / group)).flat_map(|_| half::bf16::from_f32(rng.f32()).to_le_bytes()).collect();
    let w = Matrix::new(form, rows, cols, [&data[..], &scales[..], &scales[..]]).expect("a matrix");
    for n in counts {
        let x: Vec<f32> = (0..n * cols).map(|_| rng.f32() - 0.5).collect();
        let (mut q, mut sx, mut mx) = (vec![0; x.len()], vec![0.0; x.len() / 32], vec![0.0; x.len() / 32]);
        encode_int8(isa, &x, &mut q, &mut sx, &mut mx);
        let tokens: Vec<u32> = (0..n as u32).collect();
        let mut scratch = Scratch::with_bytes(scratch_bytes(form, cols, ROWS, n, Activations::Int8));
        let mut tile = vec![0.0; ROWS * n];
        let mut rates: Vec<f64> = (0..7)
            .map(|_| {
                let begun = Instant::now();
                for r in (0..rows).step_by(ROWS) {
                    let x = Input::Int8 { q: &q, scales: &sx, sums: &mx };
                    matmul(isa, &w, r..r + ROWS, x, &tokens, &mut tile, &mut scratch);
                }
                (rows * cols * n) as f64 / begun.elapsed().as_secs_f64() / 1e9
            })
            .collect();
        rates.sort_by(f64::total_cmp);
        println!("{bits} bit, {cols} columns, {n:>3} tokens: {:>6.1} G multiply-adds/s ({:.1} to {:.1}), {:>5.1} GB/s",
            rates[3], rates[0], rates[6], rates[3] / n as f64 * w.bytes() as f64 / (rows * cols) as f64);
    }
}
