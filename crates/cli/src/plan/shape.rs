//! What a config says a model weighs: parameters by part, and the bytes of keys, values and states.

use anyhow::{Result, ensure};
use sluice_model::Config;

/// Parameters and dimensions of a model, from its config alone.
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
    /// The output head; 0 where it is the embedding.
    pub head: u64,
    /// Matrices that every token goes through, but for embedding and head: attention, recurrent layers, shared experts, dense layers.
    pub dense: u64,
    /// Routers and gates of shared experts, which stay at 8 bits.
    pub routers: u64,
    /// Norms, convolutions and other vectors, which stay as they are.
    pub vectors: u64,
    /// Of keys and values together, for each position.
    pub kv_elements: u64,
    /// f32 elements of a conversation's recurrent states.
    pub state_elements: u64,
    pub vocabulary: u64,
    pub max_context: u64,
}

impl Shape {
    /// # Errors
    /// A key that is missing or wrong.
    pub fn read(config: &Config) -> Result<Shape> {
        let size = |key: &str| config.size(key).map(|n| n as u64);
        let kind = config.model_type()?.trim_end_matches("_text").to_owned();
        let (hidden, vocabulary, layers) = (size("hidden_size")?, size("vocab_size")?, config.layers()?);
        let heads = size("num_attention_heads")?;
        let kv_heads = config.size_or("num_key_value_heads", heads as usize)? as u64;
        ensure!(heads > 0 && hidden >= heads, "{}: {heads} heads of {hidden}", config.path().display());
        let dim = config.size_or("head_dim", (hidden / heads) as usize)? as u64;
        let hybrid = matches!(kind.as_str(), "qwen3_next" | "qwen3_5" | "qwen3_5_moe");
        let types = config.strings("layer_types")?;
        let every = config.size_or("full_attention_interval", 4)?;
        let is_attention = |layer: usize| match &types {
            _ if !hybrid => true,
            Some(types) => types.get(layer) == Some(&"full_attention"),
            None => (layer + 1).is_multiple_of(every),
        };
        let count = if config.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
        let experts = if config.get(count).is_some() { config.size(count)? } else { 0 };
        let (step, only) = (config.size_or("decoder_sparse_step", 1)?, config.indices("mlp_only_layers")?);

        let mut s = Shape {
            layers,
            expert_layers: 0,
            experts,
            k: if experts > 0 { config.size("num_experts_per_tok")? } else { 0 },
            per_expert: if experts > 0 { 3 * hidden * size("moe_intermediate_size")? } else { 0 },
            embedding: vocabulary * hidden,
            head: if config.tied_embeddings()? { 0 } else { vocabulary * hidden },
            dense: 0,
            routers: 0,
            vectors: hidden,
            kv_elements: 0,
            state_elements: 0,
            vocabulary,
            max_context: config.size_or("max_position_embeddings", 32768)? as u64,
        };
        let shared = config.get("shared_expert_intermediate_size").is_some();
        for layer in 0..layers {
            s.vectors += 2 * hidden;
            if is_attention(layer) {
                // A gate beside each query, in the hybrids.
                let q = heads * dim * if hybrid { 2 } else { 1 };
                s.dense += hidden * (q + 2 * kv_heads * dim) + heads * dim * hidden;
                s.vectors += 2 * dim;
                s.kv_elements += 2 * kv_heads * dim;
            } else {
                let (key_dim, value_dim) = (size("linear_key_head_dim")?, size("linear_value_head_dim")?);
                let (keys, value_heads) = (size("linear_num_key_heads")? * key_dim, size("linear_num_value_heads")?);
                let (values, taps) = (value_heads * value_dim, config.size_or("linear_conv_kernel_dim", 4)? as u64);
                let channels = 2 * keys + values;
                s.dense += hidden * (channels + values + 2 * value_heads) + values * hidden;
                s.vectors += channels * taps + 2 * value_heads + value_dim;
                s.state_elements += values * key_dim + (taps - 1) * channels;
            }
            if experts > 0 && !only.contains(&layer) && (layer + 1).is_multiple_of(step) {
                s.expert_layers += 1;
                s.routers += experts as u64 * hidden;
                if shared {
                    s.dense += 3 * hidden * size("shared_expert_intermediate_size")?;
                    s.routers += hidden;
                }
            } else {
                s.dense += 3 * hidden * size("intermediate_size")?;
            }
        }
        Ok(s)
    }

    /// All parameters.
    pub fn parameters(&self) -> u64 {
        let experts = self.expert_layers as u64 * self.experts as u64 * self.per_expert;
        self.embedding + self.head + self.dense + self.routers + self.vectors + experts
    }

    /// Parameters that a token goes through, `k` experts in each layer.
    pub fn active(&self, k: usize) -> u64 {
        let experts = self.expert_layers as u64 * k as u64 * self.per_expert;
        self.head.max(self.embedding) + self.dense + self.routers + self.vectors + experts
    }
}
