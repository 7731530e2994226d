//! Products of a mixture's experts that have a few tokens each, and of a matrix of many rows with a few tokens.

use anyhow::Result;

use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::{STATIC_SHARED, Variant};
use crate::ops::activations::EncodedActivations;
use crate::ops::product::{PairTiles, Product};
use crate::parameters::{self as p, number};
use crate::weights::{self, KernelFormat, Needs};

/// Columns of a weight group, threads and rows of a block, and the tokens of a tile.
const GROUP: usize = 64;
const THREADS: u32 = 128;
const ROWS: usize = 64;
pub const TILE_TOKENS: usize = 8;
/// The most tokens of [`long_gemm`], which reads the whole matrix for every eight of them.
const MAX_LONG_TOKENS: usize = 32;
/// The most blocks for each multiprocessor, and the bytes of shared memory that each has beside the dynamic part.
const BLOCKS: usize = 4;
const STATIC_BYTES: usize = 8 << 10;

/// The products of [`grouped_gemm`].
#[derive(Clone, Copy)]
pub struct GroupedProduct<'a> {
    /// `[experts]` [`p::Matrix`] of the projection, and of up for `silu(gate) * up`.
    pub tables: [Address; 2],
    pub kinds: &'a [KernelFormat],
    pub groups: Option<(u32, u32)>,
    pub tiles: PairTiles,
    /// Pairs of each row of x.
    pub per_row: usize,
    pub rows: usize,
    pub pairs: usize,
    pub experts: usize,
}

impl GroupedProduct<'_> {
    /// Whether [`grouped_gemm`] can take matrices of these kinds with `cols` columns on this device.
    pub fn fits(gpu: &Gpu, kinds: &[KernelFormat], groups: Option<(u32, u32)>, cols: usize) -> bool {
        let &[kind] = kinds else { return false };
        groups.is_some_and(|(group, element)| group as usize == GROUP && weights::HALVES.contains(&element))
            && kind.grouped_gemm().is_some()
            && cols.is_multiple_of(GROUP)
            && shared_bytes(kind, cols) + STATIC_SHARED <= gpu.device.shared
    }
}

/// Bytes of dynamic shared memory of a block: activations with their scales, and a ring of weights for each warp.
fn shared_bytes(kind: KernelFormat, cols: usize) -> usize {
    let (bits, groups) = (kind.bits().unwrap_or(8), cols / GROUP);
    let (row, deep) = (32 * bits + if bits == 4 { 0 } else { 16 }, if bits <= 4 { 3 } else { 2 });
    let ring = deep * 16 * (row + 16);
    TILE_TOKENS * (cols.next_multiple_of(128) + 32 + 12 * groups) + THREADS as usize / 32 * ring
}

/// What [`grouped_gemm`] writes: one product as f32, or `silu(gate) * up` encoded as int8.
pub enum GroupedOutput<'a> {
    Floats(p::Tensor),
    Hidden(&'a mut EncodedActivations),
}

/// The blocks that the device runs at once, and the shared memory of each.
fn blocks(gpu: &Gpu, kind: KernelFormat, cols: usize) -> (usize, usize) {
    let shared = shared_bytes(kind, cols);
    ((gpu.device.shared / (shared + STATIC_BYTES)).clamp(1, BLOCKS) * gpu.device.multiprocessors, shared)
}

/// Products of experts that have a few tokens each.
pub fn grouped_gemm(gpu: &Gpu, product: GroupedProduct, x: &EncodedActivations, out: GroupedOutput) -> Result<()> {
    let GroupedProduct { tables: [table, up], kinds, groups, tiles, per_row, rows, pairs, experts } = product;
    assert!(GroupedProduct::fits(gpu, kinds, groups, x.cols), "products of experts that have a few tokens each");
    assert_eq!(x.rows * per_row, pairs, "tokens");
    let (Some([gated, plain]), Some((_, element))) = (kinds[0].grouped_gemm(), groups) else { unreachable!("it fits") };
    let mut parameters = p::GroupedGemm {
        table,
        up,
        tiles: tiles.tiles,
        order: tiles.order,
        x: x.view,
        per_row: number(per_row),
        rows: number(rows),
        cols: number(x.cols),
        element,
        most_tiles: number(tiles.max_tiles),
        experts: number(experts),
        ..p::GroupedGemm::default()
    };
    let (kernel, set_rows) = match out {
        GroupedOutput::Floats(out) => {
            parameters.out = out;
            (plain, ROWS)
        }
        GroupedOutput::Hidden(hidden) => {
            parameters.hidden = hidden.reserve(gpu, pairs, rows, Needs::INT8)?;
            (gated, ROWS / 2)
        }
    };
    let (blocks, shared) = blocks(gpu, kinds[0], x.cols);
    let blocks = (tiles.max_tiles * rows.div_ceil(set_rows)).min(blocks);
    // SAFETY: the tables' matrices have so many rows and columns, as tensors were checked to have; the scratch was just reserved.
    unsafe { gpu.launch(kernel, [number(blocks), 1, 1], THREADS, number(shared), &parameters)? };
    Ok(())
}

/// The product of a few tokens with a matrix of so many rows that each block takes several sets of them, as a vocabulary's. Returns whether a kernel took it.
pub fn long_gemm(gpu: &Gpu, product: &Product, x: &EncodedActivations) -> Result<bool> {
    let &Product { matrix, rows, cols, outputs: tokens, out, .. } = product;
    let Some((kind, group, element)) =
        product.integers().filter(|_| gpu.device.has(Variant::Few) && gpu.device.has(Variant::Tiles))
    else {
        return Ok(false);
    };
    let plain = product.table.is_none() && product.bias == 0 && product.runs.is_none() && !product.accumulate;
    if !plain
        || !(2..=MAX_LONG_TOKENS).contains(&tokens)
        || !GroupedProduct::fits(gpu, &[kind], Some((group, element)), cols)
    {
        return Ok(false);
    }
    let (blocks, shared) = blocks(gpu, kind, cols);
    if rows.div_ceil(ROWS) < blocks {
        return Ok(false);
    }
    let parameters = p::GroupedGemm {
        x: x.view,
        out,
        per_row: 1,
        rows: number(rows),
        cols: number(cols),
        element,
        matrix,
        tokens: number(tokens),
        ..p::GroupedGemm::default()
    };
    let Some([_, kernel]) = kind.grouped_gemm() else { unreachable!("it fits") };
    // SAFETY: rows of the matrix and of x, and the tensor written, were checked against their buffers.
    unsafe { gpu.launch(kernel, [number(blocks), 1, 1], THREADS, number(shared), &parameters)? };
    Ok(true)
}
