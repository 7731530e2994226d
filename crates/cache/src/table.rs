//! The blocks of one sequence in one cache group, by position.

use crate::pool::BlockPool;

/// Stands for a block that was given back because no query sees it any more.
pub(crate) const DROPPED: u32 = u32::MAX;

/// The blocks of one sequence in one cache group, in ascending position.
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<u32>,
    /// How many of the first blocks were given back.
    gone: usize,
}

impl AsRef<[u32]> for BlockTable {
    fn as_ref(&self) -> &[u32] {
        &self.blocks
    }
}

impl BlockTable {
    /// Numbers of the blocks, by position.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Reserves memory for so many blocks, so that growing to them allocates nothing.
    pub fn reserve(&mut self, blocks: usize) {
        self.blocks.reserve(blocks.saturating_sub(self.blocks.len()));
    }

    /// How many blocks are there.
    pub fn held(&self) -> usize {
        self.blocks.len() - self.gone
    }

    /// How many more blocks `tokens` positions take.
    pub fn missing(&self, tokens: usize, block_tokens: usize) -> usize {
        tokens.div_ceil(block_tokens).saturating_sub(self.blocks.len())
    }

    /// Allocates blocks for `tokens` positions, of `block_tokens` tokens each.
    ///
    /// # Panics
    /// When the pool has fewer free blocks than are missing.
    pub fn grow(&mut self, pool: &mut BlockPool, tokens: usize, block_tokens: usize) {
        for _ in 0..self.missing(tokens, block_tokens) {
            self.blocks.push(pool.allocate().expect("counted before"));
        }
    }

    /// Appends a block, whose reference the caller has taken; [`DROPPED`] for one that is not needed.
    pub(crate) fn push(&mut self, block: u32) {
        if block == DROPPED {
            debug_assert_eq!(self.gone, self.blocks.len(), "what is gone comes first");
            self.gone += 1;
        }
        self.blocks.push(block);
    }

    /// Puts another block with the same contents in the place of the one at `index`, and returns that.
    pub(crate) fn replace(&mut self, index: usize, block: u32) -> u32 {
        std::mem::replace(&mut self.blocks[index], block)
    }

    /// Gives back the blocks beyond `tokens` positions.
    pub fn shrink(&mut self, pool: &mut BlockPool, tokens: usize, block_tokens: usize) {
        let keep = tokens.div_ceil(block_tokens).min(self.blocks.len());
        self.blocks.drain(keep..).filter(|b| *b != DROPPED).for_each(|b| pool.release(b));
        self.gone = self.gone.min(keep);
    }

    /// Gives back the blocks whose positions are all below `position`.
    pub fn drop_before(&mut self, pool: &mut BlockPool, position: usize, block_tokens: usize) {
        let whole = (position / block_tokens).min(self.blocks.len());
        for block in &mut self.blocks[self.gone.min(whole)..whole] {
            pool.release(std::mem::replace(block, DROPPED));
        }
        self.gone = self.gone.max(whole);
    }

    /// Whether all positions from `position` on are there.
    pub fn holds_from(&self, position: usize, block_tokens: usize) -> bool {
        self.gone * block_tokens <= position
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_grows_by_whole_blocks_and_gives_them_back() {
        let mut pool = BlockPool::new(4);
        let (mut a, mut b) = (BlockTable::default(), BlockTable::default());
        a.grow(&mut pool, 17, 16);
        assert_eq!(a.blocks(), [0, 1]);
        b.grow(&mut pool, 32, 16);
        assert_eq!((a.missing(33, 16), pool.free()), (1, 0));
        b.shrink(&mut pool, 16, 16);
        a.grow(&mut pool, 33, 16);
        assert_eq!(a.blocks(), [0, 1, 3]);
        assert_eq!((pool.high_water(), pool.free()), (4, 0));
    }

    #[test]
    fn what_lies_before_a_window_is_given_back_once() {
        let mut pool = BlockPool::new(8);
        let mut a = BlockTable::default();
        a.grow(&mut pool, 80, 16);
        a.drop_before(&mut pool, 40, 16);
        assert_eq!((a.held(), pool.free()), (3, 5));
        a.drop_before(&mut pool, 40, 16);
        a.drop_before(&mut pool, 10, 16);
        assert_eq!((a.held(), pool.free()), (3, 5));
        assert!(a.holds_from(32, 16) && !a.holds_from(31, 16));
        // Shorter than what is gone, and from the start again.
        a.shrink(&mut pool, 16, 16);
        assert_eq!((a.held(), pool.free()), (0, 8));
        a.shrink(&mut pool, 0, 16);
        a.grow(&mut pool, 20, 16);
        assert_eq!((a.held(), pool.free(), a.holds_from(0, 16)), (2, 6, true));
    }
}
