//! Embeddings of n-grams (Qwen4-Exp): some layers add to the residual streams what large tables have for the last few tokens.

use std::sync::Arc;

use sluice_backend::NgramHash;

/// The layers with such embeddings, and what they have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NgramsDescription {
    /// The layers, ascending, and how n-grams become rows in each. They have n-grams and heads alike.
    pub layers: Vec<(usize, Arc<NgramHash>)>,
    /// Elements of a token's rows, all heads together.
    pub width: usize,
    /// Taps of the convolution, which are as many tokens apart as the longest n-gram has.
    pub taps: usize,
    /// The number of a table's rows is a multiple of this.
    pub divisor: usize,
    /// Parts in which a table is stored.
    pub parts: usize,
}

impl NgramsDescription {
    /// How n-grams become rows in a layer, if it has such embeddings.
    pub fn hash(&self, layer: usize) -> Option<&Arc<NgramHash>> {
        self.layers.iter().find(|(own, _)| *own == layer).map(|(_, hash)| hash)
    }

    /// Tokens of the longest n-gram.
    pub fn size(&self) -> usize {
        self.layers.first().map_or(0, |(_, hash)| hash.size())
    }

    /// Inputs of the convolution that a state has: those of so many tokens.
    pub fn kept(&self) -> usize {
        (self.taps - 1) * self.size()
    }
}
