//! A toy architecture with everything that Llama lacks: biases of q, k and v, sinks, capped scores, windows in every other layer, values wider than keys, a
//! sigmoid router with a bias, a correction bias, groups and a scale, and a shared expert that is not gated and has another name.

use std::sync::Arc;

use anyhow::Result;
use serde_json::Value;
use sluice_model::{
    Architecture, AttentionBiases, AttentionDescription, AttentionVariant, Config, Description, ExpertGroups,
    FeedForwardDescription, LatentDescription, LayerDescription, MixerDescription, MlxLm, MoeDescription, Options,
    Outline, RouterDescription, RouterScoring, SharedExpertDescription, rotary,
};

/// The list: the toy, and toys with one variant each that no operation computes.
pub const ARCHITECTURES: &[Architecture] = &[
    Architecture { model_type: "toy", describe },
    Architecture { model_type: "toy_latent", describe: |config, options| changed_attention(config, options) },
    Architecture {
        model_type: "toy_scales",
        describe: |config, options| changed_moe(config, options, |moe| moe.router.expert_scales = true),
    },
    Architecture {
        model_type: "toy_softmax_groups",
        describe: |config, options| changed_moe(config, options, |moe| moe.router.scoring = RouterScoring::Softmax),
    },
];

fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    let float = |key: &str| config.get(key).and_then(Value::as_f64).map(|x| x as f32);
    let attention = AttentionDescription {
        normed: false,
        biases: AttentionBiases::Inputs,
        v_dim: config.size("value_head_dim")?,
        softcap: float("attn_logit_softcapping"),
        sinks: true,
        ..AttentionDescription::read(config, false)?
    };
    let rotary = rotary(config, attention.head_dim, None, options.context.unwrap_or(outline.max_context))?;
    let router = RouterDescription {
        k: config.size("num_experts_per_tok")?,
        scoring: RouterScoring::Sigmoid,
        biased: true,
        correction_bias: true,
        groups: Some(ExpertGroups { count: config.size("n_group")?, top: config.size("topk_group")? }),
        normalise: true,
        scale: float("routed_scaling_factor").unwrap_or(1.0),
        own_norm: false,
        expert_scales: false,
    };
    let shared = SharedExpertDescription { gated: false, ..SharedExpertDescription::read(config)? };
    let moe = MoeDescription { router, shared: Some(shared), ..MoeDescription::read(config, None, true)? };
    let (moe, window) = (Arc::new(moe), config.size("sliding_window")?);
    let dense = config.size("intermediate_size")?;
    let layer = |i: usize| LayerDescription {
        mixer: MixerDescription::Attention(AttentionDescription {
            window: i.is_multiple_of(2).then_some(window),
            ..attention
        }),
        feed_forward: match i {
            0 => FeedForwardDescription::dense(dense),
            _ => FeedForwardDescription::Moe(Arc::clone(&moe)),
        },
    };
    let layers = (0..outline.count).map(layer).collect();
    let described = outline.with(config, "toy", false, rotary, layers, MlxLm::default())?;
    Ok(Description {
        spelling: &[("mlp.shared_expert", "mlp.shared_experts"), ("mlp.gate", "mlp.router")],
        ..described
    })
}

fn changed_attention(config: &Config, options: &Options) -> Result<Description> {
    let mut described = describe(config, options)?;
    if let MixerDescription::Attention(attention) = &mut described.layers[1].mixer {
        attention.variant = AttentionVariant::Latent(LatentDescription {
            q_rank: None,
            kv_rank: 8,
            rotary_dim: 4,
            norm_eps: 1e-6,
            split: false,
            gated: false,
        });
    }
    Ok(described)
}

fn changed_moe(config: &Config, options: &Options, change: fn(&mut MoeDescription)) -> Result<Description> {
    let mut described = describe(config, options)?;
    for layer in &mut described.layers {
        if let FeedForwardDescription::Moe(moe) = &mut layer.feed_forward {
            change(Arc::make_mut(moe));
        }
    }
    Ok(described)
}
