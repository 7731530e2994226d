//! The caches of several GPUs: keys and values of a layer are on the device that computes it, and recurrent states on all.

use std::collections::BTreeSet;

use anyhow::Result;
use sluice_backend::{BufferId, Caches, KvLayout, KvPool};

use crate::multi::coherence::BufferCoherence;
use crate::multi::pipeline::{KvGroup, Pipeline};

impl Caches for Pipeline {
    fn alloc_kv(&mut self, layout: KvLayout, blocks: usize) -> Result<KvPool> {
        let number = self.groups.len();
        let mut counts = vec![0; self.count()];
        let mut layers = Vec::with_capacity(layout.layers);
        for layer in 0..layout.layers {
            let device =
                self.partition.get().map_or((number + layer) % self.count(), |partition| partition.kv(number, layer));
            layers.push((device, counts[device]));
            counts[device] += 1;
        }
        let own = self.devices.iter_mut().zip(counts);
        let pools = own.map(|(device, layers)| device.alloc_kv(KvLayout { layers, ..layout }, blocks));
        let pools = pools.collect::<Result<Vec<KvPool>>>()?;
        self.groups.push(KvGroup { layout, layers, pools });
        Ok(KvPool { buffer: BufferId::new(number), layout })
    }

    fn commit_kv(&mut self, pool: &KvPool, blocks: usize) -> Result<()> {
        let pools = &self.groups[pool.buffer.number()].pools;
        self.devices.iter_mut().zip(pools).try_for_each(|(device, pool)| device.commit_kv(pool, blocks))
    }

    fn copy_blocks(&mut self, pool: &KvPool, pairs: &[(u32, u32)]) {
        let pools = &self.groups[pool.buffer.number()].pools;
        self.devices.iter_mut().zip(pools).for_each(|(device, pool)| device.copy_blocks(pool, pairs));
    }

    fn lend_memory(&mut self, bytes: usize) -> std::io::Result<Box<dyn sluice_store::Memory>> {
        // It is locked for all devices.
        self.devices[0].lend_memory(bytes)
    }

    fn read_block(&mut self, pool: &KvPool, block: u32, out: &mut [u8]) {
        let group = &self.groups[pool.buffer.number()];
        assert_eq!(out.len(), group.layout.block_bytes());
        // The padding to whole pages.
        out.fill(0);
        for (number, (device, pool)) in self.devices.iter_mut().zip(&group.pools).enumerate() {
            self.bytes.resize(pool.layout.block_bytes(), 0);
            device.read_block(pool, block, &mut self.bytes);
            for (all, own) in Pipeline::layer_ranges(group, number) {
                out[all].copy_from_slice(&self.bytes[own]);
            }
        }
    }

    fn write_block(&mut self, pool: &KvPool, block: u32, bytes: &[u8]) {
        let group = &self.groups[pool.buffer.number()];
        assert_eq!(bytes.len(), group.layout.block_bytes());
        for (number, (device, pool)) in self.devices.iter_mut().zip(&group.pools).enumerate() {
            self.bytes.clear();
            self.bytes.resize(pool.layout.block_bytes(), 0);
            for (all, own) in Pipeline::layer_ranges(group, number) {
                self.bytes[own].copy_from_slice(&bytes[all]);
            }
            device.write_block(pool, block, &self.bytes);
        }
    }

    /// Each device has room for whole states.
    fn alloc_states(&mut self, rows: usize, len: usize) -> Result<()> {
        self.devices.iter_mut().try_for_each(|device| device.alloc_states(rows, len))?;
        self.buffers.push((BufferCoherence::everywhere(self.count()), rows * len));
        Ok(())
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        self.devices.iter_mut().for_each(|device| device.copy_state(from, to));
    }

    fn zero_state(&mut self, row: u32) {
        self.devices.iter_mut().for_each(|device| device.zero_state(row));
    }

    fn read_state(&mut self, row: u32, out: &mut [f32]) {
        self.devices[0].read_state(row, out);
        let others: BTreeSet<usize> = self.states.iter().map(|(_, at)| *at).filter(|at| *at > 0).collect();
        let mut state = vec![0.0; out.len()];
        for device in others {
            self.devices[device].read_state(row, &mut state);
            for (range, _) in self.states.iter().filter(|(_, at)| *at == device) {
                out[range.clone()].copy_from_slice(&state[range.clone()]);
            }
        }
    }

    fn write_state(&mut self, row: u32, state: &[f32]) {
        self.devices.iter_mut().for_each(|device| device.write_state(row, state));
    }
}
