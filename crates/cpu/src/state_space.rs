//! Mamba-2 on the CPU. Rounds of tasks: convolution by channels, time steps by tokens, recurrence by heads, gated norm by tokens.

use sluice_kernels::{norm, state_space};

use crate::convolution::{Window, convolve};
use crate::exec::ExecContext;
use crate::memory::{Place, part};
use crate::recurrence::{HeadPiece, HeadStates};
use sluice_backend::{StateSpaceLayer, StepInputs, Tensor};

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
        let from = layer.layer * shape.state_len();
        let matrices = HeadStates { states, from, heads, rows, cols: head_dim };
        let pool = context.pool;

        // 1. convolution over each sequence's tokens, by blocks of channels
        let window = Window { states, from: from + matrices.elements(), taps: shape.taps, channels };
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
        // 3. recurrence
        matrices.update(pool, inputs, out, |HeadPiece { head, tokens, cols }, state, out| {
            let (at, group) = (head * head_dim, shape.group(head) * rows);
            let of = |from: usize, len: usize| xbc.part(tokens.clone(), from..from + len);
            // SAFETY: read by all tasks, written in rounds before this one alone.
            unsafe {
                let inputs = state_space::HeadInputs {
                    x: of(at + cols.start, cols.len()).as_rows(),
                    b: of(inner + group, rows).as_rows(),
                    c: of(inner + shape.groups * rows + group, rows).as_rows(),
                    step: steps.part(tokens.clone(), head..head + 1).as_rows(),
                    g: g.part(tokens.clone(), head..head + 1).as_rows(),
                    skip: skip.get(0, head..head + 1)[0],
                };
                state_space::recurrence(isa, state, &inputs, out);
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
