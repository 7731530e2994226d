//! Requests of the device to the host in the middle of a step. The device writes which experts a token chose into page-locked memory; the host copies the missing ones, or
//! computes them itself from the router's normed input. If the device has all of them, it writes that and goes on. Otherwise the kernel of gate and up computes the experts
//! that are there and waits for the answer. Everything behind it is enqueued already, so nothing else delays the experts once the host has answered.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, bail};

use crate::device::memory::DeviceBuffer;
use crate::device::pinned::PinnedBuffer;
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::device::wait::OpenRequests;
use crate::moe::experts::MAX_CHOSEN;

/// Set beside an expert: the device has all of them and goes on.
const GOES_ON: u32 = 1 << 31;
/// Words of a slot: the experts, then the answer. A slot has cache lines of its own.
const SLOT_WORDS: usize = 32;
/// The device has not written the expert yet.
const NOT_YET: u32 = u32::MAX;
/// How often a slot is polled before the driver is asked whether the device still runs.
const POLLS: u32 = 1 << 16;

/// Addresses of a layer's slot, for its kernels.
#[derive(Clone, Copy, Default)]
pub struct MailboxSlot {
    pub at: Address,
    /// Bits of the layer's experts that stay on the device ([`ExpertTables::resident_bits`](crate::moe::tables::ExpertTables::resident_bits)).
    pub resident: Address,
    /// u32: the device's copy of the answer.
    pub answer: Address,
    /// `[cols]` f32 on the device and on the host: the normed input, if the host may compute experts; otherwise 0.
    pub normed: Address,
    pub input: Address,
    /// `[experts that the host computes, cols]` f32
    pub outputs: Address,
}

/// The experts that a token of a layer takes.
pub struct ExpertRequest {
    /// Ascending.
    pub experts: Vec<u32>,
    /// The device has all of them and waits for no answer.
    pub goes_on: bool,
}

impl ExpertRequest {
    /// The request, once the device has written all of its words.
    fn read(words: &[AtomicU32]) -> Option<ExpertRequest> {
        if words.iter().any(|word| word.load(Ordering::Acquire) == NOT_YET) {
            return None;
        }
        let words = || words.iter().map(|word| word.load(Ordering::Relaxed));
        let experts = words().map(|word| word & !GOES_ON).collect();
        Some(ExpertRequest { experts, goes_on: words().all(|word| word & GOES_ON != 0) })
    }

    /// Waits for the request; `None` if the device became idle without writing it.
    fn wait(words: &[AtomicU32], mut is_idle: impl FnMut() -> Result<bool>) -> Result<Option<ExpertRequest>> {
        let mut polls = 0u32;
        loop {
            if let Some(request) = ExpertRequest::read(words) {
                return Ok(Some(request));
            }
            spin_loop();
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(POLLS) && is_idle()? {
                // It may have been written between the last poll and the end of the work.
                return Ok(ExpertRequest::read(words));
            }
        }
    }
}

/// The slots of all layers, and which requests are open.
pub struct Mailbox {
    words: PinnedBuffer,
    answer: DeviceBuffer,
    normed: DeviceBuffer,
    /// The normed input of one layer and the outputs of experts that the host computes. One of each is enough, because layers run one after the other.
    input: PinnedBuffer,
    outputs: PinnedBuffer,
    /// Layers whose kernel is enqueued and not answered, in order.
    open: VecDeque<usize>,
    /// Open requests of all devices.
    requests: OpenRequests,
}

impl Mailbox {
    /// `width`: columns of the widest layer of which the host may compute experts; 0 if it computes none.
    pub fn new(gpu: &Gpu, layers: usize, width: usize) -> Result<Mailbox> {
        let (mut words, mut input, mut outputs) =
            (PinnedBuffer::default(), PinnedBuffer::default(), PinnedBuffer::default());
        words.reserve(gpu, layers * SLOT_WORDS * size_of::<u32>())?;
        input.reserve(gpu, width * size_of::<f32>())?;
        outputs.reserve(gpu, MAX_CHOSEN * width * size_of::<f32>())?;
        let answer = DeviceBuffer::zeroed(gpu, size_of::<u32>(), "a mailbox")?;
        let normed = DeviceBuffer::zeroed(gpu, width * size_of::<f32>(), "a mailbox")?;
        Ok(Mailbox { words, answer, normed, input, outputs, open: VecDeque::new(), requests: gpu.requests.clone() })
    }

