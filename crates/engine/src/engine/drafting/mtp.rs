//! The drafter that is the checkpoint's own MTP head: it predicts the token after the next one, from the final hidden state of a token and the embedding of the next one.
//!
//! Its keys and values are one more layer of the model's cache. The entry of a token is made of that token and the state of the token before, so it depends on nothing
//! that comes later, and is shared, evicted, written to disk and restored with the other layers' entries. Where that state is not known, as behind a reused prefix,
//! zeros stand for it.

use std::time::Instant;

use sluice_backend::Logits;

use super::drafter::{DraftRequest, DraftWork, Drafter, EngineParts};
use crate::draft::{DrafterKind, MAX_STEP_DRAFTS, class_of_probability};
use crate::sampling::draft_sampler::DraftSampler;
use crate::schedule::plan::Plan;
use crate::schedule::sequence::{Sequence, SequenceId};
use crate::step::runner::MtpInput;

/// Entries of an answer are made when a draft needs them, or once their states take so much memory: many at once take little longer than one.
const KEPT_BYTES: usize = 2 << 20;

/// A sequence's entries.
struct Tracked {
    id: SequenceId,
    /// The tokens before this position have entries.
    made: usize,
    /// The position of the first of `states`.
    first: usize,
    /// Final hidden states: `[tokens, hidden]`.
    states: Vec<f32>,
}

impl Tracked {
    /// The position behind the last state.
    fn end(&self, hidden: usize) -> usize {
        self.first + self.states.len() / hidden
    }

    /// Appends the state before the token at `position`, or zeros.
    fn state_before(&self, position: usize, hidden: usize, out: &mut Vec<f32>) {
        let at = position.checked_sub(self.first + 1).map(|at| at * hidden);
        match at.and_then(|at| self.states.get(at..at + hidden)) {
            Some(state) => out.extend_from_slice(state),
            None => out.resize(out.len() + hidden, 0.0),
        }
    }

    /// Notes that all tokens before `to` have entries, and drops the states that were kept for them.
    fn make(&mut self, to: usize, hidden: usize) {
        self.made = to;
        // The next entry is made of the state before it.
        let gone = (to.saturating_sub(1)).saturating_sub(self.first).min(self.states.len() / hidden);
        self.states.drain(..gone * hidden);
        self.first += gone;
    }
}

/// See the module.
pub(crate) struct MtpHead {
    sampler: DraftSampler,
    hidden: usize,
    /// The most tokens and sequences of a step.
    max_tokens: usize,
    max_sequences: usize,
    /// How many states are kept before entries are made of them.
    kept: usize,
    tracked: Vec<Tracked>,
    /// The input of the head's next step: sequences, tokens, and the state that goes with each token.
    inputs: Vec<MtpInput>,
    tokens: Vec<u32>,
    states: Vec<f32>,
    /// The sequences of the next round: (index in `asked`, the token just drawn), and the states that they go on from: `[sequences, hidden]`.
    going_on: Vec<(usize, u32)>,
    passed: Vec<f32>,
}

impl MtpHead {
    /// For steps of at most `max_tokens` tokens of `max_sequences` sequences, and states of `hidden` values.
    pub fn new(sampler: DraftSampler, hidden: usize, max_tokens: usize, max_sequences: usize) -> MtpHead {
        MtpHead {
            sampler,
            hidden,
            max_tokens,
            max_sequences,
            kept: (KEPT_BYTES / (hidden * size_of::<f32>())).clamp(1, max_tokens),
            tracked: Vec::new(),
            inputs: Vec::with_capacity(max_sequences),
            tokens: Vec::with_capacity(max_tokens),
            states: Vec::with_capacity(max_tokens * hidden),
            going_on: Vec::with_capacity(max_sequences),
            passed: Vec::with_capacity(max_sequences * hidden),
        }
    }

