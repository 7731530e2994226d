//! How fast products and the descent of calibration are here: `cargo run --release -p sluice-kernels --example dense_speed [ROWS COLS TOKENS]`.

use std::time::Instant;

use sluice_kernels::Isa;
use sluice_kernels::dense::{Buffer, Panels, moments, product};
use sluice_kernels::format::Float;
use sluice_kernels::quantize::descent::{Params, quantize};
use sluice_kernels::quantize::{self, Rounding};

fn main() {
    let sizes: Vec<usize> = std::env::args().skip(1).map(|a| a.parse().expect("a number")).collect();
    let [rows, cols, tokens] = sizes.try_into().unwrap_or([1024, 4096, 1024]);
    let isa = Isa::from_env().expect("an instruction set");
    let value = |i: usize| ((i * 7919 + i * i % 104_729) % 1009) as f32 / 504.5 - 1.0;
    let values = |n: usize, from: usize| (from..from + n).map(value).collect::<Vec<f32>>();
    let (w, x) = (values(rows * cols, 0), values(tokens * cols, 77));
    let time = |what: &str, macs: usize, work: &mut dyn FnMut()| {
        let begun = Instant::now();
        work();
        let took = begun.elapsed().as_secs_f64();
        println!("{what:<40}{:>9.1} ms{:>9.1} G multiply-adds/s", took * 1e3, macs as f64 / took / 1e9);
    };
    let (mut a, mut b) = (None, None);
    time("pack the left", 0, &mut || a = Some(Panels::of_rows(&w, cols)));
    time("pack the right", 0, &mut || b = Some(Panels::of_rows(&x, cols)));
    let (a, b) = (a.expect("packed"), b.expect("packed"));
    for _ in 0..2 {
        time("product", rows * cols * tokens, &mut || drop(product(isa, &a, &b)));
    }
    let mut h = Buffer::zeros(0);
    time("moments", cols * cols * tokens / 2, &mut || h = moments(isa, &x, cols, &vec![1.0; tokens]));
    (0..cols).for_each(|i| h[i * cols + i] += 1.0);
    for sweeps in [0, 1, 2] {
        let p = Params { bits: 2, group: 64, scale: Float::Bf16, sweeps, rounds: 2 };
        time(&format!("descent, {sweeps} sweeps"), sweeps * rows * cols * cols, &mut || {
            drop(quantize(isa, &w, cols, &h, &[], p))
        });
    }
    for rounding in [Rounding::Mlx, Rounding::Range, Rounding::Search] {
        let (mut data, mut s, mut b) = (vec![0; w.len() / 4], vec![0; w.len() / 32], vec![0; w.len() / 32]);
        time(&format!("{rounding:?}, weights"), w.len(), &mut || {
            quantize::quantize(isa, rounding, &w, 2, 64, Float::Bf16, &mut data, &mut s, &mut b)
        });
    }
}
