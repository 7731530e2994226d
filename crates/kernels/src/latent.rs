//! Queries of latent attention: a head's query times the rows of its key projection, so that it meets the cached vectors themselves (DeepSeek-AI 2024).
//!
//! The projection is stored as an output per row, and here the outputs are summed over. So its rows are read in place, one after the other, and every element
//! of the result is a chain of fmas over them: an order that no tile, chunk or instruction set changes.

// Iterators come with closures, which may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use crate::affine::dequantize_lanes;
use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::instructions::unpack::Unpack;
use crate::matrix::Matrix;
use crate::rows::{Rows, RowsMut};

/// Rows that are widened at a time: they stay in the first-level cache while all tokens meet them.
const AT_ONCE: usize = 16;

/// Elements of scratch for [`absorb`] over rows of `cols` columns.
pub fn scratch_len(cols: usize) -> usize {
    AT_ONCE * cols
}

/// The arguments of a tile: rows `n` of the weights, widened, and what they meet.
struct Tile<'a, 'b> {
    /// `[rows, cols]`
    w: &'a [f32],
    /// The rows' place among those of the head.
    rows: Range<usize>,
    cols: usize,
    q: &'a Rows<'a>,
    out: &'a mut RowsMut<'b>,
}

impl Tile<'_, '_> {
    /// `C` registers of columns from `c` on, of the `T` tokens from `t` on.
    #[inline(always)]
    unsafe fn add<V: Lanes, const T: usize, const C: usize>(&mut self, t: usize, c: usize) {
        let (mut q, mut out) = ([std::ptr::null::<f32>(); T], [std::ptr::null_mut::<f32>(); T]);
        for i in 0..T {
            q[i] = self.q.row(t + i)[self.rows.clone()].as_ptr();
            out[i] = self.out.row(t + i)[c..c + 16 * C].as_mut_ptr();
        }
        // SAFETY: the slices above have as many elements, and so do the rows of `w`; the caller vouches for the instruction set.
        unsafe {
            let mut sum = [[V::splat(0.0); C]; T];
            if self.rows.start > 0 {
                for i in 0..T {
                    for j in 0..C {
                        sum[i][j] = V::load(out[i].add(16 * j));
                    }
                }
            }
            for n in 0..self.rows.len() {
                let from = self.w.as_ptr().add(n * self.cols + c);
                let mut w = [V::splat(0.0); C];
                for j in 0..C {
                    w[j] = V::load(from.add(16 * j));
                }
                for i in 0..T {
                    let q = V::splat(*q[i].add(n));
                    for j in 0..C {
                        sum[i][j] = q.fma(w[j], sum[i][j]);
                    }
                }
            }
            for i in 0..T {
                for j in 0..C {
                    sum[i][j].store(out[i].add(16 * j));
                }
            }
        }
    }

    /// All whole registers of columns of `T` tokens; returns the first column that is left.
    #[inline(always)]
    unsafe fn columns<V: Lanes, const T: usize, const C: usize>(&mut self, t: usize) -> usize {
        let mut c = 0;
        // SAFETY: the caller's.
        unsafe {
            while c + 16 * C <= self.cols {
                self.add::<V, T, C>(t, c);
                c += 16 * C;
            }
            while c + 16 <= self.cols {
                self.add::<V, T, 1>(t, c);
                c += 16;
            }
        }
        c
    }

    /// The columns from `c` on, fewer than sixteen.
    fn rest(&mut self, c: usize) {
        for t in 0..self.q.rows() {
            let q = &self.q.row(t)[self.rows.clone()];
            let out = &mut self.out.row(t)[c..self.cols];
            for (i, out) in out.iter_mut().enumerate() {
                let begun = if self.rows.start > 0 { *out } else { 0.0 };
                let column = self.w[c + i..].iter().step_by(self.cols);
                *out = q.iter().zip(column).fold(begun, |sum, (q, w)| q.mul_add(*w, sum));
            }
        }
    }
}

#[inline(always)]
unsafe fn absorb_lanes<V: Unpack>(w: &Matrix, rows: Range<usize>, q: Rows, out: &mut RowsMut, scratch: &mut [f32]) {
    let (tokens, cols, count) = (q.rows(), w.cols(), rows.len());
    assert!(rows.start <= rows.end && rows.end <= w.rows(), "rows {rows:?} of {}", w.rows());
    assert!(q.cols() == count && out.cols() == cols && out.rows() == tokens, "{count} elements to {cols}");
    let scratch = &mut scratch[..scratch_len(cols)];
    if count == 0 {
        (0..tokens).for_each(|t| out.row(t).fill(0.0));
        return;
    }
    for from in (0..count).step_by(AT_ONCE) {
        let some = from..(from + AT_ONCE).min(count);
        for n in some.clone() {
            let to = &mut scratch[(n - from) * cols..(n - from + 1) * cols];
            // SAFETY: a row's room; the shell has the instruction set.
            unsafe { dequantize_lanes::<V>(w, rows.start + n, to.as_mut_ptr()) };
        }
        let mut tile = Tile { w: &scratch[..some.len() * cols], rows: some, cols, q: &q, out };
        let mut t = 0;
        // SAFETY: the tile checks its slices; the shell has the instruction set.
        unsafe {
            while t + 4 <= tokens {
                if V::WIDE {
                    tile.columns::<V, 4, 4>(t)
                } else {
                    tile.columns::<V, 4, 1>(t)
                };
                t += 4;
            }
            while t < tokens {
                if V::WIDE {
                    tile.columns::<V, 1, 8>(t)
                } else {
                    tile.columns::<V, 1, 4>(t)
                };
                t += 1;
            }
        }
        let left = cols / 16 * 16;
        if left < cols {
            tile.rest(left);
        }
    }
}

