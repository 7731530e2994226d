//! The prompt cache on disk: entries of the prefix tree in slots of slab files, found through an index that a crash leaves whole. `docs/cache-format.md` has the
//! format, the order of writes, and the argument why no crash makes it wrong.

mod check;
mod cipher;
mod error;
mod folder;
mod index;
mod lookups;
mod open;
mod pages;
mod reads;
mod secret;
mod sessions;
mod slab;
mod slab_alloc;
mod slot;
mod storage;
mod write;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use sluice_store::{Buffer, KeptMemory};

use crate::prefix::BlockHash;
pub use check::{ModelStat, Stat, Verified};
use cipher::Cipher;
pub use cipher::FileKey;
pub use error::Error;
pub use folder::Folder;
use index::Index;
pub use index::{Entry, Key, Model, Place, Session};
pub use lookups::{Chain, Lookups};
use lookups::{Common, SlotFile};
pub use open::{LEAST_INDEX, Settings};
use reads::Desk;
pub use reads::{Miss, Order, READING, ReadPart, Reads};
pub use sessions::{MOST_NAME, MOST_SESSIONS};
use slab::OpenSlab;
pub use slot::{Label, MOST_TOKENS, PAGE, STATE};
#[doc(hidden)]
pub use slot::{fill, holds, label_of, slot_bytes};
pub use storage::{Storage, StoredFile};
pub use write::{New, Stored};

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub stored: u64,
    /// Bytes of slabs that were written for new entries.
    pub written: u64,
    /// Bytes that were moved so that a slab could be given back.
    pub moved: u64,
    /// Parts that were read and right, and their bytes with all that was read for them.
    pub read: u64,
    pub read_bytes: u64,
    pub evicted: u64,
    /// Entries that had no room, or came after the day's limit.
    pub refused: u64,
    /// Parts that were not what they should have been, or could not be read.
    pub wrong: u64,
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs())
}

/// Days since 1970.
fn today() -> u64 {
    now() / 86400
}

/// A use that is not written down yet.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    used: u64,
    hits: u32,
}

/// A folder of entries, by the one process that owns it.
pub struct DiskCache {
    index: Arc<Index>,
    storage: Arc<dyn Storage>,
    slabs: BTreeMap<u32, OpenSlab>,
    next_slab: u32,
    /// For all files, and for slabs.
    quota: u64,
    slab_quota: u64,
    slab_bytes: u64,
    most_entries: u64,
    entries: u64,
    clock: u64,
    uses: HashMap<Key, Use>,
    /// By model: how often something of it was found since that was written down.
    model_hits: HashMap<u64, u64>,
    /// What looks and reads, and what it shares with this.
    lookups: Lookups,
    desk: Desk,
    /// Entries of chains that have a name, where that is known.
    named: Option<Arc<HashSet<Key>>>,
    counts: Counts,
    notes: Vec<String>,
    /// Kinds of lines that were noted: each is said once, and what happens again is counted.
    noted: HashSet<String>,
    secret: [u8; 32],
    cipher: Option<Arc<Cipher>>,
    /// A slot as it is written.
    buffer: Buffer,
    /// What slots are read into: at most a few tens of megabytes, until there is nothing else to do.
    memory: KeptMemory,
    /// Bytes that may be written in a day; (day, bytes written in it).
    daily_limit: Option<u64>,
    today: (u64, u64),
    /// What was there could not be opened, and is gone.
    cleared: Option<String>,
    /// There was an error: nothing is changed any more.
    failed: bool,
}

impl Drop for DiskCache {
    /// Uses are written down. A cache whose owner was killed forgets the last of them, and no more.
    fn drop(&mut self) {
        if self.failed || self.settle().and_then(|()| self.write_uses()).is_err() {
            self.index.abandon();
        }
    }
}

impl DiskCache {
    /// What was there could not be opened: why it was cleared.
    pub fn cleared(&self) -> Option<&str> {
        self.cleared.as_deref()
    }

    /// Of this installation: what hashes of prompts are keyed with.
    pub fn secret(&self) -> [u8; 32] {
        self.secret
    }

    pub fn counts(&self) -> Counts {
        let returned = reads::lock(&self.desk);
        let mut counts = self.counts;
        counts.read += returned.parts;
        counts.read_bytes += returned.bytes;
        counts.wrong += returned.wrong.len() as u64;
        counts
    }

    /// Lines that are to be said to people, one of each kind: a disk that fails has very many.
    pub fn notes(&mut self) -> Vec<String> {
        self.take_back();
        std::mem::take(&mut self.notes)
    }

