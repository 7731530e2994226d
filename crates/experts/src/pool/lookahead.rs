//! Look-ahead: experts that will probably be wanted are read while the disk has nothing else to do.

use std::collections::VecDeque;

use super::ExpertPool;

/// What is predicted, and what was read for it.
pub(super) struct Lookahead {
    /// (Layer, expert) that are read when nothing else is.
    pub queue: VecDeque<(u32, u32)>,
    /// Slots that look-ahead keeps: those with `read_ahead` set.
    pub slots: Vec<u32>,
    /// The layer that was predicted; `usize::MAX` if none.
    layer: usize,
    /// The experts that were predicted for it.
    predicted: Vec<u32>,
}

impl Lookahead {
    /// Nothing is predicted.
    pub fn new() -> Lookahead {
        Lookahead {
            queue: VecDeque::with_capacity(1024),
            slots: Vec::with_capacity(64),
            layer: usize::MAX,
            predicted: Vec::with_capacity(64),
        }
    }
}

impl ExpertPool {
    /// Predicts experts of a layer that will probably be asked for, the likeliest first. They are read when no other read is in flight, or, behind an ordered fetch,
    /// when no other read is left to begin. A second call for the same layer replaces predictions that are not being read yet.
    pub fn predict(&mut self, layer: usize, experts: &[u32]) {
        // Reads that are over are taken first, so that they do not count as in flight.
        self.reap(false);
        if self.lookahead.layer != layer {
            self.lookahead.predicted.clear();
        }
        self.lookahead.layer = layer;
        self.lookahead.queue.clear();
        for &expert in experts {
            self.lookahead.queue.push_back((layer as u32, expert));
            if !self.lookahead.predicted.contains(&expert) {
                self.lookahead.predicted.push(expert);
            }
        }
        self.read_ahead();
    }

    /// Counts which predictions were right.
    pub(super) fn count_predictions(&mut self, layer: usize, wanted: &[u32]) {
        self.lookahead.queue.clear();
        if self.lookahead.layer != layer {
            return;
        }
        let right = self.lookahead.predicted.iter().filter(|e| wanted.binary_search(e).is_ok()).count();
        self.stats.predicted += self.lookahead.predicted.len() as u64;
        self.stats.predicted_right += right as u64;
        for i in 0..self.lookahead.predicted.len() {
            let expert = self.lookahead.predicted[i];
            if !self.slot(layer, expert as usize).is_some_and(|slot| self.lookahead.slots.contains(&slot)) {
                continue;
            }
            match wanted.binary_search(&expert) {
                Ok(_) => self.stats.read_ahead += 1,
                Err(_) => self.stats.read_in_vain += 1,
            }
        }
        self.lookahead.layer = usize::MAX;
        self.lookahead.predicted.clear();
    }

    /// Releases look-ahead's slots. Those with a read in flight are free when it ends.
    pub(super) fn release_lookahead(&mut self) {
        while let Some(slot) = self.lookahead.slots.pop() {
            self.slots[slot as usize].read_ahead = false;
            self.unpin_if_unused(slot);
        }
    }

    /// Begins to read what was predicted, if nothing else is read.
    pub(super) fn read_ahead(&mut self) {
        // Reads of an ordered fetch will be used in time anyway, and reading ahead keeps the disk busy between layers.
        if self.reads.in_flight() > 0 && !self.goes_in_order() || self.is_missing_some() {
            return;
        }
        while let Some((layer, expert)) = self.lookahead.queue.pop_front() {
            let (layer, expert) = (layer as usize, expert as usize);
            if self.slot(layer, expert).is_some() {
                continue;
            }
            let Some(slot) = self.begin_read(layer, expert) else { break };
            self.lookahead.slots.push(slot);
            self.slots[slot as usize].read_ahead = true;
        }
        self.submit();
    }
}
