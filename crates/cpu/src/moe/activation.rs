//! Between an expert's projections: rows of gate and up that take turns, biases, the activation.

use sluice_backend::{ExpertBiases, ExpertKind};
use sluice_kernels::{Isa, elementwise};

use crate::exec::ExecContext;
use crate::memory::Place;

/// What is added to the results of an expert's projections: `[1, rows]` each.
#[derive(Clone, Copy)]
pub struct Biases {
    pub gate: Place,
    pub up: Place,
    pub down: Place,
}

impl Biases {
    /// The biases of expert `expert`.
    pub fn of(context: &ExecContext, all: &ExpertBiases, expert: usize) -> Biases {
        let row = |t| {
            let place = context.place(t);
            place.part(expert..expert + 1, 0..place.cols)
        };
        Biases { gate: row(all.gate), up: row(all.up), down: row(all.down) }
    }
}

/// Elements 2i of `both` go to `gates`, elements 2i + 1 to the first half of `both`.
pub fn separate(both: &mut [f32], gates: &mut [f32]) {
    assert_eq!(both.len(), 2 * gates.len(), "a gate and an up each");
    for (i, gate) in gates.iter_mut().enumerate() {
        // Each place is read before it is written: i is at most 2i.
        (*gate, both[i]) = (both[2 * i], both[2 * i + 1]);
    }
}

/// Adds elements `from ..` of a bias to each row of `n` elements.
pub fn add_bias(isa: Isa, bias: Place, from: usize, rows: &mut [f32], n: usize) {
    // SAFETY: biases are written once, at load, and their buffers outlive the step.
    let bias = unsafe { bias.get(0, from..from + n) };
    rows.chunks_exact_mut(n).for_each(|row| elementwise::add(isa, bias, row));
}

/// `gates = activation(gates, ups)`, as `kind` says.
pub fn activate(isa: Isa, kind: ExpertKind, gates: &mut [f32], ups: &[f32]) {
    match kind {
        ExpertKind::SwiGlu => elementwise::swiglu_in_place(isa, gates, ups),
        ExpertKind::SquaredRelu => elementwise::squared_relu(isa, gates),
        ExpertKind::GeGlu => elementwise::geglu_in_place(isa, gates, ups),
        ExpertKind::SiTu { beta, linear } => elementwise::situ_in_place(isa, (beta, linear), gates, ups),
        ExpertKind::ClampedSwiGlu { alpha, limit, added } => {
            elementwise::clamped_swiglu_in_place(isa, (alpha, limit, added), gates, ups);
        }
    }
}
