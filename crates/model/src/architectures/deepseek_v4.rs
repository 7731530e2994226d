//! DeepSeek-V4: several residual streams, attention whose rows are keys and values of all heads, entries of several positions behind a window, experts by the token's number in the first layers. Reference:
//! `modeling_deepseek_v4.py` of transformers.

use std::sync::Arc;

use anyhow::{Result, anyhow, bail, ensure};
use serde_json::{Map, Value, json};
use sluice_backend::{MOST_POOLED, MOST_STREAMS};

use super::{glm4_moe, glm5_next};
use crate::config::Config;
use crate::description::{
    AttentionBiases, AttentionDescription, AttentionVariant, CompressedDescription, CompressionDescription,
    Description, EntryIndexDescription, ExpertActivation, FeedForwardDescription, LayerDescription, MixerDescription,
    MoeDescription, Outline, RouterDescription, RouterScoring,
};
use crate::mlx_lm::MlxLm;
use crate::options::Options;
use crate::rope::{self, Rotary};

/// What its checkpoints call parts of layers.
const SPELLING: &[(&str, &str)] = &[
    ("self_attn", "attn"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.shared_expert.gate_proj", "ffn.shared_experts.w1"),
    ("mlp.shared_expert.up_proj", "ffn.shared_experts.w3"),
    ("mlp.shared_expert.down_proj", "ffn.shared_experts.w2"),
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    ("mlp", "ffn"),
];

/// Kinds of layers, as `layer_types` names them, and what `compress_ratios` says instead.
const KINDS: [(&str, usize); 3] = [(SLIDING, 0), (SPARSE, 4), (HEAVY, 128)];
const SLIDING: &str = "sliding_attention";
const SPARSE: &str = "compressed_sparse_attention";
const HEAVY: &str = "heavily_compressed_attention";

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    config.require("scoring_func", "sqrtsoftplus")?;
    let outline = Outline::read(config)?;
    let path = config.path().display();
    ensure!(!config.flag_or("attention_bias", false)?, "{path}: `attention_bias` is true, which is not supported");
    ensure!(!config.flag_or("mlp_bias", false)?, "{path}: `mlp_bias` is true, which is not supported");
    let context = options.context.unwrap_or(outline.max_context);
    // 1. attention
    let head_dim = config.size_or("head_dim", 512)?;
    let rotated = rotated(config, head_dim)?;
    let compressed = rotary(config, true, rotated, context)?;
    let of_windows = rotary(config, false, rotated, context)?;
    let attention = attention(config, head_dim, rotated)?;
    // 2. mixtures
    let moes = mixtures(config, options, outline.count)?;
    let layers = attention_layers(config, outline.count)?
        .into_iter()
        .zip(moes)
        .map(|(kind, moe)| {
            let mixer = MixerDescription::Attention(attention(kind)?);
            Ok(LayerDescription { mixer, feed_forward: FeedForwardDescription::Moe(moe) })
        })
        .collect::<Result<_>>()?;
    // 3. streams
    let streams = glm5_next::streams(config, true)?;
    ensure!(streams.count <= MOST_STREAMS, "{path}: `hc_mult` is {}, more than {MOST_STREAMS}", streams.count);
    let mlx = MlxLm { refuses_order: true, ..MlxLm::default() };
    let described = outline.with(config, "deepseek_v4", false, compressed, layers, mlx)?;
    Ok(Description {
        streams: Some(streams),
        window_rotary: Some(of_windows.frequencies),
        spelling: SPELLING,
        expert_spelling: ["w1", "w3", "w2"],
        ..described
    })
}

/// Elements of a head that are rotated.
fn rotated(config: &Config, head_dim: usize) -> Result<usize> {
    let path = config.path().display();
    let part =
        config.float_or_null("partial_rotary_factor", -1.0, |x| x > 0.0 && x <= 1.0, "a number above 0, at most 1")?;
    let rotated = match part.filter(|part| *part > 0.0) {
        Some(part) => (head_dim as f64 * part) as usize,
        None => config.size_or("qk_rope_head_dim", head_dim / 8)?,
    };
    ensure!(
        rotated >= 2 && rotated.is_multiple_of(2) && rotated <= head_dim,
        "{path}: {rotated} of {head_dim} elements of a head are rotated; must be even"
    );
    Ok(rotated)
}

