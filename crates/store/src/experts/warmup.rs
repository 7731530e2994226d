//! Filling: while nobody wants anything, experts are read for which there is memory that is free. Nothing is evicted for it.

use super::store::ExpertStore;
use super::{Keep, layout::LayerLayout};

/// Experts that are handed to the disk together: some tens of milliseconds.
const AT_ONCE: usize = 16;

/// How far it has come.
pub(super) struct Warmup {
    /// By class: how many pairs of expert and layer it has passed, first all layers' first experts.
    passed: Vec<usize>,
    pairs: usize,
    /// Slots of each class that stay free, for what is asked for.
    spare: usize,
}

impl Warmup {
    /// `spare`: experts that a token takes at most.
    pub fn new(layers: &[LayerLayout], classes: usize, spare: usize) -> Warmup {
        let widest = layers.iter().map(LayerLayout::len).max().unwrap_or(0);
        Warmup { passed: vec![0; classes], pairs: widest * layers.len(), spare }
    }
}

impl ExpertStore {
    /// Reads some experts that are not in memory, as far as there is any that is free, and waits for them. Whether there may be more to read. One that cannot be read is
    /// left to whoever wants it.
    pub fn fill(&mut self) -> bool {
        let begun = (0..AT_ONCE).filter(|_| self.fill_next()).count();
        self.submit();
        while self.reads.in_flight() > 0 {
            self.reap(true);
        }
        begun > 0
    }

    /// Begins to read one, if one may be.
    fn fill_next(&mut self) -> bool {
        if self.keep != Keep::Slots {
            return false;
        }
        let next = (0..self.classes.len()).find_map(|class| self.next_to_fill(class));
        let Some(slot) = next.and_then(|(layer, expert)| self.place(layer, expert)) else { return false };
        self.stats.filled += 1;
        // The read holds it until it is over; of an expert without bytes there is none.
        self.let_go(slot);
        true
    }

    /// The next expert of a class that is nowhere in memory, if it may come there.
    fn next_to_fill(&mut self, class: usize) -> Option<(usize, usize)> {
        let layers = self.layers.len();
        if self.classes[class].residency.free() <= self.filling.spare {
            return None;
        }
        while self.filling.passed[class] < self.filling.pairs {
            let pair = self.filling.passed[class];
            let (expert, layer) = (pair / layers, pair % layers);
            self.filling.passed[class] += 1;
            if self.layers[layer].class == class && expert < self.layers[layer].len() && !self.is_there(layer, expert) {
                return Some((layer, expert));
            }
        }
        None
    }
}
