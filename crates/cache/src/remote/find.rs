//! How much of a prompt is in the store. Names are known from the prompt's tokens, so existence is asked for by name: of the first block that would be of use, and if it is
//! there, of sixteen at a time between what is known to be there and what is not. States of recurrent layers are where nobody can guess a name: they are listed by the
//! entry that they follow.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::calls::{Bound, End};
use super::handle::{Remote, add};
use super::names::{self, PartName};
use super::store::StoreError;
use crate::disk::{Entry, Place, STATE, slot_bytes};
use crate::prefix::{BlockHash, block_hash};

/// Calls at once.
const CALLS: usize = 16;
/// A prompt waits for a look-up this long, at most.
const PATIENCE: Duration = Duration::from_secs(1);
/// States are looked for after so many of the last blocks.
const MOST_LISTED: usize = 64;
/// Objects that follow one entry, at most, that are looked at.
const MOST_FOLLOWING: usize = 256;

/// What is looked for.
pub struct FindInStore<'a> {
    /// The store's secret.
    pub secret: [u8; 32],
    /// Fingerprint of the model.
    pub model: u64,
    /// What the first block follows, then the hash of each whole block of the prompt.
    pub path: &'a [BlockHash],
    /// All of the prompt's tokens.
    pub tokens: &'a [u32],
    /// Tokens of a block.
    pub block_tokens: usize,
    /// For each cache group its window, and the bytes of its blocks.
    pub groups: Vec<(Option<usize>, u64)>,
    /// Bytes of a recurrent state; 0 for models without.
    pub state_bytes: u64,
    /// So many blocks are nearer already.
    pub from: usize,
    /// It is of no use unless it has so many blocks.
    pub least: usize,
}

/// Entries in the store, as if they were on disk. Their place is [`Place::IN_STORE`].
#[derive(Debug, Default)]
pub struct InStore {
    /// By hash.
    pub entries: HashMap<BlockHash, Entry>,
    /// Entries of less than a block, with a state: by the entry before it, tokens and hash.
    pub following: HashMap<BlockHash, Vec<(u32, BlockHash)>>,
}

impl InStore {
    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn add(&mut self, hash: BlockHash, before: BlockHash, position: usize, tokens: usize, part: u32, bytes: u64) {
        let (position, tokens) = (position as u32, tokens as u32);
        let entry = self.entries.entry(hash);
        let entry = entry.or_insert(Entry { before, position, tokens, used: 0, hits: 0, parts: Vec::new() });
        if !entry.parts.iter().any(|(p, ..)| *p == part) {
            entry.parts.push((part, bytes, Place::IN_STORE));
        }
    }
}

impl FindInStore<'_> {
    fn part(&self, block: usize, part: u32) -> PartName {
        let (before, hash) = (self.path[block], self.path[block + 1]);
        PartName { model: self.model, before, hash, tokens: self.block_tokens as u32, part }
    }

    fn bytes(&self, part: u32) -> u64 {
        if part == STATE { self.state_bytes } else { self.groups.get(part as usize).map_or(0, |(_, bytes)| *bytes) }
    }

    /// The part that stands for a whole entry: it is uploaded last.
    fn key_part(&self) -> u32 {
        self.groups.iter().position(|(window, _)| window.is_none()).unwrap_or(0) as u32
    }
}

impl Remote {
    /// What the store has of a prompt beyond what is nearer. Takes a second at most.
    pub fn find(self: &Arc<Self>, q: &FindInStore) -> InStore {
        if !self.is_readable() {
            return InStore::default();
        }
        let bound = Bound { until: Instant::now() + PATIENCE, stall: PATIENCE };
        match self.find_until(q, bound) {
            Some(found) => found,
            None => {
                add(&self.counters.given_up, 1);
                InStore::default()
            }
        }
    }

    /// Notes whether a look-up found something of use.
    pub fn count_lookup(&self, was_of_use: bool) {
        add(if was_of_use { &self.counters.hits } else { &self.counters.misses }, 1);
    }

    /// `None`: the store failed, or the time was over.
    fn find_until(self: &Arc<Self>, q: &FindInStore, bound: Bound) -> Option<InStore> {
        let mut found = InStore::default();
        // 1. Blocks of groups that see everything
        let whole = self.extent(q, bound)?;
        if whole <= q.from && q.state_bytes == 0 {
            return Some(found);
        }
        let n = q.block_tokens;
        for block in q.from..whole {
            for (group, _) in (0..).zip(&q.groups).filter(|(_, (window, _))| window.is_none()) {
                found.add(q.path[block + 1], q.path[block], block * n, n, group, q.bytes(group));
            }
        }
        // 2. Blocks that windows see from there
        let mut windowed = Vec::new();
        for (group, (window, _)) in (0..).zip(&q.groups) {
            let Some(window) = window else { continue };
            let first = (whole * n + 1).saturating_sub(*window) / n;
            windowed.extend((first.max(q.from)..whole).map(|block| (block, q.part(block, group))));
        }
        let there = self.there(q, windowed.iter().map(|(_, part)| *part).collect(), bound)?;
        for ((block, part), _) in windowed.iter().zip(there).filter(|(_, there)| *there) {
            found.add(part.hash, part.before, block * n, n, part.part, q.bytes(part.part));
        }
        // 3. States
        if q.state_bytes > 0 {
            self.find_states(q, whole, &mut found, bound)?;
        }
        Some(found)
    }

