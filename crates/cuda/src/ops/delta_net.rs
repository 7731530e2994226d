//! Gated DeltaNet layers: five kernels, or two if no sequence has more than one token.

use anyhow::Result;
use sluice_backend::{DeltaLayer, DeltaShape, NOT_KEPT};

use crate::device::memory::Scratch;
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::{Kernel, Variant};
use crate::ops::context::Context;
use crate::ops::product::MAX_GRID_Y;
use crate::parameters::{self as p, number};

/// Scratch between the kernels.
#[derive(Default)]
pub struct DeltaScratch {
    /// `[tokens, channels]` f32; the others `[tokens, heads]` f32
    mixed: Scratch,
    decays: Scratch,
    beta: Scratch,
}

/// Threads of a block of channels, tokens of each of its threads, and threads of a block of a state's columns.
const CHANNEL_THREADS: usize = 256;
const CONVOLVE_TOKENS: usize = 16;
const COLUMNS: usize = 32;

/// Threads of a block that keeps columns in registers, and the tokens that it has room for (a constant of the kernel, too).
const REGISTER_THREADS: usize = 128;
const REGISTER_TOKENS: usize = 32;

/// Threads of a block of the kernels for one token of each sequence: four for each column, a warp for the norm of a head.
const DELTA_DECODE_THREADS: usize = 128;
/// The most taps and elements of a head's norm that these kernels keep in registers (constants of the kernels, too).
const MAX_TAPS: usize = 4;
const MAX_VALUES: usize = 128;

impl DeltaScratch {
    pub fn bytes(&self) -> usize {
        self.mixed.bytes() + self.decays.bytes() + self.beta.bytes()
    }

    fn reserve(&mut self, gpu: &Gpu, tokens: usize, channels: usize, heads: usize) -> Result<[Address; 3]> {
        let bytes_of_heads = 4 * tokens * heads;
        Ok([
            self.mixed.reserve(gpu, 4 * tokens * channels)?,
            self.decays.reserve(gpu, bytes_of_heads)?,
            self.beta.reserve(gpu, bytes_of_heads)?,
        ])
    }

