//! MiniMax-M2: norms over all of q and of k, half of a head rotated, a mixture with a sigmoid router in every layer. Reference: `modeling_minimax_m2.py` of
//! transformers.

use std::sync::Arc;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{mistral, mixtral};
use crate::config::Config;
use crate::description::{
    AttentionDescription, CORRECTION_BIAS, Description, FeedForwardDescription, LayerDescription, MixerDescription,
    MoeDescription, Outline, RouterDescription, RouterScoring,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    let path = config.path().display();
    // Keys of published configs that say what the reference does anyway.
    config.require("scoring_func", "sigmoid")?;
    config.require("qk_norm_type", "per_layer")?;
    for key in ["use_qk_norm", "use_routing_bias"] {
        ensure!(config.flag_or(key, true)?, "{path}: `{key}` is false, which is not supported");
    }
    let shared = config.count_or("shared_intermediate_size", 0)?;
    ensure!(shared == 0, "{path}: `shared_intermediate_size` is {shared}, which is not supported");
    let read = AttentionDescription::read_with_heads_of(config, config.size_or("head_dim", 128)?)?;
    let attention = AttentionDescription { whole_norms: true, biases: mistral::attention(config)?.biases, ..read };
    let keys = ("num_local_experts", "intermediate_size");
    let read = MoeDescription::read_keys(config, keys, options.experts_per_token, true)?;
    let router = RouterDescription { scoring: RouterScoring::Sigmoid, correction_bias: true, ..read.router };
    let moe = Arc::new(MoeDescription { router, ..read });
    let layer = LayerDescription {
        mixer: MixerDescription::Attention(attention),
        feed_forward: FeedForwardDescription::Moe(moe),
    };
    let layers = vec![layer; outline.count];
    // Published configs give the rotated elements in place of a part.
    let partial = match config.get("rotary_dim") {
        Some(_) => config.size("rotary_dim")? as f64 / attention.head_dim as f64,
        None => 1.0,
    };
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary_or(config, attention.head_dim, (Some(partial), 5e6), context)?;
    let mut keys: Vec<(&str, Option<Value>)> = rotary_keys(config).into();
    keys.push(("rotary_dim", Some(json!(2 * rotary.frequencies.inv_freq.len()))));
    keys.push(("scoring_func", Some(json!("sigmoid"))));
    keys.push(("use_qk_norm", Some(json!(true))));
    let described = outline.with(config, "minimax_m2", false, rotary, layers, MlxLm::new(config, "", keys))?;
    Ok(Description {
        spelling: &[(CORRECTION_BIAS, "block_sparse_moe.e_score_correction_bias"), ("mlp", "block_sparse_moe")],
        expert_spelling: mixtral::EXPERT_SPELLING,
        ..described
    })
}
