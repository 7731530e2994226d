//! A few tokens go through `integers_decode`, which streams the rows once, and many through `integers_prefill`, which rearranges a tile of rows in cache.

use super::{Avx512x16, integers_decode, integers_prefill};
use crate::instructions::integers::{Groups, Integers};
use crate::matrix::Matrix;
use crate::scratch::Scratch;

/// Up to this many tokens stream through the rows; from there on a tile of rows in cache pays.
pub(super) const FEW: usize = 12;

impl Integers for Avx512x16 {
    fn scratch_bytes(cols: usize, tokens: usize) -> usize {
        integers_decode::scratch_bytes(cols, tokens).max(integers_prefill::scratch_bytes(cols, tokens))
    }
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        // SAFETY: the caller's.
        unsafe {
            if tokens.len() <= FEW {
                integers_decode::product(w, x, tokens, tile, scratch);
            } else {
                integers_prefill::product(w, x, tokens, tile, scratch);
            }
        }
    }
}
