//! Matrix products on the CPU: activations are encoded once for all matrices that share them, then row blocks of the matrices are
//! distributed among threads. A row of the result is always computed by one thread alone, so the distribution changes no bit.

use sluice_kernels::format::{ActivationFormat, Activations};
use sluice_kernels::input::Input;
use sluice_kernels::matmul;
use sluice_kernels::matrix::Matrix;
use sluice_kernels::scratch::Scratch;
use sluice_kernels::{Isa, activations, norm};

use super::memory::{Buffer, Parts, PerThread, Place, Weight};
use crate::pool::Pool;
use crate::{Linear, MatrixId, Norm, Tensor};

/// Which encodings of the activations some matrices need.
#[derive(Clone, Copy, Default)]
pub struct Needs {
    pub f32: bool,
    pub bf16: bool,
    pub int8: bool,
}

impl Needs {
    pub fn add(&mut self, encoding: ActivationFormat) {
        match encoding {
            ActivationFormat::F32 => self.f32 = true,
            ActivationFormat::Bf16 => self.bf16 = true,
            ActivationFormat::Int8 => self.int8 = true,
        }
    }

    pub fn of(encodings: impl IntoIterator<Item = ActivationFormat>) -> Needs {
        let mut needs = Needs::default();
        encodings.into_iter().for_each(|e| needs.add(e));
        needs
    }
}

/// Activations `[rows, cols]` in the encodings that were needed. Grows to the largest use and then stays.
#[derive(Default)]
pub struct Encoded {
    rows: usize,
    cols: usize,
    f32: Vec<f32>,
    bf16: Vec<u16>,
    q: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<f32>,
}

/// Elements per scale of int8 activations.
pub const GROUP: usize = 32;

fn grow<T: Default + Clone>(v: &mut Vec<T>, len: usize) {
    if v.len() < len {
        v.resize(len, T::default());
    }
}

impl Encoded {
    /// Room for `[rows, cols]`.
    pub fn reset(&mut self, rows: usize, cols: usize, needs: Needs) {
        (self.rows, self.cols) = (rows, cols);
        if needs.f32 {
            grow(&mut self.f32, rows * cols);
        }
        if needs.bf16 {
            grow(&mut self.bf16, rows * cols);
        }
        if needs.int8 {
            grow(&mut self.q, rows * cols);
            grow(&mut self.scales, rows * cols / GROUP);
            grow(&mut self.sums, rows * cols / GROUP);
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn bytes(&self) -> usize {
        4 * (self.f32.len() + self.scales.len() + self.sums.len()) + 2 * self.bf16.len() + self.q.len()
    }

    pub fn input(&self, encoding: ActivationFormat) -> Input<'_> {
        let (n, groups) = (self.rows * self.cols, self.rows * self.cols / GROUP);
        match encoding {
            ActivationFormat::F32 => Input::F32(&self.f32[..n]),
            ActivationFormat::Bf16 => Input::Bf16(&self.bf16[..n]),
            ActivationFormat::Int8 => {
                Input::Int8 { q: &self.q[..n], scales: &self.scales[..groups], sums: &self.sums[..groups] }
            }
        }
    }

    /// For threads that encode rows, or runs of whole groups of columns, side by side.
    pub fn writer(&mut self, needs: Needs) -> EncodedWriter<'_> {
        EncodedWriter {
            needs,
            cols: self.cols,
            f32: Parts::new(&mut self.f32),
            bf16: Parts::new(&mut self.bf16),
            q: Parts::new(&mut self.q),
            scales: Parts::new(&mut self.scales),
            sums: Parts::new(&mut self.sums),
        }
    }
}

/// See [`Encoded::writer`].
pub struct EncodedWriter<'a> {
    needs: Needs,
    cols: usize,
    f32: Parts<'a, f32>,
    bf16: Parts<'a, u16>,
    q: Parts<'a, i8>,
    scales: Parts<'a, f32>,
    sums: Parts<'a, f32>,
}

impl EncodedWriter<'_> {
    /// Encodes `x` as columns `from ..` of `row`. For int8, `from` and the length are multiples of 32.
    ///
    /// # Safety
    /// Nobody else writes these elements at the same time.
    pub unsafe fn write(&self, isa: Isa, row: usize, from: usize, x: &[f32]) {
        let at = row * self.cols + from;
        assert!(from + x.len() <= self.cols);
        // SAFETY: the caller keeps threads apart.
        unsafe {
            if self.needs.f32 {
                self.f32.get(at..at + x.len()).copy_from_slice(x);
            }
            if self.needs.bf16 {
                activations::encode_bf16(isa, x, self.bf16.get(at..at + x.len()));
            }
            if self.needs.int8 {
                assert!(from.is_multiple_of(GROUP) && x.len().is_multiple_of(GROUP));
                let (g, n) = (at / GROUP, x.len() / GROUP);
                let (scales, sums) = (self.scales.get(g..g + n), self.sums.get(g..g + n));
                activations::encode_int8(isa, x, self.q.get(at..at + x.len()), scales, sums);
            }
        }
    }
}

