//! One conversation or request: its tokens, how far they are computed, where its state lies.

use sluice_cache::BlockTable;

use crate::sampler::{History, Sampler, SamplingParams};

/// Names a sequence of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId(pub(crate) u64);

/// What a sequence is asked to generate.
#[derive(Clone, Debug)]
pub struct Generation {
    pub sampling: SamplingParams,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Tokens that end the answer; the one that ends it is reported, but not part of the sequence.
    pub stop_ids: Vec<u32>,
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
    /// Experts that its tokens wanted could not be read.
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

/// A generation under way.
pub(crate) struct Running {
    pub sampler: Sampler,
    pub stop_ids: Vec<u32>,
    pub max_tokens: usize,
    pub generated: usize,
    /// Where the prompt's new tokens began.
    pub prompt_from: usize,
}

pub(crate) struct Sequence {
    pub id: SequenceId,
    pub tokens: Vec<u32>,
    /// Tokens whose keys, values and states are in the caches.
    pub computed: usize,
    /// One for each cache group.
    pub tables: Vec<BlockTable>,
    pub state_slot: usize,
    pub history: History,
    pub running: Option<Running>,
}
