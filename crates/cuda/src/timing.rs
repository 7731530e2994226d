//! Where a step's time goes on the device: an event before and after each operation, looked at when the step has ended; and how much there is to read and to multiply.

use anyhow::Result;
use sluice_backend::{Linear, Moe, Phase, Profile};

use crate::backend::Cuda;
use crate::driver::{Event, Gpu};
use crate::mixture::operands;

#[derive(Default)]
pub struct Timing {
    pub profile: Profile,
    /// Two for each operation, kept between steps.
    events: Vec<Event>,
    /// Phase, bytes of weights and multiply-adds of this step's operations.
    operations: Vec<(Phase, u64, u64)>,
}

impl Timing {
    /// An operation begins, or the one that has begun ends.
    pub fn mark(&mut self, gpu: &Gpu, ends: Option<(Phase, u64, u64)>) -> Result<()> {
        let at = 2 * self.operations.len() + usize::from(ends.is_some());
        if self.events.len() == at {
            self.events.push(Event::new(gpu)?);
        }
        self.events[at].record(gpu)?;
        self.operations.extend(ends);
        Ok(())
    }

    /// The step has ended, and the device is through with it.
    pub fn end(&mut self) -> Result<()> {
        for (i, (phase, bytes, macs)) in self.operations.drain(..).enumerate() {
            self.profile.add(phase, self.events[2 * i + 1].since(&self.events[2 * i])?, bytes, macs);
        }
        Ok(())
    }
}

impl Cuda {
    /// Bytes of these matrices, and multiply-adds of each with so many tokens.
    pub(crate) fn work(&self, used: &[&Linear], tokens: usize) -> (u64, u64) {
        used.iter().fold((0, 0), |(bytes, macs), linear| {
            let weight = &self.weights.all[linear.matrix.number()];
            let (rows, cols) = (linear.rows.len(), weight.cols());
            (bytes + (rows * weight.bytes_per_row()) as u64, macs + (rows * cols * tokens) as u64)
        })
    }

    /// The same of a mixture. Of several tokens nobody here knows who chose the same: bytes are those of experts that are all different, as far as there are so many.
    pub(crate) fn work_of_mixture(&self, moe: &Moe, tokens: usize) -> (u64, u64) {
        let shared = moe.shared.iter().flat_map(|s| [&s.mlp.gate, &s.mlp.up, &s.mlp.down].into_iter().chain(&s.gate));
        let dense: Vec<&Linear> = std::iter::once(&moe.router).chain(shared).collect();
        let (mut bytes, mut macs) = (0, 0);
        // Experts need not be alike.
        for operand in (0..moe.experts.count).flat_map(|e| operands(&moe.experts, e)) {
            let weight = &self.weights.all[operand.weight];
            bytes += (operand.rows * weight.bytes_per_row()) as u64;
            macs += (operand.rows * weight.cols()) as u64;
        }
        let (count, pairs) = (moe.experts.count as u64, (tokens * moe.scoring.k()) as u64);
        let (of_dense, macs_of_dense) = self.work(&dense, tokens);
        (of_dense + bytes * pairs.min(count) / count, macs_of_dense + macs * pairs / count)
    }
}
