//! The device's buffers for experts: which expert is in which, and what each is used for ([`BufferState`]). It only keeps numbers; memory and copies are elsewhere.
//!
//! Layers whose experts have about the same size form a class with buffers of one size. Some are slots, in which experts stay; the others are for experts that only pass
//! through. An expert that comes to stay keeps the buffer that it was copied to, and the slot's former buffer becomes free once its expert was copied back.

use sluice_experts::SlotClass;

use crate::device::memory::ALIGNMENT;
use crate::moe::layout::EXPERT_ARRAYS;

/// The transient experts of two layers may take up to one part in this many of the budget: prompts are up to twice as fast if the next layer's experts are copied while one
/// computes.
const MAX_TRANSIENT_PART: u64 = 4;

/// Buffers of one size: how many are slots and how many are for transient experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// Bytes of a buffer.
    pub stride: usize,
    pub slots: usize,
    pub transient: usize,
}

impl Division {
    pub fn bytes(&self) -> u64 {
        (self.slots + self.transient) as u64 * self.stride as u64
    }
}

/// Bytes of a buffer for an expert that has `bytes` in its slot.
pub fn stride(bytes: usize) -> usize {
    (bytes + EXPERT_ARRAYS * ALIGNMENT).next_multiple_of(ALIGNMENT)
}

/// Divides `budget` bytes. There is always room for the transient experts of one layer, whatever the budget, and for those of two if that is a small part of it. The rest
/// are slots.
pub fn divide(classes: &[SlotClass], budget: u64) -> Vec<Division> {
    let all = |of: &dyn Fn(&SlotClass) -> usize| -> u64 {
        classes.iter().map(|c| (of(c) as u64).saturating_mul(stride(c.bytes) as u64)).fold(0, u64::saturating_add)
    };
    let twice = |c: &SlotClass| (2 * c.widest).min(c.experts);
    let two = all(&twice) <= budget / MAX_TRANSIENT_PART;
    let transient = |c: &SlotClass| if two { twice(c) } else { c.widest };
    let (rest, experts) = (budget.saturating_sub(all(&transient)), all(&|c| c.experts).max(1));
    let slots = |c: &SlotClass| (c.experts as u128 * u128::from(rest) / u128::from(experts)).min(c.experts as u128);
    let one = |c: &SlotClass| Division { stride: stride(c.bytes), slots: slots(c) as usize, transient: transient(c) };
    classes.iter().map(one).collect()
}

/// What a buffer is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferState {
    Free,
    /// Has an expert that was copied before its layer needed it.
    Prefetched,
    /// Has an expert that the present step uses.
    Transient,
    /// Has an expert that no step needs, but the device may still read it until the host next waits.
    Retiring,
    /// Has an expert that no step needs; it can be used again until the buffer is taken.
    Cached,
    /// Has an expert that stays on the device.
    Resident,
    /// Has an expert that is being copied back to the host's memory.
    Demoting,
}

/// The layer and the expert in a buffer.
type Owner = (u32, u32);

/// Buffers of one size.
#[derive(Debug)]
struct BufferClass {
    /// The state and the owner of each buffer. A free one keeps its last owner.
    buffers: Vec<(BufferState, Owner)>,
    /// The buffer of each slot.
    slots: Vec<u32>,
    /// Buffers by state, the latest last.
    free: Vec<u32>,
    transient: Vec<u32>,
    retiring: Vec<u32>,
    cached: Vec<u32>,
}

impl BufferClass {
    fn new(division: &Division) -> BufferClass {
        let (slots, all) = (division.slots as u32, (division.slots + division.transient) as u32);
        let state = |buffer| if buffer < slots { BufferState::Resident } else { BufferState::Free };
        BufferClass {
            buffers: (0..all).map(|buffer| (state(buffer), (u32::MAX, u32::MAX))).collect(),
            slots: (0..slots).collect(),
            free: (slots..all).rev().collect(),
            transient: Vec::new(),
            retiring: Vec::new(),
            cached: Vec::new(),
        }
    }

