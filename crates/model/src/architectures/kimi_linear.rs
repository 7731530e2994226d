//! Kimi-Linear: Kimi Delta Attention, with latent attention that knows no positions in between, and a sigmoid mixture with a shared expert behind some dense layers. Reference:
//! `modeling_kimi_linear.py` of transformers. Kimi-K3 is the same with streams that are attended to, experts behind a projection of their own, gated latent attention and
//! SiTU in all feed-forward parts. Reference: `kimi-k3` of llama.cpp; of a checkpoint with images, the text model.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use serde_json::Value;
use sluice_backend::{DeltaShape, MOST_ATTENDED, RotaryFrequencies};

use super::{glm4_moe_lite, mixtral};
use crate::config::Config;
use crate::description::{
    AttentionDescription, AttentionVariant, ChannelDeltaDescription, DenseActivation, Description, ExpertActivation,
    ExpertGroups, FeedForwardDescription, LatentExperts, LayerDescription, MixerDescription, MoeDescription, Outline,
    RouterDescription, RouterScoring, SharedExpertDescription, StreamsDescription,
};
use crate::mlx_lm::MlxLm;
use crate::options::Options;
use crate::rope::Rotary;

const SPELLING: &[(&str, &str)] = &[
    ("mlp.gate", "block_sparse_moe.gate"),
    ("mlp.experts", "block_sparse_moe.experts"),
    ("mlp.switch_mlp", "block_sparse_moe.switch_mlp"),
    ("mlp.shared_expert", "block_sparse_moe.shared_experts"),
    ("mlp.latent_down_proj", "block_sparse_moe.routed_expert_down_proj"),
    ("mlp.latent_norm", "block_sparse_moe.routed_expert_norm"),
    ("mlp.latent_up_proj", "block_sparse_moe.routed_expert_up_proj"),
];

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    config.require("moe_router_activation_func", "sigmoid")?;
    let path = config.path().display();
    ensure!(config.flag_or("mla_use_nope", true)?, "{path}: `mla_use_nope` is false, which is not supported");
    let max_context = config.size_or("model_max_length", config.size_or("max_position_embeddings", 1_048_576)?)?;
    let outline = Outline { count: config.layers()?, hidden: config.size("hidden_size")?, max_context };
    let activation = activation(config)?;
    // What attention has of positions is turned by angles of 0.
    let read = AttentionDescription::read_latent(config, 0)?;
    let attention = AttentionDescription { adjacent_pairs: false, ..gated(config, read)? };
    let pairs = config.size("qk_rope_head_dim")? / 2;
    let rotary = Rotary {
        frequencies: RotaryFrequencies { inv_freq: vec![0.0; pairs], scaling: 1.0 },
        notes: Vec::new(),
        extended: None,
        score_factor: 1.0,
    };
    let delta = MixerDescription::ChannelDelta(gated_delta(config, delta(config, 32)?)?);
    let moe = Arc::new(MoeDescription { activation, ..mixture(config, options)? });
    let dense = glm4_moe_lite::dense_layers(config, outline.count, 1)?;
    let layer = |(is_dense, is_attention): (bool, bool)| -> Result<LayerDescription> {
        let feed_forward = match is_dense {
            true => FeedForwardDescription::Dense {
                intermediate: config.size("intermediate_size")?,
                activation: DenseActivation::of_shared(activation).unwrap_or(DenseActivation::Silu),
                joined: false,
            },
            false => FeedForwardDescription::Moe(Arc::clone(&moe)),
        };
        let mixer = if is_attention { MixerDescription::Attention(attention) } else { delta.clone() };
        Ok(LayerDescription { mixer, feed_forward })
    };
    let kinds = attention_layers(config, outline.count)?;
    let layers = dense.into_iter().zip(kinds).map(layer).collect::<Result<_>>()?;
    let mlx = MlxLm { refuses_order: true, ..MlxLm::default() };
    let streams = streams(config, &outline)?;
    let architecture = if streams.is_some() { "kimi_k3" } else { "kimi_linear" };
    let described = outline.with(config, architecture, false, rotary, layers, mlx)?;
    Ok(Description { streams, spelling: SPELLING, expert_spelling: mixtral::EXPERT_SPELLING, ..described })
}

/// What all feed-forward parts compute.
fn activation(config: &Config) -> Result<ExpertActivation> {
    if config.get("hidden_act").and_then(Value::as_str) != Some("situ") {
        config.require("hidden_act", "silu")?;
        return Ok(ExpertActivation::SwiGlu);
    }
    let bound = |key| -> Result<f32> {
        let path = config.path().display();
        ensure!(config.get(key).is_some(), "{path}: `{key}` is missing, and `hidden_act` is \"situ\"");
        Ok(config.float_or(key, 1.0, |x| x > 0.0, "a number above 0")? as f32)
    };
    Ok(ExpertActivation::SiTu { beta: bound("activation_situ_beta")?, linear: bound("activation_situ_linear_beta")? })
}

/// The streams that are attended to, if there are such.
fn streams(config: &Config, outline: &Outline) -> Result<Option<StreamsDescription>> {
    if config.get("attn_res_block_size").is_none() {
        return Ok(None);
    }
    let streams = StreamsDescription::attended(config.size("attn_res_block_size")?, outline.count);
    let path = config.path().display();
    ensure!(
        streams.count <= MOST_ATTENDED,
        "{path}: `attn_res_block_size` makes {} streams of {} layers, more than {MOST_ATTENDED}",
        streams.count,
        outline.count
    );
    config.product("`hidden_size` and the streams of `attn_res_block_size`", &[streams.count, outline.hidden])?;
    Ok(Some(streams))
}

