//! Products of plain f32 matrices, for whoever computes about a model rather than with it (calibration).

use std::mem::size_of_val;

use crate::isa::Isa;
use crate::matmul::{Float, Form, Input, Matrix, Scratch, matmul};

/// `out[i * rows_a + r] = dot(a[r], b[i])` for `a: [rows_a, cols]` and `b: [rows_b, cols]`, that is `out = b a^T`: `[rows_b, rows_a]`.
/// Lane sums, as all float products of `docs/numerics.md`: the same bits in every instruction set.
///
/// Panics where the lengths do not fit.
pub fn product(isa: Isa, a: &[f32], b: &[f32], cols: usize, out: &mut [f32]) {
    assert!(cols > 0 && a.len().is_multiple_of(cols) && b.len().is_multiple_of(cols), "whole rows of {cols}");
    let (rows, tokens) = (a.len() / cols, b.len() / cols);
    assert_eq!(out.len(), rows * tokens, "the product is [{tokens}, {rows}]");
    // SAFETY: floats seen as bytes: every byte is initialised, and bytes need no alignment.
    let bytes = unsafe { std::slice::from_raw_parts(a.as_ptr().cast::<u8>(), size_of_val(a)) };
    let w = Matrix::new(Form::Float(Float::F32), rows, cols, bytes, &[], &[]).expect("the length is that of its rows");
    let tokens: Vec<u32> = (0..tokens as u32).collect();
    matmul(isa, &w, 0..rows, Input::F32(b), &tokens, out, &mut Scratch::default());
}

/// `[cols, rows]` of `x: [rows, cols]`, in tiles that stay in cache.
pub fn transpose(x: &[f32], cols: usize, out: &mut Vec<f32>) {
    const TILE: usize = 32;
    assert!(cols > 0 && x.len().is_multiple_of(cols), "whole rows of {cols}");
    let rows = x.len() / cols;
    out.clear();
    out.resize(x.len(), 0.0);
    for r0 in (0..rows).step_by(TILE) {
        for c0 in (0..cols).step_by(TILE) {
            for r in r0..rows.min(r0 + TILE) {
                for c in c0..cols.min(c0 + TILE) {
                    out[c * rows + r] = x[r * cols + c];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_and_transposes_are_what_their_names_say() {
        let (ra, rb, k) = (5, 37, 70);
        let a: Vec<f32> = (0..ra * k).map(|i| (i * 7 % 13) as f32 - 6.0).collect();
        let b: Vec<f32> = (0..rb * k).map(|i| (i * 5 % 11) as f32 - 5.0).collect();
        for isa in Isa::supported() {
            let mut out = vec![0.0; ra * rb];
            product(isa, &a, &b, k, &mut out);
            for i in 0..rb {
                for r in 0..ra {
                    let exact: f32 = (0..k).map(|c| a[r * k + c] * b[i * k + c]).sum();
                    assert_eq!(out[i * ra + r], exact);
                }
            }
        }
        let mut t = Vec::new();
        transpose(&b, k, &mut t);
        assert!((0..rb).all(|r| (0..k).all(|c| t[c * rb + r] == b[r * k + c])));
    }
}
