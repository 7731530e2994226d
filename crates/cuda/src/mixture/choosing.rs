//! Which experts tokens take: the router, the choice by what it says, and pairs of a token and an expert by their expert.

use anyhow::Result;
use sluice_backend::{Activations, Routing, Tensor};

use super::{Mixtures, Registered};
use crate::backend::Cuda;
use crate::driver::{Address, Gpu};
use crate::grouped_gemm::{self, Few};
use crate::kernels::{Kernel, STATIC_SHARED};
use crate::matmul::{self, Grouped, Source, encode, multiply};
use crate::memory::{Memory, Scratch, bytes_of_mut};
use crate::mixture_one::{MOST_EXPERTS, MOST_SLOTS, NORMED, ROUTE_ROWS, ROUTE_THREADS};
use crate::parameters::{self as p, PROJECTIONS, number};
use crate::weights::{self, KernelFormat, Needs};

/// From so many experts for each pair of a token and an expert on, pairs are computed one by one.
const TOO_FEW: usize = 8;
/// Up to so many pairs of a token and an expert for each expert, tiles would be mostly empty.
const FEW_PAIRS: usize = 3;
/// From so many pairs for each expert on, tiles are large.
const MANY_PAIRS: usize = 20;
/// Of the kernels that choose for a few tokens (`kernels/moe/router_few.cu`), which are made as those for one: tokens at most; tokens of a block
/// that chooses, and its threads; tokens of a block of the router, and its blocks on a multiprocessor.
const FEW_TOKENS: usize = 32;
const CHOOSE_TOKENS: usize = 8;
const CHOOSE_THREADS: u32 = 256;
const ROUTE_TOKENS: usize = 8;
const ROUTE_BLOCKS: usize = 2;
/// Threads of a block that counts or orders an expert's pairs.
const PAIR_THREADS: u32 = 512;

/// Which experts tokens take, on the device.
#[derive(Default)]
pub(crate) struct Choice {
    pub logits: Scratch,
    pub chosen: Scratch,
    pub weights: Scratch,
    /// How many blocks have chosen; zero between kernels.
    pub counter: Option<Memory>,
    /// Pairs by their expert, where whoever chose last has found that out.
    pub grouped: Option<Grouped>,
}

impl Cuda {
    /// `m.x = norm(x)`, with a mixture's norm.
    pub(super) fn normed(&self, m: &mut Mixtures, x: Tensor, number: usize, needs: Needs) -> Result<()> {
        let norm = self.norm(&m.all[number].moe.norm);
        let source = Source { x: self.place(x), norm, rows: x.rows, cols: x.cols, ..Source::default() };
        encode(&self.gpu, source, needs, &mut m.x)
    }

    /// The same, and what the router makes of a few tokens, by which it chooses: one kernel. Says whether it does.
    pub(super) fn normed_and_chosen(&self, m: &mut Mixtures, x: Tensor, of: usize, needs: Needs) -> Result<bool> {
        let (gpu, moe) = (&self.gpu, &m.all[of].moe);
        let (norm, from, count) = (self.norm(&moe.norm), self.place(x), moe.router.rows.len());
        let product = self.product(&moe.router, x.rows, p::Tensor::default(), false, Activations::F32);
        let shared = |rows: usize| 4 * (ROUTE_TOKENS + 1 + rows) * x.cols;
        let blocks = |rows: usize| (count.div_ceil(rows) + ROUTE_TOKENS) * x.rows.div_ceil(ROUTE_TOKENS);
        let fits = |rows: usize| shared(rows) + STATIC_SHARED <= gpu.device.shared;
        // Twice the rows where blocks are more than the device holds.
        let many = blocks(ROUTE_ROWS) > ROUTE_BLOCKS * gpu.device.multiprocessors && fits(2 * ROUTE_ROWS);
        let rows = if many { 2 * ROUTE_ROWS } else { ROUTE_ROWS };
        let aligned = [from.at, 4 * from.stride, norm.weight].iter().all(|at| at.is_multiple_of(16));
        let possible = gpu.device.few
            && x.rows <= FEW_TOKENS
            && (product.bias, product.runs, product.cols) == (0, None, x.cols)
            && product.matrix.kind < 4
            && x.cols.is_multiple_of(NORMED)
            && norm.weight != 0
            && aligned
            && fits(rows);
        if !possible {
            return Ok(false);
        }
        moe.scoring.check(count).unwrap_or_else(|e| panic!("{e}"));
        let logits = m.choice.logits.room(gpu, 4 * x.rows * count)?;
        let to = m.x.room(gpu, x.rows, x.cols, needs)?;
        let row_blocks = number(count.div_ceil(rows));
        let normed = p::Quantize {
            x: from,
            up: p::Tensor::default(),
            norm,
            taken: 0,
            rows: number(x.rows),
            cols: number(x.cols),
            to,
        };
        let parameters = p::RouterFew {
            x: normed,
            router: product.matrix,
            logits,
            experts: number(count),
            row_blocks,
            block_rows: number(rows),
            unused: 0,
        };
        let grid = [row_blocks + number(ROUTE_TOKENS), number(x.rows.div_ceil(ROUTE_TOKENS)), 1];
        // SAFETY: matrices and tensors were checked against their buffers; the room was just made.
        unsafe { gpu.launch(Kernel::MOE_ROUTER_FEW, grid, ROUTE_THREADS, number(shared(rows)), &parameters)? };
        self.choose_by(m, of, x.rows, logits)?;
        Ok(true)
    }

