//! The prompt cache on disk: entries of the prefix tree in slots of slab files, found through an index that a crash leaves whole. `docs/cache-format.md` has the
//! format, the order of writes, and the argument why no crash makes it wrong.

#[cfg(test)]
mod crashes;
mod index;
#[cfg(test)]
mod simulated;
mod slot;
mod storage;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::Arc;

use crate::prefix::BlockHash;
pub use index::{Entry, Key, Place};
use index::{Index, Slab};
pub use slot::{Label, MOST_TOKENS, PAGE, STATE};
pub use storage::{Folder, Storage, StoredFile};

/// Why nothing more can be kept or found. What was computed does not depend on it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{doing} the prompt cache")]
    Io {
        doing: &'static str,
        #[source]
        cause: io::Error,
    },
    #[error("the index of the prompt cache")]
    Index(#[source] Box<redb::Error>),
    #[error("a quota of {quota} bytes is too little for a prompt cache; {least} would do")]
    Quota { quota: u64, least: u64 },
}

impl From<Box<redb::Error>> for Error {
    fn from(e: Box<redb::Error>) -> Error {
        Error::Index(e)
    }
}

fn io(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |cause| Error::Io { doing, cause }
}

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

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub stored: u64,
    /// Bytes of slabs that were written.
    pub written: u64,
    pub evicted: u64,
    /// Entries that had no room.
    pub refused: u64,
    /// Parts that were not what they should have been.
    pub wrong: u64,
}

const INDEX: &str = "index.redb";
/// Part of the quota that the index may take, and the least that it needs.
const INDEX_PART: u64 = 16;
const LEAST_INDEX: u64 = 4 << 20;
/// Bytes of the index for each entry: its rows, and the copies that transactions make of pages.
const INDEX_ENTRY: u64 = 1 << 10;
/// Bytes of a slab, if a slot is not larger, and at most so many parts of the quota.
const SLAB: u64 = 64 << 20;
const SLAB_PART: u64 = 16;

/// Of so many entries, one is evicted at once.
const EVICTED_AT_ONCE: usize = 256;

#[derive(Debug)]
struct OpenSlab {
    file: Arc<dyn StoredFile>,
    /// As the index has it.
    slab: Slab,
    /// Slots that are being written, for entries that the index does not name yet.
    reserved: HashSet<u32>,
}

impl OpenSlab {
    fn bytes(&self) -> u64 {
        self.slab.slot_bytes * self.slab.taken.len() as u64
    }
}

/// A folder of entries, by the one process that owns it.
pub struct DiskCache {
    storage: Arc<dyn Storage>,
    index: Index,
    slabs: BTreeMap<u32, OpenSlab>,
    next_slab: u32,
    /// For slabs.
    quota: u64,
    slab_bytes: u64,
    most_entries: u64,
    entries: u64,
    clock: u64,
    /// Entries that somebody reads: they are not evicted.
    holds: HashMap<Key, usize>,
    counts: Counts,
    /// What was there could not be opened, and is gone.
    cleared: Option<String>,
}

fn name_of(slab: u32) -> String {
    format!("{slab:08}.slab")
}

