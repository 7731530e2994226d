//! The weights of a model: name, shape and use of each, as its [`Description`] implies them. Loading takes shapes from here; planning, inspecting and packing
//! ask what a tensor is. Names are Hugging Face's; MLX's differ for routed experts.

use sluice_backend::{DeltaShape, StateSpaceShape};

use super::{
    DeltaDescription, DenseActivation, Description, FeedForwardDescription, LayerDescription, MixerDescription,
    MtpDescription, PROJECTIONS, PerLayerDescription, ProjectionLayout, RouterScoring, StateSpaceDescription,
};
use crate::mlx_names;

/// What is added to router scores where experts are chosen.
pub(crate) const CORRECTION_BIAS: &str = "mlp.gate.e_score_correction_bias";

/// The experts of each token's number (DeepSeek-V4).
pub(crate) const TOKEN_EXPERTS: &str = "mlp.gate.tid2eid";

/// To what experts take, where that is no more than a projection of the input; the norm of what they put out, and its projection.
pub(crate) const LATENT_DOWN: &str = "mlp.latent_down_proj";
pub(crate) const LATENT_NORM: &str = "mlp.latent_norm";
pub(crate) const LATENT_UP: &str = "mlp.latent_up_proj";

/// Gemma 4's: what the input of a router is multiplied by, and the weights of its experts.
pub(crate) const ROUTER_SCALE: &str = "mlp.router_scale";
pub(crate) const EXPERT_SCALES: &str = "mlp.expert_scales";

/// The table of embeddings for each layer.
pub(crate) const PER_LAYER_TABLE: &str = "embed_tokens_per_layer";

/// What a weight is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightClass {
    /// The input embedding.
    Embedding,
    /// The table of embeddings for each layer: a token reads one row.
    PerLayerEmbedding,
    /// A table of embeddings of n-grams: a token reads some rows.
    NgramEmbedding,
    /// The output head, where it is not the embedding.
    Head,
    /// Projections of attention layers.
    Attention,
    /// Projections of recurrent layers.
    Recurrent,
    /// Dense feed-forward layers.
    Mlp,
    /// Experts that every token takes.
    SharedExpert,
    /// Routers and the gates of shared experts.
    Router,
    /// Norms, convolutions and the like.
    Vector,
    /// Routed experts: a token uses some of them.
    Expert,
}

impl WeightClass {
    /// Its name in tables and messages.
    pub fn name(self) -> &'static str {
        match self {
            WeightClass::Embedding => "embedding",
            WeightClass::PerLayerEmbedding => "per-layer embeddings",
            WeightClass::NgramEmbedding => "n-grams",
            WeightClass::Head => "output head",
            WeightClass::Attention => "attention",
            WeightClass::Recurrent => "linear attention",
            WeightClass::Mlp => "mlp",
            WeightClass::SharedExpert => "shared expert",
            WeightClass::Router => "routers",
            WeightClass::Vector => "vectors",
            WeightClass::Expert => "experts",
        }
    }

    /// Whether it is a table of which a token reads few rows.
    pub fn is_table(self) -> bool {
        matches!(self, WeightClass::PerLayerEmbedding | WeightClass::NgramEmbedding)
    }

    /// Whether these are matrices of layers that every token uses.
    pub fn is_dense(self) -> bool {
        use WeightClass::{Attention, Mlp, Recurrent, SharedExpert};
        matches!(self, Attention | Recurrent | Mlp | SharedExpert)
    }
}

/// The norms of a dense part and a mixture side by side, besides those around both: after the dense part, before the mixture, after it.
pub(crate) const BESIDE_NORMS: [&str; 3] =
    ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"];

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightKind {
    /// `[rows, cols]`, which may be quantised; a bias of `rows` may come with it.
    Matrix,
    /// An RMS norm's weight; `centred`: stored less one, except after MLX's conversion.
    Norm { centred: bool },
    /// Channels and taps: `[rows, 1, cols]`; MLX has `[rows, cols, 1]`.
    Convolution,
    /// A vector whose tensor's name has no `.weight`.
    Vector,
}

