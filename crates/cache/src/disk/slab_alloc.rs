//! Slots and slabs: where there is room for an entry, what is evicted for it, and how slabs are given back.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;

use sluice_store::Buffer;

use super::error::io;
use super::index::{Entry, Key, Place, Slab};
use super::slab::{OpenSlab, name_of};
use super::{DiskCache, Error};

/// Of so many entries, one is evicted at once.
const EVICTED_AT_ONCE: usize = 256;
/// Under pressure a slab is emptied by moving what is in it, if no more than one of so many of its slots is taken.
const NEARLY_EMPTY: usize = 4;

impl DiskCache {
    /// A free slot of each of these sizes, taken in memory only. `None` where there is none to be had, then none is taken.
    pub(super) fn find_room(
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
                    || self.drop_empty()?
                    || self.empty_one(Some(size), NEARLY_EMPTY)?
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
        self.free_slot_but(size, None)
    }

    fn free_slot_but(&self, size: u64, but: Option<u32>) -> Option<Place> {
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

    /// One more slab, if the quota has room for it.
    fn new_slab(&mut self, slot_bytes: u64) -> Result<bool, Error> {
        let slots = (self.slab_bytes / slot_bytes).clamp(1, 4096);
        if self.bytes() + slots * slot_bytes > self.slab_quota {
            return Ok(false);
        }
        let id = self.next_slab;
        self.next_slab += 1;
        let made = || {
            let file = self.storage.open(&name_of(id), true)?;
            file.set_len(slots * slot_bytes)?;
            file.sync()?;
            self.storage.sync_names()?;
            io::Result::Ok(file)
        };
        let file = match made() {
            Ok(file) => file,
            // The disk is full before the quota is: what there is must do.
            Err(e) if [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded].contains(&e.kind()) => {
                self.slab_quota = self.bytes();
                self.note(format!("the disk is full: the prompt cache stays at {} bytes", self.slab_quota));
                match self.storage.remove(&name_of(id)) {
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
        self.show(id, &slab);
        self.slabs.insert(id, slab);
        Ok(true)
    }

    /// Gives a slab back in which nothing lies. Whether there was one.
    pub(super) fn drop_empty(&mut self) -> Result<bool, Error> {
        let Some((&id, _)) = self.slabs.iter().find(|(_, s)| !s.slab.taken.contains(&true) && s.reserved.is_empty())
        else {
            return Ok(false);
        };
        self.index.change(|c| c.remove_slab(id))?;
        self.unlink(id)?;
        Ok(true)
    }

    /// Evicts some entries, the longest unused first, but `held` ones and those that are being read. How many.
    pub(super) fn evict(&mut self, held: &HashSet<Key>) -> Result<usize, Error> {
        // A transaction takes milliseconds: of many entries, a few at once.
        let most = (self.entries as usize / EVICTED_AT_ONCE).max(1);
        self.write_uses()?;
        let mut victims = Vec::new();
        let holds: HashSet<Key> = self.common().holds.keys().copied().collect();
        let named = self.named()?;
        // What has a name goes when there is nothing else.
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
        // From here on nobody begins to read them; who has begun meanwhile keeps what he reads.
        {
            let mut common = self.common();
            victims.retain(|key| !common.holds.contains_key(key));
            common.doomed.extend(&victims);
        }
        self.counts.evicted += victims.len() as u64;
        self.take_out(&victims)?;
        if victims.iter().any(|key| named.contains(key)) {
            self.named = None;
        }
        let mut common = self.common();
        victims.iter().for_each(|key| _ = common.doomed.remove(key));
        Ok(victims.len())
    }

    /// Takes entries out; their slots are free once that is durable.
    pub(super) fn take_out(&mut self, keys: &[Key]) -> Result<(), Error> {
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
                    // An index that somebody changed may say anything.
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

    /// Gives a slab back, if there is one whose entries have room elsewhere. Whether there was: to be called again then. For when there is nothing else to do:
    /// memory that reads have kept goes too.
    ///
    /// # Errors
    /// Those of the files: then nothing more should be asked of this cache.
    pub fn shrink(&mut self) -> Result<bool, Error> {
        self.memory.release();
        self.attempt(|c| {
            c.settle()?;
            Ok(c.drop_empty()? || c.empty_one(None, 1)?)
        })
    }

    /// Moves what is left in a slab to others of its size, and gives it back. Not one of slots of `but` bytes, nor one of whose slots more than one
    /// of `part` is taken. Whether there was one.
    pub(super) fn empty_one(&mut self, but: Option<u64>, part: usize) -> Result<bool, Error> {
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
                common.holds.keys().chain(&common.doomed).copied().collect()
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
        // 2. Slots are copied as they are: what they say does not depend on where they lie
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
                let Some(to) = self.free_slot_but(size, Some(from)) else {
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
        // 3. Entries that cannot be read go; the others lie elsewhere once that is durable, and the slab is nobody's
        self.counts.wrong += lost.len() as u64;
        self.take_out(&lost)?;
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

    /// Removes a slab that the index does not name any more.
    fn unlink(&mut self, id: u32) -> Result<(), Error> {
        self.storage.remove(&name_of(id)).map_err(io("shrinking"))?;
        // Until it is gone for good it counts.
        self.storage.sync_names().map_err(io("shrinking"))?;
        self.slabs.remove(&id);
        self.common().files.remove(&id);
        Ok(())
    }
}
