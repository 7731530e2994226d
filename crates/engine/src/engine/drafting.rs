//! Drafts between steps: what sequences have proposed, how much of it is computed, and what is left of it after the step.

use std::ops::Range;
use std::time::Duration;

use sluice_backend::Backend;
use sluice_cache::KvCache;

use crate::draft::{
    Acceptance, Candidate, DraftCounts, DraftOptions, DraftStats, Governor, MAX_STATE_BYTES, MAX_STEP_DRAFTS, Ngram,
    SequenceDrafts,
};
use crate::options::Options;
use crate::schedule::plan::{Plan, ScheduledSequence};
use crate::schedule::sequence::Sequence;

/// Drafts of an engine.
pub(super) struct Drafting {
    options: DraftOptions,
    governor: Governor,
    /// Of all sequences: what new ones begin with.
    acceptance: Acceptance,
    /// By drafter.
    counts: Vec<DraftStats>,
    /// Tokens of a step at most.
    max_tokens: usize,
    /// Drafted tokens of a step at most.
    most: usize,
    /// For a model with recurrent layers: the first of `most` rows of the pool of states that are there for drafts.
    states: Option<u32>,
    /// Kept between steps, so that a step allocates nothing.
    candidates: Vec<Candidate>,
}

impl Drafting {
    /// `None` if nothing is drafted. `max_tokens`: of a step. `states`: see [`Drafting::state_rows`].
    pub fn new(options: &Options, max_tokens: usize, states: Option<Range<u32>>) -> Option<Drafting> {
        let (sequences, options) = (options.max_sequences, options.drafts);
        let most = states.as_ref().map_or(usize::MAX, |rows| rows.len()).min(options.rows(sequences));
        (most > 0).then(|| Drafting {
            options,
            governor: Governor::default(),
            acceptance: Acceptance::default(),
            counts: vec![DraftStats { drafter: Ngram::NAME, counts: DraftCounts::default() }],
            max_tokens,
            most,
            states: states.map(|rows| rows.start),
            candidates: Vec::with_capacity(options.tokens.min(MAX_STEP_DRAFTS) * sequences),
        })
    }

    /// How many rows of the pool of states drafts need, for states of `len` numbers: a state cannot be cut, so those after each drafted token are kept during the
    /// step. Where the backend cannot do that, nothing is drafted.
    pub fn state_rows(options: &Options, len: usize, backend: &dyn Backend) -> usize {
        let fit = MAX_STATE_BYTES / (len * size_of::<f32>()).max(1);
        if backend.keeps_states() { options.drafts.rows(options.max_sequences).min(fit) } else { 0 }
    }

    /// What was drafted since the engine was opened, by drafter.
    pub fn counts(&self) -> &[DraftStats] {
        &self.counts
    }

    /// Drafts of a sequence with this prompt, which may grow to `most` tokens. `prediction`: what its answer may be.
    pub fn of_sequence(&self, prompt: &[u32], prediction: &[u32], most: usize) -> SequenceDrafts {
        // No answer is longer.
        let prediction = &prediction[..prediction.len().min(most - prompt.len())];
        let drafter = Box::new(Ngram::new(prompt, prediction, most));
        SequenceDrafts::new(drafter, self.options.tokens.min(MAX_STEP_DRAFTS), &self.acceptance.as_guesses())
    }

    /// Adds drafted tokens to a planned step, if nobody waits for a place in it. They take only blocks that hold nothing, so they cost nobody anything that was kept.
    pub fn plan(&mut self, plan: &mut Plan, sequences: &mut [Sequence], cache: &mut KvCache, max_context: usize) {
        // 1. Proposals. They are made in any case: what comes of those that are not computed is learnt as well
        for scheduled in &plan.scheduled[..plan.generating] {
            self.propose(&mut sequences[scheduled.sequence], max_context);
        }
        if plan.waiting > 0 || plan.generating < plan.scheduled.len() {
            return;
        }
        // 2. How many of them are worth it
        self.candidates.clear();
        for (at, scheduled) in plan.scheduled.iter().enumerate() {
            let Some(drafts) = &sequences[scheduled.sequence].drafts else { continue };
            let mut chance = 1.0;
            self.candidates.extend(drafts.draft.classes.iter().enumerate().map(|(depth, class)| {
                chance *= drafts.acceptance.chance(*class);
                Candidate { chance, scheduled: at, depth }
            }));
        }
        let most = self.most.min(self.max_tokens - plan.generating);
        let chosen = if self.options.governed {
            self.governor.choose(plan.generating, most, &mut self.candidates)
        } else {
            self.candidates.sort_unstable_by_key(|c| c.depth);
            most.min(self.candidates.len())
        };
        for candidate in &self.candidates[..chosen] {
            plan.scheduled[candidate.scheduled].drafts += 1;
        }
        // 3. Blocks for them, and rows for states
        let mut states = self.states;
        for scheduled in plan.scheduled.iter_mut().filter(|scheduled| scheduled.drafts > 0) {
            let s = &mut sequences[scheduled.sequence];
            let total = s.computed + scheduled.tokens + scheduled.drafts;
            if !cache.has_free(&s.held, total) || cache.grow(&mut s.held, total).is_err() {
                scheduled.drafts = 0;
            }
            scheduled.kept_states = states;
            states = states.map(|first| first + scheduled.drafts as u32);
        }
    }

