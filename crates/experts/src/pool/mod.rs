//! The pool: experts that layers ask for, found in slots or read into them.
//!
//! Three parts know nothing of each other. [`Residency`] knows which expert has which slot, and which has to go. `reads` fills slots from disk. `fetch` is what a
//! layer has asked for. The pool puts them together; the state of a slot is one [`SlotState`].

mod demand;
mod fetch;
mod lookahead;
mod open;
mod prediction;
mod reads;
mod slots;
mod tiers;
mod warmup;
mod warmup_order;

use std::sync::Arc;
use std::time::Instant;

use sluice_store::{Error, Memory};

use crate::layout::LayerLayout;
use crate::options::{ExpertStats, Keep};
use crate::residency::Residency;
use fetch::{Fetch, Item};
pub use fetch::{FetchId, Next};
use prediction::Prediction;
use reads::Reads;
use slots::{Slot, SlotGuard, SlotState, Ticket};
pub use slots::{SlotClass, no_faster};
pub use tiers::{PinnedExpert, TierMove};
use warmup_order::WarmupOrder;

/// Slots of one size, of the faster tier and of the memory here.
struct ClassPool {
    /// Never read or written but through the guards of its slots.
    memory: Box<dyn Memory>,
    residency: Residency,
    /// Number of its first slot among those of all classes. The faster tier's come first; they have no memory here.
    first: u32,
    /// Slots of the faster tier.
    fast: u32,
    /// Experts of all layers.
    experts: u32,
}

/// As many experts as a budget allows, in slots of memory that the pool is lent. Those that are missing are read, all at once, and each is handed over when its
/// read is complete, so that some are computed while others are still being read.
pub struct ExpertPool {
    // Before the memory: dropping it waits for what is in flight.
    reads: Reads,
    layers: Vec<LayerLayout>,
    classes: Vec<ClassPool>,
    slot_classes: Vec<SlotClass>,
    slots: Vec<Slot>,
    keep: Keep,
    fetches: Vec<Fetch>,
    /// Fetches that were begun.
    begun: u64,
    prediction: Prediction,
    warmup_order: WarmupOrder,
    stats: ExpertStats,
    reading_since: Option<Instant>,
    /// Kept, so that nothing is allocated.
    finished: Vec<(Ticket, SlotGuard, Result<(), Error>)>,
}

impl ExpertPool {
    /// Allocates a slot for an expert that has none and queues its read. `None` if all slots are needed.
    fn begin_read(&mut self, layer: usize, expert: usize) -> Option<u32> {
        let class = &mut self.classes[self.layers[layer].class];
        let slot = class.first + class.residency.allocate(layer, expert)?;
        let state = &mut self.slots[slot as usize];
        debug_assert!(!state.is_needed());
        let counts = (&mut self.stats.read_bytes, &mut self.stats.reads);
        state.state = match self.reads.begin(self.layers[layer].extents(expert), state.take_guard(), counts) {
            Ok(ticket) => SlotState::Reading(ticket),
            Err(guard) => SlotState::Ready(guard),
        };
        Some(slot)
    }

    /// Begins with the reads that are queued.
    fn submit(&mut self) {
        if self.reads.in_flight() > 0 {
            if self.reading_since.is_none() {
                self.reading_since = Some(Instant::now());
            }
            self.reads.submit();
        }
    }

    /// Takes reads that are over; with `wait` waits until a request is complete.
    fn reap(&mut self, wait: bool) {
        let mut finished = std::mem::take(&mut self.finished);
        self.reads.reap(wait, |ticket, guard, result| finished.push((ticket, guard, result)));
        for (ticket, guard, result) in finished.drain(..) {
            let slot = &mut self.slots[ticket.slot as usize];
            debug_assert_eq!(slot.ticket(), Some(ticket));
            slot.state = SlotState::Ready(guard);
            self.finish_read(ticket, result.err().map(Arc::new));
        }
        self.finished = finished;
        if self.reads.in_flight() == 0
            && let Some(since) = self.reading_since.take()
        {
            self.stats.reading += since.elapsed();
        }
    }