    /// Lets a mixture's router choose among its experts for the rows of `m.x`.
    pub(super) fn choose(&self, m: &mut Mixtures, number: usize, tokens: usize) -> Result<()> {
        let Registered { moe, .. } = &m.all[number];
        let count = moe.router.rows.len();
        moe.scoring.check(count).unwrap_or_else(|e| panic!("{e}"));
        let logits = m.choice.logits.room(&self.gpu, 4 * tokens * count)?;
        let product = self.product(&moe.router, tokens, p::Tensor::dense(logits, count), false, Activations::F32);
        multiply(&self.gpu, &[product], &m.x)?;
        self.choose_by(m, number, tokens, logits)
    }

    /// The same by what the router has made of them.
    fn choose_by(&self, m: &mut Mixtures, number: usize, tokens: usize, logits: Address) -> Result<()> {
        let (count, k) = (m.all[number].moe.router.rows.len(), m.all[number].moe.scoring.k());
        let chosen = m.choice.chosen.room(&self.gpu, 4 * tokens * k)?;
        let weights = m.choice.weights.room(&self.gpu, 4 * tokens * k)?;
        let parameters = m.all[number].route(tokens, logits, chosen, weights);
        m.choice.grouped = None;
        let few = self.gpu.device.few
            && tokens <= FEW_TOKENS
            && k <= MOST_SLOTS
            && (k..=MOST_EXPERTS).contains(&count)
            && parameters.groups == 1;
        if few {
            return self.choose_few(m, number, parameters);
        }
        let shared = self::number(4 * (2 * count + 2 * k));
        // SAFETY: the room was just made.
        unsafe { self.gpu.launch(Kernel::MOE_ROUTE, [self::number(tokens), 1, 1], 32, shared, &parameters)? };
        Ok(())
    }

    /// The same for a few tokens, whose pairs are put in the order of their experts, too.
    fn choose_few(&self, m: &mut Mixtures, number: usize, route: p::Route) -> Result<()> {
        let (gpu, tokens, pairs) = (&self.gpu, route.tokens as usize, (route.tokens * route.k) as usize);
        let (of_tile, few) = self.tiles_of(&m.all[number], pairs).unwrap_or((grouped_gemm::TOGETHER, true));
        let grouped = room_of_pairs(gpu, &mut m.pairs, pairs, route.experts as usize, (of_tile, few))?;
        let counter = match &m.choice.counter {
            Some(counter) => counter.at,
            None => m.choice.counter.insert(Memory::zeroed(gpu, size_of::<u32>(), "scratch")?).at,
        };
        let Grouped { tiles, order, .. } = grouped;
        let parameters = p::TopkFew { route, tiles, order, counter, of_tile: self::number(of_tile), unused: 0 };
        let blocks = self::number(tokens.div_ceil(CHOOSE_TOKENS));
        // SAFETY: the room was just made.
        unsafe { gpu.launch(Kernel::MOE_TOPK_FEW, [blocks, 1, 1], CHOOSE_THREADS, 0, &parameters)? };
        m.choice.grouped = Some(grouped);
        Ok(())
    }

