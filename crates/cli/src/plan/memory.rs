//! Measures this machine's memory bandwidth on all cores: of plain reads, and of products with one token's activations. Takes a fraction of a second.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result};
use sluice_backend::{Activations, Isa};
use sluice_cpu::{Numa, default_threads};
use sluice_kernels::activations::{encode_bf16, encode_int8};
use sluice_kernels::format::{ActivationFormat, Float, WeightFormat};
use sluice_kernels::input::Input;
use sluice_kernels::matmul;
use sluice_kernels::matrix::Matrix;
use sluice_kernels::roofline;
use sluice_kernels::scratch::Scratch;
use sluice_store::Buffer;

use super::estimate::{Precision, Products};

/// Larger than any cache.
const BYTES: usize = 256 << 20;
/// Where less memory is left, nothing should be measured unasked.
pub const NEEDED: u64 = 4 * BYTES as u64;
/// The least and the most for one model's weights, which a process that is about to compute with them measures with: its peak of memory should be theirs.
const FOR_MODEL: std::ops::RangeInclusive<u64> = 16 << 20..=128 << 20;
/// Columns of the matrix: a usual hidden size.
const COLS: usize = 2048;
/// Rows that a thread takes at a time.
const ROWS: usize = 128;
/// Repetitions; the fastest counts, since other programs only slow them down.
const ROUNDS: usize = 5;

/// In bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Plain reads.
    pub read: f64,
    pub products: Products,
}

impl Measured {
    /// The bandwidth of products on a memory with `read` bytes per second.
    pub fn products_at(&self, read: f64) -> Products {
        let of = |speed: f64| speed * (read / self.read);
        Products { resident: of(self.products.resident), experts: of(self.products.experts) }
    }
}

/// Measures products with weights in these two formats.
///
/// # Errors
/// When there is no memory for it, or `SLUICE_ISA` asks for what this machine lacks.
pub fn measure(resident: Precision, experts: Precision) -> Result<Measured> {
    measure_in(BYTES, resident, experts)
}

/// Measures products with `weights` bytes of such weights, if they are few: then caches help the model, too.
///
/// # Errors
/// Those of [`measure`].
pub fn measure_for(weights: u64, precision: Precision) -> Result<Products> {
    let bytes = weights.clamp(*FOR_MODEL.start(), *FOR_MODEL.end());
    Ok(measure_in(bytes as usize, precision, precision)?.products)
}

fn measure_in(bytes: usize, resident: Precision, experts: Precision) -> Result<Measured> {
    let isa = Isa::from_env()?;
    let threads = default_threads(Numa::Off);
    // Some rows for each thread, whatever their format.
    let bytes = bytes.max(threads * ROWS * COLS * size_of::<f32>());
    // In large pages, as weights are; not zero, as pages of zeros may be one page.
    let mut buffer = Buffer::large(bytes).context("no memory to measure its speed with")?;
    buffer.fill(0x3c);
    let mut found = Measured { read: 0.0, products: Products { resident: 0.0, experts: 0.0 } };
    let Measured { read, products } = &mut found;
    // Interleaved, so that other programs slow all of them alike.
    for _ in 0..ROUNDS {
        let part = bytes / threads;
        let reading = speed(part * threads, threads, |t| {
            black_box(roofline::read(isa, &buffer[t * part..(t + 1) * part]));
        });
        products.resident = products.resident.max(product(isa, &buffer, resident, threads)?);
        products.experts = products.experts.max(product(isa, &buffer, experts, threads)?);
        // Products cannot be faster than plain reads.
        *read = read.max(reading).max(products.resident).max(products.experts);
    }
    if experts == resident {
        products.resident = products.resident.max(products.experts);
        products.experts = products.resident;
    }
    Ok(found)
}

fn product(isa: Isa, buffer: &[u8], precision: Precision, threads: usize) -> Result<f64> {
    let stored = match precision.bits {
        16 => WeightFormat::Float(Float::Bf16),
        32 => WeightFormat::Float(Float::F32),
        bits => WeightFormat::Affine { bits: bits as u8, group: precision.group as u16, scale: Float::Bf16 },
    };
    let parts = stored.planes(COLS)?;
    let rows = buffer.len() / parts.row_bytes() / (threads * ROWS) * (threads * ROWS);
    let mut rest = buffer;
    let arrays = parts.iter().map(|part| rest.split_off(..rows * part.row_bytes).expect("the buffer holds the rows"));
    let matrix = Matrix::new(stored, rows, COLS, arrays)?;
    let x: Vec<f32> = (0..COLS).map(|i| (i % 17) as f32 / 16.0 - 0.5).collect();
    let (mut bf16, mut q) = (vec![0; COLS], vec![0; COLS]);
    let (mut x_scales, mut sums) = (vec![0.0; COLS / 32], vec![0.0; COLS / 32]);
    encode_bf16(isa, &x, &mut bf16);
    encode_int8(isa, &x, &mut q, &mut x_scales, &mut sums);
    let mode = Activations::Int8;
    let scratch = matmul::scratch_bytes(stored, COLS, ROWS, 1, mode);
    Ok(speed(matrix.bytes(), threads, |t| {
        let input = match stored.activation_format(mode) {
            ActivationFormat::F32 => Input::F32(&x),
            ActivationFormat::Bf16 => Input::Bf16(&bf16),
            ActivationFormat::Int8 => Input::Int8 { q: &q, scales: &x_scales, sums: &sums },
            ActivationFormat::Int11 => unreachable!("the mode is int8"),
        };
        let (mut tile, mut scratch) = ([0.0; ROWS], Scratch::with_bytes(scratch));
        let part = rows / threads;
        for first in (t * part..(t + 1) * part).step_by(ROWS) {
            matmul::matmul(isa, &matrix, first..first + ROWS, input, &[0], &mut tile, &mut scratch);
            black_box(&tile);
        }
    }))
}

/// Bytes per second of `work(thread)` on all threads at once, which takes `bytes` bytes in all.
fn speed(bytes: usize, threads: usize, work: impl Fn(usize) + Sync) -> f64 {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for t in 0..threads {
            let work = &work;
            scope.spawn(move || work(t));
        }
    });
    bytes as f64 / begin.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_every_form_are_measured_and_scale_with_the_bandwidth() {
        for (bits, group) in [(2, 64), (4, 32), (8, 128), (16, 64), (32, 64)] {
            let precision = Precision { bits, group };
            let found = measure(precision, precision).unwrap();
            let Products { resident, experts } = found.products;
            assert!(resident > 0.0 && resident == experts && found.read > 0.0, "{bits} bits: {found:?}");
            let small = measure_for(1, precision).unwrap();
            assert!(small.resident > 0.0 && small.resident.is_finite(), "{bits} bits: {small:?}");
            let twice = found.products_at(2.0 * found.read);
            assert!((twice.resident / resident - 2.0).abs() < 1e-9);
        }
    }
}
