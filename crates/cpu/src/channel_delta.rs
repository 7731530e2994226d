//! Kimi Delta Attention on the CPU. Rounds of tasks: convolution by channels, norms, gates and decays by tokens, recurrence by heads, output norm by tokens.

use sluice_kernels::{delta, elementwise, math, norm};

use crate::convolution::{Window, convolve};
use crate::exec::ExecContext;
use crate::memory::{Place, part};
use crate::recurrence::{HeadPiece, HeadStates};
use sluice_backend::{ChannelDeltaLayer, StepInputs, Tensor};

/// Epsilon of the L2 norm of q and k.
const L2_EPS: f32 = 1e-6;
/// Tokens that one task norms.
const TOKENS: usize = 4;

/// Buffers between the rounds of a step. Allocated once and kept.
#[derive(Default)]
pub struct ChannelDeltaWork {
    /// After the convolution: `[tokens, channels]`.
    qkv: Vec<f32>,
    /// `[tokens, heads * key_dim]`
    decays: Vec<f32>,
    /// Write strength: `[tokens, heads]`.
    beta: Vec<f32>,
}

impl ChannelDeltaWork {
    pub fn bytes(&self) -> usize {
        4 * (self.qkv.len() + self.decays.len() + self.beta.len())
    }

    /// Runs a layer for the tokens of `inputs`, whose states are rows of `states`.
    pub fn run(&mut self, context: ExecContext, inputs: &StepInputs, states: Tensor, layer: &ChannelDeltaLayer) {
        let (shape, isa) = (layer.shape, context.isa);
        let (tokens, channels) = (inputs.tokens().len(), shape.channels());
        let (heads, key_dim, value_dim) = (shape.value_heads, shape.key_dim, shape.value_dim);
        let keys = heads * key_dim;
        let [input, z, b, f, out] = [layer.qkv, layer.z, layer.b, layer.f, layer.out].map(|t| context.place(t));
        let [weight, rates, dt_bias, states] =
            [layer.conv, layer.rates, layer.dt_bias, states].map(|t| context.place(t));
        let (norm_weight, eps) = context.norm(&layer.norm);
        let ChannelDeltaWork { qkv, decays, beta } = self;
        let qkv = Place::of_slice(part(qkv, tokens * channels), channels);
        let decays = Place::of_slice(part(decays, tokens * keys), keys);
        let beta = Place::of_slice(part(beta, tokens * heads), heads);
        let from = layer.layer * shape.state_len();
        let matrices = HeadStates { states, from, heads, rows: key_dim, cols: value_dim };
        let pool = context.pool;

        // 1. convolution over each sequence's tokens, by blocks of channels
        let window = Window { states, from: from + matrices.elements(), taps: shape.taps, channels };
        convolve(isa, pool, inputs, window, (input, weight, None), qkv);
        // 2. norms of q and k, gates and decays
        let scale = (1.0 / (key_dim as f64).sqrt()) as f32;
        pool.run(tokens.div_ceil(TOKENS), &|task, _| {
            for t in task * TOKENS..((task + 1) * TOKENS).min(tokens) {
                // SAFETY: this task alone uses this token's rows.
                unsafe {
                    for (i, head) in qkv.get_mut(t, 0..2 * keys).chunks_exact_mut(key_dim).enumerate() {
                        norm::l2_norm(isa, head, L2_EPS, if i < heads { scale } else { 1.0 });
                    }
                    for (beta, b) in beta.get_mut(t, 0..heads).iter_mut().zip(b.get(t, 0..heads)) {
                        *beta = math::sigmoid1(*b);
                    }
                    for (head, rate) in rates.get(0, 0..heads).iter().enumerate() {
                        let cols = head * key_dim..(head + 1) * key_dim;
                        let (f, bias) = (f.get(t, cols.clone()), dt_bias.get(0, cols.clone()));
                        delta::channel_decays(isa, f, bias, *rate, layer.bound, decays.get_mut(t, cols));
                    }
                }
            }
        });
        // 3. recurrence
        matrices.update(pool, inputs, out, |HeadPiece { head, tokens, cols }, state, out| {
            let (own, at) = (head * key_dim..(head + 1) * key_dim, 2 * keys + head * value_dim);
            let key = |from: usize| qkv.part(tokens.clone(), from + own.start..from + own.end);
            // SAFETY: read by all tasks, written in rounds before this one alone.
            unsafe {
                let inputs = delta::ChannelInputs {
                    q: key(0).as_rows(),
                    k: key(keys).as_rows(),
                    v: qkv.part(tokens.clone(), at + cols.start..at + cols.end).as_rows(),
                    decays: decays.part(tokens.clone(), own.clone()).as_rows(),
                    beta: beta.part(tokens.clone(), head..head + 1).as_rows(),
                };
                delta::channel_recurrence(isa, state, &inputs, out);
            }
        });
        // 4. norm of each head, gated by z
        pool.run(tokens.div_ceil(TOKENS), &|task, _| {
            for t in task * TOKENS..((task + 1) * TOKENS).min(tokens) {
                for head in 0..heads {
                    let cols = head * value_dim..(head + 1) * value_dim;
                    // SAFETY: this task alone uses this token's rows.
                    let (out, z) = unsafe { (out.get_mut(t, cols.clone()), z.get(t, cols)) };
                    norm::rms_norm_in_place(isa, out, Some(norm_weight), eps);
                    elementwise::sigmoid_mul(isa, z, out);
                }
            }
        });
    }
}