    fn list(&mut self, state: BufferState) -> Option<&mut Vec<u32>> {
        match state {
            BufferState::Free => Some(&mut self.free),
            BufferState::Transient => Some(&mut self.transient),
            BufferState::Retiring => Some(&mut self.retiring),
            BufferState::Cached => Some(&mut self.cached),
            _ => None,
        }
    }

    /// The only place where a state changes.
    fn set(&mut self, buffer: u32, state: BufferState) {
        let before = std::mem::replace(&mut self.buffers[buffer as usize].0, state);
        if let Some(list) = self.list(before) {
            let at = list.iter().rposition(|b| *b == buffer).expect("a buffer is in the list of its state");
            list.remove(at);
        }
        self.list(state).into_iter().for_each(|list| list.push(buffer));
    }

    fn state(&self, buffer: u32) -> BufferState {
        self.buffers[buffer as usize].0
    }

    fn available(&self) -> usize {
        self.free.len() + self.cached.len()
    }
}

/// A layer's class, and the buffer that each of its experts came to last.
#[derive(Debug)]
struct LayerBuffers {
    class: usize,
    of_expert: Vec<Option<u32>>,
}

/// Which expert is in which buffer, and what each buffer is used for. Buffers are numbered within the class of a layer.
#[derive(Debug)]
pub struct BufferPool {
    classes: Vec<BufferClass>,
    layers: Vec<LayerBuffers>,
}

impl BufferPool {
    /// `layers`: the class and the number of experts of each.
    pub fn new(divisions: &[Division], layers: impl Iterator<Item = (usize, usize)>) -> BufferPool {
        let layer = |(class, experts)| LayerBuffers { class, of_expert: vec![None; experts] };
        BufferPool { classes: divisions.iter().map(BufferClass::new).collect(), layers: layers.map(layer).collect() }
    }

    fn class(&mut self, layer: usize) -> &mut BufferClass {
        &mut self.classes[self.layers[layer].class]
    }

    /// The buffer of an expert and what it is used for.
    pub fn find(&self, layer: usize, expert: u32) -> Option<(u32, BufferState)> {
        let LayerBuffers { class, of_expert } = &self.layers[layer];
        let buffer = of_expert[expert as usize]?;
        let (state, owner) = self.classes[*class].buffers[buffer as usize];
        (state != BufferState::Free && owner == (layer as u32, expert)).then_some((buffer, state))
    }

    /// The buffer of an expert that is used for this.
    pub fn find_in(&self, layer: usize, expert: u32, state: BufferState) -> Option<u32> {
        self.find(layer, expert).filter(|(_, found)| *found == state).map(|(buffer, _)| buffer)
    }

    /// The buffers of a layer's transient experts, the latest last.
    pub fn transient(&self, layer: usize) -> Vec<u32> {
        let class = &self.classes[self.layers[layer].class];
        class.transient.iter().copied().filter(|b| class.buffers[*b as usize].1.0 == layer as u32).collect()
    }

    /// How many buffers can be taken for experts of a layer.
    pub fn available(&self, layer: usize) -> usize {
        self.classes[self.layers[layer].class].available()
    }

    /// Takes a buffer for an expert: a free one, or the cached one whose expert has the lowest score. `None` if there is neither.
    pub fn take(
        &mut self,
        (layer, expert): (usize, u32),
        state: BufferState,
        score: impl Fn(usize, usize) -> f64,
    ) -> Option<u32> {
        // The expert is about to be in this buffer and nowhere else.
        if let Some(old) = self.find_in(layer, expert, BufferState::Cached) {
            self.release(layer, old);
        }
        let class = self.class(layer);
        if class.free.is_empty() {
            let score = |buffer: &u32| {
                let (_, (layer, expert)) = class.buffers[*buffer as usize];
                score(layer as usize, expert as usize)
            };
            let evicted = class.cached.iter().copied().min_by(|a, b| score(a).total_cmp(&score(b)))?;
            class.set(evicted, BufferState::Free);
        }
        let buffer = *class.free.last()?;
        class.buffers[buffer as usize].1 = (layer as u32, expert);
        class.set(buffer, state);
        self.layers[layer].of_expert[expert as usize] = Some(buffer);
        Some(buffer)
    }

