//! Gemma 3, the text part: windows in most layers, with positions of their own; norms before and after both halves of a layer; GELU; a scaled embedding, which
//! is the head. Reference: `modeling_gemma3.py` of transformers.

use anyhow::{Result, bail, ensure};

use crate::config::Config;
use crate::description::{
    AttentionDescription, DenseActivation, Description, EmbeddingScale, FeedForwardDescription, LayerDescription,
    MixerDescription, Outline,
};
use crate::mlx_lm::MlxLm;
use crate::options::Options;
use crate::rope;

/// Kinds of layers, as configs name them.
const WINDOWED: &str = "sliding_attention";
const FULL: &str = "full_attention";

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let path = config.path().display().to_string();
    // 1. what this architecture could have, and no operation computes
    for key in ["hidden_activation", "hidden_act"] {
        config.require(key, "gelu_pytorch_tanh")?;
    }
    for key in ["final_logit_softcapping", "use_bidirectional_attention"] {
        if let Some(value) = config.get(key).filter(|v| v.as_bool() != Some(false)) {
            bail!("{path}: `{key}` is {value}, which is not supported");
        }
    }
    // 2. sizes, with the reference's defaults
    let outline = Outline::of_any_activation(config)?;
    let head_dim = config.size_or("head_dim", 256)?;
    let scalar = config.float_or("query_pre_attn_scalar", 256.0, |x| x > 0.0, "a number above 0")?;
    let softcap = config.float_or("attn_logit_softcapping", 0.0, |x| x > 0.0, "a number above 0")?;
    let read = AttentionDescription::read_with_heads_of(config, head_dim)?;
    let attention = AttentionDescription {
        scale: Some((1.0 / scalar.sqrt()) as f32),
        softcap: (softcap > 0.0).then_some(softcap as f32),
        ..read
    };
    let intermediate = config.size("intermediate_size")?;
    // 3. layers
    let windowed = windowed_layers(config, outline.count)?;
    let window = match windowed.contains(&true) {
        true => Some(config.size_or("sliding_window", 4096)?),
        false => None,
    };
    let layer = |&windowed: &bool| LayerDescription {
        mixer: MixerDescription::Attention(AttentionDescription { window: window.filter(|_| windowed), ..attention }),
        feed_forward: FeedForwardDescription::Dense { intermediate, activation: DenseActivation::Gelu, joined: false },
    };
    let layers = windowed.iter().map(layer).collect();
    // 4. positions
    let context = options.context.unwrap_or(outline.max_context);
    let full = rope::rotary_of_layers(config, FULL, ("rope_theta", 1e6), head_dim, context)?;
    let local = rope::rotary_of_layers(config, WINDOWED, ("rope_local_base_freq", 1e4), head_dim, context)?;
    let scale = (outline.hidden as f64).sqrt();
    let mlx = MlxLm::default();
    let description = outline.with(config, "gemma3", true, full, layers, mlx)?;
    let tied = config.get("tie_word_embeddings").is_none() || description.tied;
    Ok(Description {
        tied,
        embedding_scale: Some(EmbeddingScale { by: scale, rounded: true }),
        output_norms: true,
        window_rotary: Some(local.frequencies),
        ..description
    })
}

/// For each layer, whether it has a window.
fn windowed_layers(config: &Config, count: usize) -> Result<Vec<bool>> {
    let Some(types) = config.strings("layer_types")? else {
        let every = config.size_or("sliding_window_pattern", 6)?;
        return Ok((0..count).map(|i| !(i + 1).is_multiple_of(every)).collect());
    };
    let path = config.path().display();
    ensure!(types.len() == count, "{path}: {} layer_types for {count} layers", types.len());
    types
        .into_iter()
        .map(|kind| match kind {
            WINDOWED => Ok(true),
            FULL => Ok(false),
            other => bail!("{path}: layer type {other:?} is not Gemma 3's"),
        })
        .collect()
}
