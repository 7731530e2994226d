//! Several residual streams on the CPU: products of all of a token's streams, then rounds over tokens.

use std::time::Instant;

use sluice_backend::{Norm, Phase, StreamLayer, Tensor};
use sluice_kernels::format::{ActivationFormat, Activations};
use sluice_kernels::streams;

use crate::cpu::Cpu;
use crate::encoded::Needs;
use crate::exec::{ExecContext, context};
use crate::matmul;

impl Cpu {
    /// A block's weights and its input. Logits are always computed from f32.
    pub(crate) fn collapse_streams(&mut self, layer: &StreamLayer) {
        let t0 = Instant::now();
        let (tokens, isa, n) = (self.inputs.tokens().len(), self.isa, layer.count());
        let [from, weights, bias, out] =
            [layer.streams, layer.weights, layer.bias, layer.out].map(|tensor| self.place(tensor));
        self.extend_identity_rows(tokens);
        // 1. logits
        let mut context = context!(self);
        context.wait_for([&layer.mix]);
        let rows = from.part(0..tokens, 0..from.cols);
        matmul::encode(
            context.reborrow(),
            rows,
            Some(&layer.norm),
            Needs::of([ActivationFormat::F32]),
            &mut self.encoded,
        );
        let product = context.product(&layer.mix, weights, false);
        let context = ExecContext { mode: Activations::F32, ..context };
        matmul::run_products(context, &mut [product], &self.encoded, &self.identity_rows[..tokens]);
        // 2. weights and input of each token
        // SAFETY: weights are written once, at load.
        let bias = unsafe { bias.get(0, 0..bias.cols) };
        self.each_row(tokens, &|t, _| {
            // SAFETY: a task alone uses its rows, and streams are only read now.
            unsafe {
                let own = weights.get_mut(t, 0..weights.cols);
                streams::mixing(n, own, bias, layer.scales, layer.eps, layer.rounds);
                streams::collapse(isa, from.get(t, 0..from.cols), &own[..n], out.get_mut(t, 0..out.cols));
            }
        });
        self.record(Phase::Project, t0, std::iter::once((layer.mix.matrix.number(), layer.mix.rows.len())), tokens);
    }

    /// The end of a block: what it puts out, and what streams exchange.
    pub(crate) fn expand_streams(&mut self, x: Tensor, weights: Tensor, streams: Tensor) {
        let t0 = Instant::now();
        let (tokens, isa, n) = (self.inputs.tokens().len(), self.isa, streams.cols / x.cols);
        let [x, weights, to] = [x, weights, streams].map(|tensor| self.place(tensor));
        self.each_row(tokens, &|t, _| {
            // SAFETY: a task alone uses its rows.
            unsafe {
                let weights = weights.get(t, n..weights.cols);
                streams::expand(isa, x.get(t, 0..x.cols), weights, to.get_mut(t, 0..to.cols));
            }
        });
        self.record(Phase::Project, t0, std::iter::empty(), 0);
    }

    /// The beginning of a block between streams with gates.
    pub(crate) fn gated_mean_of_streams(&mut self, gates: Tensor, streams: Tensor, out: Tensor) {
        let (tokens, isa) = (self.inputs.tokens().len(), self.isa);
        let [gates, from, out] = [gates, streams, out].map(|tensor| self.place(tensor));
        self.each_row(tokens, &|t, _| {
            // SAFETY: a task alone uses its rows.
            unsafe {
                let (gates, from) = (gates.get(t, 0..gates.cols), from.get(t, 0..from.cols));
                streams::gated_mean(isa, gates, from, out.get_mut(t, 0..out.cols));
            }
        });
    }

    /// The end of such a block.
    pub(crate) fn inject_into_streams(&mut self, x: Tensor, logits: Tensor, streams: Tensor) {
        let (tokens, isa) = (self.inputs.tokens().len(), self.isa);
        let [x, logits, to] = [x, logits, streams].map(|tensor| self.place(tensor));
        self.each_row(tokens, &|t, _| {
            // SAFETY: a task alone uses its rows.
            unsafe {
                let (x, logits) = (x.get(t, 0..x.cols), logits.get(t, 0..logits.cols));
                streams::inject(isa, x, logits, to.get_mut(t, 0..to.cols));
            }
        });
    }

    /// The beginning of a block that attends to streams.
    pub(crate) fn attend_streams(&mut self, streams: Tensor, norm: Norm, out: Tensor) {
        let (tokens, isa) = (self.inputs.tokens().len(), self.isa);
        let [from, weights, out] = [streams, norm.weight, out].map(|tensor| self.place(tensor));
        // SAFETY: weights are written once, at load.
        let weights = unsafe { weights.get(0, 0..weights.cols) };
        self.each_row(tokens, &|t, _| {
            // SAFETY: a task alone uses its rows.
            unsafe { streams::attend(isa, from.get(t, 0..from.cols), weights, norm.eps, out.get_mut(t, 0..out.cols)) }
        });
    }

    /// The mean of all streams.
    pub(crate) fn mean_of_streams(&mut self, streams: Tensor, out: Tensor) {
        let t0 = Instant::now();
        let (tokens, isa) = (self.inputs.tokens().len(), self.isa);
        let [from, out] = [streams, out].map(|tensor| self.place(tensor));
        self.each_row(tokens, &|t, _| {
            // SAFETY: a task alone uses its rows.
            unsafe { streams::mean(isa, from.get(t, 0..from.cols), out.get_mut(t, 0..out.cols)) }
        });
        self.record(Phase::Project, t0, std::iter::empty(), 0);
    }
}
