//! One conversation or request: its tokens, how far they are computed, what it holds of the caches.

use std::sync::Arc;

use sluice_cache::{BlockHash, SequenceBlocks};

use crate::constraint::{Constraint, Guide};
use crate::pooling::{Pooled, Pooling};
use crate::prompt_cache::Restore;
use crate::sampler::{History, Logprobs, SamplingParams};

/// Names a sequence of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId(pub(crate) u64);

/// What a sequence is asked to generate.
#[derive(Clone, Debug, Default)]
pub struct Generation {
    pub sampling: SamplingParams,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Tokens that end the answer; the one that ends it is reported, but not part of the sequence.
    pub stop_ids: Vec<u32>,
    /// Positions, in the sequence, after which prompts may part that begin like this one: a model with recurrent layers keeps a copy of its state there.
    pub marks: Vec<usize>,
    /// How likely each token was is wanted, and so many of the likeliest: [`crate::Engine::take_logprobs`].
    pub logprobs: Option<usize>,
    /// What the answer keeps to.
    pub constraint: Option<Arc<Constraint>>,
    /// No token is generated: the prompt's hidden states are made one vector of, [`crate::Engine::take_embedding`].
    pub pooling: Option<Pooling>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// One of the stop tokens came.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    ContextFull,
    /// The caller stopped it.
    Cancelled,
    /// Its tokens could not be computed: [`crate::Engine::take_failure`] says why.
    Failed,
}

impl Finish {
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::ContextFull => "context_full",
            Finish::Cancelled => "cancelled",
            Finish::Failed => "failed",
        }
    }
}

/// What one step did for a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// Part of the prompt was computed: so many of its new tokens.
    Prefill {
        id: SequenceId,
        done: usize,
        total: usize,
    },
    Token {
        id: SequenceId,
        token: u32,
    },
    Finished {
        id: SequenceId,
        reason: Finish,
    },
}

impl Event {
    /// Whose it is.
    pub fn id(&self) -> SequenceId {
        match self {
            Event::Prefill { id, .. } | Event::Token { id, .. } | Event::Finished { id, .. } => *id,
        }
    }
}

/// A generation under way.
pub(crate) struct Running {
    pub generation: Generation,
    pub generated: usize,
    /// Where the prompt's new tokens began.
    pub prompt_from: usize,
    /// The tokens seen, where penalties ask for them.
    pub history: Option<History>,
    /// Where it is in what it keeps to. It follows the sequence's tokens, whatever becomes of what was computed of them.
    pub guide: Option<Guide>,
    /// The vector that is asked for, as far as it is made.
    pub pooled: Option<Pooled>,
    /// Its turn: who was started first goes first.
    pub turn: u64,
}

pub(crate) struct Sequence {
    pub id: SequenceId,
    pub tokens: Vec<u32>,
    /// Tokens whose keys, values and states are in the caches.
    pub computed: usize,
    pub held: SequenceBlocks,
    /// Where its prefix begins: with another root nothing is shared.
    pub root: BlockHash,
    /// What it computes is kept for others: it was asked to generate.
    pub shares: bool,
    /// Places where a copy of its recurrent state is to be left, ascending.
    pub marks: Vec<usize>,
    /// Tokens of the generation's prompt that were there.
    pub adopted: usize,
    /// Those of them that came from disk.
    pub restored: usize,
    /// How far it is with what is on disk of its prompt.
    pub restore: Restore,
    /// Of the token that came last, where they are wanted.
    pub logprobs: Option<Logprobs>,
    /// The vector that was made of its prompt, until it is taken.
    pub embedding: Option<Vec<f32>>,
    pub running: Option<Running>,
    /// The step that last used it.
    pub last_used: u64,
}

impl Sequence {
    /// One without tokens, that holds nothing.
    pub fn new(id: SequenceId, root: BlockHash, held: SequenceBlocks) -> Sequence {
        Sequence {
            id,
            tokens: Vec::new(),
            computed: 0,
            held,
            root,
            shares: false,
            marks: Vec::new(),
            adopted: 0,
            restored: 0,
            restore: Restore::No,
            logprobs: None,
            embedding: None,
            running: None,
            last_used: 0,
        }
    }

    /// The place after the computed tokens where a copy of its state is to be left next.
    pub fn next_mark(&self) -> Option<usize> {
        self.marks.iter().copied().find(|mark| *mark > self.computed)
    }

    /// Tokens that are not computed yet.
    pub fn due(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether its prompt is made a vector of, and so has no logits.
    pub fn embeds(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.pooled.is_some())
    }

    /// Whether the token that it generated last is all that it has to compute. The end of a prompt is not the same: who goes on with a conversation by a
    /// single token waits behind those that came before.
    pub fn generates(&self) -> bool {
        self.due() == 1 && !self.held.is_empty() && self.running.as_ref().is_some_and(|r| r.generated > 0)
    }
}
