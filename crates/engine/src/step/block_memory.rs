//! Blocks and states in the backend's memory, by number.

use std::io;

use anyhow::Result;
use sluice_backend::{Backend, KvPool};
use sluice_store::Memory;

use crate::tiers::block_io::BlockIo;

/// A backend's pools of blocks, as the tiers see them.
pub(crate) struct BlockMemory<'a> {
    backend: &'a mut dyn Backend,
    /// `[groups]`
    pools: &'a [KvPool],
}

impl<'a> BlockMemory<'a> {
    pub fn new(backend: &'a mut dyn Backend, pools: &'a [KvPool]) -> BlockMemory<'a> {
        BlockMemory { backend, pools }
    }
}

impl BlockIo for BlockMemory<'_> {
    fn commit(&mut self, group: usize, blocks: usize) -> Result<()> {
        self.backend.commit_kv(&self.pools[group], blocks)
    }

    fn copy_block(&mut self, group: usize, from: u32, to: u32) {
        self.backend.copy_blocks(&self.pools[group], &[(from, to)]);
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        self.backend.copy_state(from, to);
    }

    fn zero_state(&mut self, row: u32) {
        self.backend.zero_state(row);
    }

    fn read_block(&mut self, group: usize, block: u32, out: &mut [u8]) {
        self.backend.read_block(&self.pools[group], block, out);
    }

    fn write_block(&mut self, group: usize, block: u32, bytes: &[u8]) {
        self.backend.write_block(&self.pools[group], block, bytes);
    }

    fn read_state(&mut self, row: u32, out: &mut [f32]) {
        self.backend.read_state(row, out);
    }

    fn write_state(&mut self, row: u32, state: &[f32]) {
        self.backend.write_state(row, state);
    }

    fn host_memory(&mut self, bytes: usize) -> io::Result<Box<dyn Memory>> {
        self.backend.lend_memory(bytes)
    }
}