    fn find(&self, id: SequenceId) -> Option<usize> {
        self.tracked.iter().position(|t| t.id == id)
    }

    fn clear(&mut self) {
        self.inputs.clear();
        self.tokens.clear();
        self.states.clear();
    }

    /// Adds the missing entries of a sequence before `to` to the head's next step. Returns false if none is missing or they do not fit.
    fn add(&mut self, at: usize, sequence: usize, s: &Sequence, to: usize, has_logits: bool) -> bool {
        let t = &self.tracked[at];
        let room = self.max_tokens - self.tokens.len();
        // Only after failures more entries are missing than a step takes. Then the oldest are left out.
        let from = t.made.max(to.saturating_sub(self.max_tokens));
        if from >= to || to - from > room || self.inputs.len() == self.max_sequences {
            return false;
        }
        for position in from..to {
            self.tokens.push(s.tokens[position]);
            t.state_before(position, self.hidden, &mut self.states);
        }
        self.inputs.push(MtpInput { sequence, tokens: to - from, position: from, has_logits });
        true
    }

    /// Makes the missing entries of sequences that have at least so many states.
    fn make_entries(&mut self, at_least: usize, parts: &mut EngineParts) {
        let hidden = self.hidden;
        loop {
            self.clear();
            self.add_entries(at_least, parts, hidden);
            if self.inputs.is_empty() {
                return;
            }
            parts.runner.mtp_step(&self.inputs, &self.tokens, &self.states, parts.sequences);
        }
    }

    /// Adds as many of these sequences as fit to the head's next step.
    fn add_entries(&mut self, at_least: usize, parts: &EngineParts, hidden: usize) {
        for at in 0..self.tracked.len() {
            let t = &self.tracked[at];
            let Some(i) = parts.sequences.iter().position(|s| s.id == t.id) else { continue };
            let s = &parts.sequences[i];
            if s.running.is_none() || t.end(hidden) != s.computed || t.states.len() < at_least * hidden {
                continue;
            }
            if !self.add(at, i, s, s.computed, false) {
                continue;
            }
            self.tracked[at].make(s.computed, hidden);
        }
    }

    /// Draws a token for each sequence of the step, and notes those that go on.
    fn draw(&mut self, asked: &[DraftRequest], of: &[usize], depth: usize, logits: Logits, parts: &mut EngineParts) {
        let (hidden, runner) = (self.hidden, &mut *parts.runner);
        self.sampler.clear();
        for &number in of {
            let s = &parts.sequences[asked[number].sequence];
            let params = s.running.as_ref().map(|running| &running.generation.sampling);
            self.sampler.push(number, params.unwrap_or(&Default::default()), s.tokens.len() + depth);
        }
        self.going_on.clear();
        for row in self.sampler.draw(&mut *runner.backend, logits) {
            let ask = asked[row.of];
            let (Some((token, likely)), Some(drafts)) = (row.drawn, &mut parts.sequences[ask.sequence].drafts) else {
                continue;
            };
            drafts.draft.push(token, class_of_probability(likely));
            if depth + 1 < ask.most && drafts.next_chance() >= ask.least_chance {
                self.going_on.push((row.of, token));
            }
        }
        self.passed.clear();
        for (number, _) in &self.going_on {
            let Some(place) = of.iter().position(|n| n == number) else { continue };
            let from = self.passed.len();
            self.passed.resize(from + hidden, 0.0);
            runner.mtp_hidden(place, &mut self.passed[from..]);
        }
    }
}

