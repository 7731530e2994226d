//! Embeddings of n-grams (Qwen4-Exp): some layers add to the residual streams what large tables have for the last few tokens.

use sluice_backend::NgramHash;

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

/// The layers with such embeddings, and what they have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NgramsDescription {
    /// The layers, ascending.
    pub layers: Vec<usize>,
    /// Elements of a token's rows, all heads together.
    pub width: usize,
    /// Taps of the convolution, which are as many tokens apart as the longest n-gram has.
    pub taps: usize,
    /// Tokens of the longest n-gram.
    pub size: usize,
    /// Heads of n-grams of each length.
    pub heads_per_gram: usize,
    /// The first head of the model has the first prime from here on as its number of rows.
    pub base: u64,
    /// The number of a table's rows is a multiple of this.
    pub divisor: usize,
    /// Of the multipliers.
    pub seed: u64,
    /// Parts in which a table is stored.
    pub parts: usize,
    /// The token that ends a text.
    pub end: u32,
}

impl NgramsDescription {
    /// Heads of all n-grams.
    pub fn heads(&self) -> usize {
        (self.size - 1) * self.heads_per_gram
    }

    /// Columns of a table.
    pub fn cols(&self) -> usize {
        self.width / self.heads()
    }

    /// How n-grams become rows in a layer, if it has such embeddings.
    pub fn hash(&self, layer: usize, vocabulary: usize) -> Option<NgramHash> {
        let number = self.layers.iter().position(|own| *own == layer)?;
        let sizes = (self.size, self.heads_per_gram);
        Some(NgramHash::new(number, sizes, self.base, vocabulary, self.seed, self.end))
    }

    /// Inputs of the convolution that a state has: those of so many tokens.
    pub fn kept(&self) -> usize {
        (self.taps - 1) * self.size
    }

    /// Those of a layer, if it has such embeddings. `all`: elements of all streams.
    pub(super) fn weights(
        &self,
        layer: usize,
        (vocabulary, hidden, all): (usize, usize, usize),
        norm: WeightKind,
    ) -> Vec<WeightDescription> {
        let Some(hash) = self.hash(layer, vocabulary) else { return Vec::new() };
        let rows = usize::try_from(hash.rows()).unwrap_or(usize::MAX).next_multiple_of(self.divisor);
        let table = matrix(NGRAM_TABLE, WeightClass::NgramEmbedding, rows.div_ceil(self.parts), self.cols());
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
