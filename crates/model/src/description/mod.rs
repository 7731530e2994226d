//! What a model is, as its config says: parts, sizes and variants, before any weight is read. Loading, planning, inspecting, packing and the placement of experts
//! use nothing else, so a new architecture is one file that makes a [`Description`].

mod attention;
mod attention_weights;
mod cache_group;
mod channel_delta_weights;
mod compressed;
mod compressed_weights;
mod cut;
mod delta_net;
mod experts;
mod layer_range;
mod meaning;
mod mtp;
mod ngram_weights;
mod ngrams;
mod state_space;
mod stream_weights;
mod streams;
mod support;
mod weights;
mod windows;

use std::borrow::Cow;
use std::sync::Arc;

use anyhow::Result;
use sluice_backend::RotaryFrequencies;

use crate::config::Config;
use crate::mlx_lm::MlxLm;
use crate::rope::Rotary;
pub use attention::{
    AttentionBiases, AttentionDescription, AttentionVariant, IndexDescription, LatentDescription, QueryGrowth,
    ValueSource,
};
pub(crate) use attention_weights::{INDEX_INPUTS, INDEX_NORMS, INDEX_PARTS};
pub use cache_group::{CacheContent, CacheGroup, CacheKind};
pub use compressed::{CompressedDescription, CompressionDescription, EntryIndexDescription};
pub(crate) use compressed_weights::COMPRESSORS;
pub use delta_net::{ChannelDeltaDescription, DeltaDescription, ProjectionLayout};
pub use experts::{
    ExpertActivation, ExpertGroups, LatentExperts, MoeDescription, RouterDescription, RouterScoring,
    SharedExpertDescription, StackOrder,
};
pub use layer_range::{Cut, LayerRange};
pub use meaning::{Leaf, Meaning};
pub(crate) use mtp::{JOIN, NORMS, QWEN_PARTS, qwen_name};
pub(crate) use ngram_weights::{NGRAM_CONVOLUTION, NGRAM_KEYS, NGRAM_NORMS, NGRAM_NUMBERS, NGRAM_TABLE, NGRAM_VALUE};
pub use ngrams::NgramsDescription;
pub use state_space::StateSpaceDescription;
pub(crate) use state_space::StateSpaceKeys;
pub(crate) use stream_weights::{
    ATTENDED_SCORES, ATTENDED_STREAM_PARTS, GATED_STREAM_PARTS, LAST_ATTENDED_PARTS, LAST_ATTENDED_SCORE,
    LAST_STREAM_PARTS, STREAM_HEAD, STREAM_PARTS,
};
pub use streams::{StreamMixing, StreamsDescription};
pub(crate) use weights::{
    BESIDE_NORMS, CORRECTION_BIAS, EXPERT_SCALES, LATENT_DOWN, LATENT_NORM, LATENT_UP, PER_LAYER_TABLE, ROUTER_SCALE,
    TOKEN_EXPERTS,
};
pub use weights::{WeightClass, WeightDescription, WeightKind};
pub(crate) use windows::{FULL, WINDOWED, layer_windows};

