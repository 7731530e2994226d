//! The prompt cache on disk: nodes of the prefix tree ("entries") in slots of slab files, found through an index that
//! survives crashes. `docs/cache-format.md` has the format, the order of writes, and the argument why no crash makes
//! it wrong.

mod check;
mod cipher;
mod error;
mod folder;
mod index;
mod lookups;
mod open;
mod pages;
mod reads;
mod sealed;
mod secret;
mod sessions;
mod slab;
mod slab_alloc;
mod slot;
mod snapshot;
mod storage;
mod write;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use sluice_store::{Buffer, ReusedMemory};

use crate::prefix::BlockHash;
pub use check::{ModelStat, Stat, Verified};
pub(crate) use cipher::Cipher;
pub use cipher::FileKey;
pub use error::Error;
pub use folder::Folder;
use index::Index;
pub use index::{Entry, Key, Model, Place, Session};
pub use lookups::{Chain, Lookups};
use lookups::{SharedState, SlotFile};
pub use open::{LEAST_INDEX, Settings};
use reads::ReturnBox;
pub use reads::{Miss, Order, READING, ReadPart, Reads};
pub use secret::SecretFile;
pub use sessions::{MOST_NAME, MOST_SESSIONS};
use slab::OpenSlab;
pub use slot::{Label, MOST_TOKENS, PAGE, STATE};
#[doc(hidden)]
pub use slot::{fill, holds, label_of, slot_bytes};
pub use storage::{Storage, StoredFile};
pub use write::{NewEntry, Stored};

/// What a cache did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Entries that were stored.
    pub stored: u64,
    /// Bytes of slabs that were written for new entries.
    pub written: u64,
    /// Bytes that were moved so that a slab could be given back.
    pub moved: u64,
    /// Parts that were read and are right.
    pub read: u64,
    /// Bytes that were read for them.
    pub read_bytes: u64,
    /// Entries that were evicted.
    pub evicted: u64,
    /// Entries that were not stored: no slot was left, or the day's limit was reached.
    pub refused: u64,
    /// Parts that were damaged, or could not be read.
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

/// A use of an entry that is not in the index yet.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    used: u64,
    hits: u32,
}

/// A cache folder, opened by the one process that owns it.
///
/// ```
/// use sluice_cache::block_hash;
/// use sluice_cache::disk::{DiskCache, Label, NewEntry, Order, Settings};
///
/// let folder = tempfile::tempdir()?;
/// let settings = Settings { quota: Some(64 << 20), ..Settings::default() };
/// let mut cache = DiskCache::open_folder(folder.path(), settings)?;
/// // Stores the first block of a prompt.
/// let (model, before) = (7, cache.lookups().root(b"salt"));
/// let tokens = [1, 2, 3];
/// let hash = block_hash(&cache.secret(), &before, &tokens);
/// let entry = NewEntry { hash, before, position: 0, tokens: &tokens, parts: &[(0, b"keys and values")] };
/// assert_eq!(cache.store(model, &[entry])?.new, 1);
/// // Finds and reads it.
/// let (part, bytes, place) = cache.find(&(model, hash))?.expect("it was stored").parts[0];
/// let label = Label { part, bytes, model, hash, before, position: 0, tokens: &tokens };
/// cache.reads(&[(label, place)])?.for_each(Order::AsRequested, |_, part| {
///     assert_eq!(part.unwrap()[..], *b"keys and values");
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
    /// By model: how often an entry of it was found since the index was written.
    model_hits: HashMap<u64, u64>,
    /// Finds and reads entries, also for other threads.
    lookups: Lookups,
    returned: ReturnBox,
    /// Entries of named chains; `None`: to be computed again.
    named: Option<Arc<HashSet<Key>>>,
    counts: Counts,
    notes: Vec<String>,
    /// Kinds of notes so far: each is reported once.
    noted: HashSet<String>,
    secret: [u8; 32],
    cipher: Option<Arc<Cipher>>,
    /// A slot while it is written.
    buffer: Buffer,
    /// Memory that slots are read into: a few tens of megabytes, released when there is nothing else to do.
    memory: ReusedMemory,
    /// Bytes that may be written in a day; (day, bytes written in it).
    daily_limit: Option<u64>,
    today: (u64, u64),
    /// Why the cache was cleared when it was opened, if it was.
    cleared: Option<String>,
    /// There was an error: nothing may be changed any more.
    failed: bool,
}

impl Drop for DiskCache {
    /// Writes uses to the index. If the owner was killed instead, only the last uses are lost.
    fn drop(&mut self) {
        if self.failed || self.remove_doomed().and_then(|()| self.write_uses()).is_err() {
            self.index.abandon();
        }
    }
}

impl DiskCache {
    /// Why the cache was cleared when it was opened: its index or secret was damaged or gone.
    pub fn cleared(&self) -> Option<&str> {
        self.cleared.as_deref()
    }

    /// The secret of this installation, which hashes of prompts are keyed with.
    pub fn secret(&self) -> [u8; 32] {
        self.secret
    }

