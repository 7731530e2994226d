//! Steps: running sequences go through the model together, and each that reaches the end of its tokens gets a new one.

use std::time::Instant;

use anyhow::Result;
use sluice_backend::{Failed, Logits, Outcome, Wanted};

use super::drafting::settle;
use super::sequence_table::SequenceTable;
use super::{Engine, StepSampling};
use crate::constraint::{Guide, Masks};
use crate::sampling::Logprobs;
use crate::sampling::batch::Draw;
use crate::sampling::device_draws::Drawn;
use crate::schedule::plan::ScheduledSequence;
use crate::schedule::sequence::{Event, Finish, Sequence};
use crate::step::pooling::Pooled;

impl Engine {
    /// Takes running sequences one step forward. Returns what happened, also since the last step.
    ///
    /// # Errors
    /// When weights cannot be read, or there is no memory. Then all further steps fail as well. Failures of a single sequence are [`Finish::Failed`].
    pub fn step(&mut self) -> Result<&[Event]> {
        self.events.last_step.clear();
        self.events.last_step.append(&mut self.events.pending);
        // 1. Plan the step. Meanwhile other sequences get what was read for them
        self.poll_restores(false)?;
        self.scheduler.plan(&mut self.sequences.list, &mut self.cache, &mut self.tiers, &mut self.plan);
        for i in 0..self.plan.stuck.len() {
            self.finish(self.plan.stuck[i], Finish::ContextFull);
        }
        if self.plan.scheduled.is_empty() {
            self.poll_restores(true)?;
            return Ok(&self.events.last_step);
        }
        let max_context = self.setup.max_context;
        if let Some((drafting, plan, mut between)) = self.drafting() {
            drafting.plan(plan, &mut between, max_context);
        }
        // 2. Run the model
        let started = Instant::now();
        let logits = self.compute(Wanted::Last)?;
        let took = started.elapsed();
        let prompts = &self.plan.scheduled[self.plan.generating..];
        let prompt_tokens: usize = prompts.iter().map(|p| p.tokens).sum();
        let furthest = prompts.iter().map(|p| self.sequences.list[p.sequence].computed).max().unwrap_or(0);
        if !self.plan.has_drafts() {
            self.scheduler.chunk_budget.learn(self.plan.generating, prompt_tokens, furthest, took);
        }
        // 3. Choose the next tokens
        let (started, before) = (Instant::now(), self.events.last_step.len());
        self.collect_draws();
        self.sample(logits);
        let tokens = self.events.last_step[before..].iter().filter(|e| matches!(e, Event::Token { .. })).count();
        if let Some(drafting) = &mut self.drafting {
            drafting.learn_times(&self.plan, tokens, took, started.elapsed());
        }
        if let Some((drafting, plan, mut between)) = self.drafting() {
            drafting.after_step(plan, &mut between);
        }
        // 4. Copy some blocks to the tiers
        let prompts_only = (self.plan.generating == 0).then_some(prompt_tokens);
        self.tiers.after_step(prompts_only, took, &mut self.cache, &mut self.runner.blocks())?;
        Ok(&self.events.last_step)
    }

    /// Moves restores from the tiers forward. `idle`: there is nothing to compute meanwhile.
    fn poll_restores(&mut self, idle: bool) -> Result<()> {
        let mut blocks = self.runner.blocks();
        self.tiers.poll_restores(&mut self.sequences.list, &mut self.cache, &mut blocks, idle)
    }

    /// Runs the planned step. A sequence that fails is set back to where it was, and its failure is noted.
    ///
    /// # Errors
    /// When weights cannot be read, or there is no memory for blocks.
    pub(super) fn compute(&mut self, wanted: Wanted) -> Result<Logits> {
        self.steps += 1;
        self.computed += self.plan.scheduled.iter().map(|s| (s.tokens + s.drafts) as u64).sum::<u64>();
        self.tiers.prepare_blocks(&mut self.cache, &mut self.runner.blocks())?;
        let Outcome { logits, failed, mut routed, .. } = self.runner.step(&self.plan, &self.sequences.list, wanted);
        self.routed.append(&mut routed);
        if let Some(loading) = &self.loading {
            loading.check()?;
        }
        self.plan.ends.clear();
        for at in 0..self.plan.scheduled.len() {
            self.advance_sequence(at, &failed);
        }
        Ok(logits)
    }

