//! Matrix products of activations: which kernels take them.

use anyhow::Result;
use sluice_backend::{Linear, Norm, Projection, Tensor};

use crate::device::stream::Gpu;
use crate::ops::activations::{EncodeInput, EncodedActivations, encode};
use crate::ops::context::Context;
use crate::ops::gemm::{gemm_sets, gemm_tiles, max_rows};
use crate::ops::gemv::gemv_interleaved;
use crate::ops::gemv_fused::gemv_fused;
use crate::ops::grouped_gemm::long_gemm;
use crate::ops::int11;
use crate::ops::product::{MAX_GRID_Y, MatmulInput, Product};
use crate::parameters::{self as p, number};
use crate::weights::{self, LaunchShape, Needs};

/// Tokens of a tile in the kernels without tensor cores.
pub const TILE: usize = 8;
/// From this many tokens on, lane sums are computed by squares of rows and tokens; fewer would leave most multiprocessors idle.
const MIN_SQUARES: usize = 64;

/// Products of one input. Products of the same shape go into one kernel.
pub fn matmul(gpu: &Gpu, products: &[Product], x: &EncodedActivations) -> Result<()> {
    let mut rest = products;
    while let Some((first, others)) = rest.split_first() {
        let alike = |p: &&Product| {
            (p.kinds(), p.integers(), p.cols, p.outputs, p.table.is_some())
                == (first.kinds(), first.integers(), first.cols, first.outputs, first.table.is_some())
        };
        let count = 1 + others.iter().take(p::PARTS - 1).take_while(alike).count();
        let (alike, others) = rest.split_at(count);
        matmul_alike(gpu, alike, x)?;
        rest = others;
    }
    Ok(())
}

/// Products of the same kind, columns and number of outputs.
fn matmul_alike(gpu: &Gpu, products: &[Product], x: &EncodedActivations) -> Result<()> {
    let mut parameters = p::Products::default();
    for (product, part) in products.iter().zip(&mut parameters.parts) {
        assert_eq!(product.cols, x.cols, "activations of a matrix with {} columns", product.cols);
        assert_eq!(product.inputs(), x.rows, "tokens");
        *part = product.parameters(x.view);
    }
    let (first, rows) = (&products[0], max_rows(products));
    if let [product] = products
        && long_gemm(gpu, product, x)?
    {
        return Ok(());
    }
    if first.kinds()[0].needs().int11 && int11::multiply(gpu, products, &parameters, x)? {
        return Ok(());
    }
    let is_sorted = first.table.is_some_and(|t| t.tiles.is_some());
    if !is_sorted && gemm_sets(gpu, products, &parameters)? {
        return Ok(());
    }
    if gemm_tiles(gpu, products, &parameters)? {
        return Ok(());
    }
    for kind in first.kinds() {
        // Each token of a mixture has its own expert.
        let many = first.outputs > 1 && first.table.is_none_or(|table| table.in_runs);
        let squares = first.table.is_none() && first.outputs >= MIN_SQUARES;
        if let Some(kernel) = kind.gemm_32().filter(|_| many && squares) {
            let tiles = first.outputs.div_ceil(weights::SQUARE).min(MAX_GRID_Y);
            let grid = [number(rows.div_ceil(weights::SQUARE)), number(tiles), number(products.len())];
            // SAFETY: rows of the matrix and of x, and the tensor written, were checked against their buffers.
            unsafe { gpu.launch(kernel, grid, weights::SQUARE_THREADS, 0, &parameters)? };
            continue;
        }
        let tiles = if many { first.outputs.div_ceil(TILE) } else { first.outputs };
        let several = kind.gemv_rows(rows * tiles, first.cols, gpu.device.shared).filter(|_| !many);
        let LaunchShape { kernel, rows: block, threads, shared } =
            several.unwrap_or_else(|| kind.gemv_or_gemm(many, rows * tiles, first.cols));
        let grid = [number(rows.div_ceil(block)), number(tiles.min(MAX_GRID_Y)), number(products.len())];
        // SAFETY: rows of the matrix and of x, and the tensor written, were checked against their buffers.
        unsafe { gpu.launch(kernel, grid, threads, number(shared), &parameters)? };
    }
    Ok(())
}

/// Products of `norm(x)`, encoded in the same kernel if one can do that; otherwise `encoded` holds what is encoded first.
pub fn encode_and_matmul(
    gpu: &Gpu,
    x: p::Tensor,
    norm: p::Norm,
    products: &[Product],
    encoded: &mut EncodedActivations,
) -> Result<()> {
    let Some(first) = products.first() else { return Ok(()) };
    let (rows, cols) = (first.outputs, first.cols);
    let (mut fused, mut rest): (Vec<Product>, Vec<Product>) = products.iter().partition(|p| p.fused().is_some());
    let input = MatmulInput::Floats { x, norm, rows };
    fused.sort_by_key(Product::fused);
    for alike in fused.chunk_by(|a, b| a.fused() == b.fused()) {
        if gemv_interleaved(gpu, input, alike)? {
            continue;
        }
        for few in alike.chunks(p::PARTS) {
            if !gemv_fused(gpu, input, few, false)? {
                rest.extend_from_slice(few);
            }
        }
    }
    if rest.is_empty() {
        return Ok(());
    }
    let needs = needs_of(&rest);
    let integers = needs == Needs::INT8;
    if !integers || norm.weight != 0 || !encoded.holds(x, rows, cols) {
        encode(gpu, EncodeInput { x, norm, rows, cols, ..EncodeInput::default() }, needs, encoded)?;
    }
    rest.sort_by_key(Product::kinds);
    matmul(gpu, &rest, encoded)
}

/// `last` of `silu(gate(x)) * up(x)`, which is left encoded in `hidden`; `both`: gate and up.
pub fn gated_matmul(
    gpu: &Gpu,
    both: &[Product; 2],
    last: &[Product; 1],
    x: &EncodedActivations,
    hidden: &mut EncodedActivations,
) -> Result<()> {
    matmul(gpu, both, x)?;
    let [gate, up] = both;
    let input = EncodeInput { x: gate.out, up: up.out, rows: gate.outputs, cols: gate.rows, ..EncodeInput::default() };
    encode(gpu, input, needs_of(last), hidden)?;
    matmul(gpu, last, hidden)
}

/// The encodings that products take.
pub fn needs_of(products: &[Product]) -> Needs {
    products.iter().flat_map(Product::kinds).fold(Needs::default(), |needs, kind| needs.and(kind.needs()))
}

/// Projections of `norm(x)`, or of `x` if there is no norm.
pub fn project(
    context: &Context,
    x: Tensor,
    norm: Option<&Norm>,
    projections: &[Projection],
    encoded: &mut EncodedActivations,
) -> Result<()> {
    for Projection { linear, out } in projections {
        assert!(out.rows >= x.rows && out.cols == linear.rows.len(), "{:?} into {out:?}", linear.rows);
    }
    let norm = norm.map_or(p::Norm::default(), |n| context.norm(n));
    encode_and_matmul(&context.gpu, context.place(x), norm, &context.products(projections, x.rows), encoded)
}

/// `out += linear(x)`
pub fn project_add(
    context: &Context,
    x: Tensor,
    linear: &Linear,
    out: Tensor,
    encoded: &mut EncodedActivations,
) -> Result<()> {
    let product = context.product(linear, x.rows, context.place(out), true, context.mode);
    encode_and_matmul(&context.gpu, context.place(x), p::Norm::default(), &[product], encoded)
}
