//! Plans for a GPU that computes: which part of a model its memory holds, and the speed that the link to it allows.

use serde_json::{Value, json};
use sluice_backend::WeightFormat;
use sluice_model::{Belongs, Description, ModelTensors, WeightClass};

use super::estimate::{Split, Weights, hit_rate};
use super::shape::Shape;
use crate::units;

/// Usual links, in bytes per second of large copies from locked memory; the last was measured.
const LINKS: [(&str, f64); 3] = [("PCIe 3", 12e9), ("PCIe 4", 25e9), ("PCIe 5", 53e9)];

/// How much longer weights are in a GPU's memory than in the file: types with a codebook have the numbers of values there, not of entries.
#[derive(Clone, Copy)]
pub struct OnDevice {
    /// Of all but routed experts, and of these.
    resident: f64,
    experts: f64,
}

impl Default for OnDevice {
    fn default() -> OnDevice {
        OnDevice { resident: 1.0, experts: 1.0 }
    }
}

impl OnDevice {
    pub fn of(tensors: &ModelTensors, description: &Description) -> OnDevice {
        // Bytes in the file and on the device.
        let (mut resident, mut experts) = ([0u64; 2], [0u64; 2]);
        for t in tensors.checkpoint().tensors() {
            let Belongs::Text(meaning) = tensors.belongs(description, &t.name) else { continue };
            let (in_file, cols) = (t.bytes.len() as u64, meaning.weight.cols);
            let rows = tensors.layout().stored(t).1 / cols.max(1) as u64;
            let there = match tensors.layout().format(tensors.checkpoint(), t) {
                // Of other producers' forms a tensor has only the numbers, and rows there are as long as all of it.
                Ok(format @ WeightFormat::Blocks(_)) => {
                    sluice_cuda::row_bytes_on_device(format, cols).map_or(in_file, |row| rows * row as u64)
                }
                _ => in_file,
            };
            let sum = if meaning.weight.class == WeightClass::Expert { &mut experts } else { &mut resident };
            *sum = [sum[0] + in_file, sum[1] + there];
        }
        let part = |[file, there]: [u64; 2]| if file > 0 { there as f64 / file as f64 } else { 1.0 };
        OnDevice { resident: part(resident), experts: part(experts) }
    }

    /// Bytes of the weights where they are on the device.
    pub fn weights(self, weights: &Weights) -> Weights {
        let more = |bytes: u64, by: f64| (bytes as f64 * by) as u64;
        let per_expert = more(weights.per_expert, self.experts);
        Weights {
            resident: more(weights.resident, self.resident),
            resident_read: more(weights.resident_read, self.resident),
            per_expert,
            experts: per_expert * weights.expert_count,
            ..weights.clone()
        }
    }

    /// What it costs, where it is worth a line.
    pub fn text(self) -> Option<String> {
        let most = self.resident.max(self.experts);
        let percent = |by: f64| format!("{:.0} %", 100.0 * (by - 1.0));
        (most > 1.05).then(|| {
            let (resident, experts) = (percent(self.resident), percent(self.experts));
            format!("its layout of these types takes {resident} more than the file of resident weights, {experts} of experts")
        })
    }
}

/// The division of the memory of a GPU, or of several that share the layers.
pub struct Gpu {
    /// Bytes of each GPU, and how many there are.
    memory: u64,
    count: u64,
    split: Split,
    /// Bytes of staging for a layer's experts, on each GPU, if not all experts stay.
    passing: u64,
    /// Bytes of experts that stay.
    pub stays: u64,
}

impl Gpu {
    /// `count` of them with `memory` bytes each.
    pub fn new(shape: &Shape, weights: &Weights, (count, memory): (u64, u64), context: u64) -> Gpu {
        let mut split = Split::new(shape, weights, memory.saturating_mul(count), context, 2);
        let layer = weights.per_expert * shape.experts as u64;
        let passing = if split.for_experts < weights.experts { count * layer } else { 0 };
        split.missing += passing.saturating_sub(split.for_experts);
        Gpu { memory, count, stays: split.for_experts.saturating_sub(passing), split, passing }
    }

    /// The expected share of expert uses that its memory serves, without a recorded text.
    fn hit_rate(&self, weights: &Weights) -> f64 {
        if weights.experts == 0 { 1.0 } else { hit_rate(self.stays as f64 / weights.experts as f64) }
    }

    /// Bytes of experts that a token has copied to the GPU or computed on the host, if the GPU's memory serves this share.
    fn copied(&self, weights: &Weights, served: Option<f64>) -> f64 {
        weights.expert_bytes() as f64 * (1.0 - served.unwrap_or_else(|| self.hit_rate(weights)))
    }

