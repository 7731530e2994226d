//! gpt-oss: windows in every other layer, a learned logit in each head's softmax, biases everywhere, a mixture in every layer whose SwiGLU is clamped. Reference:
//! `modeling_gpt_oss.py` of transformers.

use std::sync::Arc;

use anyhow::Result;

use crate::config::Config;
use crate::description::{
    AttentionBiases, AttentionDescription, Description, ExpertActivation, FeedForwardDescription, LayerDescription,
    MixerDescription, MoeDescription, Outline, RouterDescription, RouterScoring, StackOrder, layer_windows,
};
use crate::mlx_lm::MlxLm;
use crate::options::Options;
use crate::rope;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    // 1. attention
    let read = AttentionDescription::read_with_heads_of(config, config.size_or("head_dim", 64)?)?;
    let biases = match config.flag_or("attention_bias", true)? {
        true => AttentionBiases::All,
        false => AttentionBiases::None,
    };
    let attention = AttentionDescription { normed: false, biases, sinks: true, ..read };
    let window = Some(config.size_or("sliding_window", 128)?);
    // Every other one, the first among them, if the config has no list.
    let windows = layer_windows(config, outline.count, window, |layer| layer.is_multiple_of(2))?;
    // 2. experts, with the reference's defaults
    let read = MoeDescription::read_with(config, options.experts_per_token, true, "intermediate_size")?;
    let number = |key, default| config.float_or(key, default, |x: f64| x > 0.0, "a number above 0");
    let (alpha, limit) = (number("swiglu_alpha", 1.702)? as f32, number("swiglu_limit", 7.0)? as f32);
    let scoring = RouterScoring::SoftmaxOfChosen;
    let moe = Arc::new(MoeDescription {
        router: RouterDescription { scoring, biased: true, ..read.router },
        activation: ExpertActivation::ClampedSwiGlu { alpha, limit, added: 1.0 },
        biased: true,
        stacks: StackOrder::Turns,
        ..read
    });
    // 3. layers and positions
    let layer = |window| LayerDescription {
        mixer: MixerDescription::Attention(AttentionDescription { window, ..attention }),
        feed_forward: FeedForwardDescription::Moe(Arc::clone(&moe)),
    };
    let layers = windows.into_iter().map(layer).collect();
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, attention.head_dim, None, context)?;
    let described = outline.with(config, "gpt_oss", false, rotary, layers, MlxLm::default())?;
    Ok(Description { spelling: &[("mlp.gate", "mlp.router")], ..described })
}
