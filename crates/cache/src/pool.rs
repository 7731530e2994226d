//! A pool of numbered items, some of them free: blocks of keys and values, or rows of recurrent states.

/// The blocks (or rows) of one kind: which are free, and how many references the others have. One reference may be the
/// prefix index's, which can be dropped to free the block.
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<u32>,
    /// By block: its references.
    holders: Vec<u32>,
    /// By block: whether the index has one of them.
    indexed: Vec<bool>,
    /// Blocks that only the index refers to.
    idle: usize,
    /// Blocks that were ever handed out: all below this number.
    touched: usize,
}

impl BlockPool {
    /// A pool of so many free blocks.
    pub fn new(blocks: usize) -> BlockPool {
        // The lowest numbers are handed out first, so that memory is touched from the start.
        let free = (0..blocks as u32).rev().collect();
        BlockPool { free, holders: vec![0; blocks], indexed: vec![false; blocks], idle: 0, touched: 0 }
    }

    /// Blocks that are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that only the index refers to.
    pub fn idle(&self) -> usize {
        self.idle
    }

    /// Whether only the index refers to a block.
    pub fn is_idle(&self, block: u32) -> bool {
        self.indexed[block as usize] && self.holders[block as usize] == 1
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.holders.len()
    }

    /// One above the highest block that was ever handed out.
    pub fn high_water(&self) -> usize {
        self.touched
    }

    /// Allocates a block, with one reference; `None` if none is free.
    pub fn allocate(&mut self) -> Option<u32> {
        let block = self.free.pop()?;
        self.holders[block as usize] = 1;
        self.touched = self.touched.max(block as usize + 1);
        Some(block)
    }

    /// Adds a reference to a block.
    pub fn share(&mut self, block: u32) {
        assert!(self.holders[block as usize] > 0, "block {block} is free");
        self.idle -= usize::from(self.is_idle(block));
        self.holders[block as usize] += 1;
    }

    /// Drops a reference to a block.
    pub fn release(&mut self, block: u32) {
        let holders = &mut self.holders[block as usize];
        assert!(*holders > 0, "block {block} is free already");
        *holders -= 1;
        if *holders == 0 {
            debug_assert!(!self.indexed[block as usize]);
            self.free.push(block);
        }
        self.idle += usize::from(self.is_idle(block));
    }

    /// The index adds its reference to a block.
    pub fn hold_for_index(&mut self, block: u32) {
        assert!(!self.indexed[block as usize], "block {block} is kept already");
        self.share(block);
        self.indexed[block as usize] = true;
    }

    /// The index drops its reference.
    pub fn drop_from_index(&mut self, block: u32) {
        assert!(self.indexed[block as usize], "block {block} is not kept");
        self.idle -= usize::from(self.is_idle(block));
        self.indexed[block as usize] = false;
        self.release(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_block_that_only_the_index_holds_is_idle() {
        let mut pool = BlockPool::new(2);
        let block = pool.allocate().unwrap();
        pool.hold_for_index(block);
        assert_eq!((pool.idle(), pool.free()), (0, 1));
        pool.release(block);
        assert_eq!((pool.idle(), pool.free()), (1, 1));
        pool.share(block);
        assert_eq!(pool.idle(), 0);
        pool.drop_from_index(block);
        assert_eq!((pool.idle(), pool.free()), (0, 1));
        pool.release(block);
        assert_eq!((pool.idle(), pool.free()), (0, 2));
    }
}
