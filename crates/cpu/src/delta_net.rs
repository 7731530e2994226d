//! GatedDeltaNet on the CPU. Rounds of tasks: convolution by channels, norms and gates by tokens, recurrence by heads, output norm by tokens.

use sluice_kernels::{delta, elementwise, norm};

use crate::convolution::{Window, convolve};
use crate::exec::ExecContext;
use crate::memory::{Place, part};
use crate::recurrence::{HeadPiece, HeadStates};
use sluice_backend::{DeltaLayer, StepInputs, Tensor};

/// Epsilon of the L2 norm of q and k (`l2norm` of transformers).
const L2_EPS: f32 = 1e-6;
/// Tokens that one task norms.
const TOKENS: usize = 4;

/// Buffers between the rounds of a step. Allocated once and kept.
#[derive(Default)]
pub struct DeltaWork {
    /// After the convolution: `[tokens, channels]`.
    qkv: Vec<f32>,
    /// Log decay and write strength: `[tokens, value_heads]` each.
    g: Vec<f32>,
    beta: Vec<f32>,
}

impl DeltaWork {
    pub fn bytes(&self) -> usize {
        4 * (self.qkv.len() + self.g.len() + self.beta.len())
    }
}

impl DeltaWork {
    /// Runs a layer for the tokens of `inputs`, whose states are rows of `states`.
    pub fn run(&mut self, context: ExecContext, inputs: &StepInputs, states: Tensor, step: &DeltaLayer) {
        let (shape, isa) = (step.shape, context.isa);
        let (tokens, channels) = (inputs.tokens().len(), shape.channels());
        let (keys, value_dim) = (shape.key_heads * shape.key_dim, shape.value_dim);
        let heads = shape.value_heads;
        let [input, z, b, a, out] = [step.qkv, step.z, step.b, step.a, step.out].map(|t| context.place(t));
        let [weight, decay, dt_bias, states] = [step.conv, step.decay, step.dt_bias, states].map(|t| context.place(t));
        let (norm_weight, eps) = context.norm(&step.norm);
        let DeltaWork { qkv, g, beta } = self;
        let qkv = Place::of_slice(part(qkv, tokens * channels), channels);
        let g = Place::of_slice(part(g, tokens * heads), heads);
        let beta = Place::of_slice(part(beta, tokens * heads), heads);
        let from = step.layer * shape.state_len();
        let matrices = HeadStates { states, from, heads, rows: shape.key_dim, cols: value_dim };
        let pool = context.pool;

        // 1. convolution over each sequence's tokens, by blocks of channels
        let window = Window { states, from: from + matrices.elements(), taps: shape.taps, channels };
        convolve(isa, pool, inputs, window, (input, weight, None), qkv);
        // 2. norms of q and k, gates
        let scale = (1.0 / (shape.key_dim as f64).sqrt()) as f32;
        pool.run(tokens.div_ceil(TOKENS), &|task, _| {
            for t in task * TOKENS..((task + 1) * TOKENS).min(tokens) {
                // SAFETY: this task alone uses this token's rows.
                unsafe {
                    for (i, head) in qkv.get_mut(t, 0..2 * keys).chunks_exact_mut(shape.key_dim).enumerate() {
                        norm::l2_norm(isa, head, L2_EPS, if i < shape.key_heads { scale } else { 1.0 });
                    }
                    let (a, b, decay) = (a.get(t, 0..heads), b.get(t, 0..heads), decay.get(0, 0..heads));
                    let (g, beta) = (g.get_mut(t, 0..heads), beta.get_mut(t, 0..heads));
                    delta::gates(isa, a, b, decay, dt_bias.get(0, 0..heads), g, beta);
                }
            }
        });
        // 3. recurrence
        matrices.update(pool, inputs, out, |HeadPiece { head, tokens, cols }, state, out| {
            let (own, at) = (shape.key_head(head) * shape.key_dim, 2 * keys + head * value_dim);
            let key = |from: usize| qkv.part(tokens.clone(), from + own..from + own + shape.key_dim);
            // SAFETY: read by all tasks, written in rounds before this one alone.
            unsafe {
                let inputs = delta::HeadInputs {
                    q: key(0).as_rows(),
                    k: key(keys).as_rows(),
                    v: qkv.part(tokens.clone(), at + cols.start..at + cols.end).as_rows(),
                    g: g.part(tokens.clone(), head..head + 1).as_rows(),
                    beta: beta.part(tokens.clone(), head..head + 1).as_rows(),
                };
                delta::recurrence(isa, state, &inputs, out);
            }
        });
        // 4. norm of each head, gated by z
        pool.run(tokens.div_ceil(TOKENS), &|task, _| {
            for t in task * TOKENS..((task + 1) * TOKENS).min(tokens) {
                for head in 0..heads {
                    let cols = head * value_dim..(head + 1) * value_dim;
                    // SAFETY: this task alone uses this token's rows.
                    let (out, z) = unsafe { (out.get_mut(t, cols.clone()), z.get(t, cols)) };
                    if step.sigmoid_gate {
                        norm::rms_norm_in_place(isa, out, Some(norm_weight), eps);
                        elementwise::sigmoid_mul(isa, z, out);
                    } else {
                        norm::rms_norm_gated_in_place(isa, out, norm_weight, z, eps);
                    }
                }
            }
        });
    }
}
