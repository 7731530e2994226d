//! Where a step's time goes on the device: an event before and after each operation, looked at when the step has ended.

use anyhow::Result;
use sluice_backend::{Phase, Profile};

use crate::driver::{Event, Gpu};

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
