//! Warm-up: while nobody wants anything, experts are read into slots that are free. Nothing is evicted for it.

use super::ExpertPool;
use crate::options::Keep;

/// Experts that are read together, which takes some tens of milliseconds.
const AT_ONCE: usize = 16;

impl ExpertPool {
    /// Reads some experts that are not in memory into free slots, and waits for them. Returns whether there may be more to read. An expert that cannot be read
    /// is left for the layer that wants it.
    pub fn warm_up(&mut self) -> bool {
        let begun = (0..AT_ONCE).filter(|_| self.begin_next()).count();
        self.submit();
        while self.reads.in_flight() > 0 {
            self.reap(true);
        }
        begun > 0
    }

    /// Begins to read one expert, if there is one to read.
    fn begin_next(&mut self) -> bool {
        if self.keep != Keep::Slots {
            return false;
        }
        let next = (0..self.classes.len()).find_map(|class| self.next_to_read(class));
        let Some(slot) = next.and_then(|(layer, expert)| self.begin_read(layer, expert)) else { return false };
        self.stats.warmed_up += 1;
        // The read keeps the slot until it is over; for an expert without bytes there is none.
        self.unpin_if_unused(slot);
        true
    }

    /// The next expert of a class that is in no tier, if a slot can be spared for it.
    fn next_to_read(&mut self, class: usize) -> Option<(usize, usize)> {
        if self.classes[class].residency.free_slots() <= self.warmup_order.spare {
            return None;
        }
        while let Some((layer, expert)) = self.warmup_order.next(class) {
            if self.layers[layer].class == class
                && expert < self.layers[layer].len()
                && !self.is_resident(layer, expert)
            {
                return Some((layer, expert));
            }
        }
        None
    }
}