    fn note(&mut self, line: String) {
        let kind = line.split(':').next().unwrap_or_default();
        if self.noted.insert(kind.to_owned()) {
            self.notes.push(line);
        }
    }

    /// Bytes that all files may have together.
    pub fn quota(&self) -> u64 {
        self.quota
    }

    /// Bytes of all slabs.
    pub fn bytes(&self) -> u64 {
        self.slabs.values().map(OpenSlab::bytes).sum()
    }

    /// Entries that are kept.
    pub fn len(&self) -> u64 {
        self.entries
    }

    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// All that is kept.
    ///
    /// # Errors
    /// The index's.
    pub fn entries(&self) -> Result<Vec<(Key, Entry)>, Error> {
        Ok(self.index.entries()?)
    }

    /// What finds and reads for other threads, while this one writes.
    pub fn lookups(&self) -> Lookups {
        self.lookups.clone()
    }

    fn common(&self) -> MutexGuard<'_, Common> {
        self.lookups.common()
    }

    /// [`Lookups::find`]
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn find(&mut self, key: &Key) -> Result<Option<Entry>, Error> {
        self.attempt(|c| {
            c.take_back();
            c.lookups.find(key)
        })
    }

    /// [`Lookups::following`]
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn following(&mut self, model: u64, before: BlockHash) -> Result<Vec<(u32, BlockHash)>, Error> {
        self.attempt(|c| {
            c.take_back();
            c.lookups.following(model, before)
        })
    }

    /// Somebody is about to read an entry, and does no longer: meanwhile it is not evicted.
    pub fn hold(&mut self, key: &Key) {
        *self.common().holds.entry(*key).or_default() += 1;
    }

    pub fn let_go(&mut self, key: &Key) {
        self.common().let_go(key);
    }

    /// Entries that are being read, or are about to be: these are not evicted.
    pub fn entries_in_use(&mut self) -> usize {
        self.take_back();
        self.common().holds.len()
    }

    /// After an error nothing is changed any more: what the disk holds by then is as after a crash.
    fn attempt<T>(&mut self, what: impl FnOnce(&mut DiskCache) -> Result<T, Error>) -> Result<T, Error> {
        if self.failed {
            return Err(Error::Over);
        }
        let done = what(self);
        self.failed = done.is_err();
        done
    }

    /// Takes back what reads have returned, without waiting for the disk.
    fn take_back(&mut self) {
        let returned = std::mem::take(&mut *reads::lock(&self.desk));
        let mut common = self.common();
        returned.holds.iter().for_each(|key| common.let_go(key));
        common.doomed.extend(&returned.wrong);
        drop(common);
        self.counts.read += returned.parts;
        self.counts.read_bytes += returned.bytes;
        self.counts.wrong += returned.wrong.len() as u64;
        returned.notes.into_iter().for_each(|line| self.note(line));
    }

    /// Takes back what reads have returned, and removes what turned out wrong and nobody reads.
    fn settle(&mut self) -> Result<(), Error> {
        self.take_back();
        let over: Vec<Key> = {
            let common = self.common();
            common.doomed.iter().filter(|key| !common.holds.contains_key(key)).copied().collect()
        };
        self.take_out(&over)?;
        let mut common = self.common();
        over.iter().for_each(|key| _ = common.doomed.remove(key));
        Ok(())
    }

    /// Slots of a slab are looked for in this file from now on.
    fn show(&self, id: u32, slab: &OpenSlab) {
        let (slot_bytes, slots) = (slab.slab.slot_bytes, slab.slab.taken.len());
        let path = self.storage.path(&slab::name_of(id));
        self.common().files.insert(id, SlotFile { file: Arc::clone(&slab.file), path, slot_bytes, slots });
    }

    /// [`Lookups::reads`]
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn reads(&mut self, wanted: &[(Label, Place)]) -> Result<Reads, Error> {
        self.attempt(|c| {
            c.take_back();
            c.lookups.reads(wanted)
        })
    }

    /// Says what a fingerprint stands for, for people.
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn note_model(&mut self, model: u64, name: &str, path: &str) -> Result<(), Error> {
        self.attempt(|c| {
            let known = c.index.models()?.remove(&model);
            if known.is_none_or(|k| (k.name.as_str(), k.path.as_str()) != (name, path)) {
                c.index.change(|c| c.name_model(model, name, path))?;
            }
            Ok(())
        })
    }
}
