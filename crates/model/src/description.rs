//! What a config says of a model: its parts and their sizes, before a byte of a weight is looked at. Loading, planning, inspecting, packing and placing
//! all go by it, so that a new architecture is the one file that makes it.

use std::sync::Arc;

use anyhow::{Result, ensure};
use sluice_backend::{AttentionMode, DeltaShape, KvLayout, KvType, RotaryFrequencies, Scoring};

use crate::config::Config;
use crate::mlx::Mlx;
use crate::rope::Rotary;

/// A decoder-only transformer: embedding, layers of a token mixer and a feed-forward part, head.
#[derive(Clone, Debug)]
pub struct Description {
    /// As `model_type` calls it.
    pub architecture: &'static str,
    pub vocabulary: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// The longest context that the model was made for.
    pub max_context: usize,
    /// Added to the mean square in every norm.
    pub eps: f64,
    /// Norm weights are stored minus one.
    pub centred_norms: bool,
    /// The output head is the embedding. What only the config says of it may be wrong: see [`crate::describe_stored`].
    pub tied: bool,
    /// Of all attention layers.
    pub rotary: RotaryFrequencies,
    pub layers: Vec<LayerDescription>,
    /// How `mlx_lm` wants such a model, for whoever writes one.
    pub mlx: Mlx,
    /// What the user should hear: where config and files disagree, and what of the config is not followed. A line each.
    pub notes: Vec<String>,
}

/// What the parts of every architecture's config have in common.
pub struct Outline {
    pub count: usize,
    pub hidden: usize,
    pub max_context: usize,
}

/// A layer.
#[derive(Clone, Debug)]
pub struct LayerDescription {
    pub mixer: MixerDescription,
    pub feed_forward: FeedForwardDescription,
}

/// What mixes tokens in a layer.
#[derive(Clone, Debug)]
pub enum MixerDescription {
    Attention(AttentionDescription),
    DeltaNet(DeltaDescription),
}

/// Softmax attention with grouped queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionDescription {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Each query head comes with a gate of its size.
    pub gated: bool,
    /// Each head of q and k is normed.
    pub normed: bool,
    /// Its projections may have biases. Where the config does not say so, stored ones are not the model's.
    pub biased: bool,
    /// Only the last so many positions are visible.
    pub window: Option<usize>,
}

