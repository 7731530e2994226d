//! Which kernel multiplies with weights of a format, and how it is launched.

use super::families::{Family, Kernel};
use super::format::{BLOCK_FORMATS, KernelFormat};
use super::shared_memory::STATIC_SHARED;
use crate::parameters::number;

/// Tokens of a block of `kernels/gemm/mma.cuh`, and of one where there are few.
pub const TILE: usize = 64;
pub const FEW: usize = 16;

/// Rows and tokens of a block of `kernels/gemm/f32_tiles.cu`, and its threads.
pub const SQUARE: usize = 32;
pub const SQUARE_THREADS: u32 = 256;

/// From so many rows on a warp of a product for one token takes four.
const WIDE_ROWS: usize = 8192;
/// From so many rows on a warp takes several of weights in blocks.
const MIN_BLOCK_ROWS: usize = 1024;
/// `SLOTS` of `kernels/gemv/int8.cu`.
const SLOTS: usize = 33;

/// How a kernel is launched.
pub struct LaunchShape {
    pub kernel: Kernel,
    /// Rows of a block.
    pub rows: usize,
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
}

impl KernelFormat {
    /// The kernels for experts of a few tokens each: one that puts two products through `silu(gate) * up`, and one for one product.
    pub fn grouped_gemm(self) -> Option<[Kernel; 2]> {
        Some([Kernel::of(Family::GroupedGemm, self, 1)?, Kernel::of(Family::GroupedGemm, self, 0)?])
    }

    /// The kernel by sets of sixteen rows for so many eights of tokens.
    pub fn gemm_sets(self, eights: usize) -> Option<Kernel> {
        Kernel::of(Family::GemmSets, self, eights - 1)
    }

    /// The kernel for several tokens on integer tensor cores, where a weight group spans `of` groups of activations, with tiles of so many tokens ([`TILE`] or
    /// [`FEW`]) in blocks that have at most `most` bytes of shared memory.
    pub fn gemm_mma(self, of: usize, tokens: usize, most: usize) -> Option<LaunchShape> {
        let bits = self.bits()?;
        if self.is_blocks() {
            return self.gemm_blocks(tokens).filter(|shape| shape.shared + STATIC_SHARED <= most);
        }
        let tile = [1, 2, 4].iter().position(|n| *n == of)?;
        // As `kernels/gemm/mma*.cu` have them: rows, and kilobytes that stages may take.
        let ways = match tokens {
            FEW => &[(Family::GemmMmaFew, 64, 74)][..],
            _ if of * bits < 20 => &[(Family::GemmMma, 128, 212), (Family::GemmMmaLow, 64, 87)],
            _ => &[(Family::GemmMma, 64, 112), (Family::GemmMmaLow, 64, 87)],
        };
        let mut shapes = ways.iter().filter_map(|&(family, rows, kilobytes)| {
            let shared = tile_bytes(bits, of, rows, tokens, kilobytes << 10);
            Some(LaunchShape { kernel: Kernel::of(family, self, tile)?, rows, threads: number(4 * rows), shared })
        });
        shapes.find(|shape| shape.shared + STATIC_SHARED <= most)
    }

    /// Whether weights lie in blocks, and are multiplied as integers.
    pub fn is_blocks(self) -> bool {
        BLOCK_FORMATS.contains(&self)
    }

    /// Columns of a group of blocks.
    fn block_group(self) -> usize {
        let halves = [
            KernelFormat::B2Int8,
            KernelFormat::B3Int8,
            KernelFormat::B6Int8,
            KernelFormat::H3Int8,
            KernelFormat::H4Int8,
        ];
        if halves.contains(&self) { 16 } else { 32 }
    }

    /// The kernel for several tokens on tensor cores, in tiles of so many ([`TILE`] or [`FEW`]), where weights lie in blocks.
    fn gemm_blocks(self, tokens: usize) -> Option<LaunchShape> {
        let (tile, threads) = if tokens == FEW { (1, 128) } else { (0, 256) };
        // `BlocksTile` of `kernels/gemm/blocks_mma.cuh`, twice.
        let (rows, groups) = (64, 4 * 32 / self.block_group());
        let stage = (rows + tokens) * (128 + 16) + 8 * groups * rows + 4 * (4 + groups) * tokens;
        Some(LaunchShape { kernel: Kernel::of(Family::GemmBlocks, self, tile)?, rows, threads, shared: 2 * stage })
    }

