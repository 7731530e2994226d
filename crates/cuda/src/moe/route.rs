//! Which experts tokens take: the router, and the choice by its logits.

use anyhow::Result;
use sluice_backend::{Activations, Norm, Routing, Tensor};

use crate::device::memory::{DeviceBuffer, Scratch, bytes_of_mut};
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::{Kernel, STATIC_SHARED, Variant};
use crate::moe::experts::{MAX_CHOSEN, MAX_EXPERTS};
use crate::moe::layer::MoeLayer;
use crate::moe::pairs::{TileChoice, reserve_pairs, tile_choice};
use crate::ops::activations::{EncodeInput, EncodedActivations, encode, encode_int11};
use crate::ops::context::Context;
use crate::ops::grouped_gemm;
use crate::ops::matmul::matmul;
use crate::ops::product::PairTiles;
use crate::parameters::{self as p, number};
use crate::weights::Needs;

/// Columns whose squares are summed together.
pub const NORM_COLUMNS: usize = 256;
/// Threads and rows of a block of the router.
pub const ROUTER_THREADS: u32 = 384;
pub const ROUTER_ROWS: usize = 2;
/// The kernels that route a few tokens: the most tokens; tokens and threads of a block that chooses; tokens of a block of the router, and its blocks for each
/// multiprocessor.
const MAX_FEW_TOKENS: usize = 32;
const TOPK_TOKENS: usize = 8;
const TOPK_THREADS: u32 = 256;
const ROUTER_TOKENS: usize = 8;
const ROUTER_BLOCKS: usize = 2;

/// The router's results on the device.
#[derive(Default)]
pub struct RouterScratch {
    /// `[tokens, experts]` f32
    pub logits: Scratch,
    /// The input of a router that has a norm of its own.
    pub input: EncodedActivations,
    /// `[tokens, k]` u32, and their weights as f32
    pub chosen: Scratch,
    pub weights: Scratch,
    /// u32: blocks that have chosen. Zero between kernels.
    counter: Option<DeviceBuffer>,
    /// Pairs of a token and an expert, sorted by expert.
    pub pairs: Scratch,
    /// The tiles of `pairs`, if the kernel that chose has sorted them.
    pub tiles: Option<PairTiles>,
}

/// What routed experts give, and how it is summed.
#[derive(Clone, Copy)]
pub struct RoutedOutputs {
    /// `[tokens, k, width]` f32
    pub outputs: Address,
    /// `[tokens, k]` f32
    pub weights: Address,
    /// `[tokens, k]` u32
    pub experts: Address,
    pub k: usize,
}

impl RouterScratch {
    /// The outputs of the experts that were chosen last, `k` of each token.
    pub fn chosen(&self, outputs: Address, k: usize) -> RoutedOutputs {
        RoutedOutputs { outputs, weights: self.weights.at(), experts: self.chosen.at(), k }
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        let scratch = [&self.logits, &self.chosen, &self.weights, &self.pairs];
        scratch.iter().map(|s| s.bytes()).sum::<usize>()
            + self.input.bytes()
            + self.counter.as_ref().map_or(0, |m| m.bytes)
    }

    /// For a few tokens: `to = norm(x)` and the router's logits in one kernel, then the choice. Returns whether there are kernels for it.
    pub fn norm_and_route_few(
        &mut self,
        context: &Context,
        layer: &MoeLayer,
        x: Tensor,
        needs: Needs,
        to: &mut EncodedActivations,
    ) -> Result<bool> {
        let (gpu, moe) = (&context.gpu, &layer.moe);
        let norm = moe.norm.as_ref().map_or(p::Norm::default(), |norm| context.norm(norm));
        let (from, count) = (context.place(x), moe.router.rows.len());
        let product = context.product(&moe.router, x.rows, p::Tensor::default(), false, Activations::F32);
        let shared = |rows: usize| 4 * (ROUTER_TOKENS + 1 + rows) * x.cols;
        let blocks = |rows: usize| (count.div_ceil(rows) + ROUTER_TOKENS) * x.rows.div_ceil(ROUTER_TOKENS);
        let fits = |rows: usize| shared(rows) + STATIC_SHARED <= gpu.device.shared;
        // Twice the rows if there are more blocks than the device runs at once.
        let many = blocks(ROUTER_ROWS) > ROUTER_BLOCKS * gpu.device.multiprocessors && fits(2 * ROUTER_ROWS);
        let rows = if many { 2 * ROUTER_ROWS } else { ROUTER_ROWS };
        let aligned = [from.at, 4 * from.stride, norm.weight].iter().all(|at| at.is_multiple_of(16));
        let possible = gpu.device.has(Variant::Few)
            && moe.router_norm.is_none()
            && x.rows <= MAX_FEW_TOKENS
            && (product.bias, product.runs, product.cols) == (0, None, x.cols)
            && product.matrix.kind < 4
            && x.cols.is_multiple_of(NORM_COLUMNS)
            && norm.weight != 0
            && aligned
            && fits(rows);
        if !possible {
            return Ok(false);
        }
        moe.scoring.check(count).unwrap_or_else(|e| panic!("{e}"));
        let logits = self.logits.reserve(gpu, 4 * x.rows * count)?;
        let to = to.reserve(gpu, x.rows, x.cols, needs)?;
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
        let grid = [row_blocks + number(ROUTER_TOKENS), number(x.rows.div_ceil(ROUTER_TOKENS)), 1];
        // SAFETY: matrices and tensors were checked against their buffers; the scratch was just reserved.
        unsafe { gpu.launch(Kernel::MOE_ROUTER_FEW, grid, ROUTER_THREADS, number(shared(rows)), &parameters)? };
        if needs.int11 {
            // The kernel leaves what is normed as f32; it makes no integers of 11 bits.
            let normed = p::Tensor::dense(to.f, x.cols);
            encode_int11(gpu, EncodeInput { x: normed, rows: x.rows, cols: x.cols, ..EncodeInput::default() }, to)?;
        }
        self.topk(context, layer, x.rows, logits)?;
        Ok(true)
    }

