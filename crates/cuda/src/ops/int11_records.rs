//! Products of integers of 11 bits for prompts, from records that are made of weights and of tokens in scratch memory ([`super::int11`]).
//!
//! Records are made of weights that no kernel multiplies on tensor cores as they lie in memory: blocks, groups of 32 columns, and more bits than four. A block of the product's kernel
//! would have to unpack them anew for each 128 tokens.

use anyhow::Result;
use sluice_backend::WeightFormat;

use crate::device::stream::Gpu;
use crate::kernels::{Exact, INT11_BLOCK_FORMATS, Kernel, RECORDS, RowLayout, STATIC_SHARED};
use crate::ops::activations::{EncodedActivations, INT11_GROUP as GROUP};
use crate::ops::int11_floats::{MOST_SPLIT, WIDE, in_portions};
use crate::ops::product::Product;
use crate::parameters::{self as p, number};

/// `kernels/gemm/int11_records_wide.cu`: threads, stages of 64 columns.
const WIDE_THREADS: u32 = 384;
const STAGES: usize = 5;
/// `kernels/gemm/int11_records.cuh`: bytes of a record's integers, and of one number for each of its rows.
const INTEGERS: usize = 16384;
const NUMBERS: usize = 4 * WIDE;
const TOKEN_BYTES: usize = INTEGERS + 4 * NUMBERS;
/// `kernels/gemm/int11_records.cu`: threads of its kernels.
const RECORD_THREADS: u32 = 256;
const ARRANGE_THREADS: u32 = 512;
/// From so many tokens on records are made. Fewer are taken one after the other.
pub const MIN_TOKENS: usize = 5;

/// What a record has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordForm {
    /// Columns of a piece.
    piece: usize,
    biased: bool,
    /// Integers are multiplied in two slices.
    sliced: bool,
    affine: bool,
}

impl RecordForm {
    /// Of weights in this form; `None` where no records are made of them.
    pub fn of(format: WeightFormat) -> Option<RecordForm> {
        match format {
            WeightFormat::Affine { bits, group, .. } => RecordForm::affine(bits.into(), group.into()),
            _ => RowLayout::of(format).map(RecordForm::blocks),
        }
    }

    fn affine(bits: usize, group: usize) -> Option<RecordForm> {
        let piece = group.min(GROUP);
        // Sums of a piece's products reach 2^24.
        let sliced = piece * ((1 << bits) - 1) >= 1 << 10;
        matches!(group, 32 | 64 | 128).then_some(RecordForm { piece, biased: true, sliced, affine: true })
    }

    fn blocks(layout: RowLayout) -> RecordForm {
        let (biased, sliced) = (layout.is_biased(), layout.is_sliced());
        RecordForm { piece: layout.group, biased, sliced, affine: false }
    }

    fn of_matrix(matrix: &p::Matrix, in_blocks: bool) -> Option<RecordForm> {
        let (bits, group) = (matrix.bits as usize, matrix.group as usize);
        match in_blocks {
            true => Some(RecordForm::blocks(RowLayout { bits, group, element: matrix.element })),
            false => RecordForm::affine(bits, group),
        }
    }

    fn kernel(self) -> Option<Kernel> {
        Some(match (self.piece, self.sliced, self.biased) {
            (16, false, false) => Kernel::GEMM_WIDE_16,
            (16, false, true) => Kernel::GEMM_WIDE_16_BIASED,
            (32, false, false) => Kernel::GEMM_WIDE_32,
            (32, false, true) => Kernel::GEMM_WIDE_32_BIASED,
            (32, true, false) => Kernel::GEMM_WIDE_32_SLICED,
            (32, true, true) => Kernel::GEMM_WIDE_32_SLICED_BIASED,
            (64, false, true) => Kernel::GEMM_WIDE_64_BIASED,
            (64, true, true) => Kernel::GEMM_WIDE_64_SLICED_BIASED,
            _ => return None,
        })
    }

    /// Bytes of a record.
    fn bytes(self) -> usize {
        INTEGERS + if self.biased { 2 } else { 1 } * (GROUP / self.piece) * NUMBERS
    }

    /// Bytes of shared memory of a block.
    fn shared(self) -> usize {
        STAGES * (TOKEN_BYTES + self.bytes()) + 1024
    }
}

