//! Orders of columns of the matrices that are loaded, and activations in these orders.

use std::collections::HashMap;

use anyhow::Result;
use sluice_backend::{Linear, MatrixId, MemoryClass, Tensor};

use super::Weights;

/// Orders of columns. Matrices with the same input mostly have the same: it is on the device once.
#[derive(Default)]
pub(super) struct ColumnOrders {
    of_matrices: HashMap<MatrixId, Tensor>,
    /// `[1, cols]` each.
    known: HashMap<Vec<u32>, Tensor>,
    /// Activations in another order, by their columns: `[max_tokens, cols]`.
    gathered: HashMap<usize, Tensor>,
    normed: HashMap<usize, Tensor>,
    gates_and_ups: HashMap<usize, [Tensor; 2]>,
}

impl Weights<'_> {
    /// Remembers the order of a matrix's columns.
    pub(super) fn keep_order(&mut self, matrix: MatrixId, order: Vec<u32>) -> Result<()> {
        let known = match self.orders.known.get(&order) {
            Some(known) => *known,
            None => {
                // Numbers below 2^24.
                let numbers: Vec<f32> = order.iter().map(|column| *column as f32).collect();
                let to = self.backend().alloc(MemoryClass::WeightsCopied, 1, numbers.len())?;
                self.backend().upload(&numbers, to);
                self.orders.known.insert(order, to);
                to
            }
        };
        self.orders.of_matrices.insert(matrix, known);
        Ok(())
    }

    /// The order in which a matrix takes its input, `[1, cols]`, if it is not the input's own.
    pub(crate) fn order_of(&self, linear: &Linear) -> Option<Tensor> {
        self.orders.of_matrices.get(&linear.matrix).copied()
    }

    /// Where inputs of `cols` columns are gathered: `[max_tokens, cols]`, the same for all that do so one after the other.
    pub(crate) fn gathered(&mut self, cols: usize) -> Result<Tensor> {
        if let Some(known) = self.orders.gathered.get(&cols) {
            return Ok(*known);
        }
        let new = self.scratch(cols)?;
        Ok(*self.orders.gathered.entry(cols).or_insert(new))
    }

    /// Where inputs of `cols` columns are normed before they are gathered: `[max_tokens, cols]`.
    pub(crate) fn normed(&mut self, cols: usize) -> Result<Tensor> {
        if let Some(known) = self.orders.normed.get(&cols) {
            return Ok(*known);
        }
        let new = self.scratch(cols)?;
        Ok(*self.orders.normed.entry(cols).or_insert(new))
    }

    /// Gate and up of dense layers that no fused operation computes: `[max_tokens, cols]` each.
    pub(crate) fn gate_and_up(&mut self, cols: usize) -> Result<[Tensor; 2]> {
        if let Some(known) = self.orders.gates_and_ups.get(&cols) {
            return Ok(*known);
        }
        let new = [self.scratch(cols)?, self.scratch(cols)?];
        Ok(*self.orders.gates_and_ups.entry(cols).or_insert(new))
    }
}
