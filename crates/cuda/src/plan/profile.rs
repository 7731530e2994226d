//! A profile of steps: the device's time of each operation, by an event before and after it, and the bytes and multiply-adds that it takes.

use anyhow::Result;
use sluice_backend::{Linear, Moe, Phase, Profile};

use crate::device::event::TimingEvent;
use crate::device::stream::Gpu;
use crate::moe::experts::operands;
use crate::weights::Weight;

/// Times operations.
#[derive(Default)]
pub struct Profiler {
    pub profile: Profile,
    /// Two for each operation, kept between steps.
    events: Vec<TimingEvent>,
    /// Phase, bytes of weights and multiply-adds of this step's operations.
    operations: Vec<(Phase, u64, u64)>,
}

impl Profiler {
    /// Marks the begin of an operation, or the end of the one that has begun: its phase, bytes and multiply-adds.
    pub fn mark(&mut self, gpu: &Gpu, ends: Option<(Phase, u64, u64)>) -> Result<()> {
        let at = 2 * self.operations.len() + usize::from(ends.is_some());
        if self.events.len() == at {
            self.events.push(TimingEvent::new(&gpu.device)?);
        }
        gpu.record(&self.events[at])?;
        self.operations.extend(ends);
        Ok(())
    }

    /// Reads the times of a step that the device has finished.
    pub fn end(&mut self) -> Result<()> {
        for (i, (phase, bytes, macs)) in self.operations.drain(..).enumerate() {
            self.profile.add(phase, self.events[2 * i + 1].since(&self.events[2 * i])?, bytes, macs);
        }
        Ok(())
    }
}

/// Bytes of these matrices, and multiply-adds with `tokens` tokens.
pub fn work_of_linears(weights: &[Weight], used: &[&Linear], tokens: usize) -> (u64, u64) {
    used.iter().fold((0, 0), |(bytes, macs), linear| {
        let weight = &weights[linear.matrix.number()];
        let (rows, cols) = (linear.rows.len(), weight.cols());
        (bytes + (rows * weight.bytes_per_row()) as u64, macs + (rows * cols * tokens) as u64)
    })
}

/// Bytes and multiply-adds of a mixture with `tokens` tokens. Bytes are an upper bound: they assume that tokens choose different experts while there are enough.
pub fn work_of_mixture(weights: &[Weight], moe: &Moe, tokens: usize) -> (u64, u64) {
    let shared = moe.shared.iter().flat_map(|s| [&s.mlp.gate, &s.mlp.up, &s.mlp.down].into_iter().chain(&s.gate));
    let dense: Vec<&Linear> = std::iter::once(&moe.router).chain(shared).collect();
    let (mut bytes, mut macs) = (0, 0);
    // Experts need not be alike.
    for operand in (0..moe.experts.count).flat_map(|e| operands(&moe.experts, e)) {
        let weight = &weights[operand.weight];
        bytes += (operand.rows * weight.bytes_per_row()) as u64;
        macs += (operand.rows * weight.cols()) as u64;
    }
    let (count, pairs) = (moe.experts.count as u64, (tokens * moe.scoring.k()) as u64);
    let (of_dense, macs_of_dense) = work_of_linears(weights, &dense, tokens);
    (of_dense + bytes * pairs.min(count) / count, macs_of_dense + macs * pairs / count)
}
