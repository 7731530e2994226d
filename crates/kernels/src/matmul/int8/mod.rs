//! Integer groups: affine weights times activations in int8.
//!
//! The integer sum of an activation group (32 columns) is exact in any order, so kernels are free to lay out the bytes as they like; the float
//! sequence over the groups is fixed: the sums of a weight group are joined with their activations' scales, and then take one fma with the
//! weight group's scale and one with its bias; four accumulators per output, weight group w to accumulator w mod 4. With AVX-512 a few
//! tokens go through `avx512_decode`, which streams the rows once, and many through `avx512_prefill`, which rearranges a tile of rows in cache.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512_decode;
#[cfg(target_arch = "x86_64")]
mod avx512_prefill;

use crate::affine::{self, Unpack};
use crate::form::{Float, Form};
use crate::input::{GROUP, ORDER};
use crate::lanes::Generic16;
use crate::matrix::Matrix;
use crate::scratch::Scratch;
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

impl Affine {
    /// Activation groups of a weight group: 1, 2 or 4.
    fn parts(self) -> usize {
        self.group / GROUP
    }
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
    let by_row = crate::scratch::cut_bytes(row_sizes(cols, tokens));
    #[cfg(target_arch = "x86_64")]
    let by_row =
        by_row.max(avx512_decode::scratch_bytes(cols, tokens)).max(avx512_prefill::scratch_bytes(cols, tokens));
    by_row
}

fn affine_of(w: &Matrix) -> Affine {
    let Form::Affine { bits, group, scale } = w.form else { unreachable!("only affine weights have groups") };
    Affine { bits, group: group as usize, scale }
}

/// One token's scales as the sequence over the weight groups wants them.
#[derive(Clone, Copy)]
struct TokenScales<'a> {
    /// [parts, weight groups]
    sx: &'a [f32],
    /// `mx` summed over each weight group: [weight groups]
    mx: &'a [f32],
}

/// One unpacked row, its scales and its biases, and all tokens' scales.
fn row_sizes(cols: usize, tokens: usize) -> [usize; 4] {
    [cols, cols / 8, cols / 8, tokens * cols / 4]
}

/// The bytes of each eight in the order of the activations.
#[inline(always)]
fn reorder(q: &mut [u8]) {
    for eight in q.as_chunks_mut::<8>().0 {
        *eight = ORDER.map(|i| eight[i]);
    }
}

/// Unpacks row after row and hands each to `dot(q, s, b, xq, scales)`, token after token. `s`, `b`: [weight groups].
#[inline(always)]
unsafe fn row_by_row<V: Unpack>(
    w: &Matrix,
    x: Groups,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
    dot: impl Fn(&[u8], &[f32], &[f32], &[i8], TokenScales) -> f32,
) {
    let form = affine_of(w);
    let (parts, groups) = (form.parts(), w.cols / form.group);
    let [q, s, b, scales] = scratch.cut(row_sizes(w.cols, tokens.len()));
    // SAFETY: the scratch holds a row of q with its scales and biases, and up to two numbers per 32 columns of each token.
    let (q, s, b, scales) = unsafe {
        (
            std::slice::from_raw_parts_mut(q, w.cols),
            std::slice::from_raw_parts_mut(s.cast::<f32>(), groups),
            std::slice::from_raw_parts_mut(b.cast::<f32>(), groups),
            std::slice::from_raw_parts_mut(scales.cast::<f32>(), tokens.len() * (parts + 1) * groups),
        )
    };
    for (out, &token) in scales.chunks_exact_mut((parts + 1) * groups).zip(tokens) {
        let at = token as usize * groups * parts;
        let (sx, mx) = (&x.scales[at..][..groups * parts], &x.sums[at..][..groups * parts]);
        for g in 0..groups {
            for i in 0..parts {
                out[i * groups + g] = sx[g * parts + i];
            }
            out[parts * groups + g] = weight_group_sum(&mx[g * parts..][..parts]);
        }
    }
    for r in 0..w.rows {
        // SAFETY: a row of q; the caller vouches for the instruction set.
        unsafe { affine::unpack_lanes::<V>(form.bits, w.row(r).as_ptr(), q.as_mut_ptr(), w.cols) };
        reorder(q);
        let (row_s, row_b) = w.row_scales(r);
        for g in 0..groups {
            (s[g], b[g]) = (form.scale.read(row_s, g), form.scale.read(row_b, g));
        }
        for (i, &token) in tokens.iter().enumerate() {
            let xq = &x.q[token as usize * w.cols..][..w.cols];
            let (sx, mx) = scales[i * (parts + 1) * groups..][..(parts + 1) * groups].split_at(parts * groups);
            tile[i * w.rows + r] = dot(q, s, b, xq, TokenScales { sx, mx });
        }
    }
}

/// `mx` of a weight group from those of its activation groups.
#[inline(always)]
fn weight_group_sum(mx: &[f32]) -> f32 {
    mx[1..].iter().fold(mx[0], |sum, mx| sum + mx)
}

/// Weight group g of a row, added to its accumulator.
#[inline(always)]
fn add_group(acc: &mut f32, g: usize, s: &[f32], b: &[f32], scales: TokenScales, sum: impl Fn(usize) -> i32) {
    let (groups, parts) = (s.len(), scales.sx.len() / s.len());
    let mut t = scales.sx[g] * sum(g * parts) as f32;
    for i in 1..parts {
        t = scales.sx[i * groups + g].mul_add(sum(g * parts + i) as f32, t);
    }
    *acc = s[g].mul_add(t, *acc);
    *acc = b[g].mul_add(scales.mx[g], *acc);
}

impl Integers for Generic16 {
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        let dot = |q: &[u8], s: &[f32], b: &[f32], xq: &[i8], scales: TokenScales| {
            let sum = |g: usize| {
                let group = g * GROUP..(g + 1) * GROUP;
                q[group.clone()].iter().zip(&xq[group]).map(|(&q, &x)| q as i32 * x as i32).sum()
            };
            let mut acc = [0f32; 4];
            for g in 0..s.len() {
                add_group(&mut acc[g % 4], g, s, b, scales, sum);
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