    pub fn text(&self, weights: &Weights, context: u64, served: Option<f64>) -> String {
        let all = weights.experts.max(1);
        let mut text = format!(
            "{}{} = {} resident + {} for {context} tokens of conversation + {} that experts pass through + {} for experts ({:.1} % of them)\n",
            if self.count > 1 { format!("{} x ", self.count) } else { String::new() },
            units::bytes(self.memory),
            units::bytes(self.split.resident),
            units::bytes(self.split.cache),
            units::bytes(self.passing),
            units::bytes(self.stays),
            100.0 * self.stays as f64 / all as f64
        );
        if self.split.missing > 0 {
            text += &format!("{:<12}TOO LITTLE: {} are missing\n", "", units::bytes(self.split.missing));
        }
        let copied = self.copied(weights, served);
        if copied > 0.0 {
            let speeds = LINKS.map(|(name, link)| format!("{name} {:.1}", link / copied));
            text += &format!(
                "{:<12}{} of experts a token; tokens/s at most: {} (what the host computes of them comes on top)\n",
                "link",
                units::bytes(copied as u64),
                speeds.join(", ")
            );
        }
        text
    }

    pub fn to_json(&self, weights: &Weights, served: Option<f64>) -> Value {
        let copied = self.copied(weights, served);
        let links = LINKS.map(|(name, link)| (name.to_owned(), json!((copied > 0.0).then(|| link / copied))));
        json!({
            "memory": self.memory, "count": self.count, "resident": self.split.resident, "cache": self.split.cache, "passing": self.passing, "experts": self.stays,
            "missing": self.split.missing, "served": served.unwrap_or_else(|| self.hit_rate(weights)), "copied_bytes_per_token": copied,
            "tokens_per_second_at_most": links.into_iter().collect::<serde_json::Map<_, _>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::estimate::Precision;
    use crate::presets;
    use std::path::Path;

    #[test]
    fn types_with_a_codebook_take_more_of_a_gpu_than_of_a_file() {
        use sluice_backend::BlockFormat;
        let of = |blocks: BlockFormat| {
            let own = sluice_cuda::row_bytes_on_device(WeightFormat::Blocks(blocks), 4096).unwrap();
            own as f64 / (4096 / blocks.block_columns() * blocks.block_bytes()) as f64
        };
        assert!(of(BlockFormat::Q4K) < 1.06 && of(BlockFormat::Iq2Xxs) > 1.25);
        let weights = Weights {
            resident: 100,
            resident_read: 50,
            per_expert: 10,
            experts: 40,
            expert_count: 4,
            expert_layers: 2,
            taken: 2,
        };
        let found = OnDevice { resident: 1.0, experts: 1.5 }.weights(&weights);
        assert_eq!((found.resident, found.per_expert, found.experts), (100, 15, 60));
        assert_eq!(OnDevice::default().text(), None);
        assert!(OnDevice { resident: 1.0, experts: 1.5 }.text().unwrap().contains("50 % of experts"));
    }

    #[test]
    fn a_gpu_holds_what_every_token_reads_before_experts() {
        let shape = Shape::read(presets::find(Path::new("qwen3-30b-a3b")).unwrap().config()).unwrap();
        let precision = Precision { bits: 4, group: 64 };
        let weights = Weights::new(&shape, precision, precision, 8);
        let layer = 128 * weights.per_expert;
        for gigabytes in [1u64, 4, 8, 12, 24] {
            let gpu = Gpu::new(&shape, &weights, (1, gigabytes * 1_000_000_000), 8192);
            let used = gpu.split.resident + gpu.split.cache + gpu.passing + gpu.stays;
            assert!(gpu.split.missing > 0 || used <= gpu.memory, "{gigabytes} GB: {used}");
            assert_eq!(gpu.passing == layer, gpu.stays < weights.experts);
            let json = gpu.to_json(&weights, None);
            assert_eq!(json["tokens_per_second_at_most"]["PCIe 5"].is_null(), gigabytes == 24, "{json}");
        }
        let [little, more] = [4, 12].map(|gb| Gpu::new(&shape, &weights, (1, gb * 1_000_000_000), 8192));
        assert!(little.copied(&weights, None) > more.copied(&weights, None));
        assert_eq!(little.copied(&weights, Some(1.0)), 0.0);
        // Two hold more together, but for what passes through each.
        let two = Gpu::new(&shape, &weights, (2, 4_000_000_000), 8192);
        assert_eq!(two.stays, 4_000_000_000 - layer + little.stays);
    }
}
