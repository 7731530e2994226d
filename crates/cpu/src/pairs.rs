//! Elements of heads that are pairs beside each other: turned where they are, or moved apart.

use std::time::Instant;

use sluice_backend::{Phase, RotaryId, Tensor};
use sluice_kernels::{elementwise, rotary};

use crate::cpu::Cpu;
use crate::memory::part;

/// Rows that one task takes.
const ROWS: usize = 8;

impl Cpu {
    /// Turns the last elements of each head by the angles of its token, or back by them.
    pub(crate) fn turn_pairs(&mut self, x: Tensor, head: usize, (angles, back): (RotaryId, bool)) {
        let t0 = Instant::now();
        let (tokens, isa) = (self.inputs.tokens().len(), self.isa);
        let (x, angles) = (self.place(x), self.rotary[angles.number()].place());
        let positions = self.inputs.positions();
        self.pool.run(tokens.div_ceil(ROWS), &|task, _| {
            for (t, position) in positions.iter().enumerate().skip(task * ROWS).take(ROWS) {
                // SAFETY: a task alone uses its rows; angles are written before a step.
                let (x, angles) = unsafe { (x.get_mut(t, 0..x.cols), angles.get(*position as usize, 0..angles.cols)) };
                let (cos, sin) = angles.split_at(angles.len() / 2);
                x.chunks_exact_mut(head).for_each(|x| rotary::rotate_pairs(isa, x, cos, sin, back));
            }
        });
        self.record(Phase::Attention, t0, std::iter::empty(), 0);
    }

    /// In each head, elements 2i and 2i + 1 go to i and half a head later.
    pub(crate) fn split_pairs(&mut self, x: Tensor, head: usize) {
        let t0 = Instant::now();
        let tokens = self.inputs.tokens().len();
        let x = self.place(x);
        self.workers.reserve(0, head, 0, 0);
        self.each_row(tokens, &|t, row| {
            // SAFETY: a task alone uses its rows.
            unsafe { elementwise::split_pairs(x.get_mut(t, 0..x.cols), part(row, head)) }
        });
        self.record(Phase::Attention, t0, std::iter::empty(), 0);
    }
}
