//! The drafter that is a smaller model with the same vocabulary.
//!
//! It is an engine of its own, with its own caches, whose sequences follow those of the larger one. Before it proposes anything it computes the tokens that came since,
//! one or two after most steps; a prompt may be in its prefix cache. It draws with the parameters and the random numbers of the larger model's sequence, which depend on
//! (seed, position) alone. So where both models find the same tokens likely they draw the same ones, at any temperature.

use std::time::Instant;

use sluice_backend::{Outcome, Wanted};

use super::drafter::{DraftRequest, DraftWork, Drafter, EngineParts};
use crate::draft::{DrafterKind, MAX_STEP_DRAFTS, SequenceDrafts, class_of_probability};
use crate::engine::Engine;
use crate::sampling::SamplingParams;
use crate::sampling::batch::Draw;
use crate::schedule::scheduler::{reuse_prefix, schedule};
use crate::schedule::sequence::{Generation, Running, Sequence, SequenceId};

/// So many new tokens of a sequence are part of the first round. With more of them the drafter has to catch up.
const FEW: usize = 8;

/// A sequence of the larger model, and the one here that follows it.
struct Followed {
    /// The larger model's sequence, and the one here.
    id: SequenceId,
    own: SequenceId,
    /// The first so many tokens of both are known to be the same.
    same: usize,
    /// For a model with recurrent layers: the number of tokens after which its state was kept, and the row.
    kept: Option<(usize, u32)>,
}

/// See the module.
pub(crate) struct Follower {
    engine: Box<Engine>,
    followed: Vec<Followed>,
    /// The rows that keep states, each with the sequence whose state it has.
    rows: Vec<Option<SequenceId>>,
    /// The first of these rows in the pool of states.
    first_row: u32,
    /// The sequences of the present round: (index in `asked`, index of the sequence here).
    round: Vec<(usize, usize)>,
}

impl Follower {
    /// A drafter with this engine. `first_row`: where the rows begin that its pool of states has for this, one for each sequence of a step; its caches do not use them.
    pub fn new(engine: Engine, first_row: Option<u32>) -> Follower {
        let sequences = engine.options.max_sequences;
        let rows = vec![None; first_row.map_or(0, |_| sequences)];
        let round = Vec::with_capacity(sequences);
        Follower { engine: Box::new(engine), followed: Vec::new(), rows, first_row: first_row.unwrap_or(0), round }
    }

    fn find(&self, id: SequenceId) -> Option<usize> {
        self.followed.iter().position(|f| f.id == id)
    }

    /// Whether its weights are in memory. Waiting for them would be waiting for drafts.
    fn is_loaded(&self) -> bool {
        self.engine.loading.as_ref().is_none_or(|loading| loading.progress().is_over())
    }

    /// Gives a sequence here the tokens of the larger model's, and drops what was computed of tokens that differ. `None`: it cannot follow.
    fn follow(&mut self, at: usize, main: &Sequence) -> Option<usize> {
        let Followed { own, same, kept, .. } = self.followed[at];
        let i = self.engine.sequences.position(own)?;
        let s = &mut self.engine.sequences.list[i];
        let same = same.min(s.tokens.len()).min(main.tokens.len());
        let equal = s.tokens[same..].iter().zip(&main.tokens[same..]).take_while(|(a, b)| a == b).count();
        let (equal, cache) = (same + equal, &mut self.engine.cache);
        // At least one token is computed, for its logits: it drafted more than the step took, where all came true.
        let done = equal.min(main.tokens.len().saturating_sub(1));
        if s.computed > done {
            match (s.held.state, kept) {
                (None, _) if cache.can_resume_at(&s.held, done) => {
                    cache.shrink(&mut s.held, done);
                    s.computed = done;
                }
                (Some(_), Some((tokens, row))) if tokens <= done && cache.can_resume_at(&s.held, tokens) => {
                    cache.shrink(&mut s.held, tokens);
                    cache.set_state(&s.held, row);
                    s.computed = tokens;
                }
                _ => {
                    cache.release(&mut s.held);
                    s.computed = 0;
                }
            }
        }
        // The smaller model may have fewer tokens.
        if main.tokens[equal..].iter().any(|token| *token as usize >= self.engine.model.vocabulary) {
            return None;
        }
        s.tokens.truncate(equal);
        s.tokens.extend_from_slice(&main.tokens[equal..]);
        self.followed[at].same = s.tokens.len();
        Some(i)
    }

    /// Adds the next tokens of a sequence to the plan, at most `most`. Returns how many.
    fn add(&mut self, i: usize, most: usize) -> usize {
        let Engine { sequences, cache, plan, .. } = &mut *self.engine;
        let tokens = sequences.list[i].uncomputed().min(most);
        let added = tokens > 0 && schedule(&mut sequences.list, cache, plan, &[], i, tokens);
        if added { tokens } else { 0 }
    }

