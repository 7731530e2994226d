//! The sizes of what the caches hold.

use sluice_backend::KvLayout;
use sluice_cache::Group;

/// Sizes of blocks and states of one model. Entries of another size are never restored.
#[derive(Clone, Debug)]
pub(crate) struct CacheShape {
    pub block_tokens: usize,
    /// The attention window of each cache group; `None` for groups that see everything.
    pub windows: Vec<Option<usize>>,
    /// Bytes of a block of each group.
    pub block_bytes: Vec<usize>,
    /// Bytes of a recurrent state; 0 for a model without.
    pub state_bytes: usize,
}

impl CacheShape {
    /// `state_len`: f32 values of a recurrent state.
    pub fn new(groups: &[Group], layouts: &[KvLayout], state_len: usize) -> CacheShape {
        CacheShape {
            block_tokens: groups.first().map_or(32, |g| g.block_tokens),
            windows: groups.iter().map(|g| g.window).collect(),
            block_bytes: layouts.iter().map(KvLayout::block_bytes).collect(),
            state_bytes: state_len * size_of::<f32>(),
        }
    }

    /// Number of cache groups.
    pub fn groups(&self) -> usize {
        self.block_bytes.len()
    }

    /// For each group, the first block that a query after `to` tokens sees.
    pub fn first_blocks(&self, to: usize) -> impl Iterator<Item = usize> {
        self.windows.iter().map(move |w| w.map_or(0, |w| (to + 1).saturating_sub(w)) / self.block_tokens)
    }
}
