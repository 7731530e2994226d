//! Keys, values and states that the caches had no room for any more, in memory of this machine: what a device's memory gives up comes here, and goes back when a prompt begins
//! alike, instead of being computed again. A block is in one of the two places; what was here for longest goes first.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use sluice_backend::{Backend, KvPool};
use sluice_cache::{BlockHash, EvictedNode, KvCache, RestoreSpan, RestoreTarget};
use sluice_store::Memory;

use crate::prompt_cache::{PromptCache, Restore, Shape, settled};
use crate::runner::Runner;
use crate::sequence::Sequence;

/// What is there, and what came of it since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spilled {
    /// Bytes that it may take, and that blocks and states in it have.
    pub budget: u64,
    pub bytes: u64,
    /// Blocks of tokens that came here since the start, and that found no room or had to go again.
    pub blocks: u64,
    pub lost: u64,
    /// Tokens of prompts that went back from here.
    pub returned_tokens: u64,
}

/// Memory is taken in runs of so many bytes at most, and of that part of all that there may be, so that no class of places has everything; or of one place where that is larger.
const RUN: usize = 64 << 20;
const PART: usize = 32;

/// A part of an entry: the place of a block of a cache group, or of a state, which is free again once this is dropped.
struct Place {
    class: usize,
    at: At,
    free: Arc<Mutex<Free>>,
}

#[derive(Clone, Copy)]
struct At {
    run: usize,
    from: usize,
}

/// Places by class: that of each cache group, and last that of states.
type Free = Vec<Vec<At>>;

fn lock(free: &Mutex<Free>) -> MutexGuard<'_, Free> {
    free.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.free)[self.class].push(self.at);
    }
}

/// A node of the prefix tree that is here.
struct Entry {
    came: u64,
    before: BlockHash,
    position: usize,
    tokens: Vec<u32>,
    /// `[groups + 1]`: the last is the state behind it.
    parts: Vec<Option<Place>>,
}

/// What goes back to a sequence before its next step.
pub(crate) struct Returning {
    to: usize,
    /// Tokens of it that were in the caches.
    present: usize,
    fillings: Vec<(RestoreTarget, Place)>,
    /// Nodes that are in the caches again, and not kept here any more.
    nodes: Vec<BlockHash>,
}

pub(crate) struct Spill {
    shape: Shape,
    budget: usize,
    /// Bytes of a place of each class.
    sizes: Vec<usize>,
    /// How many places of each there are.
    places: Vec<usize>,
    runs: Vec<Box<dyn Memory>>,
    free: Arc<Mutex<Free>>,
    entries: HashMap<BlockHash, Entry>,
    /// By when they came.
    order: BTreeMap<u64, BlockHash>,
    /// Entries that are a part of a block, by the node before them.
    ends: HashMap<BlockHash, Vec<BlockHash>>,
    clock: u64,
    done: Spilled,
}

impl Spill {
    /// Up to `budget` bytes, which are taken as they are needed.
    pub fn new(shape: Shape, budget: u64) -> Spill {
        let sizes: Vec<usize> = shape.block_bytes.iter().copied().chain([shape.state_bytes]).collect();
        Spill {
            budget: usize::try_from(budget).unwrap_or(usize::MAX),
            places: vec![0; sizes.len()],
            runs: Vec::new(),
            free: Arc::new(Mutex::new(vec![Vec::new(); sizes.len()])),
            entries: HashMap::new(),
            order: BTreeMap::new(),
            ends: HashMap::new(),
            clock: 0,
            done: Spilled { budget, ..Spilled::default() },
            sizes,
            shape,
        }
    }

    pub fn status(&self) -> Spilled {
        let parts = self.entries.values().flat_map(|e| e.parts.iter().flatten());
        Spilled { bytes: parts.map(|p| self.sizes[p.class] as u64).sum(), ..self.done }
    }

    fn bytes(&mut self, at: At, class: usize) -> &mut [u8] {
        &mut self.runs[at.run].bytes_mut()[at.from..at.from + self.sizes[class]]
    }

