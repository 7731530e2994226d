//! Both tiers, and the order in which they are asked.

use std::time::Duration;

use anyhow::Result;
use sluice_cache::{BlockOp, KvCache, SequenceBlocks};

use super::block_io::BlockIo;
use super::disk::options::PromptCacheStatus;
use super::disk::restorer;
use super::disk::sessions::{ReadAhead, Saved, SessionError, Sessions};
use super::disk::tier::DiskTier;
use super::host::tier::{HostTier, HostTierStatus};
use super::restore::Restore;
use crate::schedule::sequence::Sequence;

/// The tiers below the caches. The default has none.
#[derive(Default)]
pub(crate) struct Tiers {
    host: Option<HostTier>,
    disk: Option<DiskTier>,
    /// Messages about the disk tier that nobody has taken yet.
    notes: Vec<String>,
}

/// Moving blocks.
impl Tiers {
    /// `notes`: why there is no disk tier although one was asked for.
    pub fn new(host: Option<HostTier>, disk: Option<DiskTier>, notes: Vec<String>) -> Tiers {
        Tiers { host, disk, notes }
    }

    /// Commits memory for all blocks that the caches have handed out, and applies the operations that they have queued.
    ///
    /// # Errors
    /// When there is no memory for blocks.
    pub fn prepare_blocks(&mut self, cache: &mut KvCache, io: &mut dyn BlockIo) -> Result<()> {
        for (group, blocks) in cache.high_water().enumerate() {
            io.commit(group, blocks)?;
        }
        self.apply_block_ops(cache, io)
    }

    /// Applies the operations that the caches have queued: copies, zeros, and evicted nodes for the tiers. Memory of restore targets is not committed.
    ///
    /// # Errors
    /// When there is no memory for the target of a copy.
    fn apply_block_ops(&mut self, cache: &mut KvCache, io: &mut dyn BlockIo) -> Result<()> {
        let Tiers { host, disk, .. } = self;
        let mut applied = Ok(());
        cache.drain_ops(|op, evicted| match op {
            BlockOp::CopyBlock { group, from, to } => match io.commit(group, to as usize + 1) {
                Ok(()) => io.copy_block(group, from, to),
                Err(e) => applied = Err(e),
            },
            BlockOp::CopyState { from, to } => io.copy_state(from, to),
            BlockOp::ZeroState(row) => io.zero_state(row),
            BlockOp::CopyOut(i) => {
                host.iter_mut().for_each(|host| host.store(&evicted[i], io));
                disk.iter_mut().for_each(|disk| disk.store_evicted(&evicted[i], io));
            }
        });
        applied
    }

    /// Starts to restore the prefix of a sequence that the scheduler has picked. Returns whether the sequence has to wait for it.
    pub fn begin_restore(&mut self, s: &mut Sequence, cache: &mut KvCache) -> bool {
        self.host.as_mut().is_some_and(|host| host.begin_restore(s, cache)) || restorer::begin_restore(s, cache)
    }

    /// Moves restores of running sequences forward. `idle`: there is nothing to compute, so that waiting for the disk a little is better than spinning.
    ///
    /// # Errors
    /// When there is no memory for blocks.
    pub fn poll_restores(
        &mut self,
        sequences: &mut [Sequence],
        cache: &mut KvCache,
        io: &mut dyn BlockIo,
        idle: bool,
    ) -> Result<()> {
        for s in sequences.iter_mut().filter(|s| s.running.is_some()) {
            self.poll_host(s, cache, io)?;
        }
        let mut patience = idle.then_some(restorer::PATIENCE);
        for s in sequences.iter_mut().filter(|s| s.running.is_some()) {
            match &s.restore {
                Restore::FromDisk(_) => self.apply_block_ops(cache, io)?,
                Restore::NotStarted | Restore::LookingUp(..) => {}
                _ => continue,
            }
            if let Some(disk) = &mut self.disk {
                disk.poll_restore(s, cache, io, &mut patience)?;
            }
        }
        Ok(())
    }

    fn poll_host(&mut self, s: &mut Sequence, cache: &mut KvCache, io: &mut dyn BlockIo) -> Result<()> {
        let Restore::FromHost(_) = &s.restore else { return Ok(()) };
        let Restore::FromHost(restore) = std::mem::replace(&mut s.restore, Restore::Done) else { return Ok(()) };
        // The sequence's blocks may have had other contents until now, and a queued operation may still copy these.
        self.apply_block_ops(cache, io)?;
        let Some(host) = &mut self.host else { return Ok(()) };
        host.fill(&restore, io)?;
        s.finish_restore(cache, restore.to, host.has_states());
        restore.nodes.iter().for_each(|hash| cache.forget_offloaded(hash));
        Ok(())
    }

