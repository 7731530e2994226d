//! Sparse indexers: keys into their slots; where a token sees more positions than are wanted, all of them are scored, and the slots of the best are kept for the latent attention
//! behind.

use anyhow::Result;
use sluice_backend::{IndexLayer, IndexNorm, PoolLogits, SelectLayer};

use crate::device::memory::Scratch;
use crate::device::sys::Address;
use crate::kernels::Kernel;
use crate::ops::attention;
use crate::ops::context::Context;
use crate::ops::selected::Selected;
use crate::parameters::{self as p, number};

/// Tokens that are scored at a time.
const TOKENS: usize = 64;
/// Positions that a block scores, and its threads; also of a block that makes keys and queries.
const INDEX_THREADS: usize = 128;
/// Threads of a block that selects.
const SELECT_THREADS: u32 = 512;

/// Bytes of scratch of a step of so many tokens: the slots that are selected, and the scores of each 128 positions.
pub fn scratch_bytes(layer: &IndexLayer, tokens: usize) -> (usize, usize) {
    (4 * tokens * layer.most_seen(), scores_bytes(tokens))
}

/// Of the scores of each 128 positions.
pub fn scores_bytes(tokens: usize) -> usize {
    4 * tokens.min(TOKENS) * INDEX_THREADS
}

/// What an indexer has selected, and its scratch.
#[derive(Default)]
pub struct IndexScratch {
    /// `[tokens at a time, positions]` f32
    scores: Scratch,
    /// `[tokens, most]` u32
    slots: Scratch,
    /// What each token of the step sees; `None`: all that is before it.
    pub selected: Option<Selected>,
    /// The same of entries: `[tokens, top]` u32, rows of their cache.
    pub entries: Option<Address>,
}

impl IndexScratch {
    pub fn bytes(&self) -> usize {
        self.scores.bytes() + self.slots.bytes()
    }

    /// Runs a layer.
    pub fn run(&mut self, context: &Context, layer: &IndexLayer) -> Result<()> {
        let (gpu, layout) = (&context.gpu, context.kv[layer.group].layout);
        let (tokens, dim, heads) = (context.inputs.tokens().len(), layer.dim(), layer.heads);
        assert!(
            layout.kv_heads == layer.kv_heads() && layout.v_dim == 0 && layout.k_dim == dim,
            "keys of an indexer: {layout:?}"
        );
        let weights = layer.weights;
        assert!(layer.top > 0 && layer.q.cols == heads * dim, "{heads} heads of {dim}");
        assert!(weights.is_none_or(|t| t.cols == heads && t.rows >= tokens), "weights of {heads} heads");
        assert!([layer.q, layer.k].iter().all(|t| t.rows >= tokens), "{tokens} tokens");
        let rotary = &context.rotary[layer.rotary.number()];
        assert!(2 * rotary.half() <= dim, "{} pairs in a key of {dim}", rotary.half());
        let (reach, pool) = (context.inputs.reach(), layer.pool_size());
        assert!(pool > 0 && layer.top.is_multiple_of(pool), "{} positions in pools of {pool}", layer.top);
        self.selected = None;
        if tokens == 0 {
            return Ok(());
        }
        let selects = reach > layer.most_seen();
        // Rounded to few sizes, so that steps of neighbouring lengths have the same graph.
        let positions = ((reach / pool).div_ceil(INDEX_THREADS) * INDEX_THREADS).next_multiple_of(8 * INDEX_THREADS);
        let (scores, selected) = match selects {
            true => (
                self.scores.reserve(gpu, 4 * tokens.min(TOKENS) * positions)?,
                self.slots.reserve(gpu, 4 * tokens * layer.most_seen())?,
            ),
            false => (0, 0),
        };
        let logits = layer.pool_logits();
        let (norm, bias) = match layer.norm {
            IndexNorm::Tokens(norm) => (norm.scale, context.place(norm.bias).at),
            IndexNorm::Pools(norm) => (norm, 0),
        };
        let parameters = p::Index {
            cache: attention::cache(context.kv[layer.group].memory.at, &layout, layer.layer),
            q: context.place(layer.q),
            k: context.place(layer.k),
            weights: weights.map_or(p::Tensor::default(), |weights| context.place(weights)),
            logits: logits.map_or(p::Tensor::default(), |of| context.place(of.logits)),
            norm: context.norm(&norm),
            bias,
            pool_bias: logits.map_or(0, |of| context.place(of.bias).at),
            angles: rotary.memory.at,
            scores,
            selected,
            tokens: number(tokens),
            heads: number(heads),
            half: number(rotary.half()),
            adjacent: layer.adjacent_pairs.into(),
            top: number(layer.top),
            reach: number(positions),
            row_block: number(context.kv[layer.rows_group].layout.block_tokens),
            scale: layer.scale,
            weight_scale: layer.weight_scale,
            pool: number(pool),
            key_rows: number(pool),
            ..of_step(context, layer.group, layer.rows_group)
        };
        let of_warps = number(INDEX_THREADS / 32 * 4 * dim);
        let threads = number(INDEX_THREADS);
        // SAFETY: tensors and angles were checked; slots are of committed blocks.
        unsafe { gpu.launch(Kernel::INDEX_STORE, [number(tokens), 1, 1], threads, of_warps, &parameters)? };
        if layer.pool.is_some() {
            let fits = |of: PoolLogits| (of.logits.cols, of.bias.cols) == (dim, pool * dim) && of.logits.rows >= tokens;
            assert!(logits.is_none_or(fits), "{logits:?}");
            // SAFETY: as above; tables reach as far as positions.
            unsafe { gpu.launch(Kernel::INDEX_POOL, [number(tokens), 1, 1], threads, number(8 * dim), &parameters)? };
        }
        if !selects {
            return Ok(());
        }
        let queries = number(4 * heads * (dim.next_multiple_of(16) + 1));
        self.selected = Some(Selected { slots: selected, top: layer.top, pool });
        // SAFETY: as above; tables reach as far as positions, and the scratch was just reserved.
        unsafe { select(context, &parameters, queries) }
    }

