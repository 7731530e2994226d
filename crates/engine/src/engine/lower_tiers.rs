//! The prompt cache on disk and the tier in host memory: status, work for idle times, and named conversations.

use anyhow::Result;

use super::Engine;
use crate::tiers::disk::options::PromptCacheStatus;
use crate::tiers::disk::sessions::{ReadAhead, Saved, Sessions};
use crate::tiers::host::tier::HostTierStatus;

impl Engine {
    /// Contents and counters of the prompt cache; `None` without one.
    pub fn prompt_cache(&self) -> Option<PromptCacheStatus> {
        self.tiers.disk_status()
    }

    /// Contents and counters of the tier in host memory; `None` without one.
    pub fn host_tier(&self) -> Option<HostTierStatus> {
        self.tiers.host_status()
    }

    /// New messages about the prompt cache, a line each: why there is none although it was asked for, or no longer, and what was lost.
    pub fn take_prompt_cache_notes(&mut self) -> Vec<String> {
        self.tiers.take_notes()
    }

    /// Names of conversations in the prompt cache; `None` without one.
    pub fn sessions(&self) -> Option<Sessions> {
        self.tiers.sessions()
    }

    /// Saves a conversation to the prompt cache under a name, replacing another of that name. [`Engine::flush_sessions`] does the work. `done` is called from
    /// another thread once the conversation is durable, or cannot be saved; it is dropped if the engine ends before that.
    pub fn save_session(&mut self, name: String, salt: &[u8], tokens: &[u32], done: Saved) {
        self.tiers.save_session(name, &mut self.cache, salt, tokens, done);
    }

    /// For a few milliseconds, copies what sessions that are being saved need. May be called between steps. Returns whether there is more.
    ///
    /// # Errors
    /// Those of [`Engine::flush_idle`].
    pub fn flush_sessions(&mut self) -> Result<bool> {
        self.tiers.save_sessions(&mut self.cache, &mut self.runner.blocks())
    }

    /// Makes a loaded conversation the next that [`Engine::prefetch`] reads.
    pub fn read_ahead(&mut self, session: ReadAhead) {
        self.tiers.read_ahead(&session);
    }

    /// If nothing runs: for a few milliseconds, copies what conversations hold to the prompt cache. Returns whether there is more to do now.
    ///
    /// # Errors
    /// When there is no memory for blocks. Then steps fail as well.
    pub fn flush_idle(&mut self) -> Result<bool> {
        if self.sequences.any_running() {
            return Ok(false);
        }
        self.tiers.flush_idle(&mut self.cache, &mut self.runner.blocks())
    }

    /// If nothing runs: for a few milliseconds, reads prefixes that were used last before this start into the caches. Call it once [`Engine::flush_idle`] has no
    /// more to do. Returns whether there is more to do now. A generation that is started does not wait for it.
    ///
    /// # Errors
    /// Those of [`Engine::flush_idle`].
    pub fn prefetch(&mut self) -> Result<bool> {
        if self.sequences.any_running() {
            return Ok(false);
        }
        self.tiers.prefetch(&mut self.cache, &mut self.runner.blocks())
    }

    /// Before the engine's end: writes everything that conversations hold to the prompt cache.
    ///
    /// # Errors
    /// Those of [`Engine::flush_idle`].
    pub fn save(&mut self) -> Result<()> {
        self.tiers.begin_last_flush();
        while self.flush_idle()? {}
        self.tiers.end_last_flush();
        Ok(())
    }
}
