//! Bytes of memory that the disk tier uses at most.

use sluice_cache::disk::READING;

/// Bytes that wait to be written, at most.
pub(crate) const MAX_QUEUED: u64 = 16 << 20;
/// Bytes of the index, and of the slot that is being written.
const INDEX: u64 = 4 << 20;

/// Bytes of memory that the disk tier takes at most, for a model with recurrent states of `state` bytes. A state can exceed everything else:
/// one that is copied out exists as numbers and as bytes while another is written, and one that was read waits to be taken.
pub(crate) fn max_memory(state: u64) -> u64 {
    MAX_QUEUED + READING as u64 + INDEX + 5 * state
}
