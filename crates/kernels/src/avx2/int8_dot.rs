//! Integer groups with AVX2: each row is unpacked to bytes once, then four weight groups at a time, one per lane of the accumulator. A few tokens times MXFP4 are not unpacked
//! (`mxfp4`).

use std::arch::x86_64::*;

use super::{Avx2x16, mxfp4};
use crate::format::Grouped;
use crate::input::GROUP;
use crate::instructions::int8_dot::{Groups, Int8Dot, TokenScales, add_group, row_by_row, row_scratch_bytes};
use crate::matrix::Matrix;
use crate::scratch::Scratch;

impl Int8Dot for Avx2x16 {
    fn scratch_bytes(cols: usize, tokens: usize, _: Grouped) -> usize {
        row_scratch_bytes(cols, tokens).max(mxfp4::scratch_bytes(cols, tokens))
    }
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        if tokens.len() <= mxfp4::FEW && mxfp4::takes(w.format) {
            // SAFETY: the caller's.
            return unsafe { mxfp4::product(w, x, tokens, tile, scratch) };
        }
        // `vpmaddubsw` adds two products in 16 bits: 2 * 127 * 127 fits, 8-bit q do not.
        let narrow = w.format.is_narrow();
        let dot = |q: &[u8], s: &[f32], b: &[f32], xq: &[i8], scales: TokenScales| {
            // SAFETY: `row_by_row` hands in a row and a token of whole groups; the shell has AVX2 and FMA.
            unsafe {
                if q.len() / scales.sx.len() < GROUP {
                    dot::<Halves>(q, s, b, xq, scales)
                } else if narrow {
                    dot::<Narrow>(q, s, b, xq, scales)
                } else {
                    dot::<Wide>(q, s, b, xq, scales)
                }
            }
        };
        // SAFETY: the caller's.
        unsafe { row_by_row::<Self>(w, x, tokens, tile, scratch, dot) }
    }
}

/// How the products of a part of a weight group are summed.
///
/// # Safety
/// The caller has AVX2, and vouches for so many bytes at both ends.
trait Part {
    /// Columns of a part.
    const COLUMNS: usize;
    /// Partial sums.
    unsafe fn sums(q: *const u8, x: *const i8) -> __m256i;
}

/// The partial sums of sixteen columns.
#[inline(always)]
unsafe fn sixteen(q: *const u8, x: *const i8) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let q = _mm256_cvtepu8_epi16(_mm_loadu_si128(q.cast()));
        _mm256_madd_epi16(q, _mm256_cvtepi8_epi16(_mm_loadu_si128(x.cast())))
    }
}

/// An activation group, with q of seven bits at most.
struct Narrow;

impl Part for Narrow {
    const COLUMNS: usize = GROUP;
    #[inline(always)]
    unsafe fn sums(q: *const u8, x: *const i8) -> __m256i {
        // SAFETY: the caller's.
        unsafe {
            let pairs = _mm256_maddubs_epi16(_mm256_loadu_si256(q.cast()), _mm256_loadu_si256(x.cast()));
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        }
    }
}

/// An activation group.
struct Wide;

impl Part for Wide {
    const COLUMNS: usize = GROUP;
    #[inline(always)]
    unsafe fn sums(q: *const u8, x: *const i8) -> __m256i {
        // SAFETY: the caller's.
        unsafe { _mm256_add_epi32(sixteen(q, x), sixteen(q.add(16), x.add(16))) }
    }
}

/// Half of an activation group.
struct Halves;

impl Part for Halves {
    const COLUMNS: usize = GROUP / 2;
    #[inline(always)]
    unsafe fn sums(q: *const u8, x: *const i8) -> __m256i {
        // SAFETY: the caller's.
        unsafe { sixteen(q, x) }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn dot<P: Part>(q: &[u8], s: &[f32], b: &[f32], xq: &[i8], scales: TokenScales) -> f32 {
    let (groups, parts) = (s.len(), scales.sx.len() / s.len());
    // SAFETY: groups lie inside the slices.
    unsafe {
        let at = |g: usize| P::sums(q.as_ptr().add(g * P::COLUMNS), xq.as_ptr().add(g * P::COLUMNS));
        let mut acc = _mm_setzero_ps();
        let mut g = 0;
        while g + 4 <= groups {
            // Part i of the four, times its scales.
            let part = |i: usize| {
                let at = |l: usize| at((g + l) * parts + i);
                let pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(at(0), at(1)), _mm256_hadd_epi32(at(2), at(3)));
                let sums = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
                (_mm_loadu_ps(scales.sx.as_ptr().add(i * groups + g)), _mm_cvtepi32_ps(sums))
            };
            let (sx, sums) = part(0);
            let mut t = _mm_mul_ps(sx, sums);
            for i in 1..parts {
                let (sx, sums) = part(i);
                t = _mm_fmadd_ps(sx, sums, t);
            }
            acc = _mm_fmadd_ps(_mm_loadu_ps(s.as_ptr().add(g)), t, acc);
            acc = _mm_fmadd_ps(_mm_loadu_ps(b.as_ptr().add(g)), _mm_loadu_ps(scales.mx.as_ptr().add(g)), acc);
            g += 4;
        }
        let mut lanes = [0f32; 4];
        _mm_storeu_ps(lanes.as_mut_ptr(), acc);
        let sum = |g: usize| {
            let v = at(g);
            let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b1110>(v));
            _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<0b01>(v)))
        };
        for g in g..groups {
            add_group(&mut lanes[g % 4], g, s, b, scales, sum);
        }
        (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
    }
}
