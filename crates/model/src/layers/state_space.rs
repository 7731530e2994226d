//! Mamba-2, a recurrent token mixer (Dao and Gu 2024), as Nemotron-H and Granite 4 have it.

use anyhow::Result;
use sluice_backend::{Linear, Norm, Operations, Projection, StateSpaceLayer, Tensor};

use crate::description::StateSpaceDescription;
use crate::weights::{Weights, rows_of};

/// Activations shared by all such layers of a model: `[max_tokens, ..]` each.
#[derive(Clone, Copy)]
pub struct StateSpaceScratch {
    z: Tensor,
    xbc: Tensor,
    dt: Tensor,
    /// Before the output projection: `[max_tokens, inner]`.
    mixed: Tensor,
}

impl StateSpaceScratch {
    /// For layers like this one.
    pub fn alloc(w: &mut Weights, d: &StateSpaceDescription) -> Result<StateSpaceScratch> {
        Ok(StateSpaceScratch {
            z: w.scratch(d.shape.inner())?,
            xbc: w.scratch(d.shape.channels())?,
            dt: w.scratch(d.shape.heads)?,
            mixed: w.scratch(d.shape.inner())?,
        })
    }
}

/// One Mamba-2 layer.
pub struct StateSpace {
    norm: Norm,
    inputs: [Projection; 3],
    inner: StateSpaceLayer,
    out: Linear,
}

impl StateSpace {
    /// Layer `at` of the model, which is recurrent layer number `layer`.
    pub fn load(
        w: &mut Weights,
        d: &StateSpaceDescription,
        s: &StateSpaceScratch,
        at: usize,
        layer: usize,
    ) -> Result<StateSpace> {
        let all = w.linear(at, "mamba.in_proj")?;
        let mut from = 0;
        let inputs = [s.z, s.xbc, s.dt].map(|out| {
            from += out.cols;
            Projection { linear: rows_of(&all, from - out.cols..from), out }
        });
        let inner = StateSpaceLayer {
            shape: d.shape,
            xbc: s.xbc,
            z: s.z,
            dt: s.dt,
            out: s.mixed,
            conv: w.convolution(at, "mamba.conv1d")?,
            conv_bias: if d.conv_biased { Some(w.bias(at, "mamba.conv1d")?) } else { None },
            decay: w.decay(at, "mamba.A_log")?,
            dt_bias: w.vector(at, "mamba.dt_bias")?,
            skip: w.vector(at, "mamba.D")?,
            norm: Norm { eps: d.norm_eps as f32, ..w.norm(at, "mamba.norm")? },
            layer,
        };
        Ok(StateSpace { norm: w.norm(at, "input_layernorm")?, inputs, inner, out: w.linear(at, "mamba.out_proj")? })
    }

    /// `out += mamba(norm(x))`
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor, out: Tensor) {
        // 1. output gate z, what is convolved, time steps
        backend.project(x, Some(self.norm), &self.inputs);
        // 2. convolution, time steps, recurrence, gated norm
        backend.state_space(&self.inner);
        // 3. back to the residual stream
        backend.project_add(self.inner.out.first_rows(x.rows), &self.out, out);
    }
}
