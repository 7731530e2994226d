//! Latent attention: rows into their slots, queries into the space of these rows, attention over one KV head, and each head's values.
//!
//! Heads have matrices of their own, so their products are those of experts: each output row has its head's. Of many tokens some heads are taken at a time, since a query in that
//! space is several times as long as before.

use anyhow::Result;
use sluice_backend::{HeadRows, LatentKeys, LatentLayer};

use crate::device::memory::Scratch;
use crate::device::sys::Address;
use crate::kernels::{Kernel, Variant};
use crate::ops::activations::{EncodeInput, EncodedActivations, GROUP, encode};
use crate::ops::attention::{self, AttentionScratch};
use crate::ops::context::Context;
use crate::ops::latent_rows::LatentQueries;
use crate::ops::matmul::{TILE, matmul};
use crate::ops::product::{ExpertTable, PairTiles, Product};
use crate::ops::selected::Selected;
use crate::parameters::{self as p, number};
use crate::weights::{self, KernelFormat};

/// Rows (heads of tokens) that are taken at a time, if one head of all tokens is not more.
const ROWS: usize = 16384;
/// Heads of a token that a block turns, a warp each.
const TURNED: usize = 4;
/// Tokens of a block that takes queries through the projection of keys, and columns of it: `ABSORB_COLUMNS` of the kernel.
const ABSORB: [(usize, Kernel); 3] =
    [(1, Kernel::LATENT_ABSORB_1), (4, Kernel::LATENT_ABSORB_4), (16, Kernel::LATENT_ABSORB_16)];
const ABSORB_COLUMNS: usize = 128;
/// From so many tokens on, a head's outputs are large tiles.
const MIN_LARGE_TILE: usize = 20;
/// Threads of a block that writes a table of heads.
const TABLE_THREADS: usize = 256;

/// The heads that are taken at a time, of `heads` and so many tokens, where no more than `most` are.
fn heads_at_once(heads: usize, tokens: usize, most: usize) -> usize {
    let most = (ROWS / tokens.max(1)).min(most).clamp(1, heads);
    heads.div_ceil(heads.div_ceil(most))
}

/// The most rows that steps of so many tokens take at a time.
pub fn most_rows(heads: usize, tokens: usize) -> usize {
    ROWS.max(tokens).min(heads * tokens)
}

/// The same where the rows of each head are whole tiles.
pub fn padded_rows(heads: usize, rows: usize) -> usize {
    rows + heads * (TILE - 1)
}

/// Bytes of scratch for so many rows, beside their encodings and what attention keeps.
pub fn scratch_bytes(layer: &LatentLayer, rows: usize) -> usize {
    let products = layer.keys.rows().rows.max(layer.v_dim());
    let floats = layer.rotated() + 2 * layer.rank + layer.plain() + products;
    // Runs of heads are whole tiles. Of the table: matrices, the head of each row, the order, and tiles.
    4 * padded_rows(layer.heads, rows) * floats + layer.heads * (size_of::<p::Matrix>() + 16) + 24 * rows + 1024
}

/// Where each head of a token has its outputs: elements from token to token, and from head to head.
#[derive(Clone, Copy)]
struct HeadOutputs {
    at: Address,
    token: usize,
    head: usize,
}

/// Scratch of latent attention.
#[derive(Default)]
pub struct LatentScratch {
    /// Queries in the space of the cached rows: `[tokens, heads at a time, rotated + rank]`.
    q: Scratch,
    /// What is not rotated of queries, where heads have matrices for it: `[tokens, heads at a time, plain]`.
    plain: Scratch,
    /// What attention makes of them: `[tokens, heads at a time, rank]`.
    mixed: Scratch,
    encoded: EncodedActivations,
    /// Products that do not lie as what takes them has them: `[tokens, heads at a time, rows]`.
    products: Scratch,
    table: Scratch,
}

impl LatentScratch {
    pub fn bytes(&self) -> usize {
        let scratch = [&self.q, &self.plain, &self.mixed, &self.products, &self.table];
        scratch.iter().map(|s| s.bytes()).sum::<usize>() + self.encoded.bytes()
    }

