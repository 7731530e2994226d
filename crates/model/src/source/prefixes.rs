//! What stands in front of the text model's names in a checkpoint of safetensors.

use std::borrow::Cow;

use sluice_store::Checkpoint;

use crate::config::Config;
use crate::description::{QWEN_PARTS, qwen_name};

/// In front of `embed_tokens`, `layers` and `norm`, and in front of `lm_head`, in the order in which they are tried.
const PREFIXES: [(&str, &str); 4] =
    [("model.language_model.", ""), ("language_model.model.", "language_model."), ("model.", ""), ("", "")];

/// What may stand in front where embedding and last norm have other names, and these: ours and theirs (Mamba's kin).
const MAMBA_PREFIXES: [&str; 2] = ["backbone.", "model."];
const MAMBA_PARTS: &[(&str, &str)] = &[("embed_tokens", "embeddings"), ("norm", "norm_f")];

/// Other names of DeepSeek-V4: as it is published, and as transformers writes it.
const V4_PARTS: &[(&str, &str)] = &[("embed_tokens", "embed")];
const V4_SAVED_PARTS: &[(&str, &str)] =
    &[("hc_head_fn", "hc_head.hc_fn"), ("hc_head_base", "hc_head.hc_base"), ("hc_head_scale", "hc_head.hc_scale")];
const V4_HEAD: &str = "head";
/// The norm of a token's row, within layers: as transformers writes it, and as it is published.
const V4_ROW_NORM: [&str; 2] = [".attn.norm", ".attn.kv_norm"];

/// What the text model's names begin with, besides that of the head.
const PARTS: [&str; 10] = [
    "hc_head_",
    "embed_tokens.",
    "layers.",
    "norm.",
    "embed_tokens_per_layer.",
    "per_layer_model_projection.",
    "per_layer_projection_norm.",
    "hyper_connection_mixer.",
    "output_attn_res_norm.",
    "output_attn_res_proj.",
];
/// What the head is called.
const LM_HEAD: &str = "lm_head";
/// What Qwen's checkpoints have in front of the parts of the MTP head.
const MTP_PREFIXES: [&str; 3] = ["mtp.", "language_model.mtp.", "model.mtp."];

/// The rest of a name behind `layers.N.`.
fn within(short: &str, layer: usize) -> Option<&str> {
    let (number, rest) = short.strip_prefix("layers.")?.split_once('.')?;
    (number.parse() == Ok(layer)).then_some(rest)
}

/// What follows a module's name.
fn leaf_of<'a>(name: &'a str, module: &str) -> Option<&'a str> {
    name.strip_prefix(module).filter(|leaf| leaf.is_empty() || leaf.starts_with('.'))
}

/// Where there is neither an embedding nor a head.
const USUAL: (&str, &str) = PREFIXES[2];

/// The prefixes of a checkpoint's names.
#[derive(Clone, Copy, Debug)]
pub struct Prefixes {
    text: &'static str,
    head: &'static str,
    /// What stands in front of the head that predicts one token more, where that has names of its own, and the number of its layer: the one behind the last.
    mtp: Option<(&'static str, usize)>,
    /// Parts outside of layers that have other names: ours and theirs.
    parts: &'static [(&'static str, &'static str)],
    /// What the head is called.
    own_head: &'static str,
    /// The norm of a token's row is named as DeepSeek-V4 is published.
    own_row_norm: bool,
    /// The one matrix that is embedding and head is stored under the head's name only.
    pub shares_head: bool,
}

impl Prefixes {
    /// The first prefixes with an embedding, else the first with a head that may be the embedding, else the usual ones.
    pub fn detect(checkpoint: &Checkpoint, config: &Config) -> Prefixes {
        let has = |name: String| checkpoint.tensor(&name).is_some();
        let joins = |prefix: &&str| has(format!("{prefix}fc.weight"));
        let mtp = MTP_PREFIXES.into_iter().find(joins).zip(config.layers().ok());
        let embeds = |(text, _): &(&str, &str)| has(format!("{text}embed_tokens.weight"));
        let usual = Prefixes {
            text: "",
            head: "",
            mtp,
            parts: &[],
            own_head: LM_HEAD,
            own_row_norm: false,
            shares_head: false,
        };
        if has(format!("{V4_HEAD}.weight")) && !has(format!("{LM_HEAD}.weight")) {
            let published = has("embed.weight".to_owned());
            let (text, parts) = if published { ("", V4_PARTS) } else { ("model.", V4_SAVED_PARTS) };
            let own_row_norm = has(format!("{text}layers.0{}.weight", V4_ROW_NORM[1]));
            return Prefixes { text, parts, own_head: V4_HEAD, own_row_norm, ..usual };
        }
        if let Some((text, head)) = PREFIXES.into_iter().find(embeds) {
            return Prefixes { text, head, ..usual };
        }
        if let Some(text) = MAMBA_PREFIXES.into_iter().find(|text| has(format!("{text}embeddings.weight"))) {
            return Prefixes { text, parts: MAMBA_PARTS, ..usual };
        }
        let only_head =
            |(text, head): &(&str, &str)| has(format!("{text}norm.weight")) && has(format!("{head}lm_head.weight"));
        match PREFIXES.into_iter().find(only_head) {
            Some((text, head)) => Prefixes { text, head, shares_head: true, ..usual },
            None => Prefixes { text: USUAL.0, head: USUAL.1, ..usual },
        }
    }

