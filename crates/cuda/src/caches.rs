//! Caches of keys and values and of recurrent states on one GPU.

use anyhow::{Result, ensure};
use sluice_backend::{BufferId, Caches, KvLayout, KvPool, MemoryClass, Resources};

use crate::cuda::{Cuda, expect_device};
use crate::device::memory::{VirtualRange, bytes_of, bytes_of_mut};
use crate::device::pinned::RegisteredMemory;
use crate::ops::context::KvBlocks;

impl Caches for Cuda {
    fn alloc_kv(&mut self, layout: KvLayout, blocks: usize) -> Result<KvPool> {
        let bytes = layout.block_bytes().checked_mul(blocks);
        ensure!(bytes.is_some_and(|b| b < 1 << 46), "the KV cache is larger than the address space");
        let memory = VirtualRange::new(&self.context.gpu, bytes.unwrap_or(0), MemoryClass::Kv.name())?;
        let id = BufferId::new(self.context.kv.len());
        self.context.kv.push(KvBlocks { layout, memory, blocks });
        Ok(KvPool { buffer: id, layout })
    }

    fn commit_kv(&mut self, pool: &KvPool, blocks: usize) -> Result<()> {
        let own = &mut self.context.kv[pool.buffer.number()];
        assert!(blocks <= own.blocks, "{blocks} blocks of {}", own.blocks);
        own.memory.commit(&self.context.gpu, blocks * pool.layout.block_bytes(), MemoryClass::Kv.name())
    }

    fn copy_blocks(&mut self, pool: &KvPool, pairs: &[(u32, u32)]) {
        for &(from, to) in pairs {
            let ((from, len), (to, _)) = (self.context.kv_block(pool, from), self.context.kv_block(pool, to));
            // SAFETY: two committed blocks, or the same.
            expect_device(unsafe { self.context.gpu.copy(from, to, len) });
        }
    }

    fn read_block(&mut self, pool: &KvPool, block: u32, out: &mut [u8]) {
        let (at, len) = self.context.kv_block(pool, block);
        assert_eq!(out.len(), len);
        // SAFETY: a committed block has this length.
        expect_device(unsafe { self.context.gpu.read(at, out, expect_device(self.context.gpu.wait_permit())) });
    }

    fn write_block(&mut self, pool: &KvPool, block: u32, bytes: &[u8]) {
        let (at, len) = self.context.kv_block(pool, block);
        assert_eq!(bytes.len(), len);
        // SAFETY: a committed block has this length.
        expect_device(unsafe { self.context.gpu.write(at, bytes, expect_device(self.context.gpu.wait_permit())) });
    }

    fn lend_memory(&mut self, bytes: usize) -> std::io::Result<Box<dyn sluice_store::Memory>> {
        Ok(Box::new(RegisteredMemory::new(&self.context.gpu.device, bytes)?))
    }

    fn alloc_states(&mut self, rows: usize, len: usize) -> Result<()> {
        ensure!(self.context.states.is_none(), "a pool of states is there");
        self.context.states = Some(self.alloc(MemoryClass::State, rows, len)?);
        Ok(())
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        let ((from, len), (to, _)) = (self.context.state_row(from), self.context.state_row(to));
        // SAFETY: two rows of the pool, or the same.
        expect_device(unsafe { self.context.gpu.copy(from, to, len) });
    }

    fn zero_state(&mut self, row: u32) {
        let (at, len) = self.context.state_row(row);
        // SAFETY: a row of the pool.
        expect_device(unsafe { self.context.gpu.zero(at, len) });
    }

    fn read_state(&mut self, row: u32, out: &mut [f32]) {
        let (at, len) = self.context.state_row(row);
        assert_eq!(4 * out.len(), len);
        // SAFETY: a row of the pool has this length.
        expect_device(unsafe {
            self.context.gpu.read(at, bytes_of_mut(out), expect_device(self.context.gpu.wait_permit()))
        });
    }

    fn write_state(&mut self, row: u32, state: &[f32]) {
        let (at, len) = self.context.state_row(row);
        assert_eq!(4 * state.len(), len);
        // SAFETY: a row of the pool has this length.
        expect_device(unsafe {
            self.context.gpu.write(at, bytes_of(state), expect_device(self.context.gpu.wait_permit()))
        });
    }
}