/// How a checkpoint lays the input projections of GatedDeltaNet out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProjectionLayout {
    /// `in_proj_qkvz` and `in_proj_ba`, interleaved by key head: q, k, then its value heads' v and z; b and a alike (Qwen3-Next).
    ByKeyHead,
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` (Qwen3.5).
    Separate,
}

/// GatedDeltaNet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaDescription {
    pub shape: DeltaShape,
    pub layout: ProjectionLayout,
}

/// The second half of a layer.
#[derive(Clone, Debug)]
pub enum FeedForwardDescription {
    /// `down(silu(gate(x)) * up(x))`
    Dense {
        intermediate: usize,
    },
    Moe(Arc<MoeDescription>),
}

/// A mixture of experts.
#[derive(Clone, Debug)]
pub struct MoeDescription {
    /// Experts, and the width of each.
    pub count: usize,
    pub intermediate: usize,
    pub scoring: Scoring,
    /// The width of an expert that every token takes.
    pub shared: Option<usize>,
}

/// Which positions a cache group keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheKind {
    /// Every position.
    Full,
    /// The last so many.
    Window(usize),
}

/// Layers whose keys and values are cached alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    pub kind: CacheKind,
    pub layers: usize,
    pub kv_heads: usize,
    pub k_dim: usize,
    pub v_dim: usize,
}

impl CacheGroup {
    pub fn layout(&self, kv_type: KvType, mode: AttentionMode, block_tokens: usize) -> KvLayout {
        let CacheGroup { layers, kv_heads, k_dim, v_dim, .. } = *self;
        KvLayout { layers, kv_heads, k_dim, v_dim, kv_type, mode, block_tokens }
    }
}

impl Outline {
    pub fn read(config: &Config) -> Result<Outline> {
        config.require("hidden_act", "silu")?;
        Ok(Outline {
            count: config.layers()?,
            hidden: config.size("hidden_size")?,
            max_context: config.max_positions()?,
        })
    }

    /// The description that these layers make.
    pub fn with(
        self,
        config: &Config,
        architecture: &'static str,
        centred_norms: bool,
        rotary: Rotary,
        layers: Vec<LayerDescription>,
        mlx: Mlx,
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
            rotary: rotary.frequencies,
            layers,
            mlx,
            notes,
        })
    }
}

impl AttentionDescription {
    /// Full attention, normed.
    pub fn read(config: &Config, gated: bool) -> Result<AttentionDescription> {
        let heads = config.size("num_attention_heads")?;
        let kv_heads = config.size_or("num_key_value_heads", heads)?;
        let hidden = config.size("hidden_size")?;
        let path = config.path().display();
        ensure!(
            config.get("head_dim").is_some() || hidden >= heads,
            "{path}: `num_attention_heads` is {heads}, more than `hidden_size`, and there is no `head_dim`"
        );
        let head_dim = config.size_or("head_dim", hidden / heads)?;
        config.product("`num_attention_heads` and `head_dim`", &[heads, head_dim])?;
        ensure!(heads.is_multiple_of(kv_heads), "{path}: {heads} query heads cannot share {kv_heads} key/value heads");
        let biased = config.flag_or("attention_bias", false)?;
        Ok(AttentionDescription { heads, kv_heads, head_dim, gated, normed: true, biased, window: None })
    }

    /// Columns of the query projection.
    pub fn q_cols(&self) -> usize {
        self.heads * self.head_dim * if self.gated { 2 } else { 1 }
    }

    /// Columns of the key projection, and of the value projection.
    pub fn kv_cols(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn kind(&self) -> CacheKind {
        self.window.map_or(CacheKind::Full, CacheKind::Window)
    }
}

impl DeltaDescription {
    pub fn read(config: &Config, layout: ProjectionLayout) -> Result<DeltaDescription> {
        let shape = DeltaShape {
            key_heads: config.size("linear_num_key_heads")?,
            value_heads: config.size("linear_num_value_heads")?,
            key_dim: config.size("linear_key_head_dim")?,
            value_dim: config.size("linear_value_head_dim")?,
            taps: config.size_or("linear_conv_kernel_dim", 4)?,
        };
        config.product("`linear_num_key_heads` and `linear_key_head_dim`", &[shape.key_heads, shape.key_dim])?;
        config.product(
            "`linear_num_value_heads`, `linear_key_head_dim` and `linear_value_head_dim`",
            &[shape.value_heads, shape.key_dim, shape.value_dim],
        )?;
        let (path, keys, values) = (config.path().display(), shape.key_heads, shape.value_heads);
        ensure!(values.is_multiple_of(keys), "{path}: {values} linear value heads cannot share {keys} key heads");
        Ok(DeltaDescription { shape, layout })
    }

    /// Columns of what it puts out.
    pub fn values(&self) -> usize {
        self.shape.value_heads * self.shape.value_dim
    }
}

impl MoeDescription {
    /// `experts_per_token`: instead of the config's. `renormalise`: the chosen weights are divided by their sum.
    pub fn read(config: &Config, experts_per_token: Option<usize>, renormalise: bool) -> Result<MoeDescription> {
        // Newer versions of the reference write the second name for some architectures.
        let key = if config.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
        let count = config.size(key)?;
        let k = experts_per_token.map_or_else(|| config.size("num_experts_per_tok"), Ok)?;
        ensure!(k <= count, "{k} experts per token, but only {count} experts");
        let intermediate = config.size("moe_intermediate_size")?;
        Ok(MoeDescription { count, intermediate, scoring: Scoring::SoftmaxTopK { k, renormalise }, shared: None })
    }
}

impl Description {
    /// The cache groups: layers whose keys and values are cached alike, in the order in which they are first met.
    pub fn groups(&self) -> Vec<CacheGroup> {
        let mut groups: Vec<CacheGroup> = Vec::new();
        for attention in self.attention_layers() {
            let (kind, kv_heads, dim) = (attention.kind(), attention.kv_heads, attention.head_dim);
            match groups.iter_mut().find(|g| g.kind == kind) {
                Some(group) => group.layers += 1,
                None => groups.push(CacheGroup { kind, layers: 1, kv_heads, k_dim: dim, v_dim: dim }),
            }
        }
        groups
    }

    /// The cache group of an attention layer.
    pub(crate) fn group_of(&self, attention: &AttentionDescription) -> usize {
        let group = self.groups().iter().position(|g| g.kind == attention.kind());
        group.expect("one of this model's layers")
    }

    /// The attention layers, in order.
    pub fn attention_layers(&self) -> impl Iterator<Item = &AttentionDescription> {
        self.layers.iter().filter_map(|l| match &l.mixer {
            MixerDescription::Attention(a) => Some(a),
            MixerDescription::DeltaNet(_) => None,
        })
    }

    /// The recurrent layers, in order.
    pub fn recurrent_layers(&self) -> impl Iterator<Item = &DeltaDescription> {
        self.layers.iter().filter_map(|l| match &l.mixer {
            MixerDescription::DeltaNet(d) => Some(d),
            MixerDescription::Attention(_) => None,
        })
    }

    /// The mixtures of experts, in order.
    pub fn moe_layers(&self) -> impl Iterator<Item = &MoeDescription> {
        self.layers.iter().filter_map(|l| match &l.feed_forward {
            FeedForwardDescription::Moe(moe) => Some(&**moe),
            FeedForwardDescription::Dense { .. } => None,
        })
    }

    /// f32 elements of a sequence's recurrent state, all layers together; 0 without recurrent layers.
    pub fn state_len(&self) -> usize {
        self.recurrent_layers().map(|d| d.shape.state_len()).sum()
    }

    /// Experts per layer and per token, for a mixture.
    pub fn experts(&self) -> Option<(usize, usize)> {
        self.moe_layers().map(|moe| (moe.count, moe.scoring.k())).max()
    }

    /// Elements of keys and values together, for each position.
    pub fn kv_elements(&self) -> usize {
        self.groups().iter().map(|g| g.layers * g.kv_heads * (g.k_dim + g.v_dim)).sum()
    }
}
