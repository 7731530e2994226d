//! Products of several tokens on tensor cores with int8 activations: by tiles, and by sets of sixteen rows.

use anyhow::Result;

use crate::device::stream::Gpu;
use crate::kernels::{Kernel, STATIC_SHARED, Variant};
use crate::ops::activations::GROUP;
use crate::ops::product::{MAX_GRID_Y, Product};
use crate::parameters::{self as p, number};
use crate::weights::{self, LaunchShape};

/// Up to this many tokens a tile has [`weights::FEW`] tokens; beyond that it does only if larger tiles would leave multiprocessors idle.
const MAX_SMALL_TILE: usize = 16;
/// [`gemm_sets`]: columns of a weight group, and columns whose scales of tokens are whole sixteens of bytes; rows and threads of a set; the most sets of a block, and the
/// most eights of tokens; the most tokens, beyond which large tiles are as quick.
const SETS_GROUP: usize = 64;
const SETS_COLUMNS: usize = 128;
const SET_ROWS: usize = 16;
const SET_THREADS: usize = 128;
const MAX_SETS: usize = 4;
const MAX_SET_EIGHTS: usize = 4;
const MAX_SET_TOKENS: usize = 64;

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

/// How [`gemm_sets`] is launched: the eights of tokens and the sets of a block, and the blocks in both dimensions of the grid.
#[derive(Clone, Copy)]
struct SetsShape {
    eights: usize,
    sets: usize,
    blocks: [usize; 2],
    shared: usize,
}

impl SetsShape {
    /// Bytes of shared memory of a block: the stages of `SetsChunk` in `kernels/gemm/sets.cu`, and where chains meet.
    fn shared(bits: usize, eights: usize, sets: usize) -> usize {
        let (columns, tokens) = (4096 / bits, 8 * eights);
        let groups = columns / SETS_GROUP;
        let row = columns / 8 * bits + if bits == 4 { 16 } else { 32 };
        let stage = sets * SET_ROWS * (row + 4 * groups) + tokens * (columns + 32 + 2 * (8 * groups + 16));
        let stages = if eights <= 2 { 3 } else { 2 };
        stages * stage + sets * 4 * 4 * tokens * (SET_ROWS + 1)
    }

    /// The quickest for so many sets and tokens, by what was measured on an H200: a turn takes a time for each set, for its weights and for each eight of its tokens, and a time of
    /// its own. Fewer than two and a half sets leave a multiprocessor waiting.
    fn quickest(gpu: &Gpu, bits: usize, all: usize, tokens: usize) -> Option<SetsShape> {
        let all_eights = tokens.div_ceil(8);
        let tiles = (1..=all_eights).filter(|tiles| all_eights.div_ceil(all_eights.div_ceil(*tiles)) == *tiles);
        let shapes = tiles.flat_map(|tiles| (1..=MAX_SETS).map(move |sets| (tiles, all_eights.div_ceil(tiles), sets)));
        let fitting = shapes.filter_map(|(tiles, eights, sets)| {
            let (shared, blocks) = (SetsShape::shared(bits, eights, sets), gpu.device.multiprocessors / tiles);
            let fits = eights <= MAX_SET_EIGHTS && blocks > 0 && shared + STATIC_SHARED <= gpu.device.shared;
            let blocks = [blocks.min(all.div_ceil(sets)), tiles];
            fits.then_some(SetsShape { eights, sets, blocks, shared })
        });
        fitting.min_by_key(|shape| {
            let turns = all.div_ceil(shape.sets * shape.blocks[0]);
            turns * ((2 * shape.sets).max(5) * (5 + 4 * shape.eights) + 24)
        })
    }
}

/// How [`gemm_sets`] takes these products, if it does.
fn sets_shape(gpu: &Gpu, products: &[Product]) -> Option<(Kernel, SetsShape)> {
    let first = products.first()?;
    let possible = gpu.device.has(Variant::Sets) && gpu.device.has(Variant::Tiles) && first.table.is_none();
    let (kind, group, element) = first.integers().filter(|_| possible)?;
    let aligned = products.iter().all(|p| {
        let p::Matrix { data, scales, biases, row_bytes, groups, .. } = p.matrix;
        let scales_at = if groups.is_multiple_of(4) { 8 } else { 2 };
        (data | row_bytes).is_multiple_of(16) && (scales | biases).is_multiple_of(scales_at) && p.rows > 0
    });
    let fits = aligned
        && (2..=MAX_SET_TOKENS).contains(&first.outputs)
        && group as usize == SETS_GROUP
        && first.cols.is_multiple_of(SETS_COLUMNS)
        && weights::HALVES.contains(&element);
    let all = products.iter().map(|p| p.rows.div_ceil(SET_ROWS)).sum();
    let shape = SetsShape::quickest(gpu, kind.bits().filter(|_| fits)?, all, first.outputs)?;
    Some((kind.gemm_sets(shape.eights)?, shape))
}

/// Whether [`gemm_sets`] takes these products.
pub fn takes_sets(gpu: &Gpu, products: &[Product]) -> bool {
    sets_shape(gpu, products).is_some()
}

/// Products of up to [`MAX_SET_TOKENS`] tokens by blocks that take sets of sixteen rows in turn, all of them on the device at once. Returns whether a kernel took them.
pub fn gemm_sets(gpu: &Gpu, products: &[Product], parameters: &p::Products) -> Result<bool> {
    let Some((kernel, SetsShape { sets, blocks: [blocks, tiles], shared, .. })) = sets_shape(gpu, products) else {
        return Ok(false);
    };
    let (grid, threads) = ([number(blocks), number(tiles), 1], number(SET_THREADS * sets));
    // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
    unsafe { gpu.launch(kernel, grid, threads, number(shared), parameters)? };
    Ok(true)
}
