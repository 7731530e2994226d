//! Products of integers of 11 bits with 4-bit weights for some tokens, in narrow tiles.

use anyhow::Result;

use crate::device::stream::Gpu;
use crate::kernels::{AFFINE, Kernel, KernelFormat, STATIC_SHARED};
use crate::ops::product::{PairTiles, Product};
use crate::parameters::{self as p, number};

/// `kernels/gemm/int11_narrow.cu`: rows of a tile, threads of a block, the most blocks of a multiprocessor, and its kernels. In a mixture the first is taken.
const ROWS: usize = 64;
const THREADS: u32 = 192;
const BLOCKS: usize = 2;
const TILES: [Tile; 3] = [
    Tile { tokens: 16, cols: 256, stage: 20480 },
    Tile { tokens: 32, cols: 256, stage: 28672 },
    Tile { tokens: 64, cols: 128, stage: 24576 },
];
/// The fewest stages.
const LEAST_STAGES: usize = 3;
/// Bytes of shared memory beside the stages: what aligns them, and all that a block takes: that, static variables, and what the driver keeps.
const ALIGNMENT: usize = 1024;
const BESIDE: usize = ALIGNMENT + 2048 + 1024;
/// From so many tokens on they are taken.
const MIN_TOKENS: usize = 5;

/// Tiles of some tokens.
struct Tile {
    tokens: usize,
    /// Columns come in multiples of this.
    cols: usize,
    /// Bytes of a stage.
    stage: usize,
}

impl Tile {
    /// Whether it takes so many columns on this device.
    fn fits(&self, gpu: &Gpu, kernel: Option<Kernel>, cols: usize) -> bool {
        kernel.is_some_and(|kernel| gpu.device.has_kernel(kernel))
            && cols.is_multiple_of(self.cols)
            && self.stages(gpu, BLOCKS) >= LEAST_STAGES
    }

    /// Stages for each of so many blocks of a multiprocessor.
    fn stages(&self, gpu: &Gpu, blocks: usize) -> usize {
        let share = (gpu.device.shared / blocks).saturating_sub(BESIDE);
        share.min(gpu.device.shared.saturating_sub(STATIC_SHARED + ALIGNMENT)) / self.stage
    }

    /// Runs a kernel on so many tiles. The fewer blocks share a multiprocessor, the more stages each has.
    ///
    /// # Safety
    /// Rows of the matrices and of x, and the tensors written, were checked against their buffers.
    unsafe fn launch(&self, gpu: &Gpu, kernel: Kernel, tiles: usize, parameters: &p::Products) -> Result<()> {
        let multiprocessors = gpu.device.multiprocessors;
        let blocks = tiles.div_ceil(multiprocessors).clamp(1, BLOCKS);
        let shared = ALIGNMENT + self.stages(gpu, blocks) * self.stage;
        let grid = [number(tiles.min(blocks * multiprocessors)), 1, 1];
        // SAFETY: the caller's.
        unsafe { gpu.launch(kernel, grid, THREADS, number(shared), parameters)? };
        Ok(())
    }
}

/// Products of some tokens: in the widest tiles that are needed, or narrower ones where there would not be one for each multiprocessor. Returns whether a kernel took
/// them.
pub fn multiply(gpu: &Gpu, products: &[Product], parameters: &p::Products) -> Result<bool> {
    let Product { outputs, cols, .. } = products[0];
    let kind = products[0].kinds()[0];
    if !(MIN_TOKENS..=TILES[TILES.len() - 1].tokens).contains(&outputs) {
        return Ok(false);
    }
    let sets: usize = products.iter().map(|product| product.rows.div_ceil(ROWS)).sum();
    let fits = |(at, tile): &(usize, &Tile)| tile.fits(gpu, kind.gemm_narrow(*at), cols);
    let fitting = || TILES.iter().enumerate().filter(fits);
    let fills = |tile: &Tile| sets * outputs.div_ceil(tile.tokens) >= gpu.device.multiprocessors;
    let needed = TILES.iter().position(|tile| outputs <= tile.tokens).unwrap_or_default();
    let usable = || fitting().filter(|(at, _)| *at <= needed);
    let Some((at, tile)) = usable().rfind(|(_, tile)| fills(tile)).or_else(|| usable().next()) else {
        return Ok(false);
    };
    let kernel = kind.gemm_narrow(at).expect("it fits");
    // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
    unsafe { tile.launch(gpu, kernel, sets * outputs.div_ceil(tile.tokens), parameters)? };
    Ok(true)
}

/// The most pairs of a mixture's tile.
pub const PAIRS: usize = TILES[0].tokens;

/// Whether tiles of [`PAIRS`] take a mixture's products where its pairs are sorted by expert.
pub fn takes_pairs(gpu: &Gpu, kind: KernelFormat, cols: usize) -> bool {
    gpu.device.exact().is_some_and(|exact| exact.wide[AFFINE]) && TILES[0].fits(gpu, kind.gemm_narrow_grouped(), cols)
}

/// A mixture's products that [`takes_pairs`] takes.
pub fn multiply_pairs(gpu: &Gpu, products: &[Product], parameters: &p::Products, tiles: PairTiles) -> Result<()> {
    let table = products[0].table.expect("a mixture");
    let kernel = table.kinds[0].gemm_narrow_grouped().expect("it was looked for");
    let sets: usize = products.iter().map(|product| product.rows.div_ceil(ROWS)).sum();
    // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers; the table has a matrix for each expert.
    unsafe { TILES[0].launch(gpu, kernel, tiles.max_tiles * sets, parameters) }
}
