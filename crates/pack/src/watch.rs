//! The caller's side of a packing: progress, and cancellation.

use crate::conversion::Conversion;
use crate::space::Space;

/// Receives the progress of a packing, and can cancel it.
pub trait Watch: Sync {
    fn event(&self, event: Event);

    /// Whether the packing is to end as soon as it can. Asked every few megabytes, by several threads.
    fn is_stopped(&self) -> bool;
}

/// What a packing tells.
#[derive(Debug)]
pub enum Event<'a> {
    /// What it will do; nothing is written yet.
    Planned(&'a Conversion),
    /// It goes on with an earlier packing, of which so many of so many files are whole.
    GoesOn { whole: usize, files: usize },
    /// What it will take of the disk, and what is free there in bytes; too little ends it.
    Space { needed: &'a Space, free: u64 },
    /// Bytes of the input that are packed, of so many.
    Progress { done: u64, all: u64 },
    /// One line that people should know.
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
