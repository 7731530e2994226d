//! The arithmetic of `plan`: bytes, times, and the bottleneck. Nothing here measures.

use super::shape::Shape;

/// How weights are stored: affine groups with a 16-bit scale and bias each, or plain floats (`bits` 16 or 32).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Precision {
    pub bits: u64,
    pub group: u64,
}

impl Precision {
    /// Bytes of this many weights.
    pub fn bytes(self, weights: u64) -> u64 {
        let groups = if self.is_float() { 0 } else { weights / self.group };
        weights * self.bits / 8 + groups * 4
    }

    pub fn is_float(self) -> bool {
        self.bits >= 16
    }
}

/// Bytes of a model at given widths.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    /// Everything but the routed experts.
    pub resident: u64,
    /// Resident bytes that a token reads: all but the embedding, of which it reads a row.
    pub resident_read: u64,
    pub per_expert: u64,
    pub experts: u64,
    /// Experts of all layers.
    pub expert_count: u64,
    /// Layers with experts.
    pub expert_layers: u64,
    /// Experts that a token takes, all layers together.
    pub taken: u64,
}

impl Weights {
    pub fn new(s: &Shape, resident: Precision, experts: Precision, k: usize) -> Weights {
        let routers = if resident.is_float() { resident } else { Precision { bits: 8, group: 64 } };
        let vectors = if resident.bits == 32 { 4 } else { 2 } * s.vectors;
        let rest = resident.bytes(s.head) + resident.bytes(s.dense) + routers.bytes(s.routers) + vectors;
        let embedding = resident.bytes(s.embedding);
        let row = embedding / s.vocabulary;
        let per_expert = experts.bytes(s.per_expert);
        let expert_count = s.expert_layers as u64 * s.experts as u64;
        Weights {
            resident: rest + embedding,
            // A tied head reads the embedding as a matrix.
            resident_read: rest + if s.head == 0 { embedding } else { row },
            per_expert,
            experts: per_expert * expert_count,
            expert_count,
            expert_layers: s.expert_layers as u64,
            taken: s.expert_layers as u64 * k as u64,
        }
    }

    /// Bytes of the experts that a token takes.
    pub fn expert_bytes(&self) -> u64 {
        self.taken * self.per_expert
    }
}

/// Where the memory goes. All in bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    pub resident: u64,
    /// Keys, values and states of one conversation.
    pub cache: u64,
    /// Left for experts.
    pub for_experts: u64,
    /// Missing, if not even everything else fits.
    pub missing: u64,
}

impl Split {
    /// `memory` bytes for a model and one conversation of `context` tokens with keys and values of `element` bytes.
    pub fn new(s: &Shape, w: &Weights, memory: u64, context: u64, element: u64) -> Split {
        let cache = s.cache_elements(context) * element + 4 * s.state_elements;
        let fixed = w.resident + cache;
        let for_experts = memory.saturating_sub(fixed).min(w.experts);
        Split { resident: w.resident, cache, for_experts, missing: fixed.saturating_sub(memory) }
    }
}

/// What limits the speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Disk,
    Memory,
}

impl Bound {
    pub fn name(self) -> &'static str {
        match self {
            Bound::Disk => "disk",
            Bound::Memory => "memory bandwidth",
        }
    }
}

/// The cost of reads: a latency each, and bytes over bandwidth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Disk {
    /// Bytes per second of large reads, many at once.
    pub bandwidth: f64,
    /// Seconds of a single read beyond its bytes over that bandwidth.
    pub latency: f64,
}

/// Bytes of weights per second in products with one token's activations, by the weights' format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Products {
    pub resident: f64,
    pub experts: f64,
}

/// A token's cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Bytes read from disk.
    pub from_disk: f64,
    /// Seconds: reads from disk, and weights read from memory.
    pub disk: f64,
    pub memory: f64,
    /// Seconds of a token. Only a layer's reads and its experts' arithmetic overlap: reads cannot begin before the layer's router has run.
    pub seconds: f64,
    pub bound: Bound,
}

impl Token {
    /// At a hit rate.
    pub fn new(w: &Weights, hit_rate: f64, disk: Disk, products: Products) -> Token {
        let from_disk = w.expert_bytes() as f64 * (1.0 - hit_rate);
        // A layer's reads run in parallel: each layer with any read waits once.
        let layers = w.expert_layers as f64;
        let hits_all = hit_rate.powf(w.taken as f64 / layers.max(1.0));
        let read = from_disk / disk.bandwidth + layers * (1.0 - hits_all) * disk.latency;
        let before = w.resident_read as f64 / products.resident;
        let experts = w.expert_bytes() as f64 / products.experts;
        let seconds = before + read.max(experts);
        let bound = if read > before + experts { Bound::Disk } else { Bound::Memory };
        Token { from_disk, disk: read, memory: before + experts, seconds, bound }
    }
}

