//! Experts that are read from disk when tokens want them: how a device is told, and what it reports.

use sluice_experts::ExpertStats;

/// Whether a device predicts the experts of the next layer and prefetches them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lookahead {
    /// Never.
    #[default]
    Off,
    /// Always.
    On,
    /// While measurements say that it makes steps faster.
    Auto,
}

/// How experts are streamed, and what that took.
#[derive(Clone, Debug)]
pub struct Streamed {
    /// Counts and times.
    pub stats: ExpertStats,
    /// How they are read, such as "io_uring, direct".
    pub reader: &'static str,
    /// The fallbacks of the reader.
    pub notes: Vec<String>,
    /// Slots in host memory, and experts of all layers.
    pub slots: (usize, usize),
    /// Slots in the device's own memory. `None` where the host computes.
    pub device_slots: Option<usize>,
    /// Bytes of all experts on disk.
    pub file_bytes: u64,
    /// Whether look-ahead is on at the moment.
    pub looks_ahead: bool,
}

impl Streamed {
    /// Adds a later report of the same device.
    pub fn add(&mut self, later: &Streamed) {
        self.stats.add(&later.stats);
        self.looks_ahead = later.looks_ahead;
        self.notes.clone_from(&later.notes);
    }

    /// Adds another device's report of the same time. Each has experts of its own.
    pub fn beside(&mut self, other: &Streamed) {
        self.stats.add(&other.stats);
        self.notes.extend(other.notes.iter().cloned());
        self.notes.dedup();
        self.slots = (self.slots.0 + other.slots.0, self.slots.1 + other.slots.1);
        self.device_slots = self.device_slots.zip(other.device_slots).map(|(own, others)| own + others);
        self.file_bytes += other.file_bytes;
        self.looks_ahead |= other.looks_ahead;
    }
}
