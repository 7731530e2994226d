//! Sequences: adding, starting, cancelling, truncating.

use anyhow::{Result, bail, ensure};

use super::Engine;
use crate::constraint::Guide;
use crate::sampling::{History, Logprobs};
use crate::schedule::sequence::{Event, Finish, Generation, Running, SequenceId};
use crate::step::pooling::{Pooled, Pooling};
use crate::tiers::restore::Restore;

/// One prompt may take one part in this many of the states that are kept for others.
const SNAPSHOT_PART: usize = 4;

impl Engine {
    /// Adds an empty sequence. There may be any number of them: each takes memory when its turn comes.
    pub fn add_sequence(&mut self) -> SequenceId {
        self.add_sequence_salted(b"")
    }

    /// Adds an empty sequence that shares what it computes only with sequences of the same salt.
    pub fn add_sequence_salted(&mut self, salt: &[u8]) -> SequenceId {
        let (root, held) = (self.cache.root(salt), self.cache.new_sequence());
        self.sequences.add(root, held, self.steps)
    }

    /// Ends a sequence and frees what it holds. What it computed for an answer stays for prompts with the same beginning, while there is room.
    pub fn remove_sequence(&mut self, id: SequenceId) {
        let Some(mut sequence) = self.sequences.remove(id) else { return };
        sequence.retire(&mut self.cache);
        if let Some(drafting) = &mut self.drafting {
            drafting.end(id);
        }
        self.forget_news(id);
    }

    /// Drops pending events and failures of a sequence.
    pub(super) fn forget_news(&mut self, id: SequenceId) {
        self.events.pending.retain(|e| e.id() != id);
        self.sequences.drop_failures(id);
    }

    /// The sequence's tokens: prompts and answers, without the stop tokens that ended them.
    ///
    /// # Errors
    /// When there is no such sequence.
    pub fn tokens(&self, id: SequenceId) -> Result<&[u32]> {
        Ok(&self.sequences.list[self.sequences.index(id)?].tokens)
    }

    /// Adds a prompt to a sequence, to be computed in the next steps, and what to generate after it.
    ///
    /// # Errors
    /// A token outside the vocabulary, more tokens than the context holds, sampling parameters out of range. Then nothing has changed.
    pub fn start(&mut self, id: SequenceId, prompt: &[u32], mut generation: Generation) -> Result<()> {
        self.tiers.interrupt_prefetch(&mut self.cache);
        let at = self.sequences.index(id)?;
        // 1. Check everything
        generation.sampling.validate()?;
        // The vocabulary has no more tokens to list.
        generation.logprobs = generation.logprobs.map(|top| top.min(self.model.vocabulary));
        self.check_tokens(at, prompt)?;
        let s = &self.sequences.list[at];
        let interval = self.snapshot_interval(s.tokens.len() + prompt.len());
        ensure!(s.uncomputed() + prompt.len() > 0, "there is nothing to generate from: the prompt has no tokens");
        ensure!(generation.pooling.is_none() || s.tokens.is_empty(), "an embedding is of all of a sequence");
        // 2. Allocate for the whole answer, so that no step does
        self.forget_news(id);
        let s = &mut self.sequences.list[at];
        // The prompt's new tokens, and one token in any case.
        let prompt_from = s.tokens.len().min(s.tokens.len() + prompt.len() - 1);
        s.tokens.extend_from_slice(prompt);
        let room = generation.max_tokens.min(self.setup.max_context.saturating_sub(s.tokens.len())) + 1;
        s.tokens.reserve(room);
        self.cache.reserve_tables(&mut s.held, s.tokens.len() + room);
        let history = generation.sampling.has_penalty().then(|| {
            let max = (s.tokens.len() + room).min(self.model.vocabulary);
            let mut history = History::with_capacity(max);
            history.add_prompt(&s.tokens);
            history
        });
        let guide = generation.constraint.as_ref().map(|constraint| Guide::new(constraint, &mut self.sampling.masks));
        let pooled = generation.pooling.map(|pooling| Pooled::new(pooling, s.tokens.len(), self.model.hidden));
        let generates = generation.pooling.is_none() && generation.max_tokens > 1;
        let prediction = std::mem::take(&mut generation.prediction);
        // 3. What it shares
        s.shares = self.options.prefix_cache;
        s.embedding = None;
        if generation.pooling == Some(Pooling::Mean) {
            // A pooled prompt needs the states of all tokens, so it cannot reuse any.
            s.shares = false;
            s.root = self.cache.root(format!("embedding {}", s.id.0).as_bytes());
        }
        s.logprobs.clear();
        s.drafts = None;
        (s.reused, s.restored) = (0, 0);
        if s.held.is_empty() {
            s.restore = Restore::NotStarted;
        }
        s.snapshot_points.clear();
        if self.model.state_len() > 0 {
            s.snapshot_points.extend_from_slice(&generation.snapshot_points);
            s.snapshot_points.extend((1..).map(|i| i * interval).take_while(|point| *point < s.tokens.len()));
            s.snapshot_points.sort_unstable();
            s.snapshot_points.dedup();
        }
        if let Some(drafting) = self.drafting.as_mut().filter(|_| generates) {
            drafting.begin(s, &prediction, s.tokens.len() + room);
        }
        // 4. Its turn
        let turn = self.sequences.take_turn();
        let running = Running { generation, generated: 0, prompt_from, history, guide, pooled, turn };
        self.sequences.list[at].running = Some(running);
        Ok(())
    }

