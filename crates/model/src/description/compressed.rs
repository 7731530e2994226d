//! Compressed attention (DeepSeek-V4): what it has, and what of it is cached.

use super::cache_group::{CacheContent, CacheGroup, CacheKind};

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
}

impl CompressedDescription {
    /// The cache groups of what makes entries and of entries: of attention over heads of `dim` elements, and of its indexer.
    pub fn cache_groups(&self, dim: usize) -> [Option<CacheGroup>; 4] {
        let Some(of) = self.compression else { return [None; 4] };
        let [rows, entries] = of.cache_groups(dim, CacheContent::Attended);
        let of_index = of.index.map(|index| of.cache_groups(index.head_dim, CacheContent::IndexKeys));
        [Some(rows), Some(entries), of_index.map(|of| of[0]), of_index.map(|of| of[1])]
    }
}
