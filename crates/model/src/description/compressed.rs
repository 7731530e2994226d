//! Compressed attention (DeepSeek-V4): what it has, and its weights.

use sluice_backend::MOST_POOLED;

use super::attention::{AttentionDescription, CacheContent, CacheGroup, CacheKind};
use super::weights::{WeightClass, WeightDescription, WeightKind, matrix, vector};

/// The sizes of compressed attention, beside those that all attention has. A head's last elements are rotated, pairs beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedDescription {
    /// Elements of the vector that queries are projections of.
    pub q_rank: usize,
    /// Groups of heads, each of which has a projection of what its heads put out.
    pub out_groups: usize,
    /// Elements of each of these.
    pub out_rank: usize,
    /// What is seen behind the window.
    pub compression: Option<CompressionDescription>,
}

/// Entries of windows of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressionDescription {
    /// Positions of a window.
    pub rate: usize,
    /// An entry is made of two windows: each token has two series of rows.
    pub overlaps: bool,
    /// What selects entries; `None`: a token sees all.
    pub index: Option<EntryIndexDescription>,
}

/// An indexer of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryIndexDescription {
    /// Its heads.
    pub heads: usize,
    /// Elements of its keys, and of each head's query.
    pub head_dim: usize,
    /// The most entries that a token sees.
    pub top: usize,
}

impl CompressionDescription {
    /// Rows of a token.
    pub fn series(&self) -> usize {
        1 + usize::from(self.overlaps)
    }

    /// The cache groups of what entries of `dim` elements are made of, and of the entries.
    pub fn cache_groups(&self, dim: usize, content: CacheContent) -> [CacheGroup; 2] {
        let series = self.series();
        let entries = CacheGroup {
            kind: CacheKind::Full,
            layers: 1,
            kv_heads: 1,
            k_dim: dim,
            v_dim: 0,
            content,
            every: self.rate,
        };
        let kind = CacheKind::Window(series * self.rate);
        [CacheGroup { kind, kv_heads: 2 * series, content: CacheContent::Series, every: 1, ..entries }, entries]
    }

    fn weights(&self, names: [&'static str; 4], dim: usize, hidden: usize) -> [WeightDescription; 4] {
        let [values, logits, bias, norm] = names;
        let width = self.series() * dim;
        let bias = WeightDescription { rows: self.rate, ..vector(bias, WeightKind::Vector, width) };
        let of = |name| matrix(name, WeightClass::Attention, width, hidden);
        [of(values), of(logits), bias, vector(norm, WeightKind::Norm { centred: false }, dim)]
    }
}

/// What makes entries: rows, their logits, what is added to these, and the norm; of attention, and of an indexer.
pub(crate) const COMPRESSORS: [[&str; 4]; 2] = [
    ["self_attn.compressor.wkv", "self_attn.compressor.wgate", "self_attn.compressor.ape", "self_attn.compressor.norm"],
    [
        "self_attn.indexer.compressor.wkv",
        "self_attn.indexer.compressor.wgate",
        "self_attn.indexer.compressor.ape",
        "self_attn.indexer.compressor.norm",
    ],
];

impl CompressedDescription {
    /// The cache groups of what makes entries and of entries: of attention over heads of `dim` elements, and of its indexer.
    pub fn cache_groups(&self, dim: usize) -> [Option<CacheGroup>; 4] {
        let Some(of) = self.compression else { return [None; 4] };
        let [rows, entries] = of.cache_groups(dim, CacheContent::Attended);
        let of_index = of.index.map(|index| of.cache_groups(index.head_dim, CacheContent::IndexKeys));
        [Some(rows), Some(entries), of_index.map(|of| of[0]), of_index.map(|of| of[1])]
    }
}

impl AttentionDescription {
    /// All weights of compressed attention.
    pub(super) fn compressed_weights(
        &self,
        of: &CompressedDescription,
        hidden: usize,
        norm: WeightKind,
    ) -> Vec<WeightDescription> {
        let projection = |part, rows, cols| matrix(part, WeightClass::Attention, rows, cols);
        let CompressedDescription { q_rank, out_groups, out_rank, compression } = *of;
        let mut all = vec![
            projection("self_attn.wq_a", q_rank, hidden),
            vector("self_attn.q_norm", norm, q_rank),
            projection("self_attn.wq_b", self.q_cols(), q_rank),
            projection("self_attn.wkv", self.head_dim, hidden),
            vector("self_attn.norm", norm, self.head_dim),
            vector("self_attn.attn_sink", WeightKind::Vector, self.heads),
        ];
        if let Some(compression) = compression {
            let [of_attention, of_index] = COMPRESSORS;
            all.extend(compression.weights(of_attention, self.head_dim, hidden));
            if let Some(EntryIndexDescription { heads, head_dim, .. }) = compression.index {
                all.push(projection("self_attn.indexer.wq_b", heads * head_dim, q_rank));
                all.push(projection("self_attn.indexer.weights_proj", heads, hidden));
                all.extend(compression.weights(of_index, head_dim, hidden));
            }
        }
        all.push(projection("self_attn.wo_a", out_groups * out_rank, self.out_cols() / out_groups));
        all.push(projection("self_attn.wo_b", hidden, out_groups * out_rank));
        all
    }

    /// What no operation computes of compressed attention, of whose heads `rotary_dim` elements are rotated.
    pub(super) fn unsupported_compressed(&self, of: &CompressedDescription, rotary_dim: usize) -> Option<String> {
        let CompressedDescription { out_groups, compression, .. } = *of;
        let rows = compression.map_or(0, |of| of.series() * of.rate);
        let narrow = compression.and_then(|of| of.index).is_some_and(|index| index.head_dim < rotary_dim);
        let more = [
            (self.gated || self.normed || self.softcap.is_some(), "gates, norms of stored weights or a soft cap"),
            (!self.rotated || rotary_dim > self.head_dim || narrow, "other elements rotated than those of a head"),
            (self.window.is_none(), "no window"),
            (out_groups == 0 || !self.heads.is_multiple_of(out_groups), "groups that do not divide heads"),
            (rows > MOST_POOLED, "entries of too many positions"),
        ];
        let found = more.into_iter().find(|(is_there, _)| *is_there);
        found.map(|(_, what)| format!("compressed attention with {what}"))
    }
}
