//! A prompt whose beginning is on disk. It is looked for as soon as the sequence waits for its turn; when that comes, the sequence takes blocks of the pool for what
//! is missing, as if it were to compute them, and stays in the queue until they are filled. What cannot be read is computed like anything else.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use sluice_cache::disk::STATE;
use sluice_cache::{KvCache, RestoreSpan, RestoreTarget};

use super::lookup::{Ask, Found, Query, Read, RestorePart};
use super::{PromptCache, WAITING};
use crate::runner::Runner;
use crate::sequence::Sequence;
use crate::spill::Returning;

/// How far a sequence is with what is on disk of its prompt.
#[derive(Default)]
pub(crate) enum Restore {
    /// Nobody has asked yet.
    #[default]
    No,
    Asked(Mutex<Receiver<Found>>, Sender<Ask>),
    /// It begins when the sequence's turn comes.
    Found(Found, Sender<Ask>),
    Reading(Reading),
    /// It lies in memory of this machine, and is put in its place before the next step.
    Returning(Returning),
    /// All that there was is there.
    Over,
}

impl Restore {
    /// Whether the sequence can take no part in a step.
    pub fn waits(&self) -> bool {
        matches!(self, Restore::Asked(..) | Restore::Reading(_) | Restore::Returning(_))
    }

    /// Tokens of the prompt that were found on disk and are not read yet.
    pub fn reach(&self) -> usize {
        match self {
            Restore::Found(found, _) => found.to,
            _ => 0,
        }
    }
}

pub(crate) struct Reading {
    wanted: RestoreSpan,
    tokens: Arc<[u32]>,
    parts: Vec<RestorePart>,
    /// Parts that are being read now.
    now: Range<usize>,
    /// Bytes that are read at once at most, or one part.
    at_once: u64,
    asks: Sender<Ask>,
    to: usize,
    /// Tokens of it that were in memory.
    present: usize,
    /// By number of the part.
    fillings: Vec<RestoreTarget>,
    filled: Vec<bool>,
    /// So many of `fillings` have memory.
    ready: usize,
    received: Mutex<Receiver<Read>>,
    /// Time that putting bytes in their place took.
    placing: Duration,
}

impl Reading {
    /// Has the next parts read. Whether there were any.
    fn read_on(&mut self) -> bool {
        let mut bytes = 0;
        let from = self.now.end;
        let fits = |part: &&RestorePart| {
            bytes += part.bytes;
            bytes == part.bytes || bytes <= self.at_once
        };
        let parts: Vec<RestorePart> = self.parts[from..].iter().take_while(fits).cloned().collect();
        if parts.is_empty() {
            return false;
        }
        let largest = parts.iter().map(|p| p.bytes).max().unwrap_or(1).max(1);
        // Fewer than there is memory to read to: so it is known how long reading waited for whoever takes them.
        let (tell, received) = sync_channel((WAITING / largest).clamp(2, 1024) as usize);
        (self.now, self.received) = (from..from + parts.len(), Mutex::new(received));
        self.asks.send(Ask::Read(Arc::clone(&self.tokens), parts, tell)).is_ok()
    }
}

/// A sequence's turn has come, and something was found for it: it takes what it needs, and reading begins. Otherwise it computes.
pub(crate) fn begin(s: &mut Sequence, cache: &mut KvCache) -> bool {
    begin_by(s, cache, u64::MAX)
}

/// The same, with so many bytes at once.
pub(super) fn begin_by(s: &mut Sequence, cache: &mut KvCache, at_once: u64) -> bool {
    let (found, asks) = match std::mem::take(&mut s.restore) {
        Restore::Found(found, asks) => (found, asks),
        other => {
            s.restore = other;
            return false;
        }
    };
    s.restore = Restore::Over;
    let present = cache.would_reuse(s.root, &s.tokens, s.tokens.len() - 1);
    if present >= found.to {
        return false;
    }
    let places: HashMap<(usize, u32), usize> = (0..).zip(&found.parts).map(|(i, p)| ((p.node, p.part), i)).collect();
    let part = |node: usize, part: u32| places.get(&(node, part)).copied();
    let number = |group: usize| if group == usize::MAX { STATE } else { group as u32 };
    let may_fill = |node, group| part(node, number(group)).is_some();
    let Some(fillings) = cache.reserve_restore(&mut s.held, s.root, &s.tokens, found.wanted, may_fill) else {
        return false;
    };
    let parts = fillings.iter().map(|filling| {
        let at = match *filling {
            RestoreTarget::Block { node, group, .. } => part(node, group as u32),
            RestoreTarget::State { node, .. } => part(node, STATE),
        };
        found.parts[at.expect("it may be filled")].clone()
    });
    let parts: Vec<_> = parts.collect();
    let (filled, wanted, to) = (vec![false; fillings.len()], found.wanted, found.to);
    let mut reading = Reading {
        wanted,
        tokens: found.tokens,
        parts,
        now: 0..0,
        at_once,
        asks,
        to,
        present,
        fillings,
        filled,
        ready: 0,
        // Nothing comes before something is asked for.
        received: Mutex::new(channel().1),
        placing: Duration::ZERO,
    };
    if !reading.read_on() {
        cache.release(&mut s.held);
        return false;
    }
    s.restore = Restore::Reading(reading);
    true
}

/// So long a step that has nothing to compute waits for what is being read.
const PATIENCE: Duration = Duration::from_millis(20);

