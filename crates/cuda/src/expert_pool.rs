//! Room on the device for experts: buffers of one size, of which some are slots in which experts stay, and the others are for those of a layer that pass through.
//! Bookkeeping by number. An expert that comes to stay keeps the buffer that it was copied to, and what had been in its slot has that slot's buffer until it is copied back.

use std::ops::Range;

use sluice_experts::SlotClass;

use crate::memory::ALIGNMENT;
use crate::parameters::PROJECTIONS;
use crate::weights::ARRAYS;

/// Arrays of an expert: those of each projection.
pub const EXPERT_ARRAYS: usize = PROJECTIONS * ARRAYS;
/// What kernels want arrays aligned to; the largest begins at a multiple of [`ALIGNMENT`].
const WORD: usize = 16;
/// Part of the room that two layers' passing experts may take: prompts are up to twice as quick where the next layer's come while one computes.
const MOST_PASSING: u64 = 4;

/// Buffers of one size: how many stay and how many pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// Bytes from buffer to buffer.
    pub stride: usize,
    pub slots: usize,
    pub passing: usize,
}

impl Division {
    pub fn bytes(&self) -> u64 {
        (self.slots + self.passing) as u64 * self.stride as u64
    }
}

/// Bytes of a buffer that an expert of so many in its slot is copied to.
fn stride(bytes: usize) -> usize {
    (bytes + EXPERT_ARRAYS * ALIGNMENT).next_multiple_of(ALIGNMENT)
}

/// Divides `budget` bytes: a layer's experts must be able to pass, whatever the budget; if that is little beside it, those of two layers; the rest stays.
pub fn divide(classes: &[SlotClass], budget: u64) -> Vec<Division> {
    let all = |of: &dyn Fn(&SlotClass) -> usize| -> u64 {
        classes.iter().map(|c| (of(c) as u64).saturating_mul(stride(c.bytes) as u64)).fold(0, u64::saturating_add)
    };
    let twice = |c: &SlotClass| (2 * c.widest).min(c.experts);
    let two = all(&twice) <= budget / MOST_PASSING;
    let passing = |c: &SlotClass| if two { twice(c) } else { c.widest };
    let (rest, experts) = (budget.saturating_sub(all(&passing)), all(&|c| c.experts).max(1));
    let slots = |c: &SlotClass| (c.experts as u128 * u128::from(rest) / u128::from(experts)).min(c.experts as u128);
    let one = |c: &SlotClass| Division { stride: stride(c.bytes), slots: slots(c) as usize, passing: passing(c) };
    classes.iter().map(one).collect()
}

/// Buffers of a class.
#[derive(Debug)]
pub struct Rooms {
    /// By slot: its buffer.
    slots: Vec<u32>,
    free: Vec<u32>,
}

impl Rooms {
    pub fn new(division: &Division) -> Rooms {
        let (slots, all) = (division.slots as u32, (division.slots + division.passing) as u32);
        Rooms { slots: (0..slots).collect(), free: (slots..all).rev().collect() }
    }

    /// A buffer for an expert that passes.
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    pub fn give_back(&mut self, buffer: u32) {
        debug_assert!(!self.free.contains(&buffer) && !self.slots.contains(&buffer));
        self.free.push(buffer);
    }

    /// What is in a buffer stays in this slot from now on. The buffer that was the slot's, for what falls.
    pub fn stay(&mut self, slot: usize, buffer: u32) -> u32 {
        std::mem::replace(&mut self.slots[slot], buffer)
    }

    /// How many are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }
}

/// How an expert lies in a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertLayout {
    /// Where each array begins.
    pub at: [usize; EXPERT_ARRAYS],
    /// What is copied: of the slot, to where in the buffer.
    pub runs: Vec<(Range<usize>, usize)>,
}

impl ExpertLayout {
    /// As in its slot, where its arrays have these places, only a bit further on, so that they are aligned: one copy. Where they are not alike in that, array by array.
    pub fn of(parts: &[Range<usize>; EXPERT_ARRAYS]) -> ExpertLayout {
        let there = || parts.iter().filter(|p| !p.is_empty());
        let Some(largest) = there().max_by_key(|p| (p.len(), std::cmp::Reverse(p.start))) else {
            return ExpertLayout { at: [0; EXPERT_ARRAYS], runs: Vec::new() };
        };
        let shift = largest.start.next_multiple_of(ALIGNMENT) - largest.start;
        if there().all(|p| (p.start + shift).is_multiple_of(WORD)) {
            let from = there().map(|p| p.start).min().unwrap_or(0);
            let to = there().map(|p| p.end).max().unwrap_or(0);
            let at = std::array::from_fn(|i| if parts[i].is_empty() { 0 } else { parts[i].start + shift });
            return ExpertLayout { at, runs: vec![(from..to, from + shift)] };
        }
        let (mut at, mut end, mut runs) = ([0; EXPERT_ARRAYS], 0, Vec::new());
        for (at, part) in at.iter_mut().zip(parts).filter(|(_, part)| !part.is_empty()) {
            *at = end;
            runs.push((part.clone(), end));
            end += part.len().next_multiple_of(ALIGNMENT);
        }
        ExpertLayout { at, runs }
    }

