//! Products of integers of 11 bits with weights that are floats of sixteen bits, on tensor cores where these were seen to add exactly ([`super::int11`]).
//!
//! Prompts first make integers of the weights, some rows at a time, in scratch memory: a block of the product's kernel would have to make them anew for each 128 tokens.

use std::slice;

use anyhow::Result;

use crate::device::stream::Gpu;
use crate::kernels::{Exact, FLOATS, INT11_BLOCK_FORMATS, STATIC_SHARED, Variant};
use crate::ops::activations::{EncodedActivations, INT11_GROUP as GROUP, NORMED};
use crate::ops::product::{MAX_GRID_Y, Product};
use crate::parameters::{self as p, number};
use crate::weights::{HALVES, KernelFormat};

/// `kernels/gemm/int11_floats_few.cu`: rows of a set, groups of a turn, tokens and threads of a block, the most blocks of a multiprocessor, bytes of its rings.
const SET: usize = 16;
const TURN: usize = 16;
const FEW: [(usize, u32); 4] = [(1, 288), (2, 288), (4, 320), (8, 384)];
const FEW_BLOCKS: usize = 2;
const FEW_RINGS: usize = 8 * 3 * 4096;
/// Rows of a tile in the kernels for prompts.
pub const WIDE: usize = 128;

/// A kernel for prompts: tokens of a tile, threads of a block and bytes of its shared memory, the most blocks of a multiprocessor.
struct Large {
    tokens: usize,
    threads: u32,
    shared: usize,
    blocks: usize,
}

/// `kernels/gemm/int11_floats_wide.cu` and `kernels/gemm/int11_floats_mma.cu`.
const LARGE: [Large; 2] = [
    Large { tokens: 128, threads: 384, shared: 6 * (16384 + RECORD_BYTES) + 1024, blocks: 1 },
    Large { tokens: 64, threads: 256, shared: 3 * (8192 + RECORD_BYTES), blocks: 2 },
];
/// `kernels/gemm/int11_split.cu`: bytes of a record of [`WIDE`] rows and a group of columns, threads.
const RECORD_BYTES: usize = 16384 + 1024;
const SPLIT_THREADS: u32 = 256;
/// `kernels/gemv/fused_int11_floats.cu`: rows of a set, columns of a step, threads of a block, the most blocks of a multiprocessor.
const ONE_ROWS: usize = 2;
const ONE_STEP: usize = 256;
const ONE_THREADS: u32 = 512;
const ONE_BLOCKS: usize = 2;
/// Tokens of the largest tile of [`FEW`].
const FEW_TOKENS: usize = 8;
/// The most bytes of integers that are made at a time, unless a product's rows are not consecutive.
pub const MOST_SPLIT: usize = 128 << 20;

/// Bytes of shared memory of a block for `tokens` tokens.
fn few_shared(tokens: usize, cols: usize) -> usize {
    FEW_RINGS + 4 * 2 * 2 * TURN * tokens * SET + cols / GROUP * 128 * tokens
}

/// Bytes of the integers of these rows.
fn split_bytes(rows: usize, cols: usize) -> usize {
    rows.div_ceil(WIDE) * (cols / GROUP) * RECORD_BYTES
}

/// Bytes of scratch memory that products of one input with `tokens` tokens take, whose matrices have so many rows together.
pub fn scratch_bytes(rows: usize, cols: usize, tokens: usize) -> usize {
    if tokens <= FEW_TOKENS { 0 } else { split_bytes(rows, cols).min(MOST_SPLIT) }
}

/// Products in portions whose integers fit [`MOST_SPLIT`]: all together, or some rows of one at a time. `tile_bytes`: of the integers of [`WIDE`] rows.
pub fn in_portions(
    products: &[Product],
    tile_bytes: usize,
    mut launch: impl FnMut(&[Product]) -> Result<()>,
) -> Result<()> {
    if products.iter().map(|of| of.rows.div_ceil(WIDE)).sum::<usize>() * tile_bytes <= MOST_SPLIT {
        return launch(products);
    }
    let at_a_time = (MOST_SPLIT / tile_bytes).max(1) * WIDE;
    for product in products {
        if product.runs.is_some() {
            launch(slice::from_ref(product))?;
            continue;
        }
        // As many rows each time.
        let times = product.rows.div_ceil(at_a_time);
        let each = product.rows.div_ceil(times).next_multiple_of(WIDE);
        for row in (0..product.rows).step_by(each) {
            let (rows, matrix) = (each.min(product.rows - row), rows_from(product.matrix, row));
            let mut some = Product { rows, matrix, ..*product };
            some.out.at += 4 * row as u64;
            some.bias += if product.bias == 0 { 0 } else { 4 * row as u64 };
            launch(&[some])?;
        }
    }
    Ok(())
}

