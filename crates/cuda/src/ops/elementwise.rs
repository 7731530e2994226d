//! Work on each element or head between the fused operations.

use anyhow::Result;
use sluice_backend::{Elementwise, Norm, Phase, Tensor};

use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::Kernel;
use crate::ops::context::Context;
use crate::ops::streams::{attend, expand, gated_mean, inject, mean};
use crate::parameters::{self as p, number};

/// Threads of a block of elements.
const THREADS: u32 = 256;
/// Elements of a head that one block takes: a thread for each pair.
const MAX_HEAD: usize = 2048;

/// Which part of a layer an operation belongs to.
pub fn phase_of(operation: &Elementwise) -> Phase {
    match operation {
        Elementwise::Scale { .. } => Phase::Embed,
        Elementwise::GeGlu { .. }
        | Elementwise::SwiGlu { .. }
        | Elementwise::ClampedSwiGlu { .. }
        | Elementwise::SiTu { .. }
        | Elementwise::SquaredRelu { .. }
        | Elementwise::Zero { .. } => Phase::Mlp,
        Elementwise::AddNormed { .. }
        | Elementwise::Gather { .. }
        | Elementwise::Expand { .. }
        | Elementwise::AttendStreams { .. }
        | Elementwise::Mean { .. }
        | Elementwise::NormGroups { .. }
        | Elementwise::DividedSilu { .. }
        | Elementwise::GatedMean { .. }
        | Elementwise::Inject { .. } => Phase::Project,
        Elementwise::TurnPairs { .. }
        | Elementwise::SplitPairs { .. }
        | Elementwise::Norm { .. }
        | Elementwise::SigmoidGate { .. }
        | Elementwise::ScaleRows { .. } => Phase::Attention,
    }
}

/// Enqueues `x = cap * tanh(x / cap)` over `rows` dense rows of `cols` elements.
///
/// # Errors
/// As for any launch.
///
/// # Safety
/// There are as many elements at `at`, and nothing else uses them meanwhile.
pub unsafe fn soft_cap(gpu: &Gpu, at: Address, (rows, cols): (usize, usize), cap: f32) -> Result<()> {
    let x = p::Tensor::dense(at, cols);
    let parameters = p::Between { x, rows: number(rows), cols: number(cols), by: cap, ..p::Between::default() };
    let grid = [number(rows), number(cols.div_ceil(4 * THREADS as usize)), 1];
    // SAFETY: as the caller vouches.
    unsafe { gpu.launch(Kernel::BETWEEN_SOFT_CAP, grid, THREADS, 0, &parameters)? };
    Ok(())
}