    /// One layer's mixer, from its projections to `out`.
    pub fn run(&mut self, context: &Context, layer: &DeltaLayer) -> Result<()> {
        let gpu = &context.gpu;
        let (shape, tokens, count) = (layer.shape, context.inputs.tokens().len(), context.inputs.sequences());
        let (channels, heads, values) = (shape.channels(), shape.value_heads, shape.value_heads * shape.value_dim);
        assert!(shape.taps > 0 && heads.is_multiple_of(shape.key_heads), "{shape:?}");
        for (t, width) in
            [(layer.qkv, channels), (layer.z, values), (layer.b, heads), (layer.a, heads), (layer.out, values)]
        {
            assert!(t.rows >= tokens && t.cols == width, "{tokens} tokens of {width} in {t:?}");
        }
        assert!((layer.conv.rows, layer.conv.cols) == (shape.taps, channels), "taps in {:?}", layer.conv);
        let states = context.states.expect("a model with recurrent layers has a pool of states");
        let from = layer.layer * shape.state_len();
        assert!(from + shape.state_len() <= states.cols, "layer {} in states of {}", layer.layer, states.cols);
        assert!((0..count).all(|s| context.inputs.state(s) < states.rows), "a state that is not there");
        let kept = context.inputs.kept().unwrap_or_default();
        assert!(kept.iter().all(|row| *row == NOT_KEPT || (*row as usize) < states.rows), "a state is kept nowhere");
        let states = context.place(states.columns(from..from + shape.state_len()));
        let decode = decode_kernel(context, &shape);
        // The kernels for one token of each sequence need no scratch.
        let [mixed, decays, beta] = match decode {
            Some(_) => [0; 3],
            None => self.reserve(gpu, tokens, channels, heads)?,
        };
        // These kernels copy heads of q and k sixteen bytes at a time.
        let in_registers = match (shape.key_dim, context.inputs.kept()) {
            (64, None) if values.is_multiple_of(4) => Some(Kernel::DELTA_RECUR_64),
            (128, None) if values.is_multiple_of(4) => Some(Kernel::DELTA_RECUR_128),
            (64, Some(_)) if values.is_multiple_of(4) => Some(Kernel::DELTA_RECUR_KEEP_64),
            (128, Some(_)) if values.is_multiple_of(4) => Some(Kernel::DELTA_RECUR_KEEP_128),
            _ => None,
        };
        let parameters = p::Delta {
            qkv: context.place(layer.qkv),
            z: context.place(layer.z),
            b: context.place(layer.b),
            a: context.place(layer.a),
            out: context.place(layer.out),
            conv: context.place(layer.conv),
            states,
            decay: context.place(layer.decay).at,
            dt_bias: context.place(layer.dt_bias).at,
            norm: context.norm(&layer.norm),
            mixed,
            decays,
            beta,
            sequences: context.step.sequences,
            starts: context.step.starts,
            rows: context.step.states,
            kept: context.step.kept,
            tokens: number(tokens),
            count: number(count),
            key_heads: number(shape.key_heads),
            value_heads: number(heads),
            key_dim: number(shape.key_dim),
            value_dim: number(shape.value_dim),
            taps: number(shape.taps),
            scale: (1.0 / (shape.key_dim as f64).sqrt()) as f32,
            by_lanes: in_registers.is_some().into(),
            tiled: shape.tiled.into(),
        };
        // f32 of a token: q and k in four parts each, v, decay and beta; or only q and k.
        let (recur, threads, floats) = match in_registers {
            Some(kernel) => (kernel, REGISTER_THREADS, REGISTER_TOKENS * (8 * (shape.key_dim / 4 + 4) + COLUMNS + 4)),
            None => (Kernel::DELTA_RECUR, COLUMNS, 2 * shape.key_dim),
        };
        let by_channels = |n: usize| [number(channels.div_ceil(CHANNEL_THREADS)), number(n.min(MAX_GRID_Y)), 1];
        let by_tokens = [number(tokens), 1, 1];
        let columns = [number(shape.value_dim.div_ceil(COLUMNS)), number(heads), number(count.min(MAX_GRID_Y))];
        if let Some(kernel) = decode {
            let blocks = heads.div_ceil(DELTA_DECODE_THREADS / 32) + channels.div_ceil(DELTA_DECODE_THREADS);
            // SAFETY: tensors and states were checked; the scratch was just reserved.
            unsafe {
                gpu.launch(kernel, columns, DELTA_DECODE_THREADS as u32, 0, &parameters)?;
                gpu.launch(
                    Kernel::DELTA_DECODE_NORM,
                    [number(blocks), number(count), 1],
                    DELTA_DECODE_THREADS as u32,
                    0,
                    &parameters,
                )?;
            }
            return Ok(());
        }
        // SAFETY: tensors and states were checked; the scratch was just reserved.
        unsafe {
            gpu.launch(
                Kernel::DELTA_CONVOLVE,
                by_channels(tokens.div_ceil(CONVOLVE_TOKENS)),
                CHANNEL_THREADS as u32,
                0,
                &parameters,
            )?;
            gpu.launch(Kernel::DELTA_SLIDE, by_channels(count), CHANNEL_THREADS as u32, 0, &parameters)?;
            gpu.launch(Kernel::DELTA_GATES, by_tokens, 256, 0, &parameters)?;
            gpu.launch(recur, columns, threads as u32, number(4 * floats), &parameters)?;
            gpu.launch(Kernel::DELTA_NORM, by_tokens, 256, 0, &parameters)?;
        }
        Ok(())
    }
}

/// The kernel for steps with one token of each sequence, if it can take this step.
fn decode_kernel(context: &Context, shape: &DeltaShape) -> Option<Kernel> {
    let count = context.inputs.sequences();
    let single = (0..count).all(|s| context.inputs.rows(s).len() <= 1);
    let fits = shape.taps <= MAX_TAPS && shape.value_dim <= MAX_VALUES && count <= MAX_GRID_Y;
    let kernel = match shape.key_dim {
        64 => Kernel::DELTA_DECODE_64,
        128 => Kernel::DELTA_DECODE_128,
        _ => return None,
    };
    (context.gpu.device.has(Variant::Last) && single && fits).then_some(kernel)
}
