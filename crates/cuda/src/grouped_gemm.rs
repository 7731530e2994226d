//! Products of a mixture's experts that have a few tokens each, and of a matrix of many rows for a few tokens (`kernels/moe/grouped.cu`).

use anyhow::Result;

use crate::driver::{Address, Gpu};
use crate::kernels::STATIC_SHARED;
use crate::matmul::{Encoded, Grouped, Product};
use crate::parameters::{self as p, number};
use crate::weights::{self, KernelFormat, Needs};

/// Columns of a weight group, threads of a block, its rows, and tokens that are taken together.
const GROUP: usize = 64;
const THREADS: u32 = 128;
const ROWS: usize = 64;
pub const TOGETHER: usize = 8;
/// Tokens of [`multiply_long`] at most: each eight of them read all of the matrix.
const MOST_LONG: usize = 32;
/// Blocks on each multiprocessor, at most, and shared memory that each has beside what it asks for: what is known when it is compiled, and the driver's.
const BLOCKS: usize = 4;
const OWN: usize = 8 << 10;

/// Which experts a few tokens each take, whose products [`multiply_few`] does.
#[derive(Clone, Copy)]
pub struct Few<'a> {
    /// [`p::Matrix`] of each expert; where what they give is put through `silu(gate) * up`, of up, too.
    pub tables: [Address; 2],
    pub kinds: &'a [KernelFormat],
    pub groups: Option<(u32, u32)>,
    pub grouped: Grouped,
    /// Pairs of each row of x.
    pub per_row: usize,
    pub rows: usize,
    pub pairs: usize,
    pub experts: usize,
}

impl Few<'_> {
    /// Whether [`multiply_few`] can do it on a device, of so many columns.
    pub fn fits(gpu: &Gpu, kinds: &[KernelFormat], groups: Option<(u32, u32)>, cols: usize) -> bool {
        let &[kind] = kinds else { return false };
        groups.is_some_and(|(group, element)| group as usize == GROUP && weights::HALVES.contains(&element))
            && kind.grouped_gemm().is_some()
            && cols.is_multiple_of(GROUP)
            && few_shared(kind, cols) + STATIC_SHARED <= gpu.device.shared
    }
}

/// Bytes that a block of [`multiply_few`] has: activations with their scales, and a ring of weights for each warp (`FewStep`).
fn few_shared(kind: KernelFormat, cols: usize) -> usize {
    let (bits, groups) = (kind.bits().unwrap_or(8), cols / GROUP);
    let (row, deep) = (32 * bits + if bits == 4 { 0 } else { 16 }, if bits <= 4 { 3 } else { 2 });
    let ring = deep * 16 * (row + 16);
    TOGETHER * (cols.next_multiple_of(128) + 32 + 12 * groups) + THREADS as usize / 32 * ring
}

/// Where [`multiply_few`] leaves a product: that of gate together with that of up, as `silu(gate) * up`, encoded; or one that directly follows these.
pub enum Output<'a> {
    Floats(p::Tensor),
    Hidden(&'a mut Encoded),
}

/// Blocks that a device holds at once, and the shared memory of each.
fn blocks(gpu: &Gpu, kind: KernelFormat, cols: usize) -> (usize, usize) {
    let shared = few_shared(kind, cols);
    ((gpu.device.shared / (shared + OWN)).clamp(1, BLOCKS) * gpu.device.multiprocessors, shared)
}

/// Products of experts that have a few tokens each.
pub fn multiply_few(gpu: &Gpu, few: Few, x: &Encoded, out: Output) -> Result<()> {
    let Few { tables: [table, up], kinds, groups, grouped, per_row, rows, pairs, experts } = few;
    assert!(Few::fits(gpu, kinds, groups, x.cols), "products of experts that have a few tokens each");
    assert_eq!(x.rows * per_row, pairs, "tokens");
    let (Some([gated, plain]), Some((_, element))) = (kinds[0].grouped_gemm(), groups) else { unreachable!("it fits") };
    let mut parameters = p::GroupedGemm {
        table,
        up,
        tiles: grouped.tiles,
        order: grouped.order,
        x: x.is,
        per_row: number(per_row),
        rows: number(rows),
        cols: number(x.cols),
        element,
        most_tiles: number(grouped.most),
        experts: number(experts),
        ..p::GroupedGemm::default()
    };
    let (kernel, of_set) = match out {
        Output::Floats(out) => {
            parameters.out = out;
            (plain, ROWS)
        }
        Output::Hidden(hidden) => {
            parameters.hidden = hidden.room(gpu, pairs, rows, Needs::INT8)?;
            (gated, ROWS / 2)
        }
    };
    let (blocks, shared) = blocks(gpu, kinds[0], x.cols);
    let blocks = (grouped.most * rows.div_ceil(of_set)).min(blocks);
    // SAFETY: the tables' matrices have so many rows and columns, as tensors were checked to have; the room was just made.
    unsafe { gpu.launch(kernel, [number(blocks), 1, 1], THREADS, number(shared), &parameters)? };
    Ok(())
}

/// A product for a few tokens of a matrix of so many rows that blocks take them one set behind the other, as a vocabulary has them. Says whether it does.
pub fn multiply_long(gpu: &Gpu, product: &Product, x: &Encoded) -> Result<bool> {
    let &Product { matrix, rows, cols, outputs: tokens, out, .. } = product;
    let Some((kind, group, element)) = product.integers().filter(|_| gpu.device.few && gpu.device.tiles) else {
        return Ok(false);
    };
    let plain = product.table.is_none() && product.bias == 0 && product.runs.is_none() && !product.accumulate;
    if !plain || !(2..=MOST_LONG).contains(&tokens) || !Few::fits(gpu, &[kind], Some((group, element)), cols) {
        return Ok(false);
    }
    let (blocks, shared) = blocks(gpu, kind, cols);
    if rows.div_ceil(ROWS) < blocks {
        return Ok(false);
    }
    let parameters = p::GroupedGemm {
        x: x.is,
        out,
        per_row: 1,
        rows: number(rows),
        cols: number(cols),
        element,
        matrix,
        tokens: number(tokens),
        ..p::GroupedGemm::default()
    };
    let Some([_, kernel]) = kind.grouped_gemm() else { unreachable!("it fits") };
    // SAFETY: rows of the matrix and of x, and the tensor written, were checked against their buffers.
    unsafe { gpu.launch(kernel, [number(blocks), 1, 1], THREADS, number(shared), &parameters)? };
    Ok(true)
}
