//! Writes a random model as a folder of safetensors.

use std::collections::BTreeMap;
use std::path::Path;

use sluice_model::WeightKind;
use sluice_store::{Dtype, TensorPlan, Writer};

use super::{Model, Weight};

impl Model {
    /// As a folder of f32.
    pub fn write_safetensors(&self, folder: &Path) {
        let mut tensors: Vec<(String, Vec<usize>, &[f32])> = Vec::new();
        for Weight { description: w, values, bias } in &self.weights {
            let head = if w.part == "lm_head" { "" } else { "model." };
            let module = format!("{head}{}", self.description.stored_name(w));
            let module = if self.model_type() == "deepseek_v4" { published(&module) } else { module };
            match w.kind {
                WeightKind::Vector if w.rows > 1 => tensors.push((module.clone(), vec![w.rows, w.cols], values)),
                WeightKind::Vector => tensors.push((module.clone(), vec![w.cols], values)),
                WeightKind::Norm { .. } => tensors.push((format!("{module}.weight"), vec![w.cols], values)),
                WeightKind::Convolution => tensors.push((format!("{module}.weight"), vec![w.rows, 1, w.cols], values)),
                WeightKind::Matrix if w.count > 1 => {
                    for (e, own) in values.chunks_exact(w.rows * w.cols).enumerate() {
                        let (before, projection) = module.rsplit_once(".experts.").unwrap();
                        let known = ["gate_proj", "up_proj", "down_proj"].iter().position(|known| *known == projection);
                        let single =
                            format!("{before}.experts.{e}.{}", self.description.expert_spelling[known.unwrap()]);
                        tensors.push((format!("{single}.weight"), vec![w.rows, w.cols], own));
                        if let Some(bias) = bias {
                            let own = &bias[e * w.rows..(e + 1) * w.rows];
                            tensors.push((format!("{single}.bias"), vec![w.rows], own));
                        }
                    }
                }
                WeightKind::Matrix => {
                    let part = if w.part == "ple.ple_embedding.ngram_embedding" { ".shard_0" } else { "" };
                    tensors.push((format!("{module}{part}.weight"), vec![w.rows, w.cols], values));
                }
            }
            if let Some(bias) = bias.as_ref().filter(|_| w.count == 1) {
                tensors.push((format!("{module}.bias"), vec![bias.len()], bias));
            }
        }
        let is_numbers = |name: &str| name.ends_with(".tid2eid");
        let plan = |(name, shape, _): &(String, Vec<usize>, &[f32])| TensorPlan {
            name: name.clone(),
            dtype: if is_numbers(name) { Dtype::I64 } else { Dtype::F32 },
            shape: shape.clone(),
        };
        let plans: Vec<TensorPlan> = tensors.iter().map(plan).collect();
        let mut writer = Writer::create(&folder.join("model.safetensors"), &plans, &BTreeMap::new()).unwrap();
        for (name, _, values) in &tensors {
            let bytes: Vec<u8> = match is_numbers(name) {
                true => values.iter().flat_map(|x| (*x as i64).to_le_bytes()).collect(),
                false => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            writer.append(name, &bytes).unwrap();
        }
        writer.finish().unwrap();
        std::fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
    }
}

/// What DeepSeek calls a module of V4.
fn published(module: &str) -> String {
    match module {
        "model.embed_tokens" => "embed".into(),
        "lm_head" => "head".into(),
        other => other.trim_start_matches("model.").replace(".attn.norm", ".attn.kv_norm"),
    }
}