    /// How so many pairs are grouped by their expert: pairs of a tile, and whether experts have a few each; `None`: they are computed one by one.
    pub(super) fn tiles_of(&self, of: &Registered, pairs: usize) -> Option<(usize, bool)> {
        let (gpu, Registered { moe, kinds, groups, .. }) = (&self.gpu, of);
        let count = moe.experts.count;
        let integers = kinds.iter().all(|kinds| kinds.len() == 1 && kinds[0].needs().int8);
        if !integers || !gpu.device.tiles || pairs * TOO_FEW <= count {
            return None;
        }
        let each_few = |part: usize| Few::fits(gpu, &kinds[part], groups[part], moe.experts.parts[part].cols);
        let alike = kinds[0] == kinds[1] && groups[0] == groups[1];
        if gpu.device.few && pairs <= FEW_PAIRS * count && alike && (0..PROJECTIONS).all(each_few) {
            return Some((grouped_gemm::TOGETHER, true));
        }
        // Where a tile of many tokens does not fit, it is one of few.
        let fits = |(kinds, groups): (&Vec<KernelFormat>, &Option<(u32, u32)>)| {
            let of = groups.map_or(0, |(group, _)| group as usize / matmul::GROUP);
            kinds[0].gemm_mma(of, weights::TILE, gpu.device.shared).is_some()
        };
        let many = pairs >= MANY_PAIRS * count && kinds.iter().zip(groups).all(fits);
        Some((if many { weights::TILE } else { weights::FEW }, false))
    }

    /// Which experts the router has chosen, on the host: the step waits for it. `input`: bytes of what was normed.
    pub(super) fn read_chosen(&self, m: &mut Mixtures, n: usize, input: usize) -> Result<Vec<u32>> {
        if let Some(streaming) = &mut m.streaming
            && let Some(host) = streaming.input(&self.gpu, n, input)?
        {
            // SAFETY: what was normed has so many bytes; waited for below.
            unsafe { self.gpu.read_later(m.x.floats(), host)? };
        }
        let host = m.chosen.room(&self.gpu, 4 * n)?;
        // SAFETY: the router has written as much.
        unsafe { self.gpu.read(m.choice.chosen.at(), host, self.gpu.quiet()?)? };
        m.synchronisations += 1;
        Ok(host.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    /// The same with their weights.
    pub(super) fn read_choice(&self, m: &mut Mixtures, tokens: usize, k: usize) -> Result<Routing> {
        let (mut experts, mut weights) = (vec![0; tokens * k], vec![0.0; tokens * k]);
        // SAFETY: the router has written as much.
        unsafe {
            self.gpu.read_later(m.choice.weights.at(), bytes_of_mut(&mut weights))?;
            self.gpu.read(m.choice.chosen.at(), bytes_of_mut(&mut experts), self.gpu.quiet()?)?;
        }
        m.synchronisations += 1;
        Ok(Routing { k, experts, weights })
    }
}

/// Puts pairs of a token and an expert in the order of their experts.
pub(super) fn group_pairs(
    gpu: &Gpu,
    room: &mut Scratch,
    (chosen, pairs): (Address, usize),
    experts: usize,
    (of_tile, few): (usize, bool),
) -> Result<Grouped> {
    let grouped = room_of_pairs(gpu, room, pairs, experts, (of_tile, few))?;
    let (at, order) = (grouped.tiles, grouped.order);
    let counts = order + 4 * pairs as u64;
    let parameters = p::Pairs {
        chosen,
        counts,
        tiles: at,
        order,
        pairs: number(pairs),
        experts: number(experts),
        of_tile: number(of_tile),
        unused: 0,
    };
    for kernel in [Kernel::MOE_COUNT_PAIRS, Kernel::MOE_GROUP_PAIRS] {
        // SAFETY: the router has chosen as many; the room was just made.
        unsafe { gpu.launch(kernel, [number(experts), 1, 1], PAIR_THREADS, 0, &parameters)? };
    }
    Ok(grouped)
}

/// Room for tiles of pairs, their order, and a number for each expert behind it.
fn room_of_pairs(
    gpu: &Gpu,
    room: &mut Scratch,
    pairs: usize,
    experts: usize,
    (of_tile, few): (usize, bool),
) -> Result<Grouped> {
    // Each expert's last tile may have room left.
    let most = (pairs / of_tile + experts).min(pairs);
    let tiles = 16 * (most + 1);
    let at = room.room(gpu, tiles + 4 * pairs + 4 * experts)?;
    Ok(Grouped { tiles: at, order: at + tiles as u64, most, of_tile, few })
}