/// One weight of a model; for routed experts, one projection of all experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightDescription {
    /// Its layer, unless it is outside of layers.
    pub layer: Option<usize>,
    /// Its module, within its layer if it has one: `self_attn.q_proj`, `mlp.experts.gate_proj`, `embed_tokens`.
    pub part: &'static str,
    /// What it is for.
    pub class: WeightClass,
    /// How it is stored.
    pub kind: WeightKind,
    /// The number of experts that have one each, or of parts of a table; 1 for everything else.
    pub count: usize,
    /// Rows, of one expert. A vector has one.
    pub rows: usize,
    /// Columns, or the length of a vector.
    pub cols: usize,
    /// A stored bias belongs to the model.
    pub biased: bool,
}

impl WeightDescription {
    /// Its module within the text model: `layers.0.self_attn.q_proj`, `layers.0.mlp.experts.gate_proj`.
    pub fn name(&self) -> String {
        self.layer.map_or_else(|| self.part.to_owned(), |layer| format!("layers.{layer}.{}", self.part))
    }

    /// Its part without `mlp.`, for tables.
    pub fn label(&self) -> &'static str {
        self.part.strip_prefix("mlp.").unwrap_or(self.part)
    }

    /// The last part of its name, such as `gate_proj`.
    pub fn projection(&self) -> &'static str {
        self.part.rsplit('.').next().unwrap_or(self.part)
    }

    /// Elements, of all experts together.
    pub fn elements(&self) -> u64 {
        self.count as u64 * self.rows as u64 * self.cols as u64
    }
}

pub(super) fn matrix(part: &'static str, class: WeightClass, rows: usize, cols: usize) -> WeightDescription {
    WeightDescription { layer: None, part, class, kind: WeightKind::Matrix, count: 1, rows, cols, biased: false }
}

pub(super) fn vector(part: &'static str, kind: WeightKind, cols: usize) -> WeightDescription {
    WeightDescription { layer: None, part, class: WeightClass::Vector, kind, count: 1, rows: 1, cols, biased: false }
}

impl DeltaDescription {
    fn weights(&self, hidden: usize) -> Vec<WeightDescription> {
        let DeltaShape { value_heads, value_dim, taps, .. } = self.shape;
        let (channels, values) = (self.shape.channels(), self.values());
        let projection = |part, rows, cols| matrix(part, WeightClass::Recurrent, rows, cols);
        let mut all = match self.layout {
            ProjectionLayout::Separate => vec![
                projection("linear_attn.in_proj_qkv", channels, hidden),
                projection("linear_attn.in_proj_z", values, hidden),
                projection("linear_attn.in_proj_b", value_heads, hidden),
                projection("linear_attn.in_proj_a", value_heads, hidden),
            ],
            ProjectionLayout::PairsByKeyHead => vec![
                projection("linear_attn.in_proj_qkv", channels, hidden),
                projection("linear_attn.in_proj_z", values, hidden),
                projection("linear_attn.in_proj_ba", 2 * value_heads, hidden),
            ],
            ProjectionLayout::ByKeyHead => vec![
                projection("linear_attn.in_proj_qkvz", channels + values, hidden),
                projection("linear_attn.in_proj_ba", 2 * value_heads, hidden),
            ],
        };
        all.extend([
            WeightDescription { rows: channels, ..vector("linear_attn.conv1d", WeightKind::Convolution, taps) },
            vector("linear_attn.A_log", WeightKind::Vector, value_heads),
            vector("linear_attn.dt_bias", WeightKind::Vector, value_heads),
            // No model centres this one.
            vector("linear_attn.norm", WeightKind::Norm { centred: false }, value_dim),
            projection("linear_attn.out_proj", hidden, values),
        ]);
        all
    }
}

