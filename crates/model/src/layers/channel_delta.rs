//! Kimi Delta Attention, a delta rule with a decay for each channel (Kimi Team 2025), as Kimi-Linear has it.

use anyhow::Result;
use sluice_backend::{ChannelDeltaLayer, Linear, Norm, Operations, Projection, Tensor};

use crate::description::ChannelDeltaDescription;
use crate::weights::Weights;

/// Activations shared by all such layers of a model: `[max_tokens, ..]` each.
#[derive(Clone, Copy)]
pub struct ChannelDeltaScratch {
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    f: Tensor,
    /// What decays and gates are projections of, one after the other.
    small: Tensor,
    /// Before the output projection: `[max_tokens, values]`.
    mixed: Tensor,
}

impl ChannelDeltaScratch {
    /// For layers like this one.
    pub fn alloc(w: &mut Weights, d: &ChannelDeltaDescription) -> Result<ChannelDeltaScratch> {
        Ok(ChannelDeltaScratch {
            qkv: w.scratch(d.shape.channels())?,
            z: w.scratch(d.values())?,
            b: w.scratch(d.shape.value_heads)?,
            f: w.scratch(d.keys())?,
            small: w.scratch(2 * d.rank())?,
            mixed: w.scratch(d.values())?,
        })
    }
}

/// One layer of Kimi Delta Attention.
pub struct ChannelDelta {
    norm: Norm,
    inputs: Vec<Projection>,
    /// What decays and gates are projections of, and the projections; gates may be among the inputs.
    up: Vec<(Tensor, Projection)>,
    inner: ChannelDeltaLayer,
    out: Linear,
}

impl ChannelDelta {
    /// Layer `at` of the model, which is recurrent layer number `layer`.
    pub fn load(
        w: &mut Weights,
        d: &ChannelDeltaDescription,
        s: &ChannelDeltaScratch,
        at: usize,
        layer: usize,
    ) -> Result<ChannelDelta> {
        let (keys, values, rank) = (d.keys(), d.values(), d.rank());
        let mut projection =
            |part: &str, out: Tensor| -> Result<Projection> { Ok(Projection { linear: w.linear(at, part)?, out }) };
        let [of_f, of_z] = [s.small.columns(0..rank), s.small.columns(rank..2 * rank)];
        let mut inputs = vec![
            projection("self_attn.q_proj", s.qkv.columns(0..keys))?,
            projection("self_attn.k_proj", s.qkv.columns(keys..2 * keys))?,
            projection("self_attn.v_proj", s.qkv.columns(2 * keys..2 * keys + values))?,
            projection("self_attn.b_proj", s.b)?,
            projection("self_attn.f_a_proj", of_f)?,
        ];
        let mut up = vec![(of_f, projection("self_attn.f_b_proj", s.f)?)];
        if d.full_gate {
            inputs.push(projection("self_attn.g_proj", s.z)?);
        } else {
            inputs.push(projection("self_attn.g_a_proj", of_z)?);
            up.push((of_z, projection("self_attn.g_b_proj", s.z)?));
        }
        let inner = ChannelDeltaLayer {
            shape: d.shape,
            qkv: s.qkv,
            z: s.z,
            b: s.b,
            f: s.f,
            out: s.mixed,
            conv: w.convolutions(at, &["self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"])?,
            rates: w.decay_of_first(at, "self_attn.A_log", Some(d.shape.key_dim))?,
            dt_bias: w.vector(at, "self_attn.dt_bias")?,
            bound: d.bound,
            norm: w.norm(at, "self_attn.o_norm")?,
            layer,
        };
        Ok(ChannelDelta {
            norm: w.norm(at, "input_layernorm")?,
            inputs,
            up,
            inner,
            out: w.linear(at, "self_attn.o_proj")?,
        })
    }

    /// `out += channel_delta(norm(x))`
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor, out: Tensor) {
        // 1. q, k, v, write strength b, decays f, output gate z
        backend.project(x, Some(self.norm), &self.inputs);
        for (from, projection) in &self.up {
            backend.project(from.first_rows(x.rows), None, std::slice::from_ref(projection));
        }
        // 2. convolution, gates, recurrence, gated norm
        backend.channel_delta(&self.inner);
        // 3. back to the residual stream
        backend.project_add(self.inner.out.first_rows(x.rows), &self.out, out);
    }
}
