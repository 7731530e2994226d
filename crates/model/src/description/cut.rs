//! A part of a model: some of its layers, one after the other, for a machine that has those alone.

use anyhow::{Result, ensure};

use super::Description;
use super::layer_range::{Cut, LayerRange};

impl Description {
    /// The part with these layers. The embedding belongs to the first layer, and the head to the last.
    ///
    /// # Errors
    /// No layers, or more than there are; a model whose layers need others.
    pub fn cut(mut self, layers: LayerRange) -> Result<Description> {
        let all = self.layers.len();
        let LayerRange { from, to } = layers;
        ensure!(from < to && to <= all, "layers {from}..{to} of a model that has {all}");
        ensure!(self.per_layer.is_none(), "a model with embeddings for each layer cannot be divided by layers");
        ensure!(self.streams.is_none(), "a model with several residual streams cannot be divided by layers");
        let shares = self.attention_layers().any(|attention| attention.shared);
        ensure!(!shares, "a model whose layers share keys and values cannot be divided by layers");
        self.layers.truncate(to);
        self.layers.drain(..from);
        self.mtp = None;
        self.cut = Some(Cut { layers, all });
        Ok(self)
    }

    /// Whether the embedding belongs to it.
    pub fn begins(&self) -> bool {
        self.cut.is_none_or(|cut| cut.layers.from == 0)
    }

    /// Whether the head belongs to it.
    pub fn ends(&self) -> bool {
        self.cut.is_none_or(|cut| cut.layers.to == cut.all)
    }

    /// The number that a layer of the whole model has here, if it is one of these.
    pub(super) fn own_number(&self, layer: usize) -> Option<usize> {
        layer.checked_sub(self.cut.map_or(0, |cut| cut.layers.from))
    }

    /// The number that a layer has in the whole model.
    pub(super) fn whole_number(&self, layer: usize) -> usize {
        self.cut.map_or(0, |cut| cut.layers.from) + layer
    }
}