impl StateSpaceDescription {
    fn weights(&self, hidden: usize) -> Vec<WeightDescription> {
        let StateSpaceShape { heads, taps, .. } = self.shape;
        let (channels, inner, biased) = (self.shape.channels(), self.shape.inner(), self.biased);
        let projection =
            |part, rows, cols| WeightDescription { biased, ..matrix(part, WeightClass::Recurrent, rows, cols) };
        let convolution = vector("mamba.conv1d", WeightKind::Convolution, taps);
        vec![
            projection("mamba.in_proj", inner + channels + heads, hidden),
            WeightDescription { rows: channels, biased: self.conv_biased, ..convolution },
            vector("mamba.A_log", WeightKind::Vector, heads),
            vector("mamba.D", WeightKind::Vector, heads),
            vector("mamba.dt_bias", WeightKind::Vector, heads),
            vector("mamba.norm", WeightKind::Norm { centred: false }, inner),
            projection("mamba.out_proj", hidden, inner),
        ]
    }
}

impl FeedForwardDescription {
    fn weights(&self, hidden: usize, norm: WeightKind) -> Vec<WeightDescription> {
        // A stored bias belongs to the model, and loading refuses it.
        let gated = |part, class, rows, cols| WeightDescription { biased: true, ..matrix(part, class, rows, cols) };
        let mut all = Vec::new();
        let moe = match self {
            FeedForwardDescription::Dense { intermediate, joined: true, .. } => {
                return vec![
                    gated("mlp.gate_up_proj", WeightClass::Mlp, 2 * intermediate, hidden),
                    gated("mlp.down_proj", WeightClass::Mlp, hidden, *intermediate),
                ];
            }
            FeedForwardDescription::Dense { intermediate, activation: DenseActivation::SquaredRelu, .. } => {
                return vec![
                    gated("mlp.up_proj", WeightClass::Mlp, *intermediate, hidden),
                    gated("mlp.down_proj", WeightClass::Mlp, hidden, *intermediate),
                ];
            }
            FeedForwardDescription::Dense { intermediate, .. } => {
                return vec![
                    gated("mlp.gate_proj", WeightClass::Mlp, *intermediate, hidden),
                    gated("mlp.up_proj", WeightClass::Mlp, *intermediate, hidden),
                    gated("mlp.down_proj", WeightClass::Mlp, hidden, *intermediate),
                ];
            }
            FeedForwardDescription::Beside { intermediate, activation, moe } => {
                let (intermediate, activation) = (*intermediate, *activation);
                all.extend(
                    FeedForwardDescription::Dense { intermediate, activation, joined: false }.weights(hidden, norm),
                );
                all.extend(BESIDE_NORMS.map(|part| vector(part, norm, hidden)));
                moe
            }
            FeedForwardDescription::Moe(moe) => moe,
            FeedForwardDescription::None => return Vec::new(),
        };
        let router = matrix("mlp.gate", WeightClass::Router, moe.count, hidden);
        all.push(WeightDescription { biased: moe.router.biased, ..router });
        if moe.router.own_norm {
            all.push(vector(ROUTER_SCALE, WeightKind::Vector, hidden));
        }
        if moe.router.expert_scales {
            all.push(vector(EXPERT_SCALES, WeightKind::Vector, moe.count));
        }
        if moe.router.correction_bias {
            all.push(vector(CORRECTION_BIAS, WeightKind::Vector, moe.count));
        }
        if let RouterScoring::ByToken { tokens } = moe.router.scoring {
            let table = vector(TOKEN_EXPERTS, WeightKind::Vector, moe.router.k);
            all.push(WeightDescription { rows: tokens, ..table });
        }
        if let Some(shared) = moe.shared {
            let width = shared.intermediate;
            let of_shared = |part, rows, cols| gated(part, WeightClass::SharedExpert, rows, cols);
            match shared.joined {
                true => all.push(of_shared("mlp.shared_expert.gate_up_proj", 2 * width, hidden)),
                false => {
                    let gate = of_shared("mlp.shared_expert.gate_proj", width, hidden);
                    all.extend(Some(gate).filter(|_| moe.activation.is_gated()));
                    all.push(of_shared("mlp.shared_expert.up_proj", width, hidden));
                }
            }
            all.push(of_shared("mlp.shared_expert.down_proj", hidden, width));
            if shared.gated {
                all.push(matrix("mlp.shared_expert_gate", WeightClass::Router, 1, hidden));
            }
        }
        if let Some(latent) = moe.latent {
            let projection =
                |part, rows, cols| WeightDescription { biased: true, ..matrix(part, WeightClass::Mlp, rows, cols) };
            all.push(projection(LATENT_DOWN, latent.size, hidden));
            all.extend(latent.normed.then(|| vector(LATENT_NORM, norm, latent.size)));
            all.push(projection(LATENT_UP, hidden, latent.size));
        }
        let (count, biased, hidden) = (moe.count, moe.biased, moe.latent.map_or(hidden, |latent| latent.size));
        let expert =
            |part, rows, cols| WeightDescription { count, biased, ..matrix(part, WeightClass::Expert, rows, cols) };
        let gate = expert("mlp.experts.gate_proj", moe.intermediate, hidden);
        all.extend(Some(gate).filter(|_| moe.activation.is_gated()));
        all.extend([
            expert("mlp.experts.up_proj", moe.intermediate, hidden),
            expert("mlp.experts.down_proj", hidden, moe.intermediate),
        ]);
        all
    }
}

