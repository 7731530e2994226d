//! The prompt cache on disk: entries of the prefix tree in slots of slab files, found through an index that a crash leaves whole. `docs/cache-format.md` has the
//! format, the order of writes, and the argument why no crash makes it wrong.

#[cfg(test)]
mod campaigns;
mod check;
mod cipher;
#[cfg(test)]
mod crashes;
mod error;
mod folder;
#[cfg(test)]
mod folders;
mod index;
mod lookups;
mod open;
mod pages;
mod reads;
mod secret;
mod sessions;
#[cfg(test)]
mod simulated;
mod slab_alloc;
mod slot;
mod storage;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use sluice_store::{Buffer, KeptMemory};

use crate::prefix::BlockHash;
pub use check::{ModelStat, Stat, Verified};
use cipher::Cipher;
pub use cipher::FileKey;
pub use error::Error;
use error::io;
pub use folder::Folder;
pub use index::{Entry, Key, Model, Place, Session};
use index::{Index, Slab};
pub use lookups::{Chain, Lookups};
use lookups::{Common, SlotFile};
pub use open::Settings;
use reads::Desk;
pub use reads::{Miss, Order, READING, ReadPart, Reads};
pub use sessions::{MOST_NAME, MOST_SESSIONS};
use slab_alloc::OpenSlab;
pub use slot::{Label, MOST_TOKENS, PAGE, STATE};
#[doc(hidden)]
pub use slot::{fill, holds, label_of, slot_bytes};
pub use storage::{Storage, StoredFile};

/// An entry that is to be kept.
#[derive(Clone, Copy, Debug)]
pub struct New<'a> {
    pub hash: BlockHash,
    pub before: BlockHash,
    /// Position of the first of `tokens`.
    pub position: u32,
    pub tokens: &'a [u32],
    /// By number of the part: its bytes.
    pub parts: &'a [(u32, &'a [u8])],
}

/// What came of a batch that was to be kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// So many entries from its beginning on are there now.
    pub there: usize,
    /// So many of them were not there before.
    pub new: usize,
    /// Bytes written to slots.
    pub bytes: u64,
}

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

/// Uses that are remembered before they are written down.
const MOST_USES: usize = 4096;
/// The kind of the line that says that the day's limit is reached.
const TODAY: &str = "the prompt cache has written what it may in a day";

/// A use that is not written down yet.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    used: u64,
    hits: u32,
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs())
}

