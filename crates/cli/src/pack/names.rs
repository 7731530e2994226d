//! Tensor names: from Hugging Face's spelling (or MLX's) to the one that `mlx_lm` uses for the same architecture.

use anyhow::{Result, bail};
use sluice_store::Checkpoint;

/// Prefixes of the text model and of its head, in the order in which they are tried.
const PREFIXES: [(&str, &str); 4] =
    [("model.language_model.", ""), ("language_model.model.", "language_model."), ("model.", ""), ("", "")];

/// How the text model's tensors are named in the input and in the output.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// In front of `embed_tokens`, `layers` and `norm`, and in front of `lm_head`.
    from: (&'static str, &'static str),
    to: (&'static str, &'static str),
    /// This architecture's norms multiply by 1 + weight, and MLX stores the sum.
    pub centred: bool,
}

impl Names {
    /// For a checkpoint whose config says `model_type`.
    pub fn of(checkpoint: &Checkpoint, model_type: &str) -> Result<Names> {
        let has = |prefix: &str| {
            ["weight", "scales"].iter().any(|p| checkpoint.tensor(&format!("{prefix}embed_tokens.{p}")).is_some())
        };
        let Some(from) = PREFIXES.into_iter().find(|(prefix, _)| has(prefix)) else {
            bail!("{}: no tensor `model.embed_tokens.weight`", checkpoint.folder().display())
        };
        let family = model_type.strip_suffix("_text").unwrap_or(model_type);
        let multimodal = matches!(family, "qwen3_5" | "qwen3_5_moe");
        let to = if multimodal { ("language_model.model.", "language_model.") } else { ("model.", "") };
        Ok(Names { from, to, centred: multimodal || family == "qwen3_next" })
    }

    /// The name within the text model, such as `layers.0.mlp.gate.weight`; `None` for a tensor of another part.
    pub fn short<'a>(&self, name: &'a str) -> Option<&'a str> {
        let body = name.strip_prefix(self.from.0);
        let body = body.filter(|n| ["embed_tokens.", "layers.", "norm."].iter().any(|part| n.starts_with(part)));
        body.or_else(|| name.strip_prefix(self.from.1).filter(|n| n.starts_with("lm_head.")))
    }

    /// MLX's name for a short one.
    pub fn out(&self, short: &str) -> String {
        let prefix = if short.starts_with("lm_head.") || short == "lm_head" { self.to.1 } else { self.to.0 };
        format!("{prefix}{short}")
    }
}

/// What a tensor outside of the text model belongs to, for one line to the user.
pub fn other_part(name: &str) -> &str {
    let known = ["visual", "vision_tower", "mtp", "audio_tower"];
    name.split('.').find(|p| known.contains(p)).unwrap_or(name)
}

/// Whether `short` is one of the norms that are stored less one (all but the gated norm of a GatedDeltaNet layer).
pub fn is_centred_norm(short: &str) -> bool {
    let ends = ["input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight"];
    short == "norm.weight" || ends.iter().any(|end| short.ends_with(end))
}

/// Where in the file a tensor of the text model goes: embedding, layers by number, final norm, head.
pub fn place(short: &str) -> usize {
    let layer = short.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    match layer {
        Some(layer) => layer.saturating_add(1).min(usize::MAX - 2),
        None if short.starts_with("embed_tokens.") => 0,
        None if short.starts_with("norm.") => usize::MAX - 1,
        None => usize::MAX,
    }
}

/// What people call the part of the model that a module belongs to.
pub fn class(short: &str) -> &'static str {
    let has = |part: &str| short.contains(part);
    match short {
        _ if short.starts_with("embed_tokens") => "embedding",
        _ if short.starts_with("lm_head") => "output head",
        _ if has(".switch_mlp.") => "experts",
        _ if has(".shared_expert.") => "shared expert",
        _ if short.ends_with("mlp.gate") || has("shared_expert_gate") => "routers",
        _ if has(".linear_attn.") => "linear attention",
        _ if has(".self_attn.") => "attention",
        _ => "mlp",
    }
}

/// `layers.0.mlp`, 17 and `gate_proj.weight` of `layers.0.mlp.experts.17.gate_proj.weight`: experts that have tensors of their own.
pub fn single_expert(short: &str) -> Option<(&str, usize, &str)> {
    let (module, rest) = short.split_once(".experts.")?;
    let (expert, leaf) = rest.split_once('.')?;
    Some((module, expert.parse().ok()?, leaf))
}
