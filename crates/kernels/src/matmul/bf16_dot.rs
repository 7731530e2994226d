//! bf16 pairs: bf16 weights as they are stored, and weights in groups rounded to bf16, times bf16 activations.

use crate::affine;
use crate::dispatch::{greatest, simd};
use crate::instructions::bf16_dot::Bf16Dot;
use crate::instructions::dot::Product;
use crate::instructions::unpack::Unpack;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

#[inline(always)]
unsafe fn direct_lanes<V: Bf16Dot>(w: Matrix, x: &[u16], tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let product = Product::of_matrix(&w, x.as_ptr().cast(), tokens, tile);
    let [working] = scratch.cut([V::working_bytes(w.rows, w.cols, tokens.len())]);
    // SAFETY: `matmul` checked the lengths; the caller vouches for the instruction set.
    unsafe { V::product(product, working) }
}

simd! {
    /// bf16 weights, without a copy.
    pub(super) fn direct(w: Matrix, x: &[u16], tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) = direct_lanes
}

pub(super) fn direct_scratch_bytes(rows: usize, cols: usize, tokens: usize) -> usize {
    cut_bytes([greatest!(Bf16Dot::working_bytes(rows, cols, tokens))])
}

/// Rows that are dequantised at a time.
const ROWS: usize = 32;

/// A row as f32, some as bf16, and what a product needs.
fn grouped_sizes(cols: usize, working: usize) -> [usize; 3] {
    [cols * 4, ROWS * cols * 2, working]
}

pub(super) fn grouped_scratch_bytes(cols: usize, tokens: usize) -> usize {
    cut_bytes(grouped_sizes(cols, greatest!(Bf16Dot::working_bytes(ROWS, cols, tokens))))
}

#[inline(always)]
unsafe fn grouped_lanes<V: Bf16Dot + Unpack>(
    w: Matrix,
    x: &[u16],
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let [row, rows, working] = scratch.cut(grouped_sizes(w.cols, V::working_bytes(ROWS, w.cols, tokens.len())));
    let row = row.cast::<f32>();
    for r0 in (0..w.rows).step_by(ROWS) {
        let n = ROWS.min(w.rows - r0);
        // SAFETY: the scratch holds a row of f32 and ROWS rows of bf16; columns are a multiple of 32; `matmul` checked the
        // other lengths; the caller vouches for the instruction set.
        unsafe {
            for r in 0..n {
                affine::dequantize_lanes::<V>(&w, r0 + r, row);
                for k in (0..w.cols).step_by(16) {
                    V::load(row.add(k)).store_bf16(rows.add((r * w.cols + k) * 2));
                }
            }
            let product = Product {
                w: rows,
                w_stride: w.cols * 2,
                rows: n,
                x: x.as_ptr().cast(),
                cols: w.cols,
                tokens,
                out: tile.as_mut_ptr().add(r0),
                out_stride: w.rows,
            };
            V::product(product, working);
        }
    }
}

simd! {
    /// Weights in groups, some rows at a time dequantised and rounded into scratch.
    pub(super) fn grouped(w: Matrix, x: &[u16], tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) = grouped_lanes
}
