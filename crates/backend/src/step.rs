//! The inputs and the outcome of a model step.
//!
//! A step is `begin(inputs)`, operations that are only enqueued, and `end()`. On a GPU these are one upload, one graph and one download.

use std::ops::Range;
use std::sync::Arc;

use sluice_kernels::ngrams::MOST_GRAM;

use crate::Routed;

/// The tokens of the sequences of one step, in flat arrays of fixed capacity, so that a device
/// can keep copies at fixed addresses. Prefill and decode are the same step with different lengths.
#[derive(Debug)]
pub struct StepInputs {
    /// Tokens per block of each cache group.
    block_tokens: Vec<usize>,
    capacity: Capacity,
    /// `[tokens]`, sequence after sequence.
    tokens: Vec<u32>,
    /// `[tokens]`
    positions: Vec<u32>,
    /// `[groups, capacity.tokens]`: the slot of each token's keys and values: block number times tokens per block plus offset.
    slots: Vec<u64>,
    /// `[sequences + 1]`: the first row of each sequence, and the end of the last.
    starts: Vec<u32>,
    /// `[sequences]`: the last tokens before those of the step, the last first, and how many of them there are.
    before: Vec<([u32; MOST_GRAM - 1], usize)>,
    /// `[sequences]`: rows of the pool of recurrent states.
    states: Vec<u32>,
    /// `[tokens]`: the row of that pool that keeps the state after each token, or [`NOT_KEPT`].
    kept: Vec<u32>,
    /// `[groups, capacity.blocks]`: the block tables of all sequences, one after the other, in ascending position.
    tables: Vec<u32>,
    /// `[groups, capacity.sequences + 1]`: the start of each sequence's table in `tables`.
    table_starts: Vec<u32>,
    /// Rows whose logits are wanted, ascending.
    wanted: Vec<u32>,
}

/// Stands for the row of a state that is not kept: see [`StepInputs::kept`].
pub const NOT_KEPT: u32 = u32::MAX;

/// The capacity of [`StepInputs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Tokens of a step.
    pub tokens: usize,
    /// Sequences of a step.
    pub sequences: usize,
    /// Blocks in the tables of all sequences, in each cache group.
    pub blocks: usize,
}

/// The rows whose logits a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// No logits.
    None,
    /// After the sequence's last token of this step.
    Last,
    /// After each of its tokens.
    All,
}

/// The new tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct SequenceInput<'a, T> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Position of the first of them; the others follow.
    pub position: usize,
    /// Row of the pool of recurrent states.
    pub state: u32,
    /// For each cache group, the block numbers in ascending position; those that no query sees any more may be anything.
    pub tables: &'a [T],
    /// The rows whose logits are wanted.
    pub wanted: Wanted,
}

impl Clone for StepInputs {
    fn clone(&self) -> StepInputs {
        let mut copy = StepInputs::new(&self.block_tokens, self.capacity);
        copy.clone_from(self);
        copy
    }

    /// Allocates nothing once it was as large.
    fn clone_from(&mut self, from: &StepInputs) {
        let StepInputs {
            block_tokens,
            capacity,
            tokens,
            positions,
            slots,
            starts,
            before,
            states,
            kept,
            tables,
            table_starts,
            wanted,
        } = from;
        self.block_tokens.clone_from(block_tokens);
        self.capacity = *capacity;
        self.tokens.clone_from(tokens);
        self.positions.clone_from(positions);
        self.slots.clone_from(slots);
        self.starts.clone_from(starts);
        self.before.clone_from(before);
        self.states.clone_from(states);
        self.kept.clone_from(kept);
        self.tables.clone_from(tables);
        self.table_starts.clone_from(table_starts);
        self.wanted.clone_from(wanted);
    }
}

impl StepInputs {
    /// Room for steps of a model whose cache groups have so many tokens per block.
    pub fn new(block_tokens: &[usize], capacity: Capacity) -> StepInputs {
        let groups = block_tokens.len();
        let mut inputs = StepInputs {
            block_tokens: block_tokens.to_vec(),
            tokens: Vec::with_capacity(capacity.tokens),
            positions: Vec::with_capacity(capacity.tokens),
            slots: vec![0; groups * capacity.tokens],
            starts: Vec::with_capacity(capacity.sequences + 1),
            before: Vec::with_capacity(capacity.sequences),
            states: Vec::with_capacity(capacity.sequences),
            kept: Vec::with_capacity(capacity.tokens),
            tables: vec![0; groups * capacity.blocks],
            table_starts: vec![0; groups * (capacity.sequences + 1)],
            wanted: Vec::with_capacity(capacity.tokens),
            capacity,
        };
        inputs.clear();
        inputs
    }