    /// How many of the prompt's first blocks there are.
    fn extent(self: &Arc<Self>, q: &FindInStore, bound: Bound) -> Option<usize> {
        let (mut low, mut high) = (q.from, q.path.len() - 1);
        let least = q.least.clamp(low, high);
        let probe =
            |blocks: &[usize]| self.there(q, blocks.iter().map(|block| q.part(*block, q.key_part())).collect(), bound);
        if least > low {
            // A prompt that nobody has sent costs one call.
            if !probe(&[least - 1])?[0] {
                // Its beginning may end with a state.
                return if q.state_bytes > 0 { self.halve(low, least - 1, &probe) } else { Some(low) };
            }
            low = least;
        }
        if low < high {
            high = self.halve(low, high, &probe)?;
        }
        Some(high)
    }

    /// The number of leading blocks that are stored, which is between `low` and `high`; several probes at once.
    fn halve(&self, mut low: usize, mut high: usize, probe: &impl Fn(&[usize]) -> Option<Vec<bool>>) -> Option<usize> {
        while low < high {
            let calls = CALLS.min(high - low);
            let blocks: Vec<usize> = (1..=calls).map(|i| low + i * (high - low) / calls - 1).collect();
            let there = probe(&blocks)?;
            let leading = there.iter().take_while(|there| **there).count();
            if leading < blocks.len() {
                high = blocks[leading];
            }
            if leading > 0 {
                low = blocks[leading - 1] + 1;
            }
        }
        Some(low)
    }

    /// Which of these objects are there, with the right sizes.
    fn there(self: &Arc<Self>, q: &FindInStore, parts: Vec<PartName>, bound: Bound) -> Option<Vec<bool>> {
        let wanted: Vec<u64> = parts.iter().map(|part| slot_bytes(q.bytes(part.part))).collect();
        let mut there = vec![false; parts.len()];
        let names = parts.clone();
        let mut failed = false;
        let size = |remote: &Remote, part: PartName, patience| {
            let size = remote.store.size(&part.name(), patience);
            remote.after_read(&size);
            size
        };
        let end = self.each(parts, CALLS, bound, size, |i, size: Result<Option<u64>, StoreError>| {
            match size {
                Ok(Some(size)) if size == wanted[i] => {
                    there[i] = true;
                    self.note_present(&names[i]);
                }
                Ok(Some(_)) => self.note_wrong(&names[i]),
                Ok(None) => self.note_gone(&names[i]),
                Err(_) => failed = true,
            }
            !failed
        });
        if end == End::Late {
            self.after_read::<()>(&Err(StoreError::Timeout));
        }
        (end == End::Done).then_some(there)
    }

    /// Looks for states at the end of the last blocks, and within the block after each of them.
    fn find_states(self: &Arc<Self>, q: &FindInStore, whole: usize, found: &mut InStore, bound: Bound) -> Option<()> {
        let mut next = whole + 1;
        let last = (whole + 1).saturating_sub(MOST_LISTED);
        while next > last {
            let blocks: Vec<usize> = (next.saturating_sub(CALLS).max(last)..next).rev().collect();
            next = *blocks.last()?;
            let folders: Vec<String> = blocks.iter().map(|b| names::following(q.model, &q.path[*b])).collect();
            let mut lists: Vec<Vec<(PartName, u64)>> = vec![Vec::new(); blocks.len()];
            let mut failed = false;
            let list = |remote: &Remote, folder: String, patience| {
                let mut parts = Vec::new();
                let done = remote.store.list(&folder, patience, &mut |name, size| {
                    parts.extend(PartName::parse(name).map(|part| (part, size)));
                    parts.len() < MOST_FOLLOWING
                });
                remote.after_read(&done);
                done.map(|()| parts)
            };
            let end = self.each(folders, CALLS, bound, list, |i, parts| {
                match parts {
                    Ok(parts) => lists[i] = parts,
                    Err(_) => failed = true,
                }
                !failed
            });
            if end == End::Late {
                self.after_read::<()>(&Err(StoreError::Timeout));
            }
            if end != End::Done {
                return None;
            }
            let mut has_state = false;
            for (block, list) in blocks.into_iter().zip(lists) {
                has_state |= self.add_states(q, block, whole, &list, found);
            }
            // The deepest is the best.
            if has_state {
                break;
            }
        }
        Some(())
    }

    /// Adds the entries with a state that follow a block. Returns whether there were any.
    fn add_states(
        &self,
        q: &FindInStore,
        block: usize,
        whole: usize,
        list: &[(PartName, u64)],
        found: &mut InStore,
    ) -> bool {
        let (n, before) = (q.block_tokens, q.path[block]);
        let rest = &q.tokens[block * n..];
        let mut any = false;
        let fits = |part: &PartName, size: u64| {
            part.before == before && part.model == q.model && size == slot_bytes(q.bytes(part.part))
        };
        for (state, _) in list.iter().filter(|(part, size)| part.part == STATE && fits(part, *size)) {
            let tokens = state.tokens as usize;
            let is_block = tokens == n && block < whole && q.path[block + 1] == state.hash;
            let is_part = tokens < n
                && rest.get(..tokens).is_some_and(|tokens| block_hash(&q.secret, &before, tokens) == state.hash);
            if !is_block && !is_part {
                continue;
            }
            any = true;
            for (part, _) in list.iter().filter(|(part, size)| part.hash == state.hash && fits(part, *size)) {
                found.add(part.hash, before, block * n, tokens, part.part, q.bytes(part.part));
            }
            if is_part {
                found.following.entry(before).or_default().push((state.tokens, state.hash));
            }
        }
        any
    }
}
