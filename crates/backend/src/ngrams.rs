//! The arguments of embeddings of n-grams.

use std::sync::Arc;

use sluice_kernels::ngrams::NgramHash;

use crate::layers::Norm;
use crate::memory::{MatrixId, Tensor};

/// A table of which a token reads a row for each head of its n-grams. It is stored in parts, and its rows are used where they are.
#[derive(Clone, Debug)]
pub struct NgramTable {
    /// The parts, each of `[rows_of_part, cols]`; the last may have fewer rows.
    pub parts: Arc<[MatrixId]>,
    /// Rows of every part but the last.
    pub rows_of_part: usize,
    /// Columns of a row.
    pub cols: usize,
    /// Which rows.
    pub hash: Arc<NgramHash>,
}

impl NgramTable {
    /// The part that has a row, and its number there.
    pub fn find(&self, row: u32) -> (MatrixId, usize) {
        let row = row as usize;
        (self.parts[row / self.rows_of_part], row % self.rows_of_part)
    }
}

/// Where n-grams go into residual streams: how much of a value each stream takes depends on the stream itself, and behind it is a short convolution.
#[derive(Clone, Debug)]
pub struct NgramLayer {
    /// `[tokens, n * hidden]`: a key for each stream, normed.
    pub keys: Tensor,
    /// `[tokens, n * hidden]`: the streams, normed.
    pub queries: Tensor,
    /// `[tokens, hidden]`
    pub value: Tensor,
    /// `[tokens, n * hidden]`: where it goes.
    pub streams: Tensor,
    /// Of what goes into the convolution; a run for each stream.
    pub norm: Norm,
    /// `[taps, n * hidden]`: the oldest tap first, with those between that are zeros.
    pub conv: Tensor,
    /// Where the last inputs of the convolution are in a state, from this element on: `[taps - 1, n * hidden]`.
    pub state_at: usize,
}

impl NgramLayer {
    /// f32 elements of its part of a state.
    pub fn state_len(&self) -> usize {
        (self.conv.rows - 1) * self.conv.cols
    }
}
