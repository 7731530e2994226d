//! Reads of experts in flight. A read has a ticket and owns the loan of the slot that it fills: as long as the kernel may write to a slot no other code has
//! its loan, so that it cannot be computed with, lent again or taken for complete. When the read is over, ticket, loan and result are handed back together,
//! so that an error belongs to the expert that was asked for.

use super::layout::Extent;
use super::requests::{ExpertRead, Requests};
use crate::error::Error;

/// A slot's memory: the owner of this value alone may write to it or lend it to a read.
#[derive(Debug)]
pub(super) struct SlotGuard {
    pub slot: u32,
    memory: *mut u8,
    len: usize,
}

// SAFETY: it stands for memory that belongs to whoever has it.
unsafe impl Send for SlotGuard {}

impl SlotGuard {
    /// # Safety
    /// The memory is `len` bytes, whole pages, that live longer than the loan and all reads that it is given to; there is no other loan of it, and nobody
    /// else writes to it.
    pub unsafe fn new(slot: u32, memory: *mut u8, len: usize) -> SlotGuard {
        SlotGuard { slot, memory, len }
    }

    /// # Panics
    /// When the range is reversed or reaches beyond the slot.
    pub fn bytes(&self, range: std::ops::Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len, "range outside the slot");
        // SAFETY: inside memory that nobody writes to as long as the loan is here, and not given to a read, which would take it.
        unsafe { std::slice::from_raw_parts(self.memory.add(range.start), range.len()) }
    }

    /// The same, to be written.
    ///
    /// # Panics
    /// As above.
    pub fn bytes_mut(&mut self, range: std::ops::Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len, "range outside the slot");
        // SAFETY: as above; there is no other loan of it.
        unsafe { std::slice::from_raw_parts_mut(self.memory.add(range.start), range.len()) }
    }
}

/// The read of an expert into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub slot: u32,
    /// How many reads the slot had before.
    number: u32,
}

/// A read that was begun, by slot.
#[derive(Debug, Default)]
struct Begun {
    number: u32,
    /// Requests in flight.
    pending: u32,
    loan: Option<SlotGuard>,
    /// Why one of those that are over failed.
    error: Option<Error>,
}

pub(super) struct Reads {
    requests: Requests,
    /// Bytes that a request asks for at most.
    request: usize,
    begun: Vec<Begun>,
    /// Kept, so that nothing is allocated.
    over: Vec<super::requests::Done>,
}

impl Reads {
    /// Into `slots` slots, by requests of at most `request` bytes (whole pages).
    pub fn new(requests: Requests, request: usize, slots: usize) -> Reads {
        let begun = (0..slots).map(|_| Begun::default()).collect();
        Reads { requests, request, begun, over: Vec::with_capacity(1024) }
    }

    /// Queues the read of an expert; [`Reads::submit`] begins with it. Bytes and requests are added to `counted`. An expert may be empty: its loan comes
    /// back at once.
    ///
    /// # Panics
    /// When the slot is smaller than its extents.
    pub fn begin(
        &mut self,
        extents: &[Extent],
        loan: SlotGuard,
        counted: (&mut u64, &mut u64),
    ) -> Result<Ticket, SlotGuard> {
        let (slot, memory) = (loan.slot, loan.memory);
        let mut pending = 0u32;
        for extent in extents {
            assert!(extent.at + extent.len.next_multiple_of(crate::load::ALIGNMENT) <= loan.len, "a slot is too small");
            let mut done = 0;
            while done < extent.len {
                let len = (extent.len - done).min(self.request);
                // SAFETY: inside the loan's memory, which stays here until the last request is over.
                unsafe {
                    let memory = memory.add(extent.at + done);
                    let offset = extent.offset + done as u64;
                    self.requests.push(ExpertRead { file: extent.file, offset, len, memory, tag: slot });
                }
                *counted.0 += len as u64;
                *counted.1 += 1;
                pending += 1;
                done += len;
            }
        }
        if pending == 0 {
            return Err(loan);
        }
        let begun = &mut self.begun[slot as usize];
        begun.number = begun.number.wrapping_add(1);
        (begun.pending, begun.loan) = (pending, Some(loan));
        Ok(Ticket { slot, number: begun.number })
    }

    /// Begins with what is queued.
    pub fn submit(&mut self) {
        self.requests.submit();
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.requests.in_flight()
    }

    /// Hands back reads that are over, each with its loan; with `wait` waits until a request is over.
    pub fn reap(&mut self, wait: bool, mut each: impl FnMut(Ticket, SlotGuard, Result<(), Error>)) {
        let mut over = std::mem::take(&mut self.over);
        self.requests.reap(wait, |done| over.push(done));
        for done in over.drain(..) {
            let begun = &mut self.begun[done.tag as usize];
            begun.pending -= 1;
            if let Some(error) = done.error {
                begun.error.get_or_insert(error);
            }
            if begun.pending == 0 {
                let loan = begun.loan.take().expect("lent until now");
                let ticket = Ticket { slot: loan.slot, number: begun.number };
                each(ticket, loan, begun.error.take().map_or(Ok(()), Err));
            }
        }
        self.over = over;
    }

    /// What was fallen back on.
    pub fn notes(&self) -> &[String] {
        self.requests.notes()
    }

    pub fn is_ring(&self) -> bool {
        self.requests.is_ring()
    }

    /// Bytes of the table of reads.
    pub fn bytes(slots: usize) -> usize {
        slots * size_of::<Begun>()
    }
}
