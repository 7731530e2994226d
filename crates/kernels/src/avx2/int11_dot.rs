use std::arch::x86_64::*;

use super::Avx2x16;
use crate::instructions::int11_dot::Int11Dot;

// SAFETY (all): the caller vouches for the instruction set and for the pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Int11Dot for Avx2x16 {
    type Sums = (__m256i, __m256i);
    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        unsafe { (_mm256_setzero_si256(), _mm256_setzero_si256()) }
    }
    #[inline(always)]
    unsafe fn widen_pairs(p: *const u8) -> Self {
        unsafe {
            let half = |i: usize| _mm256_castsi256_ps(_mm256_cvtepu8_epi16(_mm_loadu_si128(p.add(i).cast())));
            Avx2x16(half(0), half(16))
        }
    }
    #[inline(always)]
    unsafe fn add_pairs(sums: Self::Sums, w: Self, x: *const i16) -> Self::Sums {
        unsafe {
            let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
            let add = |sum, w| _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_castps_si256(w), x));
            (add(sums.0, w.0), add(sums.1, w.1))
        }
    }
    #[inline(always)]
    unsafe fn to_f32(sums: Self::Sums) -> Self {
        unsafe { Avx2x16(_mm256_cvtepi32_ps(sums.0), _mm256_cvtepi32_ps(sums.1)) }
    }
}
