//! The weights of hyper-connections.

use super::StreamsDescription;
use super::weights::{WeightDescription, WeightKind, vector};

/// What mixes the streams around each half of a layer: from all streams to the logits of what they exchange, what is added to these, and what each of the three parts of them is multiplied by.
pub(crate) const STREAM_PARTS: [[&str; 3]; 2] =
    [["hc_attn_fn", "hc_attn_base", "hc_attn_scale"], ["hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale"]];

/// The same of what makes one of them behind the last layer.
pub(crate) const STREAM_HEAD: [&str; 3] = ["hc_head_fn", "hc_head_base", "hc_head_scale"];

impl StreamsDescription {
    /// Those outside of layers.
    pub(super) fn outer_weights(&self, hidden: usize) -> impl Iterator<Item = WeightDescription> {
        let [mix, base, scale] = STREAM_HEAD;
        let mix = WeightDescription { rows: self.count, ..vector(mix, WeightKind::Vector, self.count * hidden) };
        let all = [mix, vector(base, WeightKind::Vector, self.count), vector(scale, WeightKind::Vector, 1)];
        all.into_iter().filter(|_| self.has_head)
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
