//! GatedDeltaNet, a linear attention with a recurrent state (Yang, Kautz, Hatamizadeh 2024), as Qwen3-Next and Qwen3.5 have it.

use anyhow::Result;
use sluice_backend::{DeltaLayer, DeltaShape, Linear, Operations, Projection, Tensor};

use super::ordered::{Inputs, Output};
use crate::description::{DeltaDescription, ProjectionLayout};
use crate::weights::Weights;

/// Activations shared by all recurrent layers of a model: `[max_tokens, ..]` each.
#[derive(Clone, Copy)]
pub struct DeltaScratch {
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    /// Before the output projection: `[max_tokens, values]`.
    mixed: Tensor,
}

impl DeltaScratch {
    /// For layers like this one.
    pub fn alloc(w: &mut Weights, d: &DeltaDescription) -> Result<DeltaScratch> {
        Ok(DeltaScratch {
            qkv: w.scratch(d.shape.channels())?,
            z: w.scratch(d.values())?,
            b: w.scratch(d.shape.value_heads)?,
            a: w.scratch(d.shape.value_heads)?,
            mixed: w.scratch(d.values())?,
        })
    }
}

/// One GatedDeltaNet layer.
pub struct DeltaNet {
    inputs: Inputs,
    inner: DeltaLayer,
    out: Output,
}

impl DeltaNet {
    /// Layer `at` of the model, which is recurrent layer number `layer`.
    pub fn load(
        w: &mut Weights,
        d: &DeltaDescription,
        s: &DeltaScratch,
        (at, input_norm): (usize, bool),
        layer: usize,
    ) -> Result<DeltaNet> {
        let shape = DeltaShape { tiled: w.layout().has_tiled_value_heads(), ..d.shape };
        let keys = shape.key_heads * shape.key_dim;
        let mut projection =
            |part: &str, out| -> Result<Projection> { Ok(Projection { linear: w.ordered_linear(at, part)?, out }) };
        let inputs = match d.layout {
            ProjectionLayout::Separate => vec![
                projection("linear_attn.in_proj_qkv", s.qkv)?,
                projection("linear_attn.in_proj_z", s.z)?,
                projection("linear_attn.in_proj_b", s.b)?,
                projection("linear_attn.in_proj_a", s.a)?,
            ],
            ProjectionLayout::PairsByKeyHead => {
                let mut all =
                    vec![projection("linear_attn.in_proj_qkv", s.qkv)?, projection("linear_attn.in_proj_z", s.z)?];
                let ba = w.ordered_linear(at, "linear_attn.in_proj_ba")?;
                let ratio = shape.value_heads / shape.key_heads;
                for run in 0..2 * shape.key_heads {
                    let (head, to) = (run / 2, if run % 2 == 0 { s.b } else { s.a });
                    let linear = Linear { rows: run * ratio..(run + 1) * ratio, ..ba.clone() };
                    all.push(Projection { linear, out: to.columns(head * ratio..(head + 1) * ratio) });
                }
                all
            }
            ProjectionLayout::ByKeyHead => {
                let qkvz = w.ordered_linear(at, "linear_attn.in_proj_qkvz")?;
                let ba = w.ordered_linear(at, "linear_attn.in_proj_ba")?;
                // Each run of rows writes to its place in the separate layout, so that nothing is reordered later.
                let ratio = shape.value_heads / shape.key_heads;
                let mut all = Vec::new();
                let mut run = |linear: &Linear, from: &mut usize, len: usize, out: Tensor, column: usize| {
                    let linear = Linear { rows: *from..*from + len, ..linear.clone() };
                    all.push(Projection { linear, out: out.columns(column..column + len) });
                    *from += len;
                };
                let (mut from, mut from_ba) = (0, 0);
                for h in 0..shape.key_heads {
                    let v = ratio * shape.value_dim;
                    run(&qkvz, &mut from, shape.key_dim, s.qkv, h * shape.key_dim);
                    run(&qkvz, &mut from, shape.key_dim, s.qkv, keys + h * shape.key_dim);
                    run(&qkvz, &mut from, v, s.qkv, 2 * keys + h * v);
                    run(&qkvz, &mut from, v, s.z, h * v);
                    run(&ba, &mut from_ba, ratio, s.b, h * ratio);
                    run(&ba, &mut from_ba, ratio, s.a, h * ratio);
                }
                all
            }
        };
        let norm = if input_norm { Some(w.norm(at, "input_layernorm")?) } else { None };
        let inputs = Inputs::new(w, norm, inputs)?;
        let inner = DeltaLayer {
            shape,
            qkv: s.qkv,
            z: s.z,
            b: s.b,
            a: s.a,
            out: s.mixed,
            conv: w.convolution(at, "linear_attn.conv1d")?,
            decay: w.decay(at, "linear_attn.A_log")?,
            dt_bias: w.vector(at, "linear_attn.dt_bias")?,
            norm: w.norm(at, "linear_attn.norm")?,
            sigmoid_gate: d.sigmoid_gate,
            layer,
        };
        let out = w.ordered_linear(at, "linear_attn.out_proj")?;
        Ok(DeltaNet { inputs, inner, out: Output::new(w, out, None)? })
    }

    /// `out += delta_net(norm(x))`
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor, out: Tensor) {
        // 1. q, k, v, output gate z, write strength b, decay a
        self.inputs.forward(backend, x);
        // 2. convolution, gates, recurrence, gated norm
        backend.delta_net(&self.inner);
        // 3. back to the residual stream
        self.out.add(backend, self.inner.out.first_rows(x.rows), out);
    }
}
