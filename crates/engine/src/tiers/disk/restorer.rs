//! Restores prompts' prefixes from disk. A prefix is looked up while its sequence waits for its turn. Then the sequence reserves blocks, as if it were to
//! compute them, and stays in the queue until they are filled. What cannot be read is computed like anything else.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use sluice_cache::disk::STATE;
use sluice_cache::{KvCache, RestoreSpan, RestoreTarget};

use super::costs::{Origin, RestoreCosts};
use super::lookup::{FoundPrefix, LookupCommand, PrefixPart, PrefixQuery, ReadReply};
use super::reading::DiskRead;
use super::shared::Shared;
use crate::schedule::sequence::Sequence;
use crate::tiers::block_io::BlockIo;
use crate::tiers::restore::Restore;
use crate::tiers::shape::CacheShape;

/// How long a step with nothing to compute waits for the disk.
pub(crate) const PATIENCE: Duration = Duration::from_millis(20);

/// Starts to read the prefix that was found for a sequence, if any. Returns whether the sequence has to wait for it.
pub(crate) fn begin_restore(s: &mut Sequence, cache: &mut KvCache) -> bool {
    begin_restore_in_batches(s, cache, u64::MAX)
}

/// [`begin_restore`] that requests `batch_bytes` at a time.
pub(super) fn begin_restore_in_batches(s: &mut Sequence, cache: &mut KvCache, batch_bytes: u64) -> bool {
    let (found, commands) = match std::mem::take(&mut s.restore) {
        Restore::Found(found, commands) => (found, commands),
        other => {
            s.restore = other;
            return false;
        }
    };
    s.restore = Restore::Done;
    let present = cache.would_reuse(s.root, &s.tokens, s.tokens.len() - 1);
    if present >= found.to {
        return false;
    }
    let places: HashMap<(usize, u32), usize> = (0..).zip(&found.parts).map(|(i, p)| ((p.node, p.part), i)).collect();
    let part = |node: usize, part: u32| places.get(&(node, part)).copied();
    let number = |group: usize| if group == usize::MAX { STATE } else { group as u32 };
    let can_fill = |node, group| part(node, number(group)).is_some();
    let Some(targets) = cache.reserve_restore(&mut s.held, s.root, &s.tokens, found.wanted, can_fill) else {
        return false;
    };
    let parts = targets.iter().map(|target| {
        let at = match *target {
            RestoreTarget::Block { node, group, .. } => part(node, group as u32),
            RestoreTarget::State { node, .. } => part(node, STATE),
        };
        found.parts[at.expect("checked by can_fill")].clone()
    });
    let parts: Vec<_> = parts.collect();
    let (filled, wanted, to) = (vec![false; targets.len()], found.wanted, found.to);
    let mut read = DiskRead {
        wanted,
        tokens: found.tokens,
        parts,
        current: 0..0,
        batch_bytes,
        patience: found.patience,
        commands,
        to,
        present,
        targets,
        filled,
        committed: 0,
        // Replaced by the first request.
        replies: Mutex::new(channel().1),
        copy_time: Duration::ZERO,
    };
    if !read.request_next() {
        cache.release(&mut s.held);
        return false;
    }
    s.restore = Restore::FromDisk(read);
    true
}

/// Looks prefixes up and takes what is read.
pub(super) struct Restorer {
    pub commands: Sender<LookupCommand>,
    pub shared: Arc<Shared>,
    pub shape: CacheShape,
    pub costs: RestoreCosts,
    /// PrefixOptions of fewer tokens are not looked up.
    pub min_tokens: usize,
    /// PrefixOptions that were not read, because computing them was faster.
    pub skipped_slow: u64,
}

impl Restorer {
    /// Moves a sequence's restore forward. The first call that has to wait takes `patience`. For a sequence that is being read, all queued block
    /// operations are applied.
    ///
    /// # Errors
    /// When there is no memory for blocks.
    pub fn poll(
        &mut self,
        s: &mut Sequence,
        cache: &mut KvCache,
        io: &mut dyn BlockIo,
        patience: &mut Option<Duration>,
    ) -> Result<()> {
        match &s.restore {
            Restore::NotStarted if s.shares && s.held.is_empty() => self.start_lookup(s, cache),
            Restore::LookingUp(..) => self.poll_lookup(s, patience.take()),
            Restore::FromDisk(_) => self.receive(s, cache, io, patience.take())?,
            _ => {}
        }
        Ok(())
    }

    fn start_lookup(&mut self, s: &mut Sequence, cache: &KvCache) {
        s.restore = Restore::Done;
        let max = s.tokens.len() - 1;
        let present = cache.memory_match(s.root, &s.tokens, max);
        // A shorter prefix would not have been written.
        let min_tokens = self.min_tokens.max(1);
        if max.saturating_sub(present.usable) < min_tokens {
            return;
        }
        let (root, tokens) = (s.root, s.tokens[..max].into());
        let query =
            PrefixQuery { root, tokens, present: present.groups, usable: present.usable, min_tokens, asks_store: true };
        if let Some(replies) = self.look_up(query) {
            s.restore = Restore::LookingUp(Mutex::new(replies), self.commands.clone());
        }
    }