    /// Runs a layer. `selected`: what each token sees, if not all.
    pub fn run(
        &mut self,
        context: &Context,
        attention: &mut AttentionScratch,
        layer: &LatentLayer,
        selected: Option<Selected>,
    ) -> Result<()> {
        let layout = context.kv[layer.group].layout;
        let (tokens, heads, rank, rotated) = (context.inputs.tokens().len(), layer.heads, layer.rank, layer.rotated());
        assert!(layout.kv_heads == 1 && layout.v_dim == 0 && layout.k_dim == rank + rotated, "rows of {layout:?}");
        assert!(layer.q.rows >= tokens && layer.kv.rows >= tokens && layer.out.rows >= tokens, "{tokens} tokens");
        assert_eq!(layer.out.cols, heads * layer.v_dim(), "values of all heads");
        let half = context.rotary[layer.rotary.number()].half();
        assert_eq!(2 * half, rotated, "angles of all rotated elements");
        if tokens == 0 {
            return Ok(());
        }
        let split = AttentionScratch::split_latents(context, heads, selected.map(|of| of.most()));
        let n = heads_at_once(heads, tokens, split.unwrap_or(heads));
        for first in (0..heads).step_by(n) {
            let count = n.min(heads - first);
            let q = self.absorb(context, layer, (first, count))?;
            let mixed = self.mixed.reserve(&context.gpu, 4 * tokens * count * rank)?;
            let queries = LatentQueries {
                group: layer.group,
                layer: layer.layer,
                q,
                out: mixed,
                heads: count,
                rank,
                scale: layer.scale,
                selected,
            };
            attention.run_latents(context, &queries)?;
            self.project(context, layer, (first, count), mixed)?;
        }
        Ok(())
    }

    /// The queries of some heads in the space of the cached rows; with the first of them, the rows go into their slots.
    fn absorb(&mut self, context: &Context, layer: &LatentLayer, (first, heads): (usize, usize)) -> Result<Address> {
        let (gpu, tokens) = (&context.gpu, context.inputs.tokens().len());
        let (plain, rotated, rank) = (layer.plain(), layer.rotated(), layer.rank);
        let (dim, rows) = (rotated + rank, tokens * heads);
        let q = self.q.reserve(gpu, 4 * rows * dim)?;
        let by_rows = matches!(layer.keys, LatentKeys::Rows(_));
        let plain_to = if by_rows { 0 } else { self.plain.reserve(gpu, 4 * rows * plain)? };
        let stores = first == 0;
        let HeadRows { matrix, stride, offset, .. } = layer.keys.rows();
        let (kv, step) = (&context.kv[layer.group], &context.step);
        let weight = &context.weights.all[matrix.number()];
        let queries = p::LatentQueries {
            keys: weight.at_row(0, context.mode),
            q: context.place(layer.q),
            to: q,
            plain_to,
            angles: context.rotary[layer.rotary.number()].memory.at,
            positions: step.positions,
            slots: if stores { step.groups[layer.group].slots } else { 0 },
            cache: attention::cache(kv.memory.at, &kv.layout, layer.layer),
            kv: context.place(layer.kv),
            norm: context.norm(&layer.norm),
            tokens: number(tokens),
            first: number(first),
            heads: number(heads),
            plain: number(plain),
            rotated: number(rotated),
            rank: number(rank),
            adjacent: layer.adjacent_pairs.into(),
            stride: number(stride),
            offset: number(offset),
            unused: 0,
        };
        let last = layer.keys.rows().of(layer.heads - 1).end;
        assert!(last <= weight.rows(), "{last} rows of {}", weight.rows());
        let grid = [number(tokens), number(heads.div_ceil(TURNED) + usize::from(stores)), 1];
        let shared = number(4 * dim);
        // SAFETY: tensors were checked, slots are of committed blocks, and the scratch was just reserved.
        unsafe { gpu.launch(Kernel::LATENT_TURN, grid, number(32 * TURNED), shared, &queries)? };
        match layer.keys {
            LatentKeys::Rows(keys) => {
                assert_eq!((keys.rows, weight.cols()), (plain, rank), "keys by rows");
                let (tile, kernel) = ABSORB.into_iter().find(|(n, _)| *n >= tokens).unwrap_or(ABSORB[2]);
                let grid = [number(heads), number(rank.div_ceil(ABSORB_COLUMNS)), number(tokens.div_ceil(tile))];
                let shared = number(4 * tile * plain);
                // SAFETY: as above, and the matrix has these rows.
                unsafe { gpu.launch(kernel, grid, number(ABSORB_COLUMNS), shared, &queries)? };
            }
            LatentKeys::Columns(keys) => {
                assert_eq!((keys.rows, weight.cols()), (rank, plain), "keys by columns");
                let to = HeadOutputs { at: q + 4 * rotated as u64, token: heads * dim, head: dim };
                self.multiply(context, keys, (first, heads), plain_to, to)?;
            }
        }
        Ok(q)
    }

    /// The values of some heads: what attention made for them, projected.
    fn project(
        &mut self,
        context: &Context,
        layer: &LatentLayer,
        (first, heads): (usize, usize),
        mixed: Address,
    ) -> Result<()> {
        let v_dim = layer.v_dim();
        let out = context.place(layer.out.columns(first * v_dim..(first + heads) * v_dim));
        let to = HeadOutputs { at: out.at, token: out.stride as usize, head: v_dim };
        self.multiply(context, layer.values, (first, heads), mixed, to)
    }

