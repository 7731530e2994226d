//! Layers of the delta rule, GatedDeltaNet and Kimi Delta Attention: five kernels, or two if no sequence has more than one token.

use anyhow::Result;
use sluice_backend::{ChannelDeltaLayer, DeltaLayer, DeltaShape};

use crate::device::memory::Scratch;
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::{Kernel, Variant};
use crate::ops::context::Context;
use crate::ops::product::MAX_GRID_Y;
use crate::ops::recurrent::{Convolution, states_of};
use crate::parameters::{self as p, number};

/// Scratch between the kernels.
#[derive(Default)]
pub struct DeltaScratch {
    /// `[tokens, channels]` f32; the others `[tokens, heads]` f32, or decays `[tokens, heads * key_dim]`
    mixed: Scratch,
    decays: Scratch,
    beta: Scratch,
}

/// Threads of a block of a state's columns.
const COLUMNS: usize = 32;

/// Threads of a block that keeps columns in registers, and the tokens that it has room for.
const REGISTER_THREADS: usize = 128;
const RECUR_TOKENS: usize = 32;
const RECUR_TOKENS_BY_CHANNEL: usize = 16;

/// Threads of a block of the kernels for one token of each sequence: four for each column, a warp for the norm of a head.
const DELTA_DECODE_THREADS: usize = 128;
/// The most taps and elements of a head's norm that these kernels keep in registers (constants of the kernels, too).
const MAX_TAPS: usize = 4;
const MAX_VALUES: usize = 128;

impl DeltaScratch {
    pub fn bytes(&self) -> usize {
        self.mixed.bytes() + self.decays.bytes() + self.beta.bytes()
    }

    fn reserve(&mut self, gpu: &Gpu, tokens: usize, shape: &DeltaShape, decays: usize) -> Result<[Address; 3]> {
        Ok([
            self.mixed.reserve(gpu, 4 * tokens * shape.channels())?,
            self.decays.reserve(gpu, 4 * tokens * decays)?,
            self.beta.reserve(gpu, 4 * tokens * shape.value_heads)?,
        ])
    }

    /// One layer's mixer, from its projections to `out`.
    pub fn run(&mut self, context: &Context, layer: &DeltaLayer) -> Result<()> {
        self.run_with(context, layer, (false, None))
    }

    /// The same with a decay for each channel of a head's keys.
    pub fn run_by_channel(&mut self, context: &Context, layer: &ChannelDeltaLayer) -> Result<()> {
        let ChannelDeltaLayer { shape, qkv, z, b, f, out, conv, rates, dt_bias, bound, norm, layer } = layer.clone();
        assert!(shape.key_heads == shape.value_heads && !shape.tiled, "{shape:?}");
        let layer =
            DeltaLayer { shape, qkv, z, b, a: f, out, conv, decay: rates, dt_bias, norm, sigmoid_gate: true, layer };
        self.run_with(context, &layer, (true, bound))
    }

