//! A checkpoint taken apart by its config and its headers: which bytes are read for every token, which only now and then, and what a
//! conversation adds. What the engine will really do with them is tested against this.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, anyhow};
use sluice_model::{Config, check_supported};
use sluice_store::{Checkpoint, Dtype};

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The input embedding; also the output head where they are tied.
    Embedding,
    /// Routed experts: some of them are read for a token.
    Experts,
    /// All else that every token reads.
    Rest,
    /// Not the text model's (vision, multi-token prediction).
    LeftOut,
}

/// Sizes of a part.
#[derive(Clone, Copy, Debug, Default)]
pub struct Size {
    pub bytes: u64,
    pub parameters: u64,
}

pub struct Anatomy {
    pub model_type: String,
    /// Why this program cannot run it.
    pub unsupported: Option<String>,
    pub layers: usize,
    pub attention_layers: usize,
    pub recurrent_layers: usize,
    pub expert_layers: usize,
    pub hidden: usize,
    pub vocabulary: usize,
    pub max_context: usize,
    /// Experts per layer and per token.
    pub experts: Option<(usize, usize)>,
    pub left_out: Vec<String>,
    /// Bytes by element type as stored.
    pub dtypes: BTreeMap<&'static str, u64>,
    /// (bits, group size).
    pub quantization: Option<(u8, u16)>,
    /// Modules with other bits or groups than that, or unquantised ones of a matrix's shape.
    pub exceptions: usize,
    /// Of one conversation.
    pub state_bytes: u64,
    tied: bool,
    /// Elements of keys and values together, all layers.
    kv_elements: u64,
    parts: BTreeMap<Part, Size>,
    /// Bytes of one expert, per layer.
    expert_bytes: BTreeMap<usize, u64>,
}

impl Anatomy {
    /// # Errors
    /// A key of `config.json` that is missing or wrong, or weights without an embedding.
    pub fn read(config: &Config, checkpoint: &Checkpoint) -> Result<Anatomy> {
        let (quantization, refused) = match config.quantization() {
            Ok(q) => (Some(q), None),
            Err(e) => (None, Some(format!("{e:#}"))),
        };
        let supported = check_supported(config).map_err(|e| format!("{e:#}"));
        let default = quantization.as_ref().and_then(|q| q.default());
        // Newer versions of the reference write the second name for some architectures.
        let key = ["num_experts", "num_local_experts"].into_iter().find(|key| config.get(key).is_some());
        let count = key.map(|key| config.size(key)).transpose()?;
        let experts = count.map(|n| Ok::<_, anyhow::Error>((n, config.size("num_experts_per_tok")?))).transpose()?;
        let mut a = Anatomy {
            model_type: config.model_type()?.to_owned(),
            unsupported: supported.err().or(refused),
            layers: config.layers()?,
            attention_layers: 0,
            recurrent_layers: 0,
            expert_layers: 0,
            hidden: config.size("hidden_size")?,
            vocabulary: config.size("vocab_size")?,
            max_context: config.size_or("max_position_embeddings", 32768)?,
            experts,
            left_out: Vec::new(),
            dtypes: BTreeMap::new(),
            quantization: default,
            exceptions: 0,
            state_bytes: 0,
            tied: config.tied_embeddings()?,
            kv_elements: 0,
            parts: BTreeMap::new(),
            expert_bytes: BTreeMap::new(),
        };
        let names = Names::of(checkpoint)?;
        let (mut attention, mut recurrent) = (BTreeSet::new(), BTreeSet::new());
        for t in checkpoint.tensors() {
            let (part, layer) = names.place(&t.name);
            let bytes = t.bytes.len() as u64;
            let size = a.parts.entry(part).or_default();
            size.bytes += bytes;

            // Scales and biases of a quantised matrix are no parameters; its words hold several each.
            let module = t.name.strip_suffix(".weight");
            let is_scaled = |module: &str| checkpoint.tensor(&format!("{module}.scales")).is_some();
            let packed = module.filter(|m| t.dtype == Dtype::U32 && is_scaled(m));
            let of_scaled = [".scales", ".biases"].iter().find_map(|s| t.name.strip_suffix(s));
            if let Some(module) = packed {
                let form = quantization.as_ref().and_then(|q| q.of(module).ok()).or(default);
                size.parameters += bytes * 8 / form.map_or(32, |(bits, _)| u64::from(bits));
                a.exceptions += usize::from(form != default);
            } else if !of_scaled.is_some_and(is_scaled) && !t.name.ends_with(".padding") {
                size.parameters += bytes / t.dtype.size() as u64;
            }

            if part == Part::LeftOut {
                let name = names.family(&t.name);
                if !a.left_out.contains(&name) {
                    a.left_out.push(name);
                }
                continue;
            }
            *a.dtypes.entry(t.dtype.name()).or_default() += bytes;
            let Some(layer) = layer else { continue };
            if part == Part::Experts {
                *a.expert_bytes.entry(layer).or_default() += bytes;
            }
            if t.name.contains(".self_attn.") {
                attention.insert(layer);
                if t.name.ends_with(".k_proj.weight") || t.name.ends_with(".v_proj.weight") {
                    a.kv_elements += t.shape.first().copied().unwrap_or(0) as u64;
                }
            } else if t.name.contains(".linear_attn.") {
                recurrent.insert(layer);
            }
        }
        a.expert_layers = a.expert_bytes.len();
        if let Some((count, _)) = a.experts {
            a.expert_bytes.values_mut().for_each(|bytes| *bytes /= count as u64);
        }
        (a.attention_layers, a.recurrent_layers) = (attention.len(), recurrent.len());
        if a.recurrent_layers > 0 {
            a.state_bytes = 4 * a.recurrent_layers as u64 * state_elements(config)?;
        }
        Ok(a)
    }

