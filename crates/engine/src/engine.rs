//! The engine: a model, its caches, and the sequences that share them. [`Engine::step`] is the only way forward: it takes the next
//! tokens of running sequences through the model together and samples where a sequence has come to its end.

mod device;
mod open;
mod prompt_cache;

pub use device::DeviceUse;
pub use open::{MakeBackend, cpu};

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use sluice_backend::{
    KvLayout, KvType, Logits, Lookahead, MemoryClass, MemoryUse, Outcome, Profile, Routed, Streamed, Wanted,
};
use sluice_cache::{Evicted, KvCache};
use sluice_model::Description;
use sluice_store::Loading;

use crate::constraint::{Guide, Masks};
use crate::options::Options;
use crate::placement::Placed;
use crate::pooling::{Pooled, Pooling};
use crate::prompt_cache::{PromptCache, Restore};
use crate::runner::Runner;
use crate::sampler::{History, Logprobs};
use crate::sampling::{Draw, Drawn, Sampling};
use crate::scheduler::{Plan, ScheduledSequence, Scheduler, retire};
use crate::sequence::{Event, Finish, Generation, Running, Sequence, SequenceId};

/// The part of the states kept for others that the grid of one prompt may take.
const GRID: usize = 4;

/// What takes a row of logits: (position, logits).
type Each<'a> = &'a mut dyn FnMut(usize, &[f32]) -> Result<()>;

/// A model with its caches and sequences.
pub struct Engine {
    runner: Runner,
    /// Dropped after the backend, which may wait for weights.
    loading: Option<Loading>,
    model: Description,
    cache: KvCache,
    layouts: Vec<KvLayout>,
    scheduler: Scheduler,
    sampling: Sampling,
    masks: Masks,
    disk: Option<PromptCache>,
    /// What is to be said of it, and was not yet.
    disk_notes: Vec<String>,
    sequences: Vec<Sequence>,
    next_id: u64,
    next_turn: u64,
    steps: u64,
    options: Options,
    placed: Placed,
    /// Bytes that were set aside for the scratch of steps.
    scratch: u64,
    /// Bytes of mapped weights that there is no room for beside all else.
    squeezed: u64,
    /// Where memory and copies of weights are put, where that was asked.
    numa: Vec<String>,
    device: Option<DeviceUse>,
    max_context: usize,
    skipped: Vec<String>,
    /// Why sequences ended with [`Finish::Failed`], until somebody asks or they are started again.
    failures: Vec<(SequenceId, anyhow::Error)>,
    routed: Vec<Routed>,
    // Kept between steps, so that a step allocates nothing.
    plan: Plan,
    draws: Vec<Draw>,
    /// Sequences that came to their end in a step.
    resting: Vec<usize>,
    /// What happened between steps, and what the last step did.
    pending: Vec<Event>,
    events: Vec<Event>,
}

impl Engine {
    /// What the model is.
    pub fn model(&self) -> &Description {
        &self.model
    }

    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The element type of cached keys and values.
    pub fn kv_type(&self) -> Option<KvType> {
        self.layouts.first().map(|l| l.kv_type)
    }

    /// Tokens that a step takes at most.
    pub fn chunk(&self) -> usize {
        self.scheduler.most_tokens
    }

    /// Where experts live, and why.
    pub fn placed(&self) -> &Placed {
        &self.placed
    }

    /// What reading fell back on so far, and where memory and threads were put, one clause each.
    pub fn fallbacks(&self) -> Vec<String> {
        let loading = self.loading.iter().flat_map(Loading::notes);
        let squeezed = (self.squeezed > 0).then(|| {
            let bytes = crate::budget::bytes(self.squeezed);
            format!(
                "{bytes} of mapped weights do not fit the memory control group: the kernel reads them again and again"
            )
        });
        loading.chain(squeezed).chain(self.numa.clone()).chain(self.runner.backend.notes()).collect()
    }

    /// Where a device computes in its own memory: what of it there is for this engine.
    pub fn device(&self) -> Option<DeviceUse> {
        self.device
    }

