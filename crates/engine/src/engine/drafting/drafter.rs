//! What a drafter is.

use std::time::Duration;

use sluice_cache::KvCache;

use crate::draft::DrafterKind;
use crate::schedule::plan::Plan;
use crate::schedule::sequence::{Sequence, SequenceId};
use crate::step::runner::Runner;

/// A sequence that a drafter is asked about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// Its index among all sequences.
    pub sequence: usize,
    /// Tokens to propose at most.
    pub most: usize,
    /// A drafter that computes each token stops where the chance that all so far come true is below this.
    pub least_chance: f64,
}

/// What an engine has between two steps.
pub(crate) struct Between<'a> {
    pub sequences: &'a mut [Sequence],
    pub runner: &'a mut Runner,
    pub cache: &'a mut KvCache,
    /// Tokens that there are.
    pub vocabulary: usize,
}

/// What proposing took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Work {
    /// Tokens of sequences that had to be computed before, beyond the few of each step.
    pub behind: usize,
    /// The time for these.
    pub catching_up: Duration,
    /// How often the drafter went through its layers to propose.
    pub rounds: usize,
    /// The time for that.
    pub drafting: Duration,
}

/// Proposes what may follow the tokens of sequences. A proposal may be anything: it changes speed alone.
pub(crate) trait Drafter: Send {
    /// What it is.
    fn kind(&self) -> DrafterKind;
    /// A generation begins for a sequence with these tokens, which may grow to `most`. `prediction`: what its answer may be.
    fn begin(&mut self, s: &Sequence, prediction: &[u32], most: usize);
    /// There is no such sequence any more.
    fn end(&mut self, id: SequenceId);
    /// Tokens of a sequence that it has to compute before it can propose anything, beyond the few of each step; `None`: it cannot propose anything.
    fn behind(&self, s: &Sequence) -> Option<usize>;
    /// Writes proposals behind the tokens of the sequences asked about to their drafts, which are empty.
    fn propose(&mut self, asked: &[Asked], between: &mut Between) -> Work;
    /// A step was computed and sampled.
    fn after_step(&mut self, _plan: &Plan, _between: &mut Between) {}
    /// Bytes that it holds.
    fn memory(&mut self) -> Vec<sluice_backend::MemoryUse> {
        Vec::new()
    }
}
