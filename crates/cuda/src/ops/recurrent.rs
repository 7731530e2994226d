//! What recurrent layers have in common: their part of the states, and the short convolution before them.

use anyhow::Result;
use sluice_backend::{NOT_KEPT, Tensor};

use crate::device::sys::Address;
use crate::kernels::Kernel;
use crate::ops::context::Context;
use crate::ops::product::MAX_GRID_Y;
use crate::parameters::{self as p, number};

/// Threads of a block of channels, and tokens of each of its threads.
const CHANNEL_THREADS: usize = 256;
const CONVOLVE_TOKENS: usize = 16;

/// The part of recurrent layer `layer` in each row of the pool of states, `len` elements. The rows of the step's sequences are checked.
pub fn states_of(context: &Context, layer: usize, len: usize) -> Tensor {
    let states = context.states.expect("a model with recurrent layers has a pool of states");
    let from = layer * len;
    assert!(from + len <= states.cols, "layer {layer} in states of {}", states.cols);
    let inputs = &context.inputs;
    assert!((0..inputs.sequences()).all(|s| inputs.state(s) < states.rows), "a state that is not there");
    let kept = inputs.kept().unwrap_or_default();
    assert!(kept.iter().all(|row| *row == NOT_KEPT || (*row as usize) < states.rows), "a state is kept nowhere");
    states.columns(from..from + len)
}

/// A short convolution over each sequence's tokens.
pub struct Convolution {
    /// `[tokens, channels]`, on the device.
    pub x: p::Tensor,
    /// `[taps, channels]`: the oldest tap first.
    pub weights: Tensor,
    /// `[1, channels]`
    pub bias: Option<Tensor>,
    /// Where each row of the pool of states has the last inputs: `[taps - 1, channels]`, one row.
    pub windows: Tensor,
}

impl Convolution {
    /// `out = silu(convolution)`, `[tokens, channels]` f32. Windows move on, and are kept where the step keeps states.
    ///
    /// # Errors
    /// As for any launch.
    ///
    /// # Safety
    /// There are as many elements at `x` and at `out`, and nothing else uses those meanwhile.
    pub unsafe fn run(&self, context: &Context, out: Address) -> Result<()> {
        let (inputs, gpu) = (&context.inputs, &context.gpu);
        let (tokens, count, channels, taps) =
            (inputs.tokens().len(), inputs.sequences(), self.weights.cols, self.weights.rows);
        assert!(taps > 0 && self.windows.cols == (taps - 1) * channels, "{taps} taps and {:?}", self.windows);
        assert!(self.bias.is_none_or(|b| b.cols == channels), "one bias per channel");
        let parameters = p::Convolution {
            x: self.x,
            weights: context.place(self.weights),
            windows: context.place(self.windows),
            bias: self.bias.map_or(0, |b| context.place(b).at),
            out,
            sequences: context.step.sequences,
            starts: context.step.starts,
            rows: context.step.states,
            kept: context.step.kept,
            tokens: number(tokens),
            count: number(count),
            channels: number(channels),
            taps: number(taps),
        };
        let by_channels = |n: usize| [number(channels.div_ceil(CHANNEL_THREADS)), number(n.min(MAX_GRID_Y)), 1];
        let single = inputs.kept().is_none() && inputs.has_single_rows();
        let kernels: &[(Kernel, usize)] = match single {
            true => &[(Kernel::CONVOLVE_ONE, count)],
            false => &[(Kernel::CONVOLVE, tokens.div_ceil(CONVOLVE_TOKENS)), (Kernel::CONVOLVE_SLIDE, count)],
        };
        for (kernel, rows) in kernels {
            // SAFETY: tensors were checked; for `x` and `out` the caller vouches.
            unsafe { gpu.launch(*kernel, by_channels(*rows), CHANNEL_THREADS as u32, 0, &parameters)? };
        }
        Ok(())
    }
}