    /// Bytes that were set aside for the scratch of steps of [`Engine::chunk`] tokens, logits and sampling included: what [`MemoryClass::Scratch`] comes to
    /// at most, but for what grows with the context.
    pub fn scratch_set_aside(&self) -> u64 {
        self.scratch
    }

    /// Whether what is computed of a prompt is kept for others that begin alike.
    pub fn keeps_prefixes(&self) -> bool {
        self.options.prefix_cache
    }

    /// Copies some of the weights that are there and that each node of memory is to have a copy of: for some ten milliseconds. Whether there were any. Steps begin with it, too.
    pub fn copy_weights(&mut self) -> bool {
        self.runner.backend.copy_weights()
    }

    /// Reads some of the experts that are streamed and that nobody has wanted yet, as far as there is memory for them: for some tens of milliseconds. Whether there may be
    /// more. Nothing where look-ahead is off.
    pub fn fill_experts(&mut self) -> bool {
        self.options.lookahead != Lookahead::Off && self.runner.backend.fill_experts()
    }

    /// What streamed experts took since the last call; `None` where none are streamed.
    pub fn take_streamed(&mut self) -> Option<Streamed> {
        self.runner.backend.take_streamed()
    }

    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// Parts of the checkpoint that were left out (vision, multi-token prediction).
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// Bytes allocated, committed (keys and values) or mapped, by class and device.
    pub fn memory_uses(&mut self) -> Vec<MemoryUse> {
        self.runner.backend.memory()
    }

    /// The same of a class, on all devices.
    pub fn memory(&mut self, class: MemoryClass) -> usize {
        self.memory_uses().iter().filter(|m| m.class == class).map(|m| m.bytes).sum()
    }

    /// Bytes of KV that hold tokens now, of those that [`Engine::memory`] counts as committed.
    pub fn kv_in_use(&self) -> usize {
        self.cache.in_use().zip(&self.layouts).map(|(blocks, l)| blocks * l.block_bytes()).sum()
    }

    /// Bytes of KV that are kept for prompts that begin like those before, and that no sequence holds.
    pub fn kv_kept(&self) -> usize {
        self.cache.idle().zip(&self.layouts).map(|(blocks, l)| blocks * l.block_bytes()).sum()
    }

    /// The part of the blocks that sequences hold now, of the cache group that is fullest: 0 to 1.
    pub fn kv_usage(&self) -> f64 {
        let shares = self.cache.in_use().zip(self.cache.blocks()).map(|(used, all)| used as f64 / all.max(1) as f64);
        shares.fold(0.0, f64::max)
    }

    /// Recurrent states that are kept for prompts to come.
    pub fn snapshots(&self) -> usize {
        self.cache.snapshots()
    }

    /// What the cache of prefixes has given up so far.
    pub fn evicted(&self) -> Evicted {
        self.cache.evicted()
    }

    /// Recurrent states that sequences hold now.
    pub fn states_in_use(&self) -> usize {
        self.cache.states_in_use()
    }

    /// How the weights come into memory; `None` for a checkpoint that was opened elsewhere. The first steps wait for what they need.
    pub fn loading(&self) -> Option<&Loading> {
        self.loading.as_ref()
    }

    /// Measures time and work by phase from here on, or no longer. Steps on a GPU are slower meanwhile.
    pub fn profile(&mut self, on: bool) {
        self.runner.backend.profile(on);
    }

    /// Time and work by phase since the last call; empty unless profiling was asked for.
    pub fn take_profile(&mut self) -> Profile {
        self.runner.backend.take_profile()
    }

    /// Starts to record what routers choose.
    pub fn record_routing(&mut self) {
        self.runner.backend.record_routing();
    }

    /// What routers chose since the last call, in the order of the steps and their layers; nothing where it is not recorded.
    pub fn take_routing(&mut self) -> Vec<Routed> {
        std::mem::take(&mut self.routed)
    }
}

