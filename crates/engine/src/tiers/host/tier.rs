//! Blocks and states that the caches had to evict, kept in host memory. What a device's memory gives up goes here, and comes back when a prompt begins
//! alike, instead of being computed again. A block is either in the caches or here. The entry that arrived first is dropped first.

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use sluice_cache::{BlockHash, EvictedNode, KvCache, RestoreSpan, RestoreTarget};

use super::slots::{Slot, Slots};
use crate::schedule::sequence::Sequence;
use crate::tiers::block_io::BlockIo;
use crate::tiers::restore::{HostRestore, Restore};
use crate::tiers::shape::CacheShape;

/// Contents and counters of the host tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTierStatus {
    /// Bytes that blocks and states may take.
    pub budget: u64,
    /// Bytes that they take now.
    pub bytes: u64,
    /// Blocks that arrived since the start.
    pub blocks: u64,
    /// Blocks that found no room, or were dropped for others.
    pub lost: u64,
    /// Tokens of prompts that were restored from here.
    pub returned_tokens: u64,
}

/// A node of the prefix tree.
struct HostEntry {
    /// When it arrived.
    arrival: u64,
    before: BlockHash,
    /// Position of its first token.
    position: usize,
    tokens: Vec<u32>,
    /// Slots by class: `[groups + 1]`. The last one holds the state after its tokens.
    slots: Vec<Option<Slot>>,
}

/// The tier in host memory.
pub(crate) struct HostTier {
    shape: CacheShape,
    slots: Slots,
    entries: HashMap<BlockHash, HostEntry>,
    /// Entries by arrival.
    order: BTreeMap<u64, BlockHash>,
    /// Entries shorter than a block, by the node before them.
    partial: HashMap<BlockHash, Vec<BlockHash>>,
    clock: u64,
    counters: HostTierStatus,
}

impl HostTier {
    /// A tier of up to `budget` bytes, which are taken as they are needed.
    pub fn new(shape: CacheShape, budget: u64) -> HostTier {
        let sizes: Vec<usize> = shape.block_bytes.iter().copied().chain([shape.state_bytes]).collect();
        HostTier {
            slots: Slots::new(sizes, budget),
            entries: HashMap::new(),
            order: BTreeMap::new(),
            partial: HashMap::new(),
            clock: 0,
            counters: HostTierStatus { budget, ..HostTierStatus::default() },
            shape,
        }
    }

    /// Contents and counters.
    pub fn status(&self) -> HostTierStatus {
        let slots = self.entries.values().flat_map(|e| e.slots.iter().flatten());
        HostTierStatus { bytes: slots.map(|slot| self.slots.size(slot.class) as u64).sum(), ..self.counters }
    }

    /// A free slot. Drops the oldest entries if there is none.
    fn alloc(&mut self, class: usize, io: &mut dyn BlockIo) -> Option<Slot> {
        loop {
            if let Some(slot) = self.slots.alloc(class, io) {
                return Some(slot);
            }
            // Without any slot of this class, dropping entries frees none.
            let (_, oldest) = self.order.first_key_value().filter(|_| self.slots.has_any(class))?;
            let oldest = *oldest;
            self.remove(&oldest);
            self.counters.lost += 1;
        }
    }

    fn remove(&mut self, hash: &BlockHash) -> Option<HostEntry> {
        let entry = self.entries.remove(hash)?;
        self.order.remove(&entry.arrival);
        if let Some(partial) = self.partial.get_mut(&entry.before) {
            partial.retain(|other| other != hash);
            if partial.is_empty() {
                self.partial.remove(&entry.before);
            }
        }
        Some(entry)
    }

    /// Copies a node that is about to be overwritten.
    pub fn store(&mut self, evicted: &EvictedNode, io: &mut dyn BlockIo) {
        let groups = self.shape.groups();
        // Blocks that a window has moved past may be here already.
        let mut slots = self.remove(&evicted.hash).map_or_else(Vec::new, |entry| entry.slots);
        slots.resize_with(groups + 1, || None);
        self.counters.blocks += 1;
        let sources = evicted.blocks.iter().copied().chain([evicted.state]).enumerate();
        for (class, source) in sources.filter_map(|(class, source)| Some((class, source?))) {
            let Some(slot) = slots[class].take().or_else(|| self.alloc(class, io)) else {
                self.counters.lost += 1;
                return;
            };
            let to = self.slots.bytes(&slot);
            if class < groups {
                io.read_block(class, source, to);
            } else {
                io.read_state(source, bytemuck::cast_slice_mut(to));
            }
            slots[class] = Some(slot);
        }
        self.clock += 1;
        let EvictedNode { hash, before, position, ref tokens, .. } = *evicted;
        let (arrival, tokens, position) = (self.clock, tokens.clone(), position as usize);
        if tokens.len() < self.shape.block_tokens {
            self.partial.entry(before).or_default().push(hash);
        }
        self.order.insert(arrival, hash);
        self.entries.insert(hash, HostEntry { arrival, before, position, tokens, slots });
    }

    /// The entry of these tokens at this place. Its hash alone proves nothing.
    fn entry(&self, hash: &BlockHash, before: &BlockHash, position: usize, tokens: &[u32]) -> Option<&HostEntry> {
        let matches = |e: &&HostEntry| e.before == *before && e.position == position && e.tokens == tokens;
        self.entries.get(hash).filter(matches)
    }

