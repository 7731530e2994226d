//! Chooses a kernel by the number of tokens. `int8_decode` (few) streams the packed rows, and `block_decode` rows of blocks. `int8_batch` (some) and `int8_prefill` (many) rearrange a
//! tile of rows in cache, packed or unpacked. With AMX, `matmul` gives many tokens to `int8_amx` instead.

use super::block_decode::FEW as FEW_OF_BLOCKS;
use super::int8_batch::SOME;
use super::int8_decode::FEW;
use super::int8_prefill::Vectors;
use super::{Avx512x16, block_decode, int8_amx, int8_batch, int8_decode, int8_prefill};
use crate::format::Grouped;
use crate::instructions::int8_dot::{Groups, Int8Dot};
use crate::matrix::Matrix;
use crate::scratch::Scratch;

impl Int8Dot for Avx512x16 {
    fn scratch_bytes(cols: usize, tokens: usize, format: Grouped) -> usize {
        int8_decode::scratch_bytes(cols, tokens)
            .max(block_decode::scratch_bytes(cols, tokens))
            .max(int8_batch::scratch_bytes(cols, tokens, format))
            .max(int8_prefill::scratch_bytes::<Vectors>(cols, tokens, format))
            .max(int8_amx::scratch_bytes(cols, tokens, format))
    }
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        // SAFETY: the caller's.
        unsafe {
            if w.format.is_unpacked() && tokens.len() <= FEW_OF_BLOCKS {
                block_decode::product(w, x, tokens, tile, scratch);
            } else if !w.format.is_unpacked() && tokens.len() <= FEW {
                int8_decode::product(w, x, tokens, tile, scratch);
            } else if tokens.len() <= SOME {
                int8_batch::product(w, x, tokens, tile, scratch);
            } else {
                int8_prefill::product::<Vectors>(w, x, tokens, tile, scratch);
            }
        }
    }
}
