//! Products of a few tokens in one kernel with everything before them: the norm and the encoding of their input; for gate and up also `silu(gate) * up` behind them.

use anyhow::Result;

use crate::device::stream::Gpu;
use crate::kernels::{STATIC_SHARED, Variant};
use crate::ops::activations::GROUP;
use crate::ops::gemm::takes_sets;
use crate::ops::gemv::gemv;
use crate::ops::int11;
use crate::ops::product::{MatmulInput, Product};
use crate::parameters::{self as p, number};

/// Up to this many tokens are multiplied without tensor cores, where no kernel for a few tokens takes them.
const MAX_GEMV_TOKENS: usize = 2;
/// The most elements that each block encodes for itself.
const MAX_ENCODED: usize = 24 << 10;
/// Threads of a block.
const THREADS: u32 = 256;
/// The most blocks for each multiprocessor.
const BLOCKS: usize = 2;

/// Products of a few tokens with norm and encoding; if `gated`, of gate and up with `silu(gate) * up`. Returns whether a kernel took them.
pub fn gemv_fused(gpu: &Gpu, input: MatmulInput, products: &[Product], gated: bool) -> Result<bool> {
    let Some(first) = products.first() else { return Ok(true) };
    if gated {
        assert!(products.len() == 2 && products[0].rows == products[1].rows, "gate and up");
        assert!(products.iter().all(|p| p.bias == 0 && p.runs.is_none() && !p.accumulate), "plain products");
    }
    if int11::multiply_one(gpu, input, products, gated)? || gemv(gpu, input, products, gated)? {
        return Ok(true);
    }
    let Some((kind, group, element)) = first.fused() else { return Ok(false) };
    let is_many = gpu.device.has(Variant::Tiles) && first.outputs > MAX_GEMV_TOKENS;
    if kind.needs().int8 && first.table.is_none() && (is_many || takes_sets(gpu, products)) {
        return Ok(false);
    }
    let (cols, inputs) = (first.cols, first.inputs());
    let alike = |p: &Product| {
        p.fused() == first.fused()
            && (p.cols, p.outputs, p.inputs()) == (cols, first.outputs, inputs)
            && p.table.is_some() == first.table.is_some()
    };
    let Some(kernel) = kind.gemv_batched(if first.table.is_some() { 1 } else { first.outputs }) else {
        return Ok(false);
    };
    let integers = kind.needs().int8;
    let encoded = match integers {
        true => inputs * cols + 2 * 4 * (inputs * cols / GROUP).next_multiple_of(4),
        false => (2 * inputs * cols).next_multiple_of(16),
    };
    let (mut parameters, mut shared) = (p::GemvBatched::default(), encoded);
    let encoded = match input {
        MatmulInput::Encoded(x) => x.view,
        MatmulInput::Floats { x, norm, rows } => {
            assert_eq!(rows, inputs, "tokens");
            if norm.weight != 0 {
                shared += 4 * cols;
            }
            let aligned = x.at % 16 == 0 && (x.stride % 4 == 0 || rows == 1) && norm.weight % 16 == 0;
            if !aligned || inputs * cols > MAX_ENCODED {
                return Ok(false);
            }
            (parameters.x, parameters.norm) = (x, norm);
            p::Encoded::default()
        }
    };
    let fits = shared + STATIC_SHARED <= gpu.device.shared
        && cols % GROUP == 0
        && (!integers || [32, 64, 128].contains(&group));
    if !gpu.device.has(Variant::Rows) || !fits || products.len() > p::PARTS || !products.iter().all(alike) {
        return Ok(false);
    }
    for (product, part) in products.iter().zip(&mut parameters.parts) {
        *part = product.parameters(encoded);
    }
    (parameters.tokens, parameters.count) = (number(inputs), number(products.len()));
    (parameters.gated, parameters.of, parameters.element) = (gated.into(), group / GROUP as u32, element);
    let per_warp = if integers { 32 / (4 * group as usize / GROUP) } else { 2 };
    let tasks = products.iter().map(|p| p.rows.div_ceil(per_warp) * p.table.map_or(1, |_| p.outputs)).sum::<usize>();
    // One warp takes gate and up. A few tasks are spread over all multiprocessors.
    let (tasks, warps) = (if gated { tasks / 2 } else { tasks }, THREADS as usize / 32);
    let blocks =
        tasks.div_ceil(warps).clamp(tasks.min(gpu.device.multiprocessors), BLOCKS * gpu.device.multiprocessors);
    // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
    unsafe { gpu.launch(kernel, [number(blocks), 1, 1], THREADS, number(shared), &parameters)? };
    Ok(true)
}