impl LayerDescription {
    /// Whether it has only one half, and so only one norm: that of its input.
    pub fn is_one_block(&self) -> bool {
        matches!(self.mixer, MixerDescription::None) || matches!(self.feed_forward, FeedForwardDescription::None)
    }

    /// Without the layer's number.
    fn weights(&self, hidden: usize, norm: WeightKind, (before, after): (bool, bool)) -> Vec<WeightDescription> {
        let mut all = Vec::new();
        if before {
            all.push(vector("input_layernorm", norm, hidden));
        }
        all.extend(match &self.mixer {
            MixerDescription::Attention(attention) => attention.weights(hidden, norm),
            MixerDescription::DeltaNet(delta) => delta.weights(hidden),
            MixerDescription::ChannelDelta(of) => of.weights(hidden),
            MixerDescription::StateSpace(of) => of.weights(hidden),
            MixerDescription::None => Vec::new(),
        });
        if self.is_one_block() {
            all.extend(self.feed_forward.weights(hidden, norm));
            return all;
        }
        if before || after {
            all.push(vector("post_attention_layernorm", norm, hidden));
        }
        if before && after {
            all.push(vector("pre_feedforward_layernorm", norm, hidden));
        }
        all.extend(self.feed_forward.weights(hidden, norm));
        if after {
            all.push(vector("post_feedforward_layernorm", norm, hidden));
        }
        all
    }
}

impl Description {
    /// Every weight of the model, layer by layer.
    pub fn weights(&self) -> impl Iterator<Item = WeightDescription> {
        let [embedding, norm, head] = self.outer();
        let layers = (0..self.stored_layers()).flat_map(|layer| self.layer_weights(layer));
        let first = std::iter::once(embedding).chain(self.outer_per_layer());
        let (begins, ends, tied) = (self.begins(), self.ends(), self.tied);
        let first = first.filter(move |_| begins || (ends && tied));
        let last = self.last_mixing().into_iter().chain(self.has_last_norm().then_some(norm)).filter(move |_| ends);
        first.chain(layers).chain(last).chain((ends && !tied).then_some(head))
    }

