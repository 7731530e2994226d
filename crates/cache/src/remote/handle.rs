//! The shared cache of one model: its store, what is known of it, and what it did.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::breaker::Breaker;
use super::names::PartName;
use super::queue::Uploads;
use super::store::{ObjectStore, StoreError};
use crate::prefix::BlockHash;

/// What a shared cache did since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteStatus {
    /// Where the store is.
    pub url: String,
    /// Whether this replica has the store's secret: before that nothing is found or uploaded.
    pub joined: bool,
    /// Prompts of which the store had a part that was of use.
    pub hits: u64,
    /// Prompts that were looked for in vain.
    pub misses: u64,
    /// Objects that were read and are right, and their bytes.
    pub read: u64,
    /// Bytes of them.
    pub read_bytes: u64,
    /// Objects that were stored.
    pub stored: u64,
    /// Bytes of them.
    pub stored_bytes: u64,
    /// Entries that wait to be stored.
    pub queued: u64,
    /// Entries that were not stored: too many waited, or they were evicted first.
    pub dropped: u64,
    /// Calls that failed.
    pub errors: u64,
    /// Objects that were not what was stored. What they stood for was computed.
    pub wrong: u64,
    /// Look-ups and reads that were given up, because they took too long.
    pub given_up: u64,
    /// Whether reading has been given up for a while.
    pub reads_paused: bool,
    /// Whether storing has been given up for a while.
    pub writes_paused: bool,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub hits: AtomicU64,
    pub misses: AtomicU64,
    pub read: AtomicU64,
    pub read_bytes: AtomicU64,
    pub stored: AtomicU64,
    pub stored_bytes: AtomicU64,
    pub dropped: AtomicU64,
    pub errors: AtomicU64,
    pub wrong: AtomicU64,
    pub given_up: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Objects that this process remembers to have seen in the store, at most, and for how long: others may remove them.
const MOST_KNOWN: usize = 1 << 17;
const KNOWN_FOR: Duration = Duration::from_secs(3600);

/// Objects by hash and part.
#[derive(Debug, Default)]
struct Known {
    present: HashSet<(BlockHash, u32)>,
    since: Option<Instant>,
    /// Objects that are there and are wrong: they are replaced when they are computed again.
    wrong: HashSet<(BlockHash, u32)>,
}

/// The shared cache of one model.
#[derive(Debug)]
pub struct Remote {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) reads: Breaker,
    pub(super) writes: Breaker,
    pub(super) counters: Counters,
    /// Calls under way.
    pub(super) calls: AtomicUsize,
    /// Whether this replica has the store's secret.
    pub(super) joined: AtomicBool,
    known: Mutex<Known>,
    pub(super) uploads: Uploads,
    /// Held while parts are fetched for one sequence.
    pub(super) fetching: Mutex<()>,
    notes: Mutex<Vec<String>>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Remote {
    /// A shared cache in a store.
    pub fn new(store: Arc<dyn ObjectStore>) -> Remote {
        Remote {
            store,
            reads: Breaker::default(),
            writes: Breaker::default(),
            counters: Counters::default(),
            calls: AtomicUsize::new(0),
            joined: AtomicBool::new(false),
            known: Mutex::default(),
            uploads: Uploads::default(),
            fetching: Mutex::default(),
            notes: Mutex::default(),
        }
    }

    /// Where the store is.
    pub fn url(&self) -> &str {
        self.store.url()
    }

    /// Counters, and what is the case now.
    pub fn status(&self) -> RemoteStatus {
        let load = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let c = &self.counters;
        RemoteStatus {
            url: self.url().to_owned(),
            joined: self.is_joined(),
            hits: load(&c.hits),
            misses: load(&c.misses),
            read: load(&c.read),
            read_bytes: load(&c.read_bytes),
            stored: load(&c.stored),
            stored_bytes: load(&c.stored_bytes),
            queued: self.uploads.queued() as u64,
            dropped: load(&c.dropped),
            errors: load(&c.errors),
            wrong: load(&c.wrong),
            given_up: load(&c.given_up),
            reads_paused: !self.reads.is_on(),
            writes_paused: !self.writes.is_on(),
        }
    }

    /// Takes messages for people: one when the store is given up, and one when it answers again.
    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.notes))
    }

    pub(super) fn note(&self, line: String) {
        lock(&self.notes).push(line);
    }

    /// Whether this replica has the store's secret.
    pub fn is_joined(&self) -> bool {
        self.joined.load(Ordering::Relaxed)
    }

    /// Whether looking for something is of any use now.
    pub fn is_readable(&self) -> bool {
        self.is_joined() && self.reads.is_on()
    }

    /// Notes how a call that reads went.
    pub(super) fn after_read<T>(&self, done: &Result<T, StoreError>) {
        self.after(&self.reads, "read from", done.as_ref().err());
    }

    /// Notes how a call that writes went.
    pub(super) fn after_write<T>(&self, done: &Result<T, StoreError>) {
        self.after(&self.writes, "written to", done.as_ref().err());
    }

    fn after(&self, breaker: &Breaker, doing: &str, error: Option<&StoreError>) {
        let Some(e) = error else {
            if breaker.succeeded() {
                self.note(format!("the prompt cache's store {} can be {doing} again", self.url()));
            }
            return;
        };
        add(&self.counters.errors, 1);
        if breaker.failed() {
            let url = self.url();
            self.note(format!("the prompt cache's store {url} cannot be {doing}: {e}; going on without it"));
        }
    }

    /// Whether an object is known to be there.
    pub(super) fn is_known(&self, part: &PartName) -> bool {
        let known = lock(&self.known);
        known.since.is_some_and(|since| since.elapsed() < KNOWN_FOR) && known.present.contains(&(part.hash, part.part))
    }

    pub(super) fn note_present(&self, part: &PartName) {
        let mut known = lock(&self.known);
        if known.present.len() >= MOST_KNOWN || known.since.is_none_or(|since| since.elapsed() >= KNOWN_FOR) {
            known.present.clear();
            known.since = Some(Instant::now());
        }
        known.present.insert((part.hash, part.part));
        known.wrong.remove(&(part.hash, part.part));
    }

    /// An object is there and is not right.
    pub(super) fn note_wrong(&self, part: &PartName) {
        add(&self.counters.wrong, 1);
        let mut known = lock(&self.known);
        known.present.remove(&(part.hash, part.part));
        if known.wrong.len() < MOST_KNOWN {
            known.wrong.insert((part.hash, part.part));
        }
    }

    /// An object that was there a moment ago is not.
    pub(super) fn note_gone(&self, part: &PartName) {
        lock(&self.known).present.remove(&(part.hash, part.part));
    }

    pub(super) fn is_wrong(&self, part: &PartName) -> bool {
        lock(&self.known).wrong.contains(&(part.hash, part.part))
    }
}
