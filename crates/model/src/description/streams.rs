//! Hyper-connections: several residual streams in place of one.

use super::weights::{WeightDescription, WeightKind, vector};

/// What mixes the streams around each half of a layer: from all streams to the logits of what they exchange, what is added to these, and what each of the three parts of them is multiplied by.
pub(crate) const STREAM_PARTS: [[&str; 3]; 2] =
    [["hc_attn_fn", "hc_attn_base", "hc_attn_scale"], ["hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale"]];

/// Several residual streams (Xie et al. 2026): each half of a layer takes a mixture of them and adds to all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamsDescription {
    /// How many there are.
    pub count: usize,
    /// Added to the weights of a mixture, and to sums that they are divided by.
    pub eps: f64,
    /// How often what streams exchange is divided by the sums of its rows and columns.
    pub rounds: usize,
}

impl StreamsDescription {
    /// Logits of a mixture.
    pub fn logits(&self) -> usize {
        (2 + self.count) * self.count
    }

    /// Those of a layer.
    pub(super) fn weights(&self, hidden: usize) -> impl Iterator<Item = WeightDescription> {
        let (rows, cols) = (self.logits(), self.count * hidden);
        STREAM_PARTS.into_iter().flat_map(move |[mix, base, scale]| {
            let mix = WeightDescription { rows, ..vector(mix, WeightKind::Vector, cols) };
            [mix, vector(base, WeightKind::Vector, rows), vector(scale, WeightKind::Vector, 3)]
        })
    }
}
