//! Several residual streams: what a block takes of them, and what becomes of them behind it.

use anyhow::Result;
use sluice_backend::{Activations, MOST_ATTENDED, MOST_STREAMS, Norm, StreamLayer, Tensor};

use crate::kernels::Kernel;
use crate::ops::activations::{EncodeInput, EncodedActivations, encode};
use crate::ops::context::Context;
use crate::ops::matmul::matmul;
use crate::parameters::{self as p, number};
use crate::weights::Needs;

/// Threads of a block of elements.
const THREADS: u32 = 256;

/// The streams of the step's tokens, and what a block takes or has put out.
fn parameters(context: &Context, streams: Tensor, x: Tensor) -> p::Streams {
    parameters_of(context, streams, x, MOST_STREAMS)
}

/// The same of at most so many streams.
fn parameters_of(context: &Context, streams: Tensor, x: Tensor, most: usize) -> p::Streams {
    let (rows, count) = (context.inputs.tokens().len(), streams.cols / x.cols);
    assert!(streams.rows >= rows && x.rows >= rows, "{rows} tokens in {streams:?} and {x:?}");
    assert!(streams.cols == count * x.cols && (1..=most).contains(&count), "{streams:?} of {x:?}");
    p::Streams {
        streams: context.place(streams),
        x: context.place(x),
        rows: number(rows),
        count: number(count),
        hidden: number(x.cols),
        ..p::Streams::default()
    }
}

/// Enqueues a block's weights and its input. Logits are always computed from f32.
pub fn collapse(context: &Context, layer: &StreamLayer, encoded: &mut EncodedActivations) -> Result<()> {
    let (gpu, rows, cols) = (&context.gpu, context.inputs.tokens().len(), layer.streams.cols);
    if rows == 0 {
        return Ok(());
    }
    let of = parameters(context, layer.streams, layer.out);
    // Behind the last block there is only what goes in.
    let alone = layer.weights.cols == layer.count();
    let all = if alone { layer.count() } else { (2 + layer.count()) * layer.count() };
    assert!(layer.weights.rows >= rows && [layer.weights.cols, layer.bias.cols, layer.mix.rows.len()] == [all; 3]);
    let norm = context.norm(&layer.norm);
    encode(gpu, EncodeInput { x: of.streams, norm, rows, cols, ..EncodeInput::default() }, Needs::F32, encoded)?;
    let weights = context.place(layer.weights);
    matmul(gpu, &[context.product(&layer.mix, rows, weights, false, Activations::F32)], encoded)?;
    let parameters = p::Streams {
        weights,
        bias: context.place(layer.bias).at,
        scales: layer.scales,
        eps: layer.eps,
        rounds: number(layer.rounds),
        alone: alone.into(),
        ..of
    };
    let threads = number(all.next_multiple_of(32));
    // SAFETY: the tensors were checked.
    unsafe { gpu.launch(Kernel::STREAM_WEIGHTS, [number(rows), 1, 1], threads, 0, &parameters)? };
    launch(context, Kernel::STREAM_COLLAPSE, parameters)
}

/// Enqueues what becomes of the streams behind a block.
pub fn expand(context: &Context, x: Tensor, weights: Tensor, streams: Tensor) -> Result<()> {
    let of = parameters(context, streams, x);
    assert!(weights.rows >= of.rows as usize && weights.cols == ((2 + of.count) * of.count) as usize, "{weights:?}");
    launch(context, Kernel::STREAM_EXPAND, p::Streams { weights: context.place(weights), ..of })
}

/// Enqueues what a block takes of streams with gates.
pub fn gated_mean(context: &Context, gates: Tensor, streams: Tensor, out: Tensor) -> Result<()> {
    let of = parameters(context, streams, out);
    assert!(gates.rows >= of.rows as usize && gates.cols == streams.cols, "{gates:?} of {streams:?}");
    launch(context, Kernel::STREAM_GATED_MEAN, p::Streams { weights: context.place(gates), ..of })
}

/// Enqueues what becomes of such streams behind a block.
pub fn inject(context: &Context, x: Tensor, logits: Tensor, streams: Tensor) -> Result<()> {
    let of = parameters(context, streams, x);
    assert!(logits.rows >= of.rows as usize && logits.cols == of.count as usize, "{logits:?} of {streams:?}");
    launch(context, Kernel::STREAM_INJECT, p::Streams { weights: context.place(logits), ..of })
}

/// Enqueues what a block takes of streams that are attended to.
pub fn attend(context: &Context, streams: Tensor, norm: &Norm, out: Tensor) -> Result<()> {
    let of = parameters_of(context, streams, out, MOST_ATTENDED);
    assert_eq!(norm.weight.cols, out.cols, "a weight for each element");
    if of.rows == 0 {
        return Ok(());
    }
    let (grid, eps) = ([of.rows, 1, 1], norm.eps);
    let parameters = p::Streams { weights: context.place(norm.weight), eps, ..of };
    // SAFETY: the tensors were checked.
    unsafe { context.gpu.launch(Kernel::STREAM_ATTEND, grid, THREADS, 0, &parameters)? };
    Ok(())
}

/// Enqueues the mean of the streams.
pub fn mean(context: &Context, streams: Tensor, out: Tensor) -> Result<()> {
    launch(context, Kernel::STREAM_MEAN, parameters(context, streams, out))
}

fn launch(context: &Context, kernel: Kernel, parameters: p::Streams) -> Result<()> {
    if parameters.rows == 0 {
        return Ok(());
    }
    let grid = [parameters.rows, parameters.hidden.div_ceil(THREADS), 1];
    // SAFETY: the tensors were checked.
    unsafe { context.gpu.launch(kernel, grid, THREADS, 0, &parameters)? };
    Ok(())
}
