//! The register tile of all dot-form products: R rows by T tokens, lanes along the columns, one accumulator per output.
//!
//! Each output has its own accumulator and sees its columns in ascending order, so an output's bits do not depend on R, T or
//! on the blocking above them.

use super::f32_dot::Lanes;
use crate::matrix::Matrix;

/// Multiplies a run of columns of a weight row by the same columns of a token.
///
/// # Safety
/// As for [`Lanes`]: called only where the instruction set of `V` is available, with pointers that hold the elements read.
pub(crate) trait Dot<V: Lanes> {
    /// Elements per [`Dot::mac`].
    const STEP: usize;
    /// Bytes per element of a weight row and of a token.
    const SIZES: (usize, usize);
    type W: Copy;
    type X: Copy;
    unsafe fn w(p: *const u8) -> Self::W;
    /// The first `n < STEP` elements, the rest zero; reads no further.
    unsafe fn w_first(p: *const u8, n: usize) -> Self::W;
    unsafe fn x(p: *const u8) -> Self::X;
    unsafe fn x_first(p: *const u8, n: usize) -> Self::X;
    unsafe fn mac(acc: V, w: Self::W, x: Self::X) -> V;
}

/// Rows of weights and tokens to multiply, and where the results go.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    /// [rows, stride bytes]
    pub w: *const u8,
    /// Bytes from one row of weights to the next.
    pub w_stride: usize,
    /// Rows of weights.
    pub rows: usize,
    /// [n, cols], dense
    pub x: *const u8,
    /// Columns of weights and of tokens.
    pub cols: usize,
    /// The rows of `x`.
    pub tokens: &'a [u32],
    /// Token i, row r at `out[i * out_stride + r]`.
    pub out: *mut f32,
    /// Elements of `out` from one token to the next.
    pub out_stride: usize,
}

impl<'a> Product<'a> {
    /// Floats of `w` times the rows `tokens` of `x`, which has as many columns.
    pub fn of_matrix(w: &Matrix, x: *const u8, tokens: &'a [u32], tile: &mut [f32]) -> Product<'a> {
        Product {
            w: w.data.as_ptr(),
            w_stride: w.row_bytes(),
            rows: w.rows,
            x,
            cols: w.cols,
            tokens,
            out: tile.as_mut_ptr(),
            out_stride: w.rows,
        }
    }
}

/// Weight bytes that stay in the first-level cache while the tokens pass by.
const L1_WEIGHTS: usize = 24 << 10;

/// How far ahead the rows of one token are fetched, at least, in bytes.
const AHEAD: usize = 8 << 10;

/// Prefetches the line at `p`, any address, into the second-level cache, as [`Lanes::prefetch`] does. A prefetch does not fault.
#[inline(always)]
fn fetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect but on speed; the instruction is part of every x86-64.
    unsafe {
        use std::arch::x86_64::*;
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above; every aarch64 processor has the instruction.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{0}]", in(reg) p, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// # Safety
/// The product's pointers hold what it says; the instruction set of `V` is available.
#[inline(always)]
pub(crate) unsafe fn multiply<V: Lanes, D: Dot<V>>(product: Product) {
    // A wide set has registers for 4 x 4 accumulators, the others for 2 x 2 (one is two registers in AVX2).
    let wide = size_of::<V>() == 64 && align_of::<V>() == 64;
    let block = (L1_WEIGHTS / product.w_stride.max(1)).max(4) / 4 * 4;
    let block = if product.tokens.len() == 1 { product.rows } else { block };
    for first in (0..product.rows).step_by(block) {
        let rows = block.min(product.rows - first);
        // SAFETY: a sub-range of the product's rows.
        unsafe {
            let part =
                Product { w: product.w.add(first * product.w_stride), rows, out: product.out.add(first), ..product };
            let mut i = 0;
            while wide && product.tokens.len() - i >= 4 {
                rows_by::<V, D, 4, 4>(&part, i);
                i += 4;
            }
            while product.tokens.len() - i >= 2 {
                rows_by::<V, D, 2, 2>(&part, i);
                i += 2;
            }
            if i < product.tokens.len() {
                rows_in_streams::<V, D>(&part, i);
            }
        }
    }
}

/// All rows of `product` for its tokens `i..i + T`.
#[inline(always)]
unsafe fn rows_by<V: Lanes, D: Dot<V>, const R: usize, const T: usize>(product: &Product, i: usize) {
    let mut r = 0;
    // SAFETY: rows and tokens stay inside the product.
    unsafe {
        while product.rows - r >= R {
            tile::<V, D, R, T>(product, std::array::from_fn(|i| r + i), i, 0);
            r += R;
        }
        while r < product.rows {
            tile::<V, D, 1, T>(product, [r], i, 0);
            r += 1;
        }
    }
}

/// All rows of `product` for its token `i`, in four streams of a quarter of the rows each. The streams are on different pages, so that more of the hardware
/// prefetchers' trackers work at once.
#[inline(always)]
unsafe fn rows_in_streams<V: Lanes, D: Dot<V>>(product: &Product, i: usize) {
    let quarter = product.rows.div_ceil(4);
    let ahead = AHEAD.div_ceil(4 * product.w_stride.max(1));
    for r in 0..quarter {
        // The same column some rows further on in the stream, or past its end in the rows that often follow.
        let further = if r + ahead < quarter { ahead } else { product.rows + ahead - quarter };
        // Beyond the last row, the last row is computed again.
        let rows = std::array::from_fn(|i| (i * quarter + r).min(product.rows - 1));
        // SAFETY: these rows and this token are the product's.
        unsafe { tile::<V, D, 4, 1>(product, rows, i, further * product.w_stride) };
    }
}

// Plain loops over arrays of constant length: they unroll into registers, where iterators and closures over vectors may not be inlined.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn tile<V: Lanes, D: Dot<V>, const R: usize, const T: usize>(
    product: &Product,
    rows: [usize; R],
    i0: usize,
    ahead: usize,
) {
    // SAFETY: the caller vouches for the rows, tokens i0..i0 + T and the instruction set.
    unsafe {
        let mut w = [product.w; R];
        for r in 0..R {
            w[r] = product.w.add(rows[r] * product.w_stride);
        }
        let mut x = [product.x; T];
        for t in 0..T {
            x[t] = product.x.add(*product.tokens.get_unchecked(i0 + t) as usize * product.cols * D::SIZES.1);
        }
        let mut acc = [[V::splat(0.0); T]; R];
        let whole = product.cols / D::STEP * D::STEP;
        let mut k = 0;
        while k < whole {
            let mut xs = [D::x(x[0].add(k * D::SIZES.1)); T];
            for t in 1..T {
                xs[t] = D::x(x[t].add(k * D::SIZES.1));
            }
            for r in 0..R {
                let w = w[r].add(k * D::SIZES.0);
                // One token reads at the speed of memory.
                if T == 1 {
                    fetch(w.wrapping_add(ahead));
                }
                let w = D::w(w);
                for t in 0..T {
                    acc[r][t] = D::mac(acc[r][t], w, xs[t]);
                }
            }
            k += D::STEP;
        }
        let rest = product.cols - whole;
        if rest > 0 {
            for r in 0..R {
                let w = D::w_first(w[r].add(k * D::SIZES.0), rest);
                for t in 0..T {
                    acc[r][t] = D::mac(acc[r][t], w, D::x_first(x[t].add(k * D::SIZES.1), rest));
                }
            }
        }
        for r in 0..R {
            for t in 0..T {
                *product.out.add((i0 + t) * product.out_stride + rows[r]) = acc[r][t].sum();
            }
        }
    }
}
