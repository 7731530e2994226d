//! What an indexer leaves for the attention behind it.

use crate::device::sys::Address;

/// What tokens of a step see.
#[derive(Clone, Copy)]
pub struct Selected {
    /// `[tokens, most]` u32: slots, in ascending position.
    pub slots: Address,
    /// Positions that were selected, in pools of so many.
    pub top: usize,
    pub pool: usize,
}

impl Selected {
    /// The most that a token sees: with those behind the last whole pool.
    pub fn most(&self) -> usize {
        self.top + self.pool - 1
    }
}
