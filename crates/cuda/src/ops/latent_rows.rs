//! Attention of queries over latent rows: one KV head, whose keys end with its values.

use anyhow::Result;
use sluice_backend::{AttentionMode, KvLayout, KvType};

use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::{Kernel, Variant};
use crate::ops::attention::{
    self, AttentionScratch, JOIN_COLUMNS, JOIN_THREADS, MIN_PREFILL_TOKENS, PARTITION, TILES, cache, max_partitions,
    round_up,
};
use crate::ops::context::Context;
use crate::ops::selected::Selected;
use crate::parameters::{self as p, number};

/// Queries that meet latent rows: `[tokens, heads]` of them, as long as a row.
pub struct LatentQueries {
    pub group: usize,
    pub layer: usize,
    pub q: Address,
    /// `[tokens, heads, rank]`
    pub out: Address,
    pub heads: usize,
    pub rank: usize,
    pub scale: f32,
    /// What each token sees, if not all.
    pub selected: Option<Selected>,
}

/// The most results of partitions for one step of latent attention, and how many rows (heads of a token) are taken at a time however many partitions there are.
const MAX_PARTS: usize = 8192;
const MIN_ROWS: usize = 256;

/// The most rows (heads of tokens) that latent attention splits over partitions at a time.
fn rows_at_once(partitions: usize) -> usize {
    (MAX_PARTS / partitions).max(MIN_ROWS)
}

/// Bytes of results of partitions: those of any step, and for each 128 positions.
pub fn part_bytes(rank: usize) -> (usize, usize) {
    // Rounding at most doubles the number of partitions.
    let part = attention::part_bytes(rank);
    (MAX_PARTS * part, 2 * MIN_ROWS * part)
}

impl AttentionScratch {
    /// Whether partitions of a step have blocks of their own in latent attention, and how many heads are then taken at a time.
    pub fn split_latents(context: &Context, heads: usize, selected: Option<usize>) -> Option<usize> {
        let tokens = context.inputs.tokens().len();
        let partitions = partitions_of(context, selected);
        let few = tokens <= MIN_PREFILL_TOKENS.max(context.inputs.sequences());
        let rows = rows_at_once(partitions);
        (partitions > 1 && few && tokens <= rows).then(|| (rows / tokens.max(1)).clamp(1, heads))
    }