    /// Runs the planned step. `None` if anything failed: then nothing is drafted.
    fn run(&mut self) -> Option<Outcome> {
        let engine = &mut *self.engine;
        engine.steps += 1;
        engine.tiers.prepare_blocks(&mut engine.cache, &mut engine.runner.blocks()).ok()?;
        let outcome = engine.runner.step(&engine.plan, &engine.sequences.list, Wanted::Last);
        let is_read = engine.loading.as_ref().is_none_or(|loading| loading.check().is_ok());
        if !outcome.failed.is_empty() || !is_read {
            return None;
        }
        for scheduled in &engine.plan.scheduled {
            let s = &mut engine.sequences.list[scheduled.sequence];
            s.computed += scheduled.tokens;
            s.last_used = engine.steps;
        }
        Some(outcome)
    }

    /// Computes the tokens that the sequences of the round lack, but for the last few. Sequences for which there are no blocks leave the round. Returns how many tokens.
    fn catch_up(&mut self) -> Option<usize> {
        let (mut all, few) = (0, FEW.min(self.engine.chunk() / self.round.len().max(1)).max(1));
        loop {
            self.engine.plan.clear();
            let mut room = self.engine.chunk();
            for at in (0..self.round.len()).rev() {
                let i = self.round[at].1;
                let lacks = self.engine.sequences.list[i].uncomputed();
                if lacks > few && room > 0 {
                    let added = self.add(i, (lacks - 1).min(room));
                    room -= added;
                    if added == 0 {
                        // There are no blocks for it.
                        self.engine.sequences.list[i].running = None;
                        self.round.remove(at);
                    }
                }
            }
            if self.engine.plan.scheduled.is_empty() {
                return Some(all);
            }
            all += self.engine.plan.scheduled.iter().map(|s| s.tokens).sum::<usize>();
            self.run()?;
            self.publish();
        }
    }

    /// Lets later sequences find what the last step has computed. Only tokens of the larger model's sequences are published, never drafted ones.
    fn publish(&mut self) {
        let Engine { sequences, cache, plan, .. } = &mut *self.engine;
        for scheduled in &plan.scheduled {
            let s = &mut sequences.list[scheduled.sequence];
            if s.shares {
                cache.publish(&mut s.held, s.root, &s.tokens, s.computed);
            }
            cache.drop_before_window(&mut s.held, s.computed);
        }
    }

    /// Keeps the recurrent states behind the tokens that are certain: the next drafts go on from there.
    fn keep_states(&mut self) {
        for at in 0..self.round.len() {
            let s = &self.engine.sequences.list[self.round[at].1];
            let (own, tokens) = (s.id, s.computed);
            let Some(from) = s.held.state else { continue };
            let mine = self.rows.iter().position(|row| *row == Some(own));
            let in_round = |id: &SequenceId| self.round.iter().any(|(_, i)| self.engine.sequences.list[*i].id == *id);
            let row = mine.or_else(|| self.rows.iter().position(|row| !row.as_ref().is_some_and(in_round)));
            let Some(row) = row else { continue };
            if let Some(other) = self.rows[row].replace(own).filter(|other| *other != own) {
                self.followed.iter_mut().filter(|f| f.own == other).for_each(|f| f.kept = None);
            }
            let to = self.first_row + row as u32;
            self.engine.cache.copy_state(from, to);
            self.followed.iter_mut().filter(|f| f.own == own).for_each(|f| f.kept = Some((tokens, to)));
        }
    }

    /// Computes the last tokens of the sequences of the round, and draws one for each. Sequences whose drafts end leave the round. Returns whether anything was computed.
    fn draw(&mut self, asked: &[DraftRequest], sequences: &mut [Sequence], is_first: bool) -> Option<bool> {
        self.engine.plan.clear();
        for at in (0..self.round.len()).rev() {
            if self.add(self.round[at].1, usize::MAX) == 0 {
                self.engine.sequences.list[self.round[at].1].running = None;
                self.round.remove(at);
            }
        }
        if self.round.is_empty() {
            return Some(false);
        }
        let outcome = self.run()?;
        if is_first {
            self.publish();
            self.keep_states();
        }
        let Engine { sampling, sequences: own, runner, plan, .. } = &mut *self.engine;
        sampling.draws.clear();
        for (row, scheduled) in plan.scheduled.iter().enumerate() {
            let sequence = scheduled.sequence;
            sampling.draws.push(Draw { sequence, row, first_row: row, last_row: row, scheduled: row });
        }
        sampling.sampler.begin_step();
        let drawn = sampling.sampler.draw(&mut *runner.backend, outcome.logits, &own.list, &sampling.draws);
        for (drawn, scheduled) in drawn.iter_mut().zip(&plan.scheduled) {
            let s = &mut own.list[scheduled.sequence];
            let place = self.round.iter().position(|(_, i)| *i == scheduled.sequence)?;
            let ask = asked[self.round[place].0];
            let drafts = sequences[ask.sequence].drafts.as_mut()?;
            let likely = drawn.logprobs.take().map_or(0.0, |logprobs| logprobs.chosen.exp());
            let goes_on = match drawn.token {
                Ok(token) => {
                    drafts.draft.push(token, class_of_probability(likely));
                    s.tokens.push(token);
                    drafts.draft.tokens.len() < ask.most && drafts.next_chance() >= ask.least_chance
                }
                Err(_) => false,
            };
            if !goes_on {
                s.running = None;
                self.round.remove(place);
            }
        }
        Some(true)
    }

