//! Storing what was written to the disk, behind the back of everybody. Keys of entries wait in memory, not their bytes: these are read from the folder when their turn
//! comes. So a store may be gone for an hour, and nothing has to wait or to be held for it.

use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::handle::{Remote, add, lock};
use super::join::{JoinError, SharedSecret};
use super::names::PartName;
use super::queue::Source;
use super::store::StoreError;
use crate::disk::{FileKey, Key, Lookups, SecretFile, slot_bytes};

/// Entries that wait, at most. The oldest go first.
const MOST_QUEUED: usize = 1 << 16;
/// Objects that are stored at once.
const THREADS: usize = 4;
/// One object may take this long.
const PATIENCE: Duration = Duration::from_secs(30);
const IDLE: Duration = Duration::from_secs(1);

impl Remote {
    /// Begins to store what [`Remote::offer`] names, read from this cache. `own`: its secret, for a store that was not joined yet.
    pub fn start_uploads(self: &Arc<Self>, lookups: Lookups, own: SecretFile, key: Option<FileKey>) {
        *lock(&self.uploads.source) = Some(Source { lookups, own, key });
        for _ in 0..THREADS {
            let remote = Arc::clone(self);
            // Without a thread the others do its work, or nobody.
            let _ = thread::Builder::new().name("prompt-uploads".into()).spawn(move || remote.upload_all());
        }
    }

    /// Entries that are on disk and should be in the store.
    pub fn offer(&self, keys: impl IntoIterator<Item = Key>) {
        let mut queue = lock(&self.uploads.queue);
        if queue.is_closed {
            return;
        }
        queue.keys.extend(keys);
        let over = queue.keys.len().saturating_sub(MOST_QUEUED);
        queue.keys.drain(..over);
        add(&self.counters.dropped, over as u64);
        drop(queue);
        self.uploads.changed.notify_all();
    }

    /// Waits until everything that was offered is stored, for `patience` at most, or until the store is given up.
    pub fn flush(&self, patience: Duration) {
        let until = Instant::now() + patience;
        while self.uploads.queued() > 0 && self.is_joined() && self.writes.is_on() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends the storing. Returns at once; a call under way may go on.
    pub fn close(&self) {
        let left = {
            let mut queue = lock(&self.uploads.queue);
            queue.is_closed = true;
            std::mem::take(&mut queue.keys).len()
        };
        add(&self.counters.dropped, left as u64);
        lock(&self.uploads.source).take();
        self.uploads.changed.notify_all();
    }

    /// The next entry, when there is one and the store can be written to. `None`: it is over.
    fn next_upload(self: &Arc<Self>) -> Option<Key> {
        loop {
            let mut queue = lock(&self.uploads.queue);
            let pause = self.writes.pause();
            if queue.is_closed {
                return None;
            }
            if pause.is_zero() && !queue.keys.is_empty() {
                if self.is_joined() {
                    queue.busy += 1;
                    return queue.keys.pop_front();
                }
                drop(queue);
                self.join_late();
                queue = lock(&self.uploads.queue);
                if self.is_joined() {
                    continue;
                }
            }
            let wait = if pause.is_zero() { IDLE } else { pause.min(IDLE) };
            let _ = self.uploads.changed.wait_timeout(queue, wait).map_err(PoisonError::into_inner);
        }
    }

    fn upload_all(self: &Arc<Self>) {
        while let Some(key) = self.next_upload() {
            let done = self.upload(&key);
            let mut queue = lock(&self.uploads.queue);
            queue.busy -= 1;
            // Tried again, unless the store was asked often enough.
            if done.is_err() && !queue.is_closed && queue.keys.len() < MOST_QUEUED {
                queue.keys.push_front(key);
            }
        }
    }

    /// A store that did not answer at the start is joined when it does.
    fn join_late(self: &Arc<Self>) {
        let Some((own, key)) = lock(&self.uploads.source).as_ref().map(|s| (s.own.clone(), s.key.clone())) else {
            return;
        };
        let shared = match self.secret(key.as_ref()) {
            Ok(SharedSecret::None) => self.offer_secret(&own, key.as_ref()),
            found => found,
        };
        match shared {
            Ok(SharedSecret::Some(found)) if found.is_same(&own) => {
                if !self.set_joined() {
                    self.note(format!("the prompt cache's store {} answers, and is used from now on", self.url()));
                }
            }
            Ok(_) => self.give_up_joining("has a secret of its own; the next start takes it"),
            Err(JoinError::Secret(e)) => self.give_up_joining(&e.to_string()),
            // The breaker says when it is tried again.
            Err(JoinError::Store(_)) => {}
        }
    }

    fn give_up_joining(&self, why: &str) {
        self.note(format!("the prompt cache's store {} {why}; going on without it", self.url()));
        self.close();
    }

    /// Stores the parts of an entry that are not there.
    fn upload(&self, key: &Key) -> Result<(), StoreError> {
        // The name of the model, once
        let model = lock(&self.uploads.model).take();
        if let Some((object, name)) = model {
            let put = self.store.put(&object, name.as_bytes(), PATIENCE);
            self.after_write(&put);
            if put.is_err() {
                *lock(&self.uploads.model) = Some((object, name));
            }
        }
        let parts = match self.parts_of(key) {
            Some(parts) => parts,
            None => {
                add(&self.counters.dropped, 1);
                return Ok(());
            }
        };
        for (part, bytes) in parts {
            if self.is_known(&part) {
                continue;
            }
            if !self.is_wrong(&part) {
                let size = self.store.size(&part.name(), PATIENCE);
                // A store that may only be read answers this.
                if size.is_err() {
                    self.after_write(&size);
                }
                if size? == Some(slot_bytes(bytes)) {
                    self.note_present(&part);
                    continue;
                }
            }
            let slot = lock(&self.uploads.source).as_ref().and_then(|s| s.lookups.sealed_slot(key, part.part));
            let Some(slot) = slot else {
                add(&self.counters.dropped, 1);
                return Ok(());
            };
            let put = self.store.put(&part.name(), &slot, PATIENCE);
            self.after_write(&put);
            put?;
            add(&self.counters.stored, 1);
            add(&self.counters.stored_bytes, slot.len() as u64);
            self.note_present(&part);
        }
        Ok(())
    }

    /// The parts of an entry with their bytes, in the order in which they are stored: the part that stands for all comes last.
    fn parts_of(&self, key: &Key) -> Option<Vec<(PartName, u64)>> {
        let entry = lock(&self.uploads.source).as_ref()?.lookups.find(key).ok()??;
        let name = |part| PartName { model: key.0, before: entry.before, hash: key.1, tokens: entry.tokens, part };
        let mut parts: Vec<_> = entry.parts.iter().map(|(part, bytes, _)| (name(*part), *bytes)).collect();
        parts.sort_unstable_by_key(|(name, _)| std::cmp::Reverse(name.part));
        Some(parts)
    }
}
