//! Compressed attention: entries of windows of positions, indexers that select some of them, windows of any length in front.

use sluice_backend::{
    AttentionMode, CacheLayer, CompressLayer, CompressedLayer, Entries, KvLayout, KvType, SelectLayer,
};

use super::attention::{Group, POSITIONS};
use super::latent::KV_TYPES;
use crate::case::Case;

/// What entries are made of.
#[derive(Clone, Copy)]
struct Windows {
    rate: usize,
    series: usize,
}

impl Case {
    /// The groups of what entries of `dim` elements are made of, and of the entries, as numbers `number` and the next.
    fn entry_groups(&mut self, of: Windows, rows: KvLayout, number: usize, positions: usize) -> [Group; 2] {
        let kv_type = self.one_of(&[KvType::F32, KvType::F16, KvType::Bf16]);
        let blocks = [0; 2].map(|_| self.one_of(&[16, 48, 128]));
        let series =
            KvLayout { kv_heads: 2 * of.series, kv_type, mode: AttentionMode::F32, block_tokens: blocks[0], ..rows };
        let every = (1..=of.rate).rev().find(|n| of.rate.is_multiple_of(*n) && blocks[1].is_multiple_of(*n));
        let entries = KvLayout { block_tokens: blocks[1], every: every.unwrap_or(1), ..rows };
        let window = Some(of.series * of.rate);
        [(series, number, window), (entries, number + 1, None)]
            .map(|(layout, number, window)| self.group_with(layout, number, positions, window, |_| Vec::new()))
    }

    /// What makes entries of layer `layer`, with the groups `number` and the next.
    fn compress_layer(
        &mut self,
        of: Windows,
        dim: usize,
        (number, layer): (usize, usize),
        tokens: usize,
    ) -> CompressLayer {
        let Windows { rate, series } = of;
        let [values, logits] = [0; 2].map(|_| self.tensor(tokens, series * dim).tensor);
        let bias = self.small(series * rate * dim, 1.0);
        let pairs = self.random.usize(1..=dim / 2);
        CompressLayer {
            values,
            logits,
            bias: self.vector(&bias),
            norm: self.norm(dim),
            rotary: self.rotary(pairs, POSITIONS),
            rate,
            rows: CacheLayer { group: number, layer },
            entries: CacheLayer { group: number + 1, layer },
        }
    }
}

pub fn compressed_attention(c: &mut Case) {
    const SEQUENCES: usize = 3;
    let tokens = c.one_of(&[1, 12, 70]);
    let (dim, heads) = (c.one_of(&[8, 12, 32, 64, 512]), c.one_of(&[1, 3, 5, 16, 20]));
    let (kv_type, mode) = c.one_of(&KV_TYPES);
    let layers = c.random.usize(1..=2);
    let (window, block_tokens) = (c.one_of(&[1, 7, 40, 128, 200]), c.one_of(&[16, 48, 128]));
    let rows = KvLayout { layers, kv_heads: 1, k_dim: dim, v_dim: 0, kv_type, mode, block_tokens, every: 1 };
    let positions = (SEQUENCES + 1) * 700;
    let mut groups = vec![c.group_with(rows, 0, positions, Some(window), |_| Vec::new())];
    let (rate, series) = c.one_of(&[(1, 2), (2, 1), (4, 2), (4, 2), (8, 1), (48, 1), (64, 2)]);
    let of = (!c.once_in(4)).then_some(Windows { rate, series });
    let index = of.is_some() && c.coin();
    let (index_dim, index_heads) = (c.one_of(&[8, 12, 128]), c.one_of(&[1, 2, 7, 16, 64]));
    let top = c.one_of(&[1, 5, 16, 100, 130]);
    if let Some(of) = of {
        groups.extend(c.entry_groups(of, rows, 1, positions));
    }
    if let Some(of) = of.filter(|_| index) {
        let kv_type = if kv_type == KvType::Int16 { KvType::F16 } else { kv_type };
        let keys = KvLayout { k_dim: index_dim, kv_type, mode: AttentionMode::F32, ..rows };
        groups.extend(c.entry_groups(of, keys, 3, positions));
    }
    c.shape(format!(
        "{heads} heads of {dim}, a window of {window}, entries {:?}, indexer {index}: {index_heads} heads of {index_dim}, the best {top}",
        of.map(|of| (of.rate, of.series))
    ));
    let mut cases = Vec::new();
    for layer in 0..layers {
        let compress = of.map(|of| c.compress_layer(of, dim, (1, layer), tokens));
        let select = of.filter(|_| index).map(|of| {
            let keys = c.compress_layer(of, index_dim, (3, layer), tokens);
            let select = SelectLayer {
                q: c.tensor(tokens, index_heads * index_dim).tensor,
                weights: c.tensor(tokens, index_heads).tensor,
                heads: index_heads,
                top,
                rate: of.rate,
                keys: keys.entries,
                entries_group: 2,
                scale: (index_dim as f32).sqrt().recip(),
            };
            (keys, select)
        });
        let entries = compress.as_ref().map(|compress| Entries {
            cache: compress.entries,
            rate: compress.rate,
            top: select.as_ref().map(|_| top),
        });
        let (q, row, out) = (c.tensor(tokens, heads * dim), c.tensor(tokens, dim), c.tensor(tokens, heads * dim));
        let sinks = c.small(heads, 1.0);
        let inner = CompressedLayer {
            q: q.tensor,
            row: row.tensor,
            out: out.tensor,
            heads,
            rows: CacheLayer { group: 0, layer },
            window,
            entries,
            sinks: c.vector(&sinks),
            scale: (dim as f32).sqrt().recip(),
        };
        cases.push((compress, select, inner, out));
    }
    let mut sequences = c.relatives(&mut groups, SEQUENCES);
    for _ in 0..2 {
        let inputs = c.take_some(&mut groups, &mut sequences, tokens);
        if inputs.sequences() == 0 {
            continue;
        }
        for (compress, select, inner, _) in &cases {
            [inner.q, inner.row].into_iter().for_each(|t| c.fill(t));
            let all = compress.iter().chain(select.as_ref().map(|(keys, _)| keys));
            all.flat_map(|of| [of.values, of.logits]).for_each(|t| c.fill(t));
            if let Some((_, select)) = select {
                c.fill(select.q);
                // A few values, so that scores are equal now and then.
                let n = select.weights.rows * select.weights.cols;
                let drawn = (0..n).map(|_| c.one_of(&[0.0, 0.5, 1.0, -1.0])).collect::<Vec<f32>>();
                c.backend.upload(&drawn, select.weights);
            }
        }
        c.backend.begin(&inputs);
        for (compress, select, inner, _) in &cases {
            if let Some(compress) = compress {
                c.backend.compress(compress);
            }
            if let Some((keys, select)) = select {
                c.backend.compress(keys);
                c.backend.select(select);
            }
            c.backend.compressed_attention(inner);
        }
        c.backend.end();
        for (layer, (.., out)) in cases.iter().enumerate() {
            c.see(format!("layer {layer}"), out.whole);
        }
        c.see_blocks(&groups);
    }
}