    /// Removes all sequences.
    pub fn clear(&mut self) {
        let StepInputs { tokens, positions, states, kept, wanted, starts, .. } = self;
        [tokens, positions, states, kept, wanted, starts].into_iter().for_each(Vec::clear);
        self.before.clear();
        self.starts.push(0);
    }

    /// Adds the new tokens of a sequence.
    ///
    /// # Panics
    /// When there is no room for it, a table does not reach as far as the tokens, or there is not one table for each cache group.
    pub fn push<T: AsRef<[u32]>>(&mut self, sequence: &SequenceInput<T>) {
        let SequenceInput { tokens, position, state, tables, wanted } = *sequence;
        let (from, number) = (self.tokens.len(), self.sequences());
        let to = from + tokens.len();
        assert_eq!(tables.len(), self.block_tokens.len(), "one table for each cache group");
        assert!(to <= self.capacity.tokens && number < self.capacity.sequences, "no room in {:?}", self.capacity);
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((position..position + tokens.len()).map(|p| p as u32));
        for (group, table) in tables.iter().enumerate() {
            let (table, per_block) = (table.as_ref(), self.block_tokens[group]);
            let slots = &mut self.slots[group * self.capacity.tokens..][from..to];
            for (p, slot) in (position..).zip(slots) {
                *slot = u64::from(table[p / per_block]) * per_block as u64 + (p % per_block) as u64;
            }
            let starts = &mut self.table_starts[group * (self.capacity.sequences + 1)..][number..number + 2];
            starts[1] = starts[0] + table.len() as u32;
            let room = &mut self.tables[group * self.capacity.blocks..][..self.capacity.blocks];
            room[starts[0] as usize..starts[1] as usize].copy_from_slice(table);
        }
        self.starts.push(to as u32);
        self.before.push(([0; MOST_GRAM - 1], 0));
        self.states.push(state);
        self.kept.resize(to, NOT_KEPT);
        match wanted {
            Wanted::Last if to > from => self.wanted.push(to as u32 - 1),
            Wanted::All => self.wanted.extend(from as u32..to as u32),
            Wanted::Last | Wanted::None => {}
        }
    }

    /// The states after each of the first tokens of the sequence that was added last are kept in these rows of the pool of states, besides the one after its last token
    /// in its own row. Only for a backend that can: see [`crate::Backend::keeps_states`].
    ///
    /// # Panics
    /// When there are as many rows as the sequence has tokens, or more.
    pub fn keep_states(&mut self, rows: Range<u32>) {
        let sequence = self.rows(self.sequences() - 1);
        assert!(rows.len() < sequence.len(), "the state after the last token is the sequence's own");
        for (kept, row) in self.kept[sequence].iter_mut().zip(rows) {
            *kept = row;
        }
    }

    /// The tokens before those of the sequence that was added last, of which the last few count. Where none are said, it is as if there were none.
    pub fn follow(&mut self, before: &[u32]) {
        let (last, count) = self.before.last_mut().expect("a sequence");
        *count = before.len().min(last.len());
        last.iter_mut().zip(before.iter().rev()).for_each(|(to, token)| *to = *token);
    }

    /// The token that is `i` before that of a row, of the same sequence, if it is known. The last [`MOST_GRAM`] are, with the row's own.
    pub fn token_before(&self, row: usize, i: usize) -> Option<u32> {
        let sequence = self.sequence_of(row);
        let first = self.starts[sequence] as usize;
        if i <= row - first {
            return Some(self.tokens[row - i]);
        }
        let (last, count) = &self.before[sequence];
        last[..*count].get(i - (row - first) - 1).copied()
    }

    /// By token: the row of the pool of states that keeps the state after it, or [`NOT_KEPT`]. `None` where no state is kept.
    pub fn kept(&self) -> Option<&[u32]> {
        self.kept.iter().any(|row| *row != NOT_KEPT).then_some(&self.kept[..])
    }

    /// The rows of a sequence in pieces, each with the row of the pool of states that keeps the state after it, if one does.
    pub fn pieces(&self, sequence: usize) -> impl Iterator<Item = (Range<usize>, Option<usize>)> {
        let rows = self.rows(sequence);
        let mut from = rows.start;
        std::iter::from_fn(move || {
            let kept = (from..rows.end).find(|row| self.kept[*row] != NOT_KEPT);
            let to = kept.map_or(rows.end, |row| row + 1);
            let piece = (from..to, kept.map(|row| self.kept[row] as usize));
            from = to;
            (!piece.0.is_empty()).then_some(piece)
        })
    }

    /// What there is room for.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// `[tokens]`
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// `[tokens]`
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// `[tokens]`: the slots of keys and values in this cache group.
    pub fn slots(&self, group: usize) -> &[u64] {
        &self.slots[group * self.capacity.tokens..][..self.tokens.len()]
    }