    /// Opens a layer's request, which its kernels are about to write; `resident`: the address of the layer's bits.
    pub fn open(&mut self, layer: usize, resident: Address) -> MailboxSlot {
        let slot = self.slot(layer);
        slot[..MAX_CHOSEN].iter().for_each(|word| word.store(NOT_YET, Ordering::Relaxed));
        slot[MAX_CHOSEN].store(0, Ordering::Release);
        let at = slot.as_ptr() as Address;
        self.open.push_back(layer);
        self.requests.open();
        let (input, outputs) = (self.input.at(), self.outputs.at());
        let normed = if input == 0 { 0 } else { self.normed.at };
        MailboxSlot { at, resident, answer: self.answer.at, normed, input, outputs }
    }

    /// The normed input of the open request, `[width]`, and room for the outputs of `experts` experts, `[experts, width]`.
    pub fn host_io(&mut self, width: usize, experts: usize) -> (&mut [f32], &mut [f32]) {
        (self.input.floats_mut(width), self.outputs.floats_mut(width * experts))
    }

    /// The layer of the oldest open request.
    pub fn next(&self) -> Option<usize> {
        self.open.front().copied()
    }

    /// Waits for the oldest open request, of `k` experts. If the device goes on, the request is closed.
    ///
    /// # Errors
    /// If the device failed before it.
    pub fn wait(&mut self, gpu: &Gpu, k: usize) -> Result<ExpertRequest> {
        let layer = self.next().expect("an open request");
        let Some(request) = ExpertRequest::wait(&self.slot(layer)[..k], || Ok(gpu.is_idle()?))? else {
            bail!("the device has ended without asking for the experts of layer {layer}");
        };
        if request.goes_on {
            self.close();
        }
        Ok(request)
    }

    /// Closes the oldest request and returns its layer.
    fn close(&mut self) -> Option<usize> {
        let layer = self.open.pop_front()?;
        self.requests.close();
        Some(layer)
    }

    /// Answers the oldest request: the device has all experts but those that the host has computed. `by_host` has a bit for each of these, by its position in the request.
    pub fn answer(&mut self, by_host: u32) {
        if let Some(layer) = self.close() {
            self.slot(layer)[MAX_CHOSEN].store(1 | by_host << 1, Ordering::Release);
        }
    }

    /// Answers all requests, whatever the device has: the results of the step are not used.
    pub fn answer_all(&mut self) {
        while !self.open.is_empty() {
            self.answer(0);
        }
    }

    fn slot(&self, layer: usize) -> &[AtomicU32] {
        &self.words.words()[layer * SLOT_WORDS..][..SLOT_WORDS]
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        self.answer_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_written_between_the_last_poll_and_the_end_is_found() {
        let words = [const { AtomicU32::new(NOT_YET) }; 2];
        let writes_and_ends = || {
            words.iter().zip([3, 5]).for_each(|(word, expert)| word.store(expert | GOES_ON, Ordering::Release));
            Ok(true)
        };
        let request = ExpertRequest::wait(&words, writes_and_ends).unwrap().expect("it was written");
        assert_eq!((request.experts, request.goes_on), (vec![3, 5], true));
    }

    #[test]
    fn a_device_that_ends_without_a_request_is_not_waited_for() {
        let words = [AtomicU32::new(7), AtomicU32::new(NOT_YET)];
        let mut busy = 3;
        let ends = || {
            busy -= 1;
            Ok(busy == 0)
        };
        assert!(ExpertRequest::wait(&words, ends).unwrap().is_none());
    }
}