    /// Frees a buffer.
    pub fn release(&mut self, layer: usize, buffer: u32) {
        self.class(layer).set(buffer, BufferState::Free);
    }

    /// The present step uses an expert that was prefetched. If the expert has come to another buffer since, this one is free.
    pub fn use_prefetched(&mut self, layer: usize, expert: u32, buffer: u32) {
        let is_latest = self.find_in(layer, expert, BufferState::Prefetched) == Some(buffer);
        self.class(layer).set(buffer, if is_latest { BufferState::Transient } else { BufferState::Free });
    }

    /// Uses an expert in this step again, if its buffer still has it. Returns whether it has.
    pub fn reuse(&mut self, layer: usize, expert: u32) -> bool {
        let Some((buffer, BufferState::Retiring | BufferState::Cached)) = self.find(layer, expert) else {
            return false;
        };
        self.class(layer).set(buffer, BufferState::Transient);
        true
    }

    /// The present step no longer uses a buffer, or its expert was copied back.
    pub fn retire(&mut self, layer: usize, buffer: u32) {
        debug_assert!(matches!(self.class(layer).state(buffer), BufferState::Transient | BufferState::Demoting));
        self.class(layer).set(buffer, BufferState::Retiring);
    }

    /// The expert in `buffer` stays in `slot` from now on. Returns the slot's former buffer, whose expert is to be demoted if it has one.
    pub fn stay(&mut self, layer: usize, slot: usize, buffer: u32) -> u32 {
        let class = self.class(layer);
        debug_assert_eq!(class.state(buffer), BufferState::Transient);
        class.set(buffer, BufferState::Resident);
        let old = std::mem::replace(&mut class.slots[slot], buffer);
        class.set(old, BufferState::Demoting);
        old
    }

    /// The device has stopped reading buffers that retire: their experts are cached.
    pub fn cache_retiring(&mut self) {
        for class in 0..self.classes.len() {
            for buffer in std::mem::take(&mut self.classes[class].retiring) {
                let (_, (layer, expert)) = self.classes[class].buffers[buffer as usize];
                let is_latest = self.layers[layer as usize].of_expert[expert as usize] == Some(buffer);
                let own = &mut self.classes[class];
                let state = if is_latest { BufferState::Cached } else { BufferState::Free };
                own.buffers[buffer as usize].0 = state;
                own.list(state).into_iter().for_each(|list| list.push(buffer));
            }
        }
    }

