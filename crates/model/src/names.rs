//! How a checkpoint names its tensors: what stands in front of the text model's, and which are not the text model's at all.

use std::collections::HashSet;

use anyhow::{Result, bail};
use sluice_store::Checkpoint;

use crate::description::Description;
use crate::parts::{Leaf, Meaning, WeightClass, WeightKind};

/// In front of `embed_tokens`, `layers` and `norm`, and in front of `lm_head`, in the order in which they are tried.
const PREFIXES: [(&str, &str); 4] =
    [("model.language_model.", ""), ("language_model.model.", "language_model."), ("model.", ""), ("", "")];

/// Parts of multimodal and draft models, which stay behind.
const OTHER_PARTS: [&str; 4] = ["visual", "vision_tower", "mtp", "audio_tower"];

/// How a checkpoint names the tensors of a text model.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    text: &'static str,
    head: &'static str,
    /// The one matrix that is embedding and head is stored under the head's name only.
    shares_head: bool,
}

/// What a tensor of a checkpoint belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Belongs<'a> {
    /// To the text model.
    Text(Meaning),
    /// To something that is left out, under the name by which people know it.
    LeftOut(&'a str),
    /// To nobody: a table that can be computed, which older checkpoints store.
    Computed,
}

impl Names {
    /// # Errors
    /// A checkpoint without an embedding, or a head that may be one.
    pub fn of(checkpoint: &Checkpoint) -> Result<Names> {
        let has = |name: String| checkpoint.tensor(&name).is_some();
        let embeds = |(text, _): &(&str, &str)| has(format!("{text}embed_tokens.weight"));
        if let Some((text, head)) = PREFIXES.into_iter().find(embeds) {
            return Ok(Names { text, head, shares_head: false });
        }
        let only_head =
            |(text, head): &(&str, &str)| has(format!("{text}norm.weight")) && has(format!("{head}lm_head.weight"));
        match PREFIXES.into_iter().find(only_head) {
            Some((text, head)) => Ok(Names { text, head, shares_head: true }),
            None => bail!("{}: no tensor `model.embed_tokens.weight`", checkpoint.folder().display()),
        }
    }

    /// Whether embedding and head are one matrix that bears the head's name.
    pub(crate) fn shares_head(&self) -> bool {
        self.shares_head
    }

    /// The checkpoint's name for what the text model calls `short`, such as `layers.0.mlp.gate.weight`.
    pub fn full(&self, short: &str) -> String {
        if self.shares_head
            && let Some(leaf) = short.strip_prefix("embed_tokens")
        {
            return format!("{}lm_head{leaf}", self.head);
        }
        let prefix = if short.starts_with("lm_head") { self.head } else { self.text };
        format!("{prefix}{short}")
    }

    /// The text model's name for a tensor; `None` for one of another part.
    pub fn short<'a>(&self, name: &'a str) -> Option<&'a str> {
        if self.shares_head
            && let Some(leaf) = name.strip_prefix(self.head).and_then(|n| n.strip_prefix("lm_head."))
        {
            let of_embedding = ["embed_tokens.weight", "embed_tokens.scales", "embed_tokens.biases"];
            return of_embedding.into_iter().find(|name| name.strip_prefix("embed_tokens.") == Some(leaf));
        }
        let body = name.strip_prefix(self.text);
        let body = body.filter(|n| ["embed_tokens.", "layers.", "norm."].iter().any(|part| n.starts_with(part)));
        body.or_else(|| name.strip_prefix(self.head).filter(|n| n.starts_with("lm_head.")))
    }

    /// What the tensor `name` is to the model that `description` describes.
    pub fn belongs<'a>(&self, description: &Description, name: &'a str) -> Belongs<'a> {
        let short = self.short(name);
        let meaning = short.and_then(|short| description.meaning(short));
        let unused = match meaning {
            // The reference leaves it out, too, and warns.
            Some(Meaning { weight, expert, leaf: Leaf::Bias, .. }) if !weight.biased => match expert {
                Some(_) => return Belongs::LeftOut("biases of experts"),
                None => true,
            },
            Some(Meaning { weight, .. }) if weight.class == WeightClass::Head && description.tied => {
                return Belongs::LeftOut("lm_head (the embedding once more)");
            }
            _ => false,
        };
        if let Some(meaning) = meaning.filter(|_| !unused) {
            return Belongs::Text(meaning);
        }
        match short {
            Some(short) if short.ends_with(".rotary_emb.inv_freq") => Belongs::Computed,
            // A layer beyond the last, or a part that no layer has: named once for all layers that have it.
            Some(short) => {
                let inside = short.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
                let is_layer = |number: &str| number.parse().is_ok_and(|n: usize| n < description.layers.len());
                match inside {
                    Some((number, part)) if is_layer(number) => Belongs::LeftOut(part),
                    Some((number, _)) => Belongs::LeftOut(&short[..short.len().min("layers.".len() + number.len())]),
                    None => Belongs::LeftOut(short),
                }
            }
            None => Belongs::LeftOut(name.split('.').find(|part| OTHER_PARTS.contains(part)).unwrap_or(name)),
        }
    }

    /// The parts of `checkpoint` that are not the text model's ("visual", "mtp"), for one line to the user.
    pub fn left_out(&self, description: &Description, checkpoint: &Checkpoint) -> Vec<String> {
        let mut parts: Vec<String> = Vec::new();
        for tensor in checkpoint.tensors() {
            match self.belongs(description, &tensor.name) {
                Belongs::LeftOut(part) if !parts.iter().any(|p| p == part) => parts.push(part.to_owned()),
                _ => {}
            }
        }
        parts
    }

    /// Whether `checkpoint` has been through MLX's conversion: centred norms have 1 added, and convolutions are `[channels, taps, 1]`. MLX moves the single
    /// input channel of a convolution to the end whenever it adds the 1, so the shape of a convolution tells.
    pub fn converted_by_mlx(&self, description: &Description, checkpoint: &Checkpoint) -> bool {
        let convolution = description.weights().find(|w| w.kind == WeightKind::Convolution);
        let tensor = convolution.and_then(|w| checkpoint.tensor(&self.full(&format!("{}.weight", w.name()))));
        tensor.is_some_and(|t| t.shape.len() == 3 && t.shape[2] == 1 && t.shape[1] != 1)
    }
}

/// The names of the tensors of `checkpoint` that hold routed experts of the model that `description` describes. None for a checkpoint of something else: whoever
/// loads it says what is missing.
pub fn expert_tensors(description: &Description, checkpoint: &Checkpoint) -> HashSet<String> {
    let Ok(names) = Names::of(checkpoint) else { return HashSet::new() };
    let is_of_expert = |name: &str| match names.belongs(description, name) {
        Belongs::Text(meaning) => meaning.weight.class == WeightClass::Expert,
        Belongs::LeftOut(_) | Belongs::Computed => false,
    };
    checkpoint.tensors().iter().filter(|t| is_of_expert(&t.name)).map(|t| t.name.to_string()).collect()
}