    /// After a step of `took`: copies out some of what is likely to be used again. `prompt_tokens`: the step's tokens, if all of them were of prompts.
    ///
    /// # Errors
    /// When there is no memory for blocks.
    pub fn after_step(
        &mut self,
        prompt_tokens: Option<usize>,
        took: Duration,
        cache: &mut KvCache,
        io: &mut dyn BlockIo,
    ) -> Result<()> {
        let Some(disk) = &mut self.disk else { return Ok(()) };
        if let Some(tokens) = prompt_tokens {
            disk.note_computed(tokens, took);
        }
        self.prepare_blocks(cache, io)?;
        self.disk.iter_mut().for_each(|disk| disk.after_step(took, cache, io));
        Ok(())
    }
}

/// The disk tier, while nothing is computed.
impl Tiers {
    /// Copies out a portion of what conversations hold. Returns whether there may be more.
    ///
    /// # Errors
    /// When there is no memory for blocks.
    pub fn flush_idle(&mut self, cache: &mut KvCache, io: &mut dyn BlockIo) -> Result<bool> {
        if self.disk.is_none() {
            return Ok(false);
        }
        self.prepare_blocks(cache, io)?;
        Ok(self.disk.as_mut().is_some_and(|disk| disk.save_unsaved(cache, io)))
    }

    /// Copies out a portion of the sessions that are being saved. Returns whether there is more.
    ///
    /// # Errors
    /// When there is no memory for blocks.
    pub fn save_sessions(&mut self, cache: &mut KvCache, io: &mut dyn BlockIo) -> Result<bool> {
        if !self.disk.as_ref().is_some_and(DiskTier::is_saving_sessions) {
            return Ok(false);
        }
        self.prepare_blocks(cache, io)?;
        Ok(self.disk.as_mut().is_some_and(|disk| disk.save_sessions(cache, io)))
    }

    /// Reads a portion of recently used prefixes into the caches. Returns whether there is more to do now.
    ///
    /// # Errors
    /// When there is no memory for blocks.
    pub fn prefetch(&mut self, cache: &mut KvCache, io: &mut dyn BlockIo) -> Result<bool> {
        if self.disk.as_ref().is_some_and(DiskTier::is_prefetching) {
            self.apply_block_ops(cache, io)?;
        }
        self.disk.as_mut().map_or(Ok(false), |disk| disk.prefetch(cache, io))
    }

    /// Interrupts [`Tiers::prefetch`], because somebody wants something. Blocks that were read already stay.
    pub fn interrupt_prefetch(&mut self, cache: &mut KvCache) {
        self.disk.iter_mut().for_each(|disk| disk.interrupt_prefetch(cache));
    }

    /// Before the engine's end: from now on [`Tiers::flush_idle`] copies everything that conversations hold, partial blocks too.
    pub fn begin_last_flush(&mut self) {
        self.disk.iter_mut().for_each(DiskTier::begin_last_flush);
    }

    /// Waits until everything that was copied out is written.
    pub fn end_last_flush(&mut self) {
        self.disk.iter_mut().for_each(DiskTier::end_last_flush);
    }

    /// Marks what a sequence holds as recently used.
    pub fn touch(&self, cache: &KvCache, held: &SequenceBlocks) {
        self.disk.iter().for_each(|disk| disk.touch(cache.offloaded_path(held)));
    }
}

/// Named conversations and status.
impl Tiers {
    /// The names of saved conversations; `None` without a disk tier.
    pub fn sessions(&self) -> Option<Sessions> {
        self.disk.as_ref().map(DiskTier::sessions)
    }

    /// Saves a conversation under a name. [`Tiers::save_sessions`] does the work.
    pub fn save_session(&mut self, name: String, cache: &mut KvCache, salt: &[u8], tokens: &[u32], done: Saved) {
        match &mut self.disk {
            Some(disk) => disk.save_session(name, cache, salt, tokens, done),
            None => done(Err(SessionError::NotInUse("there is no prompt cache".to_owned()))),
        }
    }

    /// Makes a loaded conversation the next to be prefetched.
    pub fn read_ahead(&mut self, session: &ReadAhead) {
        self.disk.iter_mut().for_each(|disk| disk.read_ahead(session.0.clone()));
    }

    /// Contents and counters of the disk tier.
    pub fn disk_status(&self) -> Option<PromptCacheStatus> {
        self.disk.as_ref().map(DiskTier::status)
    }

    /// Contents and counters of the host tier.
    pub fn host_status(&self) -> Option<HostTierStatus> {
        self.host.as_ref().map(HostTier::status)
    }

    /// Messages about the disk tier, each once.
    pub fn take_notes(&mut self) -> Vec<String> {
        let mut notes = std::mem::take(&mut self.notes);
        notes.extend(self.disk.iter_mut().flat_map(DiskTier::take_notes));
        notes
    }
}
