//! The weights of embeddings of n-grams.

use super::NgramsDescription;
use super::weights::{WeightClass, WeightDescription, WeightKind, matrix, vector};

/// The table of a layer, and the matrices that make keys for each stream, and a value, of its rows.
pub(crate) const NGRAM_TABLE: &str = "ple.ple_embedding.ngram_embedding";
pub(crate) const NGRAM_KEYS: &str = "ple.key_proj";
pub(crate) const NGRAM_VALUE: &str = "ple.value_proj";
/// The norms of keys, of streams, and of what goes into the convolution.
pub(crate) const NGRAM_NORMS: [&str; 3] = ["ple.norm_key", "ple.norm_query", "ple.norm_conv"];
pub(crate) const NGRAM_CONVOLUTION: &str = "ple.conv1d";
/// Integers that checkpoints have besides, and that follow from the config: multipliers, rows of heads, and the rows before each head's.
pub(crate) const NGRAM_NUMBERS: [&str; 3] = [
    "ple.ple_embedding.layer_multipliers",
    "ple.ple_embedding.ngram_heads_vocab_sizes",
    "ple.ple_embedding.ngram_heads_offsets",
];

impl NgramsDescription {
    /// Those of a layer, if it has such embeddings. `all`: elements of all streams.
    pub(super) fn weights(
        &self,
        layer: usize,
        (hidden, all): (usize, usize),
        norm: WeightKind,
    ) -> Vec<WeightDescription> {
        let Some(hash) = self.hash(layer) else { return Vec::new() };
        let rows = usize::try_from(hash.rows()).unwrap_or(usize::MAX).next_multiple_of(self.divisor);
        let table =
            matrix(NGRAM_TABLE, WeightClass::NgramEmbedding, rows.div_ceil(self.parts), self.width / hash.heads());
        let mut weights = vec![
            WeightDescription { count: self.parts, ..table },
            matrix(NGRAM_KEYS, WeightClass::Mlp, all, self.width),
            matrix(NGRAM_VALUE, WeightClass::Mlp, hidden, self.width),
            WeightDescription { rows: all, ..vector(NGRAM_CONVOLUTION, WeightKind::Convolution, self.taps) },
        ];
        weights.extend(NGRAM_NORMS.map(|part| vector(part, norm, all)));
        weights
    }
}