    /// Products of each head's rows with its inputs, `[tokens, heads, columns]` at `input`.
    fn multiply(
        &mut self,
        context: &Context,
        rows: HeadRows,
        (first, heads): (usize, usize),
        input: Address,
        to: HeadOutputs,
    ) -> Result<()> {
        let (gpu, tokens) = (&context.gpu, context.inputs.tokens().len());
        let weight = &context.weights.all[rows.matrix.number()];
        let (cols, kind) = (weight.cols(), weight.kind(context.mode));
        // 1. The matrix of each output. Outputs are taken by tiles, or in runs of a head, or heads take turns.
        let of = |head: usize| weight.at_row(rows.of(head).start, context.mode);
        let (own, next) = (of(first), of(first + usize::from(heads > 1)));
        assert!(rows.of(first + heads - 1).end <= weight.rows(), "rows of all heads");
        let of_tile = tile_outputs(context, kind, weight.groups(), tokens);
        let run = match of_tile {
            None if tokens > 1 && !kind.needs().f32 => tokens.next_multiple_of(TILE),
            _ => 0,
        };
        let (of_head, outputs) = (of_tile.map_or(0, |of| tokens.div_ceil(of)), heads * run.max(tokens));
        let (matrices, tiles) = ((heads * size_of::<p::Matrix>()).next_multiple_of(16), 16 * (heads * of_head + 1));
        let at = self.table.reserve(gpu, matrices + tiles + 8 * outputs)?;
        let tiles_at = at + matrices as u64;
        let numbers = tiles_at + tiles as u64;
        let order = numbers + 4 * outputs as u64;
        let table = p::LatentHeads {
            first: own,
            steps: [next.data - own.data, next.scales - own.scales, next.biases - own.biases],
            matrices: at,
            numbers,
            tiles: if of_tile.is_some() { tiles_at } else { 0 },
            order,
            tokens: number(tokens),
            heads: number(heads),
            outputs: number(outputs),
            of_tile: of_tile.map_or(0, number),
            run: number(run),
            unused: 0,
        };
        let grid = [number(outputs.div_ceil(TABLE_THREADS)), 1, 1];
        // SAFETY: the scratch was just reserved.
        unsafe { gpu.launch(Kernel::LATENT_HEADS, grid, number(TABLE_THREADS), 0, &table)? };
        // 2. Products
        let taken = if run > 0 { order } else { 0 };
        let x = EncodeInput { x: p::Tensor::dense(input, cols), taken, rows: outputs, cols, ..EncodeInput::default() };
        encode(gpu, x, kind.needs(), &mut self.encoded)?;
        let max_tiles = heads * of_head;
        let tiles = of_tile.map(|tile_pairs| PairTiles { tiles: tiles_at, order, max_tiles, tile_pairs, few: false });
        let (kinds, groups) = ([kind], weight.groups());
        let table = ExpertTable {
            matrices: at,
            count: heads,
            experts: numbers,
            per_row: 1,
            kinds: &kinds,
            groups,
            tiles,
            in_runs: run > 0,
        };
        let direct = run == 0 && to.token == heads * to.head;
        let out = match direct {
            true => p::Tensor::dense(to.at, to.head),
            false => p::Tensor::dense(self.products.reserve(gpu, 4 * outputs * rows.rows)?, rows.rows),
        };
        let product = Product {
            matrix: p::Matrix::default(),
            table: Some(table),
            rows: rows.rows,
            cols,
            outputs,
            out,
            bias: 0,
            accumulate: false,
            runs: None,
        };
        matmul(gpu, &[product], &self.encoded)?;
        if direct {
            return Ok(());
        }
        let gather = p::LatentGather {
            from: out.at,
            to: to.at,
            token: to.token as u64,
            head: to.head as u64,
            cols: number(rows.rows),
            heads: number(heads),
            run: number(run),
            unused: 0,
        };
        // SAFETY: the tensor was checked, and the scratch was just reserved.
        unsafe { gpu.launch(Kernel::LATENT_GATHER, [number(tokens), number(heads), 1], 128, 0, &gather)? };
        Ok(())
    }
}

/// The most outputs of a tile, if outputs are taken by tiles: several tokens with weights that are integers.
fn tile_outputs(context: &Context, kind: KernelFormat, groups: Option<(u32, u32)>, tokens: usize) -> Option<usize> {
    let gpu = &context.gpu;
    let (group, _) = groups.filter(|_| kind.needs().int8 && gpu.device.has(Variant::Tiles) && tokens > 1)?;
    let fits = |tile| kind.gemm_mma(group as usize / GROUP, tile, gpu.device.shared).is_some();
    let large = tokens >= MIN_LARGE_TILE && fits(weights::TILE);
    Some(if large { weights::TILE } else { weights::FEW })
}
