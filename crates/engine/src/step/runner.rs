//! Runs a step: inputs from what sequences hold, and the model on a backend.

use std::ops::Range;

use sluice_backend::{Backend, Capacity, KvPool, Outcome, SequenceInput, StepInputs, Wanted};
use sluice_model::Decoder;

use super::block_memory::BlockMemory;
use crate::schedule::plan::Plan;
use crate::schedule::sequence::Sequence;

/// Hidden states that are copied to the host at a time.
const STATES: usize = 64;

/// Tokens of a sequence that go through the MTP head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MtpInput {
    /// Its index among all sequences.
    pub sequence: usize,
    /// How many tokens.
    pub tokens: usize,
    /// The position of the first.
    pub position: usize,
    /// Whether logits behind the last are wanted.
    pub has_logits: bool,
}

/// A model on a backend.
pub(crate) struct Runner {
    pub backend: Box<dyn Backend>,
    decoder: Decoder,
    /// Blocks of keys and values: `[groups]`.
    pools: Vec<KvPool>,
    inputs: StepInputs,
    /// Tokens of a sequence with its drafted ones.
    tokens: Vec<u32>,
    /// Hidden states on the host: `[STATES, hidden]` at most.
    states: Vec<f32>,
}

impl Runner {
    pub fn new(backend: Box<dyn Backend>, decoder: Decoder, pools: Vec<KvPool>, capacity: Capacity) -> Runner {
        let block_tokens: Vec<usize> = pools.iter().map(|pool| pool.layout.block_tokens).collect();
        Runner {
            backend,
            decoder,
            pools,
            inputs: StepInputs::new(&block_tokens, capacity),
            tokens: Vec::new(),
            states: Vec::new(),
        }
    }

