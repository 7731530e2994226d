//! Products of integers of 11 bits for prompts, from records that are made of weights and of tokens in scratch memory ([`super::int11`]).
//!
//! Records are made of weights that no kernel multiplies on tensor cores as they lie in memory: blocks, groups of 32 columns, and more bits than four. A block of the product's kernel
//! would have to unpack them anew for each 128 tokens. Of a mixture's experts records are made of some at a time.

use anyhow::Result;
use sluice_backend::WeightFormat;

use crate::device::stream::Gpu;
use crate::kernels::{
    Exact, INT11_BLOCK_FORMATS, INT11_FORMATS, Kernel, KernelFormat, RECORDS, RowLayout, STATIC_SHARED,
};
use crate::ops::activations::{EncodedActivations, INT11_GROUP as GROUP};
use crate::ops::int11_floats::{MOST_SPLIT, WIDE, in_portions};
use crate::ops::product::{PairTiles, Product};
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
/// The same of a mixture: pairs for each expert. Records are made of all experts.
pub const MIN_PAIRS: usize = 3;

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

    /// Of weights in this format of the kernels, with columns of a group and the type of its scale.
    fn of_kind(kind: KernelFormat, (group, element): (u32, u32)) -> Option<RecordForm> {
        let (bits, group) = (kind.bits()?, group as usize);
        match () {
            () if INT11_BLOCK_FORMATS.contains(&kind) => Some(RecordForm::blocks(RowLayout { bits, group, element })),
            () if INT11_FORMATS.contains(&kind) => RecordForm::affine(bits, group),
            () => None,
        }
    }

    fn of_matrix(matrix: &p::Matrix) -> Option<RecordForm> {
        RecordForm::of_kind(KernelFormat::from_number(matrix.kind), (matrix.group, matrix.element))
    }

    /// The kernels that multiply: with a matrix, and with some of a mixture's experts.
    fn kernels(self) -> Option<[Kernel; 2]> {
        Some(match (self.piece, self.sliced, self.biased) {
            (16, false, false) => [Kernel::GEMM_WIDE_16, Kernel::GEMM_WIDE_16_GROUPED],
            (16, false, true) => [Kernel::GEMM_WIDE_16_BIASED, Kernel::GEMM_WIDE_16_BIASED_GROUPED],
            (32, false, false) => [Kernel::GEMM_WIDE_32, Kernel::GEMM_WIDE_32_GROUPED],
            (32, false, true) => [Kernel::GEMM_WIDE_32_BIASED, Kernel::GEMM_WIDE_32_BIASED_GROUPED],
            (32, true, false) => [Kernel::GEMM_WIDE_32_SLICED, Kernel::GEMM_WIDE_32_SLICED_GROUPED],
            (32, true, true) => [Kernel::GEMM_WIDE_32_SLICED_BIASED, Kernel::GEMM_WIDE_32_SLICED_BIASED_GROUPED],
            (64, false, true) => [Kernel::GEMM_WIDE_64_BIASED, Kernel::GEMM_WIDE_64_BIASED_GROUPED],
            (64, true, true) => [Kernel::GEMM_WIDE_64_SLICED_BIASED, Kernel::GEMM_WIDE_64_SLICED_BIASED_GROUPED],
            _ => return None,
        })
    }

    /// The kernel that makes records.
    fn maker(self) -> Kernel {
        if self.affine { Kernel::INT11_RECORDS_AFFINE } else { Kernel::INT11_RECORDS_BLOCKS }
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

/// Bytes of so many tiles of tokens.
fn token_bytes(cols: usize, tiles: usize) -> usize {
    tiles * (cols / GROUP) * TOKEN_BYTES
}

/// Bytes of scratch memory that products of one input with `tokens` tokens take, whose matrices have so many rows together.
pub fn scratch_bytes(form: RecordForm, rows: usize, cols: usize, tokens: usize) -> usize {
    let records = rows.div_ceil(WIDE) * (cols / GROUP) * form.bytes();
    if tokens < MIN_TOKENS { 0 } else { records.min(MOST_SPLIT) + token_bytes(cols, tokens.div_ceil(WIDE)) }
}

/// The same of a mixture's products of one input, whose matrices have so many tiles of rows together for each of `experts`.
pub fn pair_scratch_bytes(form: RecordForm, tiles: usize, cols: usize, (pairs, experts): (usize, usize)) -> usize {
    if pairs < MIN_PAIRS * experts || !cols.is_multiple_of(GROUP) {
        return 0;
    }
    let of_expert = tiles * (cols / GROUP) * form.bytes();
    experts_at_a_time(of_expert, experts) * of_expert + token_bytes(cols, PairTiles::most(pairs, experts, WIDE))
}

/// Of how many experts records are made at a time, which take so many bytes of each.
fn experts_at_a_time(of_expert: usize, experts: usize) -> usize {
    (MOST_SPLIT / of_expert).clamp(1, experts)
}

/// Whether the device has room and instructions for this kernel.
fn takes(gpu: &Gpu, form: RecordForm, kernel: Kernel, cols: usize) -> bool {
    cols.is_multiple_of(GROUP) && gpu.device.has_kernel(kernel) && form.shared() + STATIC_SHARED <= gpu.device.shared
}

/// Products of the same columns and tokens on tensor cores. Returns whether a kernel took them.
pub fn multiply(gpu: &Gpu, products: &[Product], x: &EncodedActivations, exact: Exact) -> Result<bool> {
    let first = &products[0];
    let (cols, tokens, groups) = (first.cols, first.outputs, first.cols / GROUP);
    let form = |of: &Product| RecordForm::of_matrix(&of.matrix);
    let Some((own, [kernel, _])) = form(first).and_then(|own| Some((own, own.kernels()?))) else { return Ok(false) };
    let alike = |of: &Product| of.table.is_none() && of.rows > 0 && form(of) == Some(own);
    if !(exact.wide[RECORDS] && tokens >= MIN_TOKENS && takes(gpu, own, kernel, cols) && products.iter().all(alike)) {
        return Ok(false);
    }
    let record_bytes = |of: &Product| of.rows.div_ceil(WIDE) * groups * own.bytes();
    let tiles = tokens.div_ceil(WIDE);
    let mut arranged = None;
    in_portions(products, groups * own.bytes(), |products| {
        let bytes = token_bytes(cols, tiles) + products.iter().map(record_bytes).sum::<usize>();
        let tokens_at = x.reserve_slices(gpu, bytes)?;
        // Where a later portion needs more room, the tokens are put there again.
        if arranged != Some(tokens_at) {
            let (groups, piece) = (number(groups), number(own.piece));
            let arrange = p::Arrange { x: x.view, to: tokens_at, groups, piece, ..p::Arrange::default() };
            let grid = [number(tiles) * groups, 1, 1];
            // SAFETY: the encoded tokens are whole tiles, and room for as many was just reserved.
            unsafe { gpu.launch(Kernel::INT11_ARRANGE, grid, ARRANGE_THREADS, 0, &arrange)? };
            arranged = Some(tokens_at);
        }
        let mut at = tokens_at + token_bytes(cols, tiles) as u64;
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
        unsafe { gpu.launch(own.maker(), grid, RECORD_THREADS, 0, &records)? };
        let tiles = products.iter().map(|of| of.rows.div_ceil(WIDE)).sum::<usize>() * tiles;
        let grid = [number(tiles.min(gpu.device.multiprocessors)), 1, 1];
        // SAFETY: as above, and so were the tensors written.
        unsafe { gpu.launch(kernel, grid, WIDE_THREADS, number(own.shared()), &wide)? };
        Ok(())
    })?;
    Ok(true)
}

/// Whether [`multiply_pairs`] takes a mixture's products.
pub fn takes_pairs(gpu: &Gpu, kinds: &[KernelFormat], groups: Option<(u32, u32)>, cols: usize) -> bool {
    let (Some(exact), &[kind], Some(groups)) = (gpu.device.exact(), kinds, groups) else { return false };
    let form = RecordForm::of_kind(kind, groups).and_then(|form| Some((form, form.kernels()?)));
    exact.wide[RECORDS] && form.is_some_and(|(form, [_, kernel])| takes(gpu, form, kernel, cols))
}

/// Products of a mixture whose pairs are sorted by expert, in tiles of [`WIDE`].
pub fn multiply_pairs(gpu: &Gpu, products: &[Product], x: &EncodedActivations, tiles: PairTiles) -> Result<()> {
    let table = products[0].table.expect("a mixture");
    let (kind, cols, groups) = (table.kinds[0], products[0].cols, products[0].cols / GROUP);
    let form = table.groups.and_then(|of| RecordForm::of_kind(kind, of)).expect("it was looked for");
    let [_, kernel] = form.kernels().expect("it was looked for");
    let of_expert = |of: &Product| of.rows.div_ceil(WIDE) * groups * form.bytes();
    let all_of_expert: usize = products.iter().map(of_expert).sum();
    let at_a_time = experts_at_a_time(all_of_expert, table.count);
    let tokens = token_bytes(cols, tiles.max_tiles);
    let tokens_at = x.reserve_slices(gpu, tokens + at_a_time * all_of_expert)?;
    let arrange = p::Arrange {
        x: x.view,
        to: tokens_at,
        tiles: tiles.tiles,
        order: tiles.order,
        groups: number(groups),
        piece: number(form.piece),
        per_row: number(table.per_row),
        unused: 0,
    };
    // SAFETY: the sorted pairs are of rows that were encoded, and room for their tiles was just reserved.
    unsafe {
        gpu.launch(Kernel::INT11_ARRANGE, [number(tiles.max_tiles * groups), 1, 1], ARRANGE_THREADS, 0, &arrange)?
    };
    let (mut records, mut wide) =
        (p::Records { sliced: form.sliced.into(), ..p::Records::default() }, p::ExpertProducts::default());
    let mut at = tokens_at + tokens as u64;
    for (i, product) in products.iter().enumerate() {
        // What kernels skip has another format.
        let matrix = p::Matrix { kind: kind as u32, data: at, ..p::Matrix::default() };
        wide.parts[i] = p::Matmul { matrix, ..product.parameters(p::Encoded { n: tokens_at, ..x.view }) };
        (records.parts[i], records.to[i]) = (wide.parts[i], at);
        at += (at_a_time * of_expert(product)) as u64;
    }
    let row_tiles = products.iter().map(|of| of.rows.div_ceil(WIDE));
    let (most, all) = (row_tiles.clone().max().unwrap_or(0), row_tiles.sum::<usize>());
    for first in (0..table.count).step_by(at_a_time) {
        let experts = at_a_time.min(table.count - first);
        (records.first, wide.first, wide.experts) = (number(first), number(first), number(experts));
        let grid = [number(most * groups), number(products.len()), number(experts)];
        // SAFETY: the table's matrices have so many rows and columns, as tensors were checked to have; the scratch was just reserved.
        unsafe { gpu.launch(form.maker(), grid, RECORD_THREADS, 0, &records)? };
        let grid = [number((tiles.max_tiles * all).min(gpu.device.multiprocessors)), 1, 1];
        // SAFETY: as above, and so were the tensors written.
        unsafe { gpu.launch(kernel, grid, WIDE_THREADS, number(form.shared()), &wide)? };
    }
    Ok(())
}