    /// The number of sequences.
    pub fn sequences(&self) -> usize {
        self.states.len()
    }

    /// The rows of a sequence.
    pub fn rows(&self, sequence: usize) -> Range<usize> {
        self.starts[sequence] as usize..self.starts[sequence + 1] as usize
    }

    /// Whether no sequence has more than one row.
    pub fn has_single_rows(&self) -> bool {
        (0..self.sequences()).all(|sequence| self.rows(sequence).len() <= 1)
    }

    /// The sequence that a row belongs to.
    pub fn sequence_of(&self, row: usize) -> usize {
        self.starts.partition_point(|start| *start as usize <= row) - 1
    }

    /// The position of a sequence's first row.
    pub fn position(&self, sequence: usize) -> usize {
        self.positions[self.starts[sequence] as usize] as usize
    }

    /// Row of the pool of recurrent states.
    pub fn state(&self, sequence: usize) -> usize {
        self.states[sequence] as usize
    }

    /// A sequence's block table in a cache group.
    pub fn table(&self, group: usize, sequence: usize) -> &[u32] {
        let starts = &self.table_starts[group * (self.capacity.sequences + 1)..][sequence..sequence + 2];
        &self.tables[group * self.capacity.blocks..][starts[0] as usize..starts[1] as usize]
    }

    /// Rows whose logits are wanted, ascending.
    pub fn wanted(&self) -> &[u32] {
        &self.wanted
    }

    /// Positions that the step's tokens see at most: one more than the highest.
    pub fn reach(&self) -> usize {
        self.positions.iter().max().map_or(0, |p| *p as usize + 1)
    }
}

/// The outcome of a step.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Logits of the rows that were wanted, until the next step begins: see [`crate::Backend::read_logits`].
    pub logits: Logits,
    /// Rows that could not be computed, and why; all others are valid.
    pub failed: Vec<Failed>,
    /// The choices of routers, layer after layer, if they are recorded.
    pub routed: Vec<Routed>,
    /// How often the host waited for the device, to read or write a value.
    pub synchronisations: usize,
}

/// Names the logits of a step: `[rows, vocabulary]`, wherever they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Logits {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub vocabulary: usize,
}

/// Rows that a step could not compute because their weights could not be read.
#[derive(Clone, Debug)]
pub struct Failed {
    /// Ascending.
    pub rows: Vec<u32>,
    /// The reason.
    pub why: Arc<anyhow::Error>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_lie_one_after_the_other() {
        let mut inputs = StepInputs::new(&[16, 4], Capacity { tokens: 8, sequences: 2, blocks: 16 });
        for _ in 0..2 {
            inputs.clear();
            let tables = [vec![7, 9], vec![1, 2, 3, 4, 5]];
            inputs.push(&SequenceInput {
                tokens: &[10, 11, 12],
                position: 15,
                state: 3,
                tables: &tables,
                wanted: Wanted::Last,
            });
            let tables = [vec![0], vec![8]];
            inputs.push(&SequenceInput {
                tokens: &[20, 21],
                position: 0,
                state: 1,
                tables: &tables,
                wanted: Wanted::All,
            });
            assert_eq!((inputs.tokens(), inputs.positions()), (&[10, 11, 12, 20, 21][..], &[15, 16, 17, 0, 1][..]));
            assert_eq!(inputs.slots(0), [7 * 16 + 15, 9 * 16, 9 * 16 + 1, 0, 1]);
            assert_eq!(inputs.slots(1), [4 * 4 + 3, 5 * 4, 5 * 4 + 1, 32, 33]);
            assert_eq!((inputs.sequences(), inputs.rows(0), inputs.rows(1)), (2, 0..3, 3..5));
            assert_eq!([0, 2, 3, 4].map(|row| inputs.sequence_of(row)), [0, 0, 1, 1]);
            assert_eq!((inputs.position(0), inputs.position(1), inputs.state(0), inputs.state(1)), (15, 0, 3, 1));
            assert_eq!((inputs.table(0, 0), inputs.table(1, 1)), (&[7, 9][..], &[8][..]));
            assert_eq!((inputs.wanted(), inputs.reach()), (&[2, 3, 4][..], 18));
            inputs.follow(&[30, 31]);
            assert_eq!([0, 1, 2, 3].map(|i| inputs.token_before(4, i)), [Some(21), Some(20), Some(31), Some(30)]);
            assert_eq!(
                [inputs.token_before(4, 4), inputs.token_before(2, 2), inputs.token_before(2, 3)],
                [None, Some(10), None]
            );
            inputs.keep_states(7..8);
            assert_eq!(Vec::from_iter(inputs.pieces(0)), [(0..3, None)]);
            assert_eq!(Vec::from_iter(inputs.pieces(1)), [(3..4, Some(7)), (4..5, None)]);
        }
    }
}
