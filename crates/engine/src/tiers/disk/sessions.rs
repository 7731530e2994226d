//! Conversations that were saved under a name, to be continued after a restart. Any thread can list, load and delete names. To save one, the engine copies its
//! blocks out, a portion at a time between steps.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::Instant;

use sluice_cache::disk::{Chain, Error, Lookups, MOST_NAME, MOST_SESSIONS};
use sluice_cache::{BlockHash, KvCache};

use super::outbox::Outbox;
use super::saving::PORTION;
use super::shared::Shared;
use super::writer::{OnNamed, WriterCommand};
use crate::tiers::block_io::BlockIo;

/// A conversation that was saved under a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Its name.
    pub name: String,
    /// How many of its tokens are in the prompt cache.
    pub tokens: usize,
    /// When it was saved: seconds since 1970.
    pub created: u64,
}

/// Why a conversation cannot be saved, or what is saved cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// Names are parts of URLs and paths.
    #[error("a session's name has 1 to {MOST_NAME} letters, digits, '-', '_' and '.', and does not begin with '.'")]
    BadName,
    /// Too little of the conversation has blocks that can be stored.
    #[error("{kept} tokens of the session could be kept, fewer than the {min} of --prompt-cache-min-tokens")]
    TooShort {
        /// Tokens that could be kept.
        kept: usize,
        /// Tokens that a session must have.
        min: usize,
    },
    /// Not all of the conversation could be stored, or its name could not.
    #[error(
        "the prompt cache has no room for the session: its disk or its quota is full, it has written what it may in a day, or it has {MOST_SESSIONS} sessions"
    )]
    NoRoom,
    /// There is no prompt cache, or it is not in use yet or any more: why.
    #[error("{0}")]
    NotInUse(String),
    /// The index cannot be read.
    #[error(transparent)]
    Failed(#[from] Error),
}

/// Called with the result of [`crate::Engine::save_session`].
pub type Saved = Box<dyn FnOnce(Result<Session, SessionError>) + Send>;

/// A conversation that [`crate::Engine::read_ahead`] can prefetch.
#[derive(Clone, Debug)]
pub struct ReadAhead(pub(crate) Chain);

/// A loaded conversation.
#[derive(Clone, Debug)]
pub struct LoadedSession {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// For [`crate::Engine::read_ahead`].
    pub ahead: ReadAhead,
}

/// What [`Sessions`] need of the disk tier.
pub(super) struct SessionAccess {
    pub lookups: Lookups,
    pub commands: Sender<WriterCommand>,
    pub shared: Arc<Shared>,
}

/// The names of saved conversations, for any thread. Works as long as the engine exists.
#[derive(Clone)]
pub struct Sessions(Weak<SessionAccess>);

fn check_name(name: &str) -> Result<(), SessionError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let good = (1..=MOST_NAME).contains(&name.len()) && name.chars().all(plain) && !name.starts_with('.');
    if good { Ok(()) } else { Err(SessionError::BadName) }
}

fn closed() -> SessionError {
    SessionError::NotInUse("the prompt cache is not in use any more".to_owned())
}

fn check_ready(shared: &Shared) -> Result<(), SessionError> {
    shared.why_not_ready().map_or(Ok(()), |why| Err(SessionError::NotInUse(why)))
}

impl Sessions {
    /// Access, and the model's fingerprint.
    fn access(&self) -> Result<(Arc<SessionAccess>, u64), SessionError> {
        let access = self.0.upgrade().ok_or_else(closed)?;
        check_ready(&access.shared)?;
        let model = access.shared.fingerprint().ok_or_else(closed)?;
        Ok((access, model))
    }

    /// The sessions of this model with this salt, sorted by name.
    ///
    /// # Errors
    /// When the prompt cache is not in use, or its index cannot be read.
    pub fn list(&self, salt: &[u8]) -> Result<Vec<Session>, SessionError> {
        let (access, model) = self.access()?;
        let all = access.lookups.sessions(model, access.lookups.root(salt))?.into_iter();
        Ok(all.map(|(name, s)| Session { name, tokens: s.tokens as usize, created: s.created }).collect())
    }