    pub fn part(&self, part: Part) -> Size {
        self.parts.get(&part).copied().unwrap_or_default()
    }

    /// Of the text model.
    pub fn parameters(&self) -> u64 {
        [Part::Embedding, Part::Experts, Part::Rest].iter().map(|p| self.part(*p).parameters).sum()
    }

    /// Everything but the routed experts.
    pub fn resident_bytes(&self) -> u64 {
        self.part(Part::Embedding).bytes + self.part(Part::Rest).bytes
    }

    /// Bytes of the smallest and of the largest expert.
    pub fn per_expert(&self) -> Option<(u64, u64)> {
        self.experts?;
        Some((*self.expert_bytes.values().min()?, *self.expert_bytes.values().max()?))
    }

    /// Weight bytes that one token of an answer reads: all resident ones but the embedding, of which it is one row (and all rows again where
    /// it is the head too), and its experts.
    pub fn read_per_token(&self) -> u64 {
        let embedding = self.part(Part::Embedding).bytes;
        let row = embedding / self.vocabulary as u64;
        let k = self.experts.map_or(0, |(_, k)| k as u64);
        let experts: u64 = self.expert_bytes.values().map(|each| each * k).sum();
        self.part(Part::Rest).bytes + row + if self.tied { embedding } else { 0 } + experts
    }

    /// Bytes that a position of a conversation takes, for keys and values of `element` bytes.
    pub fn kv_per_token(&self, element: u64) -> u64 {
        self.kv_elements * element
    }
}

/// f32 elements of one GatedDeltaNet layer's state: a matrix per value head, and the convolution's last inputs.
fn state_elements(config: &Config) -> Result<u64> {
    let size = |key: &str| Ok::<_, anyhow::Error>(config.size(key)? as u64);
    let (key_dim, value_dim) = (size("linear_key_head_dim")?, size("linear_value_head_dim")?);
    let (keys, values) = (size("linear_num_key_heads")? * key_dim, size("linear_num_value_heads")? * value_dim);
    let taps = config.size_or("linear_conv_kernel_dim", 4)? as u64;
    Ok(values * key_dim + (taps - 1) * (2 * keys + values))
}

/// How a checkpoint names the text model's tensors.
struct Names {
    /// In front of `embed_tokens`, `layers` and `norm`.
    text: &'static str,
    /// In front of `lm_head`.
    head: &'static str,
}

impl Names {
    /// The spellings that `sluice-model` knows.
    fn of(checkpoint: &Checkpoint) -> Result<Names> {
        let known =
            [("model.language_model.", ""), ("language_model.model.", "language_model."), ("model.", ""), ("", "")];
        let found = known.into_iter().find(|(p, _)| checkpoint.tensor(&format!("{p}embed_tokens.weight")).is_some());
        let (text, head) = found.ok_or_else(|| anyhow!("no tensor \"model.embed_tokens.weight\""))?;
        Ok(Names { text, head })
    }

    /// What a tensor is for, and in which layer.
    fn place(&self, name: &str) -> (Part, Option<usize>) {
        if name.strip_prefix(self.head).is_some_and(|rest| rest.starts_with("lm_head.")) {
            return (Part::Rest, None);
        }
        let Some(rest) = name.strip_prefix(self.text) else { return (Part::LeftOut, None) };
        if rest.starts_with("embed_tokens.") {
            return (Part::Embedding, None);
        }
        if rest.starts_with("norm.") {
            return (Part::Rest, None);
        }
        let layer = rest.strip_prefix("layers.").and_then(|r| r.split_once('.'));
        let Some((number, inside)) = layer.and_then(|(n, inside)| Some((n.parse().ok()?, inside))) else {
            return (Part::LeftOut, None);
        };
        let experts = inside.starts_with("mlp.experts.") || inside.starts_with("mlp.switch_mlp.");
        (if experts { Part::Experts } else { Part::Rest }, Some(number))
    }

    /// A short name for what a left-out tensor belongs to.
    fn family(&self, name: &str) -> String {
        let known = ["visual", "vision_tower", "mtp", "audio_tower"];
        name.split('.').find(|p| known.contains(p)).unwrap_or(name).to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_placed_by_name() {
        let names = Names { text: "model.language_model.", head: "" };
        let place = |rest: &str| names.place(&format!("model.language_model.{rest}"));
        assert_eq!(place("embed_tokens.weight"), (Part::Embedding, None));
        assert_eq!(place("layers.11.mlp.experts.gate_up_proj"), (Part::Experts, Some(11)));
        assert_eq!(place("layers.0.mlp.experts.3.up_proj.weight"), (Part::Experts, Some(0)));
        assert_eq!(place("layers.2.mlp.switch_mlp.up_proj.scales"), (Part::Experts, Some(2)));
        assert_eq!(place("layers.2.mlp.shared_expert.up_proj.weight"), (Part::Rest, Some(2)));
        assert_eq!(names.place("lm_head.weight"), (Part::Rest, None));
        assert_eq!(names.place("mtp.layers.0.mlp.experts.0.up_proj.weight"), (Part::LeftOut, None));
        assert_eq!(names.family("model.visual.blocks.0.attn.qkv.weight"), "visual");
    }
}
