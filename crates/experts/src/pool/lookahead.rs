//! Look-ahead: experts that will probably be wanted are read while the disk has nothing else to do.

use super::ExpertPool;

impl ExpertPool {
    /// Predicts experts of a layer that will probably be asked for, the likeliest first. They are read when no other read is in flight, or, behind an ordered fetch,
    /// when no other read is left to begin. A second call for the same layer replaces predictions that are not being read yet.
    pub fn predict(&mut self, layer: usize, experts: &[u32]) {
        // Reads that are over are taken first, so that they do not count as in flight.
        self.reap(false);
        self.prediction.predict(layer, experts);
        self.read_ahead();
    }

    /// A layer asks for experts: counts which predictions were right.
    pub(super) fn count_predictions(&mut self, layer: usize, wanted: &[u32]) {
        self.prediction.queue.clear();
        if self.prediction.layer != layer {
            return;
        }
        let predicted = &self.prediction.experts;
        let right = predicted.iter().filter(|e| wanted.binary_search(e).is_ok()).count();
        self.stats.predicted += predicted.len() as u64;
        self.stats.predicted_right += right as u64;
        for expert in predicted {
            let slot = self.slot(layer, *expert as usize);
            if !slot.is_some_and(|slot| self.prediction.slots.contains(&slot)) {
                continue;
            }
            match wanted.binary_search(expert) {
                Ok(_) => self.stats.read_ahead += 1,
                Err(_) => self.stats.read_unused += 1,
            }
        }
        self.prediction.forget();
    }

    /// Releases look-ahead's slots. Those with a read in flight are free when it ends.
    pub(super) fn release_lookahead(&mut self) {
        while let Some(slot) = self.prediction.slots.pop() {
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
        while let Some((layer, expert)) = self.prediction.queue.pop_front() {
            let (layer, expert) = (layer as usize, expert as usize);
            if self.slot(layer, expert).is_some() {
                continue;
            }
            let Some(slot) = self.begin_read(layer, expert) else { break };
            self.prediction.slots.push(slot);
            self.slots[slot as usize].read_ahead = true;
        }
        self.submit();
    }
}
