//! After a start: prefixes that were used last are read into memory while nobody generates, so that who asks for them finds them there. Memory that
//! nobody uses is filled to a half, nothing is evicted for it, and what is under way is given up as soon as somebody asks for something.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Result;
use sluice_cache::disk::{Chain, Lookups, STATE};
use sluice_cache::{KvCache, RestoreSpan};

use super::lookup::{Found, Query};
use super::restore::begin_by;
use super::{PromptCache, Restore};
use crate::runner::Runner;
use crate::scheduler::retire;
use crate::sequence::{Sequence, SequenceId};

/// The part of what is free that may be filled.
const PART: usize = 2;
/// Bytes that are read at once: no more are on their way from the disk when somebody asks for something.
const AT_ONCE: u64 = 4 << 20;
/// So long a portion waits for the disk: who asks for something waits for it.
const PORTION: Duration = Duration::from_millis(1);
/// How often somebody who lists chains looks whether he may go on.
const PAUSE: Duration = Duration::from_millis(5);

#[derive(Default)]
enum Stage {
    /// The next chain is to be taken.
    #[default]
    Next,
    Asked(Box<Sequence>, Receiver<Found>),
    Reading(Box<Sequence>),
    /// There is no more, or no more room.
    Over,
}

/// What is left free.
struct Floor {
    /// Blocks, by group.
    blocks: Vec<usize>,
    states: usize,
}

/// What both sides know.
#[derive(Default)]
struct Flags {
    /// Nobody reads for it meanwhile.
    pause: AtomicBool,
    end: AtomicBool,
}

/// What was used last, as it is read.
pub(crate) struct Prefetch {
    lookups: Option<Lookups>,
    stage: Stage,
    floor: Option<Floor>,
    chains: Option<Receiver<Chain>>,
    /// Given up, and to be taken again; or asked for by somebody.
    again: Option<Chain>,
    /// Somebody has asked for what is read now, or in `again`: it is not only what was used last before this start.
    asked_for: bool,
    lister: Option<JoinHandle<()>>,
    flags: Arc<Flags>,
    tokens: u64,
}

impl Prefetch {
    pub fn new(lookups: Lookups) -> Prefetch {
        Prefetch {
            lookups: Some(lookups),
            stage: Stage::Next,
            floor: None,
            chains: None,
            again: None,
            asked_for: false,
            lister: None,
            flags: Arc::default(),
            tokens: 0,
        }
    }

    /// Tokens that were read.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Nothing of it uses the folder afterwards.
    pub fn end(&mut self) {
        (self.stage, self.lookups, self.chains) = (Stage::Over, None, None);
        self.flags.end.store(true, Ordering::Relaxed);
        if let Some(lister) = self.lister.take() {
            let _ = lister.join();
        }
    }

    /// Has chains listed by a thread, which reads their tokens. Whether that could be begun.
    fn list(&mut self, model: u64, most: usize) -> bool {
        let Some(lookups) = self.lookups.take() else { return false };
        let (tell, chains) = sync_channel(1);
        let flags = Arc::clone(&self.flags);
        let work = move || list(&lookups, model, most, &flags, &tell);
        self.lister = thread::Builder::new().name("prompt-prefetch".into()).spawn(work).ok();
        self.chains = Some(chains);
        self.lister.is_some()
    }
}

fn list(lookups: &Lookups, model: u64, most: usize, flags: &Flags, tell: &SyncSender<Chain>) {
    let goes_on = || {
        while flags.pause.load(Ordering::Relaxed) && !flags.end.load(Ordering::Relaxed) {
            thread::sleep(PAUSE);
        }
        !flags.end.load(Ordering::Relaxed)
    };
    // Whoever asks for something learns what is wrong with the index.
    let Ok(ends) = lookups.recent(model, most) else { return };
    let mut known = HashMap::new();
    for end in ends {
        match lookups.chain(&end, &mut known, goes_on) {
            // It is wanted no longer.
            Ok(Some(chain)) => {
                if tell.send(chain).is_err() {
                    return;
                }
            }
            Ok(None) => {}
            Err(_) => return,
        }
    }
}

impl PromptCache {
    /// A portion, of a few milliseconds. Whether there is more to do at once.
    ///
    /// # Errors
    /// When there is no memory for blocks that are free by number.
    pub fn prefetch(&mut self, cache: &mut KvCache, runner: &mut Runner) -> Result<bool> {
        if self.shared.summing().is_some() {
            return Ok(false);
        }
        if !self.shared.is_well() {
            self.give_up_prefetch(cache);
            self.prefetch.stage = Stage::Over;
        }
        self.prefetch.flags.pause.store(false, Ordering::Relaxed);
        match std::mem::take(&mut self.prefetch.stage) {
            Stage::Next => self.next_chain(cache),
            Stage::Asked(s, told) => match told.recv_timeout(PORTION) {
                Ok(found) => self.found(s, found, cache),
                Err(RecvTimeoutError::Timeout) => self.prefetch.stage = Stage::Asked(s, told),
                // It is in memory already, or gone.
                Err(RecvTimeoutError::Disconnected) => {}
            },
            Stage::Reading(mut s) => {
                self.take_in(&mut s, cache, runner, Some(PORTION))?;
                match s.restore {
                    Restore::Reading(_) => self.prefetch.stage = Stage::Reading(s),
                    _ => self.keep(s, cache),
                }
            }
            Stage::Over => self.prefetch.stage = Stage::Over,
        }
        if matches!(self.prefetch.stage, Stage::Over) {
            self.prefetch.chains = None;
        }
        Ok(!matches!(self.prefetch.stage, Stage::Over))
    }