/// A matrix from a row on.
fn rows_from(mut matrix: p::Matrix, row: usize) -> p::Matrix {
    let row = row as u64;
    // Blocks have all in a row, affine weights scales and biases in arrays of their own, floats neither.
    let of_scales = match KernelFormat::from_number(matrix.kind) {
        kind if INT11_BLOCK_FORMATS.contains(&kind) => matrix.row_bytes,
        _ => u64::from(matrix.groups) * if HALVES.contains(&matrix.element) { 2 } else { 4 },
    };
    matrix.data += row * matrix.row_bytes;
    matrix.scales += row * of_scales;
    matrix.biases += row * of_scales;
    matrix
}

/// Whether large tiles take less time than passes of a few tokens, by what an H200 took for matrices of 1,024 to 24,576 rows: a pass reads all weights, and integers of
/// weights are written and read once more.
fn large_pays(rows: usize, cols: usize, tokens: usize, multiprocessors: usize) -> bool {
    let bytes = (2 * rows * cols) as f64;
    let few = tokens.div_ceil(FEW_TOKENS) as f64 * (4e-6 + bytes / 2e12);
    let waves = (rows.div_ceil(WIDE) * tokens.div_ceil(WIDE)).div_ceil(multiprocessors);
    let large = 1e-5 + 3.0 * bytes / 3e12 + 1.4e-6 * (waves * cols / GROUP) as f64;
    tokens > FEW_TOKENS && large < few
}

/// Whether rows of all are aligned as tensor-core kernels load them.
fn fits(products: &[Product]) -> bool {
    products.iter().all(|product| {
        product.table.is_none()
            && product.cols.is_multiple_of(GROUP)
            && (product.matrix.data | product.matrix.row_bytes).is_multiple_of(16)
            && product.rows > 0
    })
}

/// Products of the same columns and tokens on tensor cores. Returns whether a kernel took them.
pub fn multiply(gpu: &Gpu, products: &[Product], x: &EncodedActivations, exact: Exact) -> Result<bool> {
    let first = &products[0];
    let kind = first.kinds()[0];
    if first.kinds().len() > 1 || !fits(products) {
        return Ok(false);
    }
    let shared = gpu.device.shared;
    let large = LARGE.iter().zip([kind.gemm_wide(), kind.gemm_slices()]).zip([exact.wide, exact.few]);
    let mut large = large.filter_map(|((tiles, kernel), exact)| {
        let kernel = kernel.filter(|kernel| exact[FLOATS] && gpu.device.has_kernel(*kernel))?;
        (tiles.shared + STATIC_SHARED <= shared).then_some((tiles, kernel))
    });
    let rows = products.iter().map(|product| product.rows).sum();
    let pays = large_pays(rows, first.cols, first.outputs, gpu.device.multiprocessors);
    if let (Some(split), Some((of, kernel))) = (kind.int11_split(), large.next().filter(|_| pays)) {
        let launch = |products: &[Product]| -> Result<()> {
            let mut at = x.reserve_slices(gpu, products.iter().map(|of| split_bytes(of.rows, of.cols)).sum())?;
            let (mut splits, mut wides) = (p::Split::default(), p::Products::default());
            let mut most_tiles = 0;
            for (i, product) in products.iter().enumerate() {
                let of = product.parameters(x.view);
                (splits.parts[i], splits.to[i]) = (of, at);
                wides.parts[i] = p::Matmul { matrix: p::Matrix { data: at, ..of.matrix }, ..of };
                at += split_bytes(product.rows, product.cols) as u64;
                most_tiles = most_tiles.max(product.rows.div_ceil(WIDE));
            }
            let grid = [number(most_tiles * (first.cols / GROUP)), number(products.len()), 1];
            // SAFETY: rows of the matrices were checked against their buffers; the scratch was just reserved.
            unsafe { gpu.launch(split, grid, SPLIT_THREADS, 0, &splits)? };
            let tiles: usize = products.iter().map(|product| product.rows.div_ceil(WIDE)).sum();
            let tiles = tiles * first.outputs.div_ceil(of.tokens);
            let blocks = gpu.device.multiprocessors * (shared / (of.shared + 1024)).clamp(1, of.blocks);
            let grid = [number(tiles.min(blocks)), 1, 1];
            // SAFETY: as above, and so were rows of x and the tensors written.
            unsafe { gpu.launch(kernel, grid, of.threads, number(of.shared), &wides)? };
            Ok(())
        };
        in_portions(products, split_bytes(WIDE, first.cols), launch)?;
        return Ok(true);
    }
    // All tokens at once, or as many as there is room for.
    let room = |tokens: usize| few_shared(tokens, first.cols) + STATIC_SHARED <= shared;
    let mut fitting = FEW.iter().enumerate().filter(|(_, (tokens, _))| room(*tokens));
    let all = fitting.clone().find(|(_, (tokens, _))| *tokens >= first.outputs);
    let Some((tile, &(tokens, threads))) = all.or_else(|| fitting.next_back()).filter(|_| exact.few[FLOATS]) else {
        return Ok(false);
    };
    let Some(kernel) = kind.gemm_few(tile).filter(|_| first.outputs.div_ceil(tokens) <= MAX_GRID_Y) else {
        return Ok(false);
    };
    let mut parameters = p::Products::default();
    for (product, part) in products.iter().zip(&mut parameters.parts) {
        *part = product.parameters(x.view);
    }
    let bytes = few_shared(tokens, first.cols);
    let blocks = gpu.device.multiprocessors * (shared / (bytes + 1024)).clamp(1, FEW_BLOCKS);
    let sets = products.iter().map(|p| p.rows.div_ceil(SET)).sum::<usize>();
    let grid = [number(sets.min(blocks)), number(first.outputs.div_ceil(tokens)), 1];
    // SAFETY: as above.
    unsafe { gpu.launch(kernel, grid, threads, number(bytes), &parameters)? };
    Ok(true)
}