    /// Frees all cached buffers: most are about to be needed.
    pub fn drop_cached(&mut self) {
        for class in &mut self.classes {
            for buffer in std::mem::take(&mut class.cached) {
                class.buffers[buffer as usize].0 = BufferState::Free;
                class.free.push(buffer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASSES: [SlotClass; 2] = [
        SlotClass { bytes: 3 << 20, kept: 0, experts: 96, widest: 16 },
        SlotClass { bytes: 1 << 20, kept: 0, experts: 8, widest: 8 },
    ];

    #[test]
    fn a_budget_is_kept_if_it_has_room_for_a_layer() {
        let bytes = |d: &[Division]| d.iter().map(Division::bytes).sum::<u64>();
        let least = bytes(&divide(&CLASSES, 0));
        assert_eq!(divide(&CLASSES, 0).iter().map(|d| (d.slots, d.transient)).collect::<Vec<_>>(), [(0, 16), (0, 8)]);
        let mut before = 0;
        for budget in (0..1000).map(|mib| mib << 20) {
            let divided = divide(&CLASSES, budget);
            assert!(bytes(&divided) <= budget.max(least), "{budget}: {divided:?}");
            let slots: usize = divided.iter().map(|d| d.slots).sum();
            // Except where a second layer's experts get room.
            assert!(slots + 24 >= before, "{budget}: {slots} slots after {before}");
            before = slots;
        }
        let all = divide(&CLASSES, u64::MAX);
        assert_eq!(all.iter().map(|d| (d.slots, d.transient)).collect::<Vec<_>>(), [(96, 32), (8, 8)]);
        assert!(divide(&[], 7).is_empty());
    }

    fn pool() -> BufferPool {
        BufferPool::new(&[Division { stride: 1, slots: 2, transient: 3 }], [(0, 8), (0, 8)].into_iter())
    }

    fn score(layer: usize, expert: usize) -> f64 {
        (10 * layer + expert) as f64
    }

    #[test]
    fn no_buffer_is_two_things() {
        let mut pool = pool();
        let [a, b, c] = [0, 1, 2].map(|expert| pool.take((0, expert), BufferState::Transient, score).unwrap());
        assert_eq!((pool.take((0, 3), BufferState::Transient, score), pool.available(0)), (None, 0));
        let old = pool.stay(0, 1, b);
        pool.release(0, old);
        pool.release(0, c);
        let d = [4, 5].map(|expert| pool.take((1, expert), BufferState::Transient, score).unwrap());
        let mut seen = vec![a, d[0], d[1]];
        seen.extend(&pool.classes[0].slots);
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3, 4]);
        assert_eq!(pool.find(0, 1), Some((b, BufferState::Resident)));
        assert_eq!(pool.find(0, 2), None);
    }

    #[test]
    fn the_cached_expert_of_the_lowest_score_makes_room() {
        let mut pool = pool();
        for expert in [5, 3, 4] {
            let buffer = pool.take((0, expert), BufferState::Transient, score).unwrap();
            pool.retire(0, buffer);
        }
        // The device may still read them.
        assert_eq!(pool.take((1, 0), BufferState::Transient, score), None);
        pool.cache_retiring();
        assert!(pool.reuse(0, 5) && !pool.reuse(0, 5));
        pool.take((1, 0), BufferState::Transient, score).unwrap();
        assert_eq!(pool.find(0, 3), None);
        assert!(pool.find_in(0, 4, BufferState::Cached).is_some());
    }

    #[test]
    fn an_expert_that_is_copied_again_is_cached_once() {
        let mut pool = pool();
        let old = pool.take((0, 6), BufferState::Transient, score).unwrap();
        pool.retire(0, old);
        let new = pool.take((0, 6), BufferState::Prefetched, score).unwrap();
        assert_eq!(pool.find(0, 6), Some((new, BufferState::Prefetched)));
        pool.cache_retiring();
        assert_eq!((pool.classes[0].state(old), pool.available(0)), (BufferState::Free, 2));
        pool.use_prefetched(0, 6, new);
        assert_eq!((pool.find_in(0, 6, BufferState::Transient), pool.transient(0)), (Some(new), vec![new]));
        assert!(pool.transient(1).is_empty());
    }

    #[test]
    fn lists_agree_with_states_whatever_happens() {
        let mut random = fastrand::Rng::with_seed(6);
        let mut pool = pool();
        for _ in 0..20_000 {
            let (layer, expert) = (random.usize(..2), random.u32(..8));
            match (random.u8(..7), pool.find(layer, expert)) {
                (0 | 1, None) => {
                    pool.take((layer, expert), BufferState::Transient, score);
                }
                (0, Some((buffer, BufferState::Transient))) => pool.retire(layer, buffer),
                (1, Some((buffer, BufferState::Transient))) => {
                    let old = pool.stay(layer, random.usize(..2), buffer);
                    pool.retire(layer, old);
                    if pool.classes[0].buffers[old as usize].1.0 == u32::MAX {
                        pool.release(layer, old);
                    }
                }
                (2, Some((buffer, BufferState::Transient))) => pool.release(layer, buffer),
                (3, _) => pool.cache_retiring(),
                (4, _) => {
                    pool.reuse(layer, expert);
                }
                (5, None) if random.bool() => pool.drop_cached(),
                _ => {}
            }
            let class = &pool.classes[0];
            for state in [BufferState::Free, BufferState::Transient, BufferState::Retiring, BufferState::Cached] {
                let own = (0..5).filter(|b| class.state(*b) == state).count();
                let list = match state {
                    BufferState::Free => &class.free,
                    BufferState::Transient => &class.transient,
                    BufferState::Retiring => &class.retiring,
                    _ => &class.cached,
                };
                assert_eq!(list.len(), own);
                assert!(list.iter().all(|b| class.state(*b) == state));
            }
            assert!(class.slots.iter().all(|b| class.state(*b) == BufferState::Resident));
        }
    }
}
