//! The weights of a model as its [`Description`] has them: what a checkpoint calls each, its shape, and what it is for. Loading takes shapes from here; planning,
//! inspecting and packing ask here what a tensor is. The names are those of Hugging Face's checkpoints; MLX's differ for routed experts.

use sluice_backend::DeltaShape;

use crate::description::{
    AttentionDescription, DeltaDescription, Description, FeedForwardDescription, LayerDescription, MixerDescription,
    ProjectionLayout,
};

/// What a weight is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightClass {
    Embedding,
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
    /// Routers and the gates of shared experts, which decide.
    Router,
    /// Norms, convolutions and the like.
    Vector,
    /// Routed experts: some of them are used for a token.
    Expert,
}

impl WeightClass {
    /// What people call the part of the model.
    pub fn name(self) -> &'static str {
        match self {
            WeightClass::Embedding => "embedding",
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

    /// Whether these are matrices of layers that every token goes through.
    pub fn is_dense(self) -> bool {
        use WeightClass::{Attention, Mlp, Recurrent, SharedExpert};
        matches!(self, Attention | Recurrent | Mlp | SharedExpert)
    }
}

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightKind {
    /// `[rows, cols]`, which may be quantised; a bias of `rows` may come with it.
    Matrix,
    /// An RMS norm's weight; `centred`: less one, except in what has been through MLX's conversion.
    Norm { centred: bool },
    /// `[rows, 1, cols]`: channels and taps; `[rows, cols, 1]` at MLX.
    Convolution,
    /// A vector whose tensor's name has no `.weight`.
    Vector,
}

/// One weight of a model; of routed experts, one projection of all of a layer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightDescription {
    pub layer: Option<usize>,
    /// Its module, within the layer where it is in one: `self_attn.q_proj`, `mlp.experts.gate_proj`, `embed_tokens`.
    pub part: &'static str,
    pub class: WeightClass,
    pub kind: WeightKind,
    /// Experts that have one each, or 1.
    pub count: usize,
    /// Of one expert. A vector is one row.
    pub rows: usize,
    pub cols: usize,
    /// A bias that is stored with it is the model's, too.
    pub biased: bool,
}

impl WeightDescription {
    /// Its module within the text model: `layers.0.self_attn.q_proj`, `layers.0.mlp.experts.gate_proj`.
    pub fn name(&self) -> String {
        self.layer.map_or_else(|| self.part.to_owned(), |layer| format!("layers.{layer}.{}", self.part))
    }

    /// The same as MLX has it: `layers.0.mlp.switch_mlp.gate_proj`.
    pub fn mlx_name(&self) -> String {
        match self.class {
            WeightClass::Expert => self.name().replace(".experts.", ".switch_mlp."),
            _ => self.name(),
        }
    }

    /// For tables by layer: its part, less what says that it is a feed-forward one.
    pub fn label(&self) -> &'static str {
        self.part.strip_prefix("mlp.").unwrap_or(self.part)
    }

    /// The projection's name among an expert's, such as `gate_proj`.
    pub fn projection(&self) -> &'static str {
        self.part.rsplit('.').next().unwrap_or(self.part)
    }

    pub fn elements(&self) -> u64 {
        self.count as u64 * self.rows as u64 * self.cols as u64
    }
}

fn matrix(part: &'static str, class: WeightClass, rows: usize, cols: usize) -> WeightDescription {
    WeightDescription { layer: None, part, class, kind: WeightKind::Matrix, count: 1, rows, cols, biased: false }
}

fn vector(part: &'static str, kind: WeightKind, cols: usize) -> WeightDescription {
    WeightDescription { layer: None, part, class: WeightClass::Vector, kind, count: 1, rows: 1, cols, biased: false }
}

