//! Integer groups: affine weights times activations in int8.

use crate::dispatch::{greatest, simd};
use crate::instructions::integers::{Groups, Integers};
use crate::matrix::Matrix;
use crate::scratch::Scratch;

#[inline(always)]
unsafe fn affine_lanes<V: Integers>(w: Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: `matmul` checked the lengths; the caller vouches for the instruction set.
    unsafe { V::product(&w, x, tokens, tile, scratch) }
}

simd! {
    /// Affine weights times int8 groups.
    pub(super) fn affine(w: Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) = affine_lanes
}

pub(super) fn scratch_bytes(cols: usize, tokens: usize) -> usize {
    greatest!(Integers::scratch_bytes(cols, tokens))
}