    /// Notes that a read is over, in all fetches that wait for it.
    fn finish_read(&mut self, ticket: Ticket, error: Option<Arc<Error>>) {
        for fetch in self.fetches.iter_mut().filter(|f| f.waits()) {
            for i in fetch.next..fetch.items.len() {
                if fetch.items[i] == Item::Reading(ticket) {
                    match &error {
                        None => fetch.items[i] = Item::Ready(ticket.slot),
                        Some(error) => fetch.fail(i, Arc::clone(error)),
                    }
                }
            }
        }
        match error {
            None => self.unpin_if_unused(ticket.slot),
            // No fetch may find it. If only look-ahead wanted it, that is no error: it is read again when it is wanted.
            Some(_) => {
                self.slots[ticket.slot as usize].users = 0;
                self.discard(ticket.slot);
            }
        }
    }

    /// Frees a slot whose expert nobody but look-ahead needs.
    fn discard(&mut self, slot: u32) {
        let state = &mut self.slots[slot as usize];
        debug_assert!(matches!(state.state, SlotState::Ready(_)) && state.users == 0);
        state.read_ahead = false;
        self.prediction.slots.retain(|s| *s != slot);
        let class = self.class_of_slot(slot);
        class.residency.discard(slot - class.first);
    }

    /// Allows a slot's expert to be evicted, unless somebody needs it.
    fn unpin_if_unused(&mut self, slot: u32) {
        if self.slots[slot as usize].is_needed() {
            return;
        }
        // The page cache keeps it. With a faster tier above, a few stay in slots for as long as they may be promoted.
        if self.keep == Keep::PageCache && self.class_of_slot(slot).fast == 0 {
            return self.discard(slot);
        }
        let class = self.class_of_slot(slot);
        class.residency.unpin(slot - class.first);
    }

    /// The class that a slot belongs to.
    fn class_of_slot(&mut self, slot: u32) -> &mut ClassPool {
        let number = self.classes.partition_point(|c| c.first <= slot) - 1;
        &mut self.classes[number]
    }

    /// The slot of an expert that has one.
    fn slot(&self, layer: usize, expert: usize) -> Option<u32> {
        let class = &self.classes[self.layers[layer].class];
        class.residency.slot(layer, expert).map(|slot| class.first + slot)
    }

    /// Bytes of memory: slots, and the tables that find experts and choose among them.
    pub fn bytes(&self) -> usize {
        let classes = self.classes.iter().map(|c| c.memory.len() + c.residency.bookkeeping_bytes());
        let tables = classes.chain(self.layers.iter().map(LayerLayout::table_bytes)).sum::<usize>();
        tables + size_of_val(&*self.slots) + Reads::bytes(self.slots.len())
    }

    /// Whether reads are in flight.
    pub fn is_reading(&self) -> bool {
        self.reads.in_flight() > 0
    }

    /// Slots in memory here, and experts of all layers.
    pub fn slots(&self) -> (usize, usize) {
        (self.slots.len() - self.fast_slots(), self.layers.iter().map(LayerLayout::len).sum())
    }

    /// Bytes of the arrays of all experts on disk.
    pub fn file_bytes(&self) -> u64 {
        self.layers.iter().map(|l| l.bytes).sum()
    }

    /// What was counted since the last call.
    pub fn take_stats(&mut self) -> ExpertStats {
        std::mem::take(&mut self.stats)
    }

    /// What reading fell back on, a clause each.
    pub fn notes(&self) -> &[String] {
        self.reads.notes()
    }

    /// How experts are read, for people.
    pub fn reader(&self) -> &'static str {
        match (self.reads.is_ring(), self.keep) {
            (true, Keep::Slots) => "io_uring, direct",
            (true, Keep::PageCache) => "io_uring, buffered",
            (false, Keep::Slots) => "threads, direct",
            (false, Keep::PageCache) => "threads, buffered",
        }
    }
}
