//! What is copied out of the caches in memory: what is about to be overwritten, at once; what was used again, a little after each step; and what conversations
//! hold, when nothing else is to do.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sluice_backend::{Backend, KvPool};
use sluice_cache::disk::STATE;
use sluice_cache::{BlockHash, EvictedNode, KvCache};

use super::writer::{Command, Outgoing};
use super::{PromptCache, WAITING};

/// Of the time of steps, copying may take a part of this many; what is saved up is at most [`MOST`].
const PART: u32 = 200;
const MOST: Duration = Duration::from_millis(10);
/// So long a copying while idle goes on before somebody looks whether there is a request.
pub(super) const PORTION: Duration = Duration::from_millis(5);

/// What is to be copied out.
#[derive(Debug, Default)]
pub(crate) struct Saving {
    /// Time that copying may take.
    credit: Duration,
    /// Something was computed since all conversations were looked through.
    pub new: bool,
    /// Nobody goes on any more: where conversations end within a block is worth keeping too.
    pub last: bool,
    /// What of them is left to copy, and the bytes that this round may come to.
    unsaved: VecDeque<BlockHash>,
    room: u64,
}

impl PromptCache {
    fn bytes_of(&self, leaving: &EvictedNode) -> u64 {
        let blocks = leaving.blocks.iter().zip(&self.shape.block_bytes).filter(|(b, _)| b.is_some());
        let state = leaving.state.map_or(0, |_| self.shape.state_bytes);
        (blocks.map(|(_, bytes)| *bytes).sum::<usize>() + state) as u64
    }

    /// Whether more may wait to be written.
    pub(super) fn has_room(&self) -> bool {
        self.shared.waiting.load(Ordering::Relaxed) < WAITING
    }

    /// Copies a node out, and hands it over. Whether there was room.
    pub(super) fn copy_out(&mut self, leaving: &EvictedNode, backend: &mut dyn Backend, kv: &[KvPool]) -> bool {
        if !self.shared.is_ready() {
            return false;
        }
        if !self.has_room() {
            self.dropped += 1;
            return false;
        }
        let bytes = self.bytes_of(leaving);
        let mut parts: Vec<(u32, Vec<u8>)> = Vec::with_capacity(kv.len() + 1);
        for (group, (pool, block)) in kv.iter().zip(&leaving.blocks).enumerate() {
            if let Some(block) = block {
                let mut out = vec![0; pool.layout.block_bytes()];
                backend.read_block(pool, *block, &mut out);
                parts.push((group as u32, out));
            }
        }
        if let Some(row) = leaving.state {
            let mut state = vec![0f32; self.shape.state_bytes / size_of::<f32>()];
            backend.read_state(row, &mut state);
            parts.push((STATE, state.iter().flat_map(|x| x.to_le_bytes()).collect()));
        }
        let EvictedNode { hash, before, position, tokens, .. } = leaving.clone();
        self.shared.waiting.fetch_add(bytes, Ordering::Relaxed);
        let sent = self.send(Command::Store(Outgoing { hash, before, position, tokens, parts, bytes }));
        if !sent {
            self.shared.waiting.fetch_sub(bytes, Ordering::Relaxed);
        }
        sent
    }

    /// What is about to be overwritten.
    pub fn leaves(&mut self, leaving: &EvictedNode, backend: &mut dyn Backend, kv: &[KvPool]) {
        let begun = Instant::now();
        self.copy_out(leaving, backend, kv);
        self.saving.credit = self.saving.credit.saturating_sub(begun.elapsed());
    }

    /// After a step that took so long: some of what was used again. All chores are done.
    pub fn after_step(&mut self, took: Duration, cache: &mut KvCache, backend: &mut dyn Backend, kv: &[KvPool]) {
        self.saving.new = true;
        self.saving.credit = (self.saving.credit + took / PART).min(MOST);
        while !self.saving.credit.is_zero() && self.has_room() {
            let Some(leaving) = cache.next_reused() else { return };
            let begun = Instant::now();
            if !self.copy_out(&leaving, backend, kv) {
                return cache.forget_offloaded(&leaving.hash);
            }
            self.saving.credit = self.saving.credit.saturating_sub(begun.elapsed());
        }
    }

    /// A portion of what conversations hold. Whether there may be more. All chores are done.
    pub fn save(&mut self, cache: &mut KvCache, backend: &mut dyn Backend, kv: &[KvPool]) -> bool {
        // What is computed before the model is known is written then.
        if !self.shared.is_ready() {
            return false;
        }
        if std::mem::take(&mut self.saving.new) {
            self.saving.unsaved = cache.not_offloaded(self.saving.last).into();
            // What is more than that would push out what was just written.
            self.saving.room = self.quota / 2;
        }
        let begun = Instant::now();
        while begun.elapsed() < PORTION {
            if !self.has_room() {
                std::thread::sleep(PORTION);
                return true;
            }
            let Some(hash) = self.saving.unsaved.pop_front() else { return false };
            let Some(leaving) = cache.offload_by_hash(&hash) else { continue };
            let bytes = self.bytes_of(&leaving);
            if bytes > self.saving.room || !self.copy_out(&leaving, backend, kv) {
                cache.forget_offloaded(&leaving.hash);
                self.saving.unsaved.clear();
                return false;
            }
            self.saving.room -= bytes;
        }
        true
    }
}
