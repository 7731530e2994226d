//! Buffers of a device for experts of one size: one state for each, which says all that is known of it. Bookkeeping by number; the device's backend copies.
//!
//! An expert that is copied to the device comes to a buffer as [`BufferState::Transient`]. If it is promoted, the buffer becomes that of its slot and stays where it
//! is; the slot's former buffer is [`BufferState::Demoting`] until its expert is copied back. All other buffers retire: the device may still use them in the step
//! under way. Once it does not, they are [`BufferState::Cached`]: their experts are found there without another copy until the buffers are taken.

/// (Layer, expert)
pub type ExpertId = (usize, usize);

/// What a buffer is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferState {
    /// It holds nothing.
    Free,
    /// It belongs to this slot of the device's tier, and holds the slot's expert.
    Resident(usize),
    /// It holds this expert for a layer that is being computed, or is about to be.
    Transient(ExpertId),
    /// It holds this expert, which has lost its slot and is being copied to the host.
    Demoting(ExpertId),
    /// It holds this expert, which is not needed any more; the device may still use it.
    Retiring(ExpertId),
    /// It holds this expert; it may be taken for another.
    Cached(ExpertId),
}

/// The buffers of a class of experts: one for each slot, and some for experts that pass through.
///
/// ```
/// use sluice_experts::{BufferPool, BufferState};
///
/// let mut pool = BufferPool::new(1, 2);
/// // An expert is copied to a buffer, and promoted to slot 0.
/// let buffer = pool.take((3, 7), |_| 0.0).unwrap();
/// let former = pool.promote(buffer, 0, None);
/// assert_eq!(pool.state(buffer), BufferState::Resident(0));
/// assert_eq!(pool.state(former), BufferState::Free);
/// ```
#[derive(Debug)]
pub struct BufferPool {
    states: Vec<BufferState>,
    /// By slot: its buffer.
    slots: Vec<u32>,
    /// Buffers that may be taken: free or cached.
    available: usize,
}

impl BufferPool {
    /// A buffer for each of `slots` slots, and `transient` more.
    pub fn new(slots: usize, transient: usize) -> BufferPool {
        let states = (0..slots).map(BufferState::Resident).chain((0..transient).map(|_| BufferState::Free)).collect();
        BufferPool { states, slots: (0..slots as u32).collect(), available: transient }
    }

    /// What a buffer is used for.
    pub fn state(&self, buffer: u32) -> BufferState {
        self.states[buffer as usize]
    }

    /// The buffer of a slot.
    pub fn of_slot(&self, slot: usize) -> u32 {
        self.slots[slot]
    }

    /// How many buffers may be taken.
    pub fn available(&self) -> usize {
        self.available
    }

    fn set(&mut self, buffer: u32, state: BufferState) {
        let is_available = |state| matches!(state, BufferState::Free | BufferState::Cached(_));
        let before = std::mem::replace(&mut self.states[buffer as usize], state);
        self.available += usize::from(is_available(state));
        self.available -= usize::from(is_available(before));
    }

    fn find(&self, mut is_it: impl FnMut(BufferState) -> bool) -> Option<u32> {
        self.states.iter().position(|state| is_it(*state)).map(|buffer| buffer as u32)
    }

