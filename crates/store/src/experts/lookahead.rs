//! Look-ahead: experts that will probably be wanted are read while the disk has nothing else to do.

use std::collections::VecDeque;

use super::store::ExpertStore;

/// What is foreseen.
pub(super) struct Ahead {
    /// (Layer, expert) to be read when nothing else is.
    pub queue: VecDeque<(u32, u32)>,
    /// Slots that look-ahead keeps: those that say so themselves.
    pub slots: Vec<u32>,
    /// Whom they are for, and what was foreseen for it.
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
    /// fetch) none is left to begin with. Said again of the same layer, it takes the place of what has not begun.
    pub fn foresee(&mut self, layer: usize, experts: &[u32]) {
        // Reads that are over by now do not keep these waiting.
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

    /// Counts what was foreseen.
    pub(super) fn settle_foreseen(&mut self, layer: usize, wanted: &[u32]) {
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
                Ok(_) => self.stats.foreseen += 1,
                Err(_) => self.stats.read_in_vain += 1,
            }
        }
        self.ahead.layer = usize::MAX;
        self.ahead.predicted.clear();
    }

    /// Look-ahead gives its slots back; those that are still written to are free when that is over.
    pub(super) fn give_up_foreseen(&mut self) {
        while let Some(slot) = self.ahead.slots.pop() {
            self.state(slot).foreseen = false;
            self.let_go(slot);
        }
    }

    /// Begins to read what look-ahead named, if nothing else is read.
    pub(super) fn look_ahead(&mut self) {
        // In order, what is in flight will be used up in time, and the disk need not pause between layers.
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
            self.state(slot).foreseen = true;
        }
        self.submit();
    }
}