/// A decoder-only transformer: embedding, layers of a token mixer and a feed-forward part, head.
#[derive(Clone, Debug)]
pub struct Description {
    /// Its `model_type`.
    pub architecture: &'static str,
    /// Rows of embedding and head.
    pub vocabulary: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// The longest context that the model was made for.
    pub max_context: usize,
    /// Added to the mean square in every norm.
    pub eps: f64,
    /// Norm weights are stored minus one.
    pub centred_norms: bool,
    /// The output head is the embedding. The config alone may be wrong about it: see [`crate::describe_stored`].
    pub tied: bool,
    /// What rows of the embedding are multiplied by; `None`: nothing.
    pub embedding_scale: Option<EmbeddingScale>,
    /// What logits are multiplied by; `None`: nothing.
    pub logit_scale: Option<f64>,
    /// Logits become `cap * tanh(logit / cap)` (Gemma 2).
    pub logit_softcap: Option<f32>,
    /// Each layer has an embedding of its own, which it adds at its end (Gemma 3n).
    pub per_layer: Option<PerLayerDescription>,
    /// There are several residual streams; `None`: one.
    pub streams: Option<StreamsDescription>,
    /// Some layers add embeddings of n-grams to the streams (Qwen4-Exp).
    pub ngrams: Option<NgramsDescription>,
    /// Each layer's output is multiplied by a stored number (Gemma 4).
    pub layer_scales: bool,
    /// The input of both halves of a layer is normed. OLMo 2 norms their output instead.
    pub input_norms: bool,
    /// The output of both halves of a layer is normed before it is added (Gemma 2). The norm before the feed-forward part has another name then.
    pub output_norms: bool,
    /// Positions in all attention layers.
    pub rotary: RotaryFrequencies,
    /// Positions in layers with a window, where they differ (Gemma 3).
    pub window_rotary: Option<RotaryFrequencies>,
    /// First to last.
    pub layers: Vec<LayerDescription>,
    /// The MTP head, if it is asked for and there is one. Its layer has the number behind the last.
    pub mtp: Option<MtpDescription>,
    /// Parts of layers that checkpoints of this architecture name differently: our name and theirs, such as (`mlp.shared_expert`, `mlp.shared_experts`). Modules
    /// within a part are renamed with it.
    pub spelling: &'static [(&'static str, &'static str)],
    /// What gate, up and down are called of experts with tensors of their own.
    pub expert_spelling: [&'static str; 3],
    /// What the modules of both stacks of a layer's experts are called, where it is not by their projections: of gate and up, and of down.
    pub stack_spelling: Option<[&'static str; 2]>,
    /// What `mlx_lm` expects of such a model; packing writes it.
    pub mlx: MlxLm,
    /// Which part of the model this is; `None`: all of it.
    pub cut: Option<Cut>,
    /// Messages for the user, a line each: where config and files disagree, and what of the config is not followed.
    pub notes: Vec<String>,
}

/// What rows of an embedding are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingScale {
    /// The factor.
    pub by: f64,
    /// It is rounded to the type that the checkpoint works in first (Gemma).
    pub rounded: bool,
}

/// Embeddings for each layer (Gemma 3n): a row of a table for each token, and beside it a projection of the token's embedding. Their sum over the root of 2 is
/// gated by the residual stream, projected, normed and added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerLayerDescription {
    /// Elements of one layer's embedding. A row of the table has those of all layers, one after the other.
    pub width: usize,
    /// Rows of the table.
    pub vocabulary: usize,
}

/// What gate, up and down are called, unless an architecture says otherwise.
pub(crate) const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// What every architecture's config has.
pub struct Outline {
    /// Layers.
    pub count: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// The longest context that the model was made for.
    pub max_context: usize,
}

/// A layer: a token mixer, then a feed-forward part. Either may be missing: then there is one norm (Nemotron-H).
#[derive(Clone, Debug)]
pub struct LayerDescription {
    /// Its first half.
    pub mixer: MixerDescription,
    /// Its second half.
    pub feed_forward: FeedForwardDescription,
}

/// The head that predicts one token more.
#[derive(Clone, Debug)]
pub struct MtpDescription {
    /// Its layer.
    pub layer: LayerDescription,
    /// To predict several tokens it goes on from the output of its last norm (Qwen), and not from that norm's input (DeepSeek).
    pub passes_normed: bool,
}

/// What mixes tokens in a layer.
#[derive(Clone, Debug)]
pub enum MixerDescription {
    /// Softmax attention.
    Attention(AttentionDescription),
    /// A recurrent layer.
    DeltaNet(DeltaDescription),
    /// The same with a decay for each channel.
    ChannelDelta(ChannelDeltaDescription),
    /// A recurrent layer of another kind.
    StateSpace(StateSpaceDescription),
    /// Nothing.
    None,
}

impl MixerDescription {
    /// The attention, if it is that.
    pub fn attention(&self) -> Option<&AttentionDescription> {
        match self {
            MixerDescription::Attention(attention) => Some(attention),
            _ => None,
        }
    }