/// Bytes of the records of so many tokens.
fn token_bytes(cols: usize, tokens: usize) -> usize {
    tokens.div_ceil(WIDE) * (cols / GROUP) * TOKEN_BYTES
}

/// Bytes of scratch memory that products of one input with `tokens` tokens take, whose matrices have so many rows together.
pub fn scratch_bytes(form: RecordForm, rows: usize, cols: usize, tokens: usize) -> usize {
    let records = rows.div_ceil(WIDE) * (cols / GROUP) * form.bytes();
    if tokens < MIN_TOKENS { 0 } else { records.min(MOST_SPLIT) + token_bytes(cols, tokens) }
}

/// Products of the same columns and tokens on tensor cores. Returns whether a kernel took them.
pub fn multiply(gpu: &Gpu, products: &[Product], x: &EncodedActivations, exact: Exact) -> Result<bool> {
    let first = &products[0];
    let (cols, tokens, groups) = (first.cols, first.outputs, first.cols / GROUP);
    let in_blocks = INT11_BLOCK_FORMATS.contains(&first.kinds()[0]);
    let form = |of: &Product| RecordForm::of_matrix(&of.matrix, in_blocks);
    let Some((own, kernel)) = form(first).and_then(|own| Some((own, own.kernel()?))) else { return Ok(false) };
    let alike = |of: &Product| of.table.is_none() && of.rows > 0 && form(of) == Some(own);
    let fits = exact.wide[RECORDS]
        && tokens >= MIN_TOKENS
        && cols.is_multiple_of(GROUP)
        && gpu.device.has_kernel(kernel)
        && own.shared() + STATIC_SHARED <= gpu.device.shared
        && products.iter().all(alike);
    if !fits {
        return Ok(false);
    }
    let make = if in_blocks { Kernel::INT11_RECORDS_BLOCKS } else { Kernel::INT11_RECORDS_AFFINE };
    let record_bytes = |of: &Product| of.rows.div_ceil(WIDE) * groups * own.bytes();
    let mut arranged = None;
    in_portions(products, groups * own.bytes(), |products| {
        let bytes = token_bytes(cols, tokens) + products.iter().map(record_bytes).sum::<usize>();
        let tokens_at = x.reserve_slices(gpu, bytes)?;
        // Where a later portion needs more room, the tokens are put there again.
        if arranged != Some(tokens_at) {
            let arrange = p::Arrange { x: x.view, to: tokens_at, groups: number(groups), piece: number(own.piece) };
            let grid = [number(tokens.div_ceil(WIDE) * groups), 1, 1];
            // SAFETY: the encoded tokens are whole tiles, and room for as many was just reserved.
            unsafe { gpu.launch(Kernel::INT11_ARRANGE, grid, ARRANGE_THREADS, 0, &arrange)? };
            arranged = Some(tokens_at);
        }
        let mut at = tokens_at + token_bytes(cols, tokens) as u64;
        let mut records = p::Records { sliced: own.sliced.into(), ..p::Records::default() };
        let (mut wide, mut most_tiles) = (p::Products::default(), 0);
        for (i, product) in products.iter().enumerate() {
            let of = product.parameters(p::Encoded { n: tokens_at, ..x.view });
            (records.parts[i], records.to[i]) = (of, at);
            wide.parts[i] = p::Matmul { matrix: p::Matrix { data: at, ..of.matrix }, ..of };
            at += record_bytes(product) as u64;
            most_tiles = most_tiles.max(product.rows.div_ceil(WIDE));
        }
        let grid = [number(most_tiles * groups), number(products.len()), 1];
        // SAFETY: rows of the matrices were checked against their buffers; the scratch was just reserved.
        unsafe { gpu.launch(make, grid, RECORD_THREADS, 0, &records)? };
        let tiles = products.iter().map(|of| of.rows.div_ceil(WIDE)).sum::<usize>() * tokens.div_ceil(WIDE);
        let grid = [number(tiles.min(gpu.device.multiprocessors)), 1, 1];
        // SAFETY: as above, and so were the tensors written.
        unsafe { gpu.launch(kernel, grid, WIDE_THREADS, number(own.shared()), &wide)? };
        Ok(())
    })?;
    Ok(true)
}
