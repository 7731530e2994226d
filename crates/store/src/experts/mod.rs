//! Experts of a mixture that stay on disk until tokens want them. An [`ExpertStore`] holds as many as a budget allows in slots of memory that it is lent
//! once, reads those that are missing, all at once, and hands each over when its read is complete, so that some are computed while others are still being read.
//!
//! Three parts know nothing of each other: [`Residency`] says which expert lies in which slot and which has to go (by `worth`, which learns from past
//! routing); `reads` fills slots from disk, by `requests`; `fetch` is what a layer has asked for. The store puts them together.

mod eviction_score;
mod fetch;
mod forecast;
mod layout;
mod lookahead;
mod reads;
mod recording;
mod requests;
mod residency;
#[cfg(test)]
mod schedules;
pub mod simulate;
mod store;
mod tiers;
mod warmup;

use std::sync::Arc;
use std::time::Duration;

pub use eviction_score::Policy;
pub use fetch::{FetchId, Next};
pub use recording::{MAX_RECORDING, Recording};
pub use requests::{ReadFaults, SPIN};
pub use residency::{Promotion, Residency};
pub use store::ExpertStore;
pub use tiers::{Borrowed, Move, SlotClass, no_faster};

/// Where experts that were used remain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// In our own slots: read past the page cache, replaced by a [`Policy`].
    #[default]
    Slots,
    /// In the kernel's page cache: slots are used for as long as tokens go through them.
    PageCache,
}

/// How experts are read and kept.
#[derive(Clone, Debug)]
pub struct ExpertOptions {
    pub keep: Keep,
    /// Bytes of slots.
    pub budget: u64,
    /// Bytes of a device's own memory for experts that it has at hand, those of a layer that pass through included; `None`: what the device has left.
    pub device_budget: Option<u64>,
    pub policy: Policy,
    /// (Layer, expert) that stay in memory once they are there, and are read ahead of need.
    pub pinned: Vec<(usize, usize)>,
    /// Bytes that one request reads at most: whole pages.
    pub request: usize,
    /// Requests in flight at once; `None`: as many as keep a disk busy.
    pub depth: Option<usize>,
    /// Whether reads go through io_uring, where it is to be had.
    pub io_uring: bool,
    /// Threads that read where they do not.
    pub threads: usize,
    /// Experts that look-ahead guesses for a layer of few tokens.
    pub ahead: usize,
    /// What reads meet, in tests.
    pub faults: Option<Arc<dyn ReadFaults>>,
}

impl Default for ExpertOptions {
    fn default() -> ExpertOptions {
        ExpertOptions {
            keep: Keep::Slots,
            budget: u64::MAX,
            device_budget: None,
            policy: Policy::default(),
            pinned: Vec::new(),
            request: 4 << 20,
            depth: None,
            io_uring: true,
            threads: 8,
            ahead: 3,
            faults: None,
        }
    }
}

/// What the store did, since it was opened or last asked.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertStats {
    /// Experts that they asked for.
    pub wanted: u64,
    /// Of these, those that were in memory.
    pub hits: u64,
    /// Of these, those that were in a faster tier: a device's own memory.
    pub fast_hits: u64,
    /// Experts that were copied to the device, their bytes, and of these what was copied before its layer had asked.
    pub uploads: u64,
    pub uploaded_bytes: u64,
    pub uploaded_ahead: u64,
    /// Experts that were computed where they lie in memory, rather than copied.
    pub aside: u64,
    /// Experts that came to stay in the faster tier, and of these those for which another had to be copied back.
    pub rises: u64,
    pub falls: u64,
    /// Of `wanted`, those that look-ahead had begun to read or had read.
    pub read_ahead: u64,
    /// Bytes of the arrays that were asked for.
    pub wanted_bytes: u64,
    /// Bytes that were read, look-ahead's and what pages hold beside the arrays included.
    pub read_bytes: u64,
    /// Requests.
    pub reads: u64,
    /// Experts that look-ahead named, and of these those that were then wanted.
    pub predicted: u64,
    pub predicted_right: u64,
    /// Experts that look-ahead read and that were not wanted.
    pub read_in_vain: u64,
    /// Experts that were read while nobody wanted anything, into memory that was free.
    pub filled: u64,
    /// At least one request was in flight.
    pub reading: Duration,
    /// Nothing was left to do but to wait for a read.
    pub waiting: Duration,
}

impl ExpertStats {
    /// Adds what came later.
    pub fn add(&mut self, later: &ExpertStats) {
        let ExpertStats { wanted, hits, read_ahead, wanted_bytes, read_bytes, reads, .. } = later;
        self.fast_hits += later.fast_hits;
        self.uploads += later.uploads;
        self.uploaded_bytes += later.uploaded_bytes;
        self.uploaded_ahead += later.uploaded_ahead;
        self.aside += later.aside;
        self.rises += later.rises;
        self.falls += later.falls;
        self.wanted += wanted;
        self.hits += hits;
        self.read_ahead += read_ahead;
        self.wanted_bytes += wanted_bytes;
        self.read_bytes += read_bytes;
        self.reads += reads;
        self.predicted += later.predicted;
        self.predicted_right += later.predicted_right;
        self.read_in_vain += later.read_in_vain;
        self.filled += later.filled;
        self.reading += later.reading;
        self.waiting += later.waiting;
    }
}
