//! Plans for a GPU that computes: which part of a model its memory holds, and the speed that the link to it allows.

use serde_json::{Value, json};

use super::estimate::{Split, Weights, hit_rate};
use super::shape::Shape;
use crate::units;

/// Usual links, in bytes per second of large copies from locked memory; the last was measured.
const LINKS: [(&str, f64); 3] = [("PCIe 3", 12e9), ("PCIe 4", 25e9), ("PCIe 5", 53e9)];

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
