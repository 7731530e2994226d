//! The engine: a model, its caches, and the sequences that share them. [`Engine::step`] is the only way forward: it takes the next
//! tokens of every running sequence through the model together and samples where a sequence has come to its end.

mod open;

pub use open::Options;

use anyhow::{Context, Result, bail, ensure};
use sluice_backend::{Backend, Batch, Cpu, KvLayout, KvType, MemoryClass, Profile, Routed, SequenceSlice, Streamed};
use sluice_cache::{BlockPool, BlockTable};
use sluice_model::{Caches, Decoder, Spec};
use sluice_store::Loading;

use crate::placement::Placed;
use crate::sampler::{History, Sampler};
use crate::sequence::{Event, Finish, Generation, Running, Sequence, SequenceId};

/// A model with its caches and sequences.
pub struct Engine {
    backend: Cpu,
    /// Dropped after the backend, which may wait for weights.
    loading: Option<Loading>,
    decoder: Decoder,
    caches: Caches,
    layouts: Vec<KvLayout>,
    pools: Vec<BlockPool>,
    state_slots: BlockPool,
    sequences: Vec<Sequence>,
    next_id: u64,
    options: Options,
    chunk: usize,
    placed: Placed,
    /// Bytes that were set aside for the scratch of steps.
    scratch: u64,
    /// Bytes of mapped weights that there is no room for beside all else.
    squeezed: u64,
    /// Why the experts of some tokens of the last step were not there.
    failure: Option<anyhow::Error>,
    /// Whose they are, and whether logits were asked for.
    failed: Vec<(usize, bool)>,
    max_context: usize,
    skipped: Vec<String>,
    // Kept between steps, so that a step allocates nothing.
    batch: Batch,
    wanted: Vec<u32>,
    takers: Vec<(usize, usize)>,
    logits: Vec<f32>,
    events: Vec<Event>,
}

impl Engine {
    pub fn spec(&self) -> &Spec {
        &self.decoder.spec
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
        self.chunk
    }

    /// Where experts live, and why.
    pub fn placed(&self) -> &Placed {
        &self.placed
    }

    /// What reading fell back on so far, one clause each.
    pub fn fallbacks(&self) -> Vec<String> {
        let squeezed = (self.squeezed > 0).then(|| {
            let bytes = crate::budget::bytes(self.squeezed);
            format!(
                "{bytes} of mapped weights do not fit the memory control group: the kernel reads them again and again"
            )
        });
        let loading = self.loading.iter().flat_map(Loading::notes);
        loading.chain(squeezed).chain(self.backend.streaming_notes().iter().cloned()).collect()
    }

    /// What streamed experts took since the last call; `None` where none are streamed.
    pub fn take_streamed(&mut self) -> Option<Streamed> {
        self.backend.take_streamed()
    }

    /// Why the last sequence that ended with [`Finish::Failed`] did.
    pub fn take_failure(&mut self) -> Option<anyhow::Error> {
        self.failure.take()
    }

    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// Parts of the checkpoint that were left out (vision, multi-token prediction).
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// Bytes allocated, committed (keys and values) or mapped, by class.
    pub fn memory(&mut self, class: MemoryClass) -> usize {
        self.backend.memory(class)
    }

    /// Bytes that were set aside for the scratch of steps of [`Engine::chunk`] tokens, logits and sampling included: what [`MemoryClass::Scratch`] comes to
    /// at most, but for what grows with the context.
    pub fn scratch_set_aside(&self) -> u64 {
        self.scratch
    }

    /// Bytes of KV that hold tokens now, of those that [`Engine::memory`] counts as committed.
    pub fn kv_in_use(&self) -> usize {
        let used = self.pools.iter().zip(&self.layouts).map(|(p, l)| (p.total() - p.free()) * l.block_bytes());
        used.sum()
    }

    /// How the weights come into memory; `None` for a checkpoint that was opened elsewhere. The first steps wait for what they need.
    pub fn loading(&self) -> Option<&Loading> {
        self.loading.as_ref()
    }

    /// Time and work by phase since the last call; empty unless profiling was asked for.
    pub fn take_profile(&mut self) -> Profile {
        self.backend.take_profile()
    }

