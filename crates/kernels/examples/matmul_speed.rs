//! How fast the products are: `cargo run --release -p sluice-kernels --example matmul_speed [decode|prefill] [FORM] [THREADS]`.
//!
//! Decode streams 256 MB of matrices [3072, 1024] through one token; the figure is weight bytes (scales and biases too) per second. Prefill
//! multiplies one such matrix by 512 tokens; the figure is 2 * rows * cols * tokens per second. The median of many rounds counts for decode, the best of several for prefill. With `cpu` among the
//! arguments time is the threads' own time on a processor (Linux): for machines that are busy with other things.

use sluice_kernels::Isa;
use sluice_kernels::activations::{encode_bf16, encode_int8};
use sluice_kernels::matmul::{Activations, Encoding, Float, Form, Input, Matrix, Scratch, matmul, scratch_bytes};
use std::time::Instant;

const ROWS: usize = 3072;
const COLS: usize = 1024;
/// Rows per call, as a backend's threads would take them.
const CHUNK: usize = 128;

struct Tokens {
    f32: Vec<f32>,
    bf16: Vec<u16>,
    q: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<f32>,
}

fn tokens(n: usize, isa: Isa) -> Tokens {
    let len = n * COLS;
    let f32: Vec<f32> = (0..len).map(|i| ((i * 7919) % 1013) as f32 / 506.5 - 1.0).collect();
    let mut x =
        Tokens { bf16: vec![0; len], q: vec![0; len], scales: vec![0.0; len / 32], sums: vec![0.0; len / 32], f32 };
    encode_bf16(isa, &x.f32, &mut x.bf16);
    encode_int8(isa, &x.f32, &mut x.q, &mut x.scales, &mut x.sums);
    x
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let is = |s: &str| {
        args.is_empty() || args.iter().any(|a| a == s) || !args.iter().any(|a| a == "decode" || a == "prefill")
    };
    let wanted = args.iter().find(|a| a.contains('/'));
    let threads: usize = args.iter().find_map(|a| a.parse().ok()).unwrap_or(1);
    let isa = Isa::from_env().expect("SLUICE_ISA");
    println!("{isa}, {threads} thread(s), read {:.1} GB/s", read(threads));
    let mut cases = vec![];
    for bits in [4, 8, 2, 3, 5, 6] {
        let form = Form::Affine { bits, group: 64, scale: Float::Bf16 };
        for mode in [Activations::Int8, Activations::Bf16, Activations::F32] {
            cases.push((format!("q{bits}/{mode:?}").to_lowercase(), form, mode));
        }
    }
    for float in [Float::Bf16, Float::F16, Float::F32] {
        let mode = if float == Float::Bf16 { Activations::Bf16 } else { Activations::F32 };
        cases.push((format!("{float:?}/{mode:?}").to_lowercase(), Form::Float(float), mode));
    }
    cases.push(("bf16/f32".into(), Form::Float(Float::Bf16), Activations::F32));
    for (name, form, mode) in cases {
        if wanted.is_some_and(|w| !name.contains(w.trim_end_matches('/'))) {
            continue;
        }
        let decoding = if is("decode") { decode(isa, form, mode, threads) } else { 0.0 };
        let many = if is("prefill") { prefill(isa, form, mode, threads, 512) } else { 0.0 };
        let few = if is("prefill") { prefill(isa, form, mode, threads, 32) } else { 0.0 };
        println!("{name:>9}: decode {decoding:6.2} GB/s   512 tokens {many:7.1} GOPS   32 tokens {few:7.1} GOPS");
    }
}

fn parts(form: Form, matrices: usize) -> [Vec<u8>; 3] {
    let row = form.row_bytes(COLS).unwrap();
    let (mut s, mut data) = (1u64, vec![0u8; matrices * ROWS * row]);
    for word in data.chunks_exact_mut(8) {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        // Exponents of moderate size, should these bytes be floats.
        word.copy_from_slice(
            &(s & 0xbfff_bfff_bfff_bfff & !0x4000_4000_4000_4000 | 0x3000_3000_3000_3000).to_le_bytes(),
        );
    }
    let scales = match form {
        Form::Float(_) => vec![],
        Form::Affine { group, scale, .. } => {
            let n = matrices * ROWS * COLS / group as usize;
            (0..n).flat_map(|_| 0x3c00u16.to_le_bytes()).chain((0..n * (scale.size() - 2)).map(|_| 0)).collect()
        }
    };
    let biases = scales.clone();
    [data, scales, biases]
}

