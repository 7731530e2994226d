//! Look-ahead: experts that will probably be wanted are read while the disk has nothing else to do.

use std::collections::VecDeque;

use super::store::ExpertStore;

/// What is predicted.
pub(super) struct Ahead {
    /// (Layer, expert) to be read when nothing else is.
    pub queue: VecDeque<(u32, u32)>,
    /// Slots that look-ahead keeps: those whose `read_ahead` is set.
    pub slots: Vec<u32>,
    /// The layer they are for, and what was predicted for it.
    layer: usize,
    predicted: Vec<u32>,
}

impl Ahead {
    pub fn new() -> Ahead {
        Ahead {
            queue: VecDeque::with_capacity(1024),
            slots: Vec::with_capacity(64),
            layer: usize::MAX,
            predicted: Vec::with_capacity(64),
        }
    }
}

impl ExpertStore {
    /// Names experts of a layer that will probably be asked for, the likeliest first: they are read when no other read is in flight, or (behind an ordered
    /// fetch) none is left to begin with. A second call for the same layer replaces what has not been requested yet.
    pub fn predict(&mut self, layer: usize, experts: &[u32]) {
        // Completed reads are taken first, so that they do not count as in flight.
        self.reap(false);
        if self.ahead.layer != layer {
            self.ahead.predicted.clear();
        }
        self.ahead.layer = layer;
        self.ahead.queue.clear();
        for &expert in experts {
            self.ahead.queue.push_back((layer as u32, expert));
            if !self.ahead.predicted.contains(&expert) {
                self.ahead.predicted.push(expert);
            }
        }
        self.look_ahead();
    }

    /// Counts which predictions were right.
    pub(super) fn count_predictions(&mut self, layer: usize, wanted: &[u32]) {
        self.ahead.queue.clear();
        if self.ahead.layer != layer {
            return;
        }
        let right = self.ahead.predicted.iter().filter(|e| wanted.binary_search(e).is_ok()).count();
        self.stats.predicted += self.ahead.predicted.len() as u64;
        self.stats.predicted_right += right as u64;
        for i in 0..self.ahead.predicted.len() {
            let expert = self.ahead.predicted[i];
            if !self.slot(layer, expert as usize).is_some_and(|slot| self.ahead.slots.contains(&slot)) {
                continue;
            }
            match wanted.binary_search(&expert) {
                Ok(_) => self.stats.read_ahead += 1,
                Err(_) => self.stats.read_in_vain += 1,
            }
        }
        self.ahead.layer = usize::MAX;
        self.ahead.predicted.clear();
    }

    /// Look-ahead releases its slots; those with a read in flight are free when it ends.
    pub(super) fn release_read_ahead(&mut self) {
        while let Some(slot) = self.ahead.slots.pop() {
            self.state(slot).read_ahead = false;
            self.let_go(slot);
        }
    }

    /// Begins to read what look-ahead named, if nothing else is read.
    pub(super) fn look_ahead(&mut self) {
        // In order, the reads in flight will be consumed in time, and reading ahead keeps the disk busy between layers.
        if self.reads.in_flight() > 0 && !self.goes_in_order() || self.is_missing_some() {
            return;
        }
        while let Some((layer, expert)) = self.ahead.queue.pop_front() {
            let (layer, expert) = (layer as usize, expert as usize);
            if self.slot(layer, expert).is_some() {
                continue;
            }
            let Some(slot) = self.place(layer, expert) else { break };
            self.ahead.slots.push(slot);
            self.state(slot).read_ahead = true;
        }
        self.submit();
    }
}