    /// The longest prefix that the caches and this tier have between them, if it has more than `usable` tokens. Also returns the hashes of its nodes.
    fn find(&self, s: &Sequence, cache: &KvCache, max: usize, usable: usize) -> Option<(RestoreSpan, Vec<BlockHash>)> {
        let (n, tokens) = (self.shape.block_tokens, &s.tokens[..max]);
        let groups = self.shape.groups();
        let has_states = self.shape.state_bytes > 0;
        let present = cache.memory_match(s.root, tokens, max).groups;
        // 1. Forward, as far as groups without a window reach
        let mut path = vec![s.root];
        let has = |i: usize, path: &[BlockHash], g: usize| {
            let in_host = || {
                let entry = self.entry(&path[i + 1], &path[i], i * n, &tokens[i * n..(i + 1) * n]);
                entry.is_some_and(|e| e.slots[g].is_some())
            };
            present.get(i).is_some_and(|bits| bits >> g & 1 == 1) || in_host()
        };
        for (i, block) in tokens.chunks_exact(n).enumerate() {
            path.push(cache.hash_behind(&path[i], block)?);
            let mut full = (0..groups).filter(|g| self.shape.windows[*g].is_none());
            // Where all groups have windows, some group must have each block that a prompt can continue from.
            if !full.all(|g| has(i, &path, g)) || !(0..groups).any(|g| has(i, &path, g)) {
                path.pop();
                break;
            }
        }
        // 2. Back from there, until windows and a state are complete
        for whole in (0..path.len()).rev() {
            let rest = &tokens[whole * n..];
            let mut ends: Vec<(usize, Option<BlockHash>)> = Vec::new();
            if has_states {
                for hash in self.partial.get(&path[whole]).into_iter().flatten() {
                    let entry = &self.entries[hash];
                    let matches = rest.starts_with(&entry.tokens) && entry.position == whole * n;
                    if matches && entry.slots.iter().all(Option::is_some) {
                        ends.push((entry.tokens.len(), Some(*hash)));
                    }
                }
                ends.sort_unstable_by_key(|(tail, _)| std::cmp::Reverse(*tail));
            }
            let state = || {
                let before = whole.checked_sub(1)?;
                let entry = self.entry(&path[whole], &path[before], before * n, &tokens[before * n..whole * n])?;
                entry.slots[groups].as_ref()
            };
            if !has_states || state().is_some() {
                ends.push((0, None));
            }
            for (tail, end) in ends {
                let to = whole * n + tail;
                if to <= usable {
                    return None;
                }
                let firsts: Vec<usize> = self.shape.first_blocks(to).collect();
                if (0..groups).all(|g| (firsts[g]..whole).all(|i| has(i, &path, g))) {
                    path.truncate(whole + 1);
                    path.extend(end);
                    path.remove(0);
                    return Some((RestoreSpan { whole, tail }, path));
                }
            }
        }
        None
    }

    /// Reserves blocks for what this tier has of a sequence's prompt, if that is more than the caches have and more than was found on disk. The bytes follow
    /// in [`HostTier::fill`]. Returns whether the sequence has to wait for them.
    pub fn begin_restore(&mut self, s: &mut Sequence, cache: &mut KvCache) -> bool {
        if !s.shares || self.entries.is_empty() {
            return false;
        }
        let max = s.tokens.len() - 1;
        let present = cache.would_reuse(s.root, &s.tokens, max);
        let usable = present.max(s.restore.found_tokens());
        let Some((wanted, path)) = self.find(s, cache, max, usable) else { return false };
        let groups = self.shape.groups();
        let class = |group: usize| group.min(groups);
        let can_fill = |node: usize, group: usize| {
            let entry = path.get(node).and_then(|hash| self.entries.get(hash));
            entry.is_some_and(|e| e.slots[class(group)].is_some())
        };
        let Some(targets) = cache.reserve_restore(&mut s.held, s.root, &s.tokens, wanted, can_fill) else {
            return false;
        };
        let mut nodes: Vec<BlockHash> = Vec::new();
        let targets = targets.into_iter().map(|target| {
            let (node, class) = match target {
                RestoreTarget::Block { node, group, .. } => (node, group),
                RestoreTarget::State { node, .. } => (node, groups),
            };
            let entry = self.entries.get_mut(&path[node]).expect("checked by can_fill");
            nodes.push(path[node]);
            (target, entry.slots[class].take().expect("checked by can_fill"))
        });
        let targets = targets.collect();
        nodes.dedup();
        // The other slots of these nodes are of no use: the caches have those blocks, or no query sees them.
        nodes.iter().for_each(|hash| _ = self.remove(hash));
        let to = wanted.whole * self.shape.block_tokens + wanted.tail;
        s.restore = Restore::FromHost(HostRestore { to, present, targets, nodes });
        true
    }

    /// Copies a prefix back into the caches.
    ///
    /// # Errors
    /// When there is no memory for its blocks.
    pub fn fill(&mut self, restore: &HostRestore, io: &mut dyn BlockIo) -> Result<()> {
        for (target, slot) in &restore.targets {
            io.fill(*target, self.slots.bytes(slot))?;
        }
        self.counters.returned_tokens += (restore.to - restore.present) as u64;
        Ok(())
    }

    /// Whether the model has recurrent states.
    pub fn has_states(&self) -> bool {
        self.shape.state_bytes > 0
    }
}
