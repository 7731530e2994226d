//! Latent attention: rows of one vector and one rotated key for all heads; projections by rows and by columns, in any format.

use sluice_backend::{AttentionMode, HeadRows, KvLayout, KvType, LatentKeys, LatentLayer};

use super::attention::POSITIONS;
use crate::case::{Case, Placed};

/// What the cache of latent rows can be, and how attention reads it.
pub const KV_TYPES: [(KvType, AttentionMode); 6] = [
    (KvType::F32, AttentionMode::F32),
    (KvType::Bf16, AttentionMode::F32),
    (KvType::F16, AttentionMode::F32),
    (KvType::Int8, AttentionMode::F32),
    (KvType::Int8, AttentionMode::Int8),
    (KvType::Int16, AttentionMode::Int16),
];

/// A layer with its own tensors.
pub struct LatentCase {
    pub inner: LatentLayer,
    pub out: Placed,
}

impl Case {
    /// A head's rows of a matrix of `cols` columns, among `stride` of each head.
    fn head_rows(&mut self, heads: usize, (offset, rows, stride): (usize, usize, usize), cols: usize) -> HeadRows {
        HeadRows { matrix: self.matrix(heads * stride, cols), stride, offset, rows }
    }

    /// A layer of the group `layout`, for steps of at most `tokens` tokens.
    pub fn latent_layer(&mut self, layout: &KvLayout, rank: usize, place: (usize, usize), tokens: usize) -> LatentCase {
        let rotated = layout.k_dim - rank;
        let heads = self.one_of(&[1, 3, 5, 8, 20, 44]);
        // Whole groups of most formats, or anything.
        let plain = self.one_of(&[32, 64, 128, 7]);
        let v_dim = self.one_of(&[32, 16, 48, 5]);
        let by_columns = self.coin();
        let (keys, values) = if by_columns {
            let keys = self.head_rows(heads, (0, rank, rank), plain);
            (LatentKeys::Columns(keys), self.head_rows(heads, (0, v_dim, v_dim), rank))
        } else {
            let keys = self.head_rows(heads, (0, plain, plain + v_dim), rank);
            (LatentKeys::Rows(keys), HeadRows { offset: plain, rows: v_dim, ..keys })
        };
        let (q, kv) = (self.tensor(tokens, heads * (plain + rotated)), self.tensor(tokens, rank + rotated));
        let out = self.tensor(tokens, heads * v_dim);
        let inner = LatentLayer {
            q: q.tensor,
            kv: kv.tensor,
            norm: self.norm(rank),
            out: out.tensor,
            heads,
            rank,
            keys,
            values,
            rotary: self.rotary(rotated / 2, POSITIONS),
            adjacent_pairs: self.coin(),
            group: place.0,
            layer: place.1,
            scale: ((plain + rotated) as f32).sqrt().recip(),
            selected: false,
        };
        self.shape(format!(
            "layer {place:?}: {heads} heads of {plain} and {rotated}, values of {v_dim}, a vector of {rank}, by columns {by_columns}"
        ));
        LatentCase { inner, out }
    }
}

pub fn latent_attention(c: &mut Case) {
    const SEQUENCES: usize = 3;
    let tokens = c.one_of(&[1, 12, 90]);
    let (rank, rotated) = c.one_of(&[(32, 8), (64, 16), (96, 32), (512, 64), (40, 6), (48, 0)]);
    let (kv_type, mode) = c.one_of(&KV_TYPES);
    // The longest rows have no sums of sixteen bits.
    let (rank, rotated) = if mode == AttentionMode::Int16 { (rank.min(448), rotated) } else { (rank, rotated) };
    let (layers, block_tokens) = (c.random.usize(1..=2), c.one_of(&[16, 48, 128]));
    let layout =
        KvLayout { layers, kv_heads: 1, k_dim: rank + rotated, v_dim: 0, kv_type, mode, block_tokens, every: 1 };
    let mut groups = vec![c.group_with(layout, 0, (SEQUENCES + 1) * 700, None, |_| Vec::new())];
    let cases: Vec<LatentCase> = (0..layers).map(|layer| c.latent_layer(&layout, rank, (0, layer), tokens)).collect();
    // 1. Some sequences are in the middle of a context, and some share its beginning
    let mut sequences = c.relatives(&mut groups, SEQUENCES);
    for _ in 0..2 {
        // 2. Any of them take part, with one token or several
        let inputs = c.take_some(&mut groups, &mut sequences, tokens);
        if inputs.sequences() == 0 {
            continue;
        }
        for case in &cases {
            [case.inner.q, case.inner.kv].into_iter().for_each(|t| c.fill(t));
        }
        c.backend.begin(&inputs);
        cases.iter().for_each(|case| c.backend.latent_attention(&case.inner));
        c.backend.end();
        for case in &cases {
            c.see(format!("layer {}", case.inner.layer), case.out.whole);
        }
        c.see_blocks(&groups);
    }
}
