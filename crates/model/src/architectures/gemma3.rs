//! Gemma 3, the text part: windows in most layers, with positions of their own; norms before and after both halves of a layer; GELU; a scaled embedding, which
//! is the head. Reference: `modeling_gemma3.py` of transformers.

use anyhow::{Result, bail};

use crate::config::Config;
use crate::description::{
    AttentionDescription, DenseActivation, Description, EmbeddingScale, FULL, FeedForwardDescription, LayerDescription,
    MixerDescription, Outline, WINDOWED, layer_windows,
};
use crate::mlx_lm::MlxLm;
use crate::options::Options;
use crate::rope;

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
    let window = config.size_or_null("sliding_window", Some(4096))?;
    let every = config.size_or("sliding_window_pattern", 6)?;
    let windows = layer_windows(config, outline.count, window, |layer| !(layer + 1).is_multiple_of(every))?;
    let layer = |window| LayerDescription {
        mixer: MixerDescription::Attention(AttentionDescription { window, ..attention }),
        feed_forward: FeedForwardDescription::Dense { intermediate, activation: DenseActivation::Gelu, joined: false },
    };
    let layers = windows.into_iter().map(layer).collect();
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
