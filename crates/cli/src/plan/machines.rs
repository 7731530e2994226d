//! A model over several machines: which layers each gets, what that takes of its memory and disk, and what the hops between them cost.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sluice_model::{Description, LayerRange};

use super::estimate::{Disk, Precision, Products, Split, Token, Weights, hit_rate};
use super::shape::Shape;
use crate::units;

/// Bytes per second and seconds of a hop where nobody says: an ordinary local network.
pub const NETWORK: f64 = 0.125e9;
pub const HOP: f64 = 300e-6;

/// A machine and its layers.
struct Machine {
    layers: LayerRange,
    weights: Weights,
    split: Split,
    token: Token,
}

/// All machines, which are alike.
pub struct Machines {
    all: Vec<Machine>,
    /// Seconds that a token's hidden row takes from one machine to the next.
    hop: f64,
}

/// What plans of one machine use, too.
pub struct Machinery {
    pub precision: (Precision, Precision),
    pub k: usize,
    pub memory: u64,
    pub context: u64,
    pub disk: Disk,
    pub products: Products,
    /// Bytes per second between two machines.
    pub network: f64,
}

impl Machines {
    /// Divides the layers so that the machine with the most bytes has as few as can be.
    ///
    /// # Errors
    /// A model that cannot be divided; more machines than layers.
    pub fn new(d: &Description, count: usize, m: &Machinery) -> Result<Machines> {
        let layers = d.layers.len();
        ensure!((1..=layers).contains(&count), "--machines {count}: the model has {layers} layers");
        let of = |from: usize, to: usize| -> Result<(Shape, Weights)> {
            let part = d.clone().cut(LayerRange { from, to }).context("--machines")?;
            let shape = Shape::of(&part);
            let mut weights = Weights::new(&shape, m.precision.0, m.precision.1, m.k.min(shape.k));
            if !part.ends() {
                // There is no head, which without one of its own would be the embedding.
                let without = Shape { embedding: 0, ..shape.clone() };
                weights.resident_read =
                    Weights::new(&without, m.precision.0, m.precision.1, m.k.min(shape.k)).resident_read;
            }
            Ok((shape, weights))
        };
        let bytes = |from, to| of(from, to).map(|(_, w)| w.resident + w.experts);
        let costs = (0..layers).map(|at| bytes(at, at + 1)).collect::<Result<Vec<u64>>>()?;
        let ends = divide(&costs, count);
        let mut all = Vec::with_capacity(count);
        let mut from = 0;
        for to in ends {
            let (shape, weights) = of(from, to)?;
            let split = Split::new(&shape, &weights, m.memory, m.context, 2);
            let part = if weights.experts > 0 { split.for_experts as f64 / weights.experts as f64 } else { 1.0 };
            let token = Token::new(&weights, hit_rate(part), m.disk, m.products);
            all.push(Machine { layers: LayerRange { from, to }, weights, split, token });
            from = to;
        }
        Ok(Machines { all, hop: HOP + 4.0 * d.hidden as f64 / m.network })
    }

    /// Seconds of a token of one conversation: every machine after the other.
    fn alone(&self) -> f64 {
        self.all.iter().map(|m| m.token.seconds).sum::<f64>() + self.hop * (self.all.len() - 1) as f64
    }

    /// Seconds between tokens where all machines are busy with microbatches of one sequence each: those of the slowest.
    fn busy(&self) -> f64 {
        self.all.iter().map(|m| m.token.seconds).fold(self.hop, f64::max)
    }

    pub fn to_json(&self) -> Value {
        let machine = |m: &Machine| {
            json!({
                "first": m.layers.from, "end": m.layers.to, "resident": m.weights.resident, "experts": m.weights.experts,
                "cache": m.split.cache, "memory_for_experts": m.split.for_experts, "missing": m.split.missing,
                "bytes_from_disk": m.token.from_disk, "seconds": m.token.seconds,
            })
        };
        json!({
            "machines": self.all.iter().map(machine).collect::<Vec<_>>(), "hop_seconds": self.hop,
            "tokens_per_second_alone": 1.0 / self.alone(), "tokens_per_second_busy": 1.0 / self.busy(),
        })
    }

    pub fn text(&self) -> String {
        let mut text = format!(
            "\n{:<10}{:<10}{:>10}{:>10}{:>10}{:>10}\n",
            "machine", "layers", "resident", "experts", "cache", "ms/token"
        );
        for (number, m) in self.all.iter().enumerate() {
            let layers = format!("{}..{}", m.layers.from, m.layers.to);
            let [resident, experts, cache] = [m.weights.resident, m.weights.experts, m.split.cache].map(units::bytes);
            let ms = 1e3 * m.token.seconds;
            text += &format!("{number:<10}{layers:<10}{resident:>10}{experts:>10}{cache:>10}{ms:>10.1}");
            if m.split.missing > 0 {
                text += &format!("  TOO LITTLE: {} are missing", units::bytes(m.split.missing));
            }
            text += "\n";
        }
        text += &format!(
            "one conversation: {:.2} tokens/s, of which hops take {:.1} ms; as many as machines: {:.2} together\n",
            1.0 / self.alone(),
            1e3 * self.hop * (self.all.len() - 1) as f64,
            1.0 / self.busy(),
        );
        text
    }
}

/// The ends of `count` ranges of these costs, whose largest sum is the least there is. No range is empty.
fn divide(costs: &[u64], count: usize) -> Vec<usize> {
    // Greedy: how far each range gets with a limit, leaving one for each range behind.
    let ends_within = |limit: u64| -> Option<Vec<usize>> {
        let (mut ends, mut at) = (Vec::new(), 0);
        for left in (0..count).rev() {
            let (mut sum, first) = (0u64, at);
            while at < costs.len() - left && (at == first || sum + costs[at] <= limit) {
                sum += costs[at];
                at += 1;
            }
            (sum <= limit).then_some(())?;
            ends.push(at);
        }
        (at == costs.len()).then_some(ends)
    };
    let (mut low, mut high) = (0, costs.iter().sum::<u64>());
    while low < high {
        let middle = low + (high - low) / 2;
        if ends_within(middle).is_some() { high = middle } else { low = middle + 1 }
    }
    ends_within(high).expect("all of it fits the sum")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heaviest_range_is_as_light_as_can_be_and_none_is_empty() {
        assert_eq!(divide(&[1, 1, 1, 1], 2), [2, 4]);
        assert_eq!(divide(&[9, 1, 1, 1], 2), [1, 4]);
        assert_eq!(divide(&[1, 1, 1, 9], 3).len(), 3);
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..200 {
            let costs: Vec<u64> = (0..random.usize(1..9)).map(|_| random.u64(0..20)).collect();
            let count = random.usize(1..=costs.len());
            let ends = divide(&costs, count);
            assert_eq!((ends.len(), ends.last()), (count, Some(&costs.len())));
            assert!(ends[0] > 0 && ends.is_sorted_by(|a, b| a < b), "{costs:?} {ends:?}");
        }
    }
}
