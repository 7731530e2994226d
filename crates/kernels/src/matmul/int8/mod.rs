//! Integer groups: affine weights times activations in int8.
//!
//! The integer sum of a group of 32 is exact in any order, so kernels are free to lay out the bytes as they like; the float sequence
//! over the groups is fixed: four accumulators per output, group g to accumulator g mod 4. With AVX-512 a few tokens go through
//! `avx512_decode`, which streams the rows once, and many through `avx512_prefill`, which rearranges a tile of rows in cache.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512_decode;
#[cfg(target_arch = "x86_64")]
mod avx512_prefill;

use super::{Float, Form, Matrix, Scratch};
use crate::affine::{self, Unpack};
use crate::lanes::Generic16;
use crate::simd;

/// Up to this many tokens stream through the rows; from there on a tile of rows in cache pays.
#[cfg(target_arch = "x86_64")]
const FEW: usize = 8;

/// Activations of n tokens in groups of 32.
#[derive(Clone, Copy)]
pub(super) struct Groups<'a> {
    /// [n, cols]
    pub q: &'a [i8],
    /// `sx`: [n, cols / 32]
    pub scales: &'a [f32],
    /// `mx`: [n, cols / 32]
    pub sums: &'a [f32],
}

/// The three numbers of an affine form.
#[derive(Clone, Copy)]
struct Affine {
    bits: u8,
    group: usize,
    scale: Float,
}

/// The instruction set's way through a product.
///
/// # Safety
/// As for [`Lanes`](crate::lanes::Lanes).
pub(super) trait Integers: Unpack {
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch);
}

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
    let by_row = super::scratch::cut_bytes(row_sizes(cols));
    #[cfg(target_arch = "x86_64")]
    let by_row = by_row.max(avx512_decode::scratch_bytes(cols, tokens)).max(avx512_prefill::scratch_bytes(tokens));
    let _ = tokens;
    by_row
}

fn affine_of(w: &Matrix) -> Affine {
    let Form::Affine { bits, group, scale } = w.form else { unreachable!("only affine weights have groups") };
    Affine { bits, group: group as usize, scale }
}

/// One unpacked row, and its scales and biases per 32 columns.
fn row_sizes(cols: usize) -> [usize; 3] {
    [cols, cols / 8, cols / 8]
}

/// Unpacks row after row and hands each to `dot(q, s, b, xq, sx, mx)`, token after token. `s`, `b`: [cols / 32].
#[inline(always)]
unsafe fn row_by_row<V: Unpack>(
    w: &Matrix,
    x: Groups,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
    dot: impl Fn(&[u8], &[f32], &[f32], &[i8], &[f32], &[f32]) -> f32,
) {
    let (form, groups) = (affine_of(w), w.cols / 32);
    let [q, s, b] = scratch.cut(row_sizes(w.cols));
    // SAFETY: the scratch holds a row of q and its scales and biases.
    let (q, s, b) = unsafe {
        (
            std::slice::from_raw_parts_mut(q, w.cols),
            std::slice::from_raw_parts_mut(s.cast::<f32>(), groups),
            std::slice::from_raw_parts_mut(b.cast::<f32>(), groups),
        )
    };
    for r in 0..w.rows {
        // SAFETY: a row of q; the caller vouches for the instruction set.
        unsafe { affine::unpack_lanes::<V>(form.bits, w.row(r).as_ptr(), q.as_mut_ptr(), w.cols) };
        let (scales, biases) = w.row_scales(r);
        for g in 0..groups {
            let wide = g * 32 / form.group;
            (s[g], b[g]) = (form.scale.read(scales, wide), form.scale.read(biases, wide));
        }
        for (i, &token) in tokens.iter().enumerate() {
            let token = token as usize;
            let xq = &x.q[token * w.cols..][..w.cols];
            let (sx, mx) = (&x.scales[token * groups..][..groups], &x.sums[token * groups..][..groups]);
            tile[i * w.rows + r] = dot(q, s, b, xq, sx, mx);
        }
    }
}

impl Integers for Generic16 {
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        let dot = |q: &[u8], s: &[f32], b: &[f32], xq: &[i8], sx: &[f32], mx: &[f32]| {
            let mut acc = [0f32; 4];
            for g in 0..s.len() {
                let group = g * 32..g * 32 + 32;
                let sum: i32 = q[group.clone()].iter().zip(&xq[group]).map(|(&q, &x)| q as i32 * x as i32).sum();
                let acc = &mut acc[g % 4];
                *acc = (s[g] * sx[g]).mul_add(sum as f32, *acc);
                *acc = b[g].mul_add(mx[g], *acc);
            }
            (acc[0] + acc[2]) + (acc[1] + acc[3])
        };
        // SAFETY: the caller's.
        unsafe { row_by_row::<Self>(w, x, tokens, tile, scratch, dot) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Integers for crate::lanes::Avx512x16 {
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        // SAFETY: the caller's.
        unsafe {
            if tokens.len() <= FEW {
                avx512_decode::product(w, x, tokens, tile, scratch);
            } else {
                avx512_prefill::product(w, x, tokens, tile, scratch);
            }
        }
    }
}
