//! Chooses a kernel by the number of tokens. `int8_rows` (few) streams rows; of MXFP4, `mxfp4` does. `int8_tile` (many) rearranges a tile of rows in cache.

use super::{Avx2x16, int8_rows, int8_tile, mxfp4};
use crate::format::Grouped;
use crate::instructions::int8_dot::{Groups, Int8Dot};
use crate::matrix::Matrix;
use crate::scratch::Scratch;

pub use super::int8_rows::FEW;

impl Int8Dot for Avx2x16 {
    fn scratch_bytes(cols: usize, tokens: usize, format: Grouped) -> usize {
        int8_rows::scratch_bytes(cols, tokens)
            .max(mxfp4::scratch_bytes(cols, tokens))
            .max(int8_tile::scratch_bytes(cols, tokens, format))
    }
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        // SAFETY: the caller's.
        unsafe {
            if tokens.len() <= mxfp4::FEW && mxfp4::takes(w.format) {
                mxfp4::product(w, x, tokens, tile, scratch);
            } else if tokens.len() > FEW {
                int8_tile::product(w, x, tokens, tile, scratch);
            } else {
                int8_rows::product(w, x, tokens, tile, scratch);
            }
        }
    }
}
