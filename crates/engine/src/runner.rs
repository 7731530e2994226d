//! One step through the model: inputs from what sequences hold, and what came of it.

use std::borrow::Cow;
use std::time::Duration;

use anyhow::Result;
use sluice_backend::{Backend, Capacity, KvPool, Outcome, SequenceInput, StepInputs, Wanted};
use sluice_cache::{BlockOp, KvCache, RestoreTarget};
use sluice_model::Decoder;

use crate::prompt_cache::PromptCache;
use crate::scheduler::Plan;
use crate::sequence::Sequence;
use crate::spill::Spill;

/// Hidden states that are brought to the host at once.
const STATES: usize = 64;

/// A model on a backend.
pub struct Runner {
    pub backend: Box<dyn Backend>,
    decoder: Decoder,
    /// One for each cache group.
    kv: Vec<KvPool>,
    inputs: StepInputs,
    /// Hidden states that were asked for, `STATES` at most.
    states: Vec<f32>,
    /// Where what the caches give up goes, and comes back from.
    pub spill: Option<Spill>,
}

impl Runner {
    pub fn new(
        backend: Box<dyn Backend>,
        decoder: Decoder,
        kv: Vec<KvPool>,
        capacity: Capacity,
        spill: Option<Spill>,
    ) -> Runner {
        let block_tokens: Vec<usize> = kv.iter().map(|pool| pool.layout.block_tokens).collect();
        Runner { backend, decoder, kv, inputs: StepInputs::new(&block_tokens, capacity), states: Vec::new(), spill }
    }

    /// Takes the next tokens of each taker through the model. `wanted`: logits of all their positions, or of the last token of those that come to their end.
    ///
    /// # Errors
    /// When there is no memory for blocks that are free by number.
    pub fn step(
        &mut self,
        plan: &Plan,
        sequences: &[Sequence],
        cache: &mut KvCache,
        disk: Option<&mut PromptCache>,
        wanted: Wanted,
    ) -> Result<Outcome> {
        // 1. Memory
        self.settle(cache, disk)?;
        // 2. Inputs
        self.inputs.clear();
        for taker in &plan.takers {
            let s = &sequences[taker.sequence];
            let to = s.computed + taker.tokens;
            let has_logits = wanted == Wanted::All || (to == s.tokens.len() && !s.embeds());
            let wanted = if has_logits { wanted } else { Wanted::None };
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

    /// Has memory ready for all blocks that were handed out, and does what the caches want done.
    ///
    /// # Errors
    /// When there is no memory for blocks that are free by number.
    pub fn settle(&mut self, cache: &mut KvCache, disk: Option<&mut PromptCache>) -> Result<()> {
        for (pool, touched) in self.kv.iter().zip(cache.high_water()) {
            self.backend.commit_kv(pool, touched)?;
        }
        self.carry_out(cache, disk)
    }

    /// Does what the caches want done, and no more: blocks that are to be filled have no memory before [`Runner::make_room`].
    ///
    /// # Errors
    /// Those of [`Runner::settle`].
    pub fn carry_out(&mut self, cache: &mut KvCache, mut disk: Option<&mut PromptCache>) -> Result<()> {
        let (backend, kv, spill) = (&mut *self.backend, &self.kv, &mut self.spill);
        let mut done = Ok(());
        cache.drain_ops(|chore, leaving| match chore {
            BlockOp::CopyBlock { group, from, to } => match backend.commit_kv(&kv[group], to as usize + 1) {
                Ok(()) => backend.copy_blocks(&kv[group], &[(from, to)]),
                Err(e) => done = Err(e),
            },
            BlockOp::CopyState { from, to } => backend.copy_state(from, to),
            BlockOp::ZeroState(row) => backend.zero_state(row),
            BlockOp::CopyOut(i) => {
                spill.iter_mut().for_each(|spill| spill.keep(&leaving[i], backend, kv));
                disk.iter_mut().for_each(|disk| disk.leaves(&leaving[i], backend, kv));
            }
        });
        done
    }

    /// Has memory ready for what is to be filled.
    ///
    /// # Errors
    /// Those of [`Runner::settle`].
    pub fn make_room(&mut self, filling: RestoreTarget) -> Result<()> {
        match filling {
            RestoreTarget::Block { group, block, .. } => self.backend.commit_kv(&self.kv[group], block as usize + 1),
            RestoreTarget::State { .. } => Ok(()),
        }
    }

    /// Puts bytes into a block or a state that a sequence has set aside for them.
    ///
    /// # Errors
    /// Those of [`Runner::settle`].
    pub fn fill(&mut self, filling: RestoreTarget, bytes: &[u8]) -> Result<()> {
        self.make_room(filling)?;
        match filling {
            RestoreTarget::Block { group, block, .. } => self.backend.write_block(&self.kv[group], block, bytes),
            RestoreTarget::State { row, .. } => {
                // What was read lies at a page's beginning.
                let state: Cow<[f32]> = match bytemuck::try_cast_slice(bytes) {
                    Ok(state) if cfg!(target_endian = "little") => state.into(),
                    _ => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
                };
                self.backend.write_state(row, &state);
            }
        }
        Ok(())
    }

    /// After a step that took so long: some of what is to be kept on disk is copied out.
    ///
    /// # Errors
    /// Those of [`Runner::settle`].
    pub fn after_step(&mut self, took: Duration, cache: &mut KvCache, disk: &mut PromptCache) -> Result<()> {
        self.settle(cache, Some(disk))?;
        disk.after_step(took, cache, &mut *self.backend, &self.kv);
        Ok(())
    }

    /// Copies out a portion of what conversations hold. Whether there may be more.
    ///
    /// # Errors
    /// Those of [`Runner::settle`].
    pub fn save(&mut self, cache: &mut KvCache, disk: &mut PromptCache) -> Result<bool> {
        self.settle(cache, Some(disk))?;
        Ok(disk.save(cache, &mut *self.backend, &self.kv))
    }

    /// Copies out a portion of the sessions that are being saved. Whether there is more.
    ///
    /// # Errors
    /// Those of [`Runner::settle`].
    pub fn save_named(&mut self, cache: &mut KvCache, disk: &mut PromptCache) -> Result<bool> {
        self.settle(cache, Some(disk))?;
        Ok(disk.save_named(cache, &mut *self.backend, &self.kv))
    }

    /// The final hidden states of the last step's taker number `taker` from its token `from` of this step on, some at a time: `each(states)`.
    pub fn hidden(&mut self, taker: usize, from: usize, mut each: impl FnMut(&[f32])) {
        let rows = self.inputs.rows(taker);
        let (mut at, cols) = (rows.start + from, self.decoder.residual().cols);
        while at < rows.end {
            let to = rows.end.min(at + STATES);
            self.states.resize((to - at) * cols, 0.0);
            self.decoder.hidden(&mut *self.backend, at..to, &mut self.states);
            self.states.chunks_exact(cols).for_each(&mut each);
            at = to;
        }
    }

    /// Whether this is a row of the last step's taker number `taker`.
    pub fn is_of(&self, row: u32, taker: usize) -> bool {
        self.inputs.rows(taker).contains(&(row as usize))
    }
}