/// LRU hit rates by the part of a layer's experts in memory: (part, rate), as published for Qwen3.5-397B-A17B (16, 32, 64 and 128 of 512). Other models and texts
/// have other rates.
const LRU: [(f64, f64); 6] =
    [(0.0, 0.0), (16.0 / 512.0, 0.49), (32.0 / 512.0, 0.59), (64.0 / 512.0, 0.68), (128.0 / 512.0, 0.71), (1.0, 1.0)];

/// The expected hit rate with `part` (0 to 1) of the experts in memory: linear between published points.
pub fn hit_rate(part: f64) -> f64 {
    let part = part.clamp(0.0, 1.0);
    let after = LRU.iter().position(|(p, _)| *p >= part).unwrap_or(LRU.len() - 1).max(1);
    let ((p0, r0), (p1, r1)) = (LRU[after - 1], LRU[after]);
    r0 + (r1 - r0) * (part - p0) / (p1 - p0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::shape::Shape;
    use crate::presets;
    use std::path::Path;

    const Q2: Precision = Precision { bits: 2, group: 64 };
    const Q4: Precision = Precision { bits: 4, group: 64 };

    fn at(bandwidth: f64) -> Disk {
        Disk { bandwidth, latency: 0.0 }
    }

    fn products(both: f64) -> Products {
        Products { resident: both, experts: both }
    }

    fn shape(name: &str) -> Shape {
        Shape::read(presets::find(Path::new(name)).unwrap().config()).unwrap()
    }

    /// Published for Qwen3.5-397B-A17B at 2-bit experts and K = 4.
    #[test]
    fn the_published_figures_of_the_397b_come_out() {
        let s = shape("qwen3.5-397b-a17b");
        let w = Weights::new(&s, Q4, Q2, 4);
        assert_eq!(w.per_expert, 3_932_160);
        assert_eq!(Weights::new(&s, Q4, Q4, 4).per_expert, 7_077_888);
        assert_eq!(s.per_expert, 12_582_912);
        assert_eq!((w.expert_bytes() as f64 / 1e6).floor(), 943.0);
        let token = Token::new(&w, 0.0, at(17.5e9), products(f64::INFINITY));
        assert_eq!((token.disk * 1e4).round() / 10.0, 53.9);
        assert_eq!((1.0 / token.disk * 10.0).round() / 10.0, 18.5);
        assert_eq!(token.bound, Bound::Disk);
        assert!((5.4e9..5.7e9).contains(&(w.resident as f64)), "{}", w.resident);
        assert!((119e9..122e9).contains(&(w.experts as f64)), "{}", w.experts);
        assert!((390e9..400e9).contains(&(s.parameters() as f64)), "{}", s.parameters());
        assert!((15e9..18e9).contains(&(s.active(10) as f64)), "{}", s.active(10));
    }

    #[test]
    fn known_models_have_the_parameters_of_their_names() {
        for (name, all, active) in [
            ("qwen3-30b-a3b", 30.5e9, 3.3e9),
            ("qwen3-235b-a22b", 235e9, 22e9),
            ("qwen3.5-35b-a3b", 35e9, 3.0e9),
            ("gpt-oss-20b", 20.9e9, 3.6e9),
            ("gpt-oss-120b", 116.8e9, 5.1e9),
        ] {
            let s = shape(name);
            let near = |found: u64, wanted: f64| (found as f64 / wanted - 1.0).abs() < 0.05;
            assert!(near(s.parameters(), all), "{name}: {}", s.parameters());
            assert!((s.active(s.k) as f64 / active - 1.0).abs() < 0.2, "{name}: {}", s.active(s.k));
        }
    }

    #[test]
    fn models_of_other_families_have_theirs_too() {
        for (name, all, active) in [
            ("mistral-7b", 7.25e9, 7.1e9),
            ("mixtral-8x7b", 46.7e9, 12.9e9),
            ("phi-4", 14.7e9, 14.2e9),
            ("glm-4.5-air", 106e9, 12e9),
            ("minimax-m2", 230e9, 10e9),
            ("deepseek-v3", 671e9, 37e9),
            ("deepseek-v3.2", 671e9, 37e9),
            ("deepseek-v4-flash", 284e9, 13e9),
            ("glm-5", 744e9, 40e9),
            ("qwen3.8-flash-next", 176e9, 6e9),
            ("kimi-k2", 1.03e12, 32e9),
            ("kimi-k3", 2.78e12, 104e9),
            ("glm-4.7-flash", 30e9, 3.6e9),
            ("mistral-small-4", 119e9, 6.5e9),
            ("nemotron-3-nano-30b-a3b", 31.6e9, 3.3e9),
            ("nemotron-3-super-120b-a12b", 120.7e9, 12.2e9),
            ("granite-4.0-h-small", 32.2e9, 9e9),
            ("granite-4.0-h-tiny", 6.94e9, 1.45e9),
            ("gemma-4-31b", 30.7e9, 30.7e9),
            ("gemma-4-26b-a4b", 25.2e9, 3.8e9),
            ("gemma-4-e4b", 7.5e9, 4.6e9),
            ("gemma-4-e2b", 4.6e9, 2.3e9),
        ] {
            let s = shape(name);
            assert!((s.parameters() as f64 / all - 1.0).abs() < 0.02, "{name}: {}", s.parameters());
            assert!((s.active(s.k) as f64 / active - 1.0).abs() < 0.15, "{name}: {}", s.active(s.k));
        }
    }

    /// The rotated key and the vector, whatever the number of heads.
    #[test]
    fn latent_attention_keeps_one_row_for_each_token_and_layer() {
        for (name, layers, row) in [
            ("deepseek-v3", 61, 576),
            ("kimi-k2", 61, 576),
            ("kimi-k3", 24, 576),
            ("glm-4.7-flash", 47, 576),
            ("mistral-small-4", 36, 320),
        ] {
            assert_eq!(shape(name).kv_elements, layers * row, "{name}");
        }
    }

    /// Half of gpt-oss-20b's 24 layers see 128 positions: 8 heads of 64, keys and values.
    #[test]
    fn layers_with_a_window_keep_no_more_than_they_see() {
        let s = shape("gpt-oss-20b");
        let half = 12 * 2 * 8 * 64;
        assert_eq!((s.kv_elements, s.cache_elements(100)), (2 * half, 2 * half * 100));
        assert_eq!(s.cache_elements(131_072), half * (131_072 + 128));
    }

    #[test]
    fn memory_is_split_and_never_more_than_there_is() {
        let s = shape("qwen3.5-397b-a17b");
        let w = Weights::new(&s, Q4, Q2, 10);
        for gigabytes in [1u64, 8, 24, 64, 500] {
            let memory = gigabytes * 1_000_000_000;
            let split = Split::new(&s, &w, memory, 8192, 2);
            if split.missing == 0 {
                assert!(split.resident + split.cache + split.for_experts <= memory);
                assert!(split.for_experts <= w.experts);
            } else {
                assert_eq!((split.for_experts, split.resident + split.cache - memory), (0, split.missing));
            }
        }
        // 15 attention layers, 2 heads of 256, keys and values.
        assert_eq!(s.kv_elements, 15 * 2 * 2 * 256);
    }

    #[test]
    fn hit_rates_rise_from_nothing_to_all() {
        assert_eq!((hit_rate(0.0), hit_rate(32.0 / 512.0), hit_rate(1.0), hit_rate(7.0)), (0.0, 0.59, 1.0, 1.0));
        let rates: Vec<f64> = (0..=100).map(|i| hit_rate(i as f64 / 100.0)).collect();
        assert!(rates.windows(2).all(|r| r[0] < r[1]));
    }

    #[test]
    fn what_bounds_a_token_changes_with_the_disk() {
        let w = Weights::new(&shape("qwen3-30b-a3b"), Q4, Q4, 8);
        let slow = Token::new(&w, 0.0, at(1e9), products(50e9));
        let fast = Token::new(&w, 1.0, at(1e9), products(50e9));
        assert_eq!((slow.bound, fast.bound), (Bound::Disk, Bound::Memory));
        assert!(slow.seconds > 5.0 * fast.seconds && fast.from_disk == 0.0);
        assert!((fast.seconds - fast.memory).abs() < 1e-12);
    }

    #[test]
    fn experts_of_another_width_pass_at_their_own_speed() {
        let w = Weights::new(&shape("qwen3-30b-a3b"), Q4, Q2, 8);
        let memory = |experts| Token::new(&w, 1.0, at(1e9), Products { resident: 50e9, experts }).memory;
        let gained = memory(25e9) - memory(50e9);
        assert!((gained - w.expert_bytes() as f64 / 50e9).abs() < 1e-12, "{gained}");
    }

    #[test]
    fn each_layer_that_reads_waits_once() {
        let w = Weights::new(&shape("qwen3-30b-a3b"), Q4, Q4, 8);
        let wait = |hit_rate: f64| {
            let [none, some] =
                [0.0, 1e-3].map(|latency| Token::new(&w, hit_rate, Disk { latency, ..at(1e9) }, products(50e9)));
            (some.disk - none.disk) * 1e3
        };
        assert!((wait(0.0) - 48.0).abs() < 1e-9);
        // Eight of eight are there in 0.9^8 of the layers.
        assert!((wait(0.9) - 48.0 * (1.0 - 0.9f64.powi(8))).abs() < 1e-9);
        assert_eq!(wait(1.0), 0.0);
    }
}
