//! A model's parameters by part, and the elements of its keys, values and states, from its config.

use std::collections::BTreeMap;

use sluice_model::{Description, WeightClass};

/// Parameters and dimensions of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    pub layers: usize,
    pub expert_layers: usize,
    /// Per layer and per token; 0 without experts.
    pub experts: usize,
    pub k: usize,
    /// Parameters of one routed expert.
    pub per_expert: u64,
    pub embedding: u64,
    /// Tables of which a token reads a row, and which stay on disk.
    pub tables: u64,
    /// The output head; 0 where it is the embedding.
    pub head: u64,
    /// Matrices that every token uses, without embedding and head: attention, recurrent layers, shared experts, dense layers.
    pub dense: u64,
    /// Routers and gates of shared experts, which stay at 8 bits.
    pub routers: u64,
    /// Norms, convolutions and other vectors, which stay as they are.
    pub vectors: u64,
    /// Elements of keys and values per position.
    pub kv_elements: u64,
    /// Of these, what layers with a window keep of that many last positions alone: (positions, elements).
    pub kv_windows: Vec<(u64, u64)>,
    /// f32 elements of a conversation's recurrent states.
    pub state_elements: u64,
    pub vocabulary: u64,
    pub max_context: u64,
}

impl Shape {
    /// The shape of the model that a config describes.
    ///
    /// # Errors
    /// A key that is missing or wrong.
    #[cfg(test)]
    pub fn read(config: &sluice_model::Config) -> anyhow::Result<Shape> {
        Ok(Shape::of(&sluice_model::describe(config, &sluice_model::Options::default())?))
    }

    pub fn of(d: &Description) -> Shape {
        let (experts, k) = d.experts().unwrap_or_default();
        let mut by_class = BTreeMap::<WeightClass, u64>::new();
        d.weights().for_each(|w| *by_class.entry(w.class).or_default() += w.elements());
        let of = |class| by_class.get(&class).copied().unwrap_or(0);
        let expert_layers = d.moe_layers().count();
        let all_experts = (expert_layers * experts).max(1) as u64;
        Shape {
            layers: d.layers.len(),
            expert_layers,
            experts,
            k,
            per_expert: of(WeightClass::Expert) / all_experts,
            embedding: of(WeightClass::Embedding),
            tables: by_class.iter().filter(|(class, _)| class.is_table()).map(|(_, n)| n).sum(),
            head: of(WeightClass::Head),
            dense: by_class.iter().filter(|(class, _)| class.is_dense()).map(|(_, n)| n).sum(),
            routers: of(WeightClass::Router),
            vectors: of(WeightClass::Vector),
            kv_elements: d.kv_elements() as u64,
            kv_windows: d.groups().iter().filter_map(|g| Some((g.window()? as u64, g.elements() as u64))).collect(),
            state_elements: d.state_len() as u64,
            vocabulary: d.vocabulary as u64,
            max_context: d.max_context as u64,
        }
    }

    /// Elements of keys and values of so many positions.
    pub fn cache_elements(&self, positions: u64) -> u64 {
        let beyond = self.kv_windows.iter().map(|(window, elements)| positions.saturating_sub(*window) * elements);
        self.kv_elements * positions - beyond.sum::<u64>()
    }

    /// All parameters.
    pub fn parameters(&self) -> u64 {
        let experts = self.expert_layers as u64 * self.experts as u64 * self.per_expert;
        self.embedding + self.tables + self.head + self.dense + self.routers + self.vectors + experts
    }

    /// Parameters that a token uses, with `k` experts in each layer.
    pub fn active(&self, k: usize) -> u64 {
        let experts = self.expert_layers as u64 * k as u64 * self.per_expert;
        self.head.max(self.embedding) + self.dense + self.routers + self.vectors + experts
    }
}
