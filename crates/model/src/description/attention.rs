//! Attention layers: their shapes and variants, and which of them share a cache.

use super::cache_group::{CacheContent, CacheGroup, CacheKind};
use super::compressed::CompressedDescription;
use crate::config::Config;
use anyhow::{Result, ensure};

/// How keys and values are made of a layer's input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttentionVariant {
    /// Each key and value head is a projection of the input, and query heads share them (Ainslie et al. 2023).
    Grouped,
    /// Keys and values are projections of a small vector, which is cached in their place, beside one rotated key for all heads (DeepSeek-V2).
    Latent(LatentDescription),
    /// One row is key and value of all heads; entries that are made of several positions are seen behind a window (DeepSeek-V4).
    Compressed(CompressedDescription),
}

/// The sizes of latent attention. Of a head's `head_dim` elements the last `rotary_dim` are rotated; their keys are one for all heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentDescription {
    /// Elements of the vector that queries are projections of; `None`: of the input itself.
    pub q_rank: Option<usize>,
    /// Elements of the vector that keys and values are projections of.
    pub kv_rank: usize,
    /// Rotated elements of each query head, and of the one rotated key.
    pub rotary_dim: usize,
    /// Added to the mean square in the norms of both vectors.
    pub norm_eps: f64,
    /// The projections of keys and of values are two stacks with a matrix for each head, that of keys transposed (MLX, newer GGUF files); otherwise they are rows of
    /// one matrix, head after head.
    pub split: bool,
    /// What attention gives is multiplied by the sigmoid of a projection of the layer's input (Kimi-K3).
    pub gated: bool,
}

/// A sparse indexer (DeepSeek-V3.2; of grouped attention Qwen4-Exp, whose heads weigh alike, and so do positions of a pool).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexDescription {
    /// Its heads.
    pub heads: usize,
    /// Elements of its keys, and of each head's query. The first are rotated, as many as in attention.
    pub head_dim: usize,
    /// The most positions that a token sees.
    pub top: usize,
    /// Elements 2i and 2i + 1 of what is rotated are turned together, instead of i and half of it later.
    pub adjacent_pairs: bool,
    /// It selects whole pools of so many positions, beside those behind the last whole one (GLM-5.3).
    pub pool: Option<usize>,
    /// The positions are those that the last indexer before has selected: there is none of its own (GLM-5).
    pub shared: bool,
    /// In grouped attention: its queries and its key are projections of a matrix each (GGUF), and not of one.
    pub split: bool,
}

/// What the references' norms of the small vectors add, whatever a config's `rms_norm_eps` is.
const LATENT_EPS: f64 = 1e-6;

/// Which projections of an attention layer may have a bias. A stored bias of another one is not the model's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionBiases {
    /// No projection.
    None,
    /// Query, key and value.
    Inputs,
    /// All four.
    All,
}

/// Where the values of a layer come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueSource {
    /// From a projection of their own.
    Projected,
    /// They are what the projection of keys gives, before its norm and its rotation (K = V, Gemma 4).
    Keys,
}

/// The query at position p is multiplied by `1 + beta * ln(1 + floor(p / period))` (Llama 4, Ministral 3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// How much it grows.
    pub beta: f64,
    /// Positions between two steps: as many as the model was first trained with.
    pub period: usize,
}

impl QueryGrowth {
    /// The factors of positions `period * i ..`, as many as `positions` need.
    pub fn factors(&self, positions: usize) -> Vec<f32> {
        let factor = |i: usize| (1.0 + self.beta * libm::log(1.0 + i as f64)) as f32;
        (0..positions.div_ceil(self.period).max(1)).map(factor).collect()
    }
}

