//! The recurrences of all recurrent layers on the CPU: by sequences, heads and blocks of a head's columns. A layer differs in its kernel alone.

use std::ops::Range;

use sluice_backend::StepInputs;
use sluice_kernels::rows::RowsMut;

use crate::memory::Place;
use crate::threads::Pool;

/// Columns of a state that one task updates for all tokens.
const COLUMNS: usize = 64;

/// The states of a layer's heads: `heads` matrices of `[rows, cols]` in each row of the pool of states, from element `from` on.
#[derive(Clone, Copy)]
pub struct HeadStates {
    pub states: Place,
    pub from: usize,
    pub heads: usize,
    pub rows: usize,
    pub cols: usize,
}

/// What one call of a kernel covers.
pub struct HeadPiece {
    pub head: usize,
    /// Tokens: rows of the step.
    pub tokens: Range<usize>,
    /// Columns of the head.
    pub cols: Range<usize>,
}

impl HeadStates {
    /// Elements of all of them.
    pub fn elements(&self) -> usize {
        self.heads * self.rows * self.cols
    }

    /// `recur(piece, state, out)` updates a state's columns and writes the same columns of `out`, `[tokens, heads * cols]`, for the piece's tokens. Pieces of a sequence
    /// come in order. After a piece, the state goes where the step keeps it.
    pub fn update(
        self,
        pool: &mut Pool,
        inputs: &StepInputs,
        out: Place,
        recur: impl Fn(HeadPiece, &mut RowsMut, &mut RowsMut) + Sync,
    ) {
        let HeadStates { states, from, heads, rows, cols: width } = self;
        let blocks = width.div_ceil(COLUMNS);
        pool.run(inputs.sequences() * heads * blocks, &|task, _| {
            let s = task / (heads * blocks);
            let (head, block) = (task / blocks % heads, task % blocks);
            let cols = block * COLUMNS..((block + 1) * COLUMNS).min(width);
            let state_of =
                |row: usize| states.fold(row, from + head * rows * width, rows, width).part(0..rows, cols.clone());
            let state = state_of(inputs.state(s));
            for (tokens, kept) in inputs.pieces(s) {
                let out = out.part(tokens.clone(), head * width + cols.start..head * width + cols.end);
                // SAFETY: this task alone uses these columns of this head's state and output, and of the rows that keep its states.
                unsafe {
                    recur(
                        HeadPiece { head, tokens, cols: cols.clone() },
                        &mut state.as_rows_mut(),
                        &mut out.as_rows_mut(),
                    );
                    kept.into_iter().for_each(|row| state_of(row).stream_from(state));
                }
            }
        });
    }
}