    /// The file with the secret, for a store that other folders share.
    ///
    /// # Errors
    /// The file's.
    pub fn secret_file(&self, key: Option<&FileKey>) -> Result<SecretFile, Error> {
        SecretFile::open(&secret::read_bytes(&*self.storage).map_err(error::io("opening"))?, key)
    }

    /// What the cache did since it was opened.
    pub fn counts(&self) -> Counts {
        let returned = reads::lock(&self.returned);
        let mut counts = self.counts;
        counts.read += returned.parts;
        counts.read_bytes += returned.bytes;
        counts.wrong += returned.wrong.len() as u64;
        counts
    }

    /// Takes messages for people, one of each kind: a disk that fails would give very many.
    pub fn notes(&mut self) -> Vec<String> {
        self.collect_returned();
        std::mem::take(&mut self.notes)
    }

    fn note(&mut self, line: String) {
        let kind = line.split(':').next().unwrap_or_default();
        if self.noted.insert(kind.to_owned()) {
            self.notes.push(line);
        }
    }

    /// Bytes that all files may take together.
    pub fn quota(&self) -> u64 {
        self.quota
    }

    /// Bytes of all slabs.
    pub fn bytes(&self) -> u64 {
        self.slabs.values().map(OpenSlab::bytes).sum()
    }

    /// How many entries there are.
    pub fn len(&self) -> u64 {
        self.entries
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// All entries.
    ///
    /// # Errors
    /// The index's.
    pub fn entries(&self) -> Result<Vec<(Key, Entry)>, Error> {
        Ok(self.index.entries()?)
    }

    /// A handle that finds and reads entries for other threads, while this one writes.
    pub fn lookups(&self) -> Lookups {
        self.lookups.clone()
    }

    fn common(&self) -> MutexGuard<'_, SharedState> {
        self.lookups.shared()
    }

    /// [`Lookups::find`]
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn find(&mut self, key: &Key) -> Result<Option<Entry>, Error> {
        self.attempt(|c| {
            c.collect_returned();
            c.lookups.find(key)
        })
    }

    /// [`Lookups::following`]
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn following(&mut self, model: u64, before: BlockHash) -> Result<Vec<(u32, BlockHash)>, Error> {
        self.attempt(|c| {
            c.collect_returned();
            c.lookups.following(model, before)
        })
    }

    /// Pins an entry that is about to be read: it is not evicted until [`DiskCache::unpin`].
    pub fn pin(&mut self, key: &Key) {
        *self.common().pins.entry(*key).or_default() += 1;
    }

    /// Ends a pin.
    pub fn unpin(&mut self, key: &Key) {
        self.common().unpin(key);
    }

    /// Entries that are being read, or are about to be: these are not evicted.
    pub fn entries_in_use(&mut self) -> usize {
        self.collect_returned();
        self.common().pins.len()
    }

    /// Runs `what`. After an error nothing is changed any more: the disk is then as after a crash.
    fn attempt<T>(&mut self, what: impl FnOnce(&mut DiskCache) -> Result<T, Error>) -> Result<T, Error> {
        if self.failed {
            return Err(Error::Disabled);
        }
        let done = what(self);
        self.failed = done.is_err();
        done
    }

    /// Collects what reads have returned: pins, counts and damaged entries. Does not wait for the disk.
    fn collect_returned(&mut self) {
        let returned = std::mem::take(&mut *reads::lock(&self.returned));
        let mut common = self.common();
        returned.pins.iter().for_each(|key| common.unpin(key));
        common.doomed.extend(&returned.wrong);
        drop(common);
        self.counts.read += returned.parts;
        self.counts.read_bytes += returned.bytes;
        self.counts.wrong += returned.wrong.len() as u64;
        returned.notes.into_iter().for_each(|line| self.note(line));
    }

    /// Collects what reads have returned, and removes damaged entries that nobody reads.
    fn remove_doomed(&mut self) -> Result<(), Error> {
        self.collect_returned();
        let over: Vec<Key> = {
            let common = self.common();
            common.doomed.iter().filter(|key| !common.pins.contains_key(key)).copied().collect()
        };
        self.remove_entries(&over)?;
        let mut common = self.common();
        over.iter().for_each(|key| _ = common.doomed.remove(key));
        Ok(())
    }

    /// Lets readers find slots of a slab in its file.
    fn publish_slab(&self, id: u32, slab: &OpenSlab) {
        let (slot_bytes, slots) = (slab.slab.slot_bytes, slab.slab.taken.len());
        let path = self.storage.path(&slab::file_name(id));
        self.common().files.insert(id, SlotFile { file: Arc::clone(&slab.file), path, slot_bytes, slots });
    }

    /// [`Lookups::reads`]
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn reads(&mut self, wanted: &[(Label, Place)]) -> Result<Reads, Error> {
        self.attempt(|c| {
            c.collect_returned();
            c.lookups.reads(wanted)
        })
    }

    /// Notes the name and the path of the model with this fingerprint, for people.
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
