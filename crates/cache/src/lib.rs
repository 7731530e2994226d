//! Which block holds which tokens: bookkeeping by number, no arithmetic and no bytes.
//!
//! A sequence is its block tables, one for each cache group; a block belongs to as many sequences as its count says and goes
//! back to the pool with the last of them.
#![forbid(unsafe_code)]

/// The free blocks (or slots) of one cache group.
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<u32>,
    /// How many sequences hold each block.
    holders: Vec<u32>,
    /// Blocks that were ever handed out: all below this number.
    touched: usize,
}

impl BlockPool {
    pub fn new(blocks: usize) -> BlockPool {
        // The lowest numbers are handed out first, so that memory is touched from the start.
        BlockPool { free: (0..blocks as u32).rev().collect(), holders: vec![0; blocks], touched: 0 }
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    pub fn total(&self) -> usize {
        self.holders.len()
    }

    /// One above the highest block that was ever handed out.
    pub fn touched(&self) -> usize {
        self.touched
    }

    /// A free block, held once; none when the pool is spent.
    pub fn allocate(&mut self) -> Option<u32> {
        let block = self.free.pop()?;
        self.holders[block as usize] = 1;
        self.touched = self.touched.max(block as usize + 1);
        Some(block)
    }

    /// Another holder for a block.
    pub fn share(&mut self, block: u32) {
        assert!(self.holders[block as usize] > 0, "block {block} is free");
        self.holders[block as usize] += 1;
    }

    /// One holder less.
    pub fn release(&mut self, block: u32) {
        let holders = &mut self.holders[block as usize];
        assert!(*holders > 0, "block {block} is free already");
        *holders -= 1;
        if *holders == 0 {
            self.free.push(block);
        }
    }
}

/// The blocks of one sequence in one cache group, in ascending position.
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<u32>,
}

impl AsRef<[u32]> for BlockTable {
    fn as_ref(&self) -> &[u32] {
        &self.blocks
    }
}

/// No block is free.
#[derive(Debug, PartialEq, Eq)]
pub struct OutOfBlocks;

impl BlockTable {
    /// An empty table that can grow to `blocks` without allocating.
    pub fn with_room(blocks: usize) -> BlockTable {
        BlockTable { blocks: Vec::with_capacity(blocks) }
    }

    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Makes room for `tokens` positions in blocks of `block_tokens`. On failure nothing has changed.
    pub fn grow(&mut self, pool: &mut BlockPool, tokens: usize, block_tokens: usize) -> Result<(), OutOfBlocks> {
        let needed = tokens.div_ceil(block_tokens).saturating_sub(self.blocks.len());
        if needed > pool.free() {
            return Err(OutOfBlocks);
        }
        self.blocks.extend((0..needed).map(|_| pool.allocate().expect("counted")));
        Ok(())
    }

    /// Gives back what lies beyond `tokens` positions.
    pub fn shrink(&mut self, pool: &mut BlockPool, tokens: usize, block_tokens: usize) {
        let keep = tokens.div_ceil(block_tokens).min(self.blocks.len());
        self.blocks.drain(keep..).for_each(|b| pool.release(b));
    }

    /// The slot of a position: block number times block size plus offset.
    pub fn slot(&self, position: usize, block_tokens: usize) -> u64 {
        self.blocks[position / block_tokens] as u64 * block_tokens as u64 + (position % block_tokens) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_grows_by_whole_blocks_and_gives_them_back() {
        let mut pool = BlockPool::new(4);
        let (mut a, mut b) = (BlockTable::default(), BlockTable::default());
        a.grow(&mut pool, 17, 16).unwrap();
        assert_eq!(a.blocks(), [0, 1]);
        assert_eq!((a.slot(0, 16), a.slot(16, 16)), (0, 16));
        b.grow(&mut pool, 32, 16).unwrap();
        assert_eq!(a.grow(&mut pool, 33, 16), Err(OutOfBlocks));
        assert_eq!(a.blocks(), [0, 1]);
        b.shrink(&mut pool, 16, 16);
        a.grow(&mut pool, 33, 16).unwrap();
        assert_eq!(a.blocks(), [0, 1, 3]);
        assert_eq!(b.slot(5, 16), 2 * 16 + 5);
        assert_eq!((pool.touched(), pool.free()), (4, 0));
    }

    #[test]
    fn a_shared_block_is_free_only_after_its_last_holder() {
        let mut pool = BlockPool::new(1);
        let block = pool.allocate().unwrap();
        pool.share(block);
        pool.release(block);
        assert_eq!(pool.allocate(), None);
        pool.release(block);
        assert_eq!(pool.allocate(), Some(block));
    }
}
