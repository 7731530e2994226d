//! What goes to the engine's thread, and what comes back.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use sluice_engine::sampling::Logprobs;
use sluice_engine::{DraftCounts, Engine, Finish, Generation, ReadAhead, Saved};
use tokio::sync::mpsc::UnboundedSender;

/// A prompt, and how to answer it.
pub struct Submission {
    /// Token ids; at least one.
    pub prompt: Vec<u32>,
    /// For the first choice; choice `i` adds `i` to its seed.
    pub generation: Generation,
    /// How many answers to generate.
    pub choices: usize,
    /// Only submissions with equal salts share cached prefixes.
    pub salt: Vec<u8>,
    /// Where updates go.
    pub updates: UnboundedSender<Update>,
    /// When the request arrived, for metrics.
    pub arrived: Instant,
}

/// Progress of a submission. Choices are numbered from 0.
#[derive(Debug)]
pub enum Update {
    /// Its prompt is being computed; this many of its tokens were cached.
    Started {
        /// Tokens.
        cached: usize,
    },
    /// A choice has one more token.
    Token {
        /// Which choice.
        choice: usize,
        /// The token's id.
        token: u32,
        /// Its log-probabilities, if they were requested.
        logprobs: Option<Logprobs>,
    },
    /// The embedding of the prompt, if it was requested: `[hidden]`.
    Embedding(Vec<f32>),
    /// A choice is complete.
    Finished {
        /// Which choice.
        choice: usize,
        /// Why it ended.
        reason: Finish,
        /// What was drafted for it.
        drafted: DraftCounts,
    },
    /// The request could not be computed, for this reason.
    Failed(String),
}

/// What others ask of the thread. Numbers are ids of submissions.
pub(super) enum Command {
    Submit(u64, Submission, CountGuard),
    /// Cancels all of a submission.
    Cancel(u64),
    /// Ends one choice of a submission.
    CancelChoice(u64, usize),
    SaveSession {
        name: String,
        salt: Vec<u8>,
        tokens: Vec<u32>,
        reply: Saved,
    },
    ReadAhead(ReadAhead),
    /// Has something done with the engine, between two steps.
    Run(Box<dyn FnOnce(&mut Engine) + Send>),
    Stop,
}

/// What the engine's thread shares with its handle.
#[derive(Default)]
pub(super) struct ThreadState {
    /// The id of the next submission.
    pub next_id: AtomicU64,
    /// Submissions that have not started.
    pub waiting: Arc<AtomicUsize>,
    /// Submissions that have started and are not over.
    pub running: Arc<AtomicUsize>,
    /// No more submissions are taken.
    pub stopping: AtomicBool,
    /// Why the engine has ended without being told to.
    pub failure: OnceLock<String>,
}

/// Counts one submission until it is dropped.
pub(super) struct CountGuard(Arc<AtomicUsize>);

impl CountGuard {
    /// Adds one to `count`. Also returns the count before.
    pub fn new(count: &Arc<AtomicUsize>) -> (CountGuard, usize) {
        let before = count.fetch_add(1, Ordering::SeqCst);
        (CountGuard(Arc::clone(count)), before)
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
