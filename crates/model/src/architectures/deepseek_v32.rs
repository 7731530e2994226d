//! DeepSeek-V3.2 and GLM-5: DeepSeek-V3's layers with a sparse indexer, which selects the positions that a token sees; in GLM-5 some layers see what the one before them has
//! selected. Reference: `modeling_deepseek_v32.py` and `modeling_glm_moe_dsa.py` of transformers.

use std::sync::Arc;

use anyhow::{Result, anyhow, bail, ensure};
use serde_json::Value;

use super::{deepseek, glm4_moe, glm4_moe_lite};
use crate::config::Config;
use crate::description::{
    AttentionDescription, Description, FeedForwardDescription, IndexDescription, LayerDescription, MixerDescription,
    Outline,
};
use crate::mlx_lm::{MlxLm, rotary_keys};
use crate::options::Options;
use crate::rope;

/// What differs: the name, the default of `q_lora_rank`, groups of experts and those that take part, heads of the indexer, and how it turns pairs.
struct Family {
    name: &'static str,
    q_rank: usize,
    groups: (usize, usize),
    index_heads: usize,
    adjacent_pairs: bool,
}

pub(crate) fn describe(config: &Config, options: &Options) -> Result<Description> {
    let family = Family { name: "deepseek_v32", q_rank: 1536, groups: (8, 4), index_heads: 64, adjacent_pairs: false };
    describe_as(config, options, &family)
}

/// GLM-5.
pub(crate) fn describe_glm(config: &Config, options: &Options) -> Result<Description> {
    let family = Family { name: "glm_moe_dsa", q_rank: 2048, groups: (1, 1), index_heads: 32, adjacent_pairs: true };
    describe_as(config, options, &family)
}

fn describe_as(config: &Config, options: &Options, family: &Family) -> Result<Description> {
    config.require("scoring_func", "sigmoid")?;
    config.require("topk_method", "noaux_tc")?;
    let outline = Outline::read(config)?;
    let context = options.context.unwrap_or(outline.max_context);
    let rotary = rope::rotary(config, config.size("qk_rope_head_dim")?, None, context)?;
    let read = deepseek::scaled(AttentionDescription::read_latent(config, family.q_rank)?, &rotary);
    // The references know no other way.
    let attention = AttentionDescription { adjacent_pairs: true, ..read };
    let heads = config.size_or("index_n_heads", family.index_heads)?;
    let (head_dim, top) = (config.size_or("index_head_dim", 128)?, config.size_or("index_topk", 2048)?);
    config.product("`index_n_heads` and `index_head_dim`", &[heads, head_dim])?;
    let turned = config.size("qk_rope_head_dim")?;
    let path = config.path().display();
    ensure!(turned <= head_dim, "{path}: `index_head_dim` is {head_dim}, of which {turned} are rotated");
    let index = IndexDescription {
        heads,
        head_dim,
        top,
        adjacent_pairs: family.adjacent_pairs,
        pool: None,
        shared: false,
        split: false,
    };
    let moe = Arc::new(glm4_moe::mixture(config, options, family.groups, 2.5)?);
    let dense = glm4_moe_lite::dense_layers(config, outline.count, 3)?;
    let shared = if family.adjacent_pairs { shared(config, outline.count)? } else { vec![false; outline.count] };
    let layer = |(is_dense, shared): (bool, bool)| -> Result<LayerDescription> {
        let feed_forward = match is_dense {
            true => FeedForwardDescription::dense(config.size("intermediate_size")?),
            false => FeedForwardDescription::Moe(Arc::clone(&moe)),
        };
        let attention = AttentionDescription { index: Some(IndexDescription { shared, ..index }), ..attention };
        Ok(LayerDescription { mixer: MixerDescription::Attention(attention), feed_forward })
    };
    let layers = dense.into_iter().zip(shared).map(layer).collect::<Result<_>>()?;
    let mlx = MlxLm::new(config, "", rotary_keys(config).into());
    let described = outline.with(config, family.name, false, rotary, layers, mlx)?;
    Ok(Description { spelling: glm4_moe::SPELLING, ..described })
}

/// Which layers see what the one before them has selected: by a list, by a pattern of letters, or every so many.
pub(super) fn shared(config: &Config, count: usize) -> Result<Vec<bool>> {
    let path = config.path().display();
    let wrong = |what: &str| anyhow!("{path}: an indexer of type {what:?} is not known here");
    let of = |kind: &str| match kind {
        "full" | "F" => Ok(false),
        "shared" | "S" => Ok(true),
        other => Err(wrong(other)),
    };
    let found: Vec<bool> = match (config.strings("indexer_types")?, config.get("index_topk_pattern")) {
        (Some(types), _) => types.into_iter().map(of).collect::<Result<_>>()?,
        (None, Some(Value::String(pattern))) => {
            pattern.chars().map(|letter| of(letter.encode_utf8(&mut [0; 4]))).collect::<Result<_>>()?
        }
        (None, Some(_)) => {
            let types = config.strings("index_topk_pattern")?.unwrap_or_default();
            types.into_iter().map(of).collect::<Result<_>>()?
        }
        (None, None) => {
            let every = config.size_or("index_topk_freq", 1)?;
            let offset = config.count_or("index_skip_topk_offset", 2)?;
            (0..count).map(|layer| !(layer + 1).saturating_sub(offset).is_multiple_of(every)).collect()
        }
    };
    if found.len() != count {
        bail!("{path}: {} types of indexers for {count} layers", found.len());
    }
    Ok(found)
}