    /// The weights of one layer; none if there is no such layer.
    pub fn layer_weights(&self, layer: usize) -> Vec<WeightDescription> {
        let norms = (self.input_norms, self.output_norms);
        let of = |l: &LayerDescription| l.weights(self.hidden, self.norm_kind(), norms);
        let mut weights = self.layer(layer).map(of).unwrap_or_default();
        if let Some(PerLayerDescription { width, .. }) = self.per_layer {
            weights.extend([
                matrix("per_layer_input_gate", WeightClass::Mlp, width, self.hidden),
                matrix("per_layer_projection", WeightClass::Mlp, self.hidden, width),
                vector("post_per_layer_input_norm", self.norm_kind(), self.hidden),
            ]);
        }
        if let Some(streams) = self.streams {
            weights.extend(streams.weights(self.hidden, self.norm_kind()));
        }
        if let (Some(ngrams), Some(streams)) = (&self.ngrams, self.streams) {
            let sizes = (self.hidden, streams.count * self.hidden);
            weights.extend(ngrams.weights(layer, sizes, self.norm_kind()));
        }
        if self.layer_scales {
            weights.push(vector("layer_scalar", WeightKind::Vector, 1));
        }
        if (self.layers.len()..self.stored_layers()).contains(&layer) {
            weights.extend(MtpDescription::weights(self.hidden, self.norm_kind()));
        }
        weights.into_iter().map(|w| WeightDescription { layer: Some(layer), ..w }).collect()
    }

    /// Embedding, last norm, head. The head is listed even if it is the embedding, since a checkpoint may store it anyway.
    fn outer(&self) -> [WeightDescription; 3] {
        [
            matrix("embed_tokens", WeightClass::Embedding, self.vocabulary, self.hidden),
            vector("norm", self.norm_kind(), self.hidden),
            matrix("lm_head", WeightClass::Head, self.vocabulary, self.hidden),
        ]
    }

    /// The table of embeddings for each layer, and what makes their other part of the token's own.
    fn outer_per_layer(&self) -> Vec<WeightDescription> {
        let Some(PerLayerDescription { width, vocabulary }) = self.per_layer else { return Vec::new() };
        let all = width * self.layers.len();
        vec![
            matrix(PER_LAYER_TABLE, WeightClass::PerLayerEmbedding, vocabulary, all),
            matrix("per_layer_model_projection", WeightClass::Mlp, all, self.hidden),
            vector("per_layer_projection_norm", self.norm_kind(), width),
        ]
    }

    /// What makes the head's input of several residual streams.
    fn last_mixing(&self) -> Vec<WeightDescription> {
        self.streams.map(|streams| streams.outer_weights(self.hidden, self.norm_kind())).unwrap_or_default()
    }

    /// Everything outside of layers.
    pub(super) fn all_outer(&self) -> impl Iterator<Item = WeightDescription> {
        let outer = self.outer().into_iter().filter(|w| w.part != "norm" || self.has_last_norm());
        outer.chain(self.outer_per_layer()).chain(self.last_mixing())
    }

    fn norm_kind(&self) -> WeightKind {
        WeightKind::Norm { centred: self.centred_norms }
    }

    /// The weight `part` in `layer`, or outside of layers.
    pub(crate) fn weight(&self, layer: Option<usize>, part: &str) -> Option<WeightDescription> {
        match layer {
            Some(layer) => self.layer_weights(layer).into_iter().find(|w| w.part == part),
            None => self.all_outer().find(|w| w.part == part),
        }
    }

    /// What this architecture's checkpoints call a projection of experts that have a tensor each.
    pub(crate) fn own_projection(&self, projection: &'static str) -> &'static str {
        PROJECTIONS.iter().position(|known| *known == projection).map_or(projection, |i| self.expert_spelling[i])
    }

    /// The name of a weight's module in checkpoints of this architecture, without the text model's prefix.
    pub fn stored_name(&self, w: &WeightDescription) -> String {
        let part = self.spelled(w.part);
        w.layer.map_or_else(|| part.to_string(), |layer| format!("layers.{}.{part}", self.whole_number(layer)))
    }

    /// [`Description::packed_name`] in MLX's spelling: `layers.0.mlp.switch_mlp.gate_proj`.
    pub fn mlx_name(&self, w: &WeightDescription) -> String {
        match w.class {
            WeightClass::Expert => mlx_names::of_stack(&self.packed_name(w)),
            _ => self.packed_name(w),
        }
    }
}