    /// Starts to record what routers choose.
    pub fn record_routing(&mut self) {
        self.backend.record_routing();
    }

    /// What routers chose since the last call, in the order of the steps and their layers; nothing where it is not recorded.
    pub fn take_routing(&mut self) -> Vec<Routed> {
        self.backend.take_routing()
    }

    /// A new, empty sequence.
    ///
    /// # Errors
    /// When [`Options::max_sequences`] are there already.
    pub fn add_sequence(&mut self) -> Result<SequenceId> {
        let Some(slot) = self.state_slots.allocate() else {
            bail!("all {} sequences are in use", self.options.max_sequences)
        };
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.push(Sequence {
            id,
            tokens: Vec::with_capacity(self.max_context),
            computed: 0,
            tables: self
                .layouts
                .iter()
                .map(|l| BlockTable::with_room(self.max_context.div_ceil(l.block_tokens)))
                .collect(),
            state_slot: slot as usize,
            history: History::with_capacity(self.max_context.min(self.decoder.spec.vocabulary)),
            running: None,
        });
        self.clear_state(slot as usize);
        Ok(id)
    }

    /// Ends a sequence and frees what it holds.
    pub fn remove_sequence(&mut self, id: SequenceId) {
        let Some(at) = self.sequences.iter().position(|s| s.id == id) else { return };
        let mut sequence = self.sequences.swap_remove(at);
        for ((table, pool), layout) in sequence.tables.iter_mut().zip(&mut self.pools).zip(&self.layouts) {
            table.shrink(pool, 0, layout.block_tokens);
        }
        self.state_slots.release(sequence.state_slot as u32);
    }

