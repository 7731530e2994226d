//! Qwen3-Next: GatedDeltaNet layers with gated attention in between, a mixture of experts with a shared one. Reference:
//! `modeling_qwen3_next.py` of transformers.

use anyhow::{Result, bail, ensure};

use crate::decoder::{CacheGroup, CacheKind, Decoder, Layer, Mixer, Outline, Scratch, Spec};
use crate::layers::{Attention, AttentionShape, DeltaNet, FeedForward, Moe, ProjectionLayout, delta_shape};
use crate::qwen3_moe::{SparseLayers, expert_count};
use crate::weights::Weights;
use crate::{Config, Options, rope};

pub(crate) fn build(config: &Config, w: &mut Weights, options: &Options) -> Result<Decoder> {
    let eps = config.norm_eps()?;
    let k = options.experts_per_token.map_or_else(|| config.size("num_experts_per_tok"), Ok)?;
    let renormalise = config.flag_or("norm_topk_prob", true)?;
    let sparse = SparseLayers::read(config)?;
    let experts = Some((expert_count(config)?, k));
    let layout = ProjectionLayout::ByKeyHead;
    build_hybrid(config, w, options, "qwen3_next", layout, experts, &mut |w, layer, module, hidden| {
        let norm = w.norm(&format!("{module}.post_attention_layernorm"), hidden, eps, true)?;
        let module = format!("{module}.mlp");
        if sparse.has(layer) {
            let shared = Some(config.size("shared_expert_intermediate_size")?);
            return Ok(FeedForward::Moe {
                norm,
                moe: Box::new(Moe::load(w, config, &module, k, renormalise, shared)?),
            });
        }
        let mlp = w.mlp(&module, hidden, config.size("intermediate_size")?)?;
        Ok(FeedForward::Dense { norm, mlp: Box::new(mlp) })
    })
}

type BuildFeedForward<'a> = &'a mut dyn FnMut(&mut Weights, usize, &str, usize) -> Result<FeedForward>;

/// The hybrid stack that Qwen3-Next and Qwen3.5 share: `layer_types` (or every `full_attention_interval`-th layer) says where attention is.
pub(crate) fn build_hybrid(
    config: &Config,
    w: &mut Weights,
    options: &Options,
    architecture: &'static str,
    layout: ProjectionLayout,
    experts: Option<(usize, usize)>,
    feed_forward: BuildFeedForward,
) -> Result<Decoder> {
    let count = config.layers()?;
    let outline = Outline::read(config, true)?;
    let shape = AttentionShape::read(config, true)?;
    let delta = delta_shape(config)?;
    let max_context = config.size_or("max_position_embeddings", 32768)?;
    let context = options.context.unwrap_or(max_context);
    let rotary = rope::frequencies(config, shape.head_dim, 0.25, 10000.0, context)?;
    let rotated = 2 * rotary.inv_freq.len();
    let scratch = Scratch::alloc(w.backend(), options.max_tokens, outline.hidden, shape, rotated, Some(delta))?;

    let (mut attention_layers, mut delta_layers) = (0, 0);
    let mut layers = Vec::with_capacity(count);
    for (i, is_attention) in attention_places(config, count)?.into_iter().enumerate() {
        let module = format!("layers.{i}");
        let mixer = if is_attention {
            attention_layers += 1;
            let place = (0, attention_layers - 1);
            Mixer::Attention(Attention::load(w, &scratch, &module, shape, outline.eps, true, None, place)?)
        } else {
            delta_layers += 1;
            Mixer::DeltaNet(DeltaNet::load(w, &scratch, &module, delta, layout, outline.eps, delta_layers - 1)?)
        };
        let feed_forward = feed_forward(w, i, &module, outline.hidden)?;
        layers.push(Layer { mixer, feed_forward });
    }
    let (kv_heads, dim) = (shape.kv_heads, shape.head_dim);
    let attention = CacheGroup { kind: CacheKind::Full, layers: attention_layers, kv_heads, k_dim: dim, v_dim: dim };
    let groups = if attention_layers > 0 { vec![attention] } else { vec![] };
    let state_len = delta_layers * delta.state_len();
    let (vocabulary, working_type) = (config.size("vocab_size")?, w.working_type()?);
    let spec = Spec { architecture, vocabulary, layers: count, max_context, groups, state_len, experts, working_type };
    outline.finish(w, spec, scratch, rotary, layers)
}

/// For each layer, whether it is attention.
fn attention_places(config: &Config, count: usize) -> Result<Vec<bool>> {
    let Some(types) = config.strings("layer_types")? else {
        let every = config.size_or("full_attention_interval", 4)?;
        return Ok((0..count).map(|i| (i + 1).is_multiple_of(every)).collect());
    };
    ensure!(types.len() == count, "config.json: {} layer_types for {count} layers", types.len());
    types
        .into_iter()
        .map(|kind| match kind {
            "full_attention" => Ok(true),
            "linear_attention" => Ok(false),
            other => bail!("config.json: layer type {other:?} is not known here"),
        })
        .collect()
}
