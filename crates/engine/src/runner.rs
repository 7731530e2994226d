//! One step through the model: inputs from what sequences hold, and what came of it.

use anyhow::Result;
use sluice_backend::{Backend, Capacity, KvPool, Outcome, SequenceInput, StepInputs, Wanted};
use sluice_cache::{Chore, KvCache};
use sluice_model::Decoder;

use crate::scheduler::Plan;
use crate::sequence::Sequence;

/// A model on a backend.
pub struct Runner {
    pub backend: Box<dyn Backend>,
    decoder: Decoder,
    /// One for each cache group.
    kv: Vec<KvPool>,
    inputs: StepInputs,
}

impl Runner {
    pub fn new(backend: Box<dyn Backend>, decoder: Decoder, kv: Vec<KvPool>, capacity: Capacity) -> Runner {
        let block_tokens: Vec<usize> = kv.iter().map(|pool| pool.layout.block_tokens).collect();
        Runner { backend, decoder, kv, inputs: StepInputs::new(&block_tokens, capacity) }
    }

    /// Takes the next tokens of each taker through the model. `wanted`: logits of all their positions, or of the last token of those that come to their end.
    ///
    /// # Errors
    /// When there is no memory for blocks that are free by number.
    pub fn step(
        &mut self,
        plan: &mut Plan,
        sequences: &[Sequence],
        cache: &KvCache,
        wanted: Wanted,
    ) -> Result<Outcome> {
        // 1. Memory
        for (pool, touched) in self.kv.iter().zip(cache.touched()) {
            self.backend.commit_kv(pool, touched)?;
        }
        for chore in plan.chores.drain(..) {
            match chore {
                Chore::CopyBlock { group, from, to } => self.backend.copy_blocks(&self.kv[group], &[(from, to)]),
                Chore::CopyState { from, to } => self.backend.copy_state(from, to),
                Chore::ZeroState(row) => self.backend.zero_state(row),
            }
        }
        // 2. Inputs
        self.inputs.clear();
        for taker in &plan.takers {
            let s = &sequences[taker.sequence];
            let to = s.computed + taker.tokens;
            let wanted = if wanted == Wanted::Last && to < s.tokens.len() { Wanted::None } else { wanted };
            self.inputs.push(&SequenceInput {
                tokens: &s.tokens[s.computed..to],
                position: s.computed,
                state: s.held.state.unwrap_or(0),
                tables: &s.held.tables,
                wanted,
            });
        }
        // 3. The model
        self.backend.begin(&self.inputs);
        self.decoder.step(&mut *self.backend, &self.inputs);
        Ok(self.backend.end())
    }

    /// Whether this is a row of the last step's taker number `taker`.
    pub fn is_of(&self, row: u32, taker: usize) -> bool {
        self.inputs.rows(taker).contains(&(row as usize))
    }
}
