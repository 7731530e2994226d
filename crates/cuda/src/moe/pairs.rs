//! Pairs of a token and an expert, sorted by expert and cut into tiles.

use anyhow::Result;

use crate::device::memory::Scratch;
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::{Kernel, Variant};
use crate::moe::experts::part;
use crate::moe::layer::MoeLayer;
use crate::ops::activations::GROUP;
use crate::ops::grouped_gemm::{self, GroupedProduct};
use crate::ops::product::PairTiles;
use crate::ops::{int11, int11_records};
use crate::parameters::{self as p, PROJECTIONS, number};
use crate::weights::{self, KernelFormat};

/// If there are at least this many experts for each pair, pairs are computed one by one.
const MIN_EXPERTS_PER_PAIR: usize = 8;
/// Up to this many pairs for each expert, tiles would be mostly empty.
const MAX_FEW_PAIRS: usize = 3;
/// From this many pairs for each expert on, tiles are large.
const MIN_LARGE_TILE_PAIRS: usize = 20;
/// Threads of a block that counts or sorts an expert's pairs.
const PAIR_THREADS: u32 = 512;

/// How pairs are cut into tiles.
#[derive(Clone, Copy)]
pub struct TileChoice {
    /// The most pairs of a tile.
    pub tile_pairs: usize,
    /// Each expert has only a few pairs, and [`grouped_gemm`] takes them.
    pub few: bool,
}

/// How `pairs` pairs of a layer are cut into tiles; `None` if they are computed one by one.
pub fn tile_choice(gpu: &Gpu, layer: &MoeLayer, pairs: usize) -> Option<TileChoice> {
    let MoeLayer { moe, kinds, groups, .. } = layer;
    let count = moe.experts.count;
    let cols = |projection: usize| part(&moe.experts, projection).cols;
    let int11 = |projection: usize, tile_pairs: usize| {
        int11::takes_pairs(gpu, tile_pairs, &kinds[projection], groups[projection], cols(projection))
    };
    let takes = |tile_pairs: &&usize| (0..PROJECTIONS).all(|projection| int11(projection, **tile_pairs));
    if let Some(&tile_pairs) = int11::tile_pairs(pairs, count).iter().find(takes) {
        return Some(TileChoice { tile_pairs, few: false });
    }
    let records = |projection: usize| {
        int11(projection, int11::WIDE)
            || int11_records::takes_pairs(gpu, &kinds[projection], groups[projection], cols(projection))
    };
    if pairs >= int11_records::MIN_PAIRS * count && (0..PROJECTIONS).all(records) {
        return Some(TileChoice { tile_pairs: int11::WIDE, few: false });
    }
    let integers = kinds.iter().all(|kinds| kinds.len() == 1 && kinds[0].needs().int8);
    if !integers || !gpu.device.has(Variant::Tiles) || pairs * MIN_EXPERTS_PER_PAIR <= count {
        return None;
    }
    let fits = |projection: usize| GroupedProduct::fits(gpu, &kinds[projection], groups[projection], cols(projection));
    let alike = layer.is_plain && kinds[0] == kinds[1] && groups[0] == groups[1];
    if gpu.device.has(Variant::Few) && pairs <= MAX_FEW_PAIRS * count && alike && (0..PROJECTIONS).all(fits) {
        return Some(TileChoice { tile_pairs: grouped_gemm::TILE_TOKENS, few: true });
    }
    // If a large tile does not fit into shared memory, a small one is taken.
    let fits = |(kinds, groups): (&Vec<KernelFormat>, &Option<(u32, u32)>)| {
        let groups = groups.map_or(0, |(group, _)| group as usize / GROUP);
        kinds[0].gemm_mma(groups, weights::TILE, gpu.device.shared).is_some()
    };
    let many = pairs >= MIN_LARGE_TILE_PAIRS * count && kinds.iter().zip(groups).all(fits);
    Some(TileChoice { tile_pairs: if many { weights::TILE } else { weights::FEW }, few: false })
}

/// Sorts the pairs in `chosen`, `[pairs]` u32, by expert.
pub fn sort_pairs(
    gpu: &Gpu,
    scratch: &mut Scratch,
    (chosen, pairs): (Address, usize),
    experts: usize,
    choice: TileChoice,
) -> Result<PairTiles> {
    let reserved = reserve_pairs(gpu, scratch, pairs, experts, choice)?;
    let PairTiles { tiles, order, tile_pairs, .. } = reserved;
    let counts = order + 4 * pairs as u64;
    let parameters = p::Pairs {
        chosen,
        counts,
        tiles,
        order,
        pairs: number(pairs),
        experts: number(experts),
        of_tile: number(tile_pairs),
        unused: 0,
    };
    for kernel in [Kernel::MOE_COUNT_PAIRS, Kernel::MOE_GROUP_PAIRS] {
        // SAFETY: the router writes this many; the scratch was just reserved.
        unsafe { gpu.launch(kernel, [number(experts), 1, 1], PAIR_THREADS, 0, &parameters)? };
    }
    Ok(reserved)
}

/// Reserves tiles of pairs, their order, and one number for each expert.
pub fn reserve_pairs(
    gpu: &Gpu,
    scratch: &mut Scratch,
    pairs: usize,
    experts: usize,
    choice: TileChoice,
) -> Result<PairTiles> {
    let TileChoice { tile_pairs, few } = choice;
    let max_tiles = PairTiles::most(pairs, experts, tile_pairs);
    let tiles = 16 * (max_tiles + 1);
    let at = scratch.reserve(gpu, tiles + 4 * pairs + 4 * experts)?;
    Ok(PairTiles { tiles: at, order: at + tiles as u64, max_tiles, tile_pairs, few })
}