impl Drafter for MtpHead {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Mtp
    }

    fn begin(&mut self, s: &Sequence, _prediction: &[u32], _most: usize) {
        let at = self.find(s.id).unwrap_or_else(|| {
            let states = Vec::with_capacity((self.max_tokens + self.kept) * self.hidden);
            self.tracked.push(Tracked { id: s.id, made: 0, first: 0, states });
            self.tracked.len() - 1
        });
        let t = &mut self.tracked[at];
        // Tokens that are computed already have entries.
        (t.made, t.first) = (s.computed, s.computed);
        t.states.clear();
    }

    fn end(&mut self, id: SequenceId) {
        self.tracked.retain(|t| t.id != id);
    }

    fn behind(&self, s: &Sequence) -> Option<usize> {
        let t = &self.tracked[self.find(s.id)?];
        (t.end(self.hidden) == s.computed && s.computed > 0).then_some(0)
    }

    fn propose(&mut self, asked: &[DraftRequest], parts: &mut EngineParts) -> DraftWork {
        let started = Instant::now();
        // 1. Blocks for what may be drafted, and the entries that are missing
        self.clear();
        let mut of: [usize; MAX_STEP_DRAFTS] = [0; MAX_STEP_DRAFTS];
        let mut count = 0;
        for (number, ask) in asked.iter().enumerate().take(MAX_STEP_DRAFTS) {
            let s = &mut parts.sequences[ask.sequence];
            let Some(at) = self.find(s.id).filter(|_| self.behind(s).is_some()) else { continue };
            let total = s.tokens.len() + ask.most - 1;
            if !parts.cache.has_free(&s.held, total) || parts.cache.grow(&mut s.held, total).is_err() {
                continue;
            }
            let s = &parts.sequences[ask.sequence];
            if self.add(at, ask.sequence, s, s.tokens.len(), true) {
                self.tracked[at].make(s.tokens.len(), self.hidden);
                of[count] = number;
                count += 1;
            }
        }
        if count == 0 {
            return DraftWork::default();
        }
        // 2. Rounds: a token for each sequence. The entry of a proposed token is made again once the token is certain
        let mut rounds = 0;
        loop {
            let outcome = parts.runner.mtp_step(&self.inputs, &self.tokens, &self.states, parts.sequences);
            if !outcome.failed.is_empty() {
                break;
            }
            self.draw(asked, &of[..count], rounds, outcome.logits, parts);
            rounds += 1;
            self.clear();
            count = self.going_on.len();
            if count == 0 {
                break;
            }
            for (place, (number, token)) in self.going_on.iter().enumerate() {
                let sequence = asked[*number].sequence;
                let position = parts.sequences[sequence].tokens.len() + rounds - 1;
                self.tokens.push(*token);
                self.inputs.push(MtpInput { sequence, tokens: 1, position, has_logits: true });
                of[place] = *number;
            }
            self.states.extend_from_slice(&self.passed);
        }
        // The step may compute fewer of them, so it takes the blocks anew.
        for ask in asked {
            let s = &mut parts.sequences[ask.sequence];
            parts.cache.shrink(&mut s.held, s.tokens.len());
        }
        DraftWork { rounds, drafting: started.elapsed(), ..DraftWork::default() }
    }

    fn after_step(&mut self, plan: &Plan, parts: &mut EngineParts) {
        let hidden = self.hidden;
        // 1. The states of the tokens that were computed and not cut
        for (scheduled, of) in plan.scheduled.iter().enumerate() {
            let s = &parts.sequences[of.sequence];
            let Some(at) = self.find(s.id).filter(|_| s.running.is_some()) else { continue };
            let position = parts.runner.position(scheduled);
            let Some(stay) = s.computed.checked_sub(position).filter(|stay| *stay > 0) else { continue };
            let t = &mut self.tracked[at];
            if t.end(hidden) != position {
                // The sequence goes on behind a reused prefix, whose entries are there.
                t.states.clear();
                (t.made, t.first) = (position, position);
            }
            parts.runner.hidden_of(scheduled, 0..stay, |state| t.states.extend_from_slice(state));
        }
        // 2. Entries of prompts are made at once, others when drafts need them or there are many
        let is_prompt = plan.generating < plan.scheduled.len();
        self.make_entries(if is_prompt { 2 } else { self.kept }, parts);
    }
}
