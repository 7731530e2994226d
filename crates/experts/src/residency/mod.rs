//! Which expert has which slot of which tier of memory, and which is evicted when another needs a slot. This is the one place that knows where an expert is.
//! Bookkeeping by number only: others read and copy, and the simulator drives the same code with recorded traces.
//!
//! Tiers are exclusive: an expert is in one of them, or on disk alone. What is read goes to the last tier, whose slots all layers share. Scores of an expert
//! change only when its layer is visited, so each layer keeps those of its experts that may be evicted from the last tier in a heap, which is rebuilt a few
//! times from one visit to the next. The victim is the least of as many heap tops as there are layers. `promotion` moves experts to faster tiers. Nothing is
//! allocated after [`Residency::new`].

mod candidates;
mod promotion;
#[cfg(test)]
mod tests;

use crate::policy::{EvictionScores, Key, Policy};
use candidates::{Candidate, Candidates};
pub use promotion::Promotion;

/// Stands for no slot, or for no key.
const NONE: u32 = u32::MAX;

/// Slots of equal size in one or more tiers.
#[derive(Debug)]
struct Tier {
    /// Its slots: `first..end` of all.
    first: u32,
    end: u32,
    free: Vec<u32>,
    /// Of a tier that is not the last, by layer: the expert there with the least long-term score that may be demoted; `None` if it has to be searched.
    least: Vec<Option<Option<Candidate>>>,
}

/// Experts in slots of equal size.
///
/// ```
/// use sluice_experts::{Policy, Residency};
///
/// // One layer of four experts, and slots for two.
/// let mut residency = Residency::new(&[4], &[2], Policy::Lru, &[]);
/// residency.visit(0, &[0, 3], &[1, 1]);
/// let slots = [0, 3].map(|expert| residency.allocate(0, expert).unwrap());
/// slots.iter().for_each(|slot| residency.unpin(*slot));
/// // Expert 1 takes the place of one of them.
/// residency.visit(0, &[1], &[1]);
/// let slot = residency.allocate(0, 1).unwrap();
/// assert!(slots.contains(&slot));
/// assert_eq!(residency.slot(0, 1), Some(slot));
/// ```
#[derive(Debug)]
pub struct Residency {
    scores: EvictionScores,
    /// The fastest first.
    tiers: Vec<Tier>,
    /// By key: the slot, or [`NONE`].
    slots: Vec<u32>,
    /// By key: whether it is in its layer's heap, unless that is stale.
    in_heap: Vec<bool>,
    /// By key: whether it stays in memory once it is there.
    permanent: Vec<bool>,
    /// By slot: the key, or [`NONE`].
    keys: Vec<Key>,
    /// By slot: whether its expert must stay where it is for now.
    pinned: Vec<bool>,
    /// By layer.
    candidates: Vec<Candidates>,
}

impl Residency {
    /// Residency of `experts[layer]` experts of each layer in `slots[tier]` slots of each tier, the fastest tier first. `permanent`: (layer, expert) that
    /// stay in memory once they are there.
    ///
    /// # Panics
    /// Without a tier.
    pub fn new(experts: &[usize], slots: &[usize], policy: Policy, permanent: &[(usize, usize)]) -> Residency {
        Residency::with_pairs(experts, slots, policy, permanent, u64::MAX)
    }

