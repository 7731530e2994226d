//! GLM-4.5 to 4.7: a mixture with a sigmoid router and a shared expert in all layers but the first, biases of q, k and v, half of a head rotated. Reference:
//! `modeling_glm4_moe.py` of transformers.

use std::sync::Arc;

use anyhow::{Result, ensure};

use crate::config::Config;
use crate::description::{
    AttentionBiases, AttentionDescription, Description, ExpertGroups, FeedForwardDescription, LayerDescription,
    MixerDescription, MoeDescription, Outline, RouterDescription, RouterScoring, SharedExpertDescription,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

/// The default part of a head that is rotated.
const PARTIAL: f64 = 0.5;

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let outline = Outline::read(config)?;
    let read = AttentionDescription::read(config, false)?;
    let attention = AttentionDescription {
        normed: config.flag_or("use_qk_norm", false)?,
        biases: match read.biases {
            AttentionBiases::None => AttentionBiases::None,
            _ => AttentionBiases::Inputs,
        },
        ..read
    };
    let moe = mixture(config, options, (1, 1), 1.0)?;
    let layers = dense_then_mixture(config, outline.count, 1, attention, moe)?;
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, attention.head_dim, Some(PARTIAL), context)?;
    let mlx = MlxLm::new(config, "", rotary_keys(config).into());
    let described = outline.with(config, "glm4_moe", false, rotary, layers, mlx)?;
    Ok(Description { spelling: SPELLING, ..described })
}

/// What DeepSeek's kin call parts of their mixtures.
pub(super) const SPELLING: &[(&str, &str)] = &[("mlp.shared_expert", "mlp.shared_experts")];

/// The mixture of DeepSeek-V3 and its kin: a sigmoid router with a bias for its choice, which may be limited to groups, and a shared expert. The defaults of `n_group`,
/// `topk_group` and `routed_scaling_factor` differ.
pub(super) fn mixture(
    config: &Config,
    options: &Options,
    (groups, top): (usize, usize),
    scale: f64,
) -> Result<MoeDescription> {
    let normalise = config.flag_or("norm_topk_prob", true)?;
    let keys = ("n_routed_experts", "moe_intermediate_size");
    let read = MoeDescription::read_keys(config, keys, options.experts_per_token, normalise)?;
    let (count, top) = (config.size_or("n_group", groups)?, config.size_or("topk_group", top)?);
    let router = RouterDescription {
        scoring: RouterScoring::Sigmoid,
        correction_bias: true,
        groups: Some(ExpertGroups { count, top }).filter(|_| count > 1),
        scale: config.float_or("routed_scaling_factor", scale, |x| x > 0.0, "a number above 0")? as f32,
        ..read.router
    };
    let shared = config.count_or("n_shared_experts", 1)?;
    let path = config.path().display();
    ensure!(shared > 0, "{path}: `n_shared_experts` is 0, which is not supported");
    config.product("`n_shared_experts` and `moe_intermediate_size`", &[shared, read.intermediate])?;
    let intermediate = shared * read.intermediate;
    let shared = SharedExpertDescription { intermediate, gated: false, joined: false };
    Ok(MoeDescription { router, shared: Some(shared), ..read })
}

/// So many layers, of which the first, by default `dense`, have a dense feed-forward part and the others a mixture.
pub(super) fn dense_then_mixture(
    config: &Config,
    count: usize,
    dense: usize,
    attention: AttentionDescription,
    moe: MoeDescription,
) -> Result<Vec<LayerDescription>> {
    let dense = config.count_or("first_k_dense_replace", dense)?;
    let moe = Arc::new(moe);
    let layer = |i: usize| -> Result<LayerDescription> {
        let feed_forward = match i < dense {
            true => FeedForwardDescription::dense(config.size("intermediate_size")?),
            false => FeedForwardDescription::Moe(Arc::clone(&moe)),
        };
        Ok(LayerDescription { mixer: MixerDescription::Attention(attention), feed_forward })
    };
    (0..count).map(layer).collect()
}
