//! The weights of attention layers, and of their indexers.

use super::weights::{WeightClass, WeightDescription, WeightKind, matrix, vector};
use super::{
    AttentionBiases, AttentionDescription, AttentionVariant, IndexDescription, LatentDescription, ValueSource,
};

/// An indexer's part of grouped attention: the matrix of its queries and then its key.
pub(crate) const INDEX_INPUTS: &str = "self_attn.indexer.index_qk_proj";
/// Each by itself, where they are apart.
pub(crate) const INDEX_PARTS: [&str; 2] = ["self_attn.indexer.q_proj", "self_attn.indexer.k_proj"];
/// The norms of both.
pub(crate) const INDEX_NORMS: [&str; 2] = ["self_attn.indexer.q_layernorm", "self_attn.indexer.k_layernorm"];

impl AttentionDescription {
    /// Without the layer's number.
    pub(super) fn weights(&self, hidden: usize, norm: WeightKind) -> Vec<WeightDescription> {
        let (inputs, output) = match self.biases {
            AttentionBiases::None => (false, false),
            AttentionBiases::Inputs => (true, false),
            AttentionBiases::All => (true, true),
        };
        let projection =
            |part, rows, cols, biased| WeightDescription { biased, ..matrix(part, WeightClass::Attention, rows, cols) };
        let mut all = match self.variant {
            AttentionVariant::Compressed(of) => return self.compressed_weights(&of, hidden, norm),
            AttentionVariant::Grouped if self.joined => {
                let rows = self.q_cols() + self.k_cols() + self.v_cols();
                vec![projection("self_attn.qkv_proj", rows, hidden, inputs)]
            }
            AttentionVariant::Grouped => vec![
                Some(projection("self_attn.q_proj", self.q_cols(), hidden, inputs)),
                (!self.shared).then(|| projection("self_attn.k_proj", self.k_cols(), hidden, inputs)),
                (!self.shared && self.values == ValueSource::Projected)
                    .then(|| projection("self_attn.v_proj", self.v_cols(), hidden, inputs)),
            ]
            .into_iter()
            .flatten()
            .collect(),
            AttentionVariant::Latent(latent) => self.latent_weights(&latent, hidden, norm, inputs),
        };
        all.push(projection("self_attn.o_proj", hidden, self.out_cols(), output));
        if self.normed {
            let each = if self.whole_norms { [self.heads, self.kv_heads] } else { [1, 1] };
            all.push(vector("self_attn.q_norm", norm, each[0] * self.head_dim));
            if !self.shared {
                all.push(vector("self_attn.k_norm", norm, each[1] * self.head_dim));
            }
        }
        if self.sinks {
            all.push(vector("self_attn.sinks", WeightKind::Vector, self.heads));
        }
        if let Some(IndexDescription { heads, head_dim, split, .. }) = self.index.filter(|_| self.latent().is_none()) {
            let of = |part, rows| matrix(part, WeightClass::Attention, rows, hidden);
            match split {
                true => all.extend([of(INDEX_PARTS[0], heads * head_dim), of(INDEX_PARTS[1], head_dim)]),
                false => all.push(of(INDEX_INPUTS, (heads + 1) * head_dim)),
            }
            all.extend([vector(INDEX_NORMS[0], norm, head_dim), vector(INDEX_NORMS[1], norm, head_dim)]);
        }
        all
    }

    /// The sizes of latent attention, if it is that.
    fn latent(&self) -> Option<LatentDescription> {
        match self.variant {
            AttentionVariant::Latent(latent) => Some(latent),
            AttentionVariant::Grouped | AttentionVariant::Compressed(_) => None,
        }
    }

    /// The input projections of latent attention: down to small vectors, and up again.
    fn latent_weights(
        &self,
        latent: &LatentDescription,
        hidden: usize,
        norm: WeightKind,
        biased: bool,
    ) -> Vec<WeightDescription> {
        let projection = |part, rows, cols| matrix(part, WeightClass::Attention, rows, cols);
        let LatentDescription { q_rank, kv_rank, rotary_dim, split, gated, .. } = *latent;
        let mut all = match q_rank {
            None => vec![projection("self_attn.q_proj", self.q_cols(), hidden)],
            Some(rank) => vec![
                WeightDescription { biased, ..projection("self_attn.q_a_proj", rank, hidden) },
                vector("self_attn.q_a_layernorm", norm, rank),
                projection("self_attn.q_b_proj", self.q_cols(), rank),
            ],
        };
        let unrotated = self.head_dim.saturating_sub(rotary_dim);
        all.extend([
            WeightDescription { biased, ..projection("self_attn.kv_a_proj_with_mqa", kv_rank + rotary_dim, hidden) },
            vector("self_attn.kv_a_layernorm", norm, kv_rank),
        ]);
        if split {
            all.push(projection("self_attn.embed_q", self.heads * kv_rank, unrotated));
            all.push(projection("self_attn.unembed_out", self.heads * self.v_dim, kv_rank));
        } else {
            all.push(projection("self_attn.kv_b_proj", self.heads * (unrotated + self.v_dim), kv_rank));
        }
        all.extend(gated.then(|| projection("self_attn.g_proj", self.out_cols(), hidden)));
        if let Some(index) = self.index.filter(|index| !index.shared) {
            let IndexDescription { heads, head_dim, pool, .. } = index;
            if let Some(pool) = pool {
                let plain = |part, rows| WeightDescription { rows, ..vector(part, WeightKind::Vector, head_dim) };
                let gate = vector("self_attn.indexer.index_kpool_compress_gate", WeightKind::Vector, hidden);
                all.extend([
                    plain("self_attn.indexer.index_kpool_compress_ape", pool),
                    WeightDescription { rows: head_dim, ..gate },
                ]);
            }
            let k_norm = vector("self_attn.indexer.k_norm", WeightKind::Norm { centred: false }, head_dim);
            all.extend([
                projection("self_attn.indexer.wq_b", heads * head_dim, q_rank.unwrap_or(hidden)),
                projection("self_attn.indexer.wk", head_dim, hidden),
                projection("self_attn.indexer.weights_proj", heads, hidden),
                WeightDescription { biased: true, ..k_norm },
            ]);
        }
        all
    }
}
