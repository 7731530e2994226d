//! Products of plain f32 matrices, for calibration, not for inference.
//!
//! An output is one chain of fused multiply-adds in ascending depth, whatever the tiles: the same bits in every instruction set. Both factors are packed first, so that a
//! tile reads its registers one after the other.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::isa::Isa;

/// Numbers in memory that a thread reuses for the next matrix: clearing fresh pages for each would cost as much as part of the arithmetic.
#[derive(Debug, PartialEq)]
pub struct Buffer(Vec<f32>);

thread_local! {
    static KEPT: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

impl Buffer {
    /// A zeroed buffer of `len` f32.
    pub fn zeros(len: usize) -> Buffer {
        // The smallest that is large enough, or the largest, which then grows: never more of them than were in use at once.
        let fit = |v: &Vec<f32>| if v.capacity() >= len { (0, v.capacity()) } else { (1, usize::MAX - v.capacity()) };
        let kept = KEPT.with_borrow_mut(|kept| {
            let best = (0..kept.len()).min_by_key(|&i| fit(&kept[i]));
            best.map(|i| kept.swap_remove(i))
        });
        let mut v = kept.unwrap_or_default();
        v.clear();
        v.resize(len, 0.0);
        Buffer(v)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let v = std::mem::take(&mut self.0);
        // A thread that ends keeps nothing.
        let _ = KEPT.try_with(|kept| kept.borrow_mut().push(v));
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

/// Rows of a panel of the left factor: the lanes of a register.
pub const LEFT: usize = 16;
/// Rows of a panel of the right factor: what a tile multiplies each register by.
pub const RIGHT: usize = 8;

/// A matrix packed as a factor: its rows in panels of `N`, each `[depth, N]`; the last is filled up with zeros.
#[derive(Debug, PartialEq)]
pub struct Panels<const N: usize> {
    /// Rows.
    pub rows: usize,
    /// Columns: the length of the dot products.
    pub depth: usize,
    /// `[panels, depth, N]`
    pub data: Buffer,
}

impl<const N: usize> Panels<N> {
    /// Of `x: [rows, depth]`.
    pub fn of_rows(x: &[f32], depth: usize) -> Panels<N> {
        assert!(depth > 0 && x.len().is_multiple_of(depth), "whole rows of {depth}");
        let rows = x.len() / depth;
        let mut data = Buffer::zeros(rows.next_multiple_of(N) * depth);
        for (panel, x) in data.chunks_exact_mut(N * depth).zip(x.chunks(N * depth)) {
            // Some depth at a time: that much of N rows stays in cache while it is written across.
            for from in (0..depth).step_by(64) {
                for (i, row) in x.chunks_exact(depth).enumerate() {
                    for (k, v) in row[from..depth.min(from + 64)].iter().enumerate() {
                        panel[(from + k) * N + i] = *v;
                    }
                }
            }
        }
        Panels { rows, depth, data }
    }

    /// Of the columns of `x: [depth, rows]`; row k of it times `factors[k]`.
    pub fn of_columns(x: &[f32], rows: usize, factors: &[f32]) -> Panels<N> {
        assert!(rows > 0 && x.len() == rows * factors.len(), "whole rows of {rows}, and a factor for each");
        let depth = factors.len();
        let mut data = Buffer::zeros(rows.next_multiple_of(N) * depth);
        for (k, (x, factor)) in x.chunks_exact(rows).zip(factors).enumerate() {
            for (p, part) in x.chunks(N).enumerate() {
                let to = &mut data[(p * depth + k) * N..][..part.len()];
                to.iter_mut().zip(part).for_each(|(to, v)| *to = v * factor);
            }
        }
        Panels { rows, depth, data }
    }
}

/// `out[j * a.rows + i] = dot(a's row i, b's row j)`, that is `b a^T`: `[b.rows, a.rows]`.
///
/// Panics where the depths differ.
pub fn product(isa: Isa, a: &Panels<LEFT>, b: &Panels<RIGHT>) -> Buffer {
    assert_eq!(a.depth, b.depth, "one depth");
    let mut out = Buffer::zeros(a.rows * b.rows);
    add_panels(isa, (&a.data, a.rows), (&b.data, b.rows), a.depth, false, &mut out);
    out
}

/// Adds a [`product`] of panels, of `a` and `b` those of so many rows. `lower`: outputs with `j > i` may be left as they are.
pub(crate) fn add_panels(
    isa: Isa,
    (a, a_rows): (&[f32], usize),
    (b, b_rows): (&[f32], usize),
    depth: usize,
    lower: bool,
    out: &mut [f32],
) {
    assert_eq!(a.len(), a_rows.next_multiple_of(LEFT) * depth, "panels of {a_rows} rows");
    assert_eq!(b.len(), b_rows.next_multiple_of(RIGHT) * depth, "panels of {b_rows} rows");
    assert_eq!(out.len(), a_rows * b_rows, "the product is [{b_rows}, {a_rows}]");
    add(isa, a, a_rows, b, b_rows, depth, lower, out);
}

/// `sum over k of factors[k] x[k] x[k]^T` for `x: [factors, cols]`: `[cols, cols]`, symmetric to the bit.
pub fn moments(isa: Isa, x: &[f32], cols: usize, factors: &[f32]) -> Buffer {
    let a = Panels::<LEFT>::of_columns(x, cols, &vec![1.0; factors.len()]);
    let b = Panels::<RIGHT>::of_columns(x, cols, factors);
    let mut out = Buffer::zeros(cols * cols);
    add_panels(isa, (&a.data, cols), (&b.data, cols), a.depth, true, &mut out);
    // In squares, which stay in cache.
    for j0 in (0..cols).step_by(SQUARE) {
        for i0 in (0..=j0).step_by(SQUARE) {
            for j in j0..cols.min(j0 + SQUARE) {
                for i in i0..j.min(i0 + SQUARE) {
                    out[j * cols + i] = out[i * cols + j];
                }
            }
        }
    }
    out
}

/// Rows and columns that are mirrored at a time.
const SQUARE: usize = 64;
/// Depth that a tile goes through at a time: so much of two panels on the left and one on the right stays in the first-level cache.
const DEPTH: usize = 256;

#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn add_lanes<V: Lanes>(
    a: &[f32],
    a_rows: usize,
    b: &[f32],
    b_rows: usize,
    depth: usize,
    lower: bool,
    out: &mut [f32],
) {
    for k0 in (0..depth).step_by(DEPTH) {
        let k = DEPTH.min(depth - k0);
        let mut i = 0;
        while i < a_rows {
            // A wide set has registers for 2 x 8 accumulators, the others for 1 x 4 (one is two registers in AVX2).
            let two = V::WIDE && a_rows - i > LEFT;
            let next = i + if two { 2 * LEFT } else { LEFT };
            let end = if lower { b_rows.min(next) } else { b_rows };
            for j in (0..end).step_by(RIGHT) {
                // SAFETY: panels hold `depth` times their rows; the tile writes rows i.. and j.. that there are, and `add_panels` checked the lengths.
                unsafe {
                    let a = a.as_ptr().add(i * depth + k0 * LEFT);
                    let b = b.as_ptr().add(j * depth + k0 * RIGHT);
                    let out = Out { to: out.as_mut_ptr().add(j * a_rows + i), stride: a_rows, rows: a_rows - i };
                    let left = b_rows - j;
                    match (V::WIDE, two) {
                        (true, true) => tile::<V, 2, 8>(a, depth * LEFT, b, k, out, left),
                        (true, false) => tile::<V, 1, 8>(a, 0, b, k, out, left),
                        (false, _) => {
                            tile::<V, 1, 4>(a, 0, b, k, out, left);
                            if left > 4 {
                                let out = Out { to: out.to.add(4 * a_rows), ..out };
                                tile::<V, 1, 4>(a, 0, b.add(4), k, out, left - 4);
                            }
                        }
                    }
                }
            }
            i = next;
        }
    }
}

/// The output of a tile: row j, column i at `to + j * stride + i`. It has `rows` columns.
#[derive(Clone, Copy)]
struct Out {
    to: *mut f32,
    stride: usize,
    rows: usize,
}

// Plain loops over arrays of constant length: they unroll into registers, where iterators and closures over vectors may not be inlined.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn tile<V: Lanes, const R: usize, const T: usize>(
    a: *const f32,
    panel: usize,
    b: *const f32,
    depth: usize,
    out: Out,
    columns: usize,
) {
    // SAFETY: the caller vouches for R panels `panel` apart, for the right panel, for the outputs that there are and for the instruction set.
    unsafe {
        let mut acc = [[V::splat(0.0); T]; R];
        for r in 0..R {
            let n = (out.rows - r * LEFT).min(LEFT);
            for t in 0..T.min(columns) {
                acc[r][t] = V::load_first(out.to.add(t * out.stride + r * LEFT), n);
            }
        }
        for k in 0..depth {
            let mut w = [V::load(a.add(k * LEFT)); R];
            for r in 1..R {
                w[r] = V::load(a.add(r * panel + k * LEFT));
            }
            for t in 0..T {
                let x = V::splat(*b.add(k * RIGHT + t));
                for r in 0..R {
                    acc[r][t] = w[r].fma(x, acc[r][t]);
                }
            }
        }
        for r in 0..R {
            let n = (out.rows - r * LEFT).min(LEFT);
            for t in 0..T.min(columns) {
                acc[r][t].store_first(out.to.add(t * out.stride + r * LEFT), n);
            }
        }
    }
}

simd! {
    /// See [`add_panels`].
    fn add(a: &[f32], a_rows: usize, b: &[f32], b_rows: usize, depth: usize, lower: bool, out: &mut [f32]) = add_lanes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_and_moments_are_what_their_names_say() {
        for (ra, rb, k) in [(5, 37, 70), (16, 8, 1), (49, 9, 600), (33, 3, 257)] {
            let a: Vec<f32> = (0..ra * k).map(|i| (i * 7 % 13) as f32 - 6.0).collect();
            let b: Vec<f32> = (0..rb * k).map(|i| (i * 5 % 11) as f32 - 5.0).collect();
            for isa in Isa::supported() {
                let out = product(isa, &Panels::of_rows(&a, k), &Panels::of_rows(&b, k));
                for i in 0..rb {
                    for r in 0..ra {
                        let exact: f32 = (0..k).map(|c| a[r * k + c] * b[i * k + c]).sum();
                        assert_eq!(out[i * ra + r], exact);
                    }
                }
                let factors: Vec<f32> = (0..ra).map(|r| (r % 3) as f32).collect();
                let h = moments(isa, &a, k, &factors);
                for i in 0..k {
                    for j in 0..k {
                        let exact: f32 = (0..ra).map(|r| factors[r] * a[r * k + i] * a[r * k + j]).sum();
                        assert_eq!(h[i * k + j], exact);
                    }
                }
            }
        }
    }

    #[test]
    fn an_output_is_one_chain_in_every_instruction_set() {
        let (rows, k) = (35, 300);
        let value = |i: usize| ((i * 7919 + i * i % 104_729) % 1009) as f32 / 504.5 - 1.0;
        let x: Vec<f32> = (0..rows * k).map(value).collect();
        for isa in Isa::supported() {
            let out = product(isa, &Panels::of_rows(&x, k), &Panels::of_rows(&x, k));
            for i in 0..rows {
                for r in 0..rows {
                    let chain = (0..k).fold(0f32, |sum, c| x[r * k + c].mul_add(x[i * k + c], sum));
                    assert_eq!(out[i * rows + r], chain);
                }
            }
        }
    }
}
