//! Nemotron-H and Nemotron 3: layers of one block each, which is Mamba-2, attention without positions, a dense part, or a mixture of experts without gates beside a
//! shared one, in Nemotron 3 Super behind a projection of their own. Reference: `modeling_nemotron_h.py` of transformers.

use std::sync::Arc;

use anyhow::{Result, anyhow, bail, ensure};
use serde_json::Value;

use super::glm4_moe;
use crate::config::Config;
use crate::description::{
    AttentionBiases, AttentionDescription, DenseActivation, Description, ExpertActivation, FeedForwardDescription,
    LatentExperts, LayerDescription, MixerDescription, MoeDescription, Outline, SharedExpertDescription,
    StateSpaceDescription, StateSpaceKeys,
};
use crate::mlx_lm::MlxLm;
use crate::options::Options;
use crate::rope;

const KEYS: StateSpaceKeys = StateSpaceKeys {
    sizes: [
        ("mamba_num_heads", Some(128)),
        ("mamba_head_dim", Some(64)),
        ("n_groups", Some(8)),
        ("ssm_state_size", Some(128)),
        ("conv_kernel", Some(4)),
    ],
    biases: [("use_bias", false), ("use_conv_bias", true)],
    norm_eps: ("layer_norm_epsilon", 1e-5),
};

/// A layer's one block is its `mixer`, whatever that is.
const SPELLING: &[(&str, &str)] = &[
    ("input_layernorm", "norm"),
    ("mamba.in_proj", "mixer.in_proj"),
    ("mamba.conv1d", "mixer.conv1d"),
    ("mamba.A_log", "mixer.A_log"),
    ("mamba.D", "mixer.D"),
    ("mamba.dt_bias", "mixer.dt_bias"),
    ("mamba.norm", "mixer.norm"),
    ("mamba.out_proj", "mixer.out_proj"),
    ("self_attn.q_proj", "mixer.q_proj"),
    ("self_attn.k_proj", "mixer.k_proj"),
    ("self_attn.v_proj", "mixer.v_proj"),
    ("self_attn.o_proj", "mixer.o_proj"),
    ("mlp.gate", "mixer.gate"),
    ("mlp.experts", "mixer.experts"),
    ("mlp.switch_mlp", "mixer.switch_mlp"),
    ("mlp.shared_expert", "mixer.shared_experts"),
    ("mlp.latent_down_proj", "mixer.fc1_latent_proj"),
    ("mlp.latent_up_proj", "mixer.fc2_latent_proj"),
    ("mlp.up_proj", "mixer.up_proj"),
    ("mlp.down_proj", "mixer.down_proj"),
];

#[derive(Clone, Copy, PartialEq)]
enum Block {
    Mamba,
    Attention,
    Dense,
    Mixture,
}

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    config.require("mlp_hidden_act", "relu2")?;
    config.require("mamba_hidden_act", "silu")?;
    let blocks = blocks(config)?;
    let outline =
        Outline { count: blocks.len(), hidden: config.size("hidden_size")?, max_context: max_context(config)? };
    let state_space = StateSpaceDescription::read(config, &KEYS)?;
    let attention = AttentionDescription {
        normed: false,
        rotated: false,
        biases: AttentionBiases::None,
        ..AttentionDescription::read_with_heads_of(config, config.size_or("head_dim", 128)?)?
    };
    let moe = if blocks.contains(&Block::Mixture) { Some(Arc::new(mixture(config, options)?)) } else { None };
    let layer = |block: &Block| -> Result<LayerDescription> {
        let mixer = match block {
            Block::Mamba => MixerDescription::StateSpace(state_space),
            Block::Attention => MixerDescription::Attention(attention),
            Block::Dense | Block::Mixture => MixerDescription::None,
        };
        let feed_forward = match (block, &moe) {
            (Block::Mixture, Some(moe)) => FeedForwardDescription::Moe(Arc::clone(moe)),
            (Block::Dense, _) => FeedForwardDescription::Dense {
                intermediate: config.size("intermediate_size")?,
                activation: DenseActivation::SquaredRelu,
                joined: false,
            },
            _ => FeedForwardDescription::None,
        };
        Ok(LayerDescription { mixer, feed_forward })
    };
    let layers = blocks.iter().map(layer).collect::<Result<_>>()?;
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, attention.head_dim, None, context)?;
    // Its names of the parts are others there.
    let mlx = MlxLm { refuses_order: true, ..MlxLm::default() };
    let described = outline.with(config, "nemotron_h", false, rotary, layers, mlx)?;
    Ok(Description { eps: state_space.norm_eps, spelling: SPELLING, ..described })
}

fn max_context(config: &Config) -> Result<usize> {
    config.size_or("max_position_embeddings", 4096)
}

fn mixture(config: &Config, options: &Options) -> Result<MoeDescription> {
    let read = glm4_moe::mixture(config, options, (1, 1), 1.0)?;
    let intermediate = config.size("moe_shared_expert_intermediate_size")?;
    let shared = SharedExpertDescription { intermediate, gated: false, joined: false };
    let latent = config.get("moe_latent_size").map(|_| config.size("moe_latent_size")).transpose()?;
    let latent = latent.map(|size| LatentExperts { size, normed: false });
    Ok(MoeDescription { activation: ExpertActivation::SquaredRelu, latent, shared: Some(shared), ..read })
}

/// What each layer is, by a list of names or by a pattern of letters.
fn blocks(config: &Config) -> Result<Vec<Block>> {
    let path = config.path().display();
    let names = ["layers_block_type", "layer_types"].into_iter().find(|key| config.get(key).is_some());
    let found: Vec<Block> = if let Some(key) = names {
        let of = |name: &&str| match *name {
            "mamba" | "linear_attention" => Ok(Block::Mamba),
            "attention" | "full_attention" => Ok(Block::Attention),
            "mlp" => Ok(Block::Dense),
            "moe" => Ok(Block::Mixture),
            other => bail!("{path}: `{key}`: layers of type {other:?} are not known here"),
        };
        config.strings(key)?.unwrap_or_default().iter().map(of).collect::<Result<_>>()?
    } else {
        let pattern = config.get("hybrid_override_pattern").and_then(Value::as_str);
        let pattern = pattern.ok_or_else(|| anyhow!("{path}: `hybrid_override_pattern` is missing"))?;
        let of = |letter: char| match letter {
            'M' => Ok(Block::Mamba),
            '*' => Ok(Block::Attention),
            '-' => Ok(Block::Dense),
            'E' => Ok(Block::Mixture),
            other => bail!("{path}: `hybrid_override_pattern`: {other:?} is not known here"),
        };
        pattern.chars().map(of).collect::<Result<_>>()?
    };
    ensure!((1..=1 << 16).contains(&found.len()), "{path}: {} layers, expected 1 to 2^16", found.len());
    Ok(found)
}
