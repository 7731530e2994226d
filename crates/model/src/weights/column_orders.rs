//! Orders of columns of the matrices that are loaded, and where activations in these orders go.

use std::collections::HashMap;

use anyhow::Result;
use sluice_backend::{Backend, Linear, MatrixId, MemoryClass, Tensor};

/// Orders of columns. Matrices with the same input mostly have the same: it is on the device once.
#[derive(Default)]
pub(super) struct ColumnOrders {
    of_matrices: HashMap<MatrixId, Tensor>,
    /// `[1, cols]` each.
    known: HashMap<Vec<u32>, Tensor>,
    /// Activations, by what they are for and their columns: `[max_tokens, cols]`. All that need some use them one after the other.
    scratch: HashMap<(Purpose, usize), Tensor>,
}

/// What activations are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Purpose {
    Gathered,
    /// Normed, and not gathered yet.
    Normed,
    /// Of a dense layer that no fused operation computes.
    Gate,
    Up,
}

impl ColumnOrders {
    /// Remembers the order of a matrix's columns.
    ///
    /// # Errors
    /// Without memory for it.
    pub fn keep(&mut self, backend: &mut dyn Backend, matrix: MatrixId, order: Vec<u32>) -> Result<()> {
        let known = match self.known.get(&order) {
            Some(known) => *known,
            None => {
                // Numbers below 2^24.
                let numbers: Vec<f32> = order.iter().map(|column| *column as f32).collect();
                let to = backend.alloc(MemoryClass::WeightsCopied, 1, numbers.len())?;
                backend.upload(&numbers, to);
                self.known.insert(order, to);
                to
            }
        };
        self.of_matrices.insert(matrix, known);
        Ok(())
    }

    /// The order in which a matrix takes its input, `[1, cols]`, if it is not the input's own.
    pub fn of(&self, linear: &Linear) -> Option<Tensor> {
        self.of_matrices.get(&linear.matrix).copied()
    }

    /// Activations for a purpose: `[max_tokens, cols]`.
    ///
    /// # Errors
    /// Without memory for them.
    pub fn scratch(
        &mut self,
        backend: &mut dyn Backend,
        purpose: Purpose,
        (max_tokens, cols): (usize, usize),
    ) -> Result<Tensor> {
        if let Some(known) = self.scratch.get(&(purpose, cols)) {
            return Ok(*known);
        }
        let new = backend.alloc(MemoryClass::Scratch, max_tokens, cols)?;
        Ok(*self.scratch.entry((purpose, cols)).or_insert(new))
    }
}
