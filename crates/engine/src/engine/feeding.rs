//! Computing given tokens, for their logits or to fill the caches.

use anyhow::{Result, bail, ensure};
use sluice_backend::Wanted;

use super::Engine;
use crate::schedule::sequence::SequenceId;

/// Called with rows of logits: (position, `[vocabulary]`).
type OnLogits<'a> = &'a mut dyn FnMut(usize, &[f32]) -> Result<()>;

impl Engine {
    /// Adds `tokens` to a sequence and computes them at once, before all other sequences. `each(position, logits)` is called for all of their positions, or
    /// only for the last one, as `all` says. `logits`: `[vocabulary]`.
    ///
    /// # Errors
    /// Those of [`Engine::start`] and [`Engine::step`]; logits that are not numbers; errors of `each`.
    pub fn feed(
        &mut self,
        id: SequenceId,
        tokens: &[u32],
        all: bool,
        mut each: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.compute_tokens(id, tokens, all, Some(&mut each))
    }

    /// Adds `tokens` to a sequence and computes them at once, with the work of greedy generation: where a device has the logits, only the highest is
    /// looked at.
    ///
    /// # Errors
    /// Those of [`Engine::feed`].
    pub fn advance(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        self.compute_tokens(id, tokens, false, None)
    }

    /// [`Engine::feed`] with a new sequence, which is removed afterwards.
    ///
    /// # Errors
    /// Those of [`Engine::feed`].
    pub fn score(&mut self, tokens: &[u32], all: bool, each: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        let id = self.add_sequence();
        let result = self.feed(id, tokens, all, each);
        self.remove_sequence(id);
        result
    }

    fn compute_tokens(&mut self, id: SequenceId, tokens: &[u32], all: bool, mut each: Option<OnLogits>) -> Result<()> {
        ensure!(!tokens.is_empty(), "no tokens to compute");
        let at = self.sequences.index(id)?;
        self.check_tokens(at, tokens)?;
        self.forget_news(id);
        let s = &mut self.sequences.list[at];
        s.tokens.extend_from_slice(tokens);
        // Tokens before these may be computed again after a preemption, and are not reported.
        let first = s.tokens.len() - tokens.len();
        loop {
            let uncomputed = self.sequences.list[at].uncomputed();
            if uncomputed == 0 {
                return Ok(());
            }
            let take = self.chunk().min(uncomputed);
            let sequences = &mut self.sequences.list;
            let planned = self.scheduler.plan_one(at, take, sequences, &mut self.cache, &mut self.plan);
            ensure!(planned, "the KV cache is full");
            let logits = self.compute(if all { Wanted::All } else { Wanted::Last })?;
            if let Some(why) = self.sequences.take_failure(id) {
                return Err(why);
            }
            let from = self.sequences.list[at].computed - logits.rows;
            if each.is_none()
                && let Some(device) = self.runner.backend.device_sampling()
                && let Some(tops) = device.tops(logits)
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
}
