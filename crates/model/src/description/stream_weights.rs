//! The weights of hyper-connections and of attention residuals.

use super::weights::{WeightClass, WeightDescription, WeightKind, matrix, vector};
use super::{StreamMixing, StreamsDescription};

/// What mixes the streams around each half of a layer: from all streams to the logits of what they exchange, what is added to these, and what each of the three parts of them is multiplied by.
pub(crate) const STREAM_PARTS: [[&str; 3]; 2] =
    [["hc_attn_fn", "hc_attn_base", "hc_attn_scale"], ["hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale"]];

/// The same of what makes one of them behind the last layer.
pub(crate) const STREAM_HEAD: [&str; 3] = ["hc_head_fn", "hc_head_base", "hc_head_scale"];

/// The same with gates: the norm of each stream, both matrices of the gates, and that of what each stream is added.
pub(crate) const GATED_STREAM_PARTS: [[&str; 4]; 2] = [
    [
        "attn_hyper_connection.hc_norm",
        "attn_hyper_connection.input_mix_weight_down",
        "attn_hyper_connection.input_mix_weight_up",
        "attn_hyper_connection.block_inject_weight",
    ],
    [
        "mlp_hyper_connection.hc_norm",
        "mlp_hyper_connection.input_mix_weight_down",
        "mlp_hyper_connection.input_mix_weight_up",
        "mlp_hyper_connection.block_inject_weight",
    ],
];

/// The same for the head, to which nothing is added.
pub(crate) const LAST_STREAM_PARTS: [&str; 3] = [
    "hyper_connection_mixer.hc_norm",
    "hyper_connection_mixer.input_mix_weight_down",
    "hyper_connection_mixer.input_mix_weight_up",
];

/// The norm of streams that are attended to, and what makes scores of them, in front of each half of a layer.
pub(crate) const ATTENDED_STREAM_PARTS: [[&str; 2]; 2] =
    [["self_attention_res_norm", "self_attention_res_proj"], ["mlp_res_norm", "mlp_res_proj"]];

/// The same for the head.
pub(crate) const LAST_ATTENDED_PARTS: [&str; 2] = ["output_attn_res_norm", "output_attn_res_proj"];

/// The products of both, where those are stored: of each half, and of the head.
pub(crate) const ATTENDED_SCORES: [&str; 2] = ["self_attention_res_score", "mlp_res_score"];
pub(crate) const LAST_ATTENDED_SCORE: &str = "output_attn_res_score";

impl StreamsDescription {
    /// Those of a layer.
    pub(super) fn weights(&self, hidden: usize, norm: WeightKind) -> Vec<WeightDescription> {
        let cols = self.count * hidden;
        match self.mixing {
            StreamMixing::Exchanged { .. } => {
                let rows = self.logits();
                let of = |[mix, base, scale]: [&'static str; 3]| {
                    let mix = WeightDescription { rows, ..vector(mix, WeightKind::Vector, cols) };
                    [mix, vector(base, WeightKind::Vector, rows), vector(scale, WeightKind::Vector, 3)]
                };
                STREAM_PARTS.into_iter().flat_map(of).collect()
            }
            StreamMixing::Gated { rank } => {
                let of = |[own, down, up, inject]: [&'static str; 4]| {
                    let mut all = gates([own, down, up], (rank, cols), norm).to_vec();
                    all.push(matrix(inject, WeightClass::Mlp, self.count, cols));
                    all
                };
                GATED_STREAM_PARTS.into_iter().flat_map(of).collect()
            }
            StreamMixing::Attended { fused: true, .. } => ATTENDED_SCORES.map(|part| vector(part, norm, hidden)).into(),
            StreamMixing::Attended { .. } => {
                ATTENDED_STREAM_PARTS.into_iter().flatten().map(|part| vector(part, norm, hidden)).collect()
            }
        }
    }

    /// Those outside of layers.
    pub(super) fn outer_weights(&self, hidden: usize, norm: WeightKind) -> Vec<WeightDescription> {
        match self.mixing {
            StreamMixing::Exchanged { has_head: false, .. } => Vec::new(),
            StreamMixing::Exchanged { .. } => {
                let [mix, base, scale] = STREAM_HEAD;
                let mix =
                    WeightDescription { rows: self.count, ..vector(mix, WeightKind::Vector, self.count * hidden) };
                vec![mix, vector(base, WeightKind::Vector, self.count), vector(scale, WeightKind::Vector, 1)]
            }
            StreamMixing::Attended { fused: true, .. } => vec![vector(LAST_ATTENDED_SCORE, norm, hidden)],
            StreamMixing::Attended { .. } => LAST_ATTENDED_PARTS.map(|part| vector(part, norm, hidden)).into(),
            StreamMixing::Gated { rank } => gates(LAST_STREAM_PARTS, (rank, self.count * hidden), norm).into(),
        }
    }
}

/// The norm of the streams, and both matrices of their gates.
fn gates([own, down, up]: [&'static str; 3], (rank, cols): (usize, usize), norm: WeightKind) -> [WeightDescription; 3] {
    [vector(own, norm, cols), matrix(down, WeightClass::Mlp, rank, cols), matrix(up, WeightClass::Mlp, cols, rank)]
}
