//! Work on each element or head between the fused operations.

use std::time::Instant;

use sluice_backend::{Elementwise, Phase};
use sluice_kernels::{elementwise, norm};

use crate::cpu::Cpu;

/// Rows that one task takes.
const ROWS: usize = 8;

impl Cpu {
    /// Calls `each` for every token of the step, in parallel, with a row of its thread's scratch.
    pub(crate) fn each_row(&mut self, tokens: usize, each: &(dyn Fn(usize, &mut Vec<f32>) + Sync)) {
        let workers = &self.workers;
        self.pool.run(tokens.div_ceil(ROWS), &|task, thread| {
            // SAFETY: one borrow, by the task that runs as this thread.
            let row = unsafe { &mut workers.get(thread).row };
            (task * ROWS..((task + 1) * ROWS).min(tokens)).for_each(|t| each(t, row));
        });
    }

    /// Runs the operation for the step's tokens.
    pub(crate) fn run_elementwise(&mut self, operation: &Elementwise) {
        let t0 = Instant::now();
        let (tokens, isa) = (self.inputs.tokens().len(), self.isa);
        match *operation {
            Elementwise::Scale { x, by } => {
                let x = self.place(x);
                // SAFETY: a task alone uses its rows.
                self.each_row(tokens, &|t, _| unsafe { elementwise::scale(isa, by, x.get_mut(t, 0..x.cols)) });
                self.record(Phase::Embed, t0, std::iter::empty(), 0);
            }
            Elementwise::GeGlu { gate, up } => {
                let (gate, up) = (self.place(gate), self.place(up));
                self.each_row(tokens, &|t, _| {
                    // SAFETY: a task alone uses its rows.
                    unsafe { elementwise::geglu_in_place(isa, gate.get_mut(t, 0..gate.cols), up.get(t, 0..up.cols)) }
                });
                self.record(Phase::Mlp, t0, std::iter::empty(), 0);
            }
            Elementwise::SwiGlu { gate, up } => {
                let (gate, up) = (self.place(gate), self.place(up));
                self.each_row(tokens, &|t, _| {
                    // SAFETY: a task alone uses its rows.
                    unsafe { elementwise::swiglu_in_place(isa, gate.get_mut(t, 0..gate.cols), up.get(t, 0..up.cols)) }
                });
                self.record(Phase::Mlp, t0, std::iter::empty(), 0);
            }
            Elementwise::ClampedSwiGlu { gate, up, limit } => {
                let (gate, up) = (self.place(gate), self.place(up));
                self.each_row(tokens, &|t, _| {
                    // SAFETY: a task alone uses its rows.
                    let (gate, up) = unsafe { (gate.get_mut(t, 0..gate.cols), up.get(t, 0..up.cols)) };
                    elementwise::clamped_swiglu_in_place(isa, (1.0, limit, 0.0), gate, up);
                });
                self.record(Phase::Mlp, t0, std::iter::empty(), 0);
            }
            Elementwise::SiTu { gate, up, beta, linear } => {
                let (gate, up) = (self.place(gate), self.place(up));
                self.each_row(tokens, &|t, _| {
                    // SAFETY: a task alone uses its rows.
                    let (gate, up) = unsafe { (gate.get_mut(t, 0..gate.cols), up.get(t, 0..up.cols)) };
                    elementwise::situ_in_place(isa, (beta, linear), gate, up);
                });
                self.record(Phase::Mlp, t0, std::iter::empty(), 0);
            }
            Elementwise::SigmoidGate { x, gate } => {
                let (x, gate) = (self.place(x), self.place(gate));
                self.each_row(tokens, &|t, _| {
                    // SAFETY: a task alone uses its rows.
                    unsafe { elementwise::sigmoid_mul(isa, gate.get(t, 0..gate.cols), x.get_mut(t, 0..x.cols)) }
                });
                self.record(Phase::Attention, t0, std::iter::empty(), 0);
            }
            Elementwise::AttendStreams { streams, norm, out } => {
                self.attend_streams(streams, norm, out);
                self.record(Phase::Project, t0, std::iter::empty(), 0);
            }
            Elementwise::Expand { x, weights, streams } => self.expand_streams(x, weights, streams),
            Elementwise::Mean { streams, out } => self.mean_of_streams(streams, out),
            Elementwise::NormGroups { x, norm, group, out } => {
                let (from, to, weight) = (self.place(x), self.place(out), self.place(norm.weight));
                // SAFETY: weights are written once, at load.
                let weight = unsafe { weight.get(0, 0..weight.cols) };
                let is_in_place = (x.buffer, x.offset) == (out.buffer, out.offset);
                self.each_row(tokens, &|t, _| {
                    for (first, weight) in weight.chunks_exact(group).enumerate() {
                        let run = first * group..(first + 1) * group;
                        // SAFETY: a task alone uses its rows; `from` is borrowed only where it is not `to`.
                        unsafe {
                            let out = to.get_mut(t, run.clone());
                            match is_in_place {
                                true => norm::rms_norm_in_place(isa, out, Some(weight), norm.eps),
                                false => norm::rms_norm(isa, from.get(t, run), weight, norm.eps, out),
                            }
                        }
                    }
                });
                self.record(Phase::Project, t0, std::iter::empty(), 0);
            }
            Elementwise::DividedSilu { x, by } => {
                let x = self.place(x);
                // SAFETY: a task alone uses its rows.
                self.each_row(tokens, &|t, _| elementwise::divided_silu(isa, by, unsafe { x.get_mut(t, 0..x.cols) }));
                self.record(Phase::Project, t0, std::iter::empty(), 0);
            }
            Elementwise::GatedMean { gates, streams, out } => {
                self.gated_mean_of_streams(gates, streams, out);
                self.record(Phase::Project, t0, std::iter::empty(), 0);
            }
            Elementwise::Inject { x, logits, streams } => {
                self.inject_into_streams(x, logits, streams);
                self.record(Phase::Project, t0, std::iter::empty(), 0);
            }
            Elementwise::SquaredRelu { x } => {
                let x = self.place(x);
                // SAFETY: a task alone uses its rows.
                self.each_row(tokens, &|t, _| elementwise::squared_relu(isa, unsafe { x.get_mut(t, 0..x.cols) }));
                self.record(Phase::Mlp, t0, std::iter::empty(), 0);
            }
            Elementwise::Zero { out } => {
                let out = self.place(out);
                // SAFETY: a task alone uses its rows.
                self.each_row(tokens, &|t, _| unsafe { out.get_mut(t, 0..out.cols) }.fill(0.0));
                self.record(Phase::Mlp, t0, std::iter::empty(), 0);
            }
            Elementwise::Norm { x, norm, out } => {
                let (from, to, weight) = (self.place(x), self.place(out), self.place(norm.weight));
                // SAFETY: weights are written once, at load.
                let weight = unsafe { weight.get(0, 0..weight.cols) };
                let is_in_place = (x.buffer, x.offset) == (out.buffer, out.offset);
                self.each_row(tokens, &|t, _| {
                    for run in (0..from.cols).step_by(weight.len()) {
                        let run = run..run + weight.len();
                        // SAFETY: a task alone uses its rows; `from` is borrowed only where it is not `to`.
                        unsafe {
                            let out = to.get_mut(t, run.clone());
                            match is_in_place {
                                true => norm::rms_norm_in_place(isa, out, Some(weight), norm.eps),
                                false => norm::rms_norm(isa, from.get(t, run), weight, norm.eps, out),
                            }
                        }
                    }
                });
                self.record(Phase::Attention, t0, std::iter::empty(), 0);
            }
            Elementwise::ScaleRows { x, factors } => {
                let (x, table) = (self.place(x), self.place(factors.table));
                // SAFETY: weights are written once, at load.
                let table = unsafe { table.get(0, 0..table.cols) };
                let positions: &[u32] = self.inputs.positions();
                let by = |t: usize| table[(positions[t] as usize / factors.period).min(table.len() - 1)];
                self.pool.run(tokens.div_ceil(ROWS), &|task, _| {
                    for t in task * ROWS..((task + 1) * ROWS).min(tokens) {
                        // SAFETY: a task alone uses its rows.
                        elementwise::scale(isa, by(t), unsafe { x.get_mut(t, 0..x.cols) });
                    }
                });
                self.record(Phase::Attention, t0, std::iter::empty(), 0);
            }
            Elementwise::AddNormed { x, norm, residual } => {
                let (x, residual) = (self.place(x), self.place(residual));
                let weight = self.place(norm.weight);
                // SAFETY: weights are written once, at load.
                let weight = unsafe { weight.get(0, 0..weight.cols) };
                self.each_row(tokens, &|t, _| {
                    // SAFETY: a task alone uses its rows.
                    let (x, residual) = unsafe { (x.get_mut(t, 0..x.cols), residual.get_mut(t, 0..residual.cols)) };
                    let runs = x.chunks_exact_mut(weight.len());
                    runs.for_each(|run| norm::rms_norm_in_place(isa, run, Some(weight), norm.eps));
                    elementwise::add(isa, x, residual);
                });
                self.record(Phase::Project, t0, std::iter::empty(), 0);
            }
            Elementwise::Gather { x, order, out } => {
                let (from, order, to) = (self.place(x), self.place(order), self.place(out));
                // SAFETY: weights are written once, at load.
                let order = unsafe { order.get(0, 0..order.cols) };
                self.each_row(tokens, &|t, _| {
                    // SAFETY: a task alone uses its rows.
                    let (x, out) = unsafe { (from.get(t, 0..from.cols), to.get_mut(t, 0..to.cols)) };
                    elementwise::gather(x, order, out);
                });
                self.record(Phase::Project, t0, std::iter::empty(), 0);
            }
            Elementwise::TurnPairs { x, head, rotary, back } => self.turn_pairs(x, head, (rotary, back)),
            Elementwise::SplitPairs { x, head } => self.split_pairs(x, head),
        }
    }
}
