//! GatedDeltaNet: five kernels, one after the other; two where no sequence has more than one token.

use anyhow::Result;
use sluice_backend::{DeltaLayer, DeltaShape};

use crate::backend::Cuda;
use crate::driver::Gpu;
use crate::kernels::Kernel;
use crate::matmul::MOST_BLOCKS;
use crate::memory::Scratch;
use crate::parameters::{self as p, number};

/// What the kernels leave for one another.
#[derive(Default)]
pub struct DeltaWork {
    mixed: Scratch,
    decays: Scratch,
    beta: Scratch,
}

impl DeltaWork {
    pub fn bytes(&self) -> usize {
        self.mixed.bytes() + self.decays.bytes() + self.beta.bytes()
    }

    fn room(&mut self, gpu: &Gpu, tokens: usize, channels: usize, heads: usize) -> Result<[u64; 3]> {
        let of_heads = 4 * tokens * heads;
        Ok([
            self.mixed.room(gpu, 4 * tokens * channels)?,
            self.decays.room(gpu, of_heads)?,
            self.beta.room(gpu, of_heads)?,
        ])
    }
}

/// Threads of a block of channels, tokens of a thread of theirs, and threads of a block of columns of a state.
const CHANNELS: usize = 256;
const CONVOLVED: usize = 16;
const COLUMNS: usize = 32;

/// Threads of a block where columns stay in registers, and how many tokens it has room for: `RECUR_TOKENS` of `kernels/delta`.
const KEPT_THREADS: usize = 128;
const KEPT_TOKENS: usize = 32;

/// Threads of a block of the kernels for a token of each sequence: four to a column, a warp to a head's norm.
const ONE_THREADS: usize = 128;
/// What these hold in registers at most: taps, `MOST_TAPS` of `kernels/delta`, and elements of a head's norm.
const MOST_TAPS: usize = 4;
const MOST_VALUES: usize = 128;

impl Cuda {
    pub(crate) fn run_delta_net(&mut self, layer: &DeltaLayer) -> Result<()> {
        let (shape, tokens, count) = (layer.shape, self.inputs.tokens().len(), self.inputs.sequences());
        let (channels, heads, values) = (shape.channels(), shape.value_heads, shape.value_heads * shape.value_dim);
        assert!(shape.taps > 0 && heads.is_multiple_of(shape.key_heads), "{shape:?}");
        for (t, width) in
            [(layer.qkv, channels), (layer.z, values), (layer.b, heads), (layer.a, heads), (layer.out, values)]
        {
            assert!(t.rows >= tokens && t.cols == width, "{tokens} tokens of {width} in {t:?}");
        }
        assert!((layer.conv.rows, layer.conv.cols) == (shape.taps, channels), "taps in {:?}", layer.conv);
        let states = self.states.expect("a model with recurrent layers has a pool of states");
        let from = layer.layer * shape.state_len();
        assert!(from + shape.state_len() <= states.cols, "layer {} in states of {}", layer.layer, states.cols);
        assert!((0..count).all(|s| self.inputs.state(s) < states.rows), "a state that is not there");
        let states = self.place(states.columns(from..from + shape.state_len()));
        let one = self.recur_one(&shape);
        // What the kernels for a token of each sequence compute stays in their blocks.
        let [mixed, decays, beta] = match one {
            Some(_) => [0; 3],
            None => self.delta.room(&self.gpu, tokens, channels, heads)?,
        };
        // Heads of q and k are copied sixteen bytes at a time there.
        let kept = match shape.key_dim {
            64 if values.is_multiple_of(4) => Some(Kernel::DELTA_RECUR_64),
            128 if values.is_multiple_of(4) => Some(Kernel::DELTA_RECUR_128),
            _ => None,
        };
        let parameters = p::Delta {
            qkv: self.place(layer.qkv),
            z: self.place(layer.z),
            b: self.place(layer.b),
            a: self.place(layer.a),
            out: self.place(layer.out),
            conv: self.place(layer.conv),
            states,
            a_log: self.place(layer.a_log).at,
            dt_bias: self.place(layer.dt_bias).at,
            norm: self.norm(&layer.norm),
            mixed,
            decays,
            beta,
            sequences: self.step.sequences,
            starts: self.step.starts,
            rows: self.step.states,
            tokens: number(tokens),
            count: number(count),
            key_heads: number(shape.key_heads),
            value_heads: number(heads),
            key_dim: number(shape.key_dim),
            value_dim: number(shape.value_dim),
            taps: number(shape.taps),
            scale: (1.0 / (shape.key_dim as f64).sqrt()) as f32,
            by_lanes: kept.is_some().into(),
            unused: 0,
        };
        // A token's q and k in four parts each, v, the decay and beta, in floats; or q and k as they are.
        let (recur, threads, floats) = match kept {
            Some(kernel) => (kernel, KEPT_THREADS, KEPT_TOKENS * (8 * (shape.key_dim / 4 + 4) + COLUMNS + 4)),
            None => (Kernel::DELTA_RECUR, COLUMNS, 2 * shape.key_dim),
        };
        let by_channels = |n: usize| [number(channels.div_ceil(CHANNELS)), number(n.min(MOST_BLOCKS)), 1];
        let by_tokens = [number(tokens), 1, 1];
        let columns = [number(shape.value_dim.div_ceil(COLUMNS)), number(heads), number(count.min(MOST_BLOCKS))];
        if let Some(kernel) = one {
            let blocks = heads.div_ceil(ONE_THREADS / 32) + channels.div_ceil(ONE_THREADS);
            // SAFETY: as below.
            unsafe {
                self.gpu.launch(kernel, columns, ONE_THREADS as u32, 0, &parameters)?;
                self.gpu.launch(
                    Kernel::DELTA_DECODE_NORM,
                    [number(blocks), number(count), 1],
                    ONE_THREADS as u32,
                    0,
                    &parameters,
                )?;
            }
            return Ok(());
        }
        // SAFETY: tensors and states were checked; the room was just made.
        unsafe {
            self.gpu.launch(
                Kernel::DELTA_CONVOLVE,
                by_channels(tokens.div_ceil(CONVOLVED)),
                CHANNELS as u32,
                0,
                &parameters,
            )?;
            self.gpu.launch(Kernel::DELTA_SLIDE, by_channels(count), CHANNELS as u32, 0, &parameters)?;
            self.gpu.launch(Kernel::DELTA_GATES, by_tokens, 256, 0, &parameters)?;
            self.gpu.launch(recur, columns, threads as u32, number(4 * floats), &parameters)?;
            self.gpu.launch(Kernel::DELTA_NORM, by_tokens, 256, 0, &parameters)?;
        }
        Ok(())
    }

    /// The kernel for steps with a token of each sequence, if it can be taken.
    fn recur_one(&self, shape: &DeltaShape) -> Option<Kernel> {
        let count = self.inputs.sequences();
        let single = (0..count).all(|s| self.inputs.rows(s).len() <= 1);
        let fits = shape.taps <= MOST_TAPS && shape.value_dim <= MOST_VALUES && count <= MOST_BLOCKS;
        let kernel = match shape.key_dim {
            64 => Kernel::DELTA_DECODE_64,
            128 => Kernel::DELTA_DECODE_128,
            _ => return None,
        };
        (self.gpu.device.last && single && fits).then_some(kernel)
    }
}
