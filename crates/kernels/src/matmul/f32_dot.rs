//! f32 lanes: floats as they are stored, and weights in groups as `w = fma(q, s, b)`, times f32 activations.

use crate::affine;
use crate::dispatch::simd;
use crate::format::{Float, WeightFormat};
use crate::instructions::dot::{self, Dot, Product};
use crate::instructions::f32_dot::Lanes;
use crate::instructions::unpack::Unpack;
use crate::matrix::Matrix;
use crate::scratch::Scratch;

struct WF32;
struct WF16;
struct WBf16;

/// The first `n < 16` two-byte elements at `p`, the rest zero.
#[inline(always)]
unsafe fn first_halves(p: *const u8, n: usize) -> [u8; 32] {
    let mut all = [0; 32];
    // SAFETY: the caller vouches for `n` elements at `p`; `all` holds sixteen.
    unsafe { std::ptr::copy_nonoverlapping(p, all.as_mut_ptr(), 2 * n) };
    all
}

macro_rules! lane_sum {
    ($name:ident, $size:expr, $load:expr, $first:expr) => {
        // SAFETY (all): the caller vouches for the instruction set and the pointers, see `Dot`.
        #[allow(clippy::undocumented_unsafe_blocks)]
        impl<V: Lanes> Dot<V> for $name {
            const STEP: usize = 16;
            const SIZES: (usize, usize) = ($size, 4);
            type W = V;
            type X = V;
            #[inline(always)]
            unsafe fn w(p: *const u8) -> V {
                unsafe { $load(p) }
            }
            #[inline(always)]
            unsafe fn w_first(p: *const u8, n: usize) -> V {
                unsafe { $first(p, n) }
            }
            #[inline(always)]
            unsafe fn x(p: *const u8) -> V {
                unsafe { V::load(p.cast()) }
            }
            #[inline(always)]
            unsafe fn x_first(p: *const u8, n: usize) -> V {
                unsafe { V::load_first(p.cast(), n) }
            }
            #[inline(always)]
            unsafe fn mac(acc: V, w: V, x: V) -> V {
                unsafe { w.fma(x, acc) }
            }
        }
    };
}

lane_sum!(WF32, 4, |p: *const u8| V::load(p.cast()), |p: *const u8, n| V::load_first(p.cast(), n));
lane_sum!(WF16, 2, V::load_f16, |p, n| V::load_f16(first_halves(p, n).as_ptr()));
lane_sum!(WBf16, 2, V::load_bf16, |p, n| V::load_bf16(first_halves(p, n).as_ptr()));

#[inline(always)]
unsafe fn direct_lanes<V: Lanes>(w: Matrix, x: &[f32], tokens: &[u32], tile: &mut [f32]) {
    let product = Product::of_matrix(&w, x.as_ptr().cast(), tokens, tile);
    // SAFETY: `matmul` checked the lengths; the caller vouches for the instruction set.
    unsafe {
        match w.format {
            WeightFormat::Float(Float::F32) => dot::multiply::<V, WF32>(product),
            WeightFormat::Float(Float::F16) => dot::multiply::<V, WF16>(product),
            WeightFormat::Float(Float::Bf16) => dot::multiply::<V, WBf16>(product),
            _ => unreachable!("weights in groups are dequantised first"),
        }
    }
}

simd! {
    /// Floats, without a copy.
    pub(super) fn direct(w: Matrix, x: &[f32], tokens: &[u32], tile: &mut [f32]) = direct_lanes
}

/// Rows that are dequantised at a time.
const ROWS: usize = 16;

pub(super) fn scratch_bytes(cols: usize) -> usize {
    crate::scratch::cut_bytes([ROWS * cols * 4])
}

#[inline(always)]
unsafe fn grouped_lanes<V: Unpack>(w: Matrix, x: &[f32], tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let [rows] = scratch.cut([ROWS * w.cols * 4]);
    let rows = rows.cast::<f32>();
    for r0 in (0..w.rows).step_by(ROWS) {
        let n = ROWS.min(w.rows - r0);
        // SAFETY: the scratch holds ROWS rows; `matmul` checked the other lengths; the caller vouches for the instruction set.
        unsafe {
            for r in 0..n {
                affine::dequantize_lanes::<V>(&w, r0 + r, rows.add(r * w.cols));
            }
            dot::multiply::<V, WF32>(Product {
                w: rows.cast(),
                w_stride: w.cols * 4,
                rows: n,
                x: x.as_ptr().cast(),
                cols: w.cols,
                tokens,
                out: tile.as_mut_ptr().add(r0),
                out_stride: w.rows,
            });
        }
    }
}

simd! {
    /// Weights in groups, some rows at a time dequantised into scratch.
    pub(super) fn grouped(w: Matrix, x: &[f32], tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) = grouped_lanes
}