    fn propose_all(&mut self, asked: &[DraftRequest], parts: &mut EngineParts) -> Option<DraftWork> {
        let started = Instant::now();
        // 1. Follow the sequences
        self.round.clear();
        for (number, ask) in asked.iter().enumerate().take(self.engine.chunk()) {
            let main = &parts.sequences[ask.sequence];
            let Some(at) = self.find(main.id).filter(|_| self.behind(main).is_some()) else { continue };
            let (Some(i), Some(running)) = (self.follow(at, main), &main.running) else { continue };
            let s = &mut self.engine.sequences.list[i];
            if s.held.is_empty() {
                s.computed = 0;
                reuse_prefix(s, &mut self.engine.cache);
            }
            s.running = Some(like(running));
            self.round.push((number, i));
        }
        // 2. Catch up with what came since, if that was more than a few tokens
        let behind = self.catch_up()?;
        let catching_up = started.elapsed();
        // 3. Rounds: a token for each sequence, until all drafts have ended
        let (started, mut rounds) = (Instant::now(), 0);
        while !self.round.is_empty() {
            rounds += usize::from(self.draw(asked, parts.sequences, rounds == 0)?);
        }
        let mut work = DraftWork { behind, catching_up, rounds, drafting: started.elapsed() };
        if behind == 0 {
            work.drafting += std::mem::take(&mut work.catching_up);
        }
        Some(work)
    }
}

/// The generation here that drafts for one of the larger model: the same draws, without penalties and grammar.
fn like(running: &Running) -> Running {
    let sampling = SamplingParams {
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        ..running.generation.sampling
    };
    // The log-probability of the drawn token alone.
    let generation = Generation { sampling, logprobs: Some(0), max_tokens: usize::MAX, ..Generation::default() };
    let turn = running.turn;
    Running { generation, generated: 1, prompt_from: 0, history: None, guide: None, pooled: None, turn }
}

impl Drafter for Follower {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Model
    }

    fn begin(&mut self, main: &Sequence, _prediction: &[u32], most: usize) {
        let at = self.find(main.id).unwrap_or_else(|| {
            // The same root: prompts share blocks here exactly where they do there.
            let own = self.engine.add_sequence_salted(&main.root);
            self.followed.push(Followed { id: main.id, own, same: 0, kept: None });
            self.followed.len() - 1
        });
        self.followed[at].same = 0;
        let Some(i) = self.engine.sequences.position(self.followed[at].own) else { return };
        let most = most.min(self.engine.setup.max_context) + MAX_STEP_DRAFTS;
        let s = &mut self.engine.sequences.list[i];
        s.shares = self.engine.options.prefix_cache && main.shares;
        s.tokens.reserve(most.saturating_sub(s.tokens.len()));
        self.engine.cache.reserve_tables(&mut s.held, most);
    }

    fn end(&mut self, id: SequenceId) {
        let Some(at) = self.find(id) else { return };
        let own = self.followed.swap_remove(at).own;
        self.rows.iter_mut().filter(|row| **row == Some(own)).for_each(|row| *row = None);
        self.engine.remove_sequence(own);
    }

    fn behind(&self, main: &Sequence) -> Option<usize> {
        let Followed { own, same, .. } = self.followed[self.find(main.id)?];
        let s = &self.engine.sequences.list[self.engine.sequences.position(own)?];
        // The smaller model's context may be shorter.
        let room = self.engine.setup.max_context.saturating_sub(MAX_STEP_DRAFTS);
        if main.tokens.len() >= room || !self.is_loaded() {
            return None;
        }
        let lacks = main.tokens.len() - s.computed.min(same).min(main.tokens.len());
        let known = if s.held.is_empty() { self.engine.cache.would_reuse(s.root, &main.tokens, lacks) } else { 0 };
        Some(if lacks - known > FEW { lacks - known } else { 0 })
    }

    fn propose(&mut self, asked: &[DraftRequest], parts: &mut EngineParts) -> DraftWork {
        let work = self.propose_all(asked, parts);
        // After a failure, too: sequences that do not run can be evicted.
        for (_, i) in self.round.drain(..) {
            self.engine.sequences.list[i].running = None;
        }
        // Cut what begins with a token that the larger model does not have.
        for ask in asked {
            let Some(drafts) = &mut parts.sequences[ask.sequence].drafts else { continue };
            let SequenceDrafts { draft, .. } = &mut **drafts;
            let fit = draft.tokens.iter().take_while(|token| (**token as usize) < parts.vocabulary).count();
            draft.tokens.truncate(fit);
            draft.classes.truncate(fit);
        }
        work.unwrap_or_default()
    }

    fn context(&self) -> Option<usize> {
        Some(self.engine.setup.max_context)
    }

    fn memory(&mut self) -> Vec<sluice_backend::MemoryUse> {
        self.engine.memory_uses()
    }
}
