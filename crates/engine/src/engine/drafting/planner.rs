//! Plans the drafts of a step: asks drafters for proposals, and decides how many of them the step computes.

use std::ops::Range;
use std::time::Duration;

use sluice_backend::Backend;

use super::drafter::{DraftRequest, Drafter, EngineParts};
use super::lookup::Lookup;
use crate::draft::{
    Acceptance, Candidate, DraftCosts, DraftCounts, DraftOptions, DraftStats, DrafterChoice, DrafterKind, Governor,
    MAX_STATE_BYTES, MAX_STEP_DRAFTS, SequenceDrafts,
};
use crate::options::Options;
use crate::schedule::plan::Plan;
use crate::schedule::sequence::{Sequence, SequenceId};

/// Guesses of a drafter's times before they are measured, as parts of a step without drafts: of a round, and of one token of catching up.
const GUESSED_ROUND: f64 = 0.2;
const GUESSED_TOKEN: f64 = 0.02;
/// What a new drafter may spend before it has earned anything, in times of a token.
const TRIAL: f64 = 8.0;
/// The part of what a drafter has earned that it may spend on catching up.
const SPENT: f64 = 0.5;

/// A drafter, and what was learnt of it.
pub(super) struct DrafterRecord {
    pub drafter: Box<dyn Drafter>,
    costs: DraftCosts,
    /// The time that its drafts have saved, less the time of catching up, in times of a token.
    earned: f64,
    /// Over all sequences.
    pub stats: DraftStats,
}

/// Drafts of an engine.
pub(crate) struct Drafting {
    options: DraftOptions,
    governor: Governor,
    /// Over all sequences, by kind of drafter: new sequences begin with it.
    pub(super) acceptance: [Acceptance; DrafterKind::COUNT],
    /// The look-up, which takes no time, comes first.
    pub(super) records: Vec<DrafterRecord>,
    /// The most tokens of a step.
    max_tokens: usize,
    /// The most drafted tokens of a step.
    most: usize,
    /// For a model with recurrent layers: the first of `most` rows of the pool of states that are there for drafts.
    states: Option<u32>,
    /// Drafts were tried out before the first answer.
    tried_out: bool,
    /// How long proposing took before this step, what of it was expected, and which drafter did it.
    spent: Duration,
    expected: Duration,
    by: Option<DrafterKind>,
    /// Kept between steps, so that a step allocates nothing.
    candidates: Vec<Candidate>,
    asked: Vec<DraftRequest>,
    chances: Vec<f64>,
}

impl Drafting {
    /// `None` if nothing is drafted. `max_tokens`: of a step. `states`: see [`Drafting::state_rows`]. `others`: drafters that compute their proposals.
    pub fn new(
        options: &Options,
        max_tokens: usize,
        states: Option<Range<u32>>,
        others: Vec<Box<dyn Drafter>>,
    ) -> Option<Drafting> {
        let (sequences, options) = (options.max_sequences, options.drafts);
        let most = states.as_ref().map_or(usize::MAX, |rows| rows.len()).min(options.rows(sequences));
        let looks_up = matches!(options.drafter, DrafterChoice::Auto | DrafterChoice::Ngram);
        let lookup = looks_up.then(|| Box::<Lookup>::default() as Box<dyn Drafter>);
        let records: Vec<DrafterRecord> = lookup.into_iter().chain(others).map(DrafterRecord::new).collect();
        (most > 0 && !records.is_empty()).then(|| Drafting {
            options,
            governor: Governor::default(),
            acceptance: Default::default(),
            records,
            max_tokens,
            most,
            states: states.map(|rows| rows.start),
            tried_out: false,
            spent: Duration::ZERO,
            expected: Duration::ZERO,
            by: None,
            candidates: Vec::with_capacity(options.tokens.min(MAX_STEP_DRAFTS) * sequences),
            asked: Vec::with_capacity(sequences),
            chances: Vec::with_capacity(sequences),
        })
    }

