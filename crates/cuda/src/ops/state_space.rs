//! Mamba-2's layers: three kernels, or four if a sequence has more than one token.

use anyhow::Result;
use sluice_backend::StateSpaceLayer;

use crate::device::memory::Scratch;
use crate::kernels::Kernel;
use crate::ops::context::Context;
use crate::ops::product::MAX_GRID_Y;
use crate::ops::recurrent::{Convolution, states_of};
use crate::parameters::{self as p, number};

/// Columns of a head's state that a block takes, and threads of a block that keeps them in registers.
const COLUMNS: usize = 32;
const REGISTER_THREADS: u32 = 128;
const NORM_THREADS: u32 = 256;

/// Scratch between the kernels.
#[derive(Default)]
pub struct StateSpaceScratch {
    /// `[tokens, channels]` f32
    mixed: Scratch,
}

impl StateSpaceScratch {
    pub fn bytes(&self) -> usize {
        self.mixed.bytes()
    }

    /// One layer's mixer, from its projections to `out`.
    pub fn run(&mut self, context: &Context, layer: &StateSpaceLayer) -> Result<()> {
        let (gpu, shape) = (&context.gpu, layer.shape);
        let (tokens, count) = (context.inputs.tokens().len(), context.inputs.sequences());
        let (channels, inner) = (shape.channels(), shape.inner());
        assert!(shape.groups > 0 && shape.heads.is_multiple_of(shape.groups) && shape.state > 0, "{shape:?}");
        for (t, width) in [(layer.z, inner), (layer.dt, shape.heads), (layer.out, inner)] {
            assert!(t.rows >= tokens && t.cols == width, "{tokens} tokens of {width} in {t:?}");
        }
        assert!((layer.conv.rows, layer.conv.cols) == (shape.taps, channels), "taps in {:?}", layer.conv);
        for t in [layer.decay, layer.dt_bias, layer.skip] {
            assert!(t.cols == shape.heads, "one for each of {} heads: {t:?}", shape.heads);
        }
        assert!(layer.norm.weight.cols == inner, "a norm of {:?}", layer.norm.weight);
        let (states, matrices) = (states_of(context, layer.layer, shape.state_len()), inner * shape.state);
        let mixed = self.mixed.reserve(gpu, 4 * tokens * channels)?;
        let windows = states.columns(matrices..shape.state_len());
        let convolution =
            Convolution { x: context.place(layer.xbc), weights: layer.conv, bias: layer.conv_bias, windows };
        // SAFETY: the scratch was just reserved.
        unsafe { convolution.run(context, mixed)? };
        let parameters = p::StateSpace {
            z: context.place(layer.z),
            dt: context.place(layer.dt),
            out: context.place(layer.out),
            states: context.place(states),
            mixed,
            decay: context.place(layer.decay).at,
            dt_bias: context.place(layer.dt_bias).at,
            skip: context.place(layer.skip).at,
            norm: context.norm(&layer.norm),
            starts: context.step.starts,
            rows: context.step.states,
            kept: context.step.kept,
            tokens: number(tokens),
            count: number(count),
            heads: number(shape.heads),
            head_dim: number(shape.head_dim),
            groups: number(shape.groups),
            state: number(shape.state),
        };
        let (recur, threads, floats) = match shape.state {
            64 => (Kernel::STATE_SPACE_RECUR_64, REGISTER_THREADS, 0),
            128 => (Kernel::STATE_SPACE_RECUR_128, REGISTER_THREADS, 0),
            256 => (Kernel::STATE_SPACE_RECUR_256, REGISTER_THREADS, 0),
            state => (Kernel::STATE_SPACE_RECUR, COLUMNS as u32, 2 * state),
        };
        let columns = [number(shape.head_dim.div_ceil(COLUMNS)), number(shape.heads), number(count.min(MAX_GRID_Y))];
        let groups = [number(tokens), number(shape.groups), 1];
        // SAFETY: tensors and states were checked; the scratch was just reserved.
        unsafe {
            gpu.launch(recur, columns, threads, number(4 * floats), &parameters)?;
            gpu.launch(Kernel::STATE_SPACE_NORM, groups, NORM_THREADS, 0, &parameters)?;
        }
        Ok(())
    }
}