    /// Bytes that are copied.
    pub fn bytes(&self) -> usize {
        self.runs.iter().map(|(from, _)| from.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASSES: [SlotClass; 2] =
        [SlotClass { bytes: 3 << 20, experts: 96, widest: 16 }, SlotClass { bytes: 1 << 20, experts: 8, widest: 8 }];

    #[test]
    fn a_budget_is_held_once_a_layer_can_pass() {
        let bytes = |d: &[Division]| d.iter().map(Division::bytes).sum::<u64>();
        let least = bytes(&divide(&CLASSES, 0));
        assert_eq!(divide(&CLASSES, 0).iter().map(|d| (d.slots, d.passing)).collect::<Vec<_>>(), [(0, 16), (0, 8)]);
        let mut before = 0;
        for budget in (0..1000).map(|mib| mib << 20) {
            let divided = divide(&CLASSES, budget);
            assert!(bytes(&divided) <= budget.max(least), "{budget}: {divided:?}");
            let slots: usize = divided.iter().map(|d| d.slots).sum();
            // But where a second layer's experts get room.
            assert!(slots + 24 >= before, "{budget}: {slots} slots after {before}");
            before = slots;
        }
        let all = divide(&CLASSES, u64::MAX);
        assert_eq!(all.iter().map(|d| (d.slots, d.passing)).collect::<Vec<_>>(), [(96, 32), (8, 8)]);
        assert!(divide(&[], 7).is_empty());
    }

    #[test]
    fn no_buffer_is_two_things() {
        let mut rooms = Rooms::new(&Division { stride: 1, slots: 2, passing: 3 });
        let [a, b, c] = [(); 3].map(|()| rooms.take().unwrap());
        assert_eq!((rooms.take(), rooms.free()), (None, 0));
        let old = rooms.stay(1, b);
        rooms.give_back(old);
        rooms.give_back(c);
        let mut seen = vec![a, rooms.take().unwrap(), rooms.take().unwrap()];
        seen.extend(&rooms.slots);
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3, 4]);
    }

    fn parts(starts: [usize; EXPERT_ARRAYS], lens: [usize; EXPERT_ARRAYS]) -> [Range<usize>; EXPERT_ARRAYS] {
        std::array::from_fn(|i| starts[i]..starts[i] + lens[i])
    }

    #[test]
    fn an_expert_is_one_copy_where_its_arrays_can_be_aligned_together() {
        // As stacked tensors behind a header of 8 bytes modulo 16.
        let starts =
            [0, 5000, 10_000, 20_000, 25_000, 30_000, 40_000, 45_000, 50_000].map(|at: usize| at / 16 * 16 + 8);
        let lens = [4000, 500, 500, 4000, 500, 500, 4000, 500, 500];
        let lie = ExpertLayout::of(&parts(starts, lens));
        assert_eq!(lie.runs, [(8..50_000 + 508, 256)]);
        assert!(lie.at.iter().all(|at| at % 16 == 0) && lie.at[0] == 256);
        // From two files.
        let mut apart = starts;
        apart[4] += 2;
        let lie = ExpertLayout::of(&parts(apart, lens));
        assert_eq!((lie.runs.len(), lie.bytes()), (9, lens.iter().sum()));
        assert!(lie.at.iter().all(|at| at % ALIGNMENT == 0));
        // Floats have elements alone.
        let lie = ExpertLayout::of(&parts(starts, [4000, 0, 0, 4000, 0, 0, 4000, 0, 0]));
        assert_eq!((lie.runs.len(), lie.at[1]), (1, 0));
    }

    #[test]
    fn whatever_an_expert_is_made_of_it_fits_its_buffer() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..2000 {
            let (mut end, step) = (0, [1, 2, 16][random.usize(..3)]);
            let parts: [Range<usize>; EXPERT_ARRAYS] = std::array::from_fn(|_| {
                let start = end + random.usize(..300) / step * step;
                end = start + if random.u8(..4) == 0 { 0 } else { (1 + random.usize(..3000)) / step * step };
                start..end
            });
            let lie = ExpertLayout::of(&parts);
            let stride = stride(end.next_multiple_of(4096));
            for (array, part) in parts.iter().enumerate().filter(|(_, p)| !p.is_empty()) {
                assert!(lie.at[array].is_multiple_of(WORD) && lie.at[array] + part.len() <= stride);
                // It is copied to where it is said to lie.
                let copied = |(from, to): &(Range<usize>, usize)| {
                    from.start <= part.start && part.end <= from.end && lie.at[array] == to + part.start - from.start
                };
                assert!(lie.runs.iter().any(copied));
            }
            assert!(lie.runs.iter().all(|(from, to)| to + from.len() <= stride));
        }
    }
}