    /// The checkpoint's name for what the text model calls `short`, such as `layers.0.mlp.gate.weight`.
    pub fn full(&self, short: &str) -> String {
        if self.shares_head
            && let Some(leaf) = leaf_of(short, "embed_tokens")
        {
            return format!("{}lm_head{leaf}", self.head);
        }
        if let Some((prefix, layer)) = self.mtp
            && let Some(rest) = within(short, layer)
        {
            return format!("{prefix}{}", qwen_name(rest));
        }
        let other = |(ours, theirs): &(&str, &str)| Some(format!("{}{theirs}{}", self.text, leaf_of(short, ours)?));
        if let Some(name) = self.parts.iter().find_map(other) {
            return name;
        }
        if let Some(name) = self.with_row_norm(short, V4_ROW_NORM) {
            return format!("{}{name}", self.text);
        }
        match leaf_of(short, LM_HEAD) {
            Some(leaf) => format!("{}{}{leaf}", self.head, self.own_head),
            None => format!("{}{short}", self.text),
        }
    }

    /// A name within layers with the norm of a token's row renamed; `None` for others.
    fn with_row_norm(&self, name: &str, [from, to]: [&str; 2]) -> Option<String> {
        let (before, _) = name.split_once(from).filter(|_| self.own_row_norm)?;
        let leaf = leaf_of(&name[before.len()..], from)?;
        Some(format!("{before}{to}{leaf}"))
    }

    /// The text model's name for a tensor of the MTP head, if that has names of its own.
    pub fn of_mtp(&self, name: &str) -> Option<String> {
        let (prefix, layer) = self.mtp?;
        let rest = name.strip_prefix(prefix)?;
        if let Some(rest) = rest.strip_prefix("layers.0.") {
            return Some(format!("layers.{layer}.{rest}"));
        }
        let ours = |(ours, theirs): &(&str, &str)| {
            let leaf = rest.strip_prefix(theirs).filter(|leaf| leaf.starts_with('.'))?;
            Some(format!("layers.{layer}.{ours}{leaf}"))
        };
        QWEN_PARTS.iter().find_map(ours)
    }

    /// The text model's name for a tensor; `None` for one of another part.
    pub fn short<'a>(&self, name: &'a str) -> Option<Cow<'a, str>> {
        if self.shares_head
            && let Some(leaf) = name.strip_prefix(self.head).and_then(|n| n.strip_prefix("lm_head."))
        {
            let of_embedding = ["embed_tokens.weight", "embed_tokens.scales", "embed_tokens.biases"];
            let found = of_embedding.into_iter().find(|name| name.strip_prefix("embed_tokens.") == Some(leaf));
            return found.map(Cow::Borrowed);
        }
        let body = name.strip_prefix(self.text);
        let other = |(ours, theirs): &(&str, &str)| Some(format!("{ours}{}", leaf_of(body?, theirs)?));
        if let Some(found) = self.parts.iter().find_map(other) {
            return Some(Cow::Owned(found));
        }
        if let Some(body) = body.filter(|n| PARTS.iter().any(|part| n.starts_with(part))) {
            let [ours, theirs] = V4_ROW_NORM;
            return Some(self.with_row_norm(body, [theirs, ours]).map_or(Cow::Borrowed(body), Cow::Owned));
        }
        let head = name.strip_prefix(self.head)?;
        let leaf = leaf_of(head, self.own_head).filter(|leaf| !leaf.is_empty())?;
        Some(if self.own_head == LM_HEAD { Cow::Borrowed(head) } else { Cow::Owned(format!("{LM_HEAD}{leaf}")) })
    }
}