/// Sequences.
impl Engine {
    /// A new, empty sequence. There may be any number: each takes memory when its turn comes.
    pub fn add_sequence(&mut self) -> SequenceId {
        self.add_sequence_salted(b"")
    }

    /// The same; it shares what it computes only with sequences that have the same salt.
    pub fn add_sequence_salted(&mut self, salt: &[u8]) -> SequenceId {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        let (root, held) = (self.cache.root(salt), self.cache.new_sequence());
        self.sequences.push(Sequence { last_used: self.steps, ..Sequence::new(id, root, held) });
        id
    }

    /// Ends a sequence and frees what it holds; what it computed for an answer stays for prompts that begin alike, while there is room.
    pub fn remove_sequence(&mut self, id: SequenceId) {
        let Some(at) = self.sequences.iter().position(|s| s.id == id) else { return };
        let mut sequence = self.sequences.swap_remove(at);
        retire(&mut sequence, &mut self.cache);
        self.forget(id);
    }

    /// Forgets what was to be told of a sequence.
    fn forget(&mut self, id: SequenceId) {
        self.pending.retain(|e| e.id() != id);
        self.failures.retain(|(failed, _)| *failed != id);
    }

    fn index(&self, id: SequenceId) -> Result<usize> {
        self.sequences.iter().position(|s| s.id == id).context("no such sequence")
    }

    /// The sequence's tokens: prompts and answers, without the stop tokens that ended them.
    pub fn tokens(&self, id: SequenceId) -> Result<&[u32]> {
        Ok(&self.sequences[self.index(id)?].tokens)
    }

    /// Adds tokens to be computed in coming steps, and what to generate after them.
    ///
    /// # Errors
    /// A token outside the vocabulary, more tokens than the context holds, sampling parameters out of range; then nothing has changed.
    pub fn start(&mut self, id: SequenceId, prompt: &[u32], mut generation: Generation) -> Result<()> {
        if let Some(disk) = &mut self.disk {
            disk.give_up_prefetch(&mut self.cache);
        }
        let at = self.index(id)?;
        // 1. All that can be wrong
        generation.sampling.validate()?;
        // There are no more tokens to list than these.
        generation.logprobs = generation.logprobs.map(|top| top.min(self.model.vocabulary));
        self.check_tokens(at, prompt)?;
        let s = &self.sequences[at];
        let grid = self.grid(s.tokens.len() + prompt.len());
        ensure!(s.due() + prompt.len() > 0, "there is nothing to generate from: the prompt has no tokens");
        ensure!(generation.pooling.is_none() || s.tokens.is_empty(), "an embedding is of all of a sequence");
        // 2. Room for the answer, so that no step allocates
        self.forget(id);
        let s = &mut self.sequences[at];
        // What is new of it, and one token in any case.
        let prompt_from = s.tokens.len().min(s.tokens.len() + prompt.len() - 1);
        s.tokens.extend_from_slice(prompt);
        let room = generation.max_tokens.min(self.max_context.saturating_sub(s.tokens.len())) + 1;
        s.tokens.reserve(room);
        self.cache.reserve_tables(&mut s.held, s.tokens.len() + room);
        let history = generation.sampling.has_penalty().then(|| {
            let most = (s.tokens.len() + room).min(self.model.vocabulary);
            let mut history = History::with_capacity(most);
            history.add_prompt(&s.tokens);
            history
        });
        let guide = generation.constraint.as_ref().map(|constraint| Guide::new(constraint, &mut self.masks));
        let pooled = generation.pooling.map(|pooling| Pooled::new(pooling, s.tokens.len(), self.model.hidden));
        let turn = self.next_turn;
        self.next_turn += 1;
        s.shares = self.options.prefix_cache;
        s.embedding = None;
        if generation.pooling == Some(Pooling::Mean) {
            // All its states are wanted: what others have computed is of no use to it.
            s.shares = false;
            s.root = self.cache.root(format!("embedding {}", s.id.0).as_bytes());
        }
        (s.adopted, s.restored) = (0, 0);
        if s.held.is_empty() {
            s.restore = Restore::No;
        }
        s.marks.clear();
        if self.model.state_len() > 0 {
            s.marks.extend_from_slice(&generation.marks);
            s.marks.extend((1..).map(|i| i * grid).take_while(|mark| *mark < s.tokens.len()));
            s.marks.sort_unstable();
            s.marks.dedup();
        }
        s.running = Some(Running { generation, generated: 0, prompt_from, history, guide, pooled, turn });
        Ok(())
    }

