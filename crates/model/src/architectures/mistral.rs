//! Mistral and Ministral: Llama's layers with windows. Ministral 3's queries grow with the position. Mistral 3 is either of them with a part for images, which stays
//! behind. Reference: `modeling_mistral.py`, `modeling_ministral.py` and `modeling_ministral3.py` of transformers.

use anyhow::{Result, anyhow, bail, ensure};
use serde_json::Value;

use crate::config::Config;
use crate::description::{
    AttentionBiases, AttentionDescription, Description, FeedForwardDescription, LayerDescription, MixerDescription,
    Outline, QueryGrowth, layer_windows,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    let kind = config.text_type();
    let (kind, window) = match kind {
        "mistral" => ("mistral", config.size_or_null("sliding_window", Some(4096))?),
        "ministral" => ("ministral", config.size_or_null("sliding_window", Some(4096))?),
        "ministral3" => ("ministral3", config.size_or_null("sliding_window", None)?),
        // A wrapper whose text part does not say what it is.
        "mistral3" => ("mistral", config.size_or_null("sliding_window", None)?),
        other => bail!("{}: text models of type {other:?} are not supported", config.path().display()),
    };
    let query_growth = if kind == "ministral3" { Some(query_growth(config)?) } else { None };
    let attention = AttentionDescription { query_growth, ..attention(config)? };
    let windows = match kind {
        // The others ignore `layer_types`.
        "ministral" => layer_windows(config, outline.count, window, |_| true)?,
        _ => vec![window; outline.count],
    };
    let intermediate = config.size("intermediate_size")?;
    let layer = |window| LayerDescription {
        mixer: MixerDescription::Attention(AttentionDescription { window, ..attention }),
        feed_forward: FeedForwardDescription::dense(intermediate),
    };
    let layers = windows.into_iter().map(layer).collect();
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, attention.head_dim, None, context)?;
    let prefix = if config.is_multimodal() { "language_model." } else { "" };
    let mlx = MlxLm::new(config, prefix, rotary_keys(config).into());
    let described = outline.with(config, kind, false, rotary, layers, mlx)?;
    // The wrapper is tied unless it says otherwise.
    let is_said = ["tie_word_embeddings"].iter().any(|key| config.get(key).or(config.root().get(*key)).is_some());
    Ok(Description { tied: described.tied || config.is_multimodal() && !is_said, ..described })
}

/// Attention of this family, over all positions: no norms, and no biases whatever the config says.
pub(crate) fn attention(config: &Config) -> Result<AttentionDescription> {
    let read = AttentionDescription::read(config, false)?;
    Ok(AttentionDescription { normed: false, biases: AttentionBiases::None, ..read })
}

pub(super) fn query_growth(config: &Config) -> Result<QueryGrowth> {
    let path = config.path().display();
    let number = |key: &str| {
        let value = config.get("rope_parameters").and_then(|rope| rope.get(key)).and_then(Value::as_f64);
        let value = value.filter(|x| x.is_finite() && *x >= 0.0);
        value.ok_or_else(|| anyhow!("{path}: `rope_parameters.{key}` is missing or no number from 0"))
    };
    let (beta, period) = (number("llama_4_scaling_beta")?, number("original_max_position_embeddings")?);
    ensure!(
        (1.0..=16_777_216.0).contains(&period),
        "{path}: `rope_parameters.original_max_position_embeddings` is {period}"
    );
    Ok(QueryGrowth { beta, period: period as usize })
}
