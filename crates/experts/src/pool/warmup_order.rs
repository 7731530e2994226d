//! In which order warm-up reads experts.

use crate::layout::LayerLayout;

/// All pairs of layer and expert, first all layers' first experts, and how far each class has come.
pub(super) struct WarmupOrder {
    /// By class: pairs that it has passed.
    passed: Vec<usize>,
    layers: usize,
    pairs: usize,
    /// Slots of each class that stay free, for experts that are asked for.
    pub spare: usize,
}

impl WarmupOrder {
    /// `spare`: the most experts of a layer that a token wants.
    pub fn new(layers: &[LayerLayout], classes: usize, spare: usize) -> WarmupOrder {
        let widest = layers.iter().map(LayerLayout::len).max().unwrap_or(0);
        WarmupOrder { passed: vec![0; classes], layers: layers.len(), pairs: widest * layers.len(), spare }
    }

    /// The next (layer, expert) that this class has not passed, in the order for all classes. A layer may have fewer experts than that.
    pub fn next(&mut self, class: usize) -> Option<(usize, usize)> {
        let passed = &mut self.passed[class];
        if *passed == self.pairs {
            return None;
        }
        let pair = *passed;
        *passed += 1;
        Some((pair % self.layers, pair / self.layers))
    }
}