/// A softmax attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDescription {
    /// How keys and values come about.
    pub variant: AttentionVariant,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values; they divide the query heads.
    pub kv_heads: usize,
    /// Elements of a query head and of a key head.
    pub head_dim: usize,
    /// Elements of a value head.
    pub v_dim: usize,
    /// Each query head comes with a gate of its size.
    pub gated: bool,
    /// Each head of q and k is normed.
    pub normed: bool,
    /// Their norms take all heads together as one vector (OLMo 2, MiniMax-M2).
    pub whole_norms: bool,
    /// Where values come from.
    pub values: ValueSource,
    /// Each head of v goes through a norm that has no weights (Gemma 4).
    pub values_normed: bool,
    /// Keys and values are those of the last layer before with a cache like this one's: there are none of its own (Gemma 3n).
    pub shared: bool,
    /// q, k and v are rows of one matrix, one after the other (Phi-3).
    pub joined: bool,
    /// Queries and keys are turned by their positions; otherwise they know none (NoPE).
    pub rotated: bool,
    /// Elements 2i and 2i + 1 of the rotated part of a head are turned together, instead of i and half of it later (GLM-4).
    pub adjacent_pairs: bool,
    /// Queries are multiplied by a factor that grows with the position.
    pub query_growth: Option<QueryGrowth>,
    /// Which projections may have biases.
    pub biases: AttentionBiases,
    /// Only so many positions are visible, the token's own and those before it.
    pub window: Option<usize>,
    /// Scores `s` become `cap * tanh(s / cap)` (Gemma 2).
    pub softcap: Option<f32>,
    /// Each query head has a learned logit that takes part in the softmax and has no value (gpt-oss).
    pub sinks: bool,
    /// Scores are multiplied by this; `None`: by one over the root of `head_dim`.
    pub scale: Option<f32>,
    /// What selects the positions that a token sees; `None`: it sees all.
    pub index: Option<IndexDescription>,
}

impl AttentionDescription {
    /// Grouped attention over all positions, with norms on q and k.
    ///
    /// # Errors
    /// A key that is missing or wrong.
    pub fn read(config: &Config, gated: bool) -> Result<AttentionDescription> {
        let heads = config.size("num_attention_heads")?;
        let hidden = config.size("hidden_size")?;
        let path = config.path().display();
        ensure!(
            config.get("head_dim").is_some() || hidden >= heads,
            "{path}: `num_attention_heads` is {heads}, more than `hidden_size`, and there is no `head_dim`"
        );
        AttentionDescription::read_with(config, gated, config.size_or("head_dim", hidden / heads)?)
    }

    /// The same without gates, with heads of that size, whatever the config says.
    ///
    /// # Errors
    /// A key that is missing or wrong.
    pub fn read_with_heads_of(config: &Config, head_dim: usize) -> Result<AttentionDescription> {
        AttentionDescription::read_with(config, false, head_dim)
    }

    /// Latent attention. `q_rank`: the default of `q_lora_rank`.
    ///
    /// # Errors
    /// A key that is missing or wrong.
    pub fn read_latent(config: &Config, q_rank: usize) -> Result<AttentionDescription> {
        AttentionDescription::read_latent_with(config, q_rank, config.size("qk_rope_head_dim")?)
    }

    /// The same with so many rotated elements, whatever the config says.
    ///
    /// # Errors
    /// A key that is missing or wrong.
    pub fn read_latent_with(config: &Config, q_rank: usize, rotary_dim: usize) -> Result<AttentionDescription> {
        let plain = config.size("qk_nope_head_dim")?;
        let path = config.path().display();
        ensure!(rotary_dim.is_multiple_of(2), "{path}: `qk_rope_head_dim` is {rotary_dim}, expected an even number");
        let read = AttentionDescription::read_with(config, false, plain + rotary_dim)?;
        let latent = LatentDescription {
            q_rank: config.size_or_null("q_lora_rank", Some(q_rank))?,
            kv_rank: config.size("kv_lora_rank")?,
            rotary_dim,
            norm_eps: LATENT_EPS,
            split: false,
            gated: false,
        };
        let v_dim = config.size("v_head_dim")?;
        config.product("`num_attention_heads` and `v_head_dim`", &[read.heads, plain + v_dim])?;
        config.product("`num_attention_heads` and `kv_lora_rank`", &[read.heads, latent.kv_rank])?;
        Ok(AttentionDescription {
            variant: AttentionVariant::Latent(latent),
            // Each head has its own; what is cached is one for all.
            kv_heads: read.heads,
            v_dim,
            normed: false,
            adjacent_pairs: config.flag_or("rope_interleave", true)?,
            ..read
        })
    }

