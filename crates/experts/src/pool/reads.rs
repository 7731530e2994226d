//! Reads of experts in flight. A read has a ticket and owns the guard of the slot that it fills: as long as the kernel may write to a slot no other code has
//! its guard, so the slot can neither be computed with, lent again nor taken for complete. When the read is over, ticket, guard and result come back together,
//! so that an error belongs to the expert that was asked for.

use sluice_store::Error;
use sluice_store::load::ALIGNMENT;
use sluice_store::requests::{Completion, ReadQueue, ReadRequest};

use super::slots::{SlotGuard, Ticket};
use crate::layout::Extent;

/// The read of a slot, one after the other.
#[derive(Debug, Default)]
struct SlotRead {
    /// Reads so far.
    number: u32,
    /// Requests in flight.
    pending: u32,
    guard: Option<SlotGuard>,
    /// Why one of the requests that are complete failed.
    error: Option<Error>,
}

/// Reads of all slots.
pub(super) struct Reads {
    queue: Box<dyn ReadQueue>,
    /// Bytes that a request asks for at most.
    request: usize,
    /// By slot.
    slots: Vec<SlotRead>,
    /// Kept, so that nothing is allocated.
    complete: Vec<Completion>,
}

impl Reads {
    /// Into `slots` slots, by requests of at most `request` bytes (whole pages).
    pub fn new(queue: Box<dyn ReadQueue>, request: usize, slots: usize) -> Reads {
        let slots = (0..slots).map(|_| SlotRead::default()).collect();
        Reads { queue, request, slots, complete: Vec::with_capacity(1024) }
    }

    /// Queues the read of an expert; [`Reads::submit`] begins with it. Adds bytes and requests to `counts`.
    ///
    /// # Errors
    /// Of an expert without bytes the guard comes back at once.
    ///
    /// # Panics
    /// When the slot is smaller than its extents.
    pub fn begin(
        &mut self,
        extents: &[Extent],
        guard: SlotGuard,
        counts: (&mut u64, &mut u64),
    ) -> Result<Ticket, SlotGuard> {
        let (slot, memory) = (guard.slot, guard.start());
        let mut pending = 0u32;
        for extent in extents {
            assert!(extent.at + extent.len.next_multiple_of(ALIGNMENT) <= guard.len(), "a slot is too small");
            let mut done = 0;
            while done < extent.len {
                let len = (extent.len - done).min(self.request);
                // SAFETY: inside the guard's memory, which stays here until the last request is complete.
                unsafe {
                    let memory = memory.add(extent.at + done);
                    let offset = extent.offset + done as u64;
                    self.queue.push(ReadRequest { file: extent.file, offset, len, memory, tag: slot });
                }
                *counts.0 += len as u64;
                *counts.1 += 1;
                pending += 1;
                done += len;
            }
        }
        if pending == 0 {
            return Err(guard);
        }
        let read = &mut self.slots[slot as usize];
        read.number = read.number.wrapping_add(1);
        (read.pending, read.guard) = (pending, Some(guard));
        Ok(Ticket { slot, number: read.number })
    }

    /// Begins with what is queued.
    pub fn submit(&mut self) {
        self.queue.submit();
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// Hands back reads that are over, each with its guard; with `wait` waits until a request is complete.
    pub fn reap(&mut self, wait: bool, mut each: impl FnMut(Ticket, SlotGuard, Result<(), Error>)) {
        let mut complete = std::mem::take(&mut self.complete);
        self.queue.reap(wait, &mut |done| complete.push(done));
        for done in complete.drain(..) {
            let read = &mut self.slots[done.tag as usize];
            read.pending -= 1;
            if let Some(error) = done.error {
                read.error.get_or_insert(error);
            }
            if read.pending == 0 {
                let guard = read.guard.take().expect("lent until now");
                let ticket = Ticket { slot: guard.slot, number: read.number };
                each(ticket, guard, read.error.take().map_or(Ok(()), Err));
            }
        }
        self.complete = complete;
    }

    /// What reading fell back on.
    pub fn notes(&self) -> &[String] {
        self.queue.notes()
    }

    /// Whether reads go through io_uring.
    pub fn is_ring(&self) -> bool {
        self.queue.is_ring()
    }

    /// Bytes of the table of reads.
    pub fn bytes(slots: usize) -> usize {
        slots * size_of::<SlotRead>()
    }
}