    /// The blocks that steps work on.
    pub fn blocks(&mut self) -> BlockMemory<'_> {
        BlockMemory::new(&mut *self.backend, &self.pools)
    }

    /// Takes the next tokens of the scheduled sequences through the model. All queued block operations are applied. `wanted`: logits of all positions,
    /// or of the last token of sequences that reach the end of their tokens, and of each drafted one behind it.
    pub fn step(&mut self, plan: &Plan, sequences: &[Sequence], wanted: Wanted) -> Outcome {
        // 1. Inputs
        self.inputs.clear();
        for scheduled in &plan.scheduled {
            let s = &sequences[scheduled.sequence];
            let to = s.computed + scheduled.tokens;
            let has_logits = wanted == Wanted::All || (to == s.tokens.len() && !s.embeds());
            let mut wanted = if has_logits { wanted } else { Wanted::None };
            let mut tokens = &s.tokens[s.computed..to];
            if let Some(drafts) = s.drafts.as_ref().filter(|_| scheduled.drafts > 0) {
                debug_assert!(tokens.len() == 1 && has_logits, "drafts follow the only token left");
                self.tokens.clear();
                self.tokens.extend_from_slice(tokens);
                self.tokens.extend_from_slice(&drafts.draft.tokens[..scheduled.drafts]);
                (tokens, wanted) = (&self.tokens, Wanted::All);
            }
            self.inputs.push(&SequenceInput {
                tokens,
                position: s.computed,
                state: s.held.state.unwrap_or(0),
                tables: &s.held.tables,
                wanted,
            });
            self.inputs.follow(&s.tokens[..s.computed]);
            if let Some(first) = scheduled.kept_states.filter(|_| scheduled.drafts > 0) {
                self.inputs.keep_states(first..first + scheduled.drafts as u32);
            }
        }
        // 2. The model
        self.backend.begin(&self.inputs);
        self.decoder.step(&mut *self.backend, &self.inputs);
        self.backend.end()
    }

    /// Takes sequences through a part of the model. `hidden`: what the layers before put out, `[tokens, hidden]`; empty if there are none. All queued block operations are
    /// applied.
    pub fn stage_step<'a, T: AsRef<[u32]> + 'a>(
        &mut self,
        sequences: impl Iterator<Item = SequenceInput<'a, T>>,
        hidden: &[f32],
    ) -> Outcome {
        self.inputs.clear();
        sequences.for_each(|sequence| self.inputs.push(&sequence));
        if self.decoder.follows() {
            self.backend.upload(hidden, self.decoder.residual().first_rows(self.inputs.tokens().len()));
        }
        self.backend.begin(&self.inputs);
        self.decoder.step(&mut *self.backend, &self.inputs);
        self.backend.end()
    }

    /// What the layers of the last step put out, on the host: `[rows, hidden]`.
    pub fn residual(&mut self, rows: usize, out: &mut [f32]) {
        self.backend.download(self.decoder.residual().first_rows(rows), out);
    }

    /// Calls `each` with the final hidden states of a sequence of the last step, from its token `from` of that step on. `scheduled`: its index in the plan.
    pub fn hidden(&mut self, scheduled: usize, from: usize, each: impl FnMut(&[f32])) {
        let tokens = self.inputs.rows(scheduled).len();
        self.hidden_of(scheduled, from..tokens, each);
    }

    /// The same for some of a sequence's tokens.
    pub fn hidden_of(&mut self, scheduled: usize, tokens: Range<usize>, mut each: impl FnMut(&[f32])) {
        let first = self.inputs.rows(scheduled).start;
        let (mut at, end, cols) = (first + tokens.start, first + tokens.end, self.decoder.residual().cols);
        while at < end {
            let to = end.min(at + STATES);
            self.states.resize((to - at) * cols, 0.0);
            self.decoder.hidden(&mut *self.backend, at..to, &mut self.states);
            self.states.chunks_exact(cols).for_each(&mut each);
            at = to;
        }
    }

    /// The position of the first token of a sequence in the last step. `scheduled`: its index in the plan.
    pub fn position(&self, scheduled: usize) -> usize {
        self.inputs.position(scheduled)
    }

    /// Whether the checkpoint has an MTP head.
    pub fn has_mtp(&self) -> bool {
        self.decoder.has_mtp()
    }

    /// Takes tokens of sequences through that head. `sequences`: what it sees of each, and the final hidden states of the tokens before them, one after the other:
    /// `[tokens, hidden]`.
    pub fn mtp_step(&mut self, sequences: &[MtpInput], tokens: &[u32], states: &[f32], list: &[Sequence]) -> Outcome {
        self.inputs.clear();
        let mut from = 0;
        for input in sequences {
            let s = &list[input.sequence];
            let tokens = &tokens[from..from + input.tokens];
            from += input.tokens;
            let (position, state, tables) = (input.position, s.held.state.unwrap_or(0), &s.held.tables);
            let wanted = if input.has_logits { Wanted::Last } else { Wanted::None };
            self.inputs.push(&SequenceInput { tokens, position, state, tables, wanted });
        }
        self.backend.upload(states, self.decoder.mtp_states().first_rows(from));
        self.backend.begin(&self.inputs);
        self.decoder.mtp_step(&mut *self.backend, &self.inputs);
        self.backend.end()
    }

    /// The states that the head goes on from behind the last token of a sequence of its last step: `[hidden]`. `at`: its place in that step.
    pub fn mtp_hidden(&mut self, at: usize, out: &mut [f32]) {
        let last = self.inputs.rows(at).end - 1;
        self.decoder.mtp_hidden(&mut *self.backend, last..last + 1, out);
    }

    /// Width of hidden states.
    pub fn hidden_len(&self) -> usize {
        self.decoder.residual().cols
    }

    /// The place of a row of the last step among those of the sequence with this index in the plan, if it is one of them.
    pub fn place_of_row(&self, row: u32, scheduled: usize) -> Option<usize> {
        let rows = self.inputs.rows(scheduled);
        rows.contains(&(row as usize)).then(|| row as usize - rows.start)
    }
}
