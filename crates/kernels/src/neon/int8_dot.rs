//! Integer groups with NEON: chooses a kernel by the number of tokens and the format.

use super::int8_rows::FEW;
use super::{Neon16, Products, int8_rows, int8_tile};
use crate::format::Grouped;
use crate::instructions::int8_dot::{Groups, Int8Dot};
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

impl<P: Products> Int8Dot for Neon16<P> {
    fn scratch_bytes(cols: usize, tokens: usize, _format: Grouped) -> usize {
        cut_bytes(int8_rows::sizes(cols, tokens)).max(cut_bytes(int8_tile::sizes(cols, tokens)))
    }
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        // SAFETY: the caller's.
        unsafe {
            if P::MATRICES && tokens.len() > FEW {
                int8_tile::product::<P>(w, x, tokens, tile, scratch);
            } else {
                int8_rows::product::<P>(w, x, tokens, tile, scratch);
            }
        }
    }
}