    /// Marks the tokens of a scheduled sequence as computed, and publishes its blocks.
    fn advance_sequence(&mut self, at: usize, failed: &[Failed]) {
        let ScheduledSequence { sequence, tokens, drafts, .. } = self.plan.scheduled[at];
        let s = &mut self.sequences.list[sequence];
        s.computed += tokens;
        s.last_used = self.steps;
        self.plan.ends.push(s.uncomputed() == 0 && !s.embeds());
        let before = s.computed - tokens;
        let rows_of = |f: &Failed| f.rows.iter().filter_map(|row| self.runner.place_of_row(*row, at)).min();
        let first_failed = failed.iter().filter_map(|f| Some((rows_of(f)?, f))).min_by_key(|(row, _)| *row);
        let s = &mut self.sequences.list[sequence];
        self.plan.scheduled[at].computed_drafts = drafts;
        match first_failed {
            Some((row, failed)) if row < tokens => {
                let id = s.id;
                self.roll_back(sequence, before);
                self.sequences.add_failure(id, anyhow::anyhow!("{:#}", failed.why));
                return;
            }
            // Without drafts, nobody would have wanted them yet.
            Some((row, _)) => self.plan.scheduled[at].computed_drafts = row - tokens,
            None => {}
        }
        if let Some(pooled) = s.running.as_mut().and_then(|running| running.pooled.as_mut())
            && (before..s.computed).contains(&pooled.next())
        {
            let from = pooled.next() - before;
            self.runner.hidden(at, from, |state| pooled.add(state));
        }
        if s.shares {
            self.cache.publish(&mut s.held, s.root, &s.tokens, s.computed);
        }
        if s.snapshot_points.binary_search(&s.computed).is_ok() {
            self.cache.snapshot(&mut s.held, s.root, &s.tokens, s.computed);
        }
        self.cache.drop_before_window(&mut s.held, s.computed);
    }

    /// Notes which sequences get a token, and reports prompts. Each sequence that reached the end of its tokens has a row of logits, in order, even if it failed.
    fn collect_draws(&mut self) {
        self.sampling.draws.clear();
        let mut row = 0;
        for at in 0..self.plan.scheduled.len() {
            let (ScheduledSequence { sequence: i, drafts, .. }, ends) = (self.plan.scheduled[at], self.plan.ends[at]);
            self.sequences.list[i].logprobs.clear();
            let s = &self.sequences.list[i];
            if self.sequences.has_failed(s.id) {
                self.finish(i, Finish::Failed);
            } else if let Some(running) = &s.running {
                if running.generated == 0 {
                    // What was preempted is computed again first, which is no progress.
                    let from = running.prompt_from;
                    let (done, total) = (s.computed.saturating_sub(from), s.tokens.len() - from);
                    self.events.last_step.push(Event::Prefill { id: s.id, done, total });
                }
                if let Some(value) = running.pooled.as_ref().and_then(Pooled::value) {
                    self.sequences.list[i].embedding = Some(value);
                    self.finish(i, Finish::Stop);
                } else if ends {
                    let last_row = row + self.plan.scheduled[at].computed_drafts;
                    self.sampling.draws.push(Draw { sequence: i, row, first_row: row, last_row, scheduled: at });
                }
            }
            row += if ends { 1 + drafts } else { 0 };
        }
    }

    /// Chooses the tokens of [`Engine::collect_draws`]. A sequence with drafts goes on to its next row as long as its tokens are the drafted ones.
    fn sample(&mut self, logits: Logits) {
        self.sampling.sampler.begin_step();
        while !self.sampling.draws.is_empty() {
            self.sample_row(logits);
        }
        let mut ended = std::mem::take(&mut self.sampling.ended);
        ended.drain(..).for_each(|at| self.release(at));
        self.sampling.ended = ended;
    }

