//! Statistics for people, and whether everything in a cache is right.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use sluice_store::Buffer;

use super::error::io;
use super::index::{Key, Model, Place};
use super::slot::{self, Label};
use super::{DiskCache, Error};

/// What a cache has of one model.
#[derive(Clone, Debug, Default)]
pub struct ModelStat {
    /// Name and path are empty if they were never noted.
    pub model: Model,
    /// Entries.
    pub entries: u64,
    /// Those with a recurrent state.
    pub states: u64,
    /// Tokens of these entries.
    pub tokens: u64,
    /// Bytes of its slots.
    pub bytes: u64,
}

/// What a cache has.
#[derive(Clone, Debug, Default)]
pub struct Stat {
    /// Bytes that all files may take together.
    pub quota: u64,
    /// Bytes of all files, and of them of slabs.
    pub bytes: u64,
    /// Bytes of slabs.
    pub slab_bytes: u64,
    /// Slab files.
    pub slabs: u64,
    /// Whether slots are encrypted.
    pub encrypted: bool,
    /// Bytes written today (UTC).
    pub written_today: u64,
    /// By fingerprint.
    pub models: BTreeMap<u64, ModelStat>,
}

/// The outcome of [`DiskCache::verify`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Entries.
    pub entries: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Entries that were damaged; they are removed.
    pub wrong: u64,
    /// Entries whose predecessors are missing; they are removed.
    pub unreachable: u64,
}

impl DiskCache {
    /// Statistics of the cache.
    ///
    /// # Errors
    /// Those of the files: then nothing more should be asked of this cache.
    pub fn stat(&mut self) -> Result<Stat, Error> {
        self.attempt(|c| {
            c.remove_doomed()?;
            c.write_uses()?;
            let mut models: BTreeMap<u64, ModelStat> = BTreeMap::new();
            for (model, known) in c.index.models()? {
                models.entry(model).or_default().model = known;
            }
            for ((model, _), entry) in c.index.entries()? {
                let stat = models.entry(model).or_default();
                stat.entries += 1;
                stat.states += u64::from(entry.has_state());
                stat.tokens += u64::from(entry.tokens);
                stat.bytes += entry.parts.iter().map(|(_, bytes, _)| slot::slot_bytes(*bytes)).sum::<u64>();
            }
            let files = c.storage.list().map_err(io("looking through"))?;
            Ok(Stat {
                quota: c.quota,
                bytes: files.iter().map(|(_, len)| len).sum(),
                slab_bytes: c.bytes(),
                slabs: c.slabs.len() as u64,
                encrypted: c.cipher.is_some(),
                written_today: if c.today.0 == super::today() { c.today.1 } else { 0 },
                models,
            })
        })
    }

    /// Reads every slot and compares it with the index; damaged entries are removed. `done` is told how many of all
    /// entries are done.
    ///
    /// # Errors
    /// Those of the index: then nothing more should be asked of this cache.
    pub fn verify(&mut self, mut done: impl FnMut(u64, u64)) -> Result<Verified, Error> {
        self.attempt(|c| {
            c.remove_doomed()?;
            let all = c.index.entries()?;
            let mut verified = Verified { entries: all.len() as u64, ..Verified::default() };
            let mut wrong = Vec::new();
            for (i, (key, entry)) in all.iter().enumerate() {
                let mut right = true;
                for (part, bytes, place) in &entry.parts {
                    let label = Label {
                        part: *part,
                        bytes: *bytes,
                        model: key.0,
                        hash: key.1,
                        before: entry.before,
                        position: entry.position,
                        tokens: &[],
                    };
                    verified.bytes += slot::slot_bytes(*bytes);
                    right &= c.is_slot_right(&label, entry.tokens, *place)?;
                }
                if !right {
                    wrong.push(*key);
                }
                done(i as u64 + 1, verified.entries);
            }
            verified.wrong = wrong.len() as u64;
            c.counts.wrong += verified.wrong;
            c.common().doomed.extend(wrong);
            c.remove_doomed()?;
            verified.unreachable = c.remove_unreachable()?;
            Ok(verified)
        })
    }

    fn is_slot_right(&self, label: &Label, tokens: u32, place: Place) -> Result<bool, Error> {
        let Some(source) = self.lookups.source(label.bytes, place) else { return Ok(false) };
        let mut slot = Buffer::zeroed(source.len).map_err(io("reading"))?;
        if source.file.read_at(source.offset, &mut slot).is_err() {
            return Ok(false);
        }
        if let Some(cipher) = &self.cipher
            && !cipher.open(&mut slot)
        {
            return Ok(false);
        }
        // Only the slot knows the tokens.
        let Some((_, its)) = slot::label_of(&slot) else { return Ok(false) };
        let label = Label { tokens: &its, ..*label };
        Ok(its.len() == tokens as usize && slot::holds(&label, self.cipher.is_none(), &slot))
    }

    /// Removes entries whose predecessors are missing, and returns how many.
    fn remove_unreachable(&mut self) -> Result<u64, Error> {
        let all = self.index.entries()?;
        let mut there: BTreeSet<Key> = all.iter().map(|(key, _)| *key).collect();
        let mut gone = HashSet::new();
        loop {
            let before = there.len();
            for (key, entry) in &all {
                if entry.position > 0 && !there.contains(&(key.0, entry.before)) && there.remove(key) {
                    gone.insert(*key);
                }
            }
            if there.len() == before {
                break;
            }
        }
        let count = gone.len() as u64;
        self.common().doomed.extend(gone);
        self.remove_doomed()?;
        Ok(count)
    }

    /// Removes unreachable entries and unneeded slabs, and returns how many entries and bytes that were.
    ///
    /// # Errors
    /// Those of the files: then nothing more should be asked of this cache.
    pub fn collect_garbage(&mut self) -> Result<(u64, u64), Error> {
        let before = self.bytes();
        let removed = self.attempt(|c| {
            c.remove_doomed()?;
            c.remove_unreachable()
        })?;
        while self.shrink()? {}
        Ok((removed, before - self.bytes()))
    }

    /// Describes contradictions between bitmaps, entries and files. Does not read slabs.
    ///
    /// # Errors
    /// Those of the files.
    pub fn inconsistencies(&self) -> Result<Vec<String>, Error> {
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