    fn clear_state(&mut self, slot: usize) {
        if let Some(states) = self.caches.states {
            self.backend.zero(states.rows(slot..slot + 1));
        }
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
    /// A token outside the vocabulary, more tokens than the context holds, sampling parameters out of range.
    pub fn start(&mut self, id: SequenceId, prompt: &[u32], generation: Generation) -> Result<()> {
        let at = self.index(id)?;
        self.append(at, prompt)?;
        let vocabulary = self.decoder.spec.vocabulary;
        let s = &mut self.sequences[at];
        ensure!(s.tokens.len() > s.computed, "there is nothing to generate from: the prompt has no tokens");
        let sampler = Sampler::new(generation.sampling, vocabulary)?;
        s.history.clear();
        s.history.add_prompt(&s.tokens);
        let (stop_ids, max_tokens) = (generation.stop_ids, generation.max_tokens);
        s.running = Some(Running { sampler, stop_ids, max_tokens, generated: 0, prompt_from: s.computed });
        Ok(())
    }

    fn append(&mut self, at: usize, tokens: &[u32]) -> Result<()> {
        let vocabulary = self.decoder.spec.vocabulary;
        let s = &mut self.sequences[at];
        if let Some(bad) = tokens.iter().find(|t| **t as usize >= vocabulary) {
            bail!("token {bad} is not in the vocabulary of {vocabulary}");
        }
        let total = s.tokens.len() + tokens.len();
        ensure!(
            total <= self.max_context,
            "{total} tokens do not fit the context of {} (see --max-context)",
            self.max_context
        );
        s.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// Stops generating; the sequence and its state stay.
    pub fn cancel(&mut self, id: SequenceId) -> Result<()> {
        let at = self.index(id)?;
        self.sequences[at].running = None;
        Ok(())
    }

    /// Forgets all tokens from position `keep` on. A recurrent state cannot be rolled back: then everything before is computed again
    /// by the next step, to the same bits.
    pub fn truncate(&mut self, id: SequenceId, keep: usize) -> Result<()> {
        let at = self.index(id)?;
        let s = &mut self.sequences[at];
        s.running = None;
        s.tokens.truncate(keep);
        // What is left counts as prompt: penalties for an answer are for the answer under way.
        s.history.clear();
        s.history.add_prompt(&s.tokens);
        if keep < s.computed {
            self.roll_back(at, keep);
        }
        Ok(())
    }

    /// Forgets what was computed of a sequence from position `keep` on; all of it, where a recurrent state cannot be rolled back.
    fn roll_back(&mut self, at: usize, keep: usize) {
        let s = &mut self.sequences[at];
        s.computed = if self.caches.states.is_some() { 0 } else { keep };
        let (computed, slot) = (s.computed, s.state_slot);
        for ((table, pool), layout) in s.tables.iter_mut().zip(&mut self.pools).zip(&self.layouts) {
            table.shrink(pool, computed, layout.block_tokens);
        }
        if computed == 0 {
            self.clear_state(slot);
        }
    }

    /// Whether a step would do anything.
    pub fn is_idle(&self) -> bool {
        self.sequences.iter().all(|s| s.running.is_none())
    }

    /// One step of all running sequences. Returns what came of it.
    ///
    /// # Errors
    /// When the caches are full, logits are not numbers, or weights could not be read: then every further step fails alike.
    pub fn step(&mut self) -> Result<&[Event]> {
        self.events.clear();
        // 1. Who takes part, with how many tokens. Single tokens first: a long prompt must not hold up who is generating.
        self.takers.clear();
        let mut room = self.chunk;
        for decode in [true, false] {
            for (i, s) in self.sequences.iter().enumerate() {
                let due = s.tokens.len() - s.computed;
                if s.running.is_some() && due > 0 && (due == 1) == decode && room > 0 {
                    let take = due.min(room);
                    room -= take;
                    self.takers.push((i, take));
                }
            }
        }
        if self.takers.is_empty() {
            return Ok(&self.events);
        }
        // 2. One pass through the model.
        let takers = std::mem::take(&mut self.takers);
        let computed = self.compute(&takers, Rows::Last);
        self.takers = takers;
        computed?;
        // 3. Sample where a sequence has come to its end.
        let vocabulary = self.decoder.spec.vocabulary;
        let mut row = 0;
        for &(i, _) in &self.takers {
            let s = &mut self.sequences[i];
            let (id, position) = (s.id, s.tokens.len() as u64);
            if let Some((_, has_logits)) = self.failed.iter().find(|(failed, _)| *failed == i) {
                row += usize::from(*has_logits);
                s.running = None;
                self.events.push(Event::Finished { id, reason: Finish::Failed });
                continue;
            }
            let Some(running) = &mut s.running else { continue };
            if running.generated == 0 {
                let (done, total) = (s.computed - running.prompt_from, s.tokens.len() - running.prompt_from);
                self.events.push(Event::Prefill { id, done, total });
            }
            if s.computed < s.tokens.len() {
                continue;
            }
            let logits = &self.logits[row * vocabulary..(row + 1) * vocabulary];
            row += 1;
            let token = running.sampler.sample(logits, &s.history, position)?;
            running.generated += 1;
            let finish = if running.stop_ids.contains(&token) {
                Some(Finish::Stop)
            } else {
                s.tokens.push(token);
                s.history.add_generated(token);
                self.events.push(Event::Token { id, token });
                if running.generated >= running.max_tokens {
                    Some(Finish::Length)
                } else if s.tokens.len() >= self.max_context {
                    Some(Finish::ContextFull)
                } else {
                    None
                }
            };
            if let Some(reason) = finish {
                s.running = None;
                self.events.push(Event::Finished { id, reason });
            }
        }
        Ok(&self.events)
    }

    /// Adds `tokens` to a sequence and computes them, in chunks. Each row of logits goes to `each(position, logits)`: of all of these
    /// positions, or of the last one only.
    ///
    /// # Errors
    /// Those of [`Engine::step`]; what `each` returns.
    pub fn feed(
        &mut self,
        id: SequenceId,
        tokens: &[u32],
        all: bool,
        mut each: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        ensure!(!tokens.is_empty(), "no tokens to compute");
        let at = self.index(id)?;
        self.append(at, tokens)?;
        let vocabulary = self.decoder.spec.vocabulary;
        loop {
            let s = &self.sequences[at];
            let (done, due) = (s.computed, s.tokens.len() - s.computed);
            if due == 0 {
                return Ok(());
            }
            let take = self.chunk.min(due);
            self.compute(&[(at, take)], if all { Rows::All } else { Rows::Last })?;
            if !self.failed.is_empty() {
                return Err(self.failure.take().expect("what failed has a reason"));
            }
            let rows = self.wanted.len();
            for (i, logits) in self.logits[..rows * vocabulary].chunks_exact(vocabulary).enumerate() {
                let position = done + take - rows + i;
                if let Some(bad) = logits.iter().position(|x| !x.is_finite()) {
                    bail!("the logit of token {bad} at position {position} is {}", logits[bad]);
                }
                each(position, logits)?;
            }
        }
    }

    /// [`Engine::feed`] as a sequence of its own.
    pub fn score(&mut self, tokens: &[u32], all: bool, each: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        let id = self.add_sequence()?;
        let result = self.feed(id, tokens, all, each);
        self.remove_sequence(id);
        result
    }

    /// Takes the next `n` tokens of each (sequence, n) through the model; leaves the logits of the wanted rows.
    fn compute(&mut self, takers: &[(usize, usize)], rows: Rows) -> Result<()> {
        // 1. Room for them in every cache group.
        for &(i, take) in takers {
            let s = &mut self.sequences[i];
            for ((table, pool), layout) in s.tables.iter_mut().zip(&mut self.pools).zip(&self.layouts) {
                let grown = table.grow(pool, s.computed + take, layout.block_tokens);
                grown.ok().context("the KV cache is full")?;
            }
        }
        for (kv, pool) in self.caches.kv.iter().zip(&self.pools) {
            self.backend.commit_kv(kv, pool.touched())?;
        }
        // 2. The batch.
        let b = &mut self.batch;
        b.tokens.clear();
        b.positions.clear();
        b.slots.iter_mut().for_each(Vec::clear);
        self.wanted.clear();
        for (n, &(i, take)) in takers.iter().enumerate() {
            let s = &self.sequences[i];
            let (from, range) = (b.tokens.len(), s.computed..s.computed + take);
            b.tokens.extend_from_slice(&s.tokens[range.clone()]);
            b.positions.extend(range.clone().map(|p| p as u32));
            for ((slots, table), layout) in b.slots.iter_mut().zip(&s.tables).zip(&self.layouts) {
                slots.extend(range.clone().map(|p| table.slot(p, layout.block_tokens)));
            }
            match rows {
                Rows::All => self.wanted.extend(from as u32..(from + take) as u32),
                Rows::Last if s.computed + take == s.tokens.len() => self.wanted.push((from + take - 1) as u32),
                Rows::Last => {}
            }
            if b.sequences.len() <= n {
                let blocks = |l: &KvLayout| Vec::with_capacity(self.max_context.div_ceil(l.block_tokens));
                let tables = self.layouts.iter().map(blocks).collect();
                b.sequences.push(SequenceSlice { rows: 0..0, position: 0, tables, state_slot: 0 });
            }
            let slice = &mut b.sequences[n];
            (slice.rows, slice.position, slice.state_slot) = (from..from + take, s.computed, s.state_slot);
            for (to, table) in slice.tables.iter_mut().zip(&s.tables) {
                to.clear();
                to.extend_from_slice(table.blocks());
            }
        }
        b.sequences.truncate(takers.len());
        // 3. Through the model.
        let needed = self.wanted.len() * self.decoder.spec.vocabulary;
        if self.logits.len() < needed {
            self.logits.resize(needed, 0.0);
        }
        let logits = &mut self.logits[..needed];
        self.decoder.step(&mut self.backend, &self.batch, &self.caches, &self.wanted, logits);
        // 4. Whether the weights were what the files hold.
        if let Some(loading) = &self.loading {
            loading.check()?;
        }
        takers.iter().for_each(|&(i, take)| self.sequences[i].computed += take);
        // 5. Whose experts could not be read is where it was before; all others are none the worse for it.
        self.failed.clear();
        if let Some((rows, error)) = self.backend.take_failure() {
            self.failure = Some(error.into());
            for (n, &(i, take)) in takers.iter().enumerate() {
                let of = &self.batch.sequences[n].rows;
                if rows.iter().any(|r| of.contains(&(*r as usize))) {
                    let s = &mut self.sequences[i];
                    self.failed.push((i, s.computed == s.tokens.len()));
                    self.roll_back(i, self.sequences[i].computed - take);
                }
            }
        }
        Ok(())
    }
}

/// Whose logits a pass leaves.
#[derive(Clone, Copy)]
enum Rows {
    All,
    /// The last token of each sequence that has come to its end.
    Last,
}