/// [`super::int11::multiply_one`] with such weights: products of one token that comes as floats.
pub fn multiply_one(gpu: &Gpu, (x, norm): (p::Tensor, p::Norm), products: &[Product], gated: bool) -> Result<bool> {
    let first = &products[0];
    let (kind, cols) = (first.kinds()[0], first.cols);
    let Some(kernel) = kind.gemv_one_floats().filter(|_| gpu.device.has(Variant::One)) else { return Ok(false) };
    let alike =
        |product: &Product| (product.cols, product.outputs, product.matrix.kind) == (cols, 1, first.matrix.kind);
    let aligned = [x.at, norm.weight].iter().all(|at| at.is_multiple_of(16));
    let normed = norm.weight == 0 || cols.is_multiple_of(NORMED);
    if products.len() > p::PARTS || !fits(products) || !products.iter().all(alike) || !aligned || !normed {
        return Ok(false);
    }
    // Integers, what makes up for additions, powers, and the norm's weights.
    let padded = cols.next_multiple_of(ONE_STEP);
    let bytes = 4 * padded + 4 * padded / 8 + 4 * padded / GROUP + if norm.weight != 0 { 4 * cols } else { 0 };
    if bytes + STATIC_SHARED > gpu.device.shared {
        return Ok(false);
    }
    let mut parameters = p::OneToken { x, norm, gated: gated.into(), keeps: 1, ..p::OneToken::default() };
    for (product, part) in products.iter().zip(&mut parameters.parts) {
        *part = product.parameters(p::Encoded::default());
    }
    let sets = products.iter().map(|product| product.rows.div_ceil(ONE_ROWS)).sum::<usize>();
    let tasks = if gated { sets / 2 } else { sets };
    let multiprocessors = gpu.device.multiprocessors;
    let resident = (gpu.device.shared / (bytes + 2048)).clamp(1, ONE_BLOCKS);
    // A few tasks are spread over all multiprocessors.
    let blocks =
        tasks.div_ceil(ONE_THREADS as usize / 32).clamp(tasks.min(multiprocessors), resident * multiprocessors);
    // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
    unsafe { gpu.launch(kernel, [number(blocks), 1, 1], ONE_THREADS, number(bytes), &parameters)? };
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Portions have the rows of the whole, each where it lies, and go where it goes.
    #[test]
    fn portions_are_the_rows_of_the_whole() {
        let affine = p::Matrix {
            kind: KernelFormat::Q8Int11 as u32,
            element: 2,
            groups: 64,
            row_bytes: 4096,
            data: 1 << 40,
            scales: 1 << 41,
            biases: 1 << 42,
            ..p::Matrix::default()
        };
        let blocks = p::Matrix {
            kind: KernelFormat::B4Int11 as u32,
            row_bytes: 2304,
            scales: (1 << 40) + 2048,
            biases: (1 << 40) + 2292,
            ..affine
        };
        let floats = p::Matrix {
            kind: KernelFormat::Bf16Int11 as u32,
            groups: 0,
            row_bytes: 8192,
            scales: 0,
            biases: 0,
            ..affine
        };
        for (matrix, of_scales) in [(affine, 128), (blocks, 2304), (floats, 0)] {
            let (rows, out) = (50_000, p::Tensor::dense(1 << 43, 50_000));
            let mut next = 0;
            let product = Product {
                matrix,
                table: None,
                rows,
                cols: 4096,
                outputs: 8,
                out,
                bias: 1 << 44,
                accumulate: false,
                runs: None,
            };
            in_portions(&[product], 64 * (16384 + 1024), |portion| {
                let [some] = portion else { panic!("a portion of one product") };
                let row = next as u64;
                assert!(some.rows * 64 * 17408 <= WIDE * MOST_SPLIT, "{} rows", some.rows);
                assert_eq!(some.matrix.data, matrix.data + row * matrix.row_bytes);
                assert_eq!(some.matrix.scales, matrix.scales + row * of_scales);
                assert_eq!(some.matrix.biases, matrix.biases + row * of_scales);
                assert_eq!((some.out.at, some.bias), ((1 << 43) + 4 * row, (1 << 44) + 4 * row));
                next += some.rows;
                Ok(())
            })
            .unwrap();
            assert_eq!(next, rows);
        }
    }
}
