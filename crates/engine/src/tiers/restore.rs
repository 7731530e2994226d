//! How far a sequence is with what the tiers have of its prompt.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender};

use sluice_cache::{BlockHash, RestoreTarget};

use super::disk::lookup::{FoundPrefix, LookupCommand};
use super::disk::reading::DiskRead;
use super::host::slots::Slot;

/// The progress of restoring a sequence's prefix.
#[derive(Default)]
pub(crate) enum Restore {
    /// Nothing was looked for yet.
    #[default]
    NotStarted,
    /// The disk is being searched.
    LookingUp(Mutex<Receiver<FoundPrefix>>, Sender<LookupCommand>),
    /// A prefix is on disk. Reading starts when the scheduler picks the sequence.
    Found(FoundPrefix, Sender<LookupCommand>),
    /// The prefix is being read from disk.
    FromDisk(DiskRead),
    /// The prefix is in host memory and is copied before the next step.
    FromHost(HostRestore),
    /// Everything that was found is in the caches.
    Done,
}

impl Restore {
    /// Whether the sequence must sit out the next step.
    pub fn is_pending(&self) -> bool {
        matches!(self, Restore::LookingUp(..) | Restore::FromDisk(_) | Restore::FromHost(_))
    }

    /// Tokens of a prefix that was found on disk and is not being read yet.
    pub fn found_tokens(&self) -> usize {
        match self {
            Restore::Found(found, _) => found.to,
            _ => 0,
        }
    }
}

/// A prefix on its way back from host memory.
pub(crate) struct HostRestore {
    /// Tokens of the whole prefix.
    pub to: usize,
    /// Tokens of it that the caches had already.
    pub present: usize,
    pub targets: Vec<(RestoreTarget, Slot)>,
    /// Nodes that leave host memory for the caches.
    pub nodes: Vec<BlockHash>,
}
