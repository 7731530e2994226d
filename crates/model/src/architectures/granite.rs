//! Granite: Llama's layers with factors for the embedding, scores, what each half of a layer adds, and logits. Those models of the hybrid type that have neither
//! recurrent layers nor experts are the same under other names. Reference: `modeling_granite.py` and `modeling_granitemoehybrid.py` of transformers.

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use crate::config::Config;
use crate::description::{
    AttentionDescription, Description, EmbeddingScale, FeedForwardDescription, LayerDescription, MixerDescription,
    Outline,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    // Of this type only GGUF files say so.
    let rotated = config.get("position_embedding_type").and_then(Value::as_str) != Some("nope");
    let attention = AttentionDescription { rotated, ..AttentionDescription::read(config, false)? };
    let feed_forward = FeedForwardDescription::dense(config.size("intermediate_size")?);
    describe_with(config, options, "granite", attention, feed_forward)
}

/// Granite 4: dense, all layers attention.
pub(crate) fn describe_hybrid(config: &Config, options: &Options) -> Result<Description> {
    let path = config.path().display();
    for key in ["layer_types", "layers_block_type"] {
        for kind in config.strings(key)?.unwrap_or_default() {
            let is_attention = ["attention", "full_attention"].contains(&kind);
            ensure!(is_attention, "{path}: layers of type {kind:?} (Mamba-2) are not supported");
        }
    }
    let types = ["layer_types", "layers_block_type"].iter().find_map(|key| config.get(key));
    ensure!(types.is_some(), "{path}: `layer_types` is missing: recurrent layers (Mamba-2) are not supported");
    let experts = config.count_or("num_local_experts", 8)?;
    ensure!(experts == 0, "{path}: `num_local_experts` is {experts}: this architecture with experts is not supported");
    let rotated = match config.get("position_embedding_type").map(Value::as_str) {
        Some(Some("rope")) => true,
        None | Some(Some("nope")) => false,
        Some(other) => bail!("{path}: `position_embedding_type` {other:?} is not supported"),
    };
    let attention = AttentionDescription { rotated, ..AttentionDescription::read(config, false)? };
    let feed_forward = FeedForwardDescription::joined(config.size_or("shared_intermediate_size", 1024)?);
    let described = describe_with(config, options, "granitemoehybrid", attention, feed_forward)?;
    let spelling = &[("mlp.gate_up_proj", "shared_mlp.input_linear"), ("mlp.down_proj", "shared_mlp.output_linear")];
    Ok(Description { spelling, ..described })
}

fn describe_with(
    config: &Config,
    options: &Options,
    architecture: &'static str,
    attention: AttentionDescription,
    feed_forward: FeedForwardDescription,
) -> Result<Description> {
    let outline = Outline::read(config)?;
    let factor = |key: &str| config.float_or(key, 1.0, |x| x > 0.0, "a number above 0");
    let (embedding, residual) = (factor("embedding_multiplier")?, factor("residual_multiplier")?);
    let (scores, logits) = (factor("attention_multiplier")?, factor("logits_scaling")?);
    let attention = AttentionDescription { normed: false, scale: Some(scores as f32), ..attention };
    let layer = LayerDescription { mixer: MixerDescription::Attention(attention), feed_forward };
    let layers = vec![layer; outline.count];
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, attention.head_dim, None, context)?;
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
