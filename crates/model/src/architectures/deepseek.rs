//! DeepSeek-V3, V3.1 and R1, and Kimi-K2, which has their layers: latent attention, and a sigmoid mixture with a shared expert behind some dense layers. DeepSeek-V2's
//! mixture has a softmax. Reference: `modeling_deepseek_v3.py` and `modeling_deepseek_v2.py` of transformers.

use anyhow::{Result, ensure};
use serde_json::json;

use super::glm4_moe;
use crate::config::Config;
use crate::description::{
    AttentionDescription, Description, MoeDescription, Outline, RouterDescription, RouterScoring,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope::{self, Rotary};

/// The default of `q_lora_rank`.
const Q_RANK: usize = 1536;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    config.require("scoring_func", "sigmoid")?;
    config.require("topk_method", "noaux_tc")?;
    let moe = glm4_moe::mixture(config, options, (8, 4), 2.5)?;
    // Multimodal Kimi-K2.5 keeps its text model apart.
    let prefix = if config.is_multimodal() { "language_model." } else { "" };
    layers(config, options, ("deepseek_v3", prefix), moe, 3)
}

pub(crate) fn describe_v2(config: &Config, options: &Options) -> Result<Description> {
    config.require("scoring_func", "softmax")?;
    let path = config.path().display();
    // The reference never divides by the sum, whatever the config says.
    ensure!(!config.flag_or("norm_topk_prob", false)?, "{path}: `norm_topk_prob` is true, which is not supported");
    ensure!(!config.flag_or("mlp_bias", false)?, "{path}: `mlp_bias` is true, which is not supported");
    let read = glm4_moe::mixture(config, options, (1, 1), 1.0)?;
    let groups = read.router.groups.filter(|_| config.get("topk_method").is_some_and(|m| m != "greedy"));
    let router = RouterDescription {
        scoring: RouterScoring::Softmax,
        correction_bias: false,
        normalise: false,
        groups,
        ..read.router
    };
    layers(config, options, ("deepseek_v2", ""), MoeDescription { router, ..read }, 0)
}

/// `dense`: the default of `first_k_dense_replace`.
fn layers(
    config: &Config,
    options: &Options,
    (architecture, prefix): (&'static str, &'static str),
    moe: MoeDescription,
    dense: usize,
) -> Result<Description> {
    let outline = Outline::read(config)?;
    let read = AttentionDescription::read_latent(config, Q_RANK)?;
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, config.size("qk_rope_head_dim")?, None, context)?;
    let attention = scaled(read, &rotary);
    let every = config.size_or("moe_layer_freq", 1)?;
    let path = config.path().display();
    ensure!(every == 1, "{path}: `moe_layer_freq` is {every}, which is not supported");
    let layers = glm4_moe::dense_then_mixture(config, outline.count, dense, attention, moe)?;
    let mut keys = rotary_keys(config).to_vec();
    keys.push(("moe_layer_freq", Some(json!(1))));
    let described = outline.with(config, architecture, false, rotary, layers, MlxLm::new(config, prefix, keys))?;
    Ok(Description { spelling: glm4_moe::SPELLING, ..described })
}

/// With the factor that YaRN has for scores.
pub(super) fn scaled(attention: AttentionDescription, rotary: &Rotary) -> AttentionDescription {
    let scale = rotary.score_factor / (attention.head_dim as f64).sqrt();
    AttentionDescription { scale: Some(scale as f32), ..attention }
}