/// Latent attention with its gate, where it has one. Then its norms have the epsilon of all others.
fn gated(config: &Config, read: AttentionDescription) -> Result<AttentionDescription> {
    let AttentionVariant::Latent(mut latent) = read.variant else { unreachable!("as it was read") };
    if config.flag_or("mla_use_output_gate", false)? {
        (latent.gated, latent.norm_eps) = (true, config.norm_eps()?);
    }
    Ok(AttentionDescription { variant: AttentionVariant::Latent(latent), ..read })
}

/// What `linear_attn_config` says of gates and decays.
fn gated_delta(config: &Config, delta: ChannelDeltaDescription) -> Result<ChannelDeltaDescription> {
    let own = config.get("linear_attn_config");
    let bound = own.and_then(|own| own.get("gate_lower_bound")).and_then(Value::as_f64);
    let path = config.path().display();
    ensure!(bound.is_none_or(|x| x <= 0.0), "{path}: `gate_lower_bound` is {bound:?}, expected a number of at most 0");
    let full_gate = own.and_then(|own| own.get("use_full_rank_gate")).and_then(Value::as_bool).unwrap_or(false);
    Ok(ChannelDeltaDescription { bound: bound.map(|bound| bound as f32), full_gate, ..delta })
}

/// What `linear_attn_config` says of a size, or else the config itself.
fn size(config: &Config, nested: &str, key: &str, default: usize) -> Result<usize> {
    let path = config.path().display();
    match config.get("linear_attn_config").and_then(|of| of.get(nested)) {
        None => config.size_or(key, default),
        Some(v) => match v.as_u64().filter(|n| (1..=1 << 24).contains(n)) {
            Some(n) => Ok(n as usize),
            None => bail!("{path}: `{nested}` in `linear_attn_config` is {v}, expected a whole number from 1 to 2^24"),
        },
    }
}

/// The layers of Kimi Delta Attention, by default with so many heads.
pub(super) fn delta(config: &Config, heads: usize) -> Result<ChannelDeltaDescription> {
    let (heads, dim) =
        (size(config, "num_heads", "linear_num_heads", heads)?, size(config, "head_dim", "linear_head_dim", 128)?);
    let taps = size(config, "short_conv_kernel_size", "linear_conv_kernel_dim", 4)?;
    config.product("heads of linear attention and the square of `head_dim`", &[heads, dim, dim])?;
    let shape = DeltaShape { key_heads: heads, value_heads: heads, key_dim: dim, value_dim: dim, taps, tiled: false };
    Ok(ChannelDeltaDescription { shape, bound: None, full_gate: false })
}

/// Which layers are attention: by `layer_types`, by the numbers in `linear_attn_config`, which begin with 1, or every fourth behind the first.
fn attention_layers(config: &Config, count: usize) -> Result<Vec<bool>> {
    let path = config.path().display();
    if let Some(types) = config.strings("layer_types")? {
        ensure!(types.len() == count, "{path}: {} layer_types for {count} layers", types.len());
        let of = |kind| match kind {
            "full_attention" => Ok(true),
            "linear_attention" => Ok(false),
            other => bail!("{path}: layer type {other:?} is not known here"),
        };
        return types.into_iter().map(of).collect();
    }
    let Some(numbers) = config.get("linear_attn_config").and_then(|of| of.get("full_attn_layers")) else {
        return Ok((0..count).map(|layer| layer > 0 && layer.is_multiple_of(4)).collect());
    };
    let numbers: Option<Vec<u64>> = numbers.as_array().and_then(|all| all.iter().map(Value::as_u64).collect());
    let Some(numbers) = numbers else { bail!("{path}: `full_attn_layers` is no list of whole numbers") };
    Ok((1..=count as u64).map(|number| numbers.contains(&number)).collect())
}

fn mixture(config: &Config, options: &Options) -> Result<MoeDescription> {
    let k = match options.experts_per_token {
        Some(k) => k,
        None if config.get("num_experts_per_token").is_some() => config.size("num_experts_per_token")?,
        None => config.size("num_experts_per_tok")?,
    };
    let [count, renormalise, shared, groups] = [
        ["num_experts", "num_local_experts"],
        ["moe_renormalize", "norm_topk_prob"],
        ["num_shared_experts", "n_shared_experts"],
        ["num_expert_group", "n_group"],
    ]
    .map(|[own, other]| if config.get(own).is_some() { own } else { other });
    let renormalise = config.flag_or(renormalise, true)?;
    let read = MoeDescription::read_keys(config, (count, "moe_intermediate_size"), Some(k), renormalise)?;
    let (groups, top) = (config.size_or(groups, 1)?, config.size_or("topk_group", 1)?);
    let router = RouterDescription {
        scoring: RouterScoring::Sigmoid,
        correction_bias: true,
        groups: Some(ExpertGroups { count: groups, top }).filter(|_| groups > 1),
        scale: config.float_or("routed_scaling_factor", 2.446, |x| x > 0.0, "a number above 0")? as f32,
        ..read.router
    };
    let intermediate = config.size_or(shared, 1)? * read.intermediate;
    let shared = SharedExpertDescription { intermediate, gated: false, joined: false };
    let latent = match config.get("routed_expert_hidden_size") {
        None => None,
        Some(_) => Some(LatentExperts {
            size: config.size("routed_expert_hidden_size")?,
            normed: config.flag_or("latent_moe_use_norm", false)?,
        }),
    };
    Ok(MoeDescription { router, latent, shared: Some(shared), ..read })
}
