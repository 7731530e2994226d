//! GatedDeltaNet, a linear attention with a recurrent state (Yang, Kautz, Hatamizadeh 2024), as Qwen3-Next and Qwen3.5 have it.

use anyhow::{Result, ensure};
use sluice_backend::{Backend, Batch, DeltaShape, DeltaStep, Linear, Norm, Projection, Tensor};

use crate::config::Config;
use crate::decoder::{Caches, Scratch};
use crate::weights::Weights;

/// How the checkpoint lays the input projections out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProjectionLayout {
    /// `in_proj_qkvz` and `in_proj_ba`, interleaved by key head: q, k, then its value heads' v and z; b and a alike (Qwen3-Next).
    ByKeyHead,
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` (Qwen3.5).
    Separate,
}

/// The sizes of a config's GatedDeltaNet layers.
pub fn shape(config: &Config) -> Result<DeltaShape> {
    let shape = DeltaShape {
        key_heads: config.size("linear_num_key_heads")?,
        value_heads: config.size("linear_num_value_heads")?,
        key_dim: config.size("linear_key_head_dim")?,
        value_dim: config.size("linear_value_head_dim")?,
        taps: config.size_or("linear_conv_kernel_dim", 4)?,
    };
    config.product("`linear_num_key_heads` and `linear_key_head_dim`", &[shape.key_heads, shape.key_dim])?;
    config.product(
        "`linear_num_value_heads`, `linear_key_head_dim` and `linear_value_head_dim`",
        &[shape.value_heads, shape.key_dim, shape.value_dim],
    )?;
    let (path, keys, values) = (config.path().display(), shape.key_heads, shape.value_heads);
    ensure!(values.is_multiple_of(keys), "{path}: {values} linear value heads cannot share {keys} key heads");
    Ok(shape)
}

/// One GatedDeltaNet layer.
pub struct DeltaNet {
    shape: DeltaShape,
    norm: Norm,
    inputs: Vec<Projection>,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    gated_norm: Norm,
    out: Linear,
    layer: usize,
}

impl DeltaNet {
    /// Layer `module` (`layers.N`) of the checkpoint, which is recurrent layer number `layer`.
    pub fn load(
        w: &mut Weights,
        scratch: &Scratch,
        module: &str,
        shape: DeltaShape,
        layout: ProjectionLayout,
        eps: f64,
        layer: usize,
    ) -> Result<DeltaNet> {
        let hidden = scratch.x.cols;
        let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim);
        let name = |part: &str| format!("{module}.linear_attn.{part}");
        let inputs = match layout {
            ProjectionLayout::Separate => vec![
                Projection {
                    linear: w.linear(&name("in_proj_qkv"), shape.channels(), hidden)?,
                    out: scratch.delta_qkv,
                },
                Projection { linear: w.linear(&name("in_proj_z"), values, hidden)?, out: scratch.delta_z },
                Projection { linear: w.linear(&name("in_proj_b"), shape.value_heads, hidden)?, out: scratch.delta_b },
                Projection { linear: w.linear(&name("in_proj_a"), shape.value_heads, hidden)?, out: scratch.delta_a },
            ],
            ProjectionLayout::ByKeyHead => {
                let qkvz = w.linear(&name("in_proj_qkvz"), shape.channels() + values, hidden)?;
                let ba = w.linear(&name("in_proj_ba"), 2 * shape.value_heads, hidden)?;
                // Each run of rows goes where the separate layout has it, so that nothing need be reordered later.
                let ratio = shape.value_heads / shape.key_heads;
                let mut all = Vec::new();
                let mut run = |linear: &Linear, from: &mut usize, len: usize, out: Tensor, at: usize| {
                    let linear = Linear { rows: *from..*from + len, ..linear.clone() };
                    all.push(Projection { linear, out: out.columns(at..at + len) });
                    *from += len;
                };
                let (mut from, mut from_ba) = (0, 0);
                for h in 0..shape.key_heads {
                    let v = ratio * shape.value_dim;
                    run(&qkvz, &mut from, shape.key_dim, scratch.delta_qkv, h * shape.key_dim);
                    run(&qkvz, &mut from, shape.key_dim, scratch.delta_qkv, keys + h * shape.key_dim);
                    run(&qkvz, &mut from, v, scratch.delta_qkv, 2 * keys + h * v);
                    run(&qkvz, &mut from, v, scratch.delta_z, h * v);
                    run(&ba, &mut from_ba, ratio, scratch.delta_b, h * ratio);
                    run(&ba, &mut from_ba, ratio, scratch.delta_a, h * ratio);
                }
                all
            }
        };
        Ok(DeltaNet {
            shape,
            norm: w.norm(&format!("{module}.input_layernorm"), hidden, eps, true)?,
            inputs,
            conv: w.convolution(&name("conv1d"), shape.channels(), shape.taps)?,
            a_log: w.vector(&name("A_log"), shape.value_heads)?,
            dt_bias: w.vector(&name("dt_bias"), shape.value_heads)?,
            gated_norm: w.norm(&name("norm"), shape.value_dim, eps, false)?,
            out: w.linear(&name("out_proj"), hidden, values)?,
            layer,
        })
    }

    /// `x += delta_net(norm(x))`
    pub fn forward(&self, backend: &mut dyn Backend, s: &Scratch, caches: &Caches, batch: &Batch) {
        let tokens = batch.tokens.len();
        let x = s.x.first_rows(tokens);
        let values = self.shape.value_heads * self.shape.value_dim;
        // 1. q, k, v, output gate z, write strength b, decay a
        backend.project(x, Some(self.norm), &self.inputs);
        // 2. convolution, gates, recurrence, gated norm
        backend.delta_net(&DeltaStep {
            shape: self.shape,
            qkv: s.delta_qkv,
            z: s.delta_z,
            b: s.delta_b,
            a: s.delta_a,
            out: s.mixed,
            conv: self.conv,
            a_log: self.a_log,
            dt_bias: self.dt_bias,
            norm: self.gated_norm,
            states: caches.states.expect("a model with recurrent layers has a pool of states"),
            layer: self.layer,
            batch,
        });
        // 3. back to the residual stream
        backend.project_add(s.mixed.columns(0..values).first_rows(tokens), &self.out, x);
    }
}
