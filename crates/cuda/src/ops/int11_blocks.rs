//! Products of integers of 11 bits with weights in blocks, of one token in one kernel with what comes before them ([`super::int11`]).

use anyhow::Result;

use crate::device::stream::Gpu;
use crate::kernels::{RowLayout, STATIC_SHARED, Variant};
use crate::ops::activations::{INT11_GROUP as GROUP, NORMED};
use crate::ops::int11_records::MIN_TOKENS;
use crate::ops::product::Product;
use crate::parameters::{self as p, number};

/// `kernels/gemv/one_turns.cuh`: threads of a block, the most blocks of a multiprocessor.
pub const ONE_THREADS: u32 = 544;
pub const ONE_BLOCKS: usize = 2;
/// `kernels/gemv/fused_int11_blocks.cu`: the product of a set's rows and the columns of a group, and the pieces of a turn.
const ONE_COLUMNS: usize = 512;
const ONE_PIECES: usize = 64;

/// [`super::int11::multiply_one`] with such weights: products of tokens that come as floats, of one or of a few after another.
pub fn multiply_one(
    gpu: &Gpu,
    (x, norm, tokens): (p::Tensor, p::Norm, usize),
    products: &[Product],
    gated: bool,
) -> Result<bool> {
    let first = &products[0];
    let (kind, cols, groups) = (first.kinds()[0], first.cols, first.cols / GROUP);
    let of = |m: &p::Matrix| RowLayout { bits: m.bits as usize, group: m.group as usize, element: m.element };
    let layout = of(&first.matrix);
    let Some(kernel) = kind.gemv_one_blocks().filter(|_| gpu.device.has(Variant::One)) else { return Ok(false) };
    let alike = |product: &Product| {
        (product.cols, product.outputs) == (cols, tokens)
            && product.table.is_none()
            && product.matrix.kind == first.matrix.kind
            && of(&product.matrix) == layout
    };
    let fits = products.len() <= p::PARTS
        && tokens < MIN_TOKENS
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
    for token in 0..tokens {
        let (x, gated, keeps) = (x.rows_from(token), gated.into(), keeps.into());
        let mut parameters = p::OneToken { x, norm, gated, keeps, ..p::OneToken::default() };
        for (product, part) in products.iter().zip(&mut parameters.parts) {
            *part = product.of_token(token).parameters(p::Encoded::default());
        }
        // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
        unsafe { gpu.launch(kernel, grid, ONE_THREADS, number(bytes), &parameters)? };
    }
    Ok(true)
}
