//! What becomes of gate and up of a mixture's experts where it is another thing than `silu(gate) * up`: biases, clamps, rows of gate and up that take turns (gpt-oss), GELU (Gemma 4),
//! SiTU (Kimi-K3), no gates (Nemotron-H).

use anyhow::Result;
use sluice_backend::{ExpertKind, Experts};

use crate::device::sys::Address;
use crate::kernels::Kernel;
use crate::ops::activations::{EncodeInput, EncodedActivations, encode_int11};
use crate::ops::context::Context;
use crate::parameters::{self as p, number};
use crate::weights::Needs;

/// Threads of a block.
const THREADS: u32 = 256;

/// Gates and ups of pairs of a token and an expert.
pub struct GatesAndUps {
    /// `[pairs, intermediate]`; the ups of experts without gates.
    pub gates: p::Tensor,
    /// `[pairs, intermediate]`; its address is 0 where gates and ups take turns in `gates`, `[pairs, 2 * intermediate]`, or there are no gates.
    pub ups: p::Tensor,
    /// `[pairs]` u32: the expert of each.
    pub experts: Address,
    pub pairs: usize,
}

/// The encodings in which [`activate`] leaves activations for products that take `needs`. Integers of 11 bits are made of f32.
pub fn needs_with_floats(needs: Needs) -> Needs {
    if needs.int11 { needs.and(Needs::F32) } else { needs }
}

/// `to = activation(gates + bias, ups + bias)`, in the encodings `needs`.
pub fn activate(
    context: &Context,
    of: &Experts,
    from: GatesAndUps,
    needs: Needs,
    to: &mut EncodedActivations,
) -> Result<()> {
    let (gpu, cols) = (&context.gpu, of.intermediate());
    let GatesAndUps { gates, ups, experts, pairs } = from;
    let needs = needs_with_floats(needs);
    let to = to.reserve(gpu, pairs, cols, needs)?;
    let (gate_bias, up_bias) = match &of.biases {
        Some(biases) => (context.place(biases.gate), context.place(biases.up)),
        None => Default::default(),
    };
    // Numbers of `kernels/moe/activate.cu`.
    let (activation, alpha, limit, added) = match of.kind {
        ExpertKind::SwiGlu => (0, 0.0, 0.0, 0.0),
        ExpertKind::ClampedSwiGlu { alpha, limit, added } => (1, alpha, limit, added),
        ExpertKind::GeGlu => (2, 0.0, 0.0, 0.0),
        ExpertKind::SquaredRelu => (3, 0.0, 0.0, 0.0),
        ExpertKind::SiTu { beta, linear } => (4, beta, linear, 0.0),
    };
    let parameters = p::Activate {
        gate: gates,
        up: ups,
        gate_bias,
        up_bias,
        experts,
        rows: number(pairs),
        cols: number(cols),
        activation,
        alpha,
        limit,
        added,
        to,
    };
    let grid = [number(pairs), number(cols.div_ceil(THREADS as usize)), 1];
    // SAFETY: the scratch was just reserved; biases have a row for each expert, and were checked against their buffers.
    unsafe { gpu.launch(Kernel::MOE_ACTIVATE, grid, THREADS, 0, &parameters)? };
    if needs.int11 {
        let x = p::Tensor::dense(to.f, cols);
        encode_int11(gpu, EncodeInput { x, rows: pairs, cols, ..EncodeInput::default() }, to)?;
    }
    Ok(())
}
