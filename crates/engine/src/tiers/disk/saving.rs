//! Which nodes are copied to disk, and when: evicted ones at once, those that were used again a little after each step, and those that conversations hold
//! while the engine is idle.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use sluice_cache::{BlockHash, EvictedNode, KvCache};

use super::outbox::Outbox;
use crate::tiers::block_io::BlockIo;

/// Copying may take this part of the time of steps. At most `MAX_CREDIT` is saved up.
const PART: u32 = 200;
const MAX_CREDIT: Duration = Duration::from_millis(10);
/// How long idle copying goes on before the engine looks for requests.
pub(super) const PORTION: Duration = Duration::from_millis(5);

/// Chooses nodes to copy.
#[derive(Debug, Default)]
pub(super) struct Saving {
    /// Time that copying may still take.
    credit: Duration,
    /// Something was computed since conversations were searched for unsaved nodes.
    pub is_stale: bool,
    /// The engine is about to end, so the partial blocks at the ends of conversations are saved too.
    pub is_last: bool,
    /// Nodes that this round has yet to copy.
    unsaved: VecDeque<BlockHash>,
    /// Bytes that this round may still copy.
    room: u64,
}

impl Saving {
    /// Copies a node that is about to be overwritten.
    pub fn store_evicted(&mut self, node: &EvictedNode, outbox: &mut Outbox, io: &mut dyn BlockIo) {
        let started = Instant::now();
        outbox.copy_out(node, io);
        self.credit = self.credit.saturating_sub(started.elapsed());
    }

    /// After a step of `took`: copies some of the nodes that were used again. All queued block operations are applied.
    pub fn after_step(&mut self, took: Duration, cache: &mut KvCache, outbox: &mut Outbox, io: &mut dyn BlockIo) {
        self.is_stale = true;
        self.credit = (self.credit + took / PART).min(MAX_CREDIT);
        while !self.credit.is_zero() && outbox.can_grow() {
            let Some(node) = cache.next_reused() else { return };
            let started = Instant::now();
            if !outbox.copy_out(&node, io) {
                return cache.forget_offloaded(&node.hash);
            }
            self.credit = self.credit.saturating_sub(started.elapsed());
        }
    }

    /// Copies a portion of what conversations hold. Returns whether there may be more. All queued block operations are applied.
    pub fn save_unsaved(&mut self, quota: u64, cache: &mut KvCache, outbox: &mut Outbox, io: &mut dyn BlockIo) -> bool {
        // Blocks that are computed before the model's fingerprint is known are copied once it is.
        if !outbox.shared.is_ready() {
            return false;
        }
        if std::mem::take(&mut self.is_stale) {
            self.unsaved = cache.not_offloaded(self.is_last).into();
            // More than that would push out what this round has just written.
            self.room = quota / 2;
        }
        let started = Instant::now();
        while started.elapsed() < PORTION {
            if !outbox.can_grow() {
                std::thread::sleep(PORTION);
                return true;
            }
            let Some(hash) = self.unsaved.pop_front() else { return false };
            let Some(node) = cache.offload_by_hash(&hash) else { continue };
            let bytes = outbox.bytes_of(&node);
            if bytes > self.room || !outbox.copy_out(&node, io) {
                cache.forget_offloaded(&node.hash);
                self.unsaved.clear();
                return false;
            }
            self.room -= bytes;
        }
        true
    }
}
