//! The interface of drafters.

use std::time::Duration;

use sluice_cache::KvCache;

use crate::draft::DrafterKind;
use crate::schedule::plan::Plan;
use crate::schedule::sequence::{Sequence, SequenceId};
use crate::step::runner::Runner;

/// A sequence that a drafter is asked about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftRequest {
    /// Its index among all sequences.
    pub sequence: usize,
    /// The most tokens to propose.
    pub most: usize,
    /// A drafter that computes each token stops before one where the chance that it and all before it come true is probably below this.
    pub least_chance: f64,
}

/// The parts of an engine that a drafter may use between two steps.
pub(crate) struct EngineParts<'a> {
    pub sequences: &'a mut [Sequence],
    pub runner: &'a mut Runner,
    pub cache: &'a mut KvCache,
    /// Tokens of the engine's vocabulary.
    pub vocabulary: usize,
}

/// What a drafter had to do for its proposals, and how long it took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DraftWork {
    /// Tokens of the sequences that it computed first, because it was behind: beyond the one or two of each step.
    pub behind: usize,
    /// The time for these tokens.
    pub catching_up: Duration,
    /// How often it went through its layers to propose.
    pub rounds: usize,
    /// The time for the rounds.
    pub drafting: Duration,
}

/// Proposes what may follow the tokens of sequences. A wrong proposal costs time and changes no answer.
pub(crate) trait Drafter: Send {
    /// Its kind, for statistics.
    fn kind(&self) -> DrafterKind;
    /// A generation begins for `s`, which may grow to `most` tokens. `prediction`: the client's guess of the answer, or empty.
    fn begin(&mut self, s: &Sequence, prediction: &[u32], most: usize);
    /// The sequence was removed.
    fn end(&mut self, id: SequenceId);
    /// How many tokens of a sequence it must compute before it can propose anything, beyond the one or two of each step; `None`: it cannot propose anything.
    fn behind(&self, s: &Sequence) -> Option<usize>;
    /// Writes proposals to the drafts of the sequences in `asked`. Those drafts are empty.
    fn propose(&mut self, asked: &[DraftRequest], parts: &mut EngineParts) -> DraftWork;
    /// A step was computed and sampled.
    fn after_step(&mut self, _plan: &Plan, _parts: &mut EngineParts) {}
    /// The length of the longest sequence that it can draft for. `None`: as long as the engine's own.
    fn context(&self) -> Option<usize> {
        None
    }
    /// The memory that it holds.
    fn memory(&mut self) -> Vec<sluice_backend::MemoryUse> {
        Vec::new()
    }
}
