//! Inputs of experts whose columns are in the order of activations: each expert has an order of its own.

use anyhow::Result;
use sluice_backend::Tensor;

use crate::device::memory::Scratch;
use crate::device::sys::Address;
use crate::kernels::Kernel;
use crate::moe::layer::MoeLayer;
use crate::ops::activations::{EncodeInput, EncodedActivations, encode};
use crate::ops::context::Context;
use crate::parameters::{self as p, number};

/// Threads of a block, and the columns that a thread takes where there are many.
const THREADS: u32 = 256;
const COLUMNS: usize = 4;

/// The inputs of all pairs.
#[derive(Default)]
pub struct GatheredInputs {
    /// `[pairs, hidden]` f32
    floats: Scratch,
    encoded: EncodedActivations,
}

impl GatheredInputs {
    /// The encoded input of each pair of a token and an expert, `[pairs, hidden]`. `order`: `[experts, hidden]`; `chosen`: `[pairs]` u32, the experts, of which each row of `x`
    /// has `k`.
    pub fn gather(
        &mut self,
        context: &Context,
        layer: &MoeLayer,
        order: Tensor,
        (chosen, k): (Address, usize),
        x: &EncodedActivations,
    ) -> Result<&EncodedActivations> {
        let (gpu, cols, pairs) = (&context.gpu, x.cols, x.rows * k);
        assert_eq!((order.rows, order.cols), (layer.moe.experts.count, cols), "an order for each expert");
        let out = p::Tensor::dense(self.floats.reserve(gpu, 4 * pairs * cols)?, cols);
        let parameters = p::Gather {
            x: p::Tensor::dense(x.floats(), cols),
            order: context.place(order),
            out,
            experts: chosen,
            pairs: number(pairs),
            cols: number(cols),
            per_token: number(k),
            unused: 0,
        };
        let grid = [number(pairs), number(cols.div_ceil(COLUMNS * THREADS as usize)), 1];
        // SAFETY: mixtures have their input as f32, too; the scratch was just reserved; orders name columns, and experts are those that the router chose.
        unsafe { gpu.launch(Kernel::MOE_GATHER, grid, THREADS, 0, &parameters)? };
        let input = EncodeInput { x: out, rows: pairs, cols, ..EncodeInput::default() };
        encode(gpu, input, layer.input_needs(), &mut self.encoded)?;
        Ok(&self.encoded)
    }

    pub fn bytes(&self) -> usize {
        self.floats.bytes() + self.encoded.bytes()
    }
}
