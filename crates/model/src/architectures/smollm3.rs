//! SmolLM3: Llama's layers, some of which know no positions. Reference: `modeling_smollm3.py` of transformers.

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::config::Config;
use crate::description::{
    AttentionDescription, Description, FeedForwardDescription, LayerDescription, MixerDescription, Outline,
    layer_windows,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    let attention = AttentionDescription { normed: false, ..AttentionDescription::read(config, false)? };
    let rotated = rotated_layers(config, outline.count)?;
    let window = match config.flag_or("use_sliding_window", false)? {
        true => config.size_or_null("sliding_window", None)?,
        false => None,
    };
    let windows = match window {
        None => vec![None; outline.count],
        Some(_) => layer_windows(config, outline.count, window, |layer| !rotated[layer])?,
    };
    let intermediate = config.size("intermediate_size")?;
    let layer = |(rotated, window)| LayerDescription {
        mixer: MixerDescription::Attention(AttentionDescription { rotated, window, ..attention }),
        feed_forward: FeedForwardDescription::dense(intermediate),
    };
    let layers = rotated.into_iter().zip(windows).map(layer).collect();
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary_or(config, attention.head_dim, (None, 2e6), context)?;
    let mlx = MlxLm::new(config, "", rotary_keys(config).into());
    let described = outline.with(config, "smollm3", false, rotary, layers, mlx)?;
    // Tied is the default.
    let tied = config.get("tie_word_embeddings").is_none() || described.tied;
    Ok(Description { tied, ..described })
}

/// For each layer, whether it knows positions: `no_rope_layers` has 1 where it does.
fn rotated_layers(config: &Config, count: usize) -> Result<Vec<bool>> {
    let path = config.path().display();
    let Some(list) = config.get("no_rope_layers") else {
        let every = config.size_or("no_rope_layer_interval", 4)?;
        return Ok((0..count).map(|i| !(i + 1).is_multiple_of(every)).collect());
    };
    let list: Option<Vec<u64>> = list.as_array().and_then(|list| list.iter().map(Value::as_u64).collect());
    let list = list.filter(|list| list.len() >= count && list.iter().all(|flag| *flag <= 1));
    ensure!(list.is_some(), "{path}: `no_rope_layers` is no list of 0 and 1 for {count} layers");
    Ok(list.unwrap_or_default().into_iter().take(count).map(|flag| flag == 1).collect())
}
