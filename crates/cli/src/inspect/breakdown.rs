//! Divides a checkpoint's bytes by use, from config and headers alone: read for every token, read for some, or added by a conversation. Tests compare this with
//! what the engine does.

use std::collections::BTreeMap;

use anyhow::Result;
use sluice_model::{Belongs, Description, Leaf, ModelTensors, Options, WeightClass, check_supported};
use sluice_store::Dtype;

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Component {
    /// The input embedding; also the output head where they are tied.
    Embedding,
    /// Routed experts: some of them are read for a token.
    Experts,
    /// Tables of which a token reads a row, which may stay on disk.
    Tables,
    /// Everything else that every token reads.
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

/// A checkpoint's bytes and parameters by use.
pub struct Anatomy {
    pub model_type: String,
    /// Why this program cannot run it.
    pub unsupported: Option<String>,
    /// `None` for an unknown architecture. Then all tensors are [`Component::Rest`].
    pub model: Option<Description>,
    pub left_out: Vec<String>,
    /// Bytes by element type as stored.
    pub dtypes: BTreeMap<&'static str, u64>,
    /// (bits, group size), if the checkpoint is quantised.
    pub quantization: Option<(u8, u16)>,
    /// The name of the form, where it is not integers with scales and biases.
    pub form: Option<String>,
    /// Modules with other bits or groups than that, or unquantised ones of a matrix's shape.
    pub exceptions: usize,
    parts: BTreeMap<Component, Size>,
    /// Bytes of one expert, per layer.
    expert_bytes: BTreeMap<usize, u64>,
}

impl Anatomy {
    /// # Errors
    /// A key of `config.json` that is missing or wrong, or weights without an embedding.
    pub fn read(tensors: &ModelTensors) -> Result<Anatomy> {
        let (config, checkpoint) = (tensors.config(), tensors.checkpoint());
        let (quantization, refused) = match config.quantization() {
            Ok(q) => (Some(q), None),
            Err(e) => (None, Some(format!("{e:#}"))),
        };
        let (model, unknown) = match check_supported(config) {
            Ok(()) => (Some(sluice_model::describe_stored(tensors, &Options::default())?), None),
            Err(e) => (None, Some(format!("{e:#}"))),
        };
        let default = quantization.as_ref().and_then(|q| q.default());
        let mut a = Anatomy {
            model_type: config.model_type()?.to_owned(),
            unsupported: unknown.or(refused),
            model: None,
            left_out: Vec::new(),
            dtypes: BTreeMap::new(),
            quantization: default,
            form: tensors.layout().quantized_form().map(str::to_owned),
            exceptions: 0,
            parts: BTreeMap::new(),
            expert_bytes: BTreeMap::new(),
        };
        for t in checkpoint.tensors() {
            let (part, layer) = match model.as_ref().map(|model| tensors.belongs(model, &t.name)) {
                Some(Belongs::Text(m)) => match m.weight.class {
                    WeightClass::Embedding => (Component::Embedding, None),
                    class if class.is_table() => (Component::Tables, None),
                    // Biases are vectors, which stay in memory.
                    WeightClass::Expert if m.leaf != Leaf::Bias => (Component::Experts, m.weight.layer),
                    _ => (Component::Rest, None),
                },
                Some(Belongs::Computed) | None => (Component::Rest, None),
                Some(Belongs::LeftOut(part)) => {
                    if !a.left_out.contains(&part) {
                        a.left_out.push(part);
                    }
                    (Component::LeftOut, None)
                }
            };
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
                size.parameters += tensors.layout().stored(t).1;
            }

            if part != Component::LeftOut {
                *a.dtypes.entry(tensors.layout().stored(t).0).or_default() += bytes;
            }
            if let Some(layer) = layer {
                *a.expert_bytes.entry(layer).or_default() += bytes;
            }
        }
        if let Some((count, _)) = model.as_ref().and_then(Description::experts) {
            a.expert_bytes.values_mut().for_each(|bytes| *bytes /= count as u64);
        }
        Ok(Anatomy { model, ..a })
    }

    pub fn part(&self, part: Component) -> Size {
        self.parts.get(&part).copied().unwrap_or_default()
    }

    /// Parameters of the text model.
    pub fn parameters(&self) -> u64 {
        let all = [Component::Embedding, Component::Experts, Component::Tables, Component::Rest];
        all.iter().map(|p| self.part(*p).parameters).sum()
    }

    /// Everything but the routed experts and tables that stay on disk.
    pub fn resident_bytes(&self) -> u64 {
        self.part(Component::Embedding).bytes + self.part(Component::Rest).bytes
    }

    /// Bytes of the smallest and of the largest expert.
    pub fn per_expert(&self) -> Option<(u64, u64)> {
        Some((*self.expert_bytes.values().min()?, *self.expert_bytes.values().max()?))
    }

    /// Layers with routed experts.
    pub fn expert_layers(&self) -> usize {
        self.expert_bytes.len()
    }

    /// Weight bytes read for one token of an answer: its experts, one row of the embedding (all rows if it is the head too), and all other resident weights.
    /// `None`: not known.
    pub fn read_per_token(&self) -> Option<u64> {
        let model = self.model.as_ref()?;
        let embedding = self.part(Component::Embedding).bytes;
        let tables = self.part(Component::Tables).bytes / model.per_layer.map_or(1, |own| own.vocabulary as u64);
        let row = embedding / model.vocabulary as u64 + tables;
        let k = model.experts().map_or(0, |(_, k)| k as u64);
        let experts: u64 = self.expert_bytes.values().map(|each| each * k).sum();
        Some(self.part(Component::Rest).bytes + row + if model.tied { embedding } else { 0 } + experts)
    }

    /// Bytes that a position of a conversation takes, for keys and values of `element` bytes. `None`: not known.
    pub fn kv_per_token(&self, element: u64) -> Option<u64> {
        Some(self.model.as_ref()?.kv_elements() as u64 * element)
    }

    /// Bytes of a conversation's recurrent states. `None`: not known.
    pub fn state_bytes(&self) -> Option<u64> {
        Some(4 * self.model.as_ref()?.state_len() as u64)
    }
}
