//! Computing given tokens, for their logits or to fill the caches.

use anyhow::{Result, bail, ensure};
use sluice_backend::Wanted;

use super::Engine;
use crate::schedule::sequence::SequenceId;

/// Called with rows of logits: (position, `[vocabulary]`).
type OnLogits<'a> = &'a mut dyn FnMut(usize, &[f32]) -> Result<()>;

/// What is wanted of the tokens that are computed.
enum Outputs<'a> {
    /// Nothing, but logits are computed as greedy generation would.
    Nothing,
    /// Logits of all positions, or of the last.
    Logits { all: bool, each: OnLogits<'a> },
    /// Final hidden states of all positions: (position, `[hidden]`).
    States(&'a mut dyn FnMut(usize, &[f32])),
}

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
        self.compute_tokens(id, tokens, Outputs::Logits { all, each: &mut each })
    }

    /// Adds `tokens` to a sequence and computes them at once, with the work of greedy generation: where a device has the logits, only the highest is
    /// looked at.
    ///
    /// # Errors
    /// Those of [`Engine::feed`].
    pub fn advance(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        self.compute_tokens(id, tokens, Outputs::Nothing)
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

    /// Computes `tokens` as a sequence of their own. `each(position, state)` gets the final hidden state of each, which is the head's input: `[hidden]`.
    ///
    /// # Errors
    /// Those of [`Engine::start`] and [`Engine::step`].
    pub fn states(&mut self, tokens: &[u32], mut each: impl FnMut(usize, &[f32])) -> Result<()> {
        let id = self.add_sequence();
        let result = self.compute_tokens(id, tokens, Outputs::States(&mut each));
        self.remove_sequence(id);
        result
    }

    fn compute_tokens(&mut self, id: SequenceId, tokens: &[u32], mut outputs: Outputs) -> Result<()> {
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
            let all = matches!(outputs, Outputs::Logits { all: true, .. });
            let logits = self.compute(if all { Wanted::All } else { Wanted::Last })?;
            if let Some(why) = self.sequences.take_failure(id) {
                return Err(why);
            }
            let computed = self.sequences.list[at].computed;
            if let Outputs::States(each) = &mut outputs {
                let mut position = computed - take;
                self.runner.hidden(0, 0, |state| {
                    if position >= first {
                        each(position, state);
                    }
                    position += 1;
                });
                continue;
            }
            let from = computed - logits.rows;
            if matches!(outputs, Outputs::Nothing)
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
                if let Outputs::Logits { each, .. } = &mut outputs {
                    each(position, row)?;
                }
            }
        }
    }
}