    /// The kernels of integers of 11 bits on tensor cores, for 1, 2, 4 and 8 tokens.
    pub fn gemm_few(self, tile: usize) -> Option<Kernel> {
        Kernel::of(Family::GemmFew, self, tile)
    }

    /// The same for a mixture, whose pairs are sorted by expert, for tiles of 4 and 8.
    pub fn gemm_few_grouped(self, tile: usize) -> Option<Kernel> {
        Kernel::of(Family::GemmFewGrouped, self, tile)
    }

    /// The kernels of integers of 11 bits for up to 16, 32 and 64 tokens.
    pub fn gemm_narrow(self, tile: usize) -> Option<Kernel> {
        Kernel::of(Family::GemmNarrow, self, tile)
    }

    /// The same for a mixture, whose pairs are sorted by expert, for tiles of 16.
    pub fn gemm_narrow_grouped(self) -> Option<Kernel> {
        Kernel::of(Family::GemmNarrow, self, 3)
    }

    /// The kernel of integers of 11 bits for prompts.
    pub fn gemm_wide(self) -> Option<Kernel> {
        Kernel::of(Family::GemmWide, self, 0)
    }

    /// The same for a mixture, whose pairs are sorted by expert.
    pub fn gemm_wide_grouped(self) -> Option<Kernel> {
        Kernel::of(Family::GemmWide, self, 1)
    }

    /// The kernel for prompts where [`KernelFormat::gemm_wide`] is not for the device.
    pub fn gemm_slices(self) -> Option<Kernel> {
        Kernel::of(Family::GemmSlices, self, 0)
    }

    /// The kernel that makes integers of 11 bits of weights that are floats, for both.
    pub fn int11_split(self) -> Option<Kernel> {
        Kernel::of(Family::Int11Split, self, 0)
    }

    /// The kernel for so many tokens together with all that comes before the product.
    pub fn gemv_batched(self, tokens: usize) -> Option<Kernel> {
        let tile = [1, 2, 4, 8].iter().position(|most| tokens <= *most)?;
        Kernel::of(Family::GemvBatched, self, tile)
    }

    /// The same for one token with groups of 64: the kernels with small and with large blocks, and with more under way.
    pub fn gemv_fused(self) -> Option<[Kernel; 3]> {
        let [small, wide, deep] = [0, 1, 2].map(|tile| Kernel::of(Family::GemvFused, self, tile));
        Some([small?, wide?, deep?])
    }

    /// The same with integers of 11 bits, for rows of so many groups of 64, and the groups that it takes at a time.
    pub fn gemv_one(self, groups: usize) -> Option<(Kernel, usize)> {
        let (tile, lanes) = if (1..=16).contains(&(groups % 32)) { (1, 16) } else { (0, 32) };
        Some((Kernel::of(Family::GemvOne, self, tile)?, lanes))
    }

    /// The same with weights that are floats of sixteen bits.
    pub fn gemv_one_floats(self) -> Option<Kernel> {
        Kernel::of(Family::GemvOneFloats, self, 0)
    }

    /// The same with weights in blocks.
    pub fn gemv_one_blocks(self) -> Option<Kernel> {
        Kernel::of(Family::GemvOneBlocks, self, 0)
    }

    /// The kernels of a mixture for one token: of gate and up, of these where the device may have to ask for experts, and of down.
    pub fn moe_single(self) -> Option<[Kernel; 3]> {
        let [gate_up, mailbox] = [0, 1].map(|tile| Kernel::of(Family::MoeGateUp, self, tile));
        Some([gate_up?, mailbox?, Kernel::of(Family::MoeDown, self, 0)?])
    }

    /// The kernel of lane sums of many tokens, by tiles of [`SQUARE`] rows and as many tokens.
    pub fn gemm_32(self) -> Option<Kernel> {
        Kernel::of(Family::Gemm32, self, 0)
    }

