//! Reads recently used prefixes into the caches while the engine is idle after a start. It fills half of the free blocks at most, evicts nothing, and stops as soon
//! as a generation starts.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Result;
use sluice_cache::disk::{Chain, Lookups, STATE};
use sluice_cache::{KvCache, RestoreSpan};

use super::lookup::{FoundPrefix, PrefixQuery};
use super::restorer::{Restorer, begin_restore_in_batches};
use crate::schedule::sequence::{Sequence, SequenceId};
use crate::tiers::block_io::BlockIo;
use crate::tiers::restore::Restore;

/// One part in this many of what is free may be filled.
const PART: usize = 2;
/// Bytes that are requested at a time, which is what a generation may have to wait for.
const BATCH_BYTES: u64 = 4 << 20;
/// How long a portion waits for the disk. A generation that starts waits for it.
const PORTION: Duration = Duration::from_millis(1);
/// How often the thread that lists chains checks whether it may continue.
const PAUSE: Duration = Duration::from_millis(5);

#[derive(Default)]
enum Stage {
    /// Takes the next chain.
    #[default]
    Next,
    LookingUp(Box<Sequence>, Receiver<FoundPrefix>),
    Reading(Box<Sequence>),
    /// There are no more chains, or no more room.
    Done,
}

/// Blocks and rows that have to stay free.
struct Reserve {
    /// Blocks: `[groups]`.
    blocks: Vec<usize>,
    states: usize,
}

/// Flags for the thread that lists chains.
#[derive(Default)]
struct Flags {
    pause: AtomicBool,
    end: AtomicBool,
}

/// Prefetches one chain after the other.
pub(super) struct Prefetch {
    lookups: Option<Lookups>,
    stage: Stage,
    reserve: Option<Reserve>,
    chains: Option<Receiver<Chain>>,
    /// A chain to read before the listed ones: interrupted, or requested.
    next: Option<Chain>,
    /// Whether the chain in `next`, or being read, was requested, so that it is more than a guess.
    is_requested: bool,
    lister: Option<JoinHandle<()>>,
    flags: Arc<Flags>,
    /// Tokens that were read.
    tokens: u64,
}

impl Prefetch {
    pub fn new(lookups: Lookups) -> Prefetch {
        Prefetch {
            lookups: Some(lookups),
            stage: Stage::Next,
            reserve: None,
            chains: None,
            next: None,
            is_requested: false,
            lister: None,
            flags: Arc::default(),
            tokens: 0,
        }
    }

    /// Tokens that were read.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Whether a chain is being read.
    pub fn is_reading(&self) -> bool {
        matches!(self.stage, Stage::Reading(_))
    }

    /// Ends the thread, after which nothing here uses the folder.
    pub fn end(&mut self) {
        (self.stage, self.lookups, self.chains) = (Stage::Done, None, None);
        self.flags.end.store(true, Ordering::Relaxed);
        if let Some(lister) = self.lister.take() {
            let _ = lister.join();
        }
    }

    /// Starts a thread that lists `max` chains and reads their tokens. Returns whether it could.
    fn start_listing(&mut self, model: u64, max: usize) -> bool {
        let Some(lookups) = self.lookups.take() else { return false };
        let (out, chains) = sync_channel(1);
        let flags = Arc::clone(&self.flags);
        let work = move || list_chains(&lookups, model, max, &flags, &out);
        self.lister = thread::Builder::new().name("prompt-prefetch".into()).spawn(work).ok();
        self.chains = Some(chains);
        self.lister.is_some()
    }

    /// Does a portion of the work, for a few milliseconds. Returns whether there is more to do now. For a chain that is being read, all queued block
    /// operations are applied.
    ///
    /// # Errors
    /// When there is no memory for blocks.
    pub fn run_portion(&mut self, restorer: &mut Restorer, cache: &mut KvCache, io: &mut dyn BlockIo) -> Result<bool> {
        if restorer.shared.summing().is_some() {
            return Ok(false);
        }
        if !restorer.shared.is_ok() {
            self.interrupt(restorer, cache);
            self.stage = Stage::Done;
        }
        self.flags.pause.store(false, Ordering::Relaxed);
        match std::mem::take(&mut self.stage) {
            Stage::Next => self.next_chain(restorer, cache),
            Stage::LookingUp(s, replies) => match replies.recv_timeout(PORTION) {
                Ok(found) => self.start_reading(s, found, restorer, cache),
                Err(RecvTimeoutError::Timeout) => self.stage = Stage::LookingUp(s, replies),
                // The caches have it already, or it is gone.
                Err(RecvTimeoutError::Disconnected) => {}
            },
            Stage::Reading(mut s) => {
                restorer.receive(&mut s, cache, io, Some(PORTION))?;
                match s.restore {
                    Restore::FromDisk(_) => self.stage = Stage::Reading(s),
                    _ => self.finish_chain(s, restorer, cache),
                }
            }
            Stage::Done => self.stage = Stage::Done,
        }
        if matches!(self.stage, Stage::Done) {
            self.chains = None;
        }
        Ok(!matches!(self.stage, Stage::Done))
    }

    /// Reads this chain next.
    pub fn request(&mut self, chain: Chain) {
        (self.next, self.is_requested) = (Some(chain), true);
        if matches!(self.stage, Stage::Done) {
            self.stage = Stage::Next;
        }
    }

