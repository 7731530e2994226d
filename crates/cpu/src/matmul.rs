//! Matrix products on the CPU: activations are encoded once for all matrices that share them, then row blocks of the matrices are
//! distributed among threads. A row of the result is always computed by one thread alone, so the distribution changes no bit.

use sluice_backend::Norm;
use sluice_kernels::input::Input;
use sluice_kernels::matrix::Matrix;
use sluice_kernels::scratch::Scratch;
use sluice_kernels::{Isa, matmul, norm};

use crate::encoded::{Encoded, Needs};
use crate::exec::{ExecContext, Product};
use crate::memory::{Place, part};

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
    into.lay_out(isa, needs, pool);
}

/// The most rows of one task.
pub const MAX_TASK_ROWS: usize = 128;

/// Rows of one task, for matrices with `rows` rows in all: few enough that all threads have some, many enough that a task
/// outweighs its overhead.
pub fn block_rows(rows: usize, threads: usize) -> usize {
    (rows / (threads * 4)).next_multiple_of(matmul::ROW_BLOCK).clamp(matmul::ROW_BLOCK, MAX_TASK_ROWS)
}

/// With fewer multiply-adds, one thread is faster than many.
pub const SMALL: usize = 1 << 15;

/// Runs `products` on the rows `tokens` of the encoded activations.
pub fn run_products(mut context: ExecContext, products: &mut [Product], encoded: &Encoded, tokens: &[u32]) {
    let rows: usize = products.iter().map(|p| p.rows).sum();
    let small = rows * encoded.cols() * tokens.len() < SMALL;
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
        let input = encoded.input(weight.format().activation_format(mode));
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

/// A matrix product on the calling thread: `tile = W[rows] x[tokens]`, `[tokens, rows]`.
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