simd! {
    /// `out[t][c]` = the sum over the elements n of a query of `q[t][n] * w[rows.start + n][c]`, by one fma each, in ascending n from +0. `w` may have any format: its
    /// weights count as f32. `q`: `[tokens, rows.len()]`, `out`: `[tokens, w.cols()]`, `scratch`: [`scratch_len`].
    ///
    /// # Panics
    /// Where a shape is wrong.
    pub fn absorb(w: &Matrix, rows: Range<usize>, q: Rows, out: &mut RowsMut, scratch: &mut [f32]) = absorb_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::affine::dequantize_row;
    use crate::format::{Float, Fp8, Fp8Scale, WeightFormat};
    use crate::test_random::{bits, random};

    #[test]
    fn an_absorbed_query_is_one_chain_over_rows_in_every_instruction_set() {
        let fp8 = WeightFormat::Fp8(Fp8 { group: 128, scale: Fp8Scale::Float(Float::F32) });
        let affine = WeightFormat::Affine { bits: 4, group: 32, scale: Float::Bf16 };
        let floats = [Float::F32, Float::Bf16, Float::F16].map(WeightFormat::Float);
        for (i, format) in floats.into_iter().chain([fp8, affine]).enumerate() {
            for (tokens, count, cols) in [(1, 24, 64), (3, 40, 160), (9, 17, 96), (4, 1, 32), (2, 0, 32)] {
                let (first, all) = (3, count + 5);
                let mut byte = fastrand::Rng::with_seed(i as u64);
                let planes = format.planes(cols).unwrap();
                let plane = |row: usize| (0..all * row).map(|_| byte.u8(0x20..0x3f)).collect::<Vec<u8>>();
                let planes: Vec<Vec<u8>> = planes.iter().map(|p| p.row_bytes).map(plane).collect();
                let w = Matrix::new(format, all, cols, planes.iter().map(|p| &p[..])).unwrap();
                let q = random(tokens * (count + 2), 7);
                let stride = cols + 3;
                let mut exact = vec![0.0f32; tokens * cols];
                let mut row = vec![0.0; cols];
                for n in 0..count {
                    dequantize_row(Isa::GENERIC, &w, first + n, &mut row);
                    for t in 0..tokens {
                        for c in 0..cols {
                            let sum = &mut exact[t * cols + c];
                            *sum = q[t * (count + 2) + n].mul_add(row[c], *sum);
                        }
                    }
                }
                for isa in Isa::supported() {
                    let mut out = vec![f32::NAN; tokens * stride];
                    let mut scratch = vec![f32::NAN; scratch_len(cols)];
                    let q = Rows::new(&q, tokens, count, count + 2);
                    let mut to = RowsMut::new(&mut out, tokens, cols, stride);
                    absorb(isa, &w, first..first + count, q, &mut to, &mut scratch);
                    let got: Vec<f32> = out.chunks(stride).flat_map(|row| row[..cols].to_vec()).collect();
                    assert_eq!(bits(&got), bits(&exact), "{format:?}, {tokens} tokens, {count} rows of {cols}");
                }
            }
        }
    }

    /// Also where columns are no whole registers.
    #[test]
    fn columns_beyond_whole_registers_are_chains_too() {
        let (tokens, count, cols) = (5, 20, 41);
        let values = random(count * cols, 1);
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let w = Matrix::new(WeightFormat::Float(Float::F32), count, cols, [&bytes[..]]).unwrap();
        let q = random(tokens * count, 2);
        for isa in Isa::supported() {
            let mut out = vec![0.0; tokens * cols];
            let mut to = RowsMut::dense(&mut out, cols);
            absorb(isa, &w, 0..count, Rows::dense(&q, count), &mut to, &mut vec![0.0; scratch_len(cols)]);
            for (i, got) in out.iter().enumerate() {
                let chain =
                    (0..count).fold(0f32, |sum, n| q[i / cols * count + n].mul_add(values[n * cols + i % cols], sum));
                assert_eq!(got.to_bits(), chain.to_bits());
            }
        }
    }
}
