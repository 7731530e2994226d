//! Embeddings of n-grams on the CPU: rows of a table, and what of them goes into residual streams.

use sluice_backend::{NgramLayer, NgramTable, StepInputs, Tensor};
use sluice_kernels::{affine, elementwise, ngrams};

use crate::convolution::{Window, convolve};
use crate::exec::ExecContext;
use crate::memory::{Place, part};
use crate::tables::numbers_of;

/// Tokens that one task takes.
const TOKENS: usize = 4;

/// Buffers between the rounds of a step. Allocated once and kept.
#[derive(Default)]
pub struct NgramWork {
    /// Rows of the tokens' n-grams: `[tokens, heads]`.
    numbers: Vec<u32>,
    /// What gates let through, the same normed, and that convolved: `[tokens, streams * hidden]` each.
    gated: Vec<f32>,
    normed: Vec<f32>,
    convolved: Vec<f32>,
}

impl NgramWork {
    pub fn bytes(&self) -> usize {
        4 * (self.gated.len() + self.normed.len() + self.convolved.len())
    }

    /// The rows of each token's n-grams, of a table in memory.
    pub fn embed(&mut self, context: ExecContext, inputs: &StepInputs, table: &NgramTable, out: Place) {
        let (isa, weights, heads, cols) = (context.isa, context.weights, table.hash.heads(), table.cols);
        numbers_of(&table.hash, inputs, &mut self.numbers);
        let numbers = &self.numbers;
        numbers.iter().for_each(|number| weights[table.find(*number).0.number()].wait());
        context.pool.run(inputs.tokens().len(), &|t, _| {
            for (head, number) in numbers[t * heads..(t + 1) * heads].iter().enumerate() {
                let (part, row) = table.find(*number);
                let matrix = weights[part.number()].matrix(0);
                // SAFETY: this task alone writes this token's row.
                let out = unsafe { out.get_mut(t, head * cols..(head + 1) * cols) };
                affine::dequantize_row(isa, &matrix, row, out);
            }
        });
    }

    /// Adds what gates let through, and its convolution, to the streams.
    pub fn run(&mut self, context: ExecContext, inputs: &StepInputs, states: Tensor, layer: &NgramLayer) {
        let (tokens, isa, hidden, all) = (inputs.tokens().len(), context.isa, layer.value.cols, layer.streams.cols);
        let [keys, queries, value, streams, conv, states] =
            [layer.keys, layer.queries, layer.value, layer.streams, layer.conv, states].map(|t| context.place(t));
        let (norm, eps) = context.norm(&layer.norm);
        let factors = ((1.0 / (hidden as f64).sqrt()) as f32, eps);
        let [gated, normed, convolved] = [&mut self.gated, &mut self.normed, &mut self.convolved]
            .map(|buffer| Place::of_slice(part(buffer, tokens * all), all));
        let (pool, tasks) = (context.pool, tokens.div_ceil(TOKENS));
        let of_task = |task: usize| task * TOKENS..((task + 1) * TOKENS).min(tokens);
        // 1. what each stream takes
        pool.run(tasks, &|task, _| {
            for t in of_task(task) {
                for first in (0..all).step_by(hidden) {
                    let run = first..first + hidden;
                    // SAFETY: this task alone uses this token's rows; what it reads is only read now.
                    unsafe {
                        let (key, query) = (keys.get(t, run.clone()), queries.get(t, run.clone()));
                        let (value, norm) = (value.get(t, 0..hidden), &norm[run.clone()]);
                        let (gated, normed) = (gated.get_mut(t, run.clone()), normed.get_mut(t, run));
                        ngrams::gate(isa, key, query, value, norm, factors, gated, normed);
                    }
                }
            }
        });
        // 2. the convolution over each sequence's tokens
        let window = Window { states, from: layer.state_at, taps: layer.conv.rows, channels: all };
        convolve(isa, pool, inputs, window, (normed, conv, None), convolved);
        // 3. both to the streams
        pool.run(tasks, &|task, _| {
            for t in of_task(task) {
                // SAFETY: this task alone uses this token's rows.
                unsafe {
                    let gated = gated.get_mut(t, 0..all);
                    elementwise::add(isa, convolved.get(t, 0..all), gated);
                    elementwise::add(isa, gated, streams.get_mut(t, 0..all));
                }
            }
        });
    }
}