/// What each thread has of its own: its scratch, and the node of memory that it is bound to, by its place among those that have copies of weights.
#[derive(Default)]
pub struct Worker {
    pub node: usize,
    pub kernel: Scratch,
    /// Results of a row block: `[tokens, rows]`.
    pub tile: Vec<f32>,
    pub tile2: Vec<f32>,
    pub row: Vec<f32>,
    pub floats: Vec<f32>,
}

/// `len` elements of `v`, which grows to the largest use and then stays.
pub fn part(v: &mut Vec<f32>, len: usize) -> &mut [f32] {
    grow(v, len);
    &mut v[..len]
}

/// What carries tasks out: how to compute, with which weights, the threads and what each of them keeps.
pub struct ExecContext<'a> {
    pub isa: Isa,
    pub mode: Activations,
    pub weights: &'a [Weight],
    pub buffers: &'a [Buffer],
    pub pool: &'a mut Pool,
    pub workers: &'a mut PerThread<Worker>,
}

impl<'a> ExecContext<'a> {
    /// The same for a while.
    pub fn again(&mut self) -> ExecContext<'_> {
        ExecContext { pool: self.pool, workers: self.workers, ..*self }
    }

    /// Where a tensor lies.
    pub fn place(&self, t: Tensor) -> Place {
        Place::new(&self.buffers[t.buffer.number()], t)
    }

    /// The weight of a norm, and its epsilon.
    pub fn norm(&self, norm: &Norm) -> (&'a [f32], f32) {
        let place = self.place(norm.weight);
        // SAFETY: weights are written once, at load, and their buffers outlive the context.
        (unsafe { place.get(0, 0..place.cols) }, norm.eps)
    }

    /// What inputs these matrices take.
    pub fn needs(&self, matrices: impl IntoIterator<Item = MatrixId>) -> Needs {
        Needs::of(matrices.into_iter().map(|m| self.weights[m.number()].form().activation_format(self.mode)))
    }

    /// Waits for the weights of some linears: here and not in the tasks, so that threads with nothing to do leave the processor to the readers.
    pub fn wait_for<'l>(&self, linears: impl IntoIterator<Item = &'l Linear>) {
        linears.into_iter().for_each(|l| self.weights[l.matrix.number()].wait());
    }

    /// `out = linear(..)`, or with `add` `out += linear(..)`, for [`run_products`].
    pub fn product(&self, linear: &Linear, out: Place, add: bool) -> Product {
        let bias = linear.bias.map(|b| self.place(b));
        let (weight, row) = (linear.matrix.number(), linear.rows.start);
        Product { weight, row, rows: linear.rows.len(), out, bias, add, first_task: 0 }
    }

    /// See [`PerThread::reserve`].
    pub fn reserve(&mut self, tile: usize, row: usize, floats: usize, kernel: usize) {
        self.workers.reserve(tile, row, floats, kernel);
    }
}

impl PerThread<Worker> {
    /// Sizes every thread's tiles and scratch ahead: which thread gets which task varies, and a step must not allocate.
    pub fn reserve(&mut self, tile: usize, row: usize, floats: usize, kernel: usize) {
        for w in self.iter_mut() {
            grow(&mut w.tile, tile);
            grow(&mut w.tile2, tile);
            grow(&mut w.row, row);
            grow(&mut w.floats, floats);
            w.kernel.reserve(kernel);
        }
    }
}

impl Worker {
    pub fn bytes(&self) -> usize {
        let floats = self.tile.len() + self.tile2.len() + self.row.len() + self.floats.len();
        4 * floats + self.kernel.bytes()
    }
}

/// Tokens that one task encodes.
const ENCODE_TOKENS: usize = 4;

/// Encodes the rows of `x`, after an RMS norm where one is given.
pub fn encode(mut context: ExecContext, x: Place, norm: Option<&Norm>, needs: Needs, into: &mut Encoded) {
    let norm = norm.map(|n| context.norm(n));
    into.reset(x.rows, x.cols, needs);
    context.reserve(0, x.cols, 0, 0);
    let ExecContext { isa, pool, workers, .. } = context;
    let workers = &*workers;
    let writer = into.writer(needs);
    pool.run(x.rows.div_ceil(ENCODE_TOKENS), &|task, thread| {
        // SAFETY: one borrow, by the task that runs as this thread.
        let worker = unsafe { workers.get(thread) };
        for row in task * ENCODE_TOKENS..((task + 1) * ENCODE_TOKENS).min(x.rows) {
            // SAFETY: nobody writes `x` while it is encoded.
            let values = unsafe { x.get(row, 0..x.cols) };
            let values = match norm {
                None => values,
                Some((weight, eps)) => {
                    let normed = part(&mut worker.row, x.cols);
                    norm::rms_norm(isa, values, weight, eps, normed);
                    normed
                }
            };
            // SAFETY: this task alone writes this row.
            unsafe { writer.write(isa, row, 0, values) };
        }
    });
}

