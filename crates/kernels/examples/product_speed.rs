//! How fast a thread multiplies weights of integer groups by a prompt's tokens in int8 and in int11, beside what it multiplies bytes at best:
//! `cargo run --release -p sluice-kernels --example product_speed [ROWS COLS TOKENS]`.

use std::hint::black_box;
use std::time::Instant;

use sluice_kernels::Isa;
use sluice_kernels::activations::encode_int8;
use sluice_kernels::format::{Activations, Float, WeightFormat};
use sluice_kernels::input::{Input, Int11};
use sluice_kernels::int11::encode_int11;
use sluice_kernels::int11_tiles::{self, TokenTile};
use sluice_kernels::matmul::{matmul, scratch_bytes};
use sluice_kernels::matrix::Matrix;
use sluice_kernels::roofline::{Arithmetic, multiply_add};
use sluice_kernels::scratch::Scratch;

fn main() {
    let sizes: Vec<usize> = std::env::args().skip(1).map(|a| a.parse().expect("a number")).collect();
    let [rows, cols, tokens] = sizes.try_into().unwrap_or([128, 1024, 512]);
    let isa = Isa::from_env().expect("an instruction set");
    let peak = || {
        let begun = Instant::now();
        2.0 * multiply_add(isa, Arithmetic::Int8, 1 << 31) as f64 / begun.elapsed().as_secs_f64() / 1e9
    };
    let best = (0..5).map(|_| peak()).fold(0.0, f64::max);
    println!("{isa} {rows} rows, {cols} columns, {tokens} tokens; peak {best:.0} G operations/s");
    for (bits, group) in [(4, 64), (4, 32), (4, 128), (8, 64)] {
        let format = WeightFormat::Affine { bits, group, scale: Float::Bf16 };
        let data: Vec<u8> = (0..rows * cols / 8 * bits as usize).map(|i| ((i * 7919) >> 3) as u8).collect();
        let scales = [0x3c, 0x3d].repeat(rows * cols / group as usize);
        let w = Matrix::new(format, rows, cols, [&data[..], &scales, &scales]).expect("a matrix");
        let x: Vec<f32> = (0..tokens * cols).map(|i| ((i * 7919) % 1009) as f32 / 504.5 - 1.0).collect();
        let (mut q, mut s, mut m) = (vec![0; x.len()], vec![0.0; x.len() / 32], vec![0.0; x.len() / 32]);
        encode_int8(isa, &x, &mut q, &mut s, &mut m);
        let (mut n, mut steps) = (vec![0; x.len()], vec![0.0; tokens * cols.div_ceil(64)]);
        let (mut sums, mut scales) = (vec![0.0; x.len() / 32], vec![0.0; tokens]);
        encode_int11(isa, &x, cols, &mut n, &mut steps, &mut sums, &mut scales);
        let int11 = Int11 { n: &n, steps: &steps, sums: &sums, scales: &scales, tiles: &[] };
        let mut tiles = vec![TokenTile::default(); int11_tiles::count(tokens, cols)];
        for (block, tiles) in tiles.chunks_mut(cols.div_ceil(64)).enumerate() {
            int11_tiles::lay_out(isa, &int11, cols, block * int11_tiles::TOKENS, tiles);
        }
        let inputs = [
            (Activations::Int8, Input::Int8 { q: &q, scales: &s, sums: &m }),
            (Activations::Int11, Input::Int11(Int11 { tiles: &tiles, ..int11 })),
        ];
        for (mode, input) in inputs {
            measure((bits, group), mode, (rows, cols, tokens), best, |out, scratch| {
                let all: Vec<u32> = (0..tokens as u32).collect();
                for _ in 0..times(rows * cols * tokens) {
                    matmul(isa, &w, 0..rows, input, &all, out, scratch);
                    black_box(&mut *out);
                }
            });
        }
    }
}

/// Products of a measurement.
fn times(macs: usize) -> usize {
    (1 << 29) / macs + 1
}

fn measure(
    (bits, group): (u8, u16),
    mode: Activations,
    (rows, cols, tokens): (usize, usize, usize),
    best: f64,
    run: impl Fn(&mut [f32], &mut Scratch),
) {
    let format = WeightFormat::Affine { bits, group, scale: Float::Bf16 };
    let mut out = vec![0.0; rows * tokens];
    let mut scratch = Scratch::with_bytes(scratch_bytes(format, cols, rows, tokens, mode));
    let mut speeds: Vec<f64> = (0..15)
        .map(|_| {
            let begun = Instant::now();
            run(&mut out, &mut scratch);
            (2 * times(rows * cols * tokens) * rows * cols * tokens) as f64 / begun.elapsed().as_secs_f64() / 1e9
        })
        .collect();
    speeds.sort_by(f64::total_cmp);
    println!(
        "{bits} bit, groups of {group}, {mode:?}: {:.0} ({:.0}-{:.0}) G operations/s, {:.2} of the peak",
        speeds[7],
        speeds[0],
        speeds[14],
        speeds[7] / best
    );
}
