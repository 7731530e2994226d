//! After a layer: which of its experts stay on the device, and which are copied back.

use anyhow::Result;
use sluice_experts::TierMove;
use sluice_experts::simulate::MAX_PROMOTIONS;

use super::{ActiveLayer, Demotion, ExpertStreaming};
use crate::device::event::SyncEvent;
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::moe::expert_pool::BufferState;
use crate::moe::host_split::HostShare;
use crate::weights::Weights;

/// The most experts that are moved to free slots of the device in one call while nothing is computed.
const MAX_FILL: usize = 16;

impl ExpertStreaming {
    /// The device has finished everything that was enqueued: frees the buffers of the layer that was fetched last, and keeps its experts that are worth it.
    pub fn settle(&mut self, gpu: &Gpu, weights: &Weights) -> Result<()> {
        self.is_idle = true;
        self.settle_layer(gpu, weights, false)?;
        self.finish_demotions();
        self.pool.cache_retiring();
        self.publish_tables(gpu)
    }

    /// Publishes changes of the tables; later work of the device waits for that.
    fn publish_tables(&mut self, gpu: &Gpu) -> Result<()> {
        if self.tables.publish(&self.up)? {
            self.up.record(&self.uploaded)?;
            gpu.wait_for(&self.uploaded)?;
        }
        Ok(())
    }

    /// Settles the active layer, whose copies to the device are done. If the device `goes_on`, it may still use what is published; what changes now is published later.
    pub(super) fn settle_layer(&mut self, gpu: &Gpu, weights: &Weights, goes_on: bool) -> Result<()> {
        let Some(ActiveLayer { layer, fetch, held, pinned, host, .. }) = self.active.take() else {
            return Ok(());
        };
        held.into_iter().for_each(|i| self.store.release(fetch, i));
        pinned.into_iter().for_each(|of| self.store.unpin(of));
        if self.slots.is_some() {
            self.complete_in_place(weights, layer);
            return Ok(());
        }
        let has_room = !goes_on || self.pool.available(layer) > 0;
        // Experts that the host computed are in no buffer. The best of them may be promoted too, which is copied while the device goes on. Otherwise an expert that is needed
        // most often might never come to the device.
        let HostShare { positions: mut by_host, experts, .. } = host;
        if goes_on && has_room {
            let score = |i: &usize| self.store.long_term_score(layer, experts[*i].expert);
            let best = (0..by_host.len()).max_by(|a, b| score(a).total_cmp(&score(b)));
            best.into_iter().for_each(|i| self.store.release(fetch, by_host.swap_remove(i)));
        }
        let mut demoted = 0;
        // A demoted expert keeps its buffer while the device goes on.
        while let Some(moved) = self.store.promote(layer, demoted < MAX_PROMOTIONS && has_room) {
            let buffer = match self.pool.find_in(layer, moved.expert as u32, BufferState::Transient) {
                Some(buffer) => buffer,
                None => self.copy_up(weights, &moved)?,
            };
            let old = self.make_resident(&moved, buffer);
            match moved.demoted {
                None => {
                    self.pool.release(layer, old);
                    self.store.finish_promotion(moved);
                }
                Some((of, expert)) => {
                    demoted += 1;
                    self.tables.set_resident(of, expert, false);
                    let (layout, at) = (self.layout(of, expert), self.address(layer, old));
                    for (to, from) in &layout.copies {
                        let bytes = self.store.demoted_bytes_mut(&moved, to.clone());
                        // SAFETY: the expert is in its buffer; neither the buffer nor the slot is used for anything else before the copy is done.
                        unsafe { self.down.read(at + *from as u64, bytes)? };
                    }
                    // What is kept elsewhere is there already.
                    for (rows, _, arrays, from) in &layout.blocks {
                        let copies = self.blocks.as_ref().expect("some experts have blocks");
                        // SAFETY: as above.
                        unsafe { copies.restore(&self.down, rows, at + *from as u64)? };
                        for (array, to) in arrays.iter().enumerate().filter(|(_, to)| !to.is_empty()) {
                            let bytes = self.store.demoted_bytes_mut(&moved, to.clone());
                            // SAFETY: as above.
                            unsafe { copies.read(&self.down, rows, array, bytes)? };
                        }
                    }
                    let done = self.spare_events.pop().map_or_else(|| SyncEvent::new(&gpu.device), Ok)?;
                    self.down.record(&done)?;
                    self.demotions.push(Demotion { moved, buffer: old, done });
                }
            }
        }
        for buffer in self.pool.transient(layer).into_iter().rev() {
            self.pool.retire(layer, buffer);
        }
        by_host.into_iter().for_each(|i| self.store.release(fetch, i));
        let is_complete = &mut self.layers[layer].is_complete;
        *is_complete = *is_complete || self.tables.is_published(layer) && self.store.is_layer_in_fast_tier(layer);
        Ok(())
    }