fn decode(isa: Isa, form: Form, mode: Activations, threads: usize) -> f64 {
    let one: usize = parts(form, 1).iter().map(|p| p.len()).sum();
    let matrices = (256usize << 20).div_ceil(one).next_multiple_of(threads);
    let [data, scales, biases] = parts(form, matrices);
    let all = Matrix::new(form, matrices * ROWS, COLS, &data, &scales, &biases).unwrap();
    let x = tokens(1, isa);
    let input = input(&x, form.encoding(mode));
    // One piece at a time, so that a round is short beside the time slices of a machine that is shared.
    let pieces = 8;
    let piece_rows = all.rows() / CHUNK / pieces * CHUNK;
    let mut all_times = vec![];
    for piece in (0..pieces).cycle().take(8 * pieces) {
        let (start, barrier) = (piece * piece_rows, std::sync::Barrier::new(threads));
        let work = |t: usize| {
            let mut scratch = Scratch::with_bytes(scratch_bytes(form, COLS, CHUNK, 1, mode));
            let mut tile = [0f32; CHUNK];
            barrier.wait();
            let clock = Clock::start();
            for i in (start + t * CHUNK..start + piece_rows).step_by(CHUNK * threads) {
                matmul(isa, &all, i..i + CHUNK, input, &[0], &mut tile, &mut scratch);
            }
            std::hint::black_box(&tile);
            clock.elapsed()
        };
        all_times.push(together(threads, work));
    }
    all_times.sort_by(f64::total_cmp);
    let best = all_times[all_times.len() / 2];
    (all.bytes() / all.rows() * piece_rows) as f64 / best / 1e9
}

struct Clock(Instant, Option<f64>);

impl Clock {
    fn start() -> Clock {
        Clock(Instant::now(), on_processor())
    }
    /// Seconds.
    fn elapsed(&self) -> f64 {
        match (self.1, on_processor()) {
            (Some(start), Some(now)) => now - start,
            _ => self.0.elapsed().as_secs_f64(),
        }
    }
}

/// Seconds that this thread has run, if the arguments ask for it.
fn on_processor() -> Option<f64> {
    if !std::env::args().any(|a| a == "cpu") {
        return None;
    }
    unsafe extern "C" {
        fn clock_gettime(clock: i32, out: *mut [i64; 2]) -> i32;
    }
    let mut time = [0; 2];
    // SAFETY: clock 3 is Linux's CLOCK_THREAD_CPUTIME_ID; seconds and nanoseconds are two 64-bit numbers.
    (unsafe { clock_gettime(3, &mut time) } == 0).then_some(time[0] as f64 + time[1] as f64 * 1e-9)
}

/// Runs `work` on each of `threads` threads; the longest time.
fn together(threads: usize, work: impl Fn(usize) -> f64 + Sync) -> f64 {
    std::thread::scope(|scope| {
        let handles: Vec<_> = (1..threads).map(|t| (t, &work)).map(|(t, work)| scope.spawn(move || work(t))).collect();
        let mine = work(0);
        handles.into_iter().map(|h| h.join().unwrap()).fold(mine, f64::max)
    })
}

/// What the machine gives: bytes read per second, by the same pieces.
fn read(threads: usize) -> f64 {
    let words = vec![1u64; 32 << 20];
    let mut best = f64::MAX;
    for piece in words.chunks_exact(words.len() / 8).cycle().take(64) {
        let n = piece.len() / threads;
        let work = |t: usize| {
            let clock = Clock::start();
            let mut sums = [0u64; 32];
            for words in piece[t * n..][..n].chunks_exact(32) {
                for (sum, word) in sums.iter_mut().zip(words) {
                    *sum ^= word;
                }
            }
            std::hint::black_box(sums);
            clock.elapsed()
        };
        best = best.min(together(threads, work));
    }
    (words.len() / 8 * 8) as f64 / best / 1e9
}

fn prefill(isa: Isa, form: Form, mode: Activations, threads: usize, n: usize) -> f64 {
    let [data, scales, biases] = parts(form, 1);
    let w = Matrix::new(form, ROWS, COLS, &data, &scales, &biases).unwrap();
    let x = tokens(n, isa);
    let list: Vec<u32> = (0..n as u32).collect();
    let repeat = (128 / n).max(1);
    let mut best = f64::MAX;
    let input = input(&x, form.encoding(mode));
    for _ in 0..6 {
        let work = |t: usize| {
            let mut scratch = Scratch::with_bytes(scratch_bytes(form, COLS, CHUNK, n, mode));
            let mut tile = vec![0f32; CHUNK * n];
            let clock = Clock::start();
            for _ in 0..repeat {
                for i in (t * CHUNK..ROWS).step_by(CHUNK * threads) {
                    matmul(isa, &w, i..i + CHUNK, input, &list, &mut tile, &mut scratch);
                }
            }
            std::hint::black_box(&tile);
            clock.elapsed()
        };
        best = best.min(together(threads, work) / repeat as f64);
    }
    2.0 * (ROWS * COLS * n) as f64 / best / 1e9
}

fn input(x: &Tokens, encoding: Encoding) -> Input<'_> {
    match encoding {
        Encoding::F32 => Input::F32(&x.f32),
        Encoding::Bf16 => Input::Bf16(&x.bf16),
        Encoding::Int8 => Input::Int8 { q: &x.q, scales: &x.scales, sums: &x.sums },
    }
}
