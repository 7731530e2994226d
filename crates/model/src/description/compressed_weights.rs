//! The weights of compressed attention, and what no operation computes of it.

use sluice_backend::MOST_POOLED;

use super::attention::AttentionDescription;
use super::compressed::{CompressedDescription, CompressionDescription, EntryIndexDescription};
use super::weights::{WeightClass, WeightDescription, WeightKind, matrix, vector};

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

impl CompressionDescription {
    fn weights(&self, names: [&'static str; 4], dim: usize, hidden: usize) -> [WeightDescription; 4] {
        let [values, logits, bias, norm] = names;
        let width = self.series() * dim;
        let bias = WeightDescription { rows: self.rate, ..vector(bias, WeightKind::Vector, width) };
        let of = |name| matrix(name, WeightClass::Attention, width, hidden);
        [of(values), of(logits), bias, vector(norm, WeightKind::Norm { centred: false }, dim)]
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
