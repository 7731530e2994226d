//! GLM-5.3-Flash: several residual streams, Kimi Delta Attention with bounded decays, latent attention without positions over pools that an indexer selects, clamped SwiGLU in all feed-forward parts. Reference:
//! `modeling_glm5_next.py` of transformers; of a checkpoint with images, the text model.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use serde_json::Value;
use sluice_backend::{MOST_POOLED, MOST_STREAMS, RotaryFrequencies};

use super::{deepseek_v32, glm4_moe, glm4_moe_lite, kimi_linear};
use crate::config::Config;
use crate::description::{
    AttentionDescription, AttentionVariant, ChannelDeltaDescription, DenseActivation, Description, ExpertActivation,
    FeedForwardDescription, IndexDescription, LayerDescription, MixerDescription, MoeDescription, Outline,
    StreamMixing, StreamsDescription,
};
use crate::mlx_lm::MlxLm;
use crate::options::Options;
use crate::rope::Rotary;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    config.require("scoring_func", "sigmoid")?;
    config.require("topk_method", "noaux_tc")?;
    let outline = Outline::read(config)?;
    let limit = config.float_or("swiglu_limit", 10.0, |x| x > 0.0, "a number above 0")? as f32;
    // 1. mixers
    let (attention, index) = attention(config)?;
    let delta = MixerDescription::ChannelDelta(delta(config)?);
    let shared = deepseek_v32::shared(config, outline.count)?;
    let mixer = |(is_attention, shared): (bool, bool)| match is_attention {
        true => {
            let index = Some(IndexDescription { shared, ..index });
            MixerDescription::Attention(AttentionDescription { index, ..attention })
        }
        false => delta.clone(),
    };
    let mixers = attention_layers(config, outline.count)?.into_iter().zip(shared).map(mixer);
    // 2. feed-forward parts
    let moe = glm4_moe::mixture(config, options, (1, 1), 2.5)?;
    let activation = ExpertActivation::ClampedSwiGlu { alpha: 1.0, limit, added: 0.0 };
    let moe = Arc::new(MoeDescription { activation, ..moe });
    let feed_forward = |is_dense: bool| -> Result<FeedForwardDescription> {
        Ok(match is_dense {
            true => FeedForwardDescription::Dense {
                intermediate: config.size("intermediate_size")?,
                activation: DenseActivation::ClampedSilu { limit },
                joined: false,
            },
            false => FeedForwardDescription::Moe(Arc::clone(&moe)),
        })
    };
    // The first three are dense, if the config has no list.
    let dense = glm4_moe_lite::dense_layers(config, outline.count, 3)?;
    let layer = |(mixer, is_dense): (MixerDescription, bool)| -> Result<LayerDescription> {
        Ok(LayerDescription { mixer, feed_forward: feed_forward(is_dense)? })
    };
    let layers = mixers.zip(dense).map(layer).collect::<Result<_>>()?;
    // 3. streams, and no positions
    let rotary = Rotary {
        frequencies: RotaryFrequencies { inv_freq: Vec::new(), scaling: 1.0 },
        notes: Vec::new(),
        extended: None,
        score_factor: 1.0,
    };
    let mlx = MlxLm { refuses_order: true, ..MlxLm::default() };
    let streams = Some(streams(config, false)?);
    let described = outline.with(config, "glm5_next", false, rotary, layers, mlx)?;
    Ok(Description { streams, spelling: glm4_moe::SPELLING, ..described })
}

pub(super) fn streams(config: &Config, has_head: bool) -> Result<StreamsDescription> {
    let (count, rounds) = (config.size_or("hc_mult", 4)?, config.size_or("hc_sinkhorn_iters", 20)?);
    let path = config.path().display();
    ensure!(count <= MOST_STREAMS, "{path}: `hc_mult` is {count}, more than {MOST_STREAMS}");
    ensure!(rounds <= 1000, "{path}: `hc_sinkhorn_iters` is {rounds}, more than 1000");
    config.product("`hc_mult` and `hidden_size`", &[count, config.size("hidden_size")?])?;
    let eps = config.float_or("hc_eps", 1e-6, |x| (0.0..=1.0).contains(&x), "a number from 0 to 1")?;
    Ok(StreamsDescription { count, mixing: StreamMixing::Exchanged { eps, rounds, has_head } })
}

/// Latent attention, and its indexer.
fn attention(config: &Config) -> Result<(AttentionDescription, IndexDescription)> {
    let path = config.path().display();
    let rotated = config.count_or("qk_rope_head_dim", 0)?;
    ensure!(rotated == 0, "{path}: `qk_rope_head_dim` is {rotated}, and only 0 is supported");
    ensure!(
        config.flag_or("index_kpool_always_select_tail", true)?,
        "{path}: `index_kpool_always_select_tail` is false, which is not supported"
    );
    let read = AttentionDescription::read_latent_with(config, 1536, 0)?;
    let AttentionVariant::Latent(mut latent) = read.variant else { unreachable!("as it was read") };
    latent.norm_eps = config.norm_eps()?;
    let (heads, head_dim) = (config.size_or("index_n_heads", 32)?, config.size_or("index_head_dim", 128)?);
    config.product("`index_n_heads` and `index_head_dim`", &[heads, head_dim])?;
    let (top, pool) = (config.size_or("index_topk", 2048)?, config.size_or("index_kpool", 16)?);
    ensure!(pool <= MOST_POOLED, "{path}: `index_kpool` is {pool}, more than {MOST_POOLED}");
    ensure!(top.is_multiple_of(pool), "{path}: `index_topk` is {top}, which is no multiple of `index_kpool`, {pool}");
    let index =
        IndexDescription { heads, head_dim, top, adjacent_pairs: false, pool: Some(pool), shared: false, split: false };
    let variant = AttentionVariant::Latent(latent);
    Ok((AttentionDescription { variant, adjacent_pairs: false, ..read }, index))
}

fn delta(config: &Config) -> Result<ChannelDeltaDescription> {
    let path = config.path().display();
    let default = config.float_or_null("linear_lower_bound", -5.0, |_| true, "a number")?;
    let bound = match config.get("linear_attn_config") {
        None => default,
        Some(own) => {
            let safe = own.get("safe_gate").and_then(Value::as_bool).unwrap_or(true);
            let given = match own.get("gate_lower_bound") {
                None => default,
                Some(given) => given.as_f64(),
            };
            given.or(safe.then_some(-5.0))
        }
    };
    if let Some(bound) = bound.filter(|bound| *bound > 0.0) {
        bail!("{path}: the lower bound of decays is {bound}, expected a number of at most 0");
    }
    Ok(ChannelDeltaDescription { bound: bound.map(|bound| bound as f32), ..kimi_linear::delta(config, 64)? })
}

/// Which layers are attention: by `layer_types`, or every fourth.
pub(super) fn attention_layers(config: &Config, count: usize) -> Result<Vec<bool>> {
    let path = config.path().display();
    let Some(types) = config.strings("layer_types")? else {
        return Ok((0..count).map(|layer| layer % 4 == 3).collect());
    };
    ensure!(types.len() == count, "{path}: {} layer_types for {count} layers", types.len());
    let of = |kind| match kind {
        "indexed_attention" | "full_attention" => Ok(true),
        "linear_attention" => Ok(false),
        other => bail!("{path}: layer type {other:?} is not known here"),
    };
    types.into_iter().map(of).collect()
}