    /// f32 elements of a sequence's recurrent state in this layer; `None` without one.
    pub fn state_len(&self) -> Option<usize> {
        match self {
            MixerDescription::DeltaNet(delta) => Some(delta.shape.state_len()),
            MixerDescription::ChannelDelta(delta) => Some(delta.shape.state_len()),
            MixerDescription::StateSpace(of) => Some(of.shape.state_len()),
            MixerDescription::Attention(_) | MixerDescription::None => None,
        }
    }
}

/// The second half of a layer.
#[derive(Clone, Debug)]
pub enum FeedForwardDescription {
    /// `down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` for an activation without a gate. `joined`: gate and up are rows of one matrix, `mlp.gate_up_proj`.
    Dense { intermediate: usize, activation: DenseActivation, joined: bool },
    /// A mixture of experts.
    Moe(Arc<MoeDescription>),
    /// A dense part and a mixture side by side, each normed before and after by itself; their sum is normed once more (Gemma 4).
    Beside { intermediate: usize, activation: DenseActivation, moe: Arc<MoeDescription> },
    /// Nothing.
    None,
}

/// What goes over the gate of a dense feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DenseActivation {
    /// `x * sigmoid(x)`
    Silu,
    /// The same of a gate of at most `limit`, times what is clamped to `-limit..=limit` (GLM-5.3).
    ClampedSilu { limit: f32 },
    /// The same of a gate bounded by `beta`, in the factor alone, times what is bounded by `linear` (Kimi-K3).
    SiTu { beta: f32, linear: f32 },
    /// GELU in its tanh form.
    Gelu,
    /// `max(x, 0)^2`, without a gate (Nemotron-H).
    SquaredRelu,
}

impl DenseActivation {
    /// What a shared expert computes that is added behind the routed ones; `None`: it is a part of the mixture.
    pub fn of_shared(experts: ExpertActivation) -> Option<DenseActivation> {
        match experts {
            ExpertActivation::SquaredRelu => Some(DenseActivation::SquaredRelu),
            ExpertActivation::ClampedSwiGlu { limit, .. } => Some(DenseActivation::ClampedSilu { limit }),
            ExpertActivation::SiTu { beta, linear } => Some(DenseActivation::SiTu { beta, linear }),
            ExpertActivation::SwiGlu | ExpertActivation::GeGlu => None,
        }
    }
}

impl FeedForwardDescription {
    /// Its mixture, if it has one.
    pub fn moe(&self) -> Option<&MoeDescription> {
        match self {
            FeedForwardDescription::Moe(moe) | FeedForwardDescription::Beside { moe, .. } => Some(moe),
            FeedForwardDescription::Dense { .. } | FeedForwardDescription::None => None,
        }
    }

    /// A dense layer with SwiGLU.
    pub fn dense(intermediate: usize) -> FeedForwardDescription {
        FeedForwardDescription::Dense { intermediate, activation: DenseActivation::Silu, joined: false }
    }

    /// The same with gate and up in one matrix.
    pub fn joined(intermediate: usize) -> FeedForwardDescription {
        FeedForwardDescription::Dense { intermediate, activation: DenseActivation::Silu, joined: true }
    }
}

impl Outline {
    /// # Errors
    /// A key that is missing or wrong, and another activation than SiLU.
    pub fn read(config: &Config) -> Result<Outline> {
        config.require("hidden_act", "silu")?;
        Outline::of_any_activation(config)
    }

    /// The same for an architecture that reads its activation itself.
    ///
    /// # Errors
    /// A key that is missing or wrong.
    pub fn of_any_activation(config: &Config) -> Result<Outline> {
        Ok(Outline {
            count: config.layers()?,
            hidden: config.size("hidden_size")?,
            max_context: config.max_positions()?,
        })
    }