impl PromptCache {
    /// Asks for what waiting sequences may find, and puts in its place what was read for them. `idle`: nothing else is to be done meanwhile.
    pub fn poll_restores(
        &mut self,
        sequences: &mut [Sequence],
        cache: &mut KvCache,
        runner: &mut Runner,
        idle: bool,
    ) -> Result<()> {
        let mut patience = idle.then_some(PATIENCE);
        for s in sequences.iter_mut().filter(|s| s.running.is_some()) {
            match &s.restore {
                Restore::No if s.shares && s.held.is_empty() => self.look(s, cache),
                Restore::Asked(..) => self.asked(s, patience.take()),
                Restore::Reading(_) => self.take_in(s, cache, runner, patience.take())?,
                _ => {}
            }
        }
        Ok(())
    }

    fn look(&mut self, s: &mut Sequence, cache: &KvCache) {
        s.restore = Restore::Over;
        let most = s.tokens.len() - 1;
        let present = cache.memory_match(s.root, &s.tokens, most);
        // What is not looked for is nothing that would be kept.
        if most.saturating_sub(present.usable) < self.min_tokens().max(1) {
            return;
        }
        let (root, tokens) = (s.root, s.tokens[..most].into());
        // Less is nothing that would be kept, either.
        let fewest = self.min_tokens().max(1);
        let query = Query { root, tokens, present: present.groups, usable: present.usable, fewest };
        if let Some(told) = self.ask(query) {
            s.restore = Restore::Asked(Mutex::new(told), self.asks.clone());
        }
    }

    fn asked(&mut self, s: &mut Sequence, patience: Option<Duration>) {
        let Restore::Asked(told, commands) = &mut s.restore else { return };
        let told = told.get_mut().unwrap_or_else(PoisonError::into_inner);
        let answer = match patience {
            Some(patience) => told.recv_timeout(patience).map_err(|e| e == std::sync::mpsc::RecvTimeoutError::Timeout),
            None => told.try_recv().map_err(|e| e == TryRecvError::Empty),
        };
        s.restore = match answer {
            Ok(found) => {
                let bytes = found.parts.iter().map(|p| p.bytes).sum();
                if self.costs.is_worth(bytes, found.to - found.usable) {
                    Restore::Found(found, commands.clone())
                } else {
                    self.too_dear += 1;
                    Restore::Over
                }
            }
            Err(true) => return,
            // There is nothing.
            Err(false) => Restore::Over,
        };
    }

    pub(super) fn take_in(
        &mut self,
        s: &mut Sequence,
        cache: &mut KvCache,
        runner: &mut Runner,
        patience: Option<Duration>,
    ) -> Result<()> {
        // Blocks may have been others' until now, who wanted them copied.
        runner.carry_out(cache, Some(self))?;
        let Restore::Reading(reading) = &mut s.restore else { return Ok(()) };
        let until = patience.map(|patience| Instant::now() + patience);
        let over = loop {
            let received = reading.received.get_mut().unwrap_or_else(PoisonError::into_inner);
            let mut read = received.try_recv();
            if let (Err(TryRecvError::Empty), Some(until)) = (&read, until) {
                let left = until.saturating_duration_since(Instant::now());
                // Finding memory takes a quarter of the time that reading does: what is waited for the disk is used for it.
                match reading.fillings.get(reading.ready).filter(|_| !left.is_zero()) {
                    Some(filling) => {
                        runner.make_room(*filling)?;
                        reading.ready += 1;
                        continue;
                    }
                    None => {
                        read = received.recv_timeout(left).map_err(|e| match e {
                            RecvTimeoutError::Timeout => TryRecvError::Empty,
                            RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
                        })
                    }
                }
            }
            match read {
                Ok(Read::Part(i, bytes)) => {
                    let i = reading.now.start + i;
                    let begun = Instant::now();
                    runner.fill(reading.fillings[i], &bytes)?;
                    reading.placing += begun.elapsed();
                    reading.filled[i] = true;
                }
                Ok(Read::Lost) => {}
                Ok(Read::Over(bytes, time)) => {
                    self.costs.read(bytes, time + std::mem::take(&mut reading.placing));
                    if !reading.read_on() {
                        break true;
                    }
                }
                Err(TryRecvError::Empty) => break false,
                Err(TryRecvError::Disconnected) => break true,
            }
        };
        if over {
            self.settle_restore(s, cache);
        }
        Ok(())
    }

    /// All that can be read was, or is to be: the sequence goes on from there.
    pub(super) fn settle_restore(&mut self, s: &mut Sequence, cache: &mut KvCache) {
        let Restore::Reading(reading) = std::mem::replace(&mut s.restore, Restore::Over) else { return };
        let lost = reading.fillings.iter().zip(&reading.filled).find(|(_, filled)| !**filled);
        let simple = self.shape.state_bytes == 0 && self.shape.windows.iter().all(Option::is_none);
        let mut wanted = reading.wanted;
        let to = match lost {
            None => reading.to,
            // What lies before it is good where nothing else is needed.
            Some((RestoreTarget::Block { node, .. }, _)) if simple && *node > 0 => {
                wanted = RestoreSpan { whole: *node, tail: 0 };
                node * self.shape.block_tokens
            }
            Some(_) => return cache.release(&mut s.held),
        };
        if to < reading.to {
            cache.shrink(&mut s.held, to);
        }
        s.restored = to.saturating_sub(reading.present);
        settled(s, cache, to, self.shape.state_bytes > 0);
        cache.note_kept(s.root, &s.tokens, wanted);
    }
}

/// A sequence has what it took up, and goes on from there.
pub(crate) fn settled(s: &mut Sequence, cache: &mut KvCache, to: usize, has_states: bool) {
    (s.computed, s.adopted) = (to, to);
    cache.publish(&mut s.held, s.root, &s.tokens, to);
    if has_states && s.running.is_some() {
        cache.snapshot(&mut s.held, s.root, &s.tokens, to);
    }
    cache.drop_before_window(&mut s.held, to);
}
