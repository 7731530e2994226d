//! Host memory in slots, by class: one class for each cache group, and a last one for recurrent states.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sluice_store::Memory;

use crate::tiers::block_io::BlockIo;

/// Memory is taken in runs of this many bytes at most, and of this part of the budget at most, so that no class gets everything. A run has one
/// slot at least.
const RUN: usize = 64 << 20;
const RUN_PART: usize = 32;

/// A slot with the bytes of one block or state. Dropping it frees the slot.
pub(crate) struct Slot {
    pub class: usize,
    at: Location,
    free: Arc<Mutex<FreeLists>>,
}

#[derive(Clone, Copy)]
struct Location {
    run: usize,
    offset: usize,
}

/// Free slots: `[classes]`.
type FreeLists = Vec<Vec<Location>>;

fn lock(free: &Mutex<FreeLists>) -> MutexGuard<'_, FreeLists> {
    free.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.free)[self.class].push(self.at);
    }
}

/// All slots within a budget of bytes, which are taken from the system as they are needed.
pub(super) struct Slots {
    budget: usize,
    /// Bytes of a slot: `[classes]`.
    sizes: Vec<usize>,
    /// How many slots there are: `[classes]`.
    counts: Vec<usize>,
    runs: Vec<Box<dyn Memory>>,
    free: Arc<Mutex<FreeLists>>,
}

impl Slots {
    /// `sizes`: bytes of a slot of each class.
    pub fn new(sizes: Vec<usize>, budget: u64) -> Slots {
        Slots {
            budget: usize::try_from(budget).unwrap_or(usize::MAX),
            counts: vec![0; sizes.len()],
            runs: Vec::new(),
            free: Arc::new(Mutex::new(vec![Vec::new(); sizes.len()])),
            sizes,
        }
    }

    /// Bytes of a slot of this class.
    pub fn size(&self, class: usize) -> usize {
        self.sizes[class]
    }

    /// Whether the class has slots, free or not.
    pub fn has_any(&self, class: usize) -> bool {
        self.counts[class] > 0
    }

    /// The bytes of a slot: `[size(class)]`.
    pub fn bytes(&mut self, slot: &Slot) -> &mut [u8] {
        &mut self.runs[slot.at.run].bytes_mut()[slot.at.offset..][..self.sizes[slot.class]]
    }

    /// A free slot of this class. Takes more memory if there is none and the budget allows it.
    pub fn alloc(&mut self, class: usize, io: &mut dyn BlockIo) -> Option<Slot> {
        let mut at = lock(&self.free)[class].pop();
        if at.is_none() && self.grow(class, io) {
            at = lock(&self.free)[class].pop();
        }
        at.map(|at| Slot { class, at, free: Arc::clone(&self.free) })
    }

    /// Takes a run of whole slots. The last run before the budget's end may be a short one.
    fn grow(&mut self, class: usize, io: &mut dyn BlockIo) -> bool {
        let len = self.sizes[class];
        let taken: usize = self.runs.iter().map(|run| run.len()).sum();
        let left = self.budget.saturating_sub(taken) / len;
        let slots = left.min((RUN.min(self.budget / RUN_PART) / len).max(1));
        if slots == 0 {
            return false;
        }
        let Ok(memory) = io.host_memory(slots * len) else { return false };
        let run = self.runs.len();
        lock(&self.free)[class].extend((0..slots).map(|i| Location { run, offset: i * len }));
        self.runs.push(memory);
        self.counts[class] += slots;
        true
    }
}
