//! Gemma 2 and 3, the text part: windows in some layers, in Gemma 3 with positions of their own; norms before and after both halves of a layer; GELU; a scaled
//! embedding, which is the head; in Gemma 2 capped scores and logits, in Gemma 3 norms of q and k. Reference: `modeling_gemma2.py` and `modeling_gemma3.py` of transformers.

use anyhow::{Result, bail};

use crate::config::Config;
use crate::description::{
    AttentionDescription, DenseActivation, Description, EmbeddingScale, FULL, FeedForwardDescription, LayerDescription,
    MixerDescription, Outline, WINDOWED, layer_windows,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope::{self, Rotary};

/// What the reference has by default: caps of scores and of logits.
struct Caps(f64, f64);

/// Gemma 2.
pub(crate) fn describe_2(config: &Config, options: &Options) -> Result<Description> {
    let (outline, head_dim) = (Outline::of_any_activation(config)?, config.size_or("head_dim", 256)?);
    let rotary = rope::rotary(config, head_dim, None, options.context.unwrap_or(outline.max_context))?;
    let mlx = MlxLm::new(config, "", rotary_keys(config).into());
    // Every other layer, the first among them, has a window.
    let windowed = |layer: usize| layer.is_multiple_of(2);
    describe_with(config, outline, "gemma2", (false, Caps(50.0, 30.0)), windowed, (rotary, None), mlx)
}

/// Gemma 3.
pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let (outline, head_dim) = (Outline::of_any_activation(config)?, config.size_or("head_dim", 256)?);
    let context = options.context.unwrap_or(outline.max_context);
    let every = config.size_or("sliding_window_pattern", 6)?;
    let full = rope::rotary_of_layers(config, FULL, ("rope_theta", 1e6), head_dim, context)?;
    let local = rope::rotary_of_layers(config, WINDOWED, ("rope_local_base_freq", 1e4), head_dim, context)?;
    let windowed = |layer: usize| !(layer + 1).is_multiple_of(every);
    let positions = (full, Some(local));
    describe_with(config, outline, "gemma3", (true, Caps(0.0, 0.0)), windowed, positions, MlxLm::default())
}

/// `normed`: each head of q and k. `windowed`: which layers have a window, where the config does not list them. Positions of layers without and with one.
fn describe_with(
    config: &Config,
    outline: Outline,
    architecture: &'static str,
    (normed, Caps(of_scores, of_logits)): (bool, Caps),
    windowed: impl Fn(usize) -> bool,
    (full, local): (Rotary, Option<Rotary>),
    mlx: MlxLm,
) -> Result<Description> {
    let path = config.path().display().to_string();
    // 1. what these architectures could have, and no operation computes
    for key in ["hidden_activation", "hidden_act"] {
        config.require(key, "gelu_pytorch_tanh")?;
    }
    if let Some(value) = config.get("use_bidirectional_attention").filter(|v| v.as_bool() != Some(false)) {
        bail!("{path}: `use_bidirectional_attention` is {value}, which is not supported");
    }
    // 2. sizes, with the reference's defaults
    let scalar = config.float_or("query_pre_attn_scalar", 256.0, |x| x > 0.0, "a number above 0")?;
    let cap = |key: &str, default| -> Result<Option<f32>> {
        let cap = config.float_or_null(key, default, |x| x > 0.0, "a number above 0")?;
        Ok(cap.filter(|cap| *cap > 0.0).map(|cap| cap as f32))
    };
    let attention = AttentionDescription {
        scale: Some((1.0 / scalar.sqrt()) as f32),
        softcap: cap("attn_logit_softcapping", of_scores)?,
        normed,
        ..AttentionDescription::read_with_heads_of(config, config.size_or("head_dim", 256)?)?
    };
    let intermediate = config.size("intermediate_size")?;
    // 3. layers
    let window = config.size_or_null("sliding_window", Some(4096))?;
    let windows = layer_windows(config, outline.count, window, windowed)?;
    let layer = |window| LayerDescription {
        mixer: MixerDescription::Attention(AttentionDescription { window, ..attention }),
        feed_forward: FeedForwardDescription::Dense { intermediate, activation: DenseActivation::Gelu, joined: false },
    };
    let layers = windows.into_iter().map(layer).collect();
    let scale = (outline.hidden as f64).sqrt();
    let description = outline.with(config, architecture, true, full, layers, mlx)?;
    let tied = config.get("tie_word_embeddings").is_none() || description.tied;
    Ok(Description {
        tied,
        embedding_scale: Some(EmbeddingScale { by: scale, rounded: true }),
        logit_softcap: cap("final_logit_softcapping", of_logits)?,
        output_norms: true,
        window_rotary: local.map(|local| local.frequencies),
        ..description
    })
}
