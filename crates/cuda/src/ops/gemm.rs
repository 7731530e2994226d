//! Products of several tokens on tensor cores with int8 activations: by tiles, by blocks of sixteen rows, and by balanced blocks.

use anyhow::Result;

use crate::device::stream::Gpu;
use crate::kernels::{STATIC_SHARED, Variant};
use crate::ops::activations::GROUP;
use crate::ops::product::{MAX_GRID_Y, Product};
use crate::parameters::{self as p, number};
use crate::weights::{self, KernelFormat, LaunchShape};

/// Up to this many tokens a tile has [`weights::FEW`] tokens; beyond that it does only if larger tiles would leave multiprocessors idle.
const MAX_SMALL_TILE: usize = 16;
/// [`gemm_m16`]: columns of a weight group; rows, threads and the most bytes of shared memory of a block; the most blocks for each multiprocessor; the most tokens.
const M16_GROUP: usize = 64;
const M16_ROWS: usize = 16;
const M16_THREADS: u32 = 128;
const M16_SHARED: usize = 80 << 10;
const M16_BLOCKS: usize = 8;
const M16_MAX_TOKENS: usize = 16;
/// [`gemm_balanced`]: columns of a weight group; rows and threads of a set, the most sets and the tokens of a block; the most tokens; the most blocks that a
/// multiprocessor takes one after the other.
const BALANCED_GROUP: usize = 64;
const BALANCED_ROWS: usize = 16;
const BALANCED_THREADS: usize = 128;
const BALANCED_MAX_SETS: usize = 5;
const BALANCED_TOKENS: usize = 16;
const BALANCED_MAX_TOKENS: usize = 64;
const BALANCED_MAX_TURNS: usize = 2;

/// Tokens of a tile, for products of `rows` rows in all.
fn tile_tokens(gpu: &Gpu, rows: usize, tokens: usize) -> usize {
    let blocks = rows.div_ceil(128) * tokens.div_ceil(weights::TILE);
    if tokens <= MAX_SMALL_TILE || blocks < gpu.device.multiprocessors { weights::FEW } else { weights::TILE }
}

/// Products by tiles of rows and tokens. Returns whether a kernel took them.
pub fn gemm_tiles(gpu: &Gpu, products: &[Product], parameters: &p::Products) -> Result<bool> {
    let (first, rows) = (&products[0], max_rows(products));
    let tiles = first.table.and_then(|t| t.tiles);
    let possible = gpu.device.has(Variant::Tiles) && (tiles.is_some() || first.outputs > 1 && first.table.is_none());
    let Some((kind, group, _)) = first.integers().filter(|_| possible) else { return Ok(false) };
    let groups = group as usize / GROUP;
    let shape = |tokens| kind.gemm_mma(groups, tokens, gpu.device.shared);
    let tokens = tiles.map_or_else(|| tile_tokens(gpu, rows * products.len(), first.outputs), |t| t.tile_pairs);
    // If a large tile does not fit into shared memory, a small one is taken.
    let tokens = if tiles.is_none() && shape(tokens).is_none() { weights::FEW } else { tokens };
    let Some(LaunchShape { kernel, rows: block, threads, shared }) = shape(tokens) else { return Ok(false) };
    let blocks = tiles.map_or(first.outputs.div_ceil(tokens), |t| t.max_tiles).min(MAX_GRID_Y);
    let grid = [number(rows.div_ceil(block)), number(blocks), number(products.len())];
    // SAFETY: rows of the matrix and of x, and the tensor written, were checked against their buffers.
    unsafe { gpu.launch(kernel, grid, threads, number(shared), parameters)? };
    Ok(true)
}

/// The most rows of any of the products.
pub fn max_rows(products: &[Product]) -> usize {
    products.iter().map(|p| p.rows).max().unwrap_or(0)
}