    /// Once all experts of a layer have slots for good, has the table say so, and notes it when that is published.
    fn complete_in_place(&mut self, weights: &Weights, layer: usize) {
        if self.layers[layer].is_written {
            self.layers[layer].is_complete |= self.tables.is_published(layer);
        } else if let Some(slots) = self.slots.as_ref().filter(|_| self.store.is_layer_here_for_good(layer)) {
            let count = self.layers[layer].experts.count;
            let at = |e| slots.address(self.store.expert_bytes(layer, e).expect("it is there").as_ptr());
            let places: Vec<Address> = (0..count).map(at).collect();
            for (expert, at) in places.into_iter().enumerate() {
                let layout = self.layout(layer, expert);
                self.write_table(weights, layer, expert, at, &layout);
            }
            self.layers[layer].is_written = true;
        }
    }

    /// Copies an expert to a buffer that is promoted and in none, and waits for it.
    fn copy_up(&mut self, weights: &Weights, moved: &TierMove) -> Result<u32> {
        let buffer = self.take_buffer(moved.layer, moved.expert, BufferState::Transient)?;
        let layout = self.layout(moved.layer, moved.expert);
        let slot = |range| self.store.promoted_bytes(moved, range);
        // SAFETY: a buffer that nothing else uses; waited for below.
        unsafe { self.upload((moved.layer, moved.expert), self.address(moved.layer, buffer), &layout, slot)? };
        self.up.wait()?;
        self.publish(weights, moved.layer, moved.expert, buffer, &layout);
        Ok(buffer)
    }

    /// A promoted expert stays in this buffer from now on. Returns the slot's former buffer.
    fn make_resident(&mut self, moved: &TierMove, buffer: u32) -> u32 {
        self.tables.set_resident(moved.layer, moved.expert, true);
        self.pool.stay(moved.layer, moved.to, buffer)
    }

    /// Takes down which experts were copied back.
    pub(super) fn finish_demotions(&mut self) {
        let finished: Vec<Demotion> = self.demotions.extract_if(.., |d| d.done.is_past()).collect();
        for Demotion { moved, buffer, done } in finished {
            let (layer, _) = moved.demoted.expect("an expert that is demoted");
            self.pool.retire(layer, buffer);
            self.store.finish_promotion(moved);
            self.spare_events.push(done);
        }
    }

    /// As [`ExpertStreaming::finish_demotions`], once those of a layer's needed experts are copied back. `needed`: ascending.
    pub(super) fn finish_demotions_of(&mut self, layer: usize, needed: &[u32]) -> Result<()> {
        let is_needed =
            |m: &TierMove| m.demoted.is_some_and(|(l, e)| l == layer && needed.binary_search(&(e as u32)).is_ok());
        self.demotions.iter().filter(|d| is_needed(&d.moved)).try_for_each(|d| d.done.wait())?;
        self.finish_demotions();
        Ok(())
    }

    /// While the device is idle: reads some experts that the host has room for, or, once it has none, moves some to free slots of the device. Returns whether there may be
    /// more to do.
    pub fn fill(&mut self, weights: &Weights) -> Result<bool> {
        if self.store.warm_up() {
            return Ok(true);
        }
        if self.slots.is_some() {
            return Ok(false);
        }
        for n in 0..MAX_FILL {
            let Some(moved) = self.store.promote_into_free_slot() else { return Ok(n > 0) };
            let buffer = self.copy_up(weights, &moved)?;
            let old = self.make_resident(&moved, buffer);
            self.pool.release(moved.layer, old);
            self.store.finish_promotion(moved);
        }
        Ok(true)
    }
}