    /// How many rows of the pool of states drafts need, for states of `len` numbers: a state cannot be cut, so those after each drafted token are kept during the
    /// step. Where the backend cannot do that, nothing is drafted.
    pub fn state_rows(options: &Options, len: usize, backend: &dyn Backend) -> usize {
        let fit = MAX_STATE_BYTES / (len * size_of::<f32>()).max(1);
        if backend.keeps_states() { options.drafts.rows(options.max_sequences).min(fit) } else { 0 }
    }

    /// What was drafted since the engine was opened, by drafter.
    pub fn stats(&self) -> impl Iterator<Item = DraftStats> {
        self.records.iter().map(|record| record.stats)
    }

    /// The shortest context that a drafter has of its own.
    pub fn context(&self) -> Option<usize> {
        self.records.iter().filter_map(|record| record.drafter.context()).min()
    }

    /// The drafters.
    pub fn drafters(&mut self) -> impl Iterator<Item = &mut Box<dyn Drafter>> {
        self.records.iter_mut().map(|record| &mut record.drafter)
    }

    /// A generation begins for `s`, which may grow to `most` tokens. `prediction`: the client's guess of the answer, or empty.
    pub fn begin(&mut self, s: &mut Sequence, prediction: &[u32], most: usize) {
        self.governor.begin();
        self.drafters().for_each(|drafter| drafter.begin(s, prediction, most));
        let most = self.options.tokens.min(MAX_STEP_DRAFTS);
        s.drafts = Some(Box::new(SequenceDrafts::new(most, &self.acceptance)));
    }

    /// Whether drafts should be tried out now: once, if a governor profits from it.
    pub fn begin_trial(&mut self) -> bool {
        self.options.governed && !std::mem::replace(&mut self.tried_out, true)
    }

    /// The most drafted tokens of a step, and of a sequence.
    pub fn most(&self) -> usize {
        self.most.min(self.options.tokens)
    }

    /// The first row of states that is there for drafts.
    pub fn first_state(&self) -> Option<u32> {
        self.states
    }

    /// A step of one sequence with so many drafted tokens takes so long.
    pub fn know_step(&mut self, drafts: usize, step: Duration) {
        self.governor.know(drafts, step);
    }

    /// Asks a model that drafts for proposals, to learn how long it takes.
    pub fn try_out(&mut self, ask: DraftRequest, parts: &mut EngineParts) {
        for record in self.records.iter_mut().filter(|record| record.drafter.kind() == DrafterKind::Model) {
            let work = record.drafter.propose(&[ask], parts);
            record.costs.learn_rounds(1, work.rounds, work.drafting);
            record.costs.learn_catching_up(work.behind, work.catching_up);
        }
    }

    /// The sequence was removed.
    pub fn end(&mut self, id: SequenceId) {
        self.drafters().for_each(|drafter| drafter.end(id));
    }

    /// Adds drafted tokens to a planned step, if no request waits for a place in it. They take only empty blocks, so nothing is evicted for them.
    pub fn plan(&mut self, plan: &mut Plan, parts: &mut EngineParts, max_context: usize) {
        (self.spent, self.expected, self.by) = (Duration::ZERO, Duration::ZERO, None);
        // 1. Proposals by look-up, which take no time. They are made for every step, since the governor also learns from those that are not computed
        self.asked.clear();
        for scheduled in &plan.scheduled[..plan.generating] {
            let s = &mut parts.sequences[scheduled.sequence];
            let most = self.room(s, max_context);
            if let Some(drafts) = &mut s.drafts {
                drafts.draft.clear();
                drafts.unasked = drafts.unasked.saturating_add(1);
                self.asked.push(DraftRequest { sequence: scheduled.sequence, most, least_chance: 0.0 });
            }
        }
        let Drafting { records, asked, .. } = self;
        for record in records.iter_mut().filter(|record| record.drafter.kind() == DrafterKind::Ngram) {
            record.drafter.propose(asked, parts);
        }
        if plan.waiting > 0 || plan.generating < plan.scheduled.len() {
            return;
        }
        // 2. Proposals that are computed, if they promise more
        self.compute_proposals(plan.generating, parts);
        // 3. How many of them the step computes
        let most = self.most.min(self.max_tokens - plan.generating);
        self.collect_candidates(plan, parts.sequences);
        let chosen = if self.options.governed {
            self.governor.choose(plan.generating, most, &mut self.candidates).drafts
        } else {
            self.candidates.sort_unstable_by_key(|c| c.depth);
            most.min(self.candidates.len())
        };
        for candidate in &self.candidates[..chosen] {
            plan.scheduled[candidate.scheduled].drafts += 1;
        }
        // 4. Blocks for them, and rows for states
        let mut states = self.states;
        for scheduled in plan.scheduled.iter_mut().filter(|scheduled| scheduled.drafts > 0) {
            let s = &mut parts.sequences[scheduled.sequence];
            let total = s.computed + scheduled.tokens + scheduled.drafts;
            let cache = &mut *parts.cache;
            if !cache.has_free(&s.held, total) || cache.grow(&mut s.held, total).is_err() {
                scheduled.drafts = 0;
            }
            scheduled.kept_states = states;
            states = states.map(|first| first + scheduled.drafts as u32);
        }
    }

