//! A device that computes in memory of its own: how that is divided, as the host's is, before a matrix is read.

use sluice_backend::{Backend, Device, DeviceMemory, MemoryClass};

use super::open::held_on;
use crate::budget::{Division, Limit, LimitOf, Need, Refusal, StreamedNeed};
use crate::options::Options;

/// The share of a device's own memory that a model gets.
pub struct DeviceShare {
    pub memory: DeviceMemory,
    limit: Limit,
    need: Need,
    pub division: Division,
    /// Bytes that experts have come to take.
    pub experts: u64,
}

impl DeviceShare {
    /// What the model `host` needs memory of the host for, with steps' scratch and blocks of keys and values on the device, and all weights but streamed experts.
    pub fn new(
        memory: DeviceMemory,
        host: &Need,
        (scratch, block): (Vec<(usize, u64)>, u64),
        options: &Options,
        backend: &mut dyn Backend,
    ) -> Result<DeviceShare, Refusal> {
        let streamed = host.streamed.is_some();
        let need = Need {
            mapped: 0,
            copied: memory.weights - if streamed { memory.experts } else { 0 },
            state: held_on(backend, MemoryClass::State, memory.device) as u64,
            scratch,
            block,
            streamed: streamed.then_some(StreamedNeed { least: memory.least_experts, asked: 0 }),
            ..host.clone()
        };
        let limit = match options.device_memory {
            Some(bytes) => Limit { of: LimitOf::DeviceBudget, bytes: bytes.min(memory.free), taken: 0 },
            None => Limit { of: LimitOf::Device, bytes: memory.free, taken: memory.reserve },
        };
        let division = need.divide(&[limit])?;
        Ok(DeviceShare { memory, limit, need, division, experts: 0 })
    }

    /// As [`Need::positions_within`].
    pub fn positions(&self) -> Result<usize, Refusal> {
        self.need.positions_within(&self.limit, self.division.scratch, self.experts)
    }

    pub fn used(&self) -> DeviceUse {
        let DeviceMemory { device, free, .. } = self.memory;
        DeviceUse { device, free, budget: self.limit.bytes - self.limit.taken, scratch: self.division.scratch }
    }
}

/// What of a device's own memory an engine may take.
#[derive(Clone, Copy, Debug)]
pub struct DeviceUse {
    pub device: Device,
    /// Bytes that were free there at first, and what the engine takes of them at most.
    pub free: u64,
    pub budget: u64,
    /// Bytes of it that are set aside for the scratch of steps, but for what grows with the context.
    pub scratch: u64,
}