    /// Chooses a token for each draw. Those that go on are left in the list, with their next rows.
    fn sample_row(&mut self, logits: Logits) {
        let StepSampling { sampler, masks, draws, ended } = &mut self.sampling;
        let (sequences, events) = (&mut self.sequences, &mut self.events.last_step);
        let (plan, drafting, cache) = (&self.plan, &mut self.drafting, &mut self.cache);
        let mut settled = |s: &mut Sequence, draw: &Draw| {
            settle(s, plan.scheduled[draw.scheduled], draw.row - draw.first_row, drafting, cache);
        };
        // 1. Wait for the masks of constraints, which were made while the model ran
        draws.retain(|draw| {
            let running = sequences.list[draw.sequence].running.as_mut();
            let guide = running.and_then(|running| running.guide.as_mut());
            let Some(Err(why)) = guide.map(Guide::finish_mask) else { return true };
            fail(sequences, draw.sequence, why, events);
            settled(&mut sequences.list[draw.sequence], draw);
            ended.push(draw.sequence);
            false
        });
        // 2. Choose tokens, and add those that a constraint forces after them
        let drawn = sampler.draw(&mut *self.runner.backend, logits, &sequences.list, draws);
        let mut going_on = 0;
        for (at, Drawn { token, logprobs }) in drawn.iter_mut().enumerate() {
            let mut draw = draws[at];
            let s = &mut sequences.list[draw.sequence];
            let reason = match token {
                Ok(token) => accept(s, *token, logprobs.take(), self.setup.max_context, masks, events),
                Err(e) => Err((*e).into()),
            };
            match reason {
                Ok(None) => match next_row(s, plan.scheduled[draw.scheduled]) {
                    Some(row) => {
                        draw.row = draw.first_row + row;
                        draws[going_on] = draw;
                        going_on += 1;
                        continue;
                    }
                    None => {
                        settled(s, &draw);
                        continue;
                    }
                },
                Ok(Some(reason)) => {
                    s.running = None;
                    events.push(Event::Finished { id: s.id, reason });
                }
                Err(why) => fail(sequences, draw.sequence, why, events),
            }
            settled(&mut sequences.list[draw.sequence], &draw);
            ended.push(draw.sequence);
        }
        draws.truncate(going_on);
    }

    /// Ends a generation.
    fn finish(&mut self, at: usize, reason: Finish) {
        let s = &mut self.sequences.list[at];
        s.running = None;
        self.events.last_step.push(Event::Finished { id: s.id, reason });
        self.release(at);
    }
}

/// Ends a generation with its own failure.
fn fail(sequences: &mut SequenceTable, at: usize, why: anyhow::Error, events: &mut Vec<Event>) {
    let s = &mut sequences.list[at];
    s.running = None;
    let id = s.id;
    sequences.add_failure(id, why);
    events.push(Event::Finished { id, reason: Finish::Failed });
}

/// The row of drafted tokens, counted from the sequence's first, that has the logits for its next token: if all its new tokens are drafted ones.
fn next_row(s: &Sequence, scheduled: ScheduledSequence) -> Option<usize> {
    let new = &s.tokens[s.computed..];
    let drafts = s.drafts.as_ref().filter(|_| new.len() <= scheduled.computed_drafts)?;
    (drafts.agreed(new) == new.len()).then_some(new.len())
}

/// Adds a chosen token to a sequence, and those that its constraint forces after it. Returns why the generation ends, if it does.
fn accept(
    s: &mut Sequence,
    token: u32,
    logprobs: Option<Logprobs>,
    max_context: usize,
    masks: &mut Masks,
    events: &mut Vec<Event>,
) -> Result<Option<Finish>> {
    let reason = add_token(s, token, logprobs, max_context, events);
    let Some(running) = s.running.as_mut().filter(|_| reason.is_none()) else { return Ok(reason) };
    let Some(mut guide) = running.guide.take() else { return Ok(None) };
    // With log-probabilities each token needs logits of its own.
    let forces = running.generation.logprobs.is_none();
    let next = guide.push(token, masks, forces)?;
    running.guide = Some(guide);
    let reason = next.forced.iter().find_map(|token| add_token(s, *token, None, max_context, events));
    Ok(reason.or(next.is_over.then_some(Finish::Stop)))
}

/// Adds a generated token to a sequence. Returns why the generation ends, if it does.
fn add_token(
    s: &mut Sequence,
    token: u32,
    logprobs: Option<Logprobs>,
    max_context: usize,
    events: &mut Vec<Event>,
) -> Option<Finish> {
    let running = s.running.as_mut()?;
    running.generated += 1;
    if running.generation.stop_ids.contains(&token) {
        return Some(Finish::Stop);
    }
    s.tokens.push(token);
    if running.generation.logprobs.is_some() {
        s.logprobs.push_back(logprobs);
    }
    if let Some(history) = &mut running.history {
        history.add_generated(token);
    }
    events.push(Event::Token { id: s.id, token });
    if running.generated >= running.generation.max_tokens {
        Some(Finish::Length)
    } else if s.tokens.len() >= max_context {
        Some(Finish::ContextFull)
    } else {
        None
    }
}
