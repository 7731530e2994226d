//! Numbered things of which some are free: blocks of keys and values, rows of recurrent states.

/// The blocks (or rows) of one kind: which are free, and how many hold each of the others.
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
}