    /// The router's logits, and the choice. `normed`: `x` by the mixture's norm.
    pub fn route(&mut self, context: &Context, layer: &MoeLayer, x: Tensor, normed: &EncodedActivations) -> Result<()> {
        let (moe, tokens) = (&layer.moe, x.rows);
        let count = moe.router.rows.len();
        moe.scoring.check(count).unwrap_or_else(|e| panic!("{e}"));
        let logits = self.logits.reserve(&context.gpu, 4 * tokens * count)?;
        let product = context.product(&moe.router, tokens, p::Tensor::dense(logits, count), false, Activations::F32);
        let input = match &moe.router_norm {
            Some(norm) => {
                encode_normed(context, x, Some(norm), Needs::F32, &mut self.input)?;
                &self.input
            }
            None => normed,
        };
        matmul(&context.gpu, &[product], input)?;
        self.topk(context, layer, tokens, logits)
    }

    /// The choice by the router's logits.
    fn topk(&mut self, context: &Context, layer: &MoeLayer, tokens: usize, logits: Address) -> Result<()> {
        let gpu = &context.gpu;
        let (count, k) = (layer.moe.router.rows.len(), layer.moe.scoring.k());
        let chosen = self.chosen.reserve(gpu, 4 * tokens * k)?;
        let weights = self.weights.reserve(gpu, 4 * tokens * k)?;
        let parameters = layer.route_parameters((tokens, context.step.tokens), logits, chosen, weights);
        self.tiles = None;
        let few = gpu.device.has(Variant::Few)
            && tokens <= MAX_FEW_TOKENS
            && k <= MAX_CHOSEN
            && (k..=MAX_EXPERTS).contains(&count)
            && parameters.groups == 1
            && parameters.table == 0;
        if few {
            return self.topk_few(context, layer, parameters);
        }
        let shared = number(4 * (2 * count + 2 * k));
        // SAFETY: the scratch was just reserved.
        unsafe { gpu.launch(Kernel::MOE_ROUTE, [number(tokens), 1, 1], 32, shared, &parameters)? };
        Ok(())
    }

    /// The choice of a few tokens, which also sorts their pairs by expert.
    fn topk_few(&mut self, context: &Context, layer: &MoeLayer, route: p::Route) -> Result<()> {
        let (gpu, tokens, pairs) = (&context.gpu, route.tokens as usize, (route.tokens * route.k) as usize);
        let choice = tile_choice(gpu, layer, pairs);
        let choice = choice.unwrap_or(TileChoice { tile_pairs: grouped_gemm::TILE_TOKENS, few: true });
        let reserved = reserve_pairs(gpu, &mut self.pairs, pairs, route.experts as usize, choice)?;
        let counter = match &self.counter {
            Some(counter) => counter.at,
            None => self.counter.insert(DeviceBuffer::zeroed(gpu, size_of::<u32>(), "scratch")?).at,
        };
        let PairTiles { tiles, order, tile_pairs, .. } = reserved;
        let parameters = p::TopkFew { route, tiles, order, counter, of_tile: number(tile_pairs), unused: 0 };
        let blocks = number(tokens.div_ceil(TOPK_TOKENS));
        // SAFETY: the scratch was just reserved.
        unsafe { gpu.launch(Kernel::MOE_TOPK_FEW, [blocks, 1, 1], TOPK_THREADS, 0, &parameters)? };
        self.tiles = Some(reserved);
        Ok(())
    }

    /// The choice on the host: experts and weights. Waits for the device.
    pub fn read(&self, gpu: &Gpu, tokens: usize, k: usize) -> Result<Routing> {
        let (mut experts, mut weights) = (vec![0; tokens * k], vec![0.0; tokens * k]);
        // SAFETY: the router writes this many; `read` waits.
        unsafe {
            gpu.read_async(self.weights.at(), bytes_of_mut(&mut weights))?;
            gpu.read(self.chosen.at(), bytes_of_mut(&mut experts), gpu.wait_permit()?)?;
        }
        Ok(Routing { k, experts, weights })
    }
}

/// `to = norm(x)` with a mixture's norm.
pub fn norm(context: &Context, layer: &MoeLayer, x: Tensor, needs: Needs, to: &mut EncodedActivations) -> Result<()> {
    encode_normed(context, x, layer.moe.norm.as_ref(), needs, to)
}

fn encode_normed(
    context: &Context,
    x: Tensor,
    norm: Option<&Norm>,
    needs: Needs,
    to: &mut EncodedActivations,
) -> Result<()> {
    let norm = norm.map_or(p::Norm::default(), |norm| context.norm(norm));
    let input = EncodeInput { x: context.place(x), norm, rows: x.rows, cols: x.cols, ..EncodeInput::default() };
    encode(&context.gpu, input, needs, to)
}
