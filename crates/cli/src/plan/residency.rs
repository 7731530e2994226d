//! Simulates how many experts of a recorded text would be in a plan's memory. Uses the store's own bookkeeping, as `eval routing` does.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sluice_experts::simulate::{self, MAX_PROMOTIONS, Served};
use sluice_experts::{MAX_RECORDING, Policy, Recording};
use sluice_store::read_small;

use super::estimate::{Split, Weights};
use super::shape::Shape;
use crate::units;

/// The result of a simulation.
pub struct Residency {
    /// Name and slots, the fastest first.
    tiers: Vec<(&'static str, usize)>,
    /// The whole recording, beginning with empty slots.
    whole: Served,
    /// Its second half: the steady state.
    settled: Served,
    /// Tokens of the whole, and of the second half.
    tokens: usize,
    settled_tokens: usize,
    per_expert: u64,
}

impl Residency {
    /// Replays `recording` with `gpu` bytes of a GPU's memory, if any, and the memory that `split` leaves for experts. `None` if that does not hold the experts of one
    /// token and layer.
    pub fn simulate(recording: &Recording, weights: &Weights, split: &Split, gpu: Option<u64>) -> Option<Residency> {
        let slots = |bytes: u64| (bytes / weights.per_expert.max(1)).min(weights.expert_count) as usize;
        let memory = slots(split.for_experts);
        let fast = gpu.map(slots).filter(|n| *n > 0);
        let tiers: Vec<_> = fast.map(|n| ("GPU", n)).into_iter().chain([("memory", memory)]).collect();
        if memory < recording.k {
            return None;
        }
        let sizes: Vec<usize> = tiers.iter().map(|t| t.1).collect();
        let tokens = recording.tokens();
        let serve =
            |tokens| simulate::serve(&recording.trace_of(tokens), &sizes, MAX_PROMOTIONS, Policy::default(), &[]);
        let whole = serve(tokens);
        let settled = whole.since(&serve(tokens / 2));
        let settled_tokens = tokens - tokens / 2;
        Some(Residency { tiers, whole, settled, tokens, settled_tokens, per_expert: weights.per_expert })
    }

    /// Share of expert uses that need no read.
    pub fn hit_rate(&self) -> f64 {
        1.0 - self.settled.misses as f64 / self.settled.uses() as f64
    }

    /// Share of expert uses that a GPU's memory serves, if there is a GPU.
    pub fn served_by_gpu(&self) -> Option<f64> {
        (self.tiers.len() > 1).then(|| self.settled.shares()[0])
    }

    fn bytes_per_token(&self) -> f64 {
        self.settled.misses as f64 / self.settled_tokens as f64 * self.per_expert as f64
    }

    /// `memory (126 experts) 47.0 %, disk 53.0 %: 1.9 MB read a token`
    pub fn text(&self) -> String {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let shares = self.settled.shares();
        let mut parts: Vec<String> = self
            .tiers
            .iter()
            .zip(&shares)
            .map(|((name, slots), share)| format!("{name} ({slots} experts) {}", percent(*share)))
            .collect();
        parts.push(format!("disk {}", percent(shares[self.tiers.len()])));
        let mut text = format!("{}: {} read a token", parts.join(", "), units::bytes(self.bytes_per_token() as u64));
        if self.tiers.len() > 1 {
            text += &format!(", {:.1} experts copied up", self.settled.promotions as f64 / self.settled_tokens as f64);
        }
        text
    }

    /// Where the figures come from.
    pub fn whence(&self) -> String {
        format!("policy {}, second half of {} recorded tokens", Policy::default().name(), self.tokens)
    }

    pub fn to_json(&self) -> Value {
        let of = |served: &Served, tokens: usize| {
            let shares = served.shares();
            let tiers: Vec<_> = self
                .tiers
                .iter()
                .zip(&shares)
                .map(|((name, slots), share)| json!({"tier": name, "slots": slots, "served": share}))
                .collect();
            let per_token = |n: u64| n as f64 / tokens as f64;
            json!({
                "tokens": tokens, "tiers": tiers, "disk": shares[self.tiers.len()], "misses_per_token": per_token(served.misses),
                "bytes_from_disk_per_token": per_token(served.misses) * self.per_expert as f64, "rises_per_token": per_token(served.promotions),
            })
        };
        let policy = Policy::default().name();
        json!({"policy": policy, "settled": of(&self.settled, self.settled_tokens), "from_empty": of(&self.whole, self.tokens)})
    }
}

/// Reads a file of `eval routing --trace-out`, which must be of a model of this shape with `k` experts per token.
///
/// # Errors
/// No such file or another kind of file, a recording of another model, or a model without experts.
pub fn read(path: &Path, shape: &Shape, k: usize) -> Result<Recording> {
    ensure!(shape.expert_layers > 0, "--trace {}: this model has no experts", path.display());
    let name = || format!("--trace {}", path.display());
    let recording = read_small(path, MAX_RECORDING)
        .map_err(Into::into)
        .and_then(|bytes| Recording::parse(&bytes).map_err(anyhow::Error::from));
    let recording = recording.with_context(name)?;
    let found = (recording.layers.len(), recording.k, recording.experts);
    ensure!(
        found == (shape.expert_layers, k, shape.experts),
        "{}: recorded of {} layers with {} of {} experts per token, but this model has {} layers with {k} of {}: record it with this model",
        name(),
        found.0,
        found.1,
        found.2,
        shape.expert_layers,
        shape.experts
    );
    Ok(recording)
}
