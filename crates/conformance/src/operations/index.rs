//! Sparse indexers in front of latent attention: any number of positions that a token sees, contexts above and below it.

use sluice_backend::{AttentionMode, IndexLayer, IndexNorm, IndexPool, KvLayout, KvType, LayerNorm, PoolLogits};

use super::attention::POSITIONS;
use super::latent::KV_TYPES;
use crate::case::Case;

impl Case {
    /// An indexer of layer `layer` of group 1, which selects rows of group 0, for steps of at most `tokens` tokens.
    fn index_layer(
        &mut self,
        layout: &KvLayout,
        layer: usize,
        (top, pool): (usize, Option<usize>),
        tokens: usize,
    ) -> IndexLayer {
        let (dim, heads) = (layout.k_dim, self.one_of(&[1, 2, 3, 7, 16, 64]));
        let pairs = self.random.usize(1..=dim / 2);
        let [q, k, weights] = [heads * dim, dim, heads].map(|cols| self.tensor(tokens, cols).tensor);
        let bias = self.small(dim, 0.5);
        let norm = LayerNorm { scale: self.norm(dim), bias: self.vector(&bias) };
        let size = pool.unwrap_or(1);
        let pool = pool.map(|size| {
            let bias = self.small(size * dim, 1.0);
            let logits = PoolLogits { logits: self.tensor(tokens, dim).tensor, bias: self.vector(&bias) };
            IndexPool { size, logits: Some(logits) }
        });
        self.shape(format!("indexer {layer}: {heads} heads of {dim}, {pairs} pairs turned, the best {top} by {size}"));
        IndexLayer {
            q,
            k,
            weights: Some(weights),
            norm: IndexNorm::Tokens(norm),
            heads,
            top,
            pool,
            rotary: self.rotary(pairs, POSITIONS),
            adjacent_pairs: self.coin(),
            group: 1,
            layer,
            rows_group: 0,
            scale: (dim as f32).sqrt().recip(),
            weight_scale: (heads as f32).sqrt().recip(),
        }
    }
}

pub fn sparse_indexers(c: &mut Case) {
    const SEQUENCES: usize = 3;
    let tokens = c.one_of(&[1, 12, 70]);
    let (rank, rotated) = c.one_of(&[(32, 8), (64, 16), (40, 6), (48, 0)]);
    let (kv_type, mode) = c.one_of(&KV_TYPES);
    let of_index = if kv_type == KvType::Int16 { KvType::F16 } else { kv_type };
    let (layers, blocks) = (c.random.usize(1..=2), [c.one_of(&[16, 48, 128]), c.one_of(&[16, 48, 128])]);
    let rows = KvLayout {
        layers,
        kv_heads: 1,
        k_dim: rank + rotated,
        v_dim: 0,
        kv_type,
        mode,
        block_tokens: blocks[0],
        every: 1,
    };
    let k_dim = c.one_of(&[8, 12, 32, 128]);
    let pool = c.one_of(&[None, None, Some(1), Some(4), Some(16)]);
    let kv_heads = 1 + usize::from(pool.is_some());
    let keys =
        KvLayout { kv_heads, k_dim, kv_type: of_index, mode: AttentionMode::F32, block_tokens: blocks[1], ..rows };
    let positions = (SEQUENCES + 1) * 700;
    let mut groups = [(rows, 0), (keys, 1)].map(|(layout, n)| c.group_with(layout, n, positions, None, |_| Vec::new()));
    let top = c.one_of(&[1usize, 5, 16, 100, 130, 256, 500]).next_multiple_of(pool.unwrap_or(1));
    let indexers: Vec<IndexLayer> = (0..layers).map(|layer| c.index_layer(&keys, layer, (top, pool), tokens)).collect();
    let mut cases: Vec<_> = (0..layers).map(|layer| c.latent_layer(&rows, rank, (0, layer), tokens)).collect();
    cases.iter_mut().for_each(|case| case.inner.selected = true);
    let mut sequences = c.relatives(&mut groups, SEQUENCES);
    for _ in 0..2 {
        let inputs = c.take_some(&mut groups, &mut sequences, tokens);
        if inputs.sequences() == 0 {
            continue;
        }
        for (index, case) in indexers.iter().zip(&cases) {
            let filled = [case.inner.q, case.inner.kv, index.q, index.k].into_iter();
            filled.chain(index.pool_logits().map(|of| of.logits)).for_each(|t| c.fill(t));
            // A few values, so that scores are equal now and then.
            let weights = index.weights.expect("as it was made");
            let drawn =
                (0..weights.rows * weights.cols).map(|_| c.one_of(&[0.0, 0.5, 1.0, -1.0])).collect::<Vec<f32>>();
            c.backend.upload(&drawn, weights);
        }
        // A layer may see what the one before it has selected.
        let shares = c.coin();
        c.backend.begin(&inputs);
        for (layer, (index, case)) in indexers.iter().zip(&cases).enumerate() {
            if layer == 0 || !shares {
                c.backend.index(index);
            }
            c.backend.latent_attention(&case.inner);
        }
        c.backend.end();
        for case in &cases {
            c.see(format!("layer {}", case.inner.layer), case.out.whole);
        }
        c.see_blocks(&groups);
    }
}

