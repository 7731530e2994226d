//! Gemma 4, the text part: windows in most layers; the others have heads of another size, of which a quarter is rotated, and may take their keys as values. Layers
//! may share keys and values, add embeddings of their own, or have a mixture beside their dense part. Reference: `modeling_gemma4.py` of transformers.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use crate::config::Config;
use crate::description::{
    AttentionDescription, DenseActivation, Description, EmbeddingScale, ExpertActivation, FULL, FeedForwardDescription,
    LayerDescription, MixerDescription, MoeDescription, Outline, PerLayerDescription, RouterDescription, ValueSource,
    WINDOWED, layer_windows,
};
use crate::mlx_lm::MlxLm;
use crate::options::Options;
use crate::rope;

/// Our names and those of its checkpoints.
const SPELLING: &[(&str, &str)] = &[
    ("mlp.experts", "experts"),
    ("mlp.gate", "router.proj"),
    ("mlp.router_scale", "router.scale"),
    ("mlp.expert_scales", "router.per_expert_scale"),
];

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    describe_with(config, options, (512, 256))
}

/// The 12B: no embeddings for each layer, and no towers for images and sound. Reference: `modeling_gemma4_unified.py`.
pub(crate) fn describe_unified(config: &Config, options: &Options) -> Result<Description> {
    for key in ["hidden_size_per_layer_input", "enable_moe_block"] {
        let off = [Value::Null, Value::from(0), Value::from(false)];
        let other = config.get(key).filter(|value| !off.contains(value));
        ensure!(other.is_none(), "{}: `{key}`, which this type does not have", config.path().display());
    }
    describe_with(config, options, (1024, 0))
}

/// `usual`: the window and the width of embeddings for each layer where the config is silent.
fn describe_with(config: &Config, options: &Options, usual: (usize, usize)) -> Result<Description> {
    let path = config.path().display().to_string();
    // 1. what this architecture could have, and no operation computes
    config.require("hidden_activation", "gelu_pytorch_tanh")?;
    match config.get("use_bidirectional_attention").map(Value::as_str) {
        // Images see what comes after them; text does not.
        None | Some(Some("vision")) => {}
        Some(_) => bail!("{path}: `use_bidirectional_attention` of all tokens is not supported"),
    }
    ensure!(config.get("rope_parameters").is_some(), "{path}: `rope_parameters` is missing");
    // 2. attention of both kinds
    let outline = Outline::of_any_activation(config)?;
    let head_dim = config.size_or("head_dim", 256)?;
    let read = AttentionDescription::read_with_heads_of(config, head_dim)?;
    let local = AttentionDescription { values_normed: true, scale: Some(1.0), ..read };
    let window = Some(config.size_or("sliding_window", usual.0)?);
    let mut windows = layer_windows(config, outline.count, window, |layer| !(layer + 1).is_multiple_of(6))?;
    // As in the reference, whatever the list says.
    windows.last_mut().into_iter().for_each(|last| *last = None);
    let full = full_attention(config, local, &windows)?;
    // 3. the second halves
    let shared = config.count_or("num_kv_shared_layers", 0)?;
    ensure!(shared <= outline.count, "{path}: `num_kv_shared_layers` is {shared}, of {} layers", outline.count);
    let intermediate = config.size("intermediate_size")?;
    let wide = if config.flag_or("use_double_wide_mlp", false)? { 2 } else { 1 };
    let wide = config.product("`intermediate_size` and 2", &[intermediate, wide])?;
    let moe = match config.flag_or("enable_moe_block", false)? {
        true => Some(Arc::new(mixture(config, options)?)),
        false => None,
    };
    // 4. layers
    let layer = |(at, window): (usize, Option<usize>)| {
        let shared = at >= outline.count - shared;
        let of_kind = if window.is_some() { local } else { full };
        let (intermediate, activation) = (if shared { wide } else { intermediate }, DenseActivation::Gelu);
        LayerDescription {
            mixer: MixerDescription::Attention(AttentionDescription { window, shared, ..of_kind }),
            feed_forward: match &moe {
                Some(moe) => FeedForwardDescription::Beside { intermediate, activation, moe: Arc::clone(moe) },
                None => FeedForwardDescription::Dense { intermediate, activation, joined: false },
            },
        }
    };
    let layers: Vec<LayerDescription> = windows.into_iter().enumerate().map(layer).collect();
    let per_layer = match config.count_or("hidden_size_per_layer_input", usual.1)? {
        0 => None,
        width => {
            let vocabulary = config.size_or("vocab_size_per_layer_input", 262_144)?;
            let all = config.size("vocab_size")?;
            ensure!(vocabulary >= all, "{path}: `vocab_size_per_layer_input` is {vocabulary}, of {all} tokens");
            config.product("`num_hidden_layers` and `hidden_size_per_layer_input`", &[outline.count, width])?;
            Some(PerLayerDescription { width, vocabulary })
        }
    };
    // 5. positions
    let context = options.context.unwrap_or(outline.max_context);
    let of_full = rope::rotary_of_layers(config, FULL, ("rope_theta", 1e6), full.head_dim, context)?;
    let of_local = rope::rotary_of_layers(config, WINDOWED, ("rope_theta", 1e4), head_dim, context)?;
    let cap = config.float_or("final_logit_softcapping", 0.0, |x| x > 0.0, "a number above 0")?;
    let scale = (outline.hidden as f64).sqrt();
    let mlx = MlxLm { prefix: if config.is_multimodal() { "language_model." } else { "" }, ..MlxLm::default() };
    let description = outline.with(config, "gemma4", false, of_full, layers, mlx)?;
    let tied = config.get("tie_word_embeddings").is_none() || description.tied;
    Ok(Description {
        tied,
        embedding_scale: Some(EmbeddingScale { by: scale, rounded: true }),
        logit_softcap: (cap > 0.0).then_some(cap as f32),
        per_layer,
        layer_scales: true,
        output_norms: true,
        window_rotary: Some(of_local.frequencies),
        spelling: SPELLING,
        ..description
    })
}

