//! Chooses a kernel: a few tokens times MXFP4 have one of their own (`mxfp4`), all others stream rows (`int8_rows`).

use super::{Avx2x16, int8_rows, mxfp4};
use crate::format::Grouped;
use crate::instructions::int8_dot::{Groups, Int8Dot};
use crate::matrix::Matrix;
use crate::scratch::Scratch;

impl Int8Dot for Avx2x16 {
    fn scratch_bytes(cols: usize, tokens: usize, _: Grouped) -> usize {
        int8_rows::scratch_bytes(cols, tokens).max(mxfp4::scratch_bytes(cols, tokens))
    }
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        // SAFETY: the caller's.
        unsafe {
            if tokens.len() <= mxfp4::FEW && mxfp4::takes(w.format) {
                mxfp4::product(w, x, tokens, tile, scratch);
            } else {
                int8_rows::product(w, x, tokens, tile, scratch);
            }
        }
    }
}
