//! How much memory the parts of an engine need, in bytes.

use anyhow::Result;
use sluice_backend::{
    Backend, Capacity, Device, DeviceMemory, ExpertOptions, KvLayout, Lookahead, MemoryClass, SequenceInput,
    StepInputs, StepScratch, Wanted,
};
use sluice_experts::Error;
use sluice_model::Decoder;
use sluice_store::{Bytes, Loading};

use super::budget::{self, StreamedNeed};
use super::limits::hard_limits;
use crate::options::Options;

/// Snapshots may take one part in this many of a memory limit, or of what is free.
const SNAPSHOT_PART: u64 = 16;

/// How many snapshots of recurrent states are kept, of `len` f32 each: as many as the options ask for, if they take no more than a part of the memory.
/// `device`: bytes that are free on a device that holds them.
pub(crate) fn snapshots(options: &Options, device: Option<u64>, len: usize) -> usize {
    let memory = match device {
        Some(free) => options.device_memory.map_or(free, |asked| asked.min(free)),
        None => hard_limits(options).iter().map(|l| l.bytes).chain(options.load.copy_budget).min().unwrap_or(u64::MAX),
    };
    options.snapshots.min((memory / SNAPSHOT_PART / (4 * len as u64)) as usize)
}

/// Recurrent states of the host, and those of a device that shares its memory.
pub(crate) fn states_in_memory(backend: &mut dyn Backend, shared: Option<DeviceMemory>) -> u64 {
    let on_device = shared.map_or(0, |shared| held_on(backend, MemoryClass::State, shared.device));
    (held(backend, MemoryClass::State) + on_device) as u64
}

/// Memory of a class that a backend holds on the host.
pub(crate) fn held(backend: &mut dyn Backend, class: MemoryClass) -> usize {
    held_on(backend, class, Device::Host)
}

/// Memory of a class that a backend holds on a device.
pub(crate) fn held_on(backend: &mut dyn Backend, class: MemoryClass, device: Device) -> usize {
    backend.memory().iter().filter(|m| m.class == class && m.device == device).map(|m| m.bytes).sum()
}

/// Memory of weights, mapped and copied: what the backend holds, and of `all` matrices that count there those that are `wanted`.
pub(crate) fn weights_in_memory<'a>(
    backend: &mut dyn Backend,
    all: impl Iterator<Item = &'a Bytes>,
    wanted: impl Iterator<Item = &'a Bytes>,
    loading: Option<&Loading>,
) -> [u64; 2] {
    let mut bytes = [MemoryClass::WeightsMapped, MemoryClass::WeightsCopied].map(|class| held(backend, class) as u64);
    let Some(loading) = loading else { return bytes };
    for view in all {
        let class = &mut bytes[usize::from(!view.is_mapped())];
        *class = class.saturating_sub(view.len() as u64);
    }
    let [mapped, copied] = loading.bytes_in_memory(wanted);
    [bytes[0] + mapped, bytes[1] + copied]
}

/// The same of a load for a device: what the host holds of it, and where the device shares the host's memory what is copied there. `streamed`: experts are read
/// from disk.
pub(crate) fn device_weights<'a>(
    backend: &mut dyn Backend,
    own: &DeviceMemory,
    wanted: impl Iterator<Item = &'a Bytes>,
    (loading, streamed): (&Loading, bool),
) -> [u64; 2] {
    // 1. What stays where the host has it, in whole chunks
    let [mapped, read] = loading.bytes_in_memory(&backend.read_in_place(streamed));
    // 2. What was made at load
    let all = backend.read_in_place(false);
    let read_alone: usize = all.iter().filter(|bytes| bytes.is_of_file() && !bytes.is_mapped()).map(Bytes::len).sum();
    let made = held(backend, MemoryClass::WeightsCopied) as u64 - read_alone as u64;
    // 3. What is copied passes through a few buffers
    let others = loading.bytes_in_memory(wanted).iter().sum::<u64>() > mapped + read;
    let passing = if others { loading.bytes_to_deliver() } else { 0 };
    let there = if own.shared { own.weights - if streamed { own.experts } else { 0 } } else { 0 };
    [mapped, read + made + passing + there]
}

/// Scratch memory of a step of `chunk` tokens beside its tensors, for any sequences.
pub(crate) fn step_scratch(
    backend: &dyn Backend,
    decoder: &Decoder,
    layouts: &[KvLayout],
    chunk: usize,
    options: &Options,
    streamed: bool,
) -> StepScratch {
    // All sequences take part. The first has all remaining tokens.
    let sequences = options.max_sequences.min(chunk);
    let mut need = scratch_of(backend, decoder, layouts, chunk + 1 - sequences, sequences, Wanted::Last, streamed);
    // Or none has a prompt, and the first has all drafts.
    let drafts = options.drafts.rows(options.max_sequences).min(chunk - sequences);
    if drafts > 0 {
        let drafting = scratch_of(backend, decoder, layouts, 1 + drafts, sequences, Wanted::All, streamed);
        need.fixed = need.fixed.max(drafting.fixed);
        need.per_128_positions = need.per_128_positions.max(drafting.per_128_positions);
    }
    need
}

/// Scratch memory of a step where the first of `sequences` sequences has `first` tokens, and the others one each.
fn scratch_of(
    backend: &dyn Backend,
    decoder: &Decoder,
    layouts: &[KvLayout],
    first: usize,
    sequences: usize,
    wanted: Wanted,
    streamed: bool,
) -> StepScratch {
    let capacity = Capacity { tokens: first + sequences - 1, sequences, blocks: 0 };
    let mut inputs = StepInputs::new(&[], capacity);
    for i in 0..sequences {
        let tokens = vec![0; if i == 0 { first } else { 1 }];
        let tables: &[Vec<u32>] = &[];
        inputs.push(&SequenceInput { tokens: &tokens, position: 0, state: 0, tables, wanted });
    }
    let mut need = backend.step_scratch(layouts, &inputs, streamed, &mut |sizing| decoder.step(sizing, &inputs));
    if decoder.has_mtp() {
        let more = backend.step_scratch(layouts, &inputs, streamed, &mut |sizing| decoder.mtp_step(sizing, &inputs));
        need.fixed = need.fixed.max(more.fixed);
        need.per_128_positions = need.per_128_positions.max(more.per_128_positions);
    }
    need
}

/// Memory of experts that stay on disk, also on a device that shares the host's.
///
/// # Errors
/// When the options ask for less than the least.
pub(crate) fn streamed_need(backend: &mut dyn Backend, by_experts: usize, options: &Options) -> Result<StreamedNeed> {
    // A budget of nothing is refused, and the refusal states the least.
    let none = ExpertOptions { budget: 0, ..ExpertOptions::default() };
    let least = match backend.stream_experts(&none, Lookahead::Off) {
        Ok(()) => 0,
        Err(e) => match e.downcast_ref::<Error>() {
            Some(&Error::ExpertBudget { needed, experts, .. }) => {
                if let Some(budget) = options.expert_budget.filter(|asked| *asked < needed) {
                    let refused = anyhow::Error::new(Error::ExpertBudget { budget, needed, experts });
                    return Err(refused.context(budget::expert_budget_refusal(budget, needed)));
                }
                needed
            }
            _ => return Err(e),
        },
    };
    let asked = options.expert_budget.map_or(0, |asked| asked.min(by_experts as u64));
    let on_device = backend.device_memory().filter(|own| own.shared).map_or(0, |own| own.least_experts);
    Ok(StreamedNeed { least: least + on_device, asked })
}