impl DiskCache {
    /// Opens what `storage` has, or begins anew. Of `quota` bytes all files together never have more.
    ///
    /// # Errors
    /// Those of the files; a quota too small for anything.
    pub fn open(storage: Arc<dyn Storage>, quota: u64) -> Result<DiskCache, Error> {
        let index_bytes = (quota / INDEX_PART).max(LEAST_INDEX);
        let least = LEAST_INDEX + 2 * PAGE as u64 * SLAB_PART;
        if quota < least {
            return Err(Error::Quota { quota, least });
        }
        // 1. The index; without one that can be opened nothing that lies there means anything
        let mut cleared = None;
        let opened = storage.open(INDEX, true).map_err(io("opening"))?;
        let index = match Index::open(opened, index_bytes) {
            Ok(index) => index,
            Err(e) => {
                cleared = Some(e.to_string());
                for (name, _) in storage.list().map_err(io("looking through"))? {
                    if name == INDEX || name.ends_with(".slab") {
                        storage.remove(&name).map_err(io("clearing"))?;
                    }
                }
                storage.sync_names().map_err(io("clearing"))?;
                Index::open(storage.open(INDEX, true).map_err(io("opening"))?, index_bytes)?
            }
        };
        let mut cache = DiskCache {
            storage,
            index,
            slabs: BTreeMap::new(),
            next_slab: 0,
            quota: quota - index_bytes,
            slab_bytes: SLAB.min((quota - index_bytes) / SLAB_PART),
            most_entries: index_bytes / 2 / INDEX_ENTRY,
            entries: 0,
            clock: 0,
            holds: HashMap::new(),
            counts: Counts::default(),
            cleared,
        };
        cache.find_slabs()?;
        // 2. A smaller quota than before
        while cache.slabs.values().map(OpenSlab::bytes).sum::<u64>() > cache.quota {
            if cache.evict(&[])? == 0 && !cache.drop_empty()? {
                break;
            }
            while cache.drop_empty()? {}
        }
        Ok(cache)
    }

    /// Slabs that the index names are opened; files that it does not name are what a crash has left.
    fn find_slabs(&mut self) -> Result<(), Error> {
        let known = self.index.slabs()?;
        let files = self.storage.list().map_err(io("looking through"))?;
        let mut orphans = false;
        for (name, _) in &files {
            let number = name.strip_suffix(".slab").and_then(|n| n.parse::<u32>().ok());
            if let Some(number) = number {
                self.next_slab = self.next_slab.max(number + 1);
                if !known.iter().any(|(id, _)| *id == number) {
                    self.storage.remove(name).map_err(io("clearing"))?;
                    orphans = true;
                }
            }
        }
        if orphans {
            self.storage.sync_names().map_err(io("clearing"))?;
        }
        self.next_slab = self.next_slab.max(self.index.meta("next slab")?.unwrap_or(0) as u32);
        self.clock = self.index.meta("clock")?.unwrap_or(0);
        let mut lost = Vec::new();
        for (id, slab) in known {
            let len = slab.slot_bytes * slab.taken.len() as u64;
            let whole = files.iter().any(|(name, found)| *name == name_of(id) && *found == len);
            let file = self.storage.open(&name_of(id), false);
            match file {
                Ok(file) if whole => _ = self.slabs.insert(id, OpenSlab { file, slab, reserved: HashSet::new() }),
                // Somebody has cut or taken it: its entries go with it.
                _ => lost.push(id),
            }
        }
        lost.into_iter().try_for_each(|id| self.forget_slab(id))?;
        self.entries = self.index.change(|c| c.len())?;
        Ok(())
    }

    fn forget_slab(&mut self, id: u32) -> Result<(), Error> {
        let lost: Vec<Key> = (self.index.entries()?.into_iter())
            .filter(|(_, e)| e.parts.iter().any(|(.., place)| place.slab == id))
            .map(|(key, _)| key)
            .collect();
        self.remove(&lost)?;
        self.index.change(|c| c.remove_slab(id))?;
        let _ = self.storage.remove(&name_of(id));
        self.storage.sync_names().map_err(io("clearing"))
    }

    /// What was there could not be opened: why it was cleared.
    pub fn cleared(&self) -> Option<&str> {
        self.cleared.as_deref()
    }