    /// How many tokens may be drafted for a sequence.
    fn room(&self, s: &Sequence, max_context: usize) -> usize {
        // A step must end at a snapshot point, where the state is copied.
        let to_snapshot = s.next_snapshot_point().map_or(usize::MAX, |point| point - s.tokens.len());
        let Some(running) = &s.running else { return 0 };
        // The last token that a generation may have needs no row of its own.
        let left = running.generation.max_tokens.saturating_sub(running.generated + 1);
        let room = max_context.saturating_sub(s.tokens.len() + 1);
        self.options.tokens.min(MAX_STEP_DRAFTS).min(left).min(room).min(to_snapshot)
    }

    /// Lists all proposed tokens with their chances.
    fn collect_candidates(&mut self, plan: &Plan, sequences: &[Sequence]) {
        self.candidates.clear();
        for (scheduled, of) in plan.scheduled.iter().enumerate() {
            let Some(drafts) = &sequences[of.sequence].drafts else { continue };
            let chances = drafts.chances().enumerate();
            self.candidates.extend(chances.map(|(depth, chance)| Candidate { chance, scheduled, depth }));
        }
    }

    /// Asks the drafter that promises most to compute proposals, for those sequences where it promises more than what was looked up.
    fn compute_proposals(&mut self, generating: usize, parts: &mut EngineParts) {
        let Drafting { options, governor, records, most, asked, chances, .. } = self;
        let sequences = &mut *parts.sequences;
        // The tokens that a sequence's looked-up draft is expected to give. Such a draft stays if no drafter could give more.
        let promised = |s: &Sequence| s.drafts.as_ref().map_or(0.0, |drafts| drafts.chances().sum::<f64>());
        let width = options.tokens.min(*most / generating.max(1));
        // The drafter, the least chance of a token, the speed that is promised, and the tokens for each sequence that the account covers.
        let mut best: Option<(usize, f64, f64, usize)> = None;
        for (at, one) in records.iter().enumerate() {
            let kind = one.drafter.kind();
            if kind == DrafterKind::Ngram || width == 0 {
                continue;
            }
            if !options.governed {
                best = best.or(Some((at, 0.0, 0.0, width)));
                continue;
            }
            let Some(step) = governor.usual(generating) else { continue };
            chances.clear();
            let (mut behind, mut looked_up) = (0, 0.0);
            for ask in asked.iter() {
                let s = &sequences[ask.sequence];
                let (Some(lag), Some(drafts)) = (one.drafter.behind(s), &s.drafts) else { continue };
                let chance = drafts.usual_chance(kind);
                if promised(s) < expected(chance, ask.most.min(width)) {
                    chances.push(chance);
                    behind += lag;
                } else {
                    looked_up += promised(s);
                }
            }
            let round = one.costs.round(chances.len(), GUESSED_ROUND * step);
            let seconds = |tokens| round * tokens as f64;
            let offer = governor.invest(generating, width, chances, seconds);
            // Catching up must be paid by what the drafter has earned.
            let catching_up = one.costs.catching_up(behind).unwrap_or(GUESSED_TOKEN * step * behind as f64);
            let price = catching_up * generating as f64 / step;
            let affordable = behind == 0 || price <= SPENT * one.earned;
            // Looked-up drafts of the other sequences count, too.
            let speed = offer.speed * (1.0 + looked_up / generating as f64);
            // What is hardly worth computing may be worth knowing.
            if offer.drafts == 0 && affordable && best.is_none() && chances.len() == asked.len() {
                let drafts = asked.iter().filter_map(|ask| sequences[ask.sequence].drafts.as_ref());
                chances.clear();
                chances.extend(drafts.map(|drafts| drafts.hopeful_chance(kind)));
                if governor.explores(generating, width, chances, seconds) {
                    best = Some((at, 0.0, 0.0, 1));
                }
            } else if offer.drafts > 0 && affordable && best.is_none_or(|(.., known, _)| speed > known) {
                // A further token must save more time than it takes.
                let least = offer.speed * (round / chances.len() as f64 + governor.row(generating));
                best = Some((at, least, speed, governor.covered(generating, width, chances.len(), seconds)));
            }
        }
        let Some((at, least_chance, _, width)) = best else { return };
        let one = &mut records[at];
        let kind = one.drafter.kind();
        asked.retain_mut(|ask| {
            let s = &mut sequences[ask.sequence];
            ask.most = ask.most.min(width);
            ask.least_chance = if options.governed { least_chance } else { 0.0 };
            let looked_up = promised(s);
            let (Some(_), Some(drafts)) = (one.drafter.behind(s), &mut s.drafts) else { return false };
            let asks = match options.governed {
                true => looked_up < expected(drafts.usual_chance(kind), ask.most),
                false => drafts.draft.tokens.is_empty(),
            };
            if asks && ask.most > 0 {
                drafts.draft.clear();
                (drafts.by, drafts.unasked) = (kind, 0);
            }
            asks && ask.most > 0
        });
        if asked.is_empty() {
            return;
        }
        let usual = governor.usual(generating);
        let round = one.costs.round(asked.len(), usual.map_or(0.0, |step| GUESSED_ROUND * step));
        let work = one.drafter.propose(asked, parts);
        // What others have held up, or weights that came from disk for the first time, are not the drafts' fault.
        let expected = Duration::from_secs_f64(round * work.rounds as f64);
        self.expected = work.drafting.min(expected);
        one.costs.learn_rounds(asked.len(), work.rounds, work.drafting);
        one.costs.learn_catching_up(work.behind, work.catching_up);
        (self.spent, self.by) = (work.drafting, Some(kind));
        if let Some(step) = usual {
            one.earned -= work.catching_up.as_secs_f64() * generating as f64 / step;
        }
    }