    /// The description of a model with these layers.
    ///
    /// # Errors
    /// A key that is missing or wrong.
    pub fn with(
        self,
        config: &Config,
        architecture: &'static str,
        centred_norms: bool,
        rotary: Rotary,
        layers: Vec<LayerDescription>,
        mlx: MlxLm,
    ) -> Result<Description> {
        let (vocabulary, eps, tied) = (config.size("vocab_size")?, config.norm_eps()?, config.tied_embeddings()?);
        let mut notes = rotary.notes;
        let misplaced = config.misplaced();
        if !misplaced.is_empty() {
            let keys = misplaced.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
            notes.push(format!("config.json: not read, since it is not in `text_config`: {keys}"));
        }
        Ok(Description {
            architecture,
            vocabulary,
            hidden: self.hidden,
            max_context: self.max_context.max(rotary.extended.unwrap_or(0)),
            eps,
            centred_norms,
            tied,
            embedding_scale: None,
            logit_scale: None,
            logit_softcap: None,
            per_layer: None,
            streams: None,
            ngrams: None,
            layer_scales: false,
            input_norms: true,
            output_norms: false,
            rotary: rotary.frequencies,
            window_rotary: None,
            layers,
            mtp: None,
            spelling: &[],
            expert_spelling: PROJECTIONS,
            stack_spelling: None,
            mlx,
            cut: None,
            notes,
        })
    }
}

impl Description {
    /// The cache groups, in the order of their first layers.
    pub fn groups(&self) -> Vec<CacheGroup> {
        let mut groups: Vec<CacheGroup> = Vec::new();
        let of_mtp = self.mtp.as_ref().and_then(|mtp| mtp.layer.mixer.attention());
        for attention in self.attention_layers().chain(of_mtp) {
            for own in attention.cache_groups() {
                match groups.iter_mut().find(|group| group.is_like(&own)) {
                    Some(_) if attention.shared => {}
                    Some(group) => group.layers += 1,
                    None => groups.push(own),
                }
            }
        }
        groups
    }

    /// The cache group of an attention layer.
    pub(crate) fn group_of(&self, attention: &AttentionDescription) -> usize {
        self.number_of_group(&attention.cache_group())
    }

    /// The number of a cache group of one of this model's layers.
    pub(crate) fn number_of_group(&self, own: &CacheGroup) -> usize {
        self.groups().iter().position(|group| group.is_like(own)).expect("one of this model's layers")
    }

    /// The cache group of an attention layer's indexer, if it has one of its own.
    pub(crate) fn index_group_of(&self, attention: &AttentionDescription) -> Option<usize> {
        let own = attention.index_group()?;
        self.groups().iter().position(|group| group.is_like(&own))
    }