/// Of layers with entries, or with a window alone. Newer configs have both; in older ones what is extended is meant for entries.
fn rotary(config: &Config, compressed: bool, rotated: usize, context: usize) -> Result<Rotary> {
    let (kind, key, default) = match compressed {
        true => ("compress", "compress_rope_theta", 160_000.0),
        false => ("main", "rope_theta", 10_000.0),
    };
    let given = config.get("rope_parameters").or_else(|| config.get("rope_scaling")).filter(|v| !v.is_null());
    let own = given.and_then(|all| all.get(kind)).and_then(Value::as_object).cloned();
    let theta = config.float_or(key, default, |x| x > 0.0, "a number above 0")?;
    let mut parameters = match own {
        Some(own) => own,
        None => {
            let mut flat = match given.and_then(Value::as_object) {
                Some(flat) if compressed => flat.clone(),
                _ => Map::new(),
            };
            flat.remove("main");
            flat.insert("rope_theta".into(), theta.into());
            if !flat.contains_key("type") {
                flat.entry("rope_type").or_insert("default".into());
            }
            // The model does not scale angles by YaRN's factor.
            if [flat.get("type"), flat.get("rope_type")].contains(&Some(&json!("yarn"))) {
                flat.entry("attention_factor").or_insert(1.0.into());
            }
            flat
        }
    };
    parameters.remove("partial_rotary_factor");
    let own = json!({
        "model_type": config.text_type(), "max_position_embeddings": config.max_positions()?, "rope_parameters": parameters,
    });
    rope::rotary(&Config::parse(config.path().to_owned(), own.to_string().as_bytes())?, rotated, None, context)
}

/// What makes attention of a kind of layers.
fn attention(
    config: &Config,
    head_dim: usize,
    rotated: usize,
) -> Result<impl Fn(&str) -> Result<AttentionDescription>> {
    let path = config.path().display();
    let kv_heads = config.size_or("num_key_value_heads", 1)?;
    ensure!(kv_heads == 1, "{path}: `num_key_value_heads` is {kv_heads}, and only 1 is supported");
    let read = AttentionDescription::read_with_heads_of(config, head_dim)?;
    let (q_rank, window) = (config.size_or("q_lora_rank", 1024)?, config.size_or("sliding_window", 128)?);
    let (out_groups, out_rank) = (config.size_or("o_groups", 8)?, config.size_or("o_lora_rank", 1024)?);
    config.product("`o_groups` and `o_lora_rank`", &[out_groups, out_rank])?;
    ensure!(
        read.heads.is_multiple_of(out_groups),
        "{path}: {} heads cannot be divided into {out_groups} groups (`o_groups`)",
        read.heads
    );
    let (heads, index_dim) = (config.size_or("index_n_heads", 64)?, config.size_or("index_head_dim", 128)?);
    config.product("`index_n_heads` and `index_head_dim`", &[heads, index_dim])?;
    ensure!(rotated <= index_dim, "{path}: `index_head_dim` is {index_dim}, of which {rotated} are rotated");
    let index = EntryIndexDescription { heads, head_dim: index_dim, top: config.size_or("index_topk", 512)? };
    let [sparse, heavy] =
        [rate(config, SPARSE, "compress_rate_csa", 4)?, rate(config, HEAVY, "compress_rate_hca", 128)?];
    let most = (2 * sparse).max(heavy);
    ensure!(most <= MOST_POOLED, "{path}: entries of {most} positions, more than {MOST_POOLED}");
    Ok(move |kind: &str| {
        let compression = match kind {
            SLIDING => None,
            SPARSE => Some(CompressionDescription { rate: sparse, overlaps: true, index: Some(index) }),
            _ => Some(CompressionDescription { rate: heavy, overlaps: false, index: None }),
        };
        let of = CompressedDescription { q_rank, out_groups, out_rank, compression };
        Ok(AttentionDescription {
            variant: AttentionVariant::Compressed(of),
            normed: false,
            adjacent_pairs: true,
            biases: AttentionBiases::None,
            window: Some(window),
            sinks: true,
            ..read
        })
    })
}

