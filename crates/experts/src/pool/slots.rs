//! Slots: the state of each, in one place, and who may touch its memory.

use std::ops::Range;

/// A class of slots: those of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotClass {
    /// Bytes of a slot.
    pub bytes: usize,
    /// Bytes of an expert's arrays that are in no slot, at most.
    pub kept: usize,
    /// Experts of this size, of all layers.
    pub experts: usize,
    /// Experts of the layer with the most of them.
    pub widest: usize,
}

/// No faster tier: the host computes, and its memory is all there is.
pub fn no_faster(classes: &[SlotClass]) -> Vec<usize> {
    vec![0; classes.len()]
}

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
    /// The memory is `len` bytes, whole pages, that live longer than the guard and all reads that it is given to; there is no other guard of it, and nobody
    /// else writes to it.
    pub unsafe fn new(slot: u32, memory: *mut u8, len: usize) -> SlotGuard {
        SlotGuard { slot, memory, len }
    }

    /// Bytes of the slot.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its first byte, for a read that takes the guard.
    pub fn start(&self) -> *mut u8 {
        self.memory
    }

    /// # Panics
    /// When the range is reversed or reaches beyond the slot.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len, "range outside the slot");
        // SAFETY: inside memory that nobody writes to as long as the guard is here, and not given to a read, which would take it.
        unsafe { std::slice::from_raw_parts(self.memory.add(range.start), range.len()) }
    }

    /// The same, to be written.
    ///
    /// # Panics
    /// As above.
    pub fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len, "range outside the slot");
        // SAFETY: as above; there is no other guard of it.
        unsafe { std::slice::from_raw_parts_mut(self.memory.add(range.start), range.len()) }
    }
}

/// The read of an expert into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub slot: u32,
    /// How many reads the slot had before.
    pub number: u32,
}

/// The present use of a slot's memory.
#[derive(Debug)]
pub(super) enum SlotState {
    /// It is a slot of the faster tier, whose memory is somebody else's.
    Elsewhere,
    /// Nobody writes to it.
    Ready(SlotGuard),
    /// A read fills it, and has its guard.
    Reading(Ticket),
    /// A promotion copies from it, and perhaps copies a demoted expert to it.
    Moving(SlotGuard),
}

/// A slot, and who needs it to stay as it is. As long as anybody does, residency has it pinned and puts no other expert there.
#[derive(Debug)]
pub(super) struct Slot {
    pub state: SlotState,
    /// Items of fetches that are there or coming, and pins.
    pub users: u32,
    /// Look-ahead keeps it until its layer is visited.
    pub read_ahead: bool,
}

impl Slot {
    /// A slot that nobody needs.
    pub fn new(state: SlotState) -> Slot {
        Slot { state, users: 0, read_ahead: false }
    }

    /// Whether anybody needs it to stay as it is.
    pub fn is_needed(&self) -> bool {
        matches!(self.state, SlotState::Reading(_) | SlotState::Moving(_)) || self.users > 0 || self.read_ahead
    }

    /// The read that fills it, if one does.
    pub fn ticket(&self) -> Option<Ticket> {
        match self.state {
            SlotState::Reading(ticket) => Some(ticket),
            _ => None,
        }
    }

    /// Takes the guard for a read, whose ticket is to be put in its place.
    ///
    /// # Panics
    /// When somebody writes to the slot, or its memory is somebody else's.
    pub fn take_guard(&mut self) -> SlotGuard {
        match std::mem::replace(&mut self.state, SlotState::Elsewhere) {
            SlotState::Ready(guard) => guard,
            other => panic!("a slot is read to that is {other:?}"),
        }
    }

    /// Its memory, which holds an expert.
    ///
    /// # Panics
    /// While it is being read to, and in the faster tier.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        match &self.state {
            SlotState::Ready(guard) | SlotState::Moving(guard) => guard.bytes(range),
            other => panic!("a slot is used that is {other:?}"),
        }
    }

    /// A promotion begins to copy from it.
    ///
    /// # Panics
    /// When it is not ready.
    pub fn begin_move(&mut self) {
        self.state = SlotState::Moving(self.take_guard());
    }

    /// The promotion's copies are done.
    ///
    /// # Panics
    /// When none was under way.
    pub fn end_move(&mut self) {
        self.state = match std::mem::replace(&mut self.state, SlotState::Elsewhere) {
            SlotState::Moving(guard) => SlotState::Ready(guard),
            other => panic!("a move ends of a slot that is {other:?}"),
        };
    }
}