    /// Loads the tokens of a session from disk; `None` if there is none, or not all of it exists any more.
    ///
    /// # Errors
    /// Those of [`Sessions::list`].
    pub fn load(&self, salt: &[u8], name: &str) -> Result<Option<LoadedSession>, SessionError> {
        let (access, model) = self.access()?;
        let all = access.lookups.sessions(model, access.lookups.root(salt))?;
        let Some((_, session)) = all.into_iter().find(|(n, _)| n == name) else { return Ok(None) };
        let chain = access.lookups.chain(&(model, session.end), &mut HashMap::new(), || access.shared.is_ok())?;
        Ok(chain.map(|chain| LoadedSession { tokens: chain.tokens.clone(), ahead: ReadAhead(chain) }))
    }

    /// Removes a name, and waits until that is durable. The conversation's blocks stay as long as there is room. Returns whether there was such a name.
    ///
    /// # Errors
    /// Those of [`Sessions::list`].
    pub fn delete(&self, salt: &[u8], name: &str) -> Result<bool, SessionError> {
        let (reply, replies) = std::sync::mpsc::channel();
        {
            let (access, _) = self.access()?;
            // If the writer is gone, so is the reply.
            let _ =
                access.commands.send(WriterCommand::RemoveSession(access.lookups.root(salt), name.to_owned(), reply));
        }
        replies.recv().map_err(|_| closed())
    }
}

/// A session that is being saved.
struct SessionSave {
    name: String,
    end: BlockHash,
    /// Nodes to copy before the name is given.
    remaining: VecDeque<BlockHash>,
    reply: Reply,
}

/// Calls [`Saved`] once: also where the prompt cache ends before the session is saved.
struct Reply {
    done: Option<Saved>,
    shared: Arc<Shared>,
}

impl Reply {
    fn send(mut self, result: Result<Session, SessionError>) {
        if let Some(done) = self.done.take() {
            done(result);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done(Err(check_ready(&self.shared).err().unwrap_or_else(closed)));
        }
    }
}

/// Saves sessions, one after the other.
pub(super) struct SessionSaver {
    access: Arc<SessionAccess>,
    queue: VecDeque<SessionSave>,
    /// Conversations of fewer tokens cannot be saved.
    min_tokens: usize,
}

impl SessionSaver {
    pub fn new(access: SessionAccess, min_tokens: usize) -> SessionSaver {
        SessionSaver { access: Arc::new(access), queue: VecDeque::new(), min_tokens }
    }

    pub fn sessions(&self) -> Sessions {
        Sessions(Arc::downgrade(&self.access))
    }

    /// Queues a conversation. `done` is called once it is durable, or cannot be saved.
    pub fn enqueue(&mut self, name: String, cache: &mut KvCache, salt: &[u8], tokens: &[u32], done: Saved) {
        let root = cache.root(salt);
        let kept = cache.mark_for_offload(root, tokens);
        let reply = Reply { done: Some(done), shared: Arc::clone(&self.access.shared) };
        let checked = check_name(&name).and_then(|()| {
            check_ready(&self.access.shared)?;
            let end = kept.path.last().filter(|_| kept.tokens >= self.min_tokens);
            end.copied().ok_or(SessionError::TooShort { kept: kept.tokens, min: self.min_tokens.max(1) })
        });
        match checked {
            Ok(end) => {
                let remaining = kept.path.into_iter().chain(kept.earlier_state).collect();
                self.queue.push_back(SessionSave { name, end, remaining, reply });
            }
            Err(e) => reply.send(Err(e)),
        }
    }

    /// Whether sessions are queued.
    pub fn is_busy(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Copies a portion of the queued sessions. Returns whether there is more. All queued block operations are applied.
    pub fn copy_portion(&mut self, cache: &mut KvCache, outbox: &mut Outbox, io: &mut dyn BlockIo) -> bool {
        let started = Instant::now();
        while let Some(mut save) = self.queue.pop_front() {
            while let Some(hash) = save.remaining.front().copied().filter(|_| outbox.shared.is_ok()) {
                if started.elapsed() >= PORTION || !outbox.can_grow() {
                    self.queue.push_front(save);
                    return true;
                }
                save.remaining.pop_front();
                if let Some(node) = cache.offload_by_hash(&hash)
                    && !outbox.copy_out(&node, io)
                {
                    cache.forget_offloaded(&node.hash);
                }
            }
            let on_named: OnNamed = Box::new({
                let (name, reply) = (save.name.clone(), save.reply);
                move |named| {
                    let session = |s: sluice_cache::disk::Session| Session {
                        name,
                        tokens: s.tokens as usize,
                        created: s.created,
                    };
                    reply.send(named.map(session).ok_or(SessionError::NoRoom));
                }
            });
            outbox.send(WriterCommand::NameSession(save.name, save.end, on_named));
        }
        false
    }
}
