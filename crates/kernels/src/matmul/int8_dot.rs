//! Integer groups: weights in groups times activations in int8.

use crate::Isa;
#[cfg(target_arch = "x86_64")]
use crate::avx2::{int8_dot::FEW, int8_tile};
#[cfg(target_arch = "x86_64")]
use crate::avx512::{int8_amx, int8_batch::SOME};
use crate::dispatch::{greatest, simd};
use crate::format::Grouped;
#[cfg(target_arch = "x86_64")]
use crate::input::GROUP;
use crate::instructions::int8_dot::{Groups, Int8Dot};
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::matrix::Matrix;
use crate::scratch::Scratch;

#[inline(always)]
unsafe fn grouped_lanes<V: Int8Dot>(w: Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: `matmul` checked the lengths; the caller vouches for the instruction set.
    unsafe { V::product(&w, x, tokens, tile, scratch) }
}

simd! {
    fn in_vectors(w: Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) = grouped_lanes
}

/// Weights in groups times activations in groups.
pub(super) fn grouped(isa: Isa, w: Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    #[cfg(target_arch = "x86_64")]
    if isa.level() == Level::Amx && tokens.len() > SOME && w.grouped().part_columns() == GROUP {
        // SAFETY: `matmul` checked the lengths, and an `Isa` of this level is made only where all of it was found.
        return unsafe { int8_amx::product(&w, x, tokens, tile, scratch) };
    }
    #[cfg(target_arch = "x86_64")]
    if isa.level() == Level::AvxVnni && tokens.len() > FEW {
        // SAFETY: as above.
        return unsafe { int8_tile::product_vnni(&w, x, tokens, tile, scratch) };
    }
    in_vectors(isa, w, x, tokens, tile, scratch);
}

pub(super) fn scratch_bytes(format: Grouped, cols: usize, tokens: usize) -> usize {
    greatest!(Int8Dot::scratch_bytes(cols, tokens, format))
}
