//! Products of integers of 11 bits with weights in blocks ([`super::int11`]): of one token in one kernel with what comes before them, and of prompts on tensor cores.
//!
//! Prompts first make records of the weights, some rows at a time, and of the tokens, in scratch memory: groups of 16 or 32 columns need them in another order than
//! [`super::int11`]'s, and a block of the product's kernel would have to unpack weights anew for each 128 tokens.

use anyhow::Result;

use crate::device::stream::Gpu;
use crate::kernels::{BLOCKS, Exact, Kernel, RowLayout, STATIC_SHARED, Variant};
use crate::ops::activations::{EncodedActivations, INT11_GROUP as GROUP, NORMED};
use crate::ops::int11::{ONE_BLOCKS, ONE_THREADS};
use crate::ops::int11_floats::{WIDE, in_portions};
use crate::ops::product::Product;
use crate::parameters::{self as p, number};

/// `kernels/gemm/int11_blocks_wide.cu`: threads, stages of groups.
const WIDE_THREADS: u32 = 384;
const STAGES: usize = 5;
/// `kernels/gemm/int11_records.cuh`: bytes of a record's integers, and of one number for each of its rows.
const INTEGERS: usize = 16384;
const NUMBERS: usize = 4 * WIDE;
const TOKEN_BYTES: usize = INTEGERS + 4 * NUMBERS;
/// `kernels/gemm/int11_records.cu`: threads of its two kernels.
const RECORD_THREADS: u32 = 256;
const ARRANGE_THREADS: u32 = 512;
/// From so many tokens on records are made. Fewer are taken one after the other.
const MIN_WIDE: usize = 5;
/// `kernels/gemv/fused_int11_blocks.cu`: the product of a set's rows and the columns of a group, and the pieces of a turn.
const ONE_COLUMNS: usize = 512;
const ONE_PIECES: usize = 64;

/// How prompts take weights.
struct Records {
    kernel: Kernel,
    bytes: usize,
    sliced: bool,
}

impl Records {
    fn of(layout: RowLayout) -> Records {
        let (sliced, biased) = (layout.is_sliced(), layout.is_biased());
        let kernel = match (layout.group, sliced, biased) {
            (16, _, false) => Kernel::GEMM_WIDE_16,
            (16, _, true) => Kernel::GEMM_WIDE_16_BIASED,
            (_, false, false) => Kernel::GEMM_WIDE_32,
            (_, false, true) => Kernel::GEMM_WIDE_32_BIASED,
            (_, true, _) => Kernel::GEMM_WIDE_32_SLICED,
        };
        let scales = if biased { 2 } else { 1 } * GROUP / layout.group;
        Records { kernel, bytes: INTEGERS + scales * NUMBERS, sliced }
    }

    /// Bytes of shared memory of a block.
    fn shared(&self) -> usize {
        STAGES * (TOKEN_BYTES + self.bytes) + 1024
    }
}

fn layout_of(matrix: &p::Matrix) -> RowLayout {
    RowLayout { bits: matrix.bits as usize, group: matrix.group as usize, element: matrix.element }
}

/// Bytes of the records of so many tokens.
fn token_bytes(cols: usize, tokens: usize) -> usize {
    tokens.div_ceil(WIDE) * (cols / GROUP) * TOKEN_BYTES
}

/// Bytes of scratch memory that products of one input with `tokens` tokens take, whose matrices have so many rows together.
pub fn scratch_bytes(layout: RowLayout, rows: usize, cols: usize, tokens: usize) -> usize {
    let records = rows.div_ceil(WIDE) * (cols / GROUP) * Records::of(layout).bytes;
    if tokens < MIN_WIDE { 0 } else { records.min(super::int11_floats::MOST_SPLIT) + token_bytes(cols, tokens) }
}

