//! The tier on disk, which users know as the prompt cache.
//!
//! Evicted and finished blocks go to a thread that writes them ([`outbox`], [`saving`], [`writer`]). A prompt's prefix is looked up by another
//! thread ([`lookup`]) and read while the sequence waits in the queue ([`restorer`]). No step ever waits for the disk: blocks that the writer has no
//! room for are dropped and counted.

mod costs;
pub(crate) mod fingerprint;
pub(crate) mod limits;
pub(crate) mod lookup;
mod lookup_store;
pub(crate) mod options;
mod outbox;
mod prefetch;
pub(crate) mod reading;
pub(crate) mod restorer;
mod saving;
pub(crate) mod sessions;
mod shared;
mod summing;
mod sums_file;
pub(crate) mod tier;
mod writer;