/// Products of up to [`M16_MAX_TOKENS`] tokens by blocks of sixteen rows, if tiles would leave most multiprocessors idle. Returns whether a kernel took them.
pub fn gemm_m16(gpu: &Gpu, products: &[Product], parameters: &p::Products) -> Result<bool> {
    let first = &products[0];
    let Some((kind, group, element)) =
        first.integers().filter(|_| gpu.device.has(Variant::Thin) && gpu.device.has(Variant::Tiles))
    else {
        return Ok(false);
    };
    let block_tokens = if first.outputs <= 8 { 8 } else { 16 };
    let (cols, rows) = (first.cols, max_rows(products));
    let shared = block_tokens * (cols.next_multiple_of(128) + 32 + 12 * (cols / M16_GROUP));
    let all = products.iter().map(|p| p.rows.div_ceil(M16_ROWS)).sum::<usize>();
    let words = products.iter().all(|p| (p.matrix.data | p.matrix.row_bytes) % 4 == 0);
    let fits = first.outputs > 1
        && first.table.is_none()
        && first.outputs <= M16_MAX_TOKENS
        && all <= M16_BLOCKS * gpu.device.multiprocessors
        && group as usize == M16_GROUP
        && weights::HALVES.contains(&element)
        && shared <= M16_SHARED
        && shared + STATIC_SHARED <= gpu.device.shared;
    let Some(kernel) = kind.gemm_m16(block_tokens).filter(|_| fits && words) else { return Ok(false) };
    let tiles = first.outputs.div_ceil(block_tokens);
    let grid = [number(rows.div_ceil(M16_ROWS)), number(tiles), number(products.len())];
    // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
    unsafe { gpu.launch(kernel, grid, M16_THREADS, number(shared), parameters)? };
    Ok(true)
}

/// Bytes of shared memory of a block of [`gemm_balanced`].
fn balanced_shared(kind: KernelFormat, sets: usize, cols: usize) -> usize {
    let (groups, meet) = (cols / BALANCED_GROUP, 16 * sets * BALANCED_TOKENS * (BALANCED_ROWS + 1));
    let row = if kind.bits() == Some(4) { 32 } else { 96 };
    let activations = (BALANCED_TOKENS * (cols.next_multiple_of(128) + 32)).max(meet);
    let weights = sets * 4 * groups.div_ceil(4) * BALANCED_ROWS * row;
    activations + groups * 12 * (BALANCED_TOKENS + 2) + weights + groups * 8 * (BALANCED_ROWS * sets + 1)
}

/// Products of up to [`BALANCED_MAX_TOKENS`] tokens by blocks that share the rows evenly, if tiles would leave multiprocessors idle or would mostly be empty. Returns
/// whether a kernel took them.
pub fn gemm_balanced(gpu: &Gpu, products: &[Product], parameters: &p::Products) -> Result<bool> {
    let first = &products[0];
    let Some((kind, group, element)) =
        first.integers().filter(|_| gpu.device.has(Variant::Slabs) && gpu.device.has(Variant::Tiles))
    else {
        return Ok(false);
    };
    let (cols, tokens) = (first.cols, first.outputs);
    let aligned = products.iter().all(|p| (p.matrix.data | p.matrix.row_bytes) % 16 == 0 && p.rows > 0);
    let fits = (M16_MAX_TOKENS + 1..=BALANCED_MAX_TOKENS).contains(&tokens)
        && first.table.is_none()
        && group as usize == BALANCED_GROUP
        && weights::HALVES.contains(&element);
    let Some(kernel) = kind.gemm_balanced().filter(|_| fits && aligned) else { return Ok(false) };
    let (all, tiles) =
        (products.iter().map(|p| p.rows.div_ceil(BALANCED_ROWS)).sum::<usize>(), tokens.div_ceil(BALANCED_TOKENS));
    // Blocks that a multiprocessor takes one after the other: with many, loads of weights are not overlapped.
    let turns = |sets: usize| (all.div_ceil(sets) * tiles).div_ceil(gpu.device.multiprocessors);
    let fitting = (1..=BALANCED_MAX_SETS).rev().filter(|sets| {
        turns(*sets) <= BALANCED_MAX_TURNS && balanced_shared(kind, *sets, cols) + STATIC_SHARED <= gpu.device.shared
    });
    let Some(sets) = fitting.min_by_key(|sets| turns(*sets) * sets) else { return Ok(false) };
    let grid = [number(all.div_ceil(sets)), number(tiles), 1];
    let (threads, shared) = (number(BALANCED_THREADS * sets), number(balanced_shared(kind, sets, cols)));
    // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
    unsafe { gpu.launch(kernel, grid, threads, shared, parameters)? };
    Ok(true)
}
