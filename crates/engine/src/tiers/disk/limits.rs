//! Bytes of memory that the disk tier uses at most.

use sluice_cache::disk::READING;
use sluice_cache::remote::FETCHING;

/// Bytes that wait to be written, at most.
pub(crate) const MAX_QUEUED: u64 = 16 << 20;
/// Bytes of the index, and of the slot that is being written.
const INDEX: u64 = 4 << 20;

/// Bytes of memory that the disk tier takes at most, for a model with recurrent states of `state` bytes. A state can exceed everything else:
/// one that is copied out exists as numbers and as bytes while another is written, and one that was read waits to be taken.
/// With a store that replicas share, objects on their way to and from it, too.
pub(crate) fn max_memory(state: u64, has_store: bool) -> u64 {
    let store = if has_store { FETCHING + MAX_QUEUED + 4 * state } else { 0 };
    MAX_QUEUED + READING as u64 + INDEX + 5 * state + store
}