    /// Whether a sequence may have these tokens too.
    fn check_tokens(&self, at: usize, tokens: &[u32]) -> Result<()> {
        let (s, vocabulary) = (&self.sequences[at], self.model.vocabulary);
        if let Some(bad) = tokens.iter().find(|t| **t as usize >= vocabulary) {
            bail!("token {bad} is not in the vocabulary of {vocabulary}");
        }
        let total = s.tokens.len() + tokens.len();
        ensure!(
            total <= self.max_context,
            "{total} tokens do not fit the context of {} (see --max-context)",
            self.max_context
        );
        let fits = self.cache.fits_alone(total, self.chunk());
        ensure!(fits, "{total} tokens do not fit the memory for keys and values");
        Ok(())
    }

    /// Stops generating, and says so in an event of the next step; the sequence and what was computed of it stay.
    pub fn cancel(&mut self, id: SequenceId) -> Result<()> {
        let at = self.index(id)?;
        if self.sequences[at].running.take().is_some() {
            self.rest(at);
            self.pending.push(Event::Finished { id, reason: Finish::Cancelled });
        }
        Ok(())
    }

    /// Tokens from one place to the next at which a long prompt leaves copies of its state, wherever others may part from it: a state takes no more memory than
    /// the keys and values between two of them, and a prompt no more than a part of those that are kept.
    fn grid(&self, tokens: usize) -> usize {
        let per_token: usize = self.layouts.iter().map(|l| l.block_bytes() / self.options.block_tokens).sum();
        let by_bytes = (self.model.state_len() * size_of::<f32>()).div_ceil(per_token.max(1));
        let by_share = tokens.div_ceil((self.cache.most_snapshots() / GRID).max(1));
        by_bytes.max(by_share).max(self.chunk())
    }

    /// Forgets all tokens from position `keep` on. What was computed is known for as long as there is room: the next step goes on from there, or from the last
    /// place before it where a recurrent state was kept, and computes the rest again, to the same bits.
    pub fn truncate(&mut self, id: SequenceId, keep: usize) -> Result<()> {
        let at = self.index(id)?;
        let s = &mut self.sequences[at];
        s.running = None;
        // What is being read for it may be of other tokens than those to come.
        if s.restore.waits() {
            retire(s, &mut self.cache);
        }
        if keep < s.computed {
            if s.shares {
                retire(s, &mut self.cache);
            } else {
                self.roll_back(at, keep);
            }
        }
        self.sequences[at].tokens.truncate(keep);
        Ok(())
    }

    /// Nobody generates for a sequence any more: what it computed is everybody's.
    fn rest(&mut self, at: usize) {
        let s = &mut self.sequences[at];
        self.disk.iter().for_each(|disk| disk.touch(self.cache.offloaded_path(&s.held)));
        if s.shares {
            retire(s, &mut self.cache);
        }
    }

