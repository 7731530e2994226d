//! Layers whose keys and values are cached alike, and how.

use sluice_backend::{AttentionMode, KvLayout, KvType};

/// Which positions a cache group keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheKind {
    /// Every position.
    Full,
    /// The last so many.
    Window(usize),
}

/// What a cache group holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheContent {
    /// Keys and values.
    Attended,
    /// Keys of indexers.
    IndexKeys,
    /// Rows and logits that entries are made of.
    Series,
}

/// Layers whose keys and values are cached alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    /// Which positions it keeps.
    pub kind: CacheKind,
    /// How many layers it has.
    pub layers: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a key.
    pub k_dim: usize,
    /// Elements of a value.
    pub v_dim: usize,
    /// What they are.
    pub content: CacheContent,
    /// Positions that have one row together, if blocks have as many.
    pub every: usize,
}

impl CacheGroup {
    /// Whether layers of both can share a cache.
    pub(super) fn is_like(&self, other: &CacheGroup) -> bool {
        CacheGroup { layers: other.layers, ..*self } == *other
    }

    /// The last positions that it keeps; `None`: every position.
    pub fn window(&self) -> Option<usize> {
        match self.kind {
            CacheKind::Full => None,
            CacheKind::Window(positions) => Some(positions),
        }
    }

    /// Elements of keys and values for each position.
    pub fn elements(&self) -> usize {
        (self.layers * self.kv_heads * (self.k_dim + self.v_dim)).div_ceil(self.every)
    }

    /// How blocks of so many tokens hold the keys and values of its layers.
    pub fn layout(&self, kv_type: KvType, mode: AttentionMode, block_tokens: usize) -> KvLayout {
        let CacheGroup { layers, kv_heads, k_dim, v_dim, .. } = *self;
        // Indexers have no integers of sixteen bits, and compute with what others stand for. What averages are made of is no integers at all.
        let (kv_type, mode) = match (self.content, kv_type) {
            (CacheContent::Attended, kv_type) => (kv_type, mode),
            (CacheContent::IndexKeys | CacheContent::Series, KvType::Int16) | (CacheContent::Series, KvType::Int8) => {
                (KvType::F16, AttentionMode::F32)
            }
            (CacheContent::IndexKeys | CacheContent::Series, kv_type) => (kv_type, AttentionMode::F32),
        };
        let every = greatest_common(self.every, block_tokens);
        KvLayout { layers, kv_heads, k_dim, v_dim, kv_type, mode, block_tokens, every }
    }
}

/// The greatest number that divides both.
fn greatest_common(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common(b, a % b) }
}