    fn propose(&self, s: &mut Sequence, max_context: usize) {
        // A copy of the state is left at such a point, where the step ends.
        let to_snapshot = s.next_snapshot_point().map_or(usize::MAX, |point| point - s.tokens.len());
        let (Some(running), Some(drafts)) = (&s.running, &mut s.drafts) else { return };
        let SequenceDrafts { drafter, draft, .. } = &mut **drafts;
        draft.clear();
        // The last token that a generation may have needs no row of its own.
        let left = running.generation.max_tokens.saturating_sub(running.generated + 1);
        let room = max_context.saturating_sub(s.tokens.len() + 1);
        let most = self.options.tokens.min(MAX_STEP_DRAFTS).min(left).min(room).min(to_snapshot);
        drafter.propose(&s.tokens, most, draft);
    }

    /// Learns from a step, before anything is settled. `tokens`: what it gave.
    pub fn learn_times(&mut self, plan: &Plan, tokens: usize, step: Duration, sampling: Duration) {
        let drafts: usize = plan.scheduled.iter().map(|scheduled| scheduled.drafts).sum();
        if plan.generating == plan.scheduled.len() {
            self.governor.learn(plan.generating, plan.generating + drafts, tokens, step, sampling);
        }
    }

    /// Learns which proposed tokens of a sequence came true. `new`: its tokens of the step.
    fn learn_acceptance(&mut self, drafts: &mut SequenceDrafts, new: &[u32]) {
        let agreed = drafts.agreed(new);
        for (at, class) in drafts.draft.classes.iter().enumerate().take(new.len().min(agreed + 1)) {
            drafts.acceptance.learn(*class, at < agreed);
            self.acceptance.learn(*class, at < agreed);
        }
    }
}

/// Ends the step for a sequence: keeps what was computed of drafted tokens that came true, and cuts the rest. `accepted`: drafted tokens whose logits were looked at.
pub(super) fn settle(
    s: &mut Sequence,
    scheduled: ScheduledSequence,
    accepted: usize,
    drafting: &mut Option<Drafting>,
    cache: &mut KvCache,
) {
    let (Some(drafting), Some(drafts)) = (drafting, &mut s.drafts) else { return };
    let new = &s.tokens[s.computed..];
    drafting.learn_acceptance(drafts, new);
    if scheduled.drafts == 0 {
        return drafts.draft.clear();
    }
    // Tokens that a constraint has forced may have been drafted, too. The last token of a sequence that goes on is computed in the next step.
    let forced = drafts.agreed(new).min(scheduled.computed_drafts).min(new.len().saturating_sub(1));
    let kept = if s.running.is_some() { accepted.max(forced) } else { accepted };
    drafts.counts.add(scheduled.drafts, kept);
    let of_drafter = drafting.counts.iter_mut().find(|known| known.drafter == drafts.drafter.name());
    of_drafter.into_iter().for_each(|known| known.counts.add(scheduled.drafts, kept));
    drafts.draft.clear();
    s.computed += kept;
    cache.shrink(&mut s.held, s.computed);
    if let Some(first) = scheduled.kept_states.filter(|_| kept < scheduled.drafts) {
        cache.set_state(&s.held, first + kept as u32);
    }
    if s.shares {
        cache.publish(&mut s.held, s.root, &s.tokens, s.computed);
    }
    if kept > 0 && s.snapshot_points.binary_search(&s.computed).is_ok() {
        cache.snapshot(&mut s.held, s.root, &s.tokens, s.computed);
    }
    cache.drop_before_window(&mut s.held, s.computed);
}
