//! The caller's side of a packing: progress, and cancellation.

use crate::conversion::Conversion;
use crate::space::Space;

/// Receives the progress of a packing, and can cancel it.
pub trait Watch: Sync {
    fn event(&self, event: Event);

    /// Whether the packing should stop. Several threads ask, every few megabytes.
    fn is_stopped(&self) -> bool;
}

/// What a packing reports.
#[derive(Debug)]
pub enum Event<'a> {
    /// The plan; nothing is written yet.
    Planned(&'a Conversion),
    /// It continues an earlier packing, which completed `whole` of `files` files.
    GoesOn { whole: usize, files: usize },
    /// The disk space that it needs, and the bytes that are free; too few end it.
    Space { needed: &'a Space, free: u64 },
    /// Bytes of the input packed so far, and all.
    Progress { done: u64, all: u64 },
    /// A message for the user, one line.
    Note(&'a str),
}

impl dyn Watch + '_ {
    pub(crate) fn note(&self, line: &str) {
        self.event(Event::Note(line));
    }
}

/// The packing was told to stop.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Stopped;