    /// A place that nobody has, for which what came first has to go where there is none.
    fn place(&mut self, class: usize, backend: &mut dyn Backend) -> Option<Place> {
        loop {
            let at = lock(&self.free)[class].pop();
            if let Some(at) = at {
                return Some(Place { class, at, free: Arc::clone(&self.free) });
            }
            let len = self.sizes[class];
            let taken: usize = self.runs.iter().map(|run| run.len()).sum();
            // A run has whole places; the last may be a short one.
            let most = (self.budget.saturating_sub(taken) / len).min((RUN.min(self.budget / PART) / len).max(1));
            if most > 0
                && let Ok(run) = backend.lend_memory(most * len)
            {
                let number = self.runs.len();
                lock(&self.free)[class].extend((0..most).map(|i| At { run: number, from: i * len }));
                self.runs.push(run);
                self.places[class] += most;
                continue;
            }
            // Where there is none of this class, nobody's going helps.
            let (_, oldest) = self.order.first_key_value().filter(|_| self.places[class] > 0)?;
            let oldest = *oldest;
            self.take(&oldest);
            self.done.lost += 1;
        }
    }

    /// Takes an entry out.
    fn take(&mut self, hash: &BlockHash) -> Option<Entry> {
        let entry = self.entries.remove(hash)?;
        self.order.remove(&entry.came);
        if let Some(ends) = self.ends.get_mut(&entry.before) {
            ends.retain(|end| end != hash);
            if ends.is_empty() {
                self.ends.remove(&entry.before);
            }
        }
        Some(entry)
    }

    /// Copies what is about to be overwritten.
    pub fn keep(&mut self, leaving: &EvictedNode, backend: &mut dyn Backend, kv: &[KvPool]) {
        let groups = self.shape.block_bytes.len();
        // What a window has moved beyond since may be here already.
        let mut parts = self.take(&leaving.hash).map_or_else(Vec::new, |entry| entry.parts);
        parts.resize_with(groups + 1, || None);
        self.done.blocks += 1;
        let sources = leaving.blocks.iter().copied().chain([leaving.state]).enumerate();
        for (class, source) in sources.filter_map(|(class, source)| Some((class, source?))) {
            let Some(place) = parts[class].take().or_else(|| self.place(class, backend)) else {
                self.done.lost += 1;
                return;
            };
            let to = self.bytes(place.at, class);
            match kv.get(class) {
                Some(pool) => backend.read_block(pool, source, to),
                None => backend.read_state(source, bytemuck::cast_slice_mut(to)),
            }
            parts[class] = Some(place);
        }
        self.clock += 1;
        let EvictedNode { hash, before, position, ref tokens, .. } = *leaving;
        let (came, tokens, position) = (self.clock, tokens.clone(), position as usize);
        if tokens.len() < self.shape.block_tokens {
            self.ends.entry(before).or_default().push(hash);
        }
        self.order.insert(came, hash);
        self.entries.insert(hash, Entry { came, before, position, tokens, parts });
    }

    fn entry(&self, hash: &BlockHash, before: &BlockHash, position: usize, tokens: &[u32]) -> Option<&Entry> {
        // A hash proves nothing.
        let is_it = |e: &&Entry| e.before == *before && e.position == position && e.tokens == tokens;
        self.entries.get(hash).filter(is_it)
    }

    /// The longest prefix that the caches and this have between them, behind more than `usable` tokens; its nodes from the first on.
    fn find(&self, s: &Sequence, cache: &KvCache, most: usize, usable: usize) -> Option<(RestoreSpan, Vec<BlockHash>)> {
        let (n, tokens) = (self.shape.block_tokens, &s.tokens[..most]);
        let groups = self.shape.block_bytes.len();
        let has_states = self.shape.state_bytes > 0;
        let present = cache.memory_match(s.root, tokens, most).groups;
        // 1. As far as the layers go that see everything
        let mut path = vec![s.root];
        let has = |i: usize, path: &[BlockHash], g: usize| {
            let here = || {
                let entry = self.entry(&path[i + 1], &path[i], i * n, &tokens[i * n..(i + 1) * n]);
                entry.is_some_and(|e| e.parts[g].is_some())
            };
            present.get(i).is_some_and(|bits| bits >> g & 1 == 1) || here()
        };
        for (i, block) in tokens.chunks_exact(n).enumerate() {
            path.push(cache.hash_behind(&path[i], block)?);
            let mut full = (0..groups).filter(|g| self.shape.windows[*g].is_none());
            // Of a model of windows alone some group has each block that a prompt may go on behind.
            if !full.all(|g| has(i, &path, g)) || !(0..groups).any(|g| has(i, &path, g)) {
                path.pop();
                break;
            }
        }
        // 2. From the end back, until windows and a state are there too
        for whole in (0..path.len()).rev() {
            let rest = &tokens[whole * n..];
            let mut ends: Vec<(usize, Option<BlockHash>)> = Vec::new();
            if has_states {
                for hash in self.ends.get(&path[whole]).into_iter().flatten() {
                    let entry = &self.entries[hash];
                    let is_ours = rest.starts_with(&entry.tokens) && entry.position == whole * n;
                    if is_ours && entry.parts.iter().all(Option::is_some) {
                        ends.push((entry.tokens.len(), Some(*hash)));
                    }
                }
                ends.sort_unstable_by_key(|(tail, _)| std::cmp::Reverse(*tail));
            }
            let state_here = || {
                let before = whole.checked_sub(1)?;
                let entry = self.entry(&path[whole], &path[before], before * n, &tokens[before * n..whole * n])?;
                entry.parts[groups].as_ref()
            };
            if !has_states || state_here().is_some() {
                ends.push((0, None));
            }
            for (tail, end) in ends {
                let to = whole * n + tail;
                if to <= usable {
                    return None;
                }
                let firsts: Vec<usize> = self.shape.first_blocks(to).collect();
                if (0..groups).all(|g| (firsts[g]..whole).all(|i| has(i, &path, g))) {
                    path.truncate(whole + 1);
                    path.extend(end);
                    path.remove(0);
                    return Some((RestoreSpan { whole, tail }, path));
                }
            }
        }
        None
    }