    /// Stops. Blocks that were read stay, and the rest is read when the engine is idle again.
    pub fn interrupt(&mut self, restorer: &mut Restorer, cache: &mut KvCache) {
        self.flags.pause.store(true, Ordering::Relaxed);
        match std::mem::take(&mut self.stage) {
            Stage::Reading(mut s) => {
                self.next = Some(Chain { root: s.root, tokens: s.tokens.clone() });
                restorer.finish(&mut s, cache);
                self.finish_chain(s, restorer, cache);
            }
            Stage::LookingUp(s, _) => self.next = Some(Chain { root: s.root, tokens: s.tokens }),
            other => self.stage = other,
        }
    }

    fn next_chain(&mut self, restorer: &Restorer, cache: &mut KvCache) {
        // 1. On the first call: note what is free, and list chains
        if self.reserve.is_none() {
            let blocks: Vec<usize> = cache.free().map(|free| free - free / PART).collect();
            let states = cache.free_states();
            self.reserve = Some(Reserve { blocks, states: states - states / PART });
            // Each entry takes a block of some group.
            let max = cache.free().max().unwrap_or(0);
            if !restorer.shared.fingerprint().is_some_and(|model| self.start_listing(model, max)) {
                self.stage = Stage::Done;
                return;
            }
        }
        if self.room(cache).contains(&0) {
            self.stage = Stage::Done;
            return;
        }
        // 2. Take a chain
        let chain = match self.next.take() {
            Some(chain) => chain,
            None => match self.chains.as_ref().map(|chains| chains.recv_timeout(PORTION)) {
                Some(Ok(chain)) => {
                    self.is_requested = false;
                    chain
                }
                Some(Err(RecvTimeoutError::Timeout)) => return,
                _ => {
                    self.stage = Stage::Done;
                    return;
                }
            },
        };
        // 3. Cut it to what fits. With recurrent layers only the whole chain is of use
        let Chain { root, mut tokens } = chain;
        let present = cache.memory_match(root, &tokens, tokens.len());
        if restorer.shape.state_bytes == 0 {
            let room = self.room(cache).into_iter().min().unwrap_or(0);
            tokens.truncate((present.groups.len() + room) * restorer.shape.block_tokens);
        }
        if tokens.len() < restorer.min_tokens {
            return;
        }
        let mut s = Sequence::new(SequenceId(u64::MAX), root, cache.new_sequence());
        (s.tokens, s.shares) = (tokens, true);
        let query = PrefixQuery {
            root,
            tokens: s.tokens[..].into(),
            present: present.groups,
            usable: present.usable,
            min_tokens: 1,
            asks_store: false,
        };
        if let Some(replies) = restorer.look_up(query) {
            self.stage = Stage::LookingUp(Box::new(s), replies);
        }
    }

    /// Blocks that may still be filled: `[groups]`.
    fn room(&self, cache: &KvCache) -> Vec<usize> {
        let reserved = self.reserve.iter().flat_map(|reserve| &reserve.blocks);
        cache.free().zip(reserved).map(|(free, reserved)| free.saturating_sub(*reserved)).collect()
    }

    fn start_reading(&mut self, mut s: Box<Sequence>, found: FoundPrefix, restorer: &Restorer, cache: &mut KvCache) {
        let mut blocks = vec![0; restorer.shape.groups()];
        for part in found.parts.iter().filter(|part| part.part != STATE) {
            blocks[part.part as usize] += 1;
        }
        let states = cache.free_states().saturating_sub(self.reserve.as_ref().map_or(0, |reserve| reserve.states));
        let fits = self.room(cache).iter().zip(&blocks).all(|(room, wanted)| wanted <= room);
        if !fits || restorer.shape.state_bytes > 0 && states == 0 {
            // An older one may fit, but recently used ones have priority.
            self.stage = Stage::Done;
            return;
        }
        s.restore = Restore::Found(found, restorer.commands.clone());
        if begin_restore_in_batches(&mut s, cache, BATCH_BYTES) {
            self.stage = Stage::Reading(s);
        }
    }

    /// Publishes what was read of a chain, so that prompts can reuse it.
    fn finish_chain(&mut self, mut s: Box<Sequence>, restorer: &Restorer, cache: &mut KvCache) {
        self.tokens += s.restored as u64;
        let n = restorer.shape.block_tokens;
        let (computed, present) = (s.computed, s.computed - s.restored);
        let wanted = RestoreSpan { whole: computed / n, tail: computed % n };
        s.retire(cache);
        // Only now do the caches have a node for its end, which may have a state.
        cache.note_kept(s.root, &s.tokens, wanted);
        // Chains are read from the most recently used one on, so each is older than those before it.
        if !self.is_requested {
            cache.make_oldest(s.root, &s.tokens[..computed], present);
        }
    }
}

fn list_chains(lookups: &Lookups, model: u64, max: usize, flags: &Flags, out: &SyncSender<Chain>) {
    let goes_on = || {
        while flags.pause.load(Ordering::Relaxed) && !flags.end.load(Ordering::Relaxed) {
            thread::sleep(PAUSE);
        }
        !flags.end.load(Ordering::Relaxed)
    };
    // The next request reports what is wrong with the index.
    let Ok(ends) = lookups.recent(model, max) else { return };
    let mut known = HashMap::new();
    for end in ends {
        match lookups.chain(&end, &mut known, goes_on) {
            Ok(Some(chain)) => {
                if out.send(chain).is_err() {
                    return;
                }
            }
            Ok(None) => {}
            Err(_) => return,
        }
    }
}