    /// What this architecture's checkpoints call the part or module `part` of a layer.
    pub(crate) fn spelled<'a>(&self, part: &'a str) -> Cow<'a, str> {
        renamed(part, self.spelling.iter().map(|(ours, theirs)| (*ours, *theirs)))
    }

    /// Our name for what this architecture's checkpoints call `part`.
    fn canonical<'a>(&self, part: &'a str) -> Cow<'a, str> {
        renamed(part, self.spelling.iter().map(|(ours, theirs)| (*theirs, *ours)))
    }

    /// Names are those of this description, where a checkpoint's layout maps them by itself.
    pub(crate) fn forget_spelling(&mut self) {
        (self.spelling, self.expert_spelling, self.stack_spelling) = (&[], PROJECTIONS, None);
    }

    /// The attention layers, in order.
    pub fn attention_layers(&self) -> impl Iterator<Item = &AttentionDescription> {
        self.layers.iter().filter_map(|l| l.mixer.attention())
    }

    /// The layers of latent attention, in order.
    pub(crate) fn latent_layers(&self) -> impl Iterator<Item = (&AttentionDescription, LatentDescription)> {
        self.attention_layers().filter_map(|a| match a.variant {
            AttentionVariant::Latent(latent) => Some((a, latent)),
            AttentionVariant::Grouped | AttentionVariant::Compressed(_) => None,
        })
    }

    /// The layers of compressed attention, in order.
    pub(crate) fn compressed_layers(&self) -> impl Iterator<Item = (&AttentionDescription, CompressedDescription)> {
        self.attention_layers().filter_map(|a| match a.variant {
            AttentionVariant::Compressed(of) => Some((a, of)),
            _ => None,
        })
    }

    /// Says how the input projections of recurrent layers are stored, where that is not as the architecture has them.
    pub(crate) fn set_projections(&mut self, stored: ProjectionLayout) {
        for layer in &mut self.layers {
            if let MixerDescription::DeltaNet(delta) = &mut layer.mixer {
                delta.layout = stored;
            }
        }
    }

    /// Says how the projections of latent attention are stored, where that is not in one matrix.
    pub(crate) fn split_latents(&mut self) {
        for layer in self.layers.iter_mut().chain(self.mtp.as_mut().map(|mtp| &mut mtp.layer)) {
            if let MixerDescription::Attention(attention) = &mut layer.mixer
                && let AttentionVariant::Latent(latent) = &mut attention.variant
            {
                latent.split = true;
            }
        }
    }

    /// Says that queries and keys of indexers beside grouped attention have a matrix each.
    pub(crate) fn split_indexers(&mut self) {
        for layer in &mut self.layers {
            if let MixerDescription::Attention(AttentionDescription { index: Some(index), .. }) = &mut layer.mixer {
                index.split = true;
            }
        }
    }

    /// Says that gate and up of dense parts and of shared experts are matrices of their own, where a layout has divided them.
    pub(crate) fn divide_joined(&mut self) {
        for layer in &mut self.layers {
            match &mut layer.feed_forward {
                FeedForwardDescription::Dense { joined, .. } => *joined = false,
                FeedForwardDescription::Moe(moe) => {
                    if let Some(shared) = &mut Arc::make_mut(moe).shared {
                        shared.joined = false;
                    }
                }
                FeedForwardDescription::Beside { .. } | FeedForwardDescription::None => {}
            }
        }
    }

    /// The token mixers of recurrent layers, in order.
    pub fn recurrent_layers(&self) -> impl Iterator<Item = &MixerDescription> {
        self.layers.iter().map(|l| &l.mixer).filter(|mixer| mixer.state_len().is_some())
    }

    /// The mixtures of experts, in order.
    pub fn moe_layers(&self) -> impl Iterator<Item = &MoeDescription> {
        self.layers.iter().filter_map(|l| l.feed_forward.moe())
    }

    /// f32 elements of a sequence's recurrent state, all layers together; 0 without recurrent layers.
    pub fn state_len(&self) -> usize {
        let of_layers: usize = self.recurrent_layers().filter_map(MixerDescription::state_len).sum();
        of_layers + self.ngrams.as_ref().map_or(0, |of| of.layers.len() * self.ngram_state_len())
    }

    /// f32 elements of the state of a layer's n-grams. Those of all such layers are behind all others.
    pub(crate) fn ngram_state_len(&self) -> usize {
        let of_streams = self.hidden * self.streams.map_or(1, |streams| streams.count);
        self.ngrams.as_ref().map_or(0, |of| of.kept() * of_streams)
    }

    /// Whether a norm stands between the last layer and the head.
    pub(crate) fn has_last_norm(&self) -> bool {
        !self.streams.is_some_and(StreamsDescription::is_gated)
    }

    /// Experts per layer and per token, for a mixture.
    pub fn experts(&self) -> Option<(usize, usize)> {
        self.moe_layers().map(|moe| (moe.count, moe.router.k)).max()
    }

    /// Elements of keys and values together, for each position.
    pub fn kv_elements(&self) -> usize {
        self.groups().iter().map(CacheGroup::elements).sum()
    }
}

/// `name` with its beginning replaced, by the first (old, new) of `names` that matches.
fn renamed<'a>(name: &'a str, names: impl Iterator<Item = (&'static str, &'static str)>) -> Cow<'a, str> {
    for (from, to) in names {
        if let Some(rest) = name.strip_prefix(from).filter(|rest| rest.is_empty() || rest.starts_with('.')) {
            return Cow::Owned(format!("{to}{rest}"));
        }
    }
    Cow::Borrowed(name)
}
