//! A few tokens go through `integers_decode`, which streams the rows as they lie; some through `integers_batch` and many through
//! `integers_prefill`, which both rearrange a tile of rows in cache, packed or unpacked. Where there is AMX, `matmul` gives many tokens to `integers_amx` instead.

use super::integers_prefill::Vectors;
use super::{Avx512x16, integers_amx, integers_batch, integers_decode, integers_prefill};
use crate::instructions::int8_dot::{Groups, Integers};
use crate::matrix::Matrix;
use crate::scratch::Scratch;

/// Up to this many tokens stream through the rows, as fast as these come; from there on it pays that a register of rows needs no sum over its lanes.
pub(super) const FEW: usize = 12;
/// Up to this many tokens four bits stay packed in the tile; from there on it is read often enough to be unpacked once.
pub const SOME: usize = 32;

impl Integers for Avx512x16 {
    fn scratch_bytes(cols: usize, tokens: usize) -> usize {
        integers_decode::scratch_bytes(cols, tokens)
            .max(integers_batch::scratch_bytes(cols, tokens))
            .max(integers_prefill::scratch_bytes::<Vectors>(cols, tokens))
            .max(integers_amx::scratch_bytes(cols, tokens))
    }
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        // SAFETY: the caller's.
        unsafe {
            if tokens.len() <= FEW {
                integers_decode::product(w, x, tokens, tile, scratch);
            } else if tokens.len() <= SOME {
                integers_batch::product(w, x, tokens, tile, scratch);
            } else {
                integers_prefill::product::<Vectors>(w, x, tokens, tile, scratch);
            }
        }
    }
}
