//! Integer groups with AVX2: each row is unpacked to bytes once, then four groups at a time, one per lane of the accumulator.

use super::{Groups, Integers};
use crate::lanes::Avx2x16;
use crate::matmul::{Matrix, Scratch};
use std::arch::x86_64::*;

impl Integers for Avx2x16 {
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        // `vpmaddubsw` adds two products in 16 bits: 2 * 127 * 127 fits, 8-bit q do not.
        let narrow = super::affine_of(w).bits < 8;
        let dot = |q: &[u8], s: &[f32], b: &[f32], xq: &[i8], sx: &[f32], mx: &[f32]| {
            // SAFETY: `row_by_row` hands in a row and a token of whole groups; the shell has AVX2 and FMA.
            unsafe { if narrow { dot::<true>(q, s, b, xq, sx, mx) } else { dot::<false>(q, s, b, xq, sx, mx) } }
        };
        // SAFETY: the caller's.
        unsafe { super::row_by_row::<Self>(w, x, tokens, tile, scratch, dot) }
    }
}

/// The partial sums of group g.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn group<const NARROW: bool>(q: *const u8, x: *const i8) -> __m256i {
    // SAFETY: the caller vouches for 32 bytes at both.
    unsafe {
        if NARROW {
            let pairs = _mm256_maddubs_epi16(_mm256_loadu_si256(q.cast()), _mm256_loadu_si256(x.cast()));
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        } else {
            let half = |i: usize| {
                let q = _mm256_cvtepu8_epi16(_mm_loadu_si128(q.add(i).cast()));
                _mm256_madd_epi16(q, _mm256_cvtepi8_epi16(_mm_loadu_si128(x.add(i).cast())))
            };
            _mm256_add_epi32(half(0), half(16))
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn dot<const NARROW: bool>(q: &[u8], s: &[f32], b: &[f32], xq: &[i8], sx: &[f32], mx: &[f32]) -> f32 {
    let groups = s.len();
    // SAFETY: groups lie inside the slices; the last few are loaded and multiplied under a mask.
    unsafe {
        let at = |g: usize| group::<NARROW>(q.as_ptr().add(g * 32), xq.as_ptr().add(g * 32));
        let mut acc = _mm_setzero_ps();
        let mut g = 0;
        while g + 4 <= groups {
            let pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(at(g), at(g + 1)), _mm256_hadd_epi32(at(g + 2), at(g + 3)));
            let sums = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
            let load = |p: &[f32]| _mm_loadu_ps(p.as_ptr().add(g));
            acc = _mm_fmadd_ps(_mm_mul_ps(load(s), load(sx)), _mm_cvtepi32_ps(sums), acc);
            acc = _mm_fmadd_ps(load(b), load(mx), acc);
            g += 4;
        }
        let mut lanes = [0f32; 4];
        _mm_storeu_ps(lanes.as_mut_ptr(), acc);
        while g < groups {
            let v = at(g);
            let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b1110>(v));
            let sum = _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<0b01>(v)));
            let lane = &mut lanes[g % 4];
            *lane = (s[g] * sx[g]).mul_add(sum as f32, *lane);
            *lane = b[g].mul_add(mx[g], *lane);
            g += 1;
        }
        (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
    }
}
