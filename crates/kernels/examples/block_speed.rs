//! How fast a thread multiplies GGUF's blocks, beside MLX's 4 bits, in turns: one token in GB/s of weights beside what it reads at best, and a prompt in G operations/s.
//! `cargo run --release -p sluice-kernels --example block_speed [MEGABYTES TOKENS COLS]`; with ONLY=MXFP4 that type alone, from blocks and (*) from two planes.

use std::hint::black_box;

use sluice_kernels::Isa;
use sluice_kernels::activations::encode_int8;
use sluice_kernels::format::{Activations, BlockFormat, E2m1, Float, WeightFormat};
use sluice_kernels::input::Input;
use sluice_kernels::matmul::{matmul, scratch_bytes};
use sluice_kernels::matrix::Matrix;
use sluice_kernels::roofline::{Arithmetic, multiply_add, read};
use sluice_kernels::scratch::Scratch;

/// Rows of a task.
const ROWS: usize = 128;

fn bytes(format: WeightFormat, rows: usize, cols: usize) -> Vec<Vec<u8>> {
    let planes = format.planes(cols).expect("whole groups");
    let mut all: Vec<Vec<u8>> = planes
        .iter()
        .map(|plane| {
            let mut state = 1u64;
            let mut next = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                (state >> 56) as u8
            };
            let fill = |_| if plane.name == "weight" { next() } else { 0x3c };
            (0..rows * plane.row_bytes).map(fill).collect()
        })
        .collect();
    if let WeightFormat::Blocks(blocks) = format {
        blocks.set_size(&mut all[0], 1.0);
    }
    all
}

/// Seconds of this thread's own work: what other programs take from it does not count.
#[cfg(target_os = "linux")]
fn seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(not(target_os = "linux"))]
fn seconds() -> f64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_secs_f64()
}

/// The median of some seconds, and the least.
fn median(mut seconds: Vec<f64>) -> (f64, f64) {
    seconds.sort_by(f64::total_cmp);
    (seconds[seconds.len() / 2], seconds[0])
}

fn main() {
    let sizes: Vec<usize> = std::env::args().skip(1).map(|a| a.parse().expect("a number")).collect();
    let [megabytes, tokens, cols] = sizes.try_into().unwrap_or([64, 512, 4096]);
    let isa = Isa::from_env().expect("an instruction set");
    let affine = WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 };
    let formats = BlockFormat::ALL.map(|blocks| (blocks.name().to_owned(), WeightFormat::Blocks(blocks)));
    println!(
        "{isa}, {cols} columns; one token: GB/s, of what is read at best; {tokens} tokens: G operations/s, of the peak, beside affine"
    );
    let x: Vec<f32> = (0..tokens * cols).map(|i| ((i * 7919) % 1009) as f32 / 504.5 - 1.0).collect();
    let (mut q, mut s, mut m) = (vec![0; x.len()], vec![0.0; x.len() / 32], vec![0.0; x.len() / 32]);
    encode_int8(isa, &x, &mut q, &mut s, &mut m);
    let input = Input::Int8 { q: &q, scales: &s, sums: &m };
    let all: Vec<u32> = (0..tokens as u32).collect();
    let product = |w: &Matrix, tokens: &[u32], scratch: &mut Scratch, out: &mut [f32]| {
        let begun = seconds();
        for from in (0..w.rows()).step_by(ROWS) {
            matmul(isa, w, from..from + ROWS, input, tokens, &mut out[..ROWS * tokens.len()], scratch);
            black_box(&mut *out);
        }
        seconds() - begun
    };
    let mut scratch = Scratch::default();
    let mut out = vec![0.0; ROWS * tokens];
    let mut prompt_of_affine = 0.0;
    let in_planes = [("MXFP4 *".to_owned(), WeightFormat::E2m1(E2m1::Power))];
    let only = std::env::var("ONLY").unwrap_or_default();
    for (name, format) in [("affine4".to_owned(), affine)].into_iter().chain(formats).chain(in_planes) {
        if !name.contains(&only) {
            continue;
        }
        let row: usize = format.planes(cols).expect("whole groups").iter().map(|plane| plane.row_bytes).sum();
        let rows = (megabytes << 20).div_ceil(row).next_multiple_of(ROWS);
        let planes = bytes(format, rows, cols);
        let w = Matrix::new(format, rows, cols, planes.iter().map(|p| &p[..])).expect("a matrix");
        scratch.reserve(scratch_bytes(format, cols, ROWS, tokens, Activations::Int8));
        let (mut one, mut best, mut many, mut peak) = (vec![], vec![], vec![], vec![]);
        let some = w.rows_slice(0..ROWS);
        for _ in 0..9 {
            one.push(product(&w, &all[..1], &mut scratch, &mut out));
            let begun = seconds();
            black_box(read(isa, &planes[0]));
            best.push((seconds() - begun) / planes[0].len() as f64 * w.bytes() as f64);
            many.push(product(&some, &all, &mut scratch, &mut out));
            let begun = seconds();
            let macs = multiply_add(isa, Arithmetic::Int8, 1 << 28);
            peak.push((seconds() - begun) / macs as f64 * (ROWS * cols * tokens) as f64);
        }
        let [(one, one_least), (_, best), (many, many_least), (_, peak)] = [one, best, many, peak].map(median);
        let (bytes, operations) = (w.bytes() as f64 / 1e9, (2 * ROWS * cols * tokens) as f64 / 1e9);
        if prompt_of_affine == 0.0 {
            prompt_of_affine = many_least;
        }
        println!(
            "{name:<8} {:6.1} ({:5.1} at most) GB/s, {:.2} of {:5.1} | {:6.0} ({:5.0}) GOPS, {:.2} of the peak, {:.2} of affine",
            bytes / one,
            bytes / one_least,
            best / one_least,
            bytes / best,
            operations / many,
            operations / many_least,
            peak / many_least,
            prompt_of_affine / many_least,
        );
    }
}
