//! Dense feed-forward layers.

use anyhow::Result;
use sluice_backend::{Mlp, Norm, Tensor};

use crate::device::memory::Scratch;
use crate::ops::activations::{EncodeInput, EncodedActivations, encode};
use crate::ops::context::Context;
use crate::ops::gemv_fused::gemv_fused;
use crate::ops::matmul::{encode_and_matmul, gated_matmul};
use crate::ops::product::MatmulInput;
use crate::parameters as p;

/// Scratch of a dense feed-forward layer.
#[derive(Default)]
pub struct MlpScratch {
    /// `[tokens, intermediate]` f32 each
    gates: Scratch,
    ups: Scratch,
    hidden: EncodedActivations,
}

impl MlpScratch {
    pub fn bytes(&self) -> usize {
        self.gates.bytes() + self.ups.bytes() + self.hidden.bytes()
    }

    /// `residual += down(silu(gate(norm(x))) * up(norm(x)))`; `encoded` is scratch for the encoding of `norm(x)`.
    pub fn run(
        &mut self,
        context: &Context,
        x: Tensor,
        norm: &Norm,
        mlp: &Mlp,
        residual: Tensor,
        encoded: &mut EncodedActivations,
    ) -> Result<()> {
        let (gpu, mode) = (&context.gpu, context.mode);
        let Mlp { gate, up, down } = mlp;
        let intermediate = gate.rows.len();
        let [gates, ups] = [&mut self.gates, &mut self.ups].map(|s| s.reserve(gpu, 4 * x.rows * intermediate));
        let [gates, ups] = [gates?, ups?].map(|at| p::Tensor::dense(at, intermediate));
        let both = [(gate, gates), (up, ups)].map(|(l, out)| context.product(l, x.rows, out, false, mode));
        let last = context.product(down, x.rows, context.place(residual), true, mode);
        let (place, norm) = (context.place(x), context.norm(norm));
        if gemv_fused(gpu, MatmulInput::Floats { x: place, norm, rows: x.rows }, &both, true)? {
            return encode_and_matmul(gpu, gates, p::Norm::default(), &[last], &mut self.hidden);
        }
        let input = EncodeInput { x: place, norm, rows: x.rows, cols: x.cols, ..EncodeInput::default() };
        encode(gpu, input, context.needs(gate, mode).and(context.needs(up, mode)), encoded)?;
        gated_matmul(gpu, &both, &[last], encoded, &mut self.hidden)
    }
}