    /// The kernel for one token, or each by itself, where weights lie in blocks and there are so many rows in all that blocks take several, if its sums fit into `most`
    /// bytes of shared memory.
    pub fn gemv_rows(self, rows: usize, cols: usize, most: usize) -> Option<LaunchShape> {
        let kernel = Kernel::of(Family::GemvRows, self, 0).filter(|_| rows >= MIN_BLOCK_ROWS)?;
        let halves = 32 / self.block_group();
        let (rows, parts) = (8 / halves, cols / 32);
        let shared = 16 * rows * ((parts * halves).next_multiple_of(8) + 4);
        let threads = number(parts.next_multiple_of(32).min(256));
        (shared + STATIC_SHARED <= most).then_some(LaunchShape { kernel, rows, threads, shared })
    }

    /// The kernel for one token (or each by itself) or for tiles of several, and how it is launched for so many rows in all.
    pub fn gemv_or_gemm(self, many: bool, rows: usize, cols: usize) -> LaunchShape {
        let kernel = |family, tile| Kernel::of(family, self, tile).expect("these families have all formats");
        let needs = self.needs();
        if self.is_blocks() {
            let family = if many { Family::Gemm8 } else { Family::Gemv };
            return LaunchShape { kernel: kernel(family, 0), rows: 8, threads: 256, shared: 0 };
        }
        if needs.int8 && many {
            return LaunchShape { kernel: kernel(Family::Gemm8, 0), rows: 8, threads: 256, shared: 0 };
        }
        if needs.int8 {
            // Four warps of two rows each, or of four where there are rows enough to keep all of the device busy.
            let wide = rows >= WIDE_ROWS;
            let rows = if wide { 16 } else { 8 };
            let sums = (cols / 32).next_multiple_of(4) * size_of::<f32>();
            let shared = sums + rows * SLOTS * 4 * size_of::<f32>();
            return LaunchShape { kernel: kernel(Family::Gemv, usize::from(wide)), rows, threads: 128, shared };
        }
        if needs.int11 {
            let family = if many { Family::Gemm8 } else { Family::Gemv };
            return LaunchShape { kernel: kernel(family, 0), rows: 8, threads: 256, shared: 0 };
        }
        // Few rows, a router's say, are spread over the device.
        let rows = match many {
            true if needs.f32 => 4,
            false if needs.f32 && rows < WIDE_ROWS => 2,
            _ => 16,
        };
        let threads = if many || needs.bf16 { 256 } else { 16 * number(rows) };
        LaunchShape { kernel: kernel(if many { Family::Gemm8 } else { Family::Gemv }, 0), rows, threads, shared: 0 }
    }
}

/// Bytes of shared memory of a block on tensor cores, of whose stages as many as fit into `all` are under way: `MmaStage` of `kernels/gemm/mma_stage.cuh`.
fn tile_bytes(bits: usize, of: usize, rows: usize, tokens: usize, all: usize) -> usize {
    let parts = 4 * of;
    let tile = rows * (4 * bits * parts + 16) + tokens * (32 * parts + 32);
    let raw = 32 * rows + 8 * parts * tokens;
    let floats = 4 * (8 * rows + 4 * of * tokens + 4 * tokens + 64);
    // Words for each thread of the warps of one chain, which are as many as rows.
    let copies = |pieces: usize| pieces.div_ceil(rows).next_multiple_of(4);
    let words = copies(rows * bits * of) + copies(8 * tokens * of) + 2 * 2 + 2 * (2 * tokens * of).div_ceil(rows) + 3;
    let kept = if tokens == FEW { 0 } else { 4 * rows * words.next_multiple_of(4) };
    let stages = ((all - 2 * floats - kept - 16) / (tile + raw)).clamp(2, 4);
    // Chains meet there in the end.
    let meet = 4 * 4 * tokens * (rows + 4);
    meet.max(stages * (tile + raw) + 2 * floats + kept + 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_kernels_for_one_token_and_for_several() {
        for format in KernelFormat::ALL {
            for many in [false, true] {
                let name = format.gemv_or_gemm(many, 64, 64).kernel.name();
                assert!(name.contains(format.name()), "{name}");
            }
        }
    }
}