    /// Checks that these tokens can be added to a sequence.
    pub(super) fn check_tokens(&self, at: usize, tokens: &[u32]) -> Result<()> {
        let (s, vocabulary) = (&self.sequences.list[at], self.model.vocabulary);
        if let Some(bad) = tokens.iter().find(|t| **t as usize >= vocabulary) {
            bail!("token {bad} is not in the vocabulary of {vocabulary}");
        }
        let (total, max_context) = (s.tokens.len() + tokens.len(), self.setup.max_context);
        ensure!(total <= max_context, "{total} tokens do not fit the context of {max_context} (see --max-context)");
        let fits = self.cache.fits_alone(total, self.chunk());
        ensure!(fits, "{total} tokens do not fit the memory for keys and values");
        Ok(())
    }

    /// Tokens between the states that a long prompt leaves for others, wherever they may differ from it. A state takes no more memory than the keys and values
    /// between two of them, and a prompt no more than a part of the states that are kept.
    fn snapshot_interval(&self, tokens: usize) -> usize {
        let per_token: usize = self.layouts.iter().map(|l| l.block_bytes() / self.options.block_tokens).sum();
        let by_bytes = (self.model.state_len() * size_of::<f32>()).div_ceil(per_token.max(1));
        let by_share = tokens.div_ceil((self.cache.most_snapshots() / SNAPSHOT_PART).max(1));
        by_bytes.max(by_share).max(self.chunk())
    }

    /// Stops generating. The next step reports it. The sequence and what was computed of it stay.
    ///
    /// # Errors
    /// When there is no such sequence.
    pub fn cancel(&mut self, id: SequenceId) -> Result<()> {
        let at = self.sequences.index(id)?;
        if self.sequences.list[at].running.take().is_some() {
            self.release(at);
            self.events.pending.push(Event::Finished { id, reason: Finish::Cancelled });
        }
        Ok(())
    }

    /// Forgets all tokens from position `keep` on. What was computed stays known while there is room. The next step continues from `keep`, or from the last
    /// snapshot of a recurrent state before it, and computes the rest again, to the same bits.
    ///
    /// # Errors
    /// When there is no such sequence.
    pub fn truncate(&mut self, id: SequenceId, keep: usize) -> Result<()> {
        let at = self.sequences.index(id)?;
        let s = &mut self.sequences.list[at];
        s.running = None;
        // The tokens that are being restored may differ from those to come.
        if s.restore.is_pending() {
            s.retire(&mut self.cache);
        }
        if keep < s.computed {
            if s.shares {
                s.retire(&mut self.cache);
            } else {
                self.roll_back(at, keep);
            }
        }
        self.sequences.list[at].tokens.truncate(keep);
        Ok(())
    }

    /// A sequence does not run any more: gives its blocks to the prefix cache.
    pub(super) fn release(&mut self, at: usize) {
        let s = &mut self.sequences.list[at];
        self.tiers.touch(&self.cache, &s.held);
        if s.shares {
            s.retire(&mut self.cache);
        }
    }

    /// Forgets what was computed of a sequence from position `keep` on, or all of it.
    pub(super) fn roll_back(&mut self, at: usize, keep: usize) {
        let s = &mut self.sequences.list[at];
        if s.held.state.is_some() || keep == 0 || !self.cache.can_resume_at(&s.held, keep) {
            self.cache.release(&mut s.held);
            s.computed = 0;
            // The rest of the prompt may be on disk.
            s.restore = Restore::NotStarted;
        } else {
            self.cache.shrink(&mut s.held, keep);
            s.computed = keep;
        }
    }

    /// Tokens of the last generation's prompt that were reused instead of computed.
    ///
    /// # Errors
    /// When there is no such sequence.
    pub fn reused_tokens(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequences.list[self.sequences.index(id)?].reused)
    }

    /// How many of [`Engine::reused_tokens`] came from disk.
    ///
    /// # Errors
    /// When there is no such sequence.
    pub fn restored_tokens(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequences.list[self.sequences.index(id)?].restored)
    }

    /// Takes the log-probabilities of a token, if [`Generation::logprobs`] asked for them: to be called once for each [`Event::Token`] of the last step.
    pub fn take_logprobs(&mut self, id: SequenceId) -> Option<Logprobs> {
        let at = self.sequences.position(id)?;
        self.sequences.list[at].logprobs.pop_front().flatten()
    }

    /// Takes the embedding that [`Generation::pooling`] asked for, `[hidden]`, once the generation has finished.
    pub fn take_embedding(&mut self, id: SequenceId) -> Option<Vec<f32>> {
        let at = self.sequences.position(id)?;
        self.sequences.list[at].embedding.take()
    }

    /// Takes the reason for [`Finish::Failed`].
    pub fn take_failure(&mut self, id: SequenceId) -> Option<anyhow::Error> {
        self.sequences.take_failure(id)
    }

    /// Whether a step would do and report nothing.
    pub fn is_idle(&self) -> bool {
        self.events.pending.is_empty() && !self.sequences.any_running()
    }
}