    pub fn counts(&self) -> Counts {
        self.counts
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

    /// Where an entry lies.
    ///
    /// # Errors
    /// The index's.
    pub fn find(&self, key: &Key) -> Result<Option<Entry>, Error> {
        Ok(self.index.entry(key)?)
    }

    /// Entries with a state that follow the one with the hash `before`: how many tokens each has, the most first, and its hash. Such may end within a block, where
    /// nobody can guess a hash.
    ///
    /// # Errors
    /// The index's.
    pub fn with_state(&self, model: u64, before: BlockHash) -> Result<Vec<(u32, BlockHash)>, Error> {
        Ok(self.index.with_state(model, before)?)
    }

    /// Somebody is about to read an entry, and does no longer: meanwhile it is not evicted.
    pub fn hold(&mut self, key: &Key) {
        *self.holds.entry(*key).or_default() += 1;
    }

    pub fn let_go(&mut self, key: &Key) {
        if let Some(n) = self.holds.get_mut(key) {
            *n -= 1;
            if *n == 0 {
                self.holds.remove(key);
            }
        }
    }

    /// Reads a part into `out`. Whether it is what `label` says: else the entry is to be removed.
    ///
    /// # Errors
    /// The file's.
    pub fn read(&mut self, label: &Label, place: Place, out: &mut [u8]) -> Result<bool, Error> {
        let fits = |s: &&OpenSlab| {
            (place.slot as usize) < s.slab.taken.len() && s.slab.slot_bytes == slot::slot_bytes(out.len() as u64)
        };
        let Some(slab) = self.slabs.get(&place.slab).filter(fits) else { return Ok(false) };
        let from = u64::from(place.slot) * slab.slab.slot_bytes;
        let mut page = [0; PAGE];
        slab.file.read_at(from, out).map_err(io("reading"))?;
        slab.file.read_at(from + slab.slab.slot_bytes - PAGE as u64, &mut page).map_err(io("reading"))?;
        let right = slot::matches(label, out, &page);
        self.counts.wrong += u64::from(!right);
        Ok(right)
    }

    /// Keeps entries, in the order in which they follow each other, and says how many of them are there now: those that have no room, and those after them, are not.
    ///
    /// # Errors
    /// The files': then nothing more should be asked of this cache.
    pub fn store(&mut self, model: u64, batch: &[New]) -> Result<usize, Error> {
        let held: Vec<Key> =
            batch.iter().map(|new| (model, new.hash)).chain(batch.first().map(|b| (model, b.before))).collect();
        let mut named: Vec<(Key, Entry)> = Vec::new();
        let mut there = 0;
        self.clock += 1;
        for new in batch {
            let key = (model, new.hash);
            if self.index.entry(&key)?.is_some() {
                there += 1;
                continue;
            }
            // 1. Slots, evicting what is older
            let sizes: Vec<u64> = new.parts.iter().map(|(_, bytes)| slot::slot_bytes(bytes.len() as u64)).collect();
            let Some(places) = self.find_room(&sizes, &held, named.len() as u64)? else {
                self.counts.refused += 1;
                break;
            };
            // 2. The parts
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
                self.write(&label, *place, bytes)?;
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
            there += 1;
        }
        // 3. They are named once their bytes are there for good
        let mut changed: BTreeMap<u32, Slab> = BTreeMap::new();
        for place in named.iter().flat_map(|(_, entry)| entry.parts.iter().map(|(.., place)| *place)) {
            let slab = changed.entry(place.slab).or_insert_with(|| self.slabs[&place.slab].slab.clone());
            slab.taken[place.slot as usize] = true;
        }
        for id in changed.keys() {
            self.slabs[id].file.sync().map_err(io("writing"))?;
        }
        if !named.is_empty() {
            let clock = self.clock;
            self.index.change(|c| {
                named.iter().try_for_each(|(key, entry)| c.put(key, entry))?;
                changed.iter().try_for_each(|(id, slab)| c.put_slab(*id, slab))?;
                c.set_meta("clock", clock)
            })?;
            for (id, slab) in changed {
                let own = self.slabs.get_mut(&id).expect("it was found");
                own.slab = slab;
                own.reserved.clear();
            }
            self.entries += named.len() as u64;
            self.counts.stored += named.len() as u64;
        }
        Ok(there)
    }

    fn write(&mut self, label: &Label, place: Place, bytes: &[u8]) -> Result<(), Error> {
        let slab = &self.slabs[&place.slab];
        let from = u64::from(place.slot) * slab.slab.slot_bytes;
        slab.file.write_at(from, bytes).map_err(io("writing"))?;
        let end = from + slab.slab.slot_bytes - PAGE as u64;
        slab.file.write_at(end, &slot::page(label, bytes)).map_err(io("writing"))?;
        self.counts.written += slab.slab.slot_bytes;
        Ok(())
    }

    /// A free slot of each of these sizes, taken in memory only. `None` where there is none to be had, then none is taken.
    fn find_room(&mut self, sizes: &[u64], held: &[Key], unnamed: u64) -> Result<Option<Vec<Place>>, Error> {
        let mut places = Vec::with_capacity(sizes.len());
        if self.entries + unnamed >= self.most_entries {
            self.evict(held)?;
        }
        for &size in sizes {
            let place = loop {
                if self.entries + unnamed >= self.most_entries {
                    break None;
                }
                if let Some(place) = self.free_slot(size) {
                    break Some(place);
                }
                if self.new_slab(size)? || self.drop_empty()? || self.evict(held)? > 0 {
                    continue;
                }
                break None;
            };
            match place {
                Some(place) => {
                    self.slabs.get_mut(&place.slab).expect("it was found").reserved.insert(place.slot);
                    places.push(place);
                }
                None => {
                    for place in places {
                        self.slabs.get_mut(&place.slab).expect("it was found").reserved.remove(&place.slot);
                    }
                    return Ok(None);
                }
            }
        }
        Ok(Some(places))
    }

    /// Low numbers first, so that the last slabs become empty.
    fn free_slot(&self, size: u64) -> Option<Place> {
        self.slabs.iter().filter(|(_, s)| s.slab.slot_bytes == size).find_map(|(id, s)| {
            let mut slots = (0..).zip(&s.slab.taken);
            let (slot, _) = slots.find(|(slot, taken)| !**taken && !s.reserved.contains(slot))?;
            Some(Place { slab: *id, slot })
        })
    }

    fn free(&mut self, places: &[Place]) {
        for place in places {
            if let Some(slab) = self.slabs.get_mut(&place.slab) {
                slab.slab.taken[place.slot as usize] = false;
            }
        }
    }

    /// One more slab, if the quota has room for it.
    fn new_slab(&mut self, slot_bytes: u64) -> Result<bool, Error> {
        let slots = (self.slab_bytes / slot_bytes).clamp(1, 4096);
        if self.bytes() + slots * slot_bytes > self.quota {
            return Ok(false);
        }
        let id = self.next_slab;
        self.next_slab += 1;
        let made = || {
            let file = self.storage.open(&name_of(id), true)?;
            file.set_len(slots * slot_bytes)?;
            file.sync()?;
            self.storage.sync_names()?;
            Ok(file)
        };
        let file = made().map_err(io("growing"))?;
        let slab = Slab { slot_bytes, taken: vec![false; slots as usize] };
        self.index.change(|c| {
            c.put_slab(id, &slab)?;
            c.set_meta("next slab", u64::from(id) + 1)
        })?;
        self.slabs.insert(id, OpenSlab { file, slab, reserved: HashSet::new() });
        Ok(true)
    }

    /// Gives a slab back in which nothing lies. Whether there was one.
    fn drop_empty(&mut self) -> Result<bool, Error> {
        let Some((&id, _)) = self.slabs.iter().find(|(_, s)| !s.slab.taken.contains(&true) && s.reserved.is_empty())
        else {
            return Ok(false);
        };
        self.index.change(|c| c.remove_slab(id))?;
        self.storage.remove(&name_of(id)).map_err(io("shrinking"))?;
        // Until it is gone for good it counts.
        self.storage.sync_names().map_err(io("shrinking"))?;
        self.slabs.remove(&id);
        Ok(true)
    }

    /// Evicts some entries, the longest unused first, but `held` ones and those that are being read. How many.
    fn evict(&mut self, held: &[Key]) -> Result<usize, Error> {
        // A transaction takes milliseconds: of many entries, a few at once.
        let most = (self.entries as usize / EVICTED_AT_ONCE).max(1);
        let mut victims = Vec::new();
        let holds = &self.holds;
        self.index.change(|c| {
            c.oldest(|key| {
                if !held.contains(key) && !holds.contains_key(key) {
                    victims.push(*key);
                }
                victims.len() < most
            })
        })?;
        self.counts.evicted += victims.len() as u64;
        self.remove(&victims)?;
        Ok(victims.len())
    }

    /// Takes entries out; their slots are free once that is durable.
    ///
    /// # Errors
    /// The index's.
    pub fn remove(&mut self, keys: &[Key]) -> Result<(), Error> {
        if keys.is_empty() {
            return Ok(());
        }
        let slabs = &self.slabs;
        let gone = self.index.change(|c| {
            let mut gone: Vec<Place> = Vec::new();
            let mut changed: BTreeMap<u32, Slab> = BTreeMap::new();
            for key in keys {
                let Some(entry) = c.remove(key)? else { continue };
                for (.., place) in entry.parts {
                    let Some(slab) = slabs.get(&place.slab) else { continue };
                    let slab = changed.entry(place.slab).or_insert_with(|| slab.slab.clone());
                    slab.taken[place.slot as usize] = false;
                    gone.push(place);
                }
            }
            changed.iter().try_for_each(|(id, slab)| c.put_slab(*id, slab))?;
            Ok((gone, c.len()?))
        })?;
        self.entries = gone.1;
        self.free(&gone.0);
        Ok(())
    }

    /// A path of entries was found: they, and none before, are the last to go.
    ///
    /// # Errors
    /// The index's.
    pub fn touch(&mut self, keys: &[Key]) -> Result<(), Error> {
        self.clock += 1;
        let clock = self.clock;
        Ok(self.index.change(|c| {
            for key in keys {
                if let Some(mut entry) = c.get(key)? {
                    (entry.used, entry.hits) = (clock, entry.hits.saturating_add(1));
                    c.put(key, &entry)?;
                }
            }
            c.set_meta("clock", clock)
        })?)
    }

    /// Whether bits, entries and files agree; what does not, in words. Reads nothing of the slabs.
    ///
    /// # Errors
    /// Those of the files.
    pub fn disagreements(&self) -> Result<Vec<String>, Error> {
        let mut wrong = Vec::new();
        let mut named: HashMap<Place, Key> = HashMap::new();
        for (key, entry) in self.index.entries()? {
            for (part, bytes, place) in entry.parts {
                let slab = self.slabs.get(&place.slab);
                let taken = slab.is_some_and(|s| s.slab.taken.get(place.slot as usize) == Some(&true));
                let fits = slab.is_some_and(|s| s.slab.slot_bytes == slot::slot_bytes(bytes));
                if !taken || !fits {
                    wrong.push(format!("part {part} of {key:?} lies where nothing may: {place:?}"));
                }
                if let Some(other) = named.insert(place, key) {
                    wrong.push(format!("{key:?} and {other:?} share {place:?}"));
                }
            }
        }
        for (id, slab) in &self.slabs {
            let taken = slab.slab.taken.iter().enumerate().filter(|(_, taken)| **taken);
            let lost = taken.filter(|(slot, _)| !named.contains_key(&Place { slab: *id, slot: *slot as u32 })).count();
            if lost > 0 {
                wrong.push(format!("{lost} slots of slab {id} are taken by nobody"));
            }
        }
        for (name, _) in self.storage.list().map_err(io("looking through"))? {
            let number = name.strip_suffix(".slab").and_then(|n| n.parse::<u32>().ok());
            if number.is_some_and(|n| !self.slabs.contains_key(&n)) {
                wrong.push(format!("{name} is nobody's"));
            }
        }
        Ok(wrong)
    }
}