    /// Attention of one layer's queries over latent rows.
    pub fn run_latents(&mut self, context: &Context, queries: &LatentQueries) -> Result<()> {
        let gpu = &context.gpu;
        let &LatentQueries { group, layer, q, out, heads, rank, scale, selected } = queries;
        let (pool, layout) = (context.kv[group].memory.at, context.kv[group].layout);
        let (tokens, dim) = (context.inputs.tokens().len(), layout.k_dim);
        assert!(layout.kv_heads == 1 && layout.v_dim == 0 && rank <= dim, "a group of latent rows: {layout:?}");
        assert!(layout.mode.takes(layout.kv_type), "attention in mode {:?} of {:?}", layout.mode, layout.kv_type);
        let most = selected.map(|of| of.most());
        let partitions = partitions_of(context, most);
        let split = AttentionScratch::split_latents(context, heads, most).is_some_and(|at_once| heads <= at_once);
        let parts = match split {
            true => self.parts.reserve(gpu, tokens * heads * partitions * attention::part_bytes(rank))?,
            false => 0,
        };
        let (tile, whole, partition) = TILES.into_iter().find(|(n, ..)| *n >= heads).unwrap_or(TILES[TILES.len() - 1]);
        let tables = context.step.groups[group];
        let cache = cache(pool, &layout, layer);
        // Values are the ends of keys; or all of them, and then they are rows of their own at the same place.
        let cache = match dim - rank {
            0 => p::Cache { v: cache.k, v_scales: cache.k_scales, ..cache },
            _ => cache,
        };
        let parameters = p::Attention {
            cache: p::Cache { v_dim: number(rank), before_value: number(dim - rank), ..cache },
            q: p::Tensor::dense(q, heads * dim),
            out: p::Tensor::dense(out, heads * rank),
            positions: context.step.positions,
            sequences: context.step.sequences,
            slots: tables.slots,
            tables: tables.tables,
            table_starts: tables.table_starts,
            tokens: number(tokens),
            heads: number(heads),
            kv_heads: 1,
            scale,
            partitions: number(partitions),
            parts,
            integers: (layout.mode != AttentionMode::F32).into(),
            run: 1,
            selected: selected.map_or(0, |of| of.slots),
            top: selected.map_or(0, |of| number(of.top)),
            pool: selected.map_or(1, |of| number(of.pool)),
            ..p::Attention::default()
        };
        let grid = |y: usize, z: usize| [number(tokens), number(y), number(z)];
        if let Some(([whole, part], shared)) = kernels_of(gpu, &layout, rank) {
            let flat = context.inputs.sequences() == 1 && selected.is_none();
            let parameters = p::Attention { flat: flat.into(), ..parameters };
            let rows = |n: usize| n.div_ceil(LATENT_ROWS);
            let blocks = if flat { rows(tokens * heads) } else { tokens * rows(heads) };
            let (kernel, z) = if split { (part, partitions) } else { (whole, 1) };
            // SAFETY: as below.
            unsafe { gpu.launch(kernel, [number(blocks), 1, number(z)], LATENT_THREADS, shared, &parameters)? };
            if split {
                let columns = rank.div_ceil(JOIN_COLUMNS);
                // SAFETY: as below.
                unsafe { gpu.launch(Kernel::ATTENTION_COMBINE, grid(heads, columns), JOIN_THREADS, 0, &parameters)? };
            }
            return Ok(());
        }
        let tiles = heads.div_ceil(tile);
        let bytes = |elements: usize| number(4 * tile * elements);
        let padded = dim.next_multiple_of(16);
        // SAFETY: the caller's scratch has these sizes; tables reach as far as positions, as the step's inputs ensure.
        unsafe {
            if split {
                gpu.launch(partition, grid(tiles, partitions), 128, bytes(padded), &parameters)?;
                let columns = rank.div_ceil(JOIN_COLUMNS);
                gpu.launch(Kernel::ATTENTION_COMBINE, grid(heads, columns), JOIN_THREADS, 0, &parameters)?;
            } else {
                gpu.launch(whole, grid(tiles, 1), 128, bytes(padded + rank), &parameters)?;
            }
        }
        Ok(())
    }
}

/// Rows (heads of tokens) and threads of a block of `kernels/attention/latent_rows.cu`, and the longest vector that it takes.
const LATENT_ROWS: usize = 16;
const LATENT_THREADS: u32 = 512;
const MAX_RANK: usize = 512;

/// The kernels whose blocks take sixteen rows, through all partitions and through one, and their shared memory, if they can take these rows.
fn kernels_of(gpu: &Gpu, layout: &KvLayout, rank: usize) -> Option<([Kernel; 2], u32)> {
    let kernels = match layout.kv_type {
        KvType::F16 => [Kernel::LATENT_ATTEND_F16, Kernel::LATENT_ATTEND_PART_F16],
        KvType::Bf16 => [Kernel::LATENT_ATTEND_BF16, Kernel::LATENT_ATTEND_PART_BF16],
        KvType::F32 | KvType::Int8 | KvType::Int16 => return None,
    };
    let dim = layout.k_dim;
    let whole = dim.is_multiple_of(16) && rank.is_multiple_of(4) && rank <= MAX_RANK;
    // Such that four neighbours of the cached rows lie in different banks.
    let words = (dim / 2 + 23) / 32 * 32 + 8;
    let shared = 4 * (PARTITION * words + LATENT_ROWS * dim);
    let fits = shared + kernels[0].static_shared() <= gpu.device.shared;
    let at = layout.kv_type.size() * layout.block_tokens * dim;
    (whole && at.is_multiple_of(16) && fits && gpu.device.has(Variant::Prompts)).then_some((kernels, number(shared)))
}

/// The most partitions that any of the step's tokens sees of latent rows.
fn partitions_of(context: &Context, selected: Option<usize>) -> usize {
    let all = round_up(max_partitions(context, None));
    selected.map_or(all, |most| all.min(most.div_ceil(PARTITION)))
}
