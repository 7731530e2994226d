//! What waits to be stored.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::disk::{FileKey, Key, Lookups, SecretFile};

/// What the threads that store need beside the store itself.
pub(super) struct Source {
    pub lookups: Lookups,
    pub own: SecretFile,
    pub key: Option<FileKey>,
}

/// Entries that wait to be stored.
#[derive(Default)]
pub(super) struct Uploads {
    pub queue: Mutex<Queue>,
    pub changed: Condvar,
    /// Taken away at the end, so that no call that hangs keeps the folder.
    pub source: Mutex<Option<Source>>,
    /// The object with the model's name, and the name, until it is stored.
    pub model: Mutex<Option<(String, String)>>,
}

impl std::fmt::Debug for Uploads {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Uploads({})", self.queued())
    }
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    pub keys: VecDeque<Key>,
    /// Entries that are being stored.
    pub busy: usize,
    pub is_closed: bool,
}

impl Uploads {
    pub fn queued(&self) -> usize {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.keys.len() + queue.busy
    }
}
