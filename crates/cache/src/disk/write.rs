//! Writing: entries are kept, used and removed, in an order that a crash leaves whole. `docs/cache-format.md` has the argument.

use std::collections::{BTreeMap, HashSet};

use sluice_store::Buffer;

use super::error::io;
use super::index::{Entry, Key, Place, Slab};
use super::slot::{self, Label};
use super::{DiskCache, Error, now, today};
use crate::prefix::BlockHash;

/// An entry to be stored.
#[derive(Clone, Copy, Debug)]
pub struct NewEntry<'a> {
    /// Hash of all tokens up to its end.
    pub hash: BlockHash,
    /// Hash of the entry before it.
    pub before: BlockHash,
    /// Position of the first of `tokens`.
    pub position: u32,
    /// Its tokens.
    pub tokens: &'a [u32],
    /// (Number of the part, its bytes)
    pub parts: &'a [(u32, &'a [u8])],
}

/// The outcome of storing a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// How many of the batch's first entries are in the cache now.
    pub present: usize,
    /// How many of these were not there before.
    pub new: usize,
    /// Bytes written to slots.
    pub bytes: u64,
}

/// Uses that are collected before they are written to the index.
const MOST_USES: usize = 4096;
/// The kind of the note that the day's limit is reached.
const TODAY: &str = "the prompt cache has written what it may in a day";

impl DiskCache {
    /// Stores entries, in the order in which they follow each other. If an entry finds no slot, it and those after it
    /// are not stored.
    ///
    /// # Errors
    /// The files': then nothing more should be asked of this cache.
    pub fn store(&mut self, model: u64, batch: &[NewEntry]) -> Result<Stored, Error> {
        self.attempt(|c| c.store_batch(model, batch))
    }

    fn store_batch(&mut self, model: u64, batch: &[NewEntry]) -> Result<Stored, Error> {
        self.remove_doomed()?;
        let Some(first) = batch.first() else { return Ok(Stored::default()) };
        // 1. The entries before the batch are used now, too, so that no entry stays without its predecessors
        self.clock += 1;
        let mut held = self.mark_path_used(model, first.before)?;
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
                stored.present += 1;
                continue;
            }
            // 2. Slots, evicting what is older
            let sizes: Vec<u64> = new.parts.iter().map(|(_, bytes)| slot::slot_bytes(bytes.len() as u64)).collect();
            if !self.may_write(stored.bytes + sizes.iter().sum::<u64>()) {
                self.counts.refused += 1;
                break;
            }
            let Some(places) = self.allocate_slots(&sizes, &held, named.len() as u64)? else {
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
            stored.present += 1;
        }
        stored.new = named.len();
        // 4. The index names them once their bytes are durable
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

    /// Whether the day's limit allows so many more bytes.
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

    /// Removes entries. Their slots are free once that is durable. Entries that are being read are removed when that
    /// is over.
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn remove(&mut self, keys: &[Key]) -> Result<(), Error> {
        self.common().doomed.extend(keys);
        self.attempt(DiskCache::remove_doomed)
    }

    /// Notes that a path of entries was found: these are now the most recently used. It is remembered, and written
    /// with what is stored next.
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

    /// Marks an entry and all before it as used now, and returns them.
    fn mark_path_used(&mut self, model: u64, last: BlockHash) -> Result<HashSet<Key>, Error> {
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

    /// Writes uses of entries to the index.
    pub(super) fn write_uses(&mut self) -> Result<(), Error> {
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
}

#[cfg(test)]
mod tests {
    use super::super::Settings;
    use super::*;

    #[test]
    fn the_limit_is_that_of_a_day() {
        let dir = tempfile::tempdir().unwrap();
        let limited = Settings { quota: Some(64 << 20), daily_limit: Some(200_000), ..Settings::default() };
        let mut cache = DiskCache::open_folder(dir.path(), limited).unwrap();
        cache.today = (today(), 150_000);
        assert!(cache.may_write(50_000) && !cache.may_write(50_001));
        // Another day.
        cache.today.0 -= 1;
        assert!(cache.may_write(200_000) && !cache.may_write(200_001));
    }
}