    /// This is to be read next, before what was used last.
    pub fn read_ahead(&mut self, chain: Chain) {
        (self.prefetch.again, self.prefetch.asked_for) = (Some(chain), true);
        if matches!(self.prefetch.stage, Stage::Over) {
            self.prefetch.stage = Stage::Next;
        }
    }

    /// Somebody asks for something: what is under way stays as far as it is there, and the rest is read when there is nothing else to do.
    pub fn give_up_prefetch(&mut self, cache: &mut KvCache) {
        self.prefetch.flags.pause.store(true, Ordering::Relaxed);
        match std::mem::take(&mut self.prefetch.stage) {
            Stage::Reading(mut s) => {
                self.prefetch.again = Some(Chain { root: s.root, tokens: s.tokens.clone() });
                self.settle_restore(&mut s, cache);
                self.keep(s, cache);
            }
            Stage::Asked(s, _) => self.prefetch.again = Some(Chain { root: s.root, tokens: s.tokens }),
            other => self.prefetch.stage = other,
        }
    }

    fn next_chain(&mut self, cache: &mut KvCache) {
        // 1. What is free when it begins
        if self.prefetch.floor.is_none() {
            let blocks: Vec<usize> = cache.free().map(|free| free - free / PART).collect();
            let states = cache.free_states();
            self.prefetch.floor = Some(Floor { blocks, states: states - states / PART });
            // An entry takes a block at least, of one of the groups.
            let most = cache.free().max().unwrap_or(0);
            if !self.shared.model().is_some_and(|model| self.prefetch.list(model, most)) {
                self.prefetch.stage = Stage::Over;
                return;
            }
        }
        if self.room(cache).contains(&0) {
            self.prefetch.stage = Stage::Over;
            return;
        }
        // 2. A chain
        let chain = match self.prefetch.again.take() {
            Some(chain) => chain,
            None => match self.prefetch.chains.as_ref().map(|chains| chains.recv_timeout(PORTION)) {
                Some(Ok(chain)) => {
                    self.prefetch.asked_for = false;
                    chain
                }
                Some(Err(RecvTimeoutError::Timeout)) => return,
                _ => {
                    self.prefetch.stage = Stage::Over;
                    return;
                }
            },
        };
        // 3. As much of it as there is room for; with recurrent layers only the whole of it is of use
        let Chain { root, mut tokens } = chain;
        let present = cache.memory_match(root, &tokens, tokens.len());
        if self.shape.state_bytes == 0 {
            let room = self.room(cache).into_iter().min().unwrap_or(0);
            tokens.truncate((present.groups.len() + room) * self.shape.block_tokens);
        }
        if tokens.len() < self.min_tokens() {
            return;
        }
        let mut s = Sequence::new(SequenceId(u64::MAX), root, cache.new_sequence());
        (s.tokens, s.shares) = (tokens, true);
        let query =
            Query { root, tokens: s.tokens[..].into(), present: present.groups, usable: present.usable, fewest: 1 };
        if let Some(told) = self.ask(query) {
            self.prefetch.stage = Stage::Asked(Box::new(s), told);
        }
    }

    /// Blocks that may be filled yet, by group.
    fn room(&self, cache: &KvCache) -> Vec<usize> {
        let floor = self.prefetch.floor.iter().flat_map(|floor| &floor.blocks);
        cache.free().zip(floor).map(|(free, floor)| free.saturating_sub(*floor)).collect()
    }

    fn found(&mut self, mut s: Box<Sequence>, found: Found, cache: &mut KvCache) {
        let mut blocks = vec![0; self.shape.block_bytes.len()];
        for part in found.parts.iter().filter(|part| part.part != STATE) {
            blocks[part.part as usize] += 1;
        }
        let states = cache.free_states().saturating_sub(self.prefetch.floor.as_ref().map_or(0, |f| f.states));
        let fits = self.room(cache).iter().zip(&blocks).all(|(room, wanted)| wanted <= room);
        if !fits || self.shape.state_bytes > 0 && states == 0 {
            // A shorter one may fit, but those that were used last come first.
            self.prefetch.stage = Stage::Over;
            return;
        }
        s.restore = Restore::Found(found, self.asks.clone());
        if begin_by(&mut s, cache, AT_ONCE) {
            self.prefetch.stage = Stage::Reading(s);
        }
    }

    /// What there is of a prefix becomes known to prompts, and nobody holds it.
    fn keep(&mut self, mut s: Box<Sequence>, cache: &mut KvCache) {
        self.prefetch.tokens += s.restored as u64;
        let n = self.shape.block_tokens;
        let (computed, present) = (s.computed, s.computed - s.restored);
        let wanted = RestoreSpan { whole: computed / n, tail: computed % n };
        retire(&mut s, cache);
        // Its end, where a state is, is known only now.
        cache.note_kept(s.root, &s.tokens, wanted);
        // What was used last is read first: what comes after it was used before it.
        if !self.prefetch.asked_for {
            cache.make_oldest(s.root, &s.tokens[..computed], present);
        }
    }
}
