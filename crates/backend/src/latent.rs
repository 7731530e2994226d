//! The arguments of latent attention.

use std::ops::Range;

use crate::layers::Norm;
use crate::memory::{MatrixId, RotaryId, Tensor};

/// Rows of a matrix for each head: head h has `rows` of them, from `h * stride + offset` on.
#[derive(Clone, Copy, Debug)]
pub struct HeadRows {
    /// The matrix.
    pub matrix: MatrixId,
    /// Rows from one head to the next.
    pub stride: usize,
    /// The first row of head 0.
    pub offset: usize,
    /// Rows of each head.
    pub rows: usize,
}

impl HeadRows {
    /// The rows of head `head`.
    pub fn of(&self, head: usize) -> Range<usize> {
        let first = head * self.stride + self.offset;
        first..first + self.rows
    }
}

/// How queries come to meet the cached vectors: the projection of a head's keys.
#[derive(Clone, Copy, Debug)]
pub enum LatentKeys {
    /// A row for each element of a head's key, with a column for each element of the vector.
    Rows(HeadRows),
    /// The other way round: a row for each element of the vector.
    Columns(HeadRows),
}

impl LatentKeys {
    /// The rows, whatever they stand for.
    pub fn rows(&self) -> HeadRows {
        match self {
            LatentKeys::Rows(rows) | LatentKeys::Columns(rows) => *rows,
        }
    }
}

/// One layer of latent attention (DeepSeek-AI 2024). For each token the cache holds a row of `rotated + rank` elements: a rotated key that all heads share, and a
/// vector that keys and values of all heads are projections of. Its group has one KV head, whose values are the ends of its keys.
#[derive(Clone, Debug)]
pub struct LatentLayer {
    /// `[tokens, heads * (plain + rotated)]`: a head's elements that know no position, then those that are rotated. May be changed.
    pub q: Tensor,
    /// `[tokens, rank + rotated]`: the vector before its norm, then the key that is rotated. May be changed.
    pub kv: Tensor,
    /// The vector's norm.
    pub norm: Norm,
    /// `[tokens, heads * v_dim]`
    pub out: Tensor,
    /// Query heads.
    pub heads: usize,
    /// Elements of the vector.
    pub rank: usize,
    /// From the vector to the keys of each head: `plain` elements.
    pub keys: LatentKeys,
    /// From the vector to the values of each head: `v_dim` elements.
    pub values: HeadRows,
    /// The rotary embedding, which turns all `rotated` elements.
    pub rotary: RotaryId,
    /// Elements 2i and 2i + 1 of what is rotated are turned together, instead of i and half of it later.
    pub adjacent_pairs: bool,
    /// The cache group.
    pub group: usize,
    /// The layer in that cache group.
    pub layer: usize,
    /// Scores are multiplied by it.
    pub scale: f32,
    /// A token sees only those positions that the indexer before has selected for it, instead of all up to its own. In ascending order they take the places of positions.
    pub selected: bool,
}

impl LatentLayer {
    /// Rotated elements of each head.
    pub fn rotated(&self) -> usize {
        self.kv.cols - self.rank
    }

    /// Elements of each head that know no position.
    pub fn plain(&self) -> usize {
        self.q.cols / self.heads - self.rotated()
    }

    /// Elements of each head's value.
    pub fn v_dim(&self) -> usize {
        self.values.rows
    }
}