    /// Tokens of the last generation's prompt that need not be computed, since they were there.
    pub fn adopted(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequences[self.index(id)?].adopted)
    }

    /// Those of [`Engine::adopted`] that came from disk.
    pub fn restored(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequences[self.index(id)?].restored)
    }

    /// How likely the token was that came last, where [`Generation::logprobs`] asked for it; once.
    pub fn take_logprobs(&mut self, id: SequenceId) -> Option<Logprobs> {
        let at = self.index(id).ok()?;
        self.sequences[at].logprobs.take()
    }

    /// The vector that [`Generation::pooling`] asked for, once it has finished; once.
    pub fn take_embedding(&mut self, id: SequenceId) -> Option<Vec<f32>> {
        let at = self.index(id).ok()?;
        self.sequences[at].embedding.take()
    }

    /// Forgets what was computed of a sequence from position `keep` on, or all of it.
    fn roll_back(&mut self, at: usize, keep: usize) {
        let s = &mut self.sequences[at];
        if s.held.state.is_some() || keep == 0 || !self.cache.can_resume_at(&s.held, keep) {
            self.cache.release(&mut s.held);
            s.computed = 0;
            // What is on disk of it may be looked for again.
            s.restore = Restore::No;
        } else {
            self.cache.shrink(&mut s.held, keep);
            s.computed = keep;
        }
    }

    /// Why a sequence ended with [`Finish::Failed`]; once.
    pub fn take_failure(&mut self, id: SequenceId) -> Option<anyhow::Error> {
        let at = self.failures.iter().position(|(failed, _)| *failed == id)?;
        Some(self.failures.swap_remove(at).1)
    }

    /// Whether a step would do or say anything.
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.sequences.iter().all(|s| s.running.is_none())
    }
}

/// Steps.
impl Engine {
    /// One step of running sequences. Returns what came of it.
    ///
    /// # Errors
    /// When weights could not be read, or memory could not be had: then every further step fails alike. What goes wrong with one sequence is its own:
    /// [`Finish::Failed`].
    pub fn step(&mut self) -> Result<&[Event]> {
        self.events.clear();
        self.events.append(&mut self.pending);
        // 1. Who takes part, with how many tokens; meanwhile others are given what was on disk
        self.poll_restores(false)?;
        let spill = self.runner.spill.as_mut();
        self.scheduler.plan(&mut self.sequences, &mut self.cache, spill, &mut self.plan);
        for i in 0..self.plan.stuck.len() {
            let i = self.plan.stuck[i];
            self.finish(i, Finish::ContextFull);
        }
        if self.plan.takers.is_empty() {
            self.poll_restores(true)?;
            return Ok(&self.events);
        }
        // 2. The model
        let begun = Instant::now();
        let logits = self.compute(Wanted::Last)?;
        let prompting = &self.plan.takers[self.plan.generating..];
        let prompts: usize = prompting.iter().map(|t| t.tokens).sum();
        let furthest = prompting.iter().map(|t| self.sequences[t.sequence].computed).max().unwrap_or(0);
        let took = begun.elapsed();
        self.scheduler.pace.learn(self.plan.generating, prompts, furthest, took);
        // 3. Who comes to its end has a row of logits, in order, also if it failed
        self.draws.clear();
        let mut row = 0;
        for taker in 0..self.plan.takers.len() {
            let (i, ends) = (self.plan.takers[taker].sequence, self.plan.ends[taker]);
            let s = &self.sequences[i];
            if self.failures.iter().any(|(failed, _)| *failed == s.id) {
                self.finish(i, Finish::Failed);
            } else if let Some(running) = &s.running {
                if running.generated == 0 {
                    // What was preempted is computed again before anything is new.
                    let from = running.prompt_from;
                    let (done, total) = (s.computed.saturating_sub(from), s.tokens.len() - from);
                    self.events.push(Event::Prefill { id: s.id, done, total });
                }
                if let Some(value) = running.pooled.as_ref().and_then(Pooled::value) {
                    self.sequences[i].embedding = Some(value);
                    self.finish(i, Finish::Stop);
                } else if ends {
                    self.draws.push(Draw { sequence: i, row });
                }
            }
            row += usize::from(ends);
        }
        // 4. Their next tokens
        self.sample(logits);
        if let Some(disk) = &mut self.disk {
            if self.plan.generating == 0 {
                disk.costs.computed(prompts, took);
            }
            self.runner.after_step(took, &mut self.cache, disk)?;
        }
        Ok(&self.events)
    }