    fn run_with(
        &mut self,
        context: &Context,
        layer: &DeltaLayer,
        (by_channel, bound): (bool, Option<f32>),
    ) -> Result<()> {
        let gpu = &context.gpu;
        let (shape, tokens, count) = (layer.shape, context.inputs.tokens().len(), context.inputs.sequences());
        let (channels, heads, values) = (shape.channels(), shape.value_heads, shape.value_heads * shape.value_dim);
        let of_decays = if by_channel { heads * shape.key_dim } else { heads };
        assert!(shape.taps > 0 && heads.is_multiple_of(shape.key_heads), "{shape:?}");
        for (t, width) in
            [(layer.qkv, channels), (layer.z, values), (layer.b, heads), (layer.a, of_decays), (layer.out, values)]
        {
            assert!(t.rows >= tokens && t.cols == width, "{tokens} tokens of {width} in {t:?}");
        }
        assert!((layer.conv.rows, layer.conv.cols) == (shape.taps, channels), "taps in {:?}", layer.conv);
        assert!(layer.dt_bias.cols == of_decays, "{:?} for {of_decays} decays", layer.dt_bias);
        let states = states_of(context, layer.layer, shape.state_len());
        let decode = decode_kernel(context, &shape, by_channel);
        // The kernels for one token of each sequence need no scratch.
        let [mixed, decays, beta] = match decode {
            Some(_) => [0; 3],
            None => self.reserve(gpu, tokens, &shape, of_decays)?,
        };
        // These kernels copy heads of q and k sixteen bytes at a time.
        let in_registers = match (shape.key_dim, by_channel, context.inputs.kept().is_some()) {
            (64, false, false) => Some(Kernel::DELTA_RECUR_64),
            (128, false, false) => Some(Kernel::DELTA_RECUR_128),
            (64, false, true) => Some(Kernel::DELTA_RECUR_KEEP_64),
            (128, false, true) => Some(Kernel::DELTA_RECUR_KEEP_128),
            (64, true, false) => Some(Kernel::DELTA_RECUR_CHANNELS_64),
            (128, true, false) => Some(Kernel::DELTA_RECUR_CHANNELS_128),
            (64, true, true) => Some(Kernel::DELTA_RECUR_CHANNELS_KEEP_64),
            (128, true, true) => Some(Kernel::DELTA_RECUR_CHANNELS_KEEP_128),
            _ => None,
        };
        let in_registers = in_registers.filter(|_| values.is_multiple_of(4));
        let parameters = p::Delta {
            qkv: context.place(layer.qkv),
            z: context.place(layer.z),
            b: context.place(layer.b),
            a: context.place(layer.a),
            out: context.place(layer.out),
            conv: context.place(layer.conv),
            states: context.place(states),
            decay: context.place(layer.decay).at,
            dt_bias: context.place(layer.dt_bias).at,
            norm: context.norm(&layer.norm),
            mixed,
            decays,
            beta,
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
            by_channel: if bound.is_some() { 2 } else { by_channel.into() },
            bound: bound.unwrap_or(0.0),
            sigmoid_gate: layer.sigmoid_gate.into(),
            unused: 0,
        };
        // f32 of a token: q and k in four parts each, v, decay and beta; with decays of channels four parts more, and as many ones; or only q and k.
        let part = shape.key_dim / 4 + 4;
        let (recur, threads, floats) = match in_registers {
            Some(kernel) if by_channel => {
                (kernel, REGISTER_THREADS, RECUR_TOKENS_BY_CHANNEL * (12 * part + COLUMNS + 4) + 4 * part)
            }
            Some(kernel) => (kernel, REGISTER_THREADS, RECUR_TOKENS * (8 * part + COLUMNS + 4)),
            None => (Kernel::DELTA_RECUR, COLUMNS, 2 * shape.key_dim),
        };
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
        let windows = states.columns(values * shape.key_dim..shape.state_len());
        let convolution = Convolution { x: context.place(layer.qkv), weights: layer.conv, bias: None, windows };
        // SAFETY: tensors and states were checked; the scratch was just reserved.
        unsafe {
            convolution.run(context, mixed)?;
            gpu.launch(Kernel::DELTA_GATES, by_tokens, 256, 0, &parameters)?;
            gpu.launch(recur, columns, threads as u32, number(4 * floats), &parameters)?;
            gpu.launch(Kernel::DELTA_NORM, by_tokens, 256, 0, &parameters)?;
        }
        Ok(())
    }
}

/// The kernel for steps with one token of each sequence, if it can take this step.
fn decode_kernel(context: &Context, shape: &DeltaShape, by_channel: bool) -> Option<Kernel> {
    let count = context.inputs.sequences();
    let single = context.inputs.has_single_rows();
    let fits = shape.taps <= MAX_TAPS && shape.value_dim <= MAX_VALUES && count <= MAX_GRID_Y;
    let kernel = match (shape.key_dim, by_channel) {
        (64, false) => Kernel::DELTA_DECODE_64,
        (128, false) => Kernel::DELTA_DECODE_128,
        (64, true) => Kernel::DELTA_DECODE_CHANNELS_64,
        (128, true) => Kernel::DELTA_DECODE_CHANNELS_128,
        _ => return None,
    };
    (context.gpu.device.has(Variant::Last) && single && fits).then_some(kernel)
}