    /// Asks the lookup thread. No reply: there is nothing.
    pub fn look_up(&self, query: PrefixQuery) -> Option<Receiver<FoundPrefix>> {
        let (reply, replies) = channel();
        let sent = self.shared.is_ready() && self.commands.send(LookupCommand::Find(query, reply)).is_ok();
        sent.then_some(replies)
    }

    fn poll_lookup(&mut self, s: &mut Sequence, patience: Option<Duration>) {
        let Restore::LookingUp(replies, commands) = &mut s.restore else { return };
        let replies = replies.get_mut().unwrap_or_else(PoisonError::into_inner);
        let reply = match patience {
            Some(patience) => replies.recv_timeout(patience).map_err(|e| e == RecvTimeoutError::Timeout),
            None => replies.try_recv().map_err(|e| e == TryRecvError::Empty),
        };
        s.restore = match reply {
            Ok(found) => {
                let bytes = found.parts.iter().map(|p| p.bytes).sum();
                let tokens = found.to - found.usable;
                if self.costs.is_reading_faster(found.origin(), bytes, tokens) {
                    let patience = self.costs.patience(tokens);
                    Restore::Found(FoundPrefix { patience, ..found }, commands.clone())
                } else {
                    self.skipped_slow += 1;
                    Restore::Done
                }
            }
            Err(true) => return,
            // Nothing is stored.
            Err(false) => Restore::Done,
        };
    }

    /// Takes what has been read so far, for `patience` at most. All queued block operations are applied.
    ///
    /// # Errors
    /// When there is no memory for blocks.
    pub fn receive(
        &mut self,
        s: &mut Sequence,
        cache: &mut KvCache,
        io: &mut dyn BlockIo,
        patience: Option<Duration>,
    ) -> Result<()> {
        let Restore::FromDisk(read) = &mut s.restore else { return Ok(()) };
        let until = patience.map(|patience| Instant::now() + patience);
        let is_over = loop {
            let replies = read.replies.get_mut().unwrap_or_else(PoisonError::into_inner);
            let mut reply = replies.try_recv();
            if let (Err(TryRecvError::Empty), Some(until)) = (&reply, until) {
                let left = until.saturating_duration_since(Instant::now());
                // Committing memory takes a quarter of the time of reading, so it is done while waiting for the disk.
                match read.targets.get(read.committed).filter(|_| !left.is_zero()) {
                    Some(target) => {
                        io.commit_target(*target)?;
                        read.committed += 1;
                        continue;
                    }
                    None => {
                        reply = replies.recv_timeout(left).map_err(|e| match e {
                            RecvTimeoutError::Timeout => TryRecvError::Empty,
                            RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
                        })
                    }
                }
            }
            match reply {
                Ok(ReadReply::Part(i, bytes)) => {
                    let i = read.current.start + i;
                    let started = Instant::now();
                    io.fill(read.targets[i], &bytes)?;
                    read.copy_time += started.elapsed();
                    read.filled[i] = true;
                }
                Ok(ReadReply::Lost) => {}
                Ok(ReadReply::Done(bytes, time)) => {
                    let origin = PrefixPart::origin(&read.parts[read.current.clone()]);
                    self.costs.note_read(origin, bytes, time + std::mem::take(&mut read.copy_time));
                    if !read.request_next() {
                        break true;
                    }
                }
                Err(TryRecvError::Empty) => break false,
                Err(TryRecvError::Disconnected) => break true,
            }
        };
        if is_over {
            self.finish(s, cache);
        }
        Ok(())
    }

    /// Ends a read. The sequence continues after the parts that have arrived.
    pub fn finish(&mut self, s: &mut Sequence, cache: &mut KvCache) {
        let Restore::FromDisk(read) = std::mem::replace(&mut s.restore, Restore::Done) else { return };
        let missing = read.targets.iter().zip(&read.filled).find(|(_, filled)| !**filled);
        let is_plain = self.shape.state_bytes == 0 && self.shape.windows.iter().all(Option::is_none);
        let mut wanted = read.wanted;
        let to = match missing {
            None => read.to,
            // Without windows and states, the blocks before the missing one are complete.
            Some((RestoreTarget::Block { node, .. }, _)) if is_plain && *node > 0 => {
                wanted = RestoreSpan { whole: *node, tail: 0 };
                node * self.shape.block_tokens
            }
            Some(_) => return cache.release(&mut s.held),
        };
        if to < read.to {
            cache.shrink(&mut s.held, to);
        }
        s.restored = to.saturating_sub(read.present);
        s.finish_restore(cache, to, self.shape.state_bytes > 0);
        // What came from the store is written to the disk like anything that was computed.
        if PrefixPart::origin(&read.parts) == Origin::Disk {
            cache.note_kept(s.root, &s.tokens, wanted);
        }
    }
}