    fn sample(&mut self, logits: Logits) {
        if self.draws.is_empty() {
            return;
        }
        // 1. The masks of those that keep to something, made while the model ran
        let mut resting = std::mem::take(&mut self.resting);
        let (sequences, failures, events) = (&mut self.sequences, &mut self.failures, &mut self.events);
        self.draws.retain(|draw| {
            let s = &mut sequences[draw.sequence];
            let guide = s.running.as_mut().and_then(|running| running.guide.as_mut());
            let Some(Err(why)) = guide.map(Guide::ready) else { return true };
            fail(s, why, failures, events);
            resting.push(draw.sequence);
            false
        });
        // 2. The tokens, and those that must follow them
        let drawn = self.sampling.draw(&mut *self.runner.backend, logits, &self.sequences, &self.draws);
        for (draw, Drawn { token, logprobs }) in self.draws.iter().zip(drawn) {
            let s = &mut self.sequences[draw.sequence];
            s.logprobs = logprobs.take();
            let reason = match token {
                Ok(token) => accept(s, *token, self.max_context, &mut self.masks, &mut self.events),
                Err(e) => Err((*e).into()),
            };
            match reason {
                Ok(None) => continue,
                Ok(Some(reason)) => {
                    s.running = None;
                    self.events.push(Event::Finished { id: s.id, reason });
                }
                Err(why) => fail(s, why, &mut self.failures, &mut self.events),
            }
            resting.push(draw.sequence);
        }
        resting.drain(..).for_each(|i| self.rest(i));
        self.resting = resting;
    }

    fn finish(&mut self, at: usize, reason: Finish) {
        let s = &mut self.sequences[at];
        s.running = None;
        self.events.push(Event::Finished { id: s.id, reason });
        self.rest(at);
    }

    /// Adds `tokens` to a sequence and computes them, in chunks, before all others. Each row of logits goes to `each(position, logits)`: of all of these
    /// positions, or of the last one only.
    ///
    /// # Errors
    /// Those of [`Engine::step`]; logits that are not numbers; what `each` returns.
    pub fn feed(
        &mut self,
        id: SequenceId,
        tokens: &[u32],
        all: bool,
        mut each: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.take_in(id, tokens, all, Some(&mut each))
    }

    /// The same as generating does it that takes the likeliest token: no other logits are looked at.
    ///
    /// # Errors
    /// As [`Engine::feed`]
    pub fn advance(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        self.take_in(id, tokens, false, None)
    }

    fn take_in(&mut self, id: SequenceId, tokens: &[u32], all: bool, mut each: Option<Each>) -> Result<()> {
        ensure!(!tokens.is_empty(), "no tokens to compute");
        let at = self.index(id)?;
        self.check_tokens(at, tokens)?;
        self.forget(id);
        let s = &mut self.sequences[at];
        s.tokens.extend_from_slice(tokens);
        // What is computed again after a preemption is nobody's news.
        let first = s.tokens.len() - tokens.len();
        loop {
            let due = self.sequences[at].due();
            if due == 0 {
                return Ok(());
            }
            let take = self.chunk().min(due);
            let planned = self.scheduler.plan_one(at, take, &mut self.sequences, &mut self.cache, &mut self.plan);
            ensure!(planned, "the KV cache is full");
            let logits = self.compute(if all { Wanted::All } else { Wanted::Last })?;
            if let Some(why) = self.take_failure(id) {
                return Err(why);
            }
            let from = self.sequences[at].computed - logits.rows;
            if each.is_none()
                && let Some(drawing) = self.runner.backend.drawing()
                && let Some(tops) = drawing.tops(logits)
                && tops.iter().all(|top| top.logit.is_finite())
            {
                continue;
            }
            let rows = self.runner.backend.read_logits(logits).chunks_exact(self.model.vocabulary);
            for (position, row) in (from..).zip(rows).filter(|(position, _)| *position >= first) {
                if let Some(bad) = row.iter().position(|x| !x.is_finite()) {
                    bail!("the logit of token {bad} at position {position} is {}", row[bad]);
                }
                each.as_mut().map_or(Ok(()), |each| each(position, row))?;
            }
        }
    }

