//! Granite: Llama's layers with factors for the embedding, scores, what each half of a layer adds, and logits; as a mixture of experts; and Granite 4, whose layers
//! may be Mamba-2, with or without experts beside a shared one. Reference: `modeling_granite.py`, `modeling_granitemoe.py` and `modeling_granitemoehybrid.py` of
//! transformers.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use crate::config::Config;
use crate::description::{
    AttentionDescription, Description, EmbeddingScale, FeedForwardDescription, LayerDescription, MixerDescription,
    MoeDescription, Outline, RouterScoring, SharedExpertDescription, StateSpaceDescription, StateSpaceKeys,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

const KEYS: StateSpaceKeys = StateSpaceKeys {
    sizes: [
        ("mamba_n_heads", Some(128)),
        ("mamba_d_head", None),
        ("mamba_n_groups", Some(1)),
        ("mamba_d_state", Some(256)),
        ("mamba_d_conv", Some(4)),
    ],
    biases: [("mamba_proj_bias", false), ("mamba_conv_bias", true)],
    norm_eps: ("rms_norm_eps", 1e-6),
};

/// What the hybrids call their parts. A dense part is the shared expert without others.
const DENSE: &[(&str, &str)] =
    &[("mlp.gate_up_proj", "shared_mlp.input_linear"), ("mlp.down_proj", "shared_mlp.output_linear")];
const MIXTURE: &[(&str, &str)] = &[
    ("mlp.shared_expert.gate_up_proj", "shared_mlp.input_linear"),
    ("mlp.shared_expert.down_proj", "shared_mlp.output_linear"),
    ("mlp.gate", "block_sparse_moe.router.layer"),
    ("mlp", "block_sparse_moe"),
];
const STACKS: [&str; 2] = ["block_sparse_moe.input_linear", "block_sparse_moe.output_linear"];

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    // Of this type only GGUF files say so.
    let rotated = config.get("position_embedding_type").and_then(Value::as_str) != Some("nope");
    let attention = AttentionDescription { rotated, ..AttentionDescription::read(config, false)? };
    let feed_forward = FeedForwardDescription::dense(config.size("intermediate_size")?);
    let layers = vec![MixerDescription::Attention(scored(config, attention)?); config.layers()?];
    describe_with(config, options, "granite", layers, feed_forward)
}

/// Granite 3's mixtures.
pub(crate) fn describe_mixture(config: &Config, options: &Options) -> Result<Description> {
    let rotated = config.get("position_embedding_type").and_then(Value::as_str) != Some("nope");
    let attention = AttentionDescription { rotated, ..AttentionDescription::read(config, false)? };
    let layers = vec![MixerDescription::Attention(scored(config, attention)?); config.layers()?];
    let moe = FeedForwardDescription::Moe(Arc::new(mixture(config, options, None)?));
    let described = describe_with(config, options, "granitemoe", layers, moe)?;
    Ok(Description { spelling: MIXTURE, stack_spelling: Some(STACKS), ..described })
}

/// Granite 4: layers of attention and of Mamba-2, each with a dense part, or with a mixture and a shared expert.
pub(crate) fn describe_hybrid(config: &Config, options: &Options) -> Result<Description> {
    let path = config.path().display();
    let rotated = match config.get("position_embedding_type").map(Value::as_str) {
        Some(Some("rope")) => true,
        None | Some(Some("nope")) => false,
        Some(other) => bail!("{path}: `position_embedding_type` {other:?} is not supported"),
    };
    let attention = AttentionDescription { rotated, ..AttentionDescription::read(config, false)? };
    let attention = MixerDescription::Attention(scored(config, attention)?);
    // 1. token mixers
    let key = ["layer_types", "layers_block_type"].into_iter().find(|key| config.get(key).is_some());
    let kinds = match key {
        Some(key) => config.strings(key)?.unwrap_or_default(),
        None => vec!["mamba"; config.layers()?],
    };
    let is_mamba = |kind: &str| match kind {
        "attention" | "full_attention" => Ok(false),
        "mamba" | "linear_attention" => Ok(true),
        other => bail!("{path}: layers of type {other:?} are not known here"),
    };
    let is_mamba = kinds.into_iter().map(is_mamba).collect::<Result<Vec<_>>>()?;
    let layers = config.layers()?;
    ensure!(is_mamba.len() == layers, "{path}: {} `layer_types` for {layers} layers", is_mamba.len());
    let mamba = if is_mamba.contains(&true) { Some(MixerDescription::StateSpace(state_space(config)?)) } else { None };
    let mixer = |is_mamba: bool| mamba.clone().filter(|_| is_mamba).unwrap_or_else(|| attention.clone());
    let mixers = is_mamba.into_iter().map(mixer).collect();
    // 2. second halves
    let width = config.size_or("shared_intermediate_size", 1024)?;
    if config.count_or("num_local_experts", 8)? == 0 {
        let dense = FeedForwardDescription::joined(width);
        let described = describe_with(config, options, "granitemoehybrid", mixers, dense)?;
        return Ok(Description { spelling: DENSE, ..described });
    }
    let shared = SharedExpertDescription { intermediate: width, gated: false, joined: true };
    let moe = FeedForwardDescription::Moe(Arc::new(mixture(config, options, Some(shared))?));
    let described = describe_with(config, options, "granitemoehybrid", mixers, moe)?;
    Ok(Description { spelling: MIXTURE, stack_spelling: Some(STACKS), ..described })
}

