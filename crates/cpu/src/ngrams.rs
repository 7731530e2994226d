//! Embeddings of n-grams on the CPU: rows of a table, and what of them goes into residual streams.

use std::time::Instant;

use sluice_backend::{NgramLayer, NgramTable, Phase, Tensor};
use sluice_kernels::{affine, elementwise, ngrams};

use crate::convolution::{Window, convolve};
use crate::cpu::Cpu;
use crate::memory::{Place, part};
use crate::tables::numbers_of;

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
}

impl Cpu {
    /// The rows of each token's n-grams.
    pub(crate) fn embed_rows_of_ngrams(&mut self, table: &NgramTable, out: Tensor) {
        let t0 = Instant::now();
        let (place, isa, first) = (self.place(out), self.isa, table.parts[0]);
        let (tokens, heads, cols) = (self.inputs.tokens().len(), table.hash.heads(), table.cols);
        if self.tables.has(first) {
            self.tables.embed(first, isa, &mut self.pool, place);
        } else {
            numbers_of(&table.hash, &self.inputs, &mut self.ngrams.numbers);
            let (numbers, weights) = (&self.ngrams.numbers, &self.weights);
            numbers.iter().for_each(|number| weights[table.find(*number).0.number()].wait());
            self.pool.run(tokens, &|t, _| {
                for (head, number) in numbers[t * heads..(t + 1) * heads].iter().enumerate() {
                    let (part, row) = table.find(*number);
                    let matrix = weights[part.number()].matrix(0);
                    // SAFETY: this task alone writes this token's row.
                    let out = unsafe { place.get_mut(t, head * cols..(head + 1) * cols) };
                    affine::dequantize_row(isa, &matrix, row, out);
                }
            });
        }
        self.record(Phase::Embed, t0, std::iter::once((first.number(), tokens * heads)), 0);
    }

    /// Adds what gates let through, and its convolution, to the streams.
    pub(crate) fn add_to_streams(&mut self, layer: &NgramLayer) {
        let t0 = Instant::now();
        let (tokens, isa, hidden, all) = (self.inputs.tokens().len(), self.isa, layer.value.cols, layer.streams.cols);
        let states = self.states.expect("a model with recurrent layers has a pool of states");
        let [keys, queries, value, streams, norm, conv, states] =
            [layer.keys, layer.queries, layer.value, layer.streams, layer.norm.weight, layer.conv, states]
                .map(|tensor| self.place(tensor));
        let factors = ((1.0 / (hidden as f64).sqrt()) as f32, layer.norm.eps);
        let mut work = std::mem::take(&mut self.ngrams);
        let [gated, normed, convolved] = [&mut work.gated, &mut work.normed, &mut work.convolved]
            .map(|buffer| Place::of_slice(part(buffer, tokens * all), all));
        // 1. what each stream takes
        self.each_row(tokens, &|t, _| {
            for first in (0..all).step_by(hidden) {
                let run = first..first + hidden;
                // SAFETY: a task alone uses its rows; what it reads is only read now.
                unsafe {
                    let (key, query) = (keys.get(t, run.clone()), queries.get(t, run.clone()));
                    let (value, norm) = (value.get(t, 0..hidden), norm.get(0, run.clone()));
                    let (gated, normed) = (gated.get_mut(t, run.clone()), normed.get_mut(t, run));
                    ngrams::gate(isa, key, query, value, norm, factors, gated, normed);
                }
            }
        });
        // 2. the convolution over each sequence's tokens
        let window = Window { states, from: layer.state_at, taps: layer.conv.rows, channels: all };
        convolve(isa, &mut self.pool, &self.inputs, window, (normed, conv, None), convolved);
        // 3. both to the streams
        self.each_row(tokens, &|t, _| {
            // SAFETY: a task alone uses its rows.
            unsafe {
                let gated = gated.get_mut(t, 0..all);
                elementwise::add(isa, convolved.get(t, 0..all), gated);
                elementwise::add(isa, gated, streams.get_mut(t, 0..all));
            }
        });
        self.ngrams = work;
        self.record(Phase::DeltaNet, t0, std::iter::empty(), 0);
    }
}