/// Days since 1970.
fn today() -> u64 {
    now() / 86400
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
        let path = self.storage.path(&slab_alloc::name_of(id));
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

    /// Keeps entries, in the order in which they follow each other: those that have no room, and those after them, are not kept.
    ///
    /// # Errors
    /// The files': then nothing more should be asked of this cache.
    pub fn store(&mut self, model: u64, batch: &[New]) -> Result<Stored, Error> {
        self.attempt(|c| c.store_batch(model, batch))
    }

    fn store_batch(&mut self, model: u64, batch: &[New]) -> Result<Stored, Error> {
        self.settle()?;
        let Some(first) = batch.first() else { return Ok(Stored::default()) };
        // 1. What it goes on from is used now, too: nobody is there without those before it
        self.clock += 1;
        let mut held = self.use_path(model, first.before)?;
        if first.position > 0 && held.is_empty() {
            return Ok(Stored::default());
        }
        held.extend(batch.iter().map(|new| (model, new.hash)));
        let mut named: Vec<(Key, Entry)> = Vec::new();
        let mut stored = Stored::default();
        for new in batch {
            let key = (model, new.hash);
            if self.common().doomed.contains(&key) {
                break;
            }
            if named.iter().any(|(k, _)| *k == key) || self.index.entry(&key)?.is_some() {
                self.uses.entry(key).or_default().used = self.clock;
                stored.there += 1;
                continue;
            }
            // 2. Slots, evicting what is older
            let sizes: Vec<u64> = new.parts.iter().map(|(_, bytes)| slot::slot_bytes(bytes.len() as u64)).collect();
            if !self.may_write(stored.bytes + sizes.iter().sum::<u64>()) {
                self.counts.refused += 1;
                break;
            }
            let Some(places) = self.find_room(&sizes, &held, named.len() as u64)? else {
                self.counts.refused += 1;
                break;
            };
            // 3. The parts
            for ((part, bytes), place) in new.parts.iter().zip(&places) {
                let label = Label {
                    part: *part,
                    bytes: bytes.len() as u64,
                    model,
                    hash: new.hash,
                    before: new.before,
                    position: new.position,
                    tokens: new.tokens,
                };
                stored.bytes += self.write(&label, *place, bytes)?;
            }
            let parts = new.parts.iter().zip(places).map(|((part, bytes), place)| (*part, bytes.len() as u64, place));
            let entry = Entry {
                before: new.before,
                position: new.position,
                tokens: new.tokens.len() as u32,
                used: self.clock,
                hits: 0,
                parts: parts.collect(),
            };
            named.push((key, entry));
            stored.there += 1;
        }
        stored.new = named.len();
        // 4. They are named once their bytes are there for good
        let mut changed: BTreeMap<u32, Slab> = BTreeMap::new();
        for place in named.iter().flat_map(|(_, entry)| entry.parts.iter().map(|(.., place)| *place)) {
            let slab = changed.entry(place.slab).or_insert_with(|| self.slabs[&place.slab].slab.clone());
            slab.taken[place.slot as usize] = true;
        }
        for id in changed.keys() {
            self.slabs[id].file.sync().map_err(io("writing"))?;
        }
        if !named.is_empty() {
            self.today.1 += stored.bytes;
            let (clock, (day, bytes), quota) = (self.clock, self.today, self.quota);
            let uses = std::mem::take(&mut self.uses);
            self.index.change(|c| {
                named.iter().try_for_each(|(key, entry)| c.put(key, entry))?;
                uses.iter().try_for_each(|(key, u)| c.used(key, u.used, u.hits))?;
                changed.iter().try_for_each(|(id, slab)| c.put_slab(*id, slab))?;
                c.set_meta("clock", clock)?;
                c.set_meta("quota", quota)?;
                c.set_meta("day", day)?;
                c.set_meta("bytes of the day", bytes)
            })?;
            for (id, slab) in changed {
                let own = self.slabs.get_mut(&id).expect("it was found");
                own.slab = slab;
                own.reserved.clear();
            }
            self.entries += named.len() as u64;
            self.counts.stored += named.len() as u64;
        }
        Ok(stored)
    }

    fn write(&mut self, label: &Label, place: Place, bytes: &[u8]) -> Result<u64, Error> {
        let slab = &self.slabs[&place.slab];
        let len = slab.slab.slot_bytes;
        if (self.buffer.len() as u64) < len {
            self.buffer = Buffer::zeroed(len as usize).map_err(io("writing"))?;
        }
        let slot = &mut self.buffer[..len as usize];
        slot::fill(label, bytes, self.cipher.is_none(), slot);
        if let Some(cipher) = &self.cipher {
            cipher.seal(slot);
        }
        slab.file.write_at(u64::from(place.slot) * len, slot).map_err(io("writing"))?;
        self.counts.written += len;
        Ok(len)
    }

    /// Whether the day's limit has room for so many bytes.
    fn may_write(&mut self, bytes: u64) -> bool {
        let day = today();
        if self.today.0 != day {
            self.today = (day, 0);
            self.noted.remove(TODAY);
        }
        let Some(limit) = self.daily_limit else { return true };
        let may = self.today.1.saturating_add(bytes) <= limit;
        if !may {
            self.note(format!("{TODAY}: {limit} bytes (UTC); no more until tomorrow"));
        }
        may
    }

    /// Takes entries out; their slots are free once that is durable, and those that are being read go when that is over.
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn remove(&mut self, keys: &[Key]) -> Result<(), Error> {
        self.common().doomed.extend(keys);
        self.attempt(DiskCache::settle)
    }

    /// A path of entries was found: they, and none before, are the last to go. Remembered, and written down with what is stored next.
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn touch(&mut self, keys: &[Key]) -> Result<(), Error> {
        self.attempt(|c| {
            let Some(&(model, _)) = keys.first() else { return Ok(()) };
            c.clock += 1;
            for key in keys {
                let known = c.uses.entry(*key).or_default();
                (known.used, known.hits) = (c.clock, known.hits.saturating_add(1));
            }
            *c.model_hits.entry(model).or_default() += 1;
            if c.uses.len() > MOST_USES { c.write_uses() } else { Ok(()) }
        })
    }

    /// An entry and all before it are used now. Which those are.
    fn use_path(&mut self, model: u64, last: BlockHash) -> Result<HashSet<Key>, Error> {
        let mut path = HashSet::new();
        let mut key = (model, last);
        while !self.common().doomed.contains(&key)
            && !path.contains(&key)
            && let Some(entry) = self.index.entry(&key)?
        {
            self.uses.entry(key).or_default().used = self.clock;
            path.insert(key);
            key.1 = entry.before;
        }
        Ok(path)
    }

    /// Writes down which entries were used.
    fn write_uses(&mut self) -> Result<(), Error> {
        if self.uses.is_empty() && self.model_hits.is_empty() {
            return Ok(());
        }
        let (uses, hits, clock) = (std::mem::take(&mut self.uses), std::mem::take(&mut self.model_hits), self.clock);
        let now = now();
        Ok(self.index.change(|c| {
            uses.iter().try_for_each(|(key, u)| c.used(key, u.used, u.hits))?;
            hits.iter().try_for_each(|(model, hits)| c.model_used(*model, now, *hits))?;
            c.set_meta("clock", clock)
        })?)
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
