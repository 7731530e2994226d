//! The arguments of compressed attention (DeepSeek-V4).

use crate::layers::Norm;
use crate::memory::{RotaryId, Tensor};

/// A layer of a cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLayer {
    /// The cache group.
    pub group: usize,
    /// The layer in it.
    pub layer: usize,
}

/// What makes entries: one of each window of positions, an average of rows of theirs, weighed element by element by a softmax of logits. With one series a token has a row and its logits, and the entry of a window is
/// made of its tokens'. With two, it is made of the first series of the window before and the second of its own.
#[derive(Clone, Debug)]
pub struct CompressLayer {
    /// `[tokens, series * dim]`
    pub values: Tensor,
    /// `[tokens, series * dim]`
    pub logits: Tensor,
    /// `[1, rows of an entry * dim]`: added to the logits of the rows that an entry is made of, in their order.
    pub bias: Tensor,
    /// Over an entry.
    pub norm: Norm,
    /// Turns the last elements of an entry, pairs beside each other, by the angles of its window's first position.
    pub rotary: RotaryId,
    /// Positions of a window.
    pub rate: usize,
    /// Where rows and logits are cached: a KV head for each series of rows, and then one for each of logits.
    pub rows: CacheLayer,
    /// Where entries are cached, each in the place of its window's last token.
    pub entries: CacheLayer,
}

impl CompressLayer {
    /// Elements of an entry.
    pub fn dim(&self) -> usize {
        self.norm.weight.cols
    }

    /// Rows of a token.
    pub fn series(&self) -> usize {
        self.values.cols / self.dim()
    }

    /// The most rows that an entry is made of.
    pub fn rows_of_entry(&self) -> usize {
        self.series() * self.rate
    }
}

/// An indexer that selects entries: its keys are entries of their own.
#[derive(Clone, Debug)]
pub struct SelectLayer {
    /// `[tokens, heads * dim]`
    pub q: Tensor,
    /// `[tokens, heads]`: how much each head counts.
    pub weights: Tensor,
    /// Heads.
    pub heads: usize,
    /// The most entries that are selected for a token.
    pub top: usize,
    /// Positions of a window, which has one entry.
    pub rate: usize,
    /// The keys.
    pub keys: CacheLayer,
    /// The cache group of the entries that are selected.
    pub entries_group: usize,
    /// Scores of heads are multiplied by this, before what is below 0 becomes 0.
    pub scale: f32,
}

/// Entries that tokens see behind their windows: those of windows whose last position is not after the token.
#[derive(Clone, Copy, Debug)]
pub struct Entries {
    /// Where they are cached.
    pub cache: CacheLayer,
    /// Positions of a window.
    pub rate: usize,
    /// Of more than so many, those that the last [`SelectLayer`] has selected.
    pub top: Option<usize>,
}

/// One layer of compressed attention: over the rows of a window, each of which is key and value of all heads, and over entries.
#[derive(Clone, Debug)]
pub struct CompressedLayer {
    /// `[tokens, heads * dim]`, as they meet the rows.
    pub q: Tensor,
    /// `[tokens, dim]`: what is cached of each token.
    pub row: Tensor,
    /// `[tokens, heads * dim]`
    pub out: Tensor,
    /// Query heads.
    pub heads: usize,
    /// Where rows are cached: one KV head, whose values are its keys.
    pub rows: CacheLayer,
    /// The number of last positions that a token sees, its own among them.
    pub window: usize,
    /// What it sees besides.
    pub entries: Option<Entries>,
    /// `[1, heads]`: an additional term of each head's softmax, without a value.
    pub sinks: Tensor,
    /// Scores are multiplied by it.
    pub scale: f32,
}

impl CompressedLayer {
    /// Elements of a row, and of a head.
    pub fn dim(&self) -> usize {
        self.row.cols
    }
}