    /// A buffer to copy an expert to: a free one, or else the cached one with the least `score`. `None` if there is neither. If another buffer holds the expert
    /// and nobody needs it there, it is freed: an expert is found in one place alone.
    pub fn take(&mut self, expert: ExpertId, score: impl Fn(ExpertId) -> f64) -> Option<u32> {
        let stale = |state| state == BufferState::Cached(expert) || state == BufferState::Retiring(expert);
        while let Some(buffer) = self.find(stale) {
            self.set(buffer, BufferState::Free);
        }
        let cached = |(buffer, state): (usize, &BufferState)| match state {
            BufferState::Cached(expert) => Some((score(*expert), buffer as u32)),
            _ => None,
        };
        let least = || {
            let all = self.states.iter().enumerate().filter_map(cached);
            all.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, buffer)| buffer)
        };
        let buffer = self.find(|state| state == BufferState::Free).or_else(least)?;
        self.set(buffer, BufferState::Transient(expert));
        Some(buffer)
    }

    /// The buffer where an expert is still found that is neither in a slot nor transient: it is transient from now on.
    pub fn reuse(&mut self, expert: ExpertId) -> Option<u32> {
        let buffer =
            self.find(|state| state == BufferState::Cached(expert) || state == BufferState::Retiring(expert))?;
        self.set(buffer, BufferState::Transient(expert));
        Some(buffer)
    }

    /// The expert in a transient buffer gets a slot, and the buffer with it. The slot's former buffer, which is returned, is that of the expert that is demoted, or
    /// free.
    ///
    /// # Panics
    /// When the buffer is not transient.
    pub fn promote(&mut self, buffer: u32, slot: usize, demoted: Option<ExpertId>) -> u32 {
        assert!(matches!(self.state(buffer), BufferState::Transient(_)), "only what was copied is promoted");
        let former = std::mem::replace(&mut self.slots[slot], buffer);
        self.set(buffer, BufferState::Resident(slot));
        self.set(former, demoted.map_or(BufferState::Free, BufferState::Demoting));
        former
    }

    /// An expert is not needed any more: its layer is computed, or it is copied back. The device may still use its buffer until [`BufferPool::settle`].
    ///
    /// # Panics
    /// When the buffer is neither transient nor demoting.
    pub fn retire(&mut self, buffer: u32) {
        match self.state(buffer) {
            BufferState::Transient(expert) | BufferState::Demoting(expert) => {
                self.set(buffer, BufferState::Retiring(expert));
            }
            other => panic!("a buffer is retired that is {other:?}"),
        }
    }

    /// What was copied to a transient buffer is of no use.
    ///
    /// # Panics
    /// When the buffer is not transient.
    pub fn discard(&mut self, buffer: u32) {
        assert!(matches!(self.state(buffer), BufferState::Transient(_)), "somebody needs this buffer");
        self.set(buffer, BufferState::Free);
    }

    /// The device uses nothing that has retired: it is idle, or waits and is told before it goes on.
    pub fn settle(&mut self) {
        for buffer in 0..self.states.len() as u32 {
            if let BufferState::Retiring(expert) = self.state(buffer) {
                self.set(buffer, BufferState::Cached(expert));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_buffer_is_two_things_and_no_expert_in_two_places() {
        let mut state = 1u64;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut pool = BufferPool::new(3, 5);
        // By slot: the expert that has it.
        let mut residents: [Option<ExpertId>; 3] = [None; 3];
        let (mut taken, mut reused, mut refused) = (0, 0, 0);
        for _ in 0..20_000 {
            let expert = (random(2), random(6));
            let buffer = random(8) as u32;
            let is_on_device = residents.contains(&Some(expert))
                || pool
                    .states
                    .iter()
                    .any(|s| [BufferState::Transient(expert), BufferState::Demoting(expert)].contains(s));
            match (random(6), pool.state(buffer)) {
                (0 | 1, _) if !is_on_device => match pool.reuse(expert) {
                    Some(_) => reused += 1,
                    None => {
                        let available = pool.available();
                        let got = pool.take(expert, |(_, e)| e as f64);
                        assert_eq!(got.is_some(), available > 0);
                        taken += usize::from(got.is_some());
                        refused += usize::from(got.is_none());
                    }
                },
                (2, BufferState::Transient(expert)) => {
                    let slot = random(3);
                    let (demoted, former) = (residents[slot], pool.of_slot(slot));
                    assert_eq!(pool.promote(buffer, slot, demoted), former);
                    residents[slot] = Some(expert);
                }
                (3, BufferState::Transient(_) | BufferState::Demoting(_)) => pool.retire(buffer),
                (4, BufferState::Transient(_)) => pool.discard(buffer),
                (5, _) => pool.settle(),
                _ => {}
            }
            // 1. Slots and buffers name each other
            for slot in 0..3 {
                assert_eq!(pool.state(pool.of_slot(slot)), BufferState::Resident(slot));
            }
            let is_resident = |s: &&BufferState| matches!(s, BufferState::Resident(_));
            assert_eq!(pool.states.iter().filter(is_resident).count(), 3);
            // 2. An expert is in one place alone
            let mut experts: Vec<ExpertId> = residents.iter().flatten().copied().collect();
            experts.extend(pool.states.iter().filter_map(|s| match s {
                BufferState::Transient(e) | BufferState::Demoting(e) => Some(*e),
                BufferState::Retiring(e) | BufferState::Cached(e) => Some(*e),
                BufferState::Free | BufferState::Resident(_) => None,
            }));
            let all = experts.len();
            experts.sort_unstable();
            experts.dedup();
            assert_eq!(experts.len(), all);
            // 3. The count is right
            let may_take = |s: &&BufferState| matches!(s, BufferState::Free | BufferState::Cached(_));
            assert_eq!(pool.available(), pool.states.iter().filter(may_take).count());
        }
        assert!(taken > 100 && reused > 100 && refused > 100, "{taken} {reused} {refused}");
    }

    #[test]
    fn free_buffers_are_taken_first_and_then_the_cached_one_with_the_least_score() {
        let mut pool = BufferPool::new(0, 3);
        let buffers = [4, 2, 9].map(|e| pool.take((0, e), |_| 0.0).unwrap());
        assert_eq!(pool.take((0, 1), |_| 0.0), None);
        buffers.iter().for_each(|b| pool.retire(*b));
        // The device may still use them.
        assert_eq!(pool.take((0, 1), |_| 0.0), None);
        pool.settle();
        assert_eq!(pool.reuse((0, 9)), Some(buffers[2]));
        assert_eq!(pool.take((0, 1), |(_, e)| e as f64), Some(buffers[1]));
    }
}
