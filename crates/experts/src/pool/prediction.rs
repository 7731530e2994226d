//! Which experts of the next layer are predicted, and which slots were read for that.

use std::collections::VecDeque;

/// Stands for no layer.
const NONE: usize = usize::MAX;

/// The predicted experts, and the slots that were read for them.
pub(super) struct Prediction {
    /// (Layer, expert) that are read when nothing else is.
    pub queue: VecDeque<(u32, u32)>,
    /// Slots that look-ahead keeps: those with `read_ahead` set.
    pub slots: Vec<u32>,
    /// The layer that was predicted, if one was.
    pub layer: usize,
    /// The experts that were predicted for it.
    pub experts: Vec<u32>,
}

impl Prediction {
    /// Nothing is predicted.
    pub fn new() -> Prediction {
        Prediction {
            queue: VecDeque::with_capacity(1024),
            slots: Vec::with_capacity(64),
            layer: NONE,
            experts: Vec::with_capacity(64),
        }
    }

    /// Adds to what is predicted of a layer, and forgets other layers. What was predicted before and is not being read yet is replaced.
    pub fn predict(&mut self, layer: usize, experts: &[u32]) {
        if self.layer != layer {
            self.experts.clear();
        }
        self.layer = layer;
        self.queue.clear();
        for &expert in experts {
            self.queue.push_back((layer as u32, expert));
            if !self.experts.contains(&expert) {
                self.experts.push(expert);
            }
        }
    }

    /// Nothing is predicted any more.
    pub fn forget(&mut self) {
        self.layer = NONE;
        self.experts.clear();
    }
}