/// `out[t] (+)= W[rows] x[t] + bias` for all tokens.
#[derive(Clone, Copy)]
pub struct Product {
    pub weight: usize,
    pub row: usize,
    pub rows: usize,
    pub out: Place,
    /// `[1, rows]`
    pub bias: Option<Place>,
    pub add: bool,
    /// Tasks before this product's.
    pub first_task: usize,
}

/// Rows that one task takes at most.
pub const MOST_ROWS: usize = 128;

/// Rows that one task takes of matrices with `rows` rows in all: few enough that all threads have some, many enough that a task is
/// worth its overhead.
pub fn block_rows(rows: usize, threads: usize) -> usize {
    (rows / (threads * 4)).next_multiple_of(matmul::ROW_BLOCK).clamp(matmul::ROW_BLOCK, MOST_ROWS)
}

/// Below so many multiply-adds, distributing them costs more than it gains.
pub const SMALL: usize = 1 << 15;

/// Carries out `products` on the rows `tokens` of the encoded activations.
pub fn run_products(mut context: ExecContext, products: &mut [Product], encoded: &Encoded, tokens: &[u32]) {
    let rows: usize = products.iter().map(|p| p.rows).sum();
    let small = rows * encoded.cols * tokens.len() < SMALL;
    let block = if small { usize::MAX } else { block_rows(rows, context.pool.threads()) };
    let (mut tasks, mut tile_len, mut kernel) = (0, 0, 0);
    for product in products.iter_mut() {
        product.first_task = tasks;
        tasks += if small { 1 } else { product.rows.div_ceil(block) };
        let n = block.min(product.rows);
        tile_len = tile_len.max(tokens.len() * n);
        kernel = kernel.max(context.weights[product.weight].scratch_bytes(n, tokens.len(), context.mode));
    }
    context.reserve(tile_len, 0, 0, kernel);
    let ExecContext { isa, mode, weights, pool, workers, .. } = context;
    let (workers, products) = (&*workers, &*products);
    let task = |task: usize, thread: usize| {
        let product = &products[products.partition_point(|p| p.first_task <= task) - 1];
        let from = (task - product.first_task) * if small { 0 } else { block };
        let n = block.min(product.rows - from);
        // SAFETY: one borrow, by the task that runs as this thread.
        let worker = unsafe { workers.get(thread) };
        let weight = &weights[product.weight];
        let input = encoded.input(weight.form().activation_format(mode));
        let tile = part(&mut worker.tile, tokens.len() * n);
        let first = product.row + from;
        matmul::matmul(isa, &weight.matrix(worker.node), first..first + n, input, tokens, tile, &mut worker.kernel);
        for (t, tile) in tile.chunks_exact(n).enumerate() {
            // SAFETY: these columns of the output are this task's alone; the bias is never written.
            let (out, bias) =
                unsafe { (product.out.get_mut(t, from..from + n), product.bias.map(|b| b.get(0, from..from + n))) };
            store(out, tile, bias, product.add);
        }
    };
    if small {
        (0..tasks).for_each(|t| task(t, 0));
    } else {
        pool.run(tasks, &task);
    }
}

fn store(out: &mut [f32], values: &[f32], bias: Option<&[f32]>, add: bool) {
    match (bias, add) {
        (None, false) => out.copy_from_slice(values),
        (None, true) => out.iter_mut().zip(values).for_each(|(o, v)| *o += v),
        (Some(bias), false) => out.iter_mut().zip(values.iter().zip(bias)).for_each(|(o, (v, b))| *o = v + b),
        (Some(bias), true) => out.iter_mut().zip(values.iter().zip(bias)).for_each(|(o, (v, b))| *o += v + b),
    }
}

/// A matrix product that one thread does by itself: `tile = W[rows] x[tokens]`, `[tokens, rows]`.
pub fn tile<'a>(
    isa: Isa,
    matrix: &Matrix,
    rows: std::ops::Range<usize>,
    input: Input,
    tokens: &[u32],
    tile: &'a mut Vec<f32>,
    kernel: &mut Scratch,
) -> &'a mut [f32] {
    let tile = part(tile, tokens.len() * rows.len());
    matmul::matmul(isa, matrix, rows, input, tokens, tile, kernel);
    tile
}
