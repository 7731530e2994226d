//! The head of some checkpoints that predicts one token more (multi-token prediction). It has a layer of its own, whose input is made of the final hidden state of a
//! token and the embedding of the next one. Embedding and output head are the model's.
//!
//! Its weights have the names that DeepSeek-V3 and GLM-4.5 give them, in a layer behind the last: `eh_proj`, `enorm`, `hnorm`, `shared_head.norm`. Qwen3-Next's and
//! Qwen3.5's `mtp.fc`, `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.norm` are the same.

use super::weights::{WeightClass, WeightDescription, WeightKind, matrix, vector};
use super::{Description, LayerDescription, MixerDescription, MtpDescription};

/// The matrix from the normed embedding and the normed state, joined, to the layer's input.
pub(crate) const JOIN: &str = "eh_proj";
/// The norms of the embedding, of the hidden state, and of what the layer puts out.
pub(crate) const NORMS: [&str; 3] = ["enorm", "hnorm", "shared_head.norm"];

/// Its parts: our names and Qwen's.
pub(crate) const QWEN_PARTS: [(&str, &str); 4] = [
    ("eh_proj", "fc"),
    ("enorm", "pre_fc_norm_embedding"),
    ("hnorm", "pre_fc_norm_hidden"),
    ("shared_head.norm", "norm"),
];

/// What Qwen's checkpoints call a part or tensor of it, behind `mtp.`.
pub(crate) fn qwen_name(part: &str) -> String {
    let own = |(ours, theirs): &(&str, &str)| Some(format!("{theirs}{}", part.strip_prefix(ours)?));
    QWEN_PARTS.iter().find_map(own).unwrap_or_else(|| format!("layers.0.{part}"))
}

impl MtpDescription {
    /// What such a head of this model is: the model's last layer once more, with attention. `None` for a model without attention.
    pub(crate) fn of(model: &Description) -> Option<MtpDescription> {
        // Layers of one block, and those between several streams, have heads of another kind.
        if model.layers.iter().any(LayerDescription::is_one_block) || model.streams.is_some() {
            return None;
        }
        let mixer = *model.attention_layers().last()?;
        let feed_forward = model.layers.last()?.feed_forward.clone();
        let layer = LayerDescription { mixer: MixerDescription::Attention(mixer), feed_forward };
        Some(MtpDescription { layer, passes_normed: model.architecture.starts_with("qwen3") })
    }

    /// What it has beside its layer.
    pub(super) fn weights(hidden: usize, norm: WeightKind) -> impl Iterator<Item = WeightDescription> {
        let join = matrix(JOIN, WeightClass::Mlp, hidden, 2 * hidden);
        std::iter::once(join).chain(NORMS.map(|part| vector(part, norm, hidden)))
    }
}

impl Description {
    /// A layer by its number. The number behind the last is the MTP head's layer.
    pub fn layer(&self, at: usize) -> Option<&LayerDescription> {
        self.layers.get(at).or_else(|| self.mtp.as_ref().filter(|_| at == self.layers.len()).map(|mtp| &mtp.layer))
    }

    /// The number of layers that have weights: the model's, and the MTP head's if there is one.
    pub fn stored_layers(&self) -> usize {
        self.layers.len() + usize::from(self.mtp.is_some())
    }

    /// [`Description::stored_name`], but with Qwen's names of an MTP head (`mtp.layers.0.self_attn.q_proj`): `mlx_lm` leaves out what has these names.
    pub fn packed_name(&self, w: &WeightDescription) -> String {
        match &self.mtp {
            Some(mtp) if self.is_of_mtp(w) && mtp.passes_normed => format!("mtp.{}", qwen_name(&self.spelled(w.part))),
            _ => self.stored_name(w),
        }
    }

    /// Whether a weight belongs to the MTP head.
    pub fn is_of_mtp(&self, w: &WeightDescription) -> bool {
        w.layer == Some(self.layers.len())
    }
}