/// Enqueues the operation for the step's tokens.
pub fn elementwise(context: &Context, operation: &Elementwise) -> Result<()> {
    let rows = context.inputs.tokens().len();
    if rows == 0 {
        return Ok(());
    }
    // Norms take each run of their columns by itself.
    let runs = |x: Tensor, norm: &Norm| {
        let head = norm.weight.cols;
        assert!(head > 0 && x.cols.is_multiple_of(head), "a norm over {head} of {} columns", x.cols);
        (number(head), [number(rows), number(x.cols / head), 1])
    };
    let check = |all: &[Tensor]| {
        assert!(all.iter().all(|t| t.rows >= rows && t.cols == all[0].cols), "{rows} tokens in {all:?}");
    };
    let of = |x: Tensor| p::Between {
        x: context.place(x),
        rows: number(rows),
        cols: number(x.cols),
        ..p::Between::default()
    };
    let parts = |x: Tensor| [number(rows), number(x.cols.div_ceil(4 * THREADS as usize)), 1];
    let (kernel, grid, threads, parameters) = match *operation {
        Elementwise::Scale { x, by } => {
            check(&[x]);
            (Kernel::BETWEEN_SCALE, parts(x), THREADS, p::Between { by, ..of(x) })
        }
        Elementwise::GeGlu { gate, up } => {
            check(&[gate, up]);
            (Kernel::BETWEEN_GEGLU, parts(gate), THREADS, p::Between { other: context.place(up), ..of(gate) })
        }
        Elementwise::SwiGlu { gate, up } => {
            check(&[gate, up]);
            (Kernel::BETWEEN_SWIGLU, parts(gate), THREADS, p::Between { other: context.place(up), ..of(gate) })
        }
        Elementwise::ClampedSwiGlu { gate, up, limit } => {
            check(&[gate, up]);
            let parameters = p::Between { other: context.place(up), by: limit, ..of(gate) };
            (Kernel::BETWEEN_CLAMPED_SWIGLU, parts(gate), THREADS, parameters)
        }
        Elementwise::SiTu { gate, up, beta, linear } => {
            check(&[gate, up]);
            // The kernel has the second bound where norms have their epsilon.
            let norm = p::Norm { eps: linear, ..p::Norm::default() };
            let parameters = p::Between { other: context.place(up), by: beta, norm, ..of(gate) };
            (Kernel::BETWEEN_SITU, parts(gate), THREADS, parameters)
        }
        Elementwise::SigmoidGate { x, gate } => {
            check(&[x, gate]);
            (Kernel::BETWEEN_SIGMOID_GATE, parts(x), THREADS, p::Between { other: context.place(gate), ..of(x) })
        }
        Elementwise::AttendStreams { streams, norm, out } => return attend(context, streams, &norm, out),
        Elementwise::Expand { x, weights, streams } => return expand(context, x, weights, streams),
        Elementwise::Mean { streams, out } => return mean(context, streams, out),
        Elementwise::GatedMean { gates, streams, out } => return gated_mean(context, gates, streams, out),
        Elementwise::Inject { x, logits, streams } => return inject(context, x, logits, streams),
        Elementwise::NormGroups { x, norm, group, out } => {
            check(&[x, out, Tensor { rows, ..norm.weight }]);
            assert!(group > 0 && x.cols.is_multiple_of(group), "runs of {group} in {x:?}");
            let (other, norm, head) = (context.place(out), context.norm(&norm), number(group));
            let grid = [number(rows), number(x.cols / group), 1];
            (Kernel::BETWEEN_NORM_GROUPS, grid, THREADS, p::Between { other, norm, head, ..of(x) })
        }
        Elementwise::DividedSilu { x, by } => {
            check(&[x]);
            (Kernel::BETWEEN_DIVIDED_SILU, parts(x), THREADS, p::Between { by, ..of(x) })
        }
        Elementwise::SquaredRelu { x } => {
            check(&[x]);
            (Kernel::BETWEEN_SQUARED_RELU, parts(x), THREADS, of(x))
        }
        Elementwise::Zero { out } => {
            check(&[out]);
            (Kernel::BETWEEN_ZERO, parts(out), THREADS, of(out))
        }
        Elementwise::Norm { x, norm, out } => {
            check(&[x, out]);
            let (head, grid) = runs(x, &norm);
            let (other, norm) = (context.place(out), context.norm(&norm));
            (Kernel::BETWEEN_NORM, grid, THREADS, p::Between { other, norm, head, ..of(x) })
        }
        Elementwise::ScaleRows { x, factors } => {
            check(&[x]);
            assert!(factors.period > 0 && factors.table.cols > 0, "{factors:?}");
            let (other, head) = (context.place(factors.table), number(factors.period));
            let (steps, positions) = (number(factors.table.cols), context.step.positions);
            (Kernel::BETWEEN_SCALE_ROWS, parts(x), THREADS, p::Between { other, head, steps, positions, ..of(x) })
        }
        Elementwise::AddNormed { x, norm, residual } => {
            check(&[x, residual]);
            let (head, grid) = runs(x, &norm);
            let (other, norm) = (context.place(residual), context.norm(&norm));
            (Kernel::BETWEEN_ADD_NORMED, grid, THREADS, p::Between { other, norm, head, ..of(x) })
        }
        Elementwise::Gather { x, order, out } => {
            assert!(x.rows >= rows && out.rows >= rows && order.cols == out.cols, "{rows} tokens of {x:?} in {out:?}");
            // The kernel has the numbers where norms have their weights.
            let norm = context.norm(&Norm { weight: order, eps: 0.0 });
            let parameters = p::Between { other: context.place(out), norm, cols: number(out.cols), ..of(x) };
            (Kernel::BETWEEN_GATHER, parts(out), THREADS, parameters)
        }
        Elementwise::TurnPairs { x, head, rotary, back } => {
            check(&[x]);
            let table = &context.rotary[rotary.number()];
            assert!(
                2 * table.half() <= head && x.cols.is_multiple_of(head),
                "{} pairs in {head} of {x:?}",
                table.half()
            );
            // The kernel has the angles where norms have their weights.
            let norm = p::Norm { weight: table.memory.at, ..p::Norm::default() };
            let (head, steps, by) = (number(head), number(table.half()), if back { -1.0 } else { 1.0 });
            let grid = [number(rows), number(x.cols) / head, 1];
            let positions = context.step.positions;
            (Kernel::BETWEEN_TURN_PAIRS, grid, 32, p::Between { norm, head, steps, by, positions, ..of(x) })
        }
        Elementwise::SplitPairs { x, head } => {
            check(&[x]);
            assert!(
                head.is_multiple_of(2) && head <= MAX_HEAD && x.cols.is_multiple_of(head),
                "heads of {head} in {x:?}"
            );
            let threads = number((head / 2).next_multiple_of(32));
            let grid = [number(rows), number(x.cols / head), 1];
            (Kernel::BETWEEN_SPLIT_PAIRS, grid, threads, p::Between { head: number(head), ..of(x) })
        }
    };
    // SAFETY: the tensors were checked.
    unsafe { context.gpu.launch(kernel, grid, threads, 0, &parameters)? };
    Ok(())
}