    /// Selects entries.
    pub fn run_entries(&mut self, context: &Context, layer: &SelectLayer) -> Result<()> {
        let (gpu, layout) = (&context.gpu, context.kv[layer.keys.group].layout);
        let entries = context.kv[layer.entries_group].layout;
        let (tokens, dim, heads) = (context.inputs.tokens().len(), layout.k_dim, layer.heads);
        let SelectLayer { top, rate, .. } = *layer;
        assert!(
            layout.kv_heads == 1 && layout.v_dim == 0 && layer.q.cols == heads * dim,
            "keys of entries: {layout:?}"
        );
        assert!(top > 0 && layer.weights.cols == heads, "{heads} heads of {dim}");
        assert!([layer.q, layer.weights].iter().all(|t| t.rows >= tokens), "{tokens} tokens");
        assert!(
            [layout.every, entries.every].iter().all(|every| rate.is_multiple_of(*every)),
            "{layout:?}, {entries:?}"
        );
        self.entries = None;
        let reach = context.inputs.reach();
        if tokens == 0 || reach / rate <= top {
            return Ok(());
        }
        let positions = ((reach / rate).div_ceil(INDEX_THREADS) * INDEX_THREADS).next_multiple_of(8 * INDEX_THREADS);
        let scores = self.scores.reserve(gpu, 4 * tokens.min(TOKENS) * positions)?;
        let selected = self.slots.reserve(gpu, 4 * tokens * top)?;
        let parameters = p::Index {
            cache: attention::cache(context.kv[layer.keys.group].memory.at, &layout, layer.keys.layer),
            q: context.place(layer.q),
            weights: context.place(layer.weights),
            scores,
            selected,
            tokens: number(tokens),
            heads: number(heads),
            top: number(top),
            reach: number(positions),
            row_block: number(entries.block_rows()),
            scale: layer.scale,
            pool: number(rate),
            key_rows: number(rate / layout.every),
            entry_rows: number(rate / entries.every),
            ..of_step(context, layer.keys.group, layer.entries_group)
        };
        self.entries = Some(selected);
        let queries = number(4 * heads * (dim.next_multiple_of(16) + 1));
        // SAFETY: tensors were checked; tables reach as far as positions, and the scratch was just reserved.
        unsafe { select(context, &parameters, queries) }
    }
}

/// What a step has of keys and of what is selected by them, by their cache groups.
fn of_step(context: &Context, keys: usize, rows: usize) -> p::Index {
    let step = &context.step;
    let [keys, rows] = [keys, rows].map(|group| step.groups[group]);
    p::Index {
        positions: step.positions,
        sequences: step.sequences,
        slots: keys.slots,
        tables: keys.tables,
        table_starts: keys.table_starts,
        row_tables: rows.tables,
        row_starts: rows.table_starts,
        ..p::Index::default()
    }
}

/// Scores what each token sees, and selects the best. `queries`: bytes of shared memory for a token's.
///
/// # Safety
/// The parameters are those of the step, and their scratch is there.
unsafe fn select(context: &Context, parameters: &p::Index, queries: u32) -> Result<()> {
    let (gpu, tokens) = (&context.gpu, parameters.tokens as usize);
    for first in (0..tokens).step_by(TOKENS) {
        let count = number(TOKENS.min(tokens - first));
        let parameters = p::Index { first: number(first), ..*parameters };
        let grid = [parameters.reach / number(INDEX_THREADS), count, 1];
        // SAFETY: as the caller vouches.
        unsafe {
            gpu.launch(Kernel::INDEX_SCORES, grid, number(INDEX_THREADS), queries, &parameters)?;
            gpu.launch(Kernel::INDEX_SELECT, [count, 1, 1], SELECT_THREADS, 0, &parameters)?;
        }
    }
    Ok(())
}