/// Their Mamba-2, whose heads are `mamba_expand` times as wide as the model, all together.
fn state_space(config: &Config) -> Result<StateSpaceDescription> {
    let (path, hidden) = (config.path().display(), config.size("hidden_size")?);
    let inner = config.product("`hidden_size` and `mamba_expand`", &[hidden, config.size_or("mamba_expand", 2)?])?;
    let heads = config.size_or("mamba_n_heads", 128)?;
    let mut keys = KEYS;
    if config.get("mamba_d_head").is_none_or(|v| v.as_str() == Some("auto")) {
        keys.sizes[1] = ("mamba_expand", Some(2));
    }
    let mut read = StateSpaceDescription::read(config, &keys)?;
    if keys.sizes[1].1.is_some() {
        read.shape.head_dim = inner / heads;
    }
    let all = read.shape.inner();
    ensure!(
        all == inner,
        "{path}: `mamba_n_heads` and `mamba_d_head` make {all}, `mamba_expand` and `hidden_size` {inner}"
    );
    Ok(read)
}

fn mixture(config: &Config, options: &Options, shared: Option<SharedExpertDescription>) -> Result<MoeDescription> {
    let keys = ("num_local_experts", "intermediate_size");
    let mut read = MoeDescription::read_keys(config, keys, options.experts_per_token, true)?;
    read.router.scoring = RouterScoring::SoftmaxOfChosen;
    Ok(MoeDescription { shared, ..read })
}

fn factor(config: &Config, key: &str) -> Result<f64> {
    config.float_or(key, 1.0, |x| x > 0.0, "a number above 0")
}

/// The attention with the factor of its scores.
fn scored(config: &Config, attention: AttentionDescription) -> Result<AttentionDescription> {
    let scores = factor(config, "attention_multiplier")?;
    Ok(AttentionDescription { normed: false, scale: Some(scores as f32), ..attention })
}

fn describe_with(
    config: &Config,
    options: &Options,
    architecture: &'static str,
    mixers: Vec<MixerDescription>,
    feed_forward: FeedForwardDescription,
) -> Result<Description> {
    let outline = Outline::read(config)?;
    let (embedding, residual) = (factor(config, "embedding_multiplier")?, factor(config, "residual_multiplier")?);
    let logits = factor(config, "logits_scaling")?;
    let layer = |mixer| LayerDescription { mixer, feed_forward: feed_forward.clone() };
    let layers = mixers.into_iter().map(layer).collect();
    let context = options.context.unwrap_or(outline.max_context);
    let head_dim = AttentionDescription::read(config, false)?.head_dim;
    let rotary = rope::rotary(config, head_dim, None, context)?;
    let mlx = MlxLm::new(config, "", rotary_keys(config).into());
    let described = outline.with(config, architecture, false, rotary, layers, mlx)?;
    // Every half of a layer adds `residual` times its output. The stream divided by `residual` has the outputs themselves added, and its norms are those of the
    // stream if their epsilon is divided by the factor's square: so no operation has to scale.
    Ok(Description {
        embedding_scale: Some(EmbeddingScale { by: embedding / residual, rounded: false }),
        logit_scale: Some(1.0 / logits),
        eps: described.eps / (residual * residual),
        ..described
    })
}