    /// A sequence's turn has come: it takes what is here of its prompt, if that is more than the caches have and than was found elsewhere, and goes on once it is in its place
    /// ([`attend`]).
    pub fn begin(&mut self, s: &mut Sequence, cache: &mut KvCache) -> bool {
        if !s.shares || self.entries.is_empty() {
            return false;
        }
        let most = s.tokens.len() - 1;
        let present = cache.would_reuse(s.root, &s.tokens, most);
        let Some((wanted, path)) = self.find(s, cache, most, present.max(s.restore.reach())) else { return false };
        let groups = self.shape.block_bytes.len();
        let class = |group: usize| group.min(groups);
        let may_fill = |node: usize, group: usize| {
            let entry = path.get(node).and_then(|hash| self.entries.get(hash));
            entry.is_some_and(|e| e.parts[class(group)].is_some())
        };
        let Some(fillings) = cache.reserve_restore(&mut s.held, s.root, &s.tokens, wanted, may_fill) else {
            return false;
        };
        let mut nodes: Vec<BlockHash> = Vec::new();
        let fillings = fillings.into_iter().map(|filling| {
            let (node, class) = match filling {
                RestoreTarget::Block { node, group, .. } => (node, group),
                RestoreTarget::State { node, .. } => (node, groups),
            };
            let entry = self.entries.get_mut(&path[node]).expect("it may be filled");
            nodes.push(path[node]);
            (filling, entry.parts[class].take().expect("it may be filled"))
        });
        let fillings = fillings.collect();
        nodes.dedup();
        // What else they have is of no use here: it is there, or seen by nobody.
        nodes.iter().for_each(|hash| _ = self.take(hash));
        let to = wanted.whole * self.shape.block_tokens + wanted.tail;
        s.restore = Restore::Returning(Returning { to, present, fillings, nodes });
        true
    }

    /// Puts what goes back in its place.
    fn fill(&mut self, returning: &Returning, runner: &mut Runner) -> Result<()> {
        for (filling, place) in &returning.fillings {
            runner.fill(*filling, self.bytes(place.at, place.class))?;
        }
        self.done.returned_tokens += (returning.to - returning.present) as u64;
        Ok(())
    }
}

/// Sequences whose turn has come get what is here of their prompts.
///
/// # Errors
/// Those of [`Runner::settle`].
pub(crate) fn poll_restores(
    sequences: &mut [Sequence],
    cache: &mut KvCache,
    runner: &mut Runner,
    mut disk: Option<&mut PromptCache>,
) -> Result<()> {
    for s in sequences.iter_mut().filter(|s| s.running.is_some()) {
        let Restore::Returning(_) = &s.restore else { continue };
        let Restore::Returning(returning) = std::mem::replace(&mut s.restore, Restore::Over) else { continue };
        // Blocks may have been others' until now, who wanted them copied.
        runner.carry_out(cache, disk.as_deref_mut())?;
        let Some(mut spill) = runner.spill.take() else { continue };
        let filled = spill.fill(&returning, runner);
        let has_states = spill.shape.state_bytes > 0;
        runner.spill = Some(spill);
        filled?;
        settled(s, cache, returning.to, has_states);
        returning.nodes.iter().for_each(|hash| cache.forget_offloaded(hash));
    }
    Ok(())
}