impl AttentionDescription {
    fn weights(&self, hidden: usize, norm: WeightKind) -> Vec<WeightDescription> {
        let biased = self.biased;
        let projection =
            |part, rows, cols| WeightDescription { biased, ..matrix(part, WeightClass::Attention, rows, cols) };
        let mut all = vec![
            projection("self_attn.q_proj", self.q_cols(), hidden),
            projection("self_attn.k_proj", self.kv_cols(), hidden),
            projection("self_attn.v_proj", self.kv_cols(), hidden),
            projection("self_attn.o_proj", hidden, self.heads * self.head_dim),
        ];
        if self.normed {
            all.extend(["self_attn.q_norm", "self_attn.k_norm"].map(|part| vector(part, norm, self.head_dim)));
        }
        all
    }
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
            ProjectionLayout::ByKeyHead => vec![
                projection("linear_attn.in_proj_qkvz", channels + values, hidden),
                projection("linear_attn.in_proj_ba", 2 * value_heads, hidden),
            ],
        };
        all.extend([
            WeightDescription { rows: channels, ..vector("linear_attn.conv1d", WeightKind::Convolution, taps) },
            vector("linear_attn.A_log", WeightKind::Vector, value_heads),
            vector("linear_attn.dt_bias", WeightKind::Vector, value_heads),
            // Stored as it is in every model.
            vector("linear_attn.norm", WeightKind::Norm { centred: false }, value_dim),
            projection("linear_attn.out_proj", hidden, values),
        ]);
        all
    }
}

impl FeedForwardDescription {
    fn weights(&self, hidden: usize) -> Vec<WeightDescription> {
        // A bias of one of these is the model's, and refused when it is loaded.
        let gated = |part, class, rows, cols| WeightDescription { biased: true, ..matrix(part, class, rows, cols) };
        let moe = match self {
            FeedForwardDescription::Dense { intermediate } => {
                return vec![
                    gated("mlp.gate_proj", WeightClass::Mlp, *intermediate, hidden),
                    gated("mlp.up_proj", WeightClass::Mlp, *intermediate, hidden),
                    gated("mlp.down_proj", WeightClass::Mlp, hidden, *intermediate),
                ];
            }
            FeedForwardDescription::Moe(moe) => moe,
        };
        let mut all = vec![matrix("mlp.gate", WeightClass::Router, moe.count, hidden)];
        if let Some(width) = moe.shared {
            all.extend([
                gated("mlp.shared_expert.gate_proj", WeightClass::SharedExpert, width, hidden),
                gated("mlp.shared_expert.up_proj", WeightClass::SharedExpert, width, hidden),
                gated("mlp.shared_expert.down_proj", WeightClass::SharedExpert, hidden, width),
                matrix("mlp.shared_expert_gate", WeightClass::Router, 1, hidden),
            ]);
        }
        let expert =
            |part, rows, cols| WeightDescription { count: moe.count, ..matrix(part, WeightClass::Expert, rows, cols) };
        all.extend([
            expert("mlp.experts.gate_proj", moe.intermediate, hidden),
            expert("mlp.experts.up_proj", moe.intermediate, hidden),
            expert("mlp.experts.down_proj", hidden, moe.intermediate),
        ]);
        all
    }
}

impl LayerDescription {
    /// Without the layer's number.
    fn weights(&self, hidden: usize, norm: WeightKind) -> Vec<WeightDescription> {
        let mut all = vec![vector("input_layernorm", norm, hidden)];
        all.extend(match &self.mixer {
            MixerDescription::Attention(attention) => attention.weights(hidden, norm),
            MixerDescription::DeltaNet(delta) => delta.weights(hidden),
        });
        all.push(vector("post_attention_layernorm", norm, hidden));
        all.extend(self.feed_forward.weights(hidden));
        all
    }
}

impl Description {
    /// Every weight of the model, layer by layer.
    pub fn weights(&self) -> impl Iterator<Item = WeightDescription> {
        let [embedding, norm, head] = self.outer();
        let layers = (0..self.layers.len()).flat_map(|layer| self.layer_weights(layer));
        std::iter::once(embedding).chain(layers).chain([norm]).chain((!self.tied).then_some(head))
    }

    /// Those of one layer; none where there is no such layer.
    pub fn layer_weights(&self, layer: usize) -> Vec<WeightDescription> {
        let weights = self.layers.get(layer).map(|l| l.weights(self.hidden, self.norm_kind())).unwrap_or_default();
        weights.into_iter().map(|w| WeightDescription { layer: Some(layer), ..w }).collect()
    }

    /// Embedding, last norm, head: the head is here also where it is the embedding, since a checkpoint may store it all the same.
    fn outer(&self) -> [WeightDescription; 3] {
        [
            matrix("embed_tokens", WeightClass::Embedding, self.vocabulary, self.hidden),
            vector("norm", self.norm_kind(), self.hidden),
            matrix("lm_head", WeightClass::Head, self.vocabulary, self.hidden),
        ]
    }