/// Positions of an entry in layers of this kind.
fn rate(config: &Config, kind: &str, older: &str, default: usize) -> Result<usize> {
    let path = config.path().display();
    let rate = match config.get("compress_rates").and_then(|rates| rates.get(kind)) {
        _ if config.get(older).is_some() => config.size(older)?,
        Some(rate) => rate.as_u64().map_or(0, |rate| rate as usize),
        None => default,
    };
    ensure!((1..=1 << 20).contains(&rate), "{path}: the rate of {kind} is no number of positions");
    Ok(rate)
}

/// The kind of each layer.
fn attention_layers(config: &Config, count: usize) -> Result<Vec<&'static str>> {
    let path = config.path().display();
    let known = |kind: &str| KINDS.iter().find(|(name, _)| *name == kind).map(|(name, _)| *name);
    if let Some(types) = config.strings("layer_types")? {
        ensure!(types.len() >= count, "{path}: {} layer_types for {count} layers", types.len());
        let of = |kind: &str| known(kind).ok_or_else(|| anyhow!("{path}: layer type {kind:?} is not known here"));
        return types[..count].iter().map(|kind| of(kind)).collect();
    }
    if config.get("compress_ratios").is_some() {
        // A head that predicts one token more may have one, too.
        let ratios = config.indices("compress_ratios")?;
        ensure!(ratios.len() >= count, "{path}: {} compress_ratios for {count} layers", ratios.len());
        let of = |ratio: &usize| match KINDS.iter().find(|(_, known)| known == ratio) {
            Some((name, _)) => Ok(*name),
            None => bail!("{path}: a compress ratio of {ratio} is not known here"),
        };
        return ratios[..count].iter().map(of).collect();
    }
    Ok((0..count).map(|layer| if layer > 1 && layer % 2 == 1 { SPARSE } else { HEAVY }).collect())
}

/// The mixture of each layer.
fn mixtures(config: &Config, options: &Options, count: usize) -> Result<Vec<Arc<MoeDescription>>> {
    let path = config.path().display();
    let read = glm4_moe::mixture(config, options, (1, 1), 1.5)?;
    ensure!(read.router.normalise, "{path}: `norm_topk_prob` is false, which is not supported");
    ensure!(read.router.groups.is_none(), "{path}: `n_group` is not 1, which is not supported");
    let limit = config.float_or("swiglu_limit", 10.0, |x| x > 0.0, "a number above 0")? as f32;
    let activation = ExpertActivation::ClampedSwiGlu { alpha: 1.0, limit, added: 0.0 };
    let of = |scoring, correction_bias| {
        let router = RouterDescription { scoring, correction_bias, ..read.router };
        Arc::new(MoeDescription { router, activation, ..read.clone() })
    };
    let chosen = of(RouterScoring::RootSoftplus, true);
    let by_token = of(RouterScoring::ByToken { tokens: config.size("vocab_size")? }, false);
    let is_by_token: Vec<bool> = match config.strings("mlp_layer_types")? {
        None => {
            let first = config.count_or("num_hash_layers", 3)?;
            (0..count).map(|layer| layer < first).collect()
        }
        Some(types) => {
            ensure!(types.len() >= count, "{path}: {} mlp_layer_types for {count} layers", types.len());
            let of = |kind: &&str| match *kind {
                "hash_moe" => Ok(true),
                "moe" => Ok(false),
                other => bail!("{path}: a feed-forward part of type {other:?} is not known here"),
            };
            types[..count].iter().map(of).collect::<Result<_>>()?
        }
    };
    if is_by_token.contains(&true) {
        let stored = config.size("num_experts_per_tok")?;
        ensure!(
            read.router.k == stored,
            "{path}: {} experts per token, but tables of the first layers have {stored}",
            read.router.k
        );
    }
    Ok(is_by_token.into_iter().map(|by| if by { Arc::clone(&by_token) } else { Arc::clone(&chosen) }).collect())
}