    fn read_with(config: &Config, gated: bool, head_dim: usize) -> Result<AttentionDescription> {
        let heads = config.size("num_attention_heads")?;
        let kv_heads = config.size_or("num_key_value_heads", heads)?;
        let path = config.path().display();
        config.product("`num_attention_heads` and `head_dim`", &[heads, head_dim])?;
        ensure!(heads.is_multiple_of(kv_heads), "{path}: {heads} query heads cannot share {kv_heads} key/value heads");
        let biases = match config.flag_or("attention_bias", false)? {
            true => AttentionBiases::All,
            false => AttentionBiases::None,
        };
        Ok(AttentionDescription {
            variant: AttentionVariant::Grouped,
            heads,
            kv_heads,
            head_dim,
            v_dim: head_dim,
            gated,
            normed: true,
            whole_norms: false,
            values: ValueSource::Projected,
            values_normed: false,
            shared: false,
            joined: false,
            rotated: true,
            adjacent_pairs: false,
            query_growth: None,
            biases,
            window: None,
            softcap: None,
            sinks: false,
            scale: None,
            index: None,
        })
    }

    /// Columns of the query projection.
    pub fn q_cols(&self) -> usize {
        self.heads * self.head_dim * if self.gated { 2 } else { 1 }
    }

    /// Columns of the key projection.
    pub fn k_cols(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Columns of the value projection.
    pub fn v_cols(&self) -> usize {
        self.kv_heads * self.v_dim
    }

    /// Columns of what the heads put out.
    pub fn out_cols(&self) -> usize {
        self.heads * self.v_dim
    }

    /// What scores are multiplied by.
    pub fn score_scale(&self) -> f32 {
        self.scale.unwrap_or((1.0 / (self.head_dim as f64).sqrt()) as f32)
    }

    /// The cache group of a model with only this layer.
    pub(super) fn cache_group(&self) -> CacheGroup {
        let (kv_heads, k_dim, v_dim) = match self.variant {
            AttentionVariant::Grouped => (self.kv_heads, self.head_dim, self.v_dim),
            AttentionVariant::Latent(latent) => (1, latent.kv_rank + latent.rotary_dim, 0),
            AttentionVariant::Compressed(_) => (1, self.head_dim, 0),
        };
        let kind = self.window.map_or(CacheKind::Full, CacheKind::Window);
        CacheGroup { kind, layers: 1, kv_heads, k_dim, v_dim, content: CacheContent::Attended, every: 1 }
    }

    /// All cache groups of a model with only this layer: first its own.
    pub(crate) fn cache_groups(&self) -> Vec<CacheGroup> {
        let mut all = vec![self.cache_group()];
        all.extend(self.index_group());
        if let AttentionVariant::Compressed(of) = self.variant {
            all.extend(of.cache_groups(self.head_dim).into_iter().flatten());
        }
        all
    }

    /// Whether its positions are those of layers with a window, where they differ.
    pub(crate) fn has_window_rotary(&self) -> bool {
        match self.variant {
            AttentionVariant::Compressed(of) => of.compression.is_none(),
            _ => self.window.is_some(),
        }
    }

    /// The cache group of its indexer's keys, if it has one of its own.
    pub(super) fn index_group(&self) -> Option<CacheGroup> {
        let index = self.index?;
        // Of pools: keys, and what weighs them.
        let is_weighed = index.pool.is_some() && self.variant != AttentionVariant::Grouped;
        let kv_heads = 1 + usize::from(is_weighed);
        let group = CacheGroup {
            k_dim: index.head_dim,
            v_dim: 0,
            kv_heads,
            content: CacheContent::IndexKeys,
            ..self.cache_group()
        };
        (!index.shared).then_some(group)
    }
}