    fn norm_kind(&self) -> WeightKind {
        WeightKind::Norm { centred: self.centred_norms }
    }

    /// The weight that is called `part` in `layer`, or outside of layers.
    pub(crate) fn weight(&self, layer: Option<usize>, part: &str) -> Option<WeightDescription> {
        match layer {
            Some(layer) => self.layer_weights(layer).into_iter().find(|w| w.part == part),
            None => self.outer().into_iter().find(|w| w.part == part),
        }
    }

    /// What the tensor is that the text model calls `short`, however the checkpoint lays experts out. `None`: nothing that this
    /// model has.
    pub fn meaning(&self, short: &str) -> Option<Meaning> {
        let (layer, rest) = match short.strip_prefix("layers.") {
            Some(inside) => {
                let (number, rest) = inside.split_once('.')?;
                (Some(number.parse().ok()?), rest)
            }
            None => (None, short),
        };
        // 1. routed experts, in one of three spellings
        let stacked = rest.split_once(".switch_mlp.").map(|(module, rest)| (module, None, rest));
        let by_expert = || {
            let (module, rest) = rest.split_once(".experts.")?;
            Some(match rest.split_once('.').map(|(number, part)| (number.parse().ok(), part)) {
                Some((Some(expert), part)) => (module, Some(expert), part),
                _ => (module, None, rest),
            })
        };
        if let Some((module, expert, rest)) = stacked.or_else(by_expert) {
            let of_module = |w: &WeightDescription| w.part.split_once(".experts.").is_some_and(|(m, _)| m == module);
            let all = self.layer_weights(layer?).into_iter().filter(of_module);
            let all: Vec<WeightDescription> = all.collect();
            let (&weight, projections) = (all.first()?, all.iter());
            if expert.is_some() && rest == "padding" {
                return Some(Meaning { weight, with: None, expert, leaf: Leaf::Padding });
            }
            // The rows of gate and up, one after the other for each expert.
            if expert.is_none() && rest == "gate_up_proj" {
                return Some(Meaning { weight, with: all.get(1).copied(), expert, leaf: Leaf::Bare });
            }
            let found = projections.filter_map(|w| Some((*w, Leaf::of(rest.strip_prefix(w.projection())?)?))).next();
            return Some(match found {
                Some((weight, leaf)) => Meaning { weight, with: None, expert, leaf },
                None => Meaning { weight, with: None, expert, leaf: Leaf::Other },
            });
        }
        // 2. all else: the module of the longest name, and what of it
        let all = if layer.is_some() { self.layer_weights(layer?) } else { self.outer().to_vec() };
        let found = all.into_iter().filter_map(|w| Some((w, Leaf::of(rest.strip_prefix(w.part)?)?)));
        let (weight, leaf) = found.max_by_key(|(w, _)| w.part.len())?;
        Some(Meaning { weight, with: None, expert: None, leaf })
    }
}

/// What of a weight a tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaf {
    /// Its name is the module's: a vector, or experts stacked by Hugging Face.
    Bare,
    /// `.weight`: the values, or the packed integers where there are scales.
    Weight,
    /// `.bias`, which is added to what comes out.
    Bias,
    /// `.scales` and `.biases` of quantised groups.
    Scales,
    Biases,
    /// `.padding` behind an expert of a bundle: for the file, not for the model.
    Padding,
    /// Something else of a module that is known.
    Other,
}

impl Leaf {
    /// From what stands behind a module's name; `None`: it is the name of another one.
    fn of(rest: &str) -> Option<Leaf> {
        Some(match rest {
            "" => Leaf::Bare,
            ".weight" => Leaf::Weight,
            ".bias" => Leaf::Bias,
            ".scales" => Leaf::Scales,
            ".biases" => Leaf::Biases,
            _ if rest.starts_with('.') => Leaf::Other,
            _ => return None,
        })
    }
}

/// What a tensor of a checkpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meaning {
    pub weight: WeightDescription,
    /// The weight whose rows follow in each expert, where two are stored as one.
    pub with: Option<WeightDescription>,
    /// The expert that it is of, where each has tensors of its own.
    pub expert: Option<usize>,
    pub leaf: Leaf,
}
