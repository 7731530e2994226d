//! Mamba-2 on the CPU. Rounds of tasks: convolution by channels, time steps by tokens, recurrence by heads, gated norm by tokens.

use sluice_kernels::{norm, state_space};

use crate::convolution::{Window, convolve};
use crate::exec::ExecContext;
use crate::memory::Place;
use crate::memory::part;
use sluice_backend::{StateSpaceLayer, StepInputs, Tensor};

/// Columns of a state that one task updates for all tokens.
const COLUMNS: usize = 64;
/// Tokens whose time steps or outputs one task takes.
const TOKENS: usize = 4;

/// Buffers between the rounds of a step. Allocated once and kept.
#[derive(Default)]
pub struct StateSpaceWork {
    /// After the convolution: `[tokens, channels]`.
    xbc: Vec<f32>,
    /// Time steps and log decays: `[tokens, heads]` each.
    steps: Vec<f32>,
    g: Vec<f32>,
}

impl StateSpaceWork {
    pub fn bytes(&self) -> usize {
        4 * (self.xbc.len() + self.steps.len() + self.g.len())
    }

    /// Runs a layer for the tokens of `inputs`, whose states are rows of `states`.
    pub fn run(&mut self, context: ExecContext, inputs: &StepInputs, states: Tensor, layer: &StateSpaceLayer) {
        let (shape, isa) = (layer.shape, context.isa);
        let (tokens, channels, inner) = (inputs.tokens().len(), shape.channels(), shape.inner());
        let (heads, head_dim, rows) = (shape.heads, shape.head_dim, shape.state);
        let [input, z, dt, out] = [layer.xbc, layer.z, layer.dt, layer.out].map(|t| context.place(t));
        let [weight, decay, dt_bias] = [layer.conv, layer.decay, layer.dt_bias].map(|t| context.place(t));
        let (skip, states) = (context.place(layer.skip), context.place(states));
        let bias = layer.conv_bias.map(|t| context.place(t));
        let (norm_weight, eps) = context.norm(&layer.norm);
        let StateSpaceWork { xbc, steps, g } = self;
        let xbc = Place::of_slice(part(xbc, tokens * channels), channels);
        let steps = Place::of_slice(part(steps, tokens * heads), heads);
        let g = Place::of_slice(part(g, tokens * heads), heads);
        let state_from = layer.layer * shape.state_len();
        let matrix = rows * head_dim;
        let sequences = inputs.sequences();
        let pool = context.pool;

        // 1. convolution over each sequence's tokens, by blocks of channels
        let window = Window { states, from: state_from + heads * matrix, taps: shape.taps, channels };
        convolve(isa, pool, inputs, window, (input, weight, bias), xbc);
        // 2. time steps and decays
        pool.run(tokens.div_ceil(TOKENS), &|task, _| {
            for t in task * TOKENS..((task + 1) * TOKENS).min(tokens) {
                // SAFETY: this task alone uses this token's rows.
                unsafe {
                    let (dt, dt_bias, decay) = (dt.get(t, 0..heads), dt_bias.get(0, 0..heads), decay.get(0, 0..heads));
                    let (steps, g) = (steps.get_mut(t, 0..heads), g.get_mut(t, 0..heads));
                    state_space::steps(isa, dt, dt_bias, decay, steps, g);
                }
            }
        });
        // 3. recurrence, by heads and blocks of their columns
        let blocks = head_dim.div_ceil(COLUMNS);
        pool.run(sequences * heads * blocks, &|task, _| {
            let s = task / (heads * blocks);
            let (head, block) = (task / blocks % heads, task % blocks);
            let cols = block * COLUMNS..((block + 1) * COLUMNS).min(head_dim);
            let state_of = |row: usize| {
                let all = states.fold(row, state_from + head * matrix, rows, head_dim);
                all.part(0..rows, cols.clone())
            };
            let (state, at) = (state_of(inputs.state(s)), head * head_dim);
            let group = shape.group(head) * rows;
            for (run, kept) in inputs.pieces(s) {
                let of = |from: usize, len: usize| xbc.part(run.clone(), from..from + len);
                let out = out.part(run.clone(), at + cols.start..at + cols.end);
                // SAFETY: this task alone uses these columns of this head's state and output, and of the rows that keep its states; the rest is only read.
                unsafe {
                    let all = state_space::HeadInputs {
                        x: of(at + cols.start, cols.len()).as_rows(),
                        b: of(inner + group, rows).as_rows(),
                        c: of(inner + shape.groups * rows + group, rows).as_rows(),
                        step: steps.part(run.clone(), head..head + 1).as_rows(),
                        g: g.part(run.clone(), head..head + 1).as_rows(),
                        skip: skip.get(0, head..head + 1)[0],
                    };
                    state_space::recurrence(isa, &mut state.as_rows_mut(), &all, &mut out.as_rows_mut());
                    kept.into_iter().for_each(|row| state_of(row).copy_from(state));
                }
            }
        });
        // 4. gate, and the norm of each group
        let width = inner / shape.groups;
        pool.run(tokens.div_ceil(TOKENS), &|task, _| {
            for t in task * TOKENS..((task + 1) * TOKENS).min(tokens) {
                for from in (0..inner).step_by(width) {
                    let cols = from..from + width;
                    // SAFETY: this task alone uses this token's rows.
                    let (out, z) = unsafe { (out.get_mut(t, cols.clone()), z.get(t, cols.clone())) };
                    norm::rms_norm_of_gated_in_place(isa, out, z, &norm_weight[cols], eps);
                }
            }
        });
    }
}