/// Attention with grouped queries over blocks of positions that an indexer selects.
pub fn selected_attention(c: &mut Case) {
    const SEQUENCES: usize = 3;
    let tokens = c.one_of(&[1, 12, 70]);
    let rows = c.kv_layout();
    let (k_dim, layers) = (c.one_of(&[8, 12, 32, 128]), rows.layers);
    let size = c.one_of(&[1, 4, 4, 16, 32]);
    let of_index = if rows.kv_type == KvType::Int16 { KvType::F16 } else { rows.kv_type };
    let keys = KvLayout {
        layers,
        kv_heads: 1,
        k_dim,
        v_dim: 0,
        kv_type: of_index,
        mode: AttentionMode::F32,
        block_tokens: c.one_of(&[16, 48, 128]),
        every: 1,
    };
    let positions = (SEQUENCES + 1) * 700;
    let mut groups = [(rows, 0), (keys, 1)].map(|(layout, n)| c.group_with(layout, n, positions, None, |_| Vec::new()));
    let top = c.one_of(&[1usize, 5, 16, 100, 130, 256, 500]).next_multiple_of(size);
    let mut indexers = Vec::new();
    for layer in 0..layers {
        let (weights, norm) = (None, IndexNorm::Pools(c.norm(k_dim)));
        let pool = Some(IndexPool { size, logits: None });
        indexers.push(IndexLayer { weights, norm, pool, ..c.index_layer(&keys, layer, (top, None), tokens) });
    }
    let of_one = (POSITIONS, tokens);
    let mut cases: Vec<_> = (0..layers).map(|layer| c.attention_layer(&rows, (0, layer), None, of_one)).collect();
    cases.iter_mut().for_each(|case| case.inner.selected = true);
    let mut sequences = c.relatives(&mut groups, SEQUENCES);
    for _ in 0..2 {
        let inputs = c.take_some(&mut groups, &mut sequences, tokens);
        if inputs.sequences() == 0 {
            continue;
        }
        for (index, case) in indexers.iter().zip(&cases) {
            [case.inner.q, case.inner.k, case.inner.v, index.q, index.k].into_iter().for_each(|t| c.fill(t));
        }
        c.backend.begin(&inputs);
        for (index, case) in indexers.iter().zip(&cases) {
            c.backend.index(index);
            c.backend.attention(&case.inner);
        }
        c.backend.end();
        for case in &cases {
            c.see(format!("layer {}", case.inner.layer), case.out.whole);
        }
        c.see_blocks(&groups);
    }
}
