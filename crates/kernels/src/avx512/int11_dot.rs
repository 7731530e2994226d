use std::arch::x86_64::*;

use super::Avx512x16;
use crate::instructions::int11_dot::Int11Dot;

// SAFETY (all): the caller vouches for the instruction set and for the pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Int11Dot for Avx512x16 {
    type Sums = __m512i;
    #[inline(always)]
    unsafe fn zero() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn widen_pairs(p: *const u8) -> Self {
        unsafe { Avx512x16(_mm512_castsi512_ps(_mm512_cvtepu8_epi16(_mm256_loadu_si256(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn add_pairs(sums: __m512i, w: Self, x: *const i16) -> __m512i {
        unsafe {
            _mm512_dpwssd_epi32(sums, _mm512_castps_si512(w.0), _mm512_set1_epi32(x.cast::<i32>().read_unaligned()))
        }
    }
    #[inline(always)]
    unsafe fn to_f32(sums: __m512i) -> Self {
        unsafe { Avx512x16(_mm512_cvtepi32_ps(sums)) }
    }
}
