//! Chains of the prompt cache that have a name: conversations that are to be gone on with after a restart. Names are looked up and taken away beside the engine;
//! what one is given to is copied out by the engine, a portion at a time between its steps.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::Instant;

use anyhow::{Result, anyhow, bail, ensure};
use sluice_backend::{Backend, KvPool};
use sluice_cache::disk::{Chain, Lookups, MOST_NAME};
use sluice_cache::{BlockHash, KvCache};

use super::PromptCache;
use super::saving::PORTION;
use super::writer::{Command, Shared, Told};

/// A conversation that has a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    pub name: String,
    /// Tokens of it that are in the prompt cache.
    pub tokens: usize,
    /// When it was saved: seconds since 1970.
    pub created: u64,
}

/// What [`crate::Engine::save_session`] tells when it is done.
pub type Saved = Box<dyn FnOnce(Result<Session>) + Send>;

/// A conversation that is to be read into memory.
#[derive(Clone, Debug)]
pub struct ReadAhead(pub(crate) Chain);

/// Tokens of a session, and what [`crate::Engine::read_ahead`] takes.
#[derive(Clone, Debug)]
pub struct LoadedSession {
    pub tokens: Vec<u32>,
    pub ahead: ReadAhead,
}

pub(super) struct Inner {
    pub lookups: Lookups,
    pub commands: Sender<Command>,
    pub shared: Arc<Shared>,
}

/// The names, for any thread; good as long as the engine is there.
#[derive(Clone)]
pub struct Sessions(Weak<Inner>);

/// # Errors
/// What can be no name: it is part of a path.
fn check_name(name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let good = (1..=MOST_NAME).contains(&name.len()) && name.chars().all(plain) && !name.starts_with('.');
    ensure!(
        good,
        "a session's name has 1 to {MOST_NAME} letters, digits, '-', '_' and '.', and does not begin with '.'"
    );
    Ok(())
}

impl Sessions {
    /// With the model's fingerprint.
    fn inner(&self) -> Result<(Arc<Inner>, u64)> {
        let over = || anyhow!("the prompt cache is not in use any more");
        let inner = self.0.upgrade().ok_or_else(over)?;
        if let Some(why) = inner.shared.why_not_ready() {
            bail!(why);
        }
        let model = inner.shared.model().ok_or_else(over)?;
        Ok((inner, model))
    }

    /// All of this model whose prompts have this salt, by name.
    ///
    /// # Errors
    /// A cache that has ended.
    pub fn list(&self, salt: &[u8]) -> Result<Vec<Session>> {
        let (inner, model) = self.inner()?;
        let all = inner.lookups.sessions(model, inner.lookups.root(salt))?.into_iter();
        Ok(all.map(|(name, s)| Session { name, tokens: s.tokens as usize, created: s.created }).collect())
    }

    /// The tokens of one, from disk; `None` where there is none, or not all of it any more.
    ///
    /// # Errors
    /// A cache that has ended.
    pub fn load(&self, salt: &[u8], name: &str) -> Result<Option<LoadedSession>> {
        let (inner, model) = self.inner()?;
        let all = inner.lookups.sessions(model, inner.lookups.root(salt))?;
        let Some((_, session)) = all.into_iter().find(|(n, _)| n == name) else { return Ok(None) };
        let chain = inner.lookups.chain(&(model, session.end), &mut HashMap::new(), || inner.shared.is_well())?;
        Ok(chain.map(|chain| LoadedSession { tokens: chain.tokens.clone(), ahead: ReadAhead(chain) }))
    }

    /// Takes a name away; what was computed stays as long as there is room. Whether there was one. Waits for the disk.
    ///
    /// # Errors
    /// A cache that has ended.
    pub fn delete(&self, salt: &[u8], name: &str) -> Result<bool> {
        let (tell, told) = std::sync::mpsc::channel();
        let told = {
            let (inner, _) = self.inner()?;
            // If it is gone, so is the answer.
            let _ = inner.commands.send(Command::Forget(inner.lookups.root(salt), name.to_owned(), tell));
            told
        };
        told.recv().map_err(|_| anyhow!("the prompt cache is not in use any more"))
    }
}

/// A session that is being saved.
pub(crate) struct Naming {
    name: String,
    end: BlockHash,
    /// What is to be copied out first.
    left: VecDeque<BlockHash>,
    told: Saved,
}

impl PromptCache {
    pub fn sessions(&self) -> Sessions {
        Sessions(Arc::downgrade(&self.inner))
    }

    /// Has what is in memory of a conversation written, and named.
    pub fn save_session(&mut self, name: String, cache: &mut KvCache, salt: &[u8], tokens: &[u32], told: Saved) {
        let root = cache.root(salt);
        let kept = cache.mark_for_offload(root, tokens);
        let checked = check_name(&name).and_then(|()| {
            if let Some(why) = self.shared.why_not_ready() {
                bail!(why);
            }
            ensure!(
                kept.tokens >= self.min_tokens(),
                "{} tokens of the session could be kept, fewer than the {} of --prompt-cache-min-tokens",
                kept.tokens,
                self.min_tokens()
            );
            kept.path.last().copied().ok_or_else(|| anyhow!("there is nothing to save"))
        });
        match checked {
            Ok(end) => {
                let left = kept.path.into_iter().chain(kept.earlier_state).collect();
                self.namings.push_back(Naming { name, end, left, told });
            }
            Err(e) => told(Err(e)),
        }
    }

    /// Whether sessions wait to be written.
    pub fn saves_sessions(&self) -> bool {
        !self.namings.is_empty()
    }

    /// A portion of the sessions that are being saved. Whether there is more. All chores are done.
    pub fn save_named(&mut self, cache: &mut KvCache, backend: &mut dyn Backend, kv: &[KvPool]) -> bool {
        let begun = Instant::now();
        while let Some(mut naming) = self.namings.pop_front() {
            while let Some(hash) = naming.left.front().copied().filter(|_| self.shared.is_well()) {
                if begun.elapsed() >= PORTION || !self.has_room() {
                    self.namings.push_front(naming);
                    return true;
                }
                naming.left.pop_front();
                if let Some(leaving) = cache.offload_by_hash(&hash)
                    && !self.copy_out(&leaving, backend, kv)
                {
                    cache.forget_offloaded(&leaving.hash);
                }
            }
            let told: Told = Box::new({
                let (name, told) = (naming.name.clone(), naming.told);
                move |named| {
                    let session = |s: sluice_cache::disk::Session| Session {
                        name,
                        tokens: s.tokens as usize,
                        created: s.created,
                    };
                    told(named.map(session).ok_or_else(|| anyhow!("the prompt cache had no room for the session")));
                }
            });
            self.send(Command::Name(naming.name, naming.end, told));
        }
        false
    }
}