    /// Learns from the times of a step, before its drafts are settled. `tokens`: how many it gave.
    pub fn learn_times(&mut self, plan: &Plan, tokens: usize, step: Duration, sampling: Duration) {
        let drafts: usize = plan.scheduled.iter().map(|scheduled| scheduled.drafts).sum();
        if plan.generating < plan.scheduled.len() || plan.generating == 0 {
            return;
        }
        if let (Some(kind), Some(usual)) = (self.by, self.governor.usual(plan.generating)) {
            let record = self.records.iter_mut().find(|record| record.drafter.kind() == kind);
            let took = (self.spent + step).as_secs_f64() * plan.generating as f64 / usual;
            record.into_iter().for_each(|record| record.earned += tokens as f64 - took);
        }
        self.governor.learn(plan.generating, plan.generating + drafts, tokens, [self.expected, step, sampling]);
    }

    /// A step was computed and sampled.
    pub fn after_step(&mut self, plan: &Plan, parts: &mut EngineParts) {
        self.drafters().for_each(|drafter| drafter.after_step(plan, parts));
    }
}

/// How many of so many tokens come true, if each does with this chance.
fn expected(chance: f64, tokens: usize) -> f64 {
    (1..=tokens).map(|n| chance.powi(n as i32)).sum()
}

impl DrafterRecord {
    fn new(drafter: Box<dyn Drafter>) -> DrafterRecord {
        let stats = DraftStats { drafter: drafter.kind().name(), counts: DraftCounts::default() };
        DrafterRecord { drafter, costs: DraftCosts::default(), earned: TRIAL, stats }
    }
}
