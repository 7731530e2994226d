//! The prompt cache on disk, as who has an engine uses it: what it says of itself, what is written and read while nobody generates, and named conversations.

use anyhow::Result;

use super::Engine;
use crate::prompt_cache::{PromptCache, PromptCacheStatus, ReadAhead, Saved, Sessions};
use crate::spill::{self, Spill, Spilled};

impl Engine {
    /// What is in it, and what came of it; `None` where there is none.
    pub fn prompt_cache(&self) -> Option<PromptCacheStatus> {
        self.disk.as_ref().map(PromptCache::status)
    }

    /// What is to be said of it, each line once: why there is none although it was asked for, or no longer; what was lost.
    pub fn take_prompt_cache_notes(&mut self) -> Vec<String> {
        let mut notes = std::mem::take(&mut self.disk_notes);
        notes.extend(self.disk.iter_mut().flat_map(PromptCache::take_warnings));
        notes
    }

    /// Names of conversations in the prompt cache; `None` where there is none.
    pub fn sessions(&self) -> Option<Sessions> {
        self.disk.as_ref().map(PromptCache::sessions)
    }

    /// Writes what is in memory of a conversation to the prompt cache, and gives it a name there, which another may have had. [`Engine::tend_sessions`] does it; `told` is called once
    /// it is durable, from another thread, or dropped with the engine.
    pub fn save_session(&mut self, name: String, salt: &[u8], tokens: &[u32], told: Saved) {
        match &mut self.disk {
            Some(disk) => disk.save_session(name, &mut self.cache, salt, tokens, told),
            None => told(Err(anyhow::anyhow!("there is no prompt cache"))),
        }
    }

    /// A portion of what sessions that are being saved need, in a few milliseconds, also between steps. Whether there is more.
    ///
    /// # Errors
    /// Those of [`Engine::tend`].
    pub fn tend_sessions(&mut self) -> Result<bool> {
        match &mut self.disk {
            Some(disk) if disk.saves_sessions() => self.runner.save_named(&mut self.cache, disk),
            _ => Ok(false),
        }
    }

    /// A conversation that somebody has loaded is the next to be read into memory when nobody generates.
    pub fn read_ahead(&mut self, session: ReadAhead) {
        self.disk.iter_mut().for_each(|disk| disk.read_ahead(session.0.clone()));
    }

    /// While nobody generates: writes a portion of what conversations hold to the prompt cache, in a few milliseconds. Whether there is more to do at once.
    ///
    /// # Errors
    /// When memory could not be had: then steps fail alike.
    pub fn flush_idle(&mut self) -> Result<bool> {
        match &mut self.disk {
            Some(disk) if self.sequences.iter().all(|s| s.running.is_none()) => self.runner.save(&mut self.cache, disk),
            _ => Ok(false),
        }
    }

    /// While nobody generates and [`Engine::tend`] has no more to do: reads a portion of what was used last before this start into memory, in a few milliseconds. Whether there
    /// is more to do at once. A generation that is started does not wait for it.
    ///
    /// # Errors
    /// Those of [`Engine::tend`].
    pub fn prefetch(&mut self) -> Result<bool> {
        match &mut self.disk {
            Some(disk) if self.sequences.iter().all(|s| s.running.is_none()) => {
                disk.prefetch(&mut self.cache, &mut self.runner)
            }
            _ => Ok(false),
        }
    }

    /// Before the end: all that conversations hold is written to the prompt cache.
    ///
    /// # Errors
    /// Those of [`Engine::tend`].
    pub fn save(&mut self) -> Result<()> {
        self.disk.iter().for_each(PromptCache::wait_for_sums);
        // What was looked through is looked through again.
        self.disk.iter_mut().for_each(|disk| (disk.saving.new, disk.saving.last) = (true, true));
        while self.flush_idle()? {}
        self.disk.iter_mut().for_each(|disk| disk.saving.last = false);
        self.disk.iter().for_each(PromptCache::flush);
        Ok(())
    }

    /// What lies in memory of this machine of what a device had no room for; `None` where nothing may.
    pub fn spilled(&self) -> Option<Spilled> {
        self.runner.spill.as_ref().map(Spill::status)
    }

    /// Sequences that wait for what is on disk, or in memory of this machine.
    pub(super) fn poll_restores(&mut self, idle: bool) -> Result<()> {
        spill::poll_restores(&mut self.sequences, &mut self.cache, &mut self.runner, self.disk.as_mut())?;
        match &mut self.disk {
            Some(disk) => disk.poll_restores(&mut self.sequences, &mut self.cache, &mut self.runner, idle),
            None => Ok(()),
        }
    }
}