    /// [`Engine::feed`] as a sequence of its own.
    pub fn score(&mut self, tokens: &[u32], all: bool, each: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        let id = self.add_sequence();
        let result = self.feed(id, tokens, all, each);
        self.remove_sequence(id);
        result
    }

    /// Takes what is planned through the model. Who failed is where it was before, and its failure is noted.
    fn compute(&mut self, wanted: Wanted) -> Result<Logits> {
        self.steps += 1;
        let Outcome { logits, failed, mut routed, .. } =
            self.runner.step(&self.plan, &self.sequences, &mut self.cache, self.disk.as_mut(), wanted)?;
        self.routed.append(&mut routed);
        // 1. Whether the weights were what the files hold
        if let Some(loading) = &self.loading {
            loading.check()?;
        }
        // 2. Where sequences are now
        self.plan.ends.clear();
        for taker in 0..self.plan.takers.len() {
            let ScheduledSequence { sequence, tokens } = self.plan.takers[taker];
            let s = &mut self.sequences[sequence];
            s.computed += tokens;
            s.last_used = self.steps;
            self.plan.ends.push(s.due() == 0 && !s.embeds());
            let own = |f: &&sluice_backend::Failed| f.rows.iter().any(|row| self.runner.is_of(*row, taker));
            match failed.iter().find(own) {
                Some(failed) => {
                    let (id, before) = (s.id, s.computed - tokens);
                    self.roll_back(sequence, before);
                    self.failures.push((id, anyhow::anyhow!("{:#}", failed.why)));
                }
                None => {
                    if let Some(pooled) = s.running.as_mut().and_then(|running| running.pooled.as_mut()) {
                        let before = s.computed - tokens;
                        if (before..s.computed).contains(&pooled.next()) {
                            let from = pooled.next() - before;
                            self.runner.hidden(taker, from, |state| pooled.add(state));
                        }
                    }
                    if s.shares {
                        self.cache.publish(&mut s.held, s.root, &s.tokens, s.computed);
                    }
                    if s.marks.binary_search(&s.computed).is_ok() {
                        self.cache.snapshot(&mut s.held, s.root, &s.tokens, s.computed);
                    }
                    self.cache.drop_before_window(&mut s.held, s.computed);
                }
            }
        }
        Ok(logits)
    }
}

/// A sequence ends with its own failure.
fn fail(
    s: &mut Sequence,
    why: anyhow::Error,
    failures: &mut Vec<(SequenceId, anyhow::Error)>,
    events: &mut Vec<Event>,
) {
    s.running = None;
    failures.push((s.id, why));
    events.push(Event::Finished { id: s.id, reason: Finish::Failed });
}

/// Adds a token to what a sequence has generated, and those that must follow it where it keeps to something. Why it ends by that, if it does.
fn accept(
    s: &mut Sequence,
    token: u32,
    max_context: usize,
    masks: &mut Masks,
    events: &mut Vec<Event>,
) -> Result<Option<Finish>> {
    let reason = add(s, token, max_context, events);
    let Some(running) = s.running.as_mut().filter(|_| reason.is_none()) else { return Ok(reason) };
    let Some(mut guide) = running.guide.take() else { return Ok(None) };
    // Where it is asked how likely each token was, each has logits of its own.
    let forces = running.generation.logprobs.is_none();
    let next = guide.push(token, masks, forces)?;
    running.guide = Some(guide);
    let reason = next.forced.iter().find_map(|token| add(s, *token, max_context, events));
    Ok(reason.or(next.is_over.then_some(Finish::Stop)))
}

fn add(s: &mut Sequence, token: u32, max_context: usize, events: &mut Vec<Event>) -> Option<Finish> {
    let running = s.running.as_mut()?;
    running.generated += 1;
    if running.generation.stop_ids.contains(&token) {
        return Some(Finish::Stop);
    }
    s.tokens.push(token);
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