/// Layers without a window: newer configs list what differs in them for each, older ones say it once.
fn full_attention(
    config: &Config,
    local: AttentionDescription,
    windows: &[Option<usize>],
) -> Result<AttentionDescription> {
    let path = config.path().display();
    let keys_as_values = config.flag_or("attention_k_eq_v", false)?;
    let (head_dim, kv_heads) = match config.get("per_layer_config") {
        None => {
            let kv_heads = if keys_as_values { config.size_or_null("num_global_key_value_heads", None)? } else { None };
            (config.size_or("global_head_dim", 512)?, kv_heads.unwrap_or(local.kv_heads))
        }
        Some(all) => {
            let of_layer = |layer: usize| -> Result<(usize, usize)> {
                let own = all.get(layer.to_string()).and_then(Value::as_object);
                let known = ["head_dim", "num_key_value_heads"];
                if let Some(other) = own.and_then(|own| own.keys().find(|key| !known.contains(&key.as_str()))) {
                    bail!("{path}: `per_layer_config.{layer}.{other}` is not supported");
                }
                let size = |key: &str, usual: usize| match own.and_then(|own| own.get(key)) {
                    None => Ok(usual),
                    Some(value) => {
                        let size = value.as_u64().filter(|n| (1..=1 << 24).contains(n));
                        let wrong = || anyhow::anyhow!("{path}: `per_layer_config.{layer}.{key}` is {value}");
                        size.map(|n| n as usize).ok_or_else(wrong)
                    }
                };
                Ok((size("head_dim", local.head_dim)?, size("num_key_value_heads", local.kv_heads)?))
            };
            let mut full = None;
            for (layer, window) in windows.iter().enumerate() {
                let own = of_layer(layer)?;
                let wanted = match window {
                    Some(_) => (local.head_dim, local.kv_heads),
                    None => *full.get_or_insert(own),
                };
                ensure!(own == wanted, "{path}: `per_layer_config.{layer}` differs from others of its kind");
            }
            full.unwrap_or((local.head_dim, local.kv_heads))
        }
    };
    config.product("`num_attention_heads` and the heads' size in layers without a window", &[local.heads, head_dim])?;
    let heads = local.heads;
    ensure!(heads.is_multiple_of(kv_heads), "{path}: {heads} query heads cannot share {kv_heads} key/value heads");
    let values = if keys_as_values { ValueSource::Keys } else { ValueSource::Projected };
    Ok(AttentionDescription { head_dim, v_dim: head_dim, kv_heads, values, ..local })
}

/// The mixture of every layer.
fn mixture(config: &Config, options: &Options) -> Result<MoeDescription> {
    let k = options.experts_per_token.map_or_else(|| config.size("top_k_experts"), Ok)?;
    let read = MoeDescription::read_keys(config, ("num_experts", "moe_intermediate_size"), Some(k), true)?;
    Ok(MoeDescription {
        router: RouterDescription { own_norm: true, expert_scales: true, ..read.router },
        activation: ExpertActivation::GeGlu,
        ..read
    })
}