/// Products of the same columns and tokens on tensor cores. Returns whether a kernel took them.
pub fn multiply(gpu: &Gpu, products: &[Product], x: &EncodedActivations, exact: Exact) -> Result<bool> {
    let first = &products[0];
    let (cols, tokens, groups) = (first.cols, first.outputs, first.cols / GROUP);
    let records = Records::of(layout_of(&first.matrix));
    let alike = |of: &Product| of.table.is_none() && layout_of(&of.matrix) == layout_of(&first.matrix) && of.rows > 0;
    let fits = exact.wide[BLOCKS]
        && tokens >= MIN_WIDE
        && cols.is_multiple_of(GROUP)
        && gpu.device.has_kernel(records.kernel)
        && records.shared() + STATIC_SHARED <= gpu.device.shared
        && products.iter().all(alike);
    if !fits {
        return Ok(false);
    }
    let record_bytes = |of: &Product| of.rows.div_ceil(WIDE) * groups * records.bytes;
    let mut arranged = None;
    in_portions(products, groups * records.bytes, |products| {
        // Where a later portion needs more room, the tokens are put there again.
        let bytes = token_bytes(cols, tokens) + products.iter().map(record_bytes).sum::<usize>();
        let tokens_at = x.reserve_slices(gpu, bytes)?;
        if arranged != Some(tokens_at) {
            let arrange = p::Arrange { x: x.view, to: tokens_at, groups: number(groups), piece: first.matrix.group };
            let grid = [number(tokens.div_ceil(WIDE) * groups), 1, 1];
            // SAFETY: the encoded tokens are whole tiles, and room for as many was just reserved.
            unsafe { gpu.launch(Kernel::INT11_ARRANGE, grid, ARRANGE_THREADS, 0, &arrange)? };
            arranged = Some(tokens_at);
        }
        let mut at = tokens_at + token_bytes(cols, tokens) as u64;
        let (mut made, mut wide) = (p::Records::default(), p::Products::default());
        made.sliced = records.sliced.into();
        let mut most_tiles = 0;
        for (i, product) in products.iter().enumerate() {
            let of = product.parameters(p::Encoded { n: tokens_at, ..x.view });
            (made.parts[i], made.to[i]) = (of, at);
            wide.parts[i] = p::Matmul { matrix: p::Matrix { data: at, ..of.matrix }, ..of };
            at += record_bytes(product) as u64;
            most_tiles = most_tiles.max(product.rows.div_ceil(WIDE));
        }
        let grid = [number(most_tiles * groups), number(products.len()), 1];
        // SAFETY: rows of the matrices were checked against their buffers; the scratch was just reserved.
        unsafe { gpu.launch(Kernel::INT11_RECORDS, grid, RECORD_THREADS, 0, &made)? };
        let tiles = products.iter().map(|of| of.rows.div_ceil(WIDE)).sum::<usize>() * tokens.div_ceil(WIDE);
        let grid = [number(tiles.min(gpu.device.multiprocessors)), 1, 1];
        // SAFETY: as above, and so were the tensors written.
        unsafe { gpu.launch(records.kernel, grid, WIDE_THREADS, number(records.shared()), &wide)? };
        Ok(())
    })?;
    Ok(true)
}

/// [`super::int11::multiply_one`] with such weights: products of tokens that come as floats, of one or of a few after another.
pub fn multiply_one(
    gpu: &Gpu,
    (x, norm, tokens): (p::Tensor, p::Norm, usize),
    products: &[Product],
    gated: bool,
) -> Result<bool> {
    let first = &products[0];
    let (kind, cols, groups) = (first.kinds()[0], first.cols, first.cols / GROUP);
    let layout = layout_of(&first.matrix);
    let Some(kernel) = kind.gemv_one_blocks().filter(|_| gpu.device.has(Variant::One)) else { return Ok(false) };
    let alike = |product: &Product| {
        (product.cols, product.outputs) == (cols, tokens)
            && product.table.is_none()
            && product.matrix.kind == first.matrix.kind
            && layout_of(&product.matrix) == layout
    };
    let fits = products.len() <= p::PARTS
        && tokens < MIN_WIDE
        && cols.is_multiple_of(GROUP)
        && [x.at, 4 * x.stride, norm.weight].iter().all(|at| at.is_multiple_of(16))
        && (norm.weight == 0 || cols.is_multiple_of(NORMED));
    if !fits || !products.iter().all(alike) {
        return Ok(false);
    }
    // Slices of the token, powers and sums, numbers of its pieces; what two turns leave for chains.
    let (rows, numbers) = (ONE_COLUMNS / layout.group, if layout.is_biased() { 3 } else { 2 });
    let turns = 4 * 2 * numbers * rows * (ONE_PIECES + 1);
    let bytes = 16 * 8 * (groups + 1) + 4 * 2 * groups.next_multiple_of(4) + 16 * groups + turns;
    // A norm needs the floats, and its weights.
    let room = |bytes: usize| bytes + STATIC_SHARED <= gpu.device.shared;
    let normed = norm.weight != 0;
    let keeps = normed || room(bytes + 4 * cols);
    let bytes = bytes + if keeps { 4 * cols } else { 0 } + if normed { 4 * cols } else { 0 };
    if !room(bytes) {
        return Ok(false);
    }
    let resident = (gpu.device.shared / (bytes + 1024)).clamp(1, ONE_BLOCKS);
    let sets = products.iter().map(|of| of.rows.div_ceil(rows)).sum::<usize>() / if gated { 2 } else { 1 };
    let grid = [number(sets.min(gpu.device.multiprocessors * resident)), 1, 1];
    let row = |of: p::Tensor, token: usize| p::Tensor { at: of.at + 4 * token as u64 * of.stride, ..of };
    for token in 0..tokens {
        let (x, gated, keeps) = (row(x, token), gated.into(), keeps.into());
        let mut parameters = p::OneToken { x, norm, gated, keeps, ..p::OneToken::default() };
        for (product, part) in products.iter().zip(&mut parameters.parts) {
            let own = Product { outputs: 1, out: row(product.out, token), ..*product };
            *part = own.parameters(p::Encoded::default());
        }
        // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
        unsafe { gpu.launch(kernel, grid, ONE_THREADS, number(bytes), &parameters)? };
    }
    Ok(true)
}
