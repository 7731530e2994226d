//! Allocation of slots: where an entry goes, what is evicted for it, and how slabs are given back.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;

use sluice_store::Buffer;

use super::error::io;
use super::index::{Entry, Key, Place, Slab};
use super::slab::{OpenSlab, file_name};
use super::{DiskCache, Error};

/// One of so many entries is evicted in one transaction.
const EVICTED_AT_ONCE: usize = 256;
/// Under pressure a slab is compacted if no more than one of so many of its slots is taken.
const NEARLY_EMPTY: usize = 4;

impl DiskCache {
    /// Allocates a slot of each of these sizes, in memory only. `None`, and none is allocated, if one cannot be had.
    pub(super) fn allocate_slots(
        &mut self,
        sizes: &[u64],
        held: &HashSet<Key>,
        unnamed: u64,
    ) -> Result<Option<Vec<Place>>, Error> {
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
                if self.new_slab(size)?
                    || self.free_empty_slab()?
                    || self.compact_one_slab(Some(size), NEARLY_EMPTY)?
                    || self.evict(held)? > 0
                {
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
        self.free_slot_outside(size, None)
    }

    fn free_slot_outside(&self, size: u64, but: Option<u32>) -> Option<Place> {
        let fits = self.slabs.iter().filter(|(id, s)| s.slab.slot_bytes == size && Some(**id) != but);
        fits.into_iter().find_map(|(id, s)| {
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

    /// Makes one more slab, if the quota allows it.
    fn new_slab(&mut self, slot_bytes: u64) -> Result<bool, Error> {
        let slots = (self.slab_bytes / slot_bytes).clamp(1, 4096);
        if self.bytes() + slots * slot_bytes > self.slab_quota {
            return Ok(false);
        }
        let id = self.next_slab;
        self.next_slab += 1;
        let made = || {
            let file = self.storage.open(&file_name(id), true)?;
            file.set_len(slots * slot_bytes)?;
            file.sync()?;
            self.storage.sync_names()?;
            io::Result::Ok(file)
        };
        let file = match made() {
            Ok(file) => file,
            // The disk is full before the quota is reached: the cache stays as large as it is.
            Err(e) if [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded].contains(&e.kind()) => {
                self.slab_quota = self.bytes();
                self.note(format!("the disk is full: the prompt cache stays at {} bytes", self.slab_quota));
                match self.storage.remove(&file_name(id)) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io("growing")(e)),
                    _ => self.storage.sync_names().map_err(io("growing"))?,
                }
                return Ok(false);
            }
            Err(e) => return Err(io("growing")(e)),
        };
        let slab = Slab { slot_bytes, taken: vec![false; slots as usize] };
        self.index.change(|c| {
            c.put_slab(id, &slab)?;
            c.set_meta("next slab", u64::from(id) + 1)
        })?;
        let slab = OpenSlab { file, slab, reserved: HashSet::new() };
        self.publish_slab(id, &slab);
        self.slabs.insert(id, slab);
        Ok(true)
    }

    /// Removes an empty slab, and returns whether there was one.
    pub(super) fn free_empty_slab(&mut self) -> Result<bool, Error> {
        let Some((&id, _)) = self.slabs.iter().find(|(_, s)| !s.slab.taken.contains(&true) && s.reserved.is_empty())
        else {
            return Ok(false);
        };
        self.index.change(|c| c.remove_slab(id))?;
        self.unlink(id)?;
        Ok(true)
    }

    /// Evicts the least recently used entries that are neither in `held` nor being read, and returns how many.
    pub(super) fn evict(&mut self, held: &HashSet<Key>) -> Result<usize, Error> {
        // A transaction takes milliseconds: a large cache evicts several entries in one.
        let most = (self.entries as usize / EVICTED_AT_ONCE).max(1);
        self.write_uses()?;
        let mut victims = Vec::new();
        let holds: HashSet<Key> = self.common().pins.keys().copied().collect();
        let named = self.named()?;
        // Named entries are evicted only if there are no others.
        for spare in [Some(&*named), None] {
            self.index.change(|c| {
                c.oldest(|key| {
                    let spared = spare.is_some_and(|named| named.contains(key));
                    if !spared && !held.contains(key) && !holds.contains(key) {
                        victims.push(*key);
                    }
                    victims.len() < most
                })
            })?;
            if !victims.is_empty() || named.is_empty() {
                break;
            }
        }
        // From here on no read of them begins. Entries whose read has begun meanwhile are not evicted.
        {
            let mut common = self.common();
            victims.retain(|key| !common.pins.contains_key(key));
            common.doomed.extend(&victims);
        }
        self.counts.evicted += victims.len() as u64;
        self.remove_entries(&victims)?;
        if victims.iter().any(|key| named.contains(key)) {
            self.named = None;
        }
        let mut common = self.common();
        victims.iter().for_each(|key| _ = common.doomed.remove(key));
        Ok(victims.len())
    }

    /// Removes entries from the index. Their slots are free once that is durable.
    pub(super) fn remove_entries(&mut self, keys: &[Key]) -> Result<(), Error> {
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
                    // An index that was tampered with may say anything.
                    if let Some(taken) = slab.taken.get_mut(place.slot as usize) {
                        *taken = false;
                        gone.push(place);
                    }
                }
            }
            changed.iter().try_for_each(|(id, slab)| c.put_slab(*id, slab))?;
            Ok((gone, c.len()?))
        })?;
        self.entries = gone.1;
        self.free(&gone.0);
        Ok(())
    }

    /// Gives one slab back, if its entries fit in others, and returns whether it did: call it again then. To be called
    /// when there is nothing else to do: it also releases memory that reads have kept.
    ///
    /// # Errors
    /// Those of the files: then nothing more should be asked of this cache.
    pub fn shrink(&mut self) -> Result<bool, Error> {
        self.memory.release();
        self.attempt(|c| {
            c.remove_doomed()?;
            Ok(c.free_empty_slab()? || c.compact_one_slab(None, 1)?)
        })
    }

    /// Moves the entries of a slab to others of its size, and removes it. Not a slab of slots of `but` bytes, nor one
    /// with more than one of `part` slots taken. Returns whether there was one.
    pub(super) fn compact_one_slab(&mut self, but: Option<u64>, part: usize) -> Result<bool, Error> {
        // 1. The emptiest of each size, if the others have room
        let mut free: HashMap<u64, usize> = HashMap::new();
        let mut emptiest: HashMap<u64, (usize, u32)> = HashMap::new();
        for (id, slab) in &self.slabs {
            let (size, taken) = (slab.slab.slot_bytes, slab.taken());
            *free.entry(size).or_default() += slab.slab.taken.len() - taken - slab.reserved.len();
            let least = emptiest.entry(size).or_insert((taken, *id));
            // Later slabs rather than earlier ones, which are filled first.
            *least = if taken <= least.0 { (taken, *id) } else { *least };
        }
        let held: HashSet<u32> = {
            let mut held = HashSet::new();
            let keys: Vec<Key> = {
                let common = self.common();
                common.pins.keys().chain(&common.doomed).copied().collect()
            };
            for key in &keys {
                held.extend(self.index.entry(key)?.into_iter().flat_map(|e| e.parts).map(|(.., place)| place.slab));
            }
            held
        };
        let found = emptiest.into_iter().find(|(size, (taken, id))| {
            let slab = &self.slabs[id];
            let all = slab.slab.taken.len();
            let elsewhere = free[size] - (all - taken - slab.reserved.len());
            *taken > 0
                && slab.reserved.is_empty()
                && Some(*size) != but
                && taken * part <= all
                && elsewhere >= *taken
                && !held.contains(id)
        });
        let Some((size, (_, from))) = found else { return Ok(false) };
        // 2. Slots are copied as they are: their contents do not depend on their place
        let mut moved: Vec<(Key, Entry)> = Vec::new();
        let mut targets: HashSet<Place> = HashSet::new();
        let mut lost = Vec::new();
        let mut buffer = Buffer::zeroed(size as usize).map_err(io("shrinking"))?;
        let all = self.index.entries()?;
        'entries: for (key, mut entry) in all {
            if !entry.parts.iter().any(|(.., place)| place.slab == from) {
                continue;
            }
            for (.., place) in entry.parts.iter_mut().filter(|(.., place)| place.slab == from) {
                let source = u64::from(place.slot) * size;
                if self.slabs[&from].file.read_at(source, &mut buffer).is_err() {
                    lost.push(key);
                    continue 'entries;
                }
                let Some(to) = self.free_slot_outside(size, Some(from)) else {
                    lost.push(key);
                    continue 'entries;
                };
                let own = self.slabs.get_mut(&to.slab).expect("it was found");
                own.reserved.insert(to.slot);
                own.file.write_at(u64::from(to.slot) * size, &buffer).map_err(io("shrinking"))?;
                targets.insert(to);
                self.counts.moved += size;
                *place = to;
            }
            moved.push((key, entry));
        }
        let synced: HashSet<u32> = targets.iter().map(|place| place.slab).collect();
        for id in synced {
            self.slabs[&id].file.sync().map_err(io("shrinking"))?;
        }
        for place in &targets {
            self.slabs.get_mut(&place.slab).expect("it was found").reserved.remove(&place.slot);
        }
        // 3. Entries that cannot be read are removed. The others have moved once that is durable, and the slab is
        // unused
        self.counts.wrong += lost.len() as u64;
        self.remove_entries(&lost)?;
        let mut changed: BTreeMap<u32, Slab> = BTreeMap::new();
        let places = moved.iter().flat_map(|(_, entry)| &entry.parts).map(|(.., place)| *place);
        for place in places.filter(|place| targets.contains(place)) {
            let slab = changed.entry(place.slab).or_insert_with(|| self.slabs[&place.slab].slab.clone());
            slab.taken[place.slot as usize] = true;
        }
        self.index.change(|c| {
            moved.iter().try_for_each(|(key, entry)| c.put(key, entry))?;
            changed.iter().try_for_each(|(id, slab)| c.put_slab(*id, slab))?;
            c.remove_slab(from)
        })?;
        for (id, slab) in changed {
            self.slabs.get_mut(&id).expect("it was found").slab = slab;
        }
        self.unlink(from)?;
        Ok(true)
    }

    /// Removes the file of a slab that the index does not name any more.
    fn unlink(&mut self, id: u32) -> Result<(), Error> {
        self.storage.remove(&file_name(id)).map_err(io("shrinking"))?;
        // It counts against the quota until its removal is durable.
        self.storage.sync_names().map_err(io("shrinking"))?;
        self.slabs.remove(&id);
        self.common().files.remove(&id);
        Ok(())
    }
}
