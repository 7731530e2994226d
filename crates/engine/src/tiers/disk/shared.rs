//! What the engine and the threads of the disk tier share: counters, the model's fingerprint, and whether the cache still works.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use sluice_cache::disk::Error;

/// State that all threads of the disk tier share.
#[derive(Default)]
pub(crate) struct Shared {
    /// The folder, for messages.
    pub folder: String,
    /// The model's fingerprint. Until it is set nothing is written or looked up.
    fingerprint: OnceLock<u64>,
    /// Bytes of weights that are summed.
    pub summed: AtomicU64,
    /// Bytes of weights that have to be summed.
    pub to_sum: AtomicU64,
    closing: AtomicBool,
    /// Bytes that wait to be written.
    pub queued: AtomicU64,
    /// Bytes of the cache's files.
    pub bytes: AtomicU64,
    /// Entries in the cache.
    pub entries: AtomicU64,
    /// Entries that were written.
    pub stored: AtomicU64,
    /// Bytes that were written.
    pub written: AtomicU64,
    /// Entries that the cache refused.
    pub refused: AtomicU64,
    /// Bytes that were read.
    pub read: AtomicU64,
    /// Entries that were damaged or unreadable.
    pub wrong: AtomicU64,
    failed: AtomicBool,
    broken: Mutex<Option<String>>,
    notes: Mutex<Vec<String>>,
}

/// Bytes, for people.
pub(super) fn size(bytes: u64) -> String {
    if bytes < 1_000_000_000 {
        format!("{:.1} MB", bytes as f64 / 1e6)
    } else {
        format!("{:.1} GB", bytes as f64 / 1e9)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub fn new(folder: &Path) -> Shared {
        Shared { folder: folder.display().to_string(), ..Shared::default() }
    }

    /// Whether nothing has failed.
    pub fn is_ok(&self) -> bool {
        !self.failed.load(Ordering::Relaxed)
    }

    pub fn fingerprint(&self) -> Option<u64> {
        self.fingerprint.get().copied()
    }

    /// From now on entries of this model are written and looked up.
    pub fn set_fingerprint(&self, model: u64) {
        let _ = self.fingerprint.set(model);
    }

    /// Whether anything can be written or looked up.
    pub fn is_ready(&self) -> bool {
        self.is_ok() && self.fingerprint().is_some()
    }

    /// Bytes of weights that are summed, and that have to be before anything is written or looked up; `None` once they are.
    pub fn summing(&self) -> Option<(u64, u64)> {
        let [summed, all] = [&self.summed, &self.to_sum].map(|n| n.load(Ordering::Relaxed));
        (self.is_ok() && self.fingerprint().is_none()).then_some((summed.min(all), all))
    }

    /// Why nothing can be written or looked up.
    pub fn why_not_ready(&self) -> Option<String> {
        match self.summing() {
            Some((summed, all)) => Some(format!(
                "the prompt cache is not in use yet: {} of {} of the model are summed",
                size(summed),
                size(all)
            )),
            None => (!self.is_ok()).then(|| match self.broken() {
                Some(why) => format!("the prompt cache is not in use any more: {why}"),
                None => "the prompt cache is not in use any more".to_owned(),
            }),
        }
    }

    /// Tells background work to stop.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
    }

    /// Whether background work is to stop.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Adds a message for the user.
    pub fn note(&self, line: String) {
        lock(&self.notes).push(line);
    }

    pub fn extend_notes(&self, lines: impl IntoIterator<Item = String>) {
        lock(&self.notes).extend(lines);
    }

    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.notes))
    }

    /// Why the cache is not used any more.
    pub fn broken(&self) -> Option<String> {
        lock(&self.broken).clone()
    }

    /// The folder failed: the cache is not used any more.
    pub fn fail(&self, e: Error) {
        self.give_up(format!("{}: {:#}", self.folder, anyhow::Error::new(e)));
    }

    /// The cache is not used any more, for this reason.
    pub fn give_up(&self, why: String) {
        *lock(&self.broken) = Some(why);
        self.failed.store(true, Ordering::Relaxed);
    }
}