    /// The same, where what a policy learns about pairs of experts takes at most `pairs` bytes.
    pub(crate) fn with_pairs(
        experts: &[usize],
        slots: &[usize],
        policy: Policy,
        permanent: &[(usize, usize)],
        pairs: u64,
    ) -> Residency {
        assert!(!slots.is_empty(), "there is at least one tier");
        let keys = experts.iter().sum::<usize>();
        let all = slots.iter().sum::<usize>();
        let mut first = 0;
        let tiers = slots.iter().enumerate().map(|(i, n)| {
            let end = first + *n as u32;
            let least = if i + 1 < slots.len() { vec![None; experts.len()] } else { Vec::new() };
            let tier = Tier { first, end, free: (first..end).rev().collect(), least };
            first = end;
            tier
        });
        let mut residency = Residency {
            // If the fastest tier holds all experts, nothing is ever evicted.
            scores: EvictionScores::new(experts, policy, pairs, slots[0] >= keys),
            tiers: tiers.collect(),
            slots: vec![NONE; keys],
            in_heap: vec![false; keys],
            permanent: vec![false; keys],
            keys: vec![NONE; all],
            pinned: vec![false; all],
            candidates: experts.iter().map(|n| Candidates::with_capacity(*n)).collect(),
        };
        for &(layer, expert) in permanent {
            let key = residency.scores.key(layer, expert);
            residency.permanent[key as usize] = true;
        }
        residency
    }

    /// A step has come to `layer`, and `tokens[i]` of its tokens want expert `wanted[i]`. To be called before slots for these experts are asked for.
    pub fn visit(&mut self, layer: usize, wanted: &[u32], tokens: &[u32]) {
        // What the previous visit wanted may be evicted from now on; what this one wants may not.
        self.candidates[self.scores.current].stale = true;
        self.candidates[layer].stale = true;
        self.scores.visit(layer, wanted, tokens);
        (0..self.tiers.len()).for_each(|tier| self.invalidate_least(tier, layer));
    }

    /// The slot of an expert, numbered through all tiers; `None` if it is on disk alone.
    pub fn slot(&self, layer: usize, expert: usize) -> Option<u32> {
        Some(self.slots[self.scores.key(layer, expert) as usize]).filter(|s| *s != NONE)
    }

    /// What a slot of a faster tier gains by keeping an expert for good: to be compared with other experts' scores only.
    pub fn long_term_score(&self, layer: usize, expert: usize) -> f64 {
        self.scores.long_term(self.scores.key(layer, expert))
    }

    /// The tier that a slot belongs to.
    pub fn tier(&self, slot: u32) -> usize {
        self.tiers.partition_point(|tier| tier.end <= slot)
    }

    /// Whether a slot of a tier is free.
    pub fn has_free_slot(&self, tier: usize) -> bool {
        !self.tiers[tier].free.is_empty()
    }

    /// How many slots of the last tier are free.
    pub fn free_slots(&self) -> usize {
        self.tiers.last().map_or(0, |tier| tier.free.len())
    }

    /// Gives an expert that has no slot one of the last tier: a free one, or that of another expert, which is evicted. The slot is pinned. `None` if all slots
    /// are pinned or hold permanent experts.
    pub fn allocate(&mut self, layer: usize, expert: usize) -> Option<u32> {
        let key = self.scores.key(layer, expert);
        debug_assert_eq!(self.slots[key as usize], NONE);
        let last = self.tiers.len() - 1;
        let slot = self.tiers[last].free.pop().or_else(|| self.evict())?;
        self.assign(key, slot);
        self.pinned[slot as usize] = true;
        Some(slot)
    }

    fn assign(&mut self, key: Key, slot: u32) {
        self.keys[slot as usize] = key;
        self.slots[key as usize] = slot;
    }

    /// Evicts an expert of the last tier and returns its slot.
    fn evict(&mut self) -> Option<u32> {
        let mut best: Option<(f64, Key)> = None;
        for layer in 0..self.candidates.len() {
            let Some(top) = self.least_of_layer(layer) else { continue };
            let score = self.scores.short_term(top.key, self.scores.distance(layer));
            if best.is_none_or(|(least, _)| score < least) {
                best = Some((score, top.key));
            }
        }
        // The present visit's own experts come last: those that are unpinned already.
        let key = best
            .map(|(_, key)| key)
            .or_else(|| self.scores.keys(self.scores.current).find(|key| self.may_evict(*key)))?;
        let slot = std::mem::replace(&mut self.slots[key as usize], NONE);
        self.keys[slot as usize] = NONE;
        Some(slot)
    }

