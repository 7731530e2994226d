//! Sparse indexers: keys into their slots; where a token sees more positions than are wanted, all of them are scored, and the slots of the best are kept for the latent attention
//! behind.

use anyhow::Result;
use sluice_backend::{IndexLayer, IndexNorm, PoolLogits};

use crate::device::memory::Scratch;
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
    (4 * tokens * layer.most_seen(), 4 * tokens.min(TOKENS) * INDEX_THREADS)
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
        let [keys, rows] = [layer.group, layer.rows_group].map(|group| context.step.groups[group]);
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
            positions: context.step.positions,
            sequences: context.step.sequences,
            slots: keys.slots,
            tables: keys.tables,
            table_starts: keys.table_starts,
            row_tables: rows.tables,
            row_starts: rows.table_starts,
            scores,
            selected,
            tokens: number(tokens),
            heads: number(heads),
            half: number(rotary.half()),
            adjacent: layer.adjacent_pairs.into(),
            top: number(layer.top),
            reach: number(positions),
            first: 0,
            row_block: number(context.kv[layer.rows_group].layout.block_tokens),
            scale: layer.scale,
            weight_scale: layer.weight_scale,
            pool: number(pool),
            unused: 0,
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
        for first in (0..tokens).step_by(TOKENS) {
            let count = number(TOKENS.min(tokens - first));
            let parameters = p::Index { first: number(first), ..parameters };
            let grid = [number(positions / INDEX_THREADS), count, 1];
            // SAFETY: as above; tables reach as far as positions, and the scratch was just reserved.
            unsafe {
                gpu.launch(Kernel::INDEX_SCORES, grid, threads, queries, &parameters)?;
                gpu.launch(Kernel::INDEX_SELECT, [count, 1, 1], SELECT_THREADS, 0, &parameters)?;
            }
        }
        self.selected = Some(Selected { slots: selected, top: layer.top, pool });
        Ok(())
    }
}
