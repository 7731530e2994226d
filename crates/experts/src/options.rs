//! How experts are read and kept, and what is counted meanwhile.

use std::sync::Arc;
use std::time::Duration;

use sluice_store::requests::ReadFaults;

use crate::policy::Policy;

/// Where experts that were used remain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// In our own slots: read past the page cache, replaced by a [`Policy`].
    #[default]
    Slots,
    /// In the kernel's page cache: an expert has a slot only while tokens go through it.
    PageCache,
}

/// How experts are read and kept.
#[derive(Clone, Debug)]
pub struct ExpertOptions {
    /// Where experts that were used remain.
    pub keep: Keep,
    /// Bytes of slots and of the tables that describe them.
    pub budget: u64,
    /// Bytes of a device's own memory for experts, transient ones included; `None`: what the device has left.
    pub device_budget: Option<u64>,
    /// Which experts are evicted.
    pub policy: Policy,
    /// (Layer, expert) that are read at the start and stay in memory.
    pub pinned: Vec<(usize, usize)>,
    /// Bytes that one request reads at most: whole pages.
    pub request: usize,
    /// Requests in flight at once; `None`: as many as keep a disk busy.
    pub depth: Option<usize>,
    /// Whether reads go through io_uring, where the system has it.
    pub io_uring: bool,
    /// Threads that read where it does not.
    pub threads: usize,
    /// Experts that look-ahead predicts for a layer of few tokens.
    pub ahead: usize,
    /// Faults that a test injects into reads.
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

/// What a pool did, since it was opened or since its counts were taken last.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertStats {
    /// Experts that layers asked for.
    pub wanted: u64,
    /// Of `wanted`: in memory when they were asked for.
    pub hits: u64,
    /// Of `hits`: in a faster tier, a device's own memory.
    pub fast_hits: u64,
    /// Experts that were copied to the device.
    pub uploads: u64,
    /// Bytes of these copies.
    pub uploaded_bytes: u64,
    /// Of `uploads`: copied before their layer had asked.
    pub uploaded_ahead: u64,
    /// Experts that the host computed where they are, instead of copying them to the device.
    pub computed_on_host: u64,
    /// Experts that were promoted to a faster tier.
    pub promotions: u64,
    /// Of `promotions`: those for which another expert was demoted and copied back.
    pub demotions: u64,
    /// Of `wanted`: those that look-ahead had begun to read or had read.
    pub read_ahead: u64,
    /// Bytes of the arrays that were asked for.
    pub wanted_bytes: u64,
    /// Bytes that were read, for look-ahead too, and with what pages hold beside the arrays.
    pub read_bytes: u64,
    /// Requests that were read.
    pub reads: u64,
    /// Experts that look-ahead predicted.
    pub predicted: u64,
    /// Of `predicted`: those that were then asked for.
    pub predicted_right: u64,
    /// Experts that look-ahead read and that were not asked for.
    pub read_unused: u64,
    /// Experts that were read into free memory while nobody asked for any.
    pub warmed_up: u64,
    /// Time with at least one request in flight.
    pub reading: Duration,
    /// Time in which nothing was left to do but to wait for a read.
    pub waiting: Duration,
}

impl ExpertStats {
    /// Adds what came later.
    pub fn add(&mut self, later: &ExpertStats) {
        self.wanted += later.wanted;
        self.hits += later.hits;
        self.fast_hits += later.fast_hits;
        self.uploads += later.uploads;
        self.uploaded_bytes += later.uploaded_bytes;
        self.uploaded_ahead += later.uploaded_ahead;
        self.computed_on_host += later.computed_on_host;
        self.promotions += later.promotions;
        self.demotions += later.demotions;
        self.read_ahead += later.read_ahead;
        self.wanted_bytes += later.wanted_bytes;
        self.read_bytes += later.read_bytes;
        self.reads += later.reads;
        self.predicted += later.predicted;
        self.predicted_right += later.predicted_right;
        self.read_unused += later.read_unused;
        self.warmed_up += later.warmed_up;
        self.reading += later.reading;
        self.waiting += later.waiting;
    }
}