    /// The expert with the least score among those of a layer that may be evicted.
    fn least_of_layer(&mut self, layer: usize) -> Option<Candidate> {
        // The order within a layer changes slowly as its next visit comes nearer.
        let nearer =
            self.scores.policy == Policy::Scan && self.scores.distance(layer) * 2 <= self.candidates[layer].built_at;
        if self.candidates[layer].stale || nearer {
            self.rebuild_heap(layer);
        }
        loop {
            let top = *self.candidates[layer].heap.peek()?;
            if self.may_evict(top.key) {
                return Some(top);
            }
            self.candidates[layer].heap.pop();
            self.in_heap[top.key as usize] = false;
        }
    }

    fn rebuild_heap(&mut self, layer: usize) {
        let distance = self.scores.distance(layer);
        let mut list = self.candidates[layer].take_list();
        for key in self.scores.keys(layer) {
            let listed = self.may_evict(key) && !self.scores.is_wanted_now(key);
            self.in_heap[key as usize] = listed;
            if listed {
                list.push(Candidate { score: self.scores.short_term(key, distance), key });
            }
        }
        self.candidates[layer] = Candidates::from_list(list, distance);
    }

    /// Whether an expert may be evicted: it is in the last tier, neither pinned nor permanent.
    fn may_evict(&self, key: Key) -> bool {
        let slot = self.slots[key as usize];
        let last = self.tiers.last().expect("one tier at least");
        slot != NONE && slot >= last.first && !self.permanent[key as usize] && !self.pinned[slot as usize]
    }

    /// Keeps a slot's expert where it is until [`Residency::unpin`]. Pins are not counted: the caller does.
    pub fn pin(&mut self, slot: u32) {
        self.pinned[slot as usize] = true;
    }

    /// Allows a slot's expert to be moved and evicted again.
    pub fn unpin(&mut self, slot: u32) {
        self.pinned[slot as usize] = false;
        let key = self.keys[slot as usize];
        let tier = self.tier(slot);
        if tier + 1 < self.tiers.len() {
            return self.invalidate_least(tier, self.scores.layer_of(key));
        }
        if self.in_heap[key as usize] || !self.may_evict(key) {
            return;
        }
        let layer = self.scores.layer_of(key);
        if !self.candidates[layer].stale && !self.scores.is_wanted_now(key) {
            let score = self.scores.short_term(key, self.candidates[layer].built_at);
            self.in_heap[key as usize] = true;
            self.candidates[layer].heap.push(Candidate { score, key });
        }
    }

    /// Frees a slot of the last tier whose expert could not be read, or is not to be kept.
    pub fn discard(&mut self, slot: u32) {
        let key = std::mem::replace(&mut self.keys[slot as usize], NONE);
        self.slots[key as usize] = NONE;
        self.free(slot);
    }

    fn free(&mut self, slot: u32) {
        self.pinned[slot as usize] = false;
        let tier = self.tier(slot);
        self.tiers[tier].free.push(slot);
    }

    const BYTES_PER_KEY: usize = size_of::<(u32, bool, bool, Candidate)>();
    const BYTES_PER_SLOT: usize = size_of::<(Key, bool, u32)>();
    /// Bytes of bookkeeping for each expert at most, with a slot for each, without what is learned about pairs.
    pub(crate) const BYTES_PER_EXPERT: usize =
        Self::BYTES_PER_KEY + Self::BYTES_PER_SLOT + EvictionScores::BYTES_PER_EXPERT;

    /// Bytes that the bookkeeping itself takes.
    pub fn bookkeeping_bytes(&self) -> usize {
        self.slots.len() * Self::BYTES_PER_KEY + self.keys.len() * Self::BYTES_PER_SLOT + self.scores.bytes()
    }

    /// How many slots there are, in all tiers.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is no slot at all.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}
