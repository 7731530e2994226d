//! A device with memory of its own: how that is divided before a matrix is read, just as the host's is.

use sluice_backend::{Backend, Device, DeviceMemory, MemoryClass};

use super::budget::{Division, Limit, LimitOf, Need, Refusal, StreamedNeed};
use super::kv_need::KvNeed;
use super::needs::held_on;
use crate::options::Options;

/// The share of a device's own memory that a model gets.
pub(crate) struct DeviceShare {
    pub memory: DeviceMemory,
    limit: Limit,
    need: Need,
    pub division: Division,
    /// Bytes that experts take.
    pub experts: u64,
}

impl DeviceShare {
    /// Divides a device's memory. `host`: what the model needs of the host. On the device are scratch and blocks of keys and values, and all weights but streamed
    /// experts. `scratch`: tokens of a step and its bytes; `kv`: blocks.
    ///
    /// # Errors
    /// When the device's memory is too small.
    pub fn new(
        memory: DeviceMemory,
        host: &Need,
        (scratch, kv): (Vec<(usize, u64)>, KvNeed),
        options: &Options,
        backend: &mut dyn Backend,
    ) -> Result<DeviceShare, Refusal> {
        let streamed = host.streamed.is_some();
        let need = Need {
            mapped: 0,
            copied: memory.weights - if streamed { memory.experts } else { 0 },
            state: held_on(backend, MemoryClass::State, memory.device) as u64,
            scratch,
            kv,
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

    /// [`Need::positions_within`] the device's memory.
    ///
    /// # Errors
    /// When not even the fewest positions fit.
    pub fn positions(&self) -> Result<usize, Refusal> {
        self.need.positions_within(&self.limit, self.division.scratch, self.experts)
    }

    /// What the engine reports of it.
    pub fn used(&self) -> DeviceUse {
        let DeviceMemory { device, free, .. } = self.memory;
        let budget = self.limit.bytes - self.limit.taken;
        DeviceUse { device, free, budget, scratch: self.division.scratch, shared: false }
    }
}

/// How a budget for experts, of which the least is `least`, is divided between the host's slots and a device that computes in the host's memory.
pub(crate) fn shared_experts(own: &DeviceMemory, budget: u64, least: u64) -> (u64, Option<u64>) {
    if own.experts_in_place {
        return (budget.saturating_sub(own.least_experts), None);
    }
    // Experts that kernels cannot take as files have them stay on the device. They only pass through slots.
    let slots = least.saturating_sub(own.least_experts);
    (slots, Some(budget.saturating_sub(slots)))
}

/// What the engine reports of a device that computes in the host's memory, within these limits.
pub(crate) fn shared_use(own: DeviceMemory, limits: &[Limit], scratch: u64) -> DeviceUse {
    let budget = limits.iter().map(|limit| limit.bytes.saturating_sub(limit.taken)).min().unwrap_or(own.free);
    DeviceUse { device: own.device, free: own.free, budget, scratch, shared: true }
}

/// An engine's share of a device's own memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceUse {
    /// The device.
    pub device: Device,
    /// Bytes that were free at first.
    pub free: u64,
    /// Bytes that the engine takes at most.
    pub budget: u64,
    /// Bytes reserved for the scratch memory of steps, without what grows with the context.
    pub scratch: u64,
    /// It computes in the host's memory, and the budget is for both.
    pub shared: bool,
}
