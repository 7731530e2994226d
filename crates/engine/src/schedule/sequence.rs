//! A sequence: the tokens of a conversation or request, how many of them are computed, and the blocks it holds.

use std::collections::VecDeque;
use std::sync::Arc;

use sluice_cache::{BlockHash, KvCache, SequenceBlocks};

use crate::constraint::{Constraint, Guide};
use crate::draft::SequenceDrafts;
use crate::sampling::{History, LogitsProcessor, Logprobs, SamplingParams};
use crate::step::pooling::{Pooled, Pooling};
use crate::tiers::restore::Restore;

/// Identifies a sequence of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId(pub(crate) u64);

/// What a sequence is asked to generate.
#[derive(Clone, Debug, Default)]
pub struct Generation {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Tokens that end the answer. The one that ends it is reported, but is not part of the sequence.
    pub stop_ids: Vec<u32>,
    /// Positions in the sequence after which similar prompts are likely to differ. A model with recurrent layers keeps a copy of its state there.
    pub snapshot_points: Vec<usize>,
    /// Reports log-probabilities of each token and of this many of the likeliest ones: see [`crate::Engine::take_logprobs`].
    pub logprobs: Option<usize>,
    /// Changes logits before tokens are chosen from them.
    pub processor: Option<Arc<dyn LogitsProcessor>>,
    /// What the answer must match.
    pub constraint: Option<Arc<Constraint>>,
    /// Tokens that the answer may have. Drafts are taken from them; they change nothing else.
    pub prediction: Vec<u32>,
    /// Generates no tokens, but makes a vector of the prompt's hidden states: see [`crate::Engine::take_embedding`].
    pub pooling: Option<Pooling>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// One of the stop tokens came.
    Stop,
    /// [`Generation::max_tokens`] were generated.
    Length,
    /// The context is full.
    ContextFull,
    /// The caller stopped it.
    Cancelled,
    /// Its tokens could not be computed: [`crate::Engine::take_failure`] says why.
    Failed,
}

impl Finish {
    /// Its name in reports: `stop`, `length`, ...
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

/// What a step did for a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// Part of the prompt was computed.
    Prefill {
        /// The sequence.
        id: SequenceId,
        /// How many of the prompt's new tokens are computed.
        done: usize,
        /// How many new tokens the prompt has.
        total: usize,
    },
    /// A token was generated.
    Token {
        /// The sequence.
        id: SequenceId,
        /// The token.
        token: u32,
    },
    /// The generation ended.
    Finished {
        /// The sequence.
        id: SequenceId,
        /// Why.
        reason: Finish,
    },
}

impl Event {
    /// The sequence that it is about.
    pub fn id(&self) -> SequenceId {
        match self {
            Event::Prefill { id, .. } | Event::Token { id, .. } | Event::Finished { id, .. } => *id,
        }
    }
}

/// A generation under way.
pub(crate) struct Running {
    pub generation: Generation,
    /// Tokens generated so far.
    pub generated: usize,
    /// Position of the prompt's first new token.
    pub prompt_from: usize,
    /// The tokens seen, if penalties need them.
    pub history: Option<History>,
    /// Follows the sequence's tokens through the constraint, whatever is computed of them.
    pub guide: Option<Guide>,
    /// The embedding in the making, if one was asked for.
    pub pooled: Option<Pooled>,
    /// Generations are served in ascending order of this number.
    pub turn: u64,
}

/// The tokens of a conversation or request, and what is computed of them.
pub(crate) struct Sequence {
    pub id: SequenceId,
    pub tokens: Vec<u32>,
    /// Tokens whose keys, values and states are in the caches.
    pub computed: usize,
    /// Its blocks and state.
    pub held: SequenceBlocks,
    /// The root of its prefix. Sequences with different roots share nothing.
    pub root: BlockHash,
    /// Whether what it computes is kept for others.
    pub shares: bool,
    /// Positions where a copy of its recurrent state is kept, ascending.
    pub snapshot_points: Vec<usize>,
    /// Tokens of the generation's prompt that were reused instead of computed.
    pub reused: usize,
    /// How many of the reused tokens came from disk.
    pub restored: usize,
    /// How far it is with what the tiers have of its prompt.
    pub restore: Restore,
    /// Log-probabilities of the last step's tokens, until they are taken; `None` for a token that was not drawn. Empty if nobody asks for them.
    pub logprobs: VecDeque<Option<Logprobs>>,
    /// Drafts of the last generation, if there are any.
    pub drafts: Option<Box<SequenceDrafts>>,
    /// The embedding of its prompt, until it is taken.
    pub embedding: Option<Vec<f32>>,
    pub running: Option<Running>,
    /// The step that used it last.
    pub last_used: u64,
}

impl Sequence {
    /// A sequence without tokens. `held` is empty.
    pub fn new(id: SequenceId, root: BlockHash, held: SequenceBlocks) -> Sequence {
        Sequence {
            id,
            tokens: Vec::new(),
            computed: 0,
            held,
            root,
            shares: false,
            snapshot_points: Vec::new(),
            reused: 0,
            restored: 0,
            restore: Restore::NotStarted,
            logprobs: VecDeque::new(),
            drafts: None,
            embedding: None,
            running: None,
            last_used: 0,
        }
    }

    /// The next position where a copy of its state is to be kept.
    pub fn next_snapshot_point(&self) -> Option<usize> {
        self.snapshot_points.iter().copied().find(|point| *point > self.computed)
    }

    /// Tokens that are not computed yet.
    pub fn uncomputed(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether an embedding is made of its prompt, so that it has no logits.
    pub fn embeds(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.pooled.is_some())
    }

    /// Whether the only token left to compute is the one that it has just generated. The last token of a prompt is not the same: a prompt of a single token
    /// waits behind prompts that were started earlier.
    pub fn generates(&self) -> bool {
        self.uncomputed() == 1 && !self.held.is_empty() && self.running.as_ref().is_some_and(|r| r.generated > 0)
    }

    /// Gives up its blocks. What it computed stays in the prefix cache, if it shares: it is reused when the sequence continues, or computed again.
    pub fn retire(&mut self, cache: &mut KvCache) {
        if self.shares {
            cache.retire(&mut self.held, self.root, &self.tokens, self.computed);
        } else {
            cache.release(&mut self.held);
        }
        self.computed = 0;
        self.restore = Restore::NotStarted;
    }

    /// Continues after a prefix of `to` tokens that was restored to its blocks.
    pub fn finish_restore(&mut self, cache: &mut KvCache, to: usize, has_states: bool) {
        (self.computed, self.reused) = (to, to);
        cache.publish(&mut self.held, self.root, &self.tokens, to);
        if has_states && self.running.is_some() {
            cache.snapshot(&mut self.held, self.root, &self.tokens, to);
        }
        cache.drop_before_window(&mut self.held, to);
    }
}
