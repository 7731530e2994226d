use std::arch::x86_64::*;

use super::Avx512x16;
use crate::avx2::greatest_of_two;
use crate::instructions::int11_dot::{Int11Dot, TO_INTEGER};

// SAFETY (all): the caller vouches for the instruction set and for the pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Int11Dot for Avx512x16 {
    type Sums = __m512i;
    const MANY: bool = true;
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
    #[inline(always)]
    unsafe fn greatest_of_runs(w: *const u16) -> [u16; 2] {
        unsafe {
            let sizes = |i: usize| _mm512_and_si512(_mm512_loadu_si512(w.add(i).cast()), _mm512_set1_epi16(0x7fff));
            let all = _mm512_max_epu16(sizes(0), sizes(32));
            let runs = _mm256_max_epu16(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
            greatest_of_two(runs)
        }
    }
    #[inline(always)]
    unsafe fn round_bf16(w: *const u16, by: [f32; 2]) -> Self {
        unsafe {
            let (w, magic) = (_mm512_loadu_si512(w.cast()), _mm512_set1_ps(TO_INTEGER));
            let by = _mm512_mask_blend_ps(0xf0f0, _mm512_set1_ps(by[0]), _mm512_set1_ps(by[1]));
            let even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
            let odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(0xffff_0000u32 as i32)));
            let even = _mm512_castps_si512(_mm512_fmadd_ps(even, by, magic));
            let odd = _mm512_slli_epi32(_mm512_castps_si512(_mm512_fmadd_ps(odd, by, magic)), 16);
            Avx512x16(_mm512_castsi512_ps(_mm512_mask_mov_epi16(even, 0xaaaa_aaaa, odd)))
        }
    }
    #[inline(always)]
    unsafe fn round_f16(w: *const u16, by: [f32; 2]) -> Self {
        unsafe {
            let by = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(by[0]), _mm512_set1_ps(by[1]));
            let rounded = |i: usize| {
                let w = _mm512_cvtph_ps(_mm256_loadu_si256(w.add(i).cast()));
                _mm512_cvtepi32_epi16(_mm512_castps_si512(_mm512_fmadd_ps(w, by, _mm512_set1_ps(TO_INTEGER))))
            };
            let both = _mm512_inserti64x4(_mm512_castsi256_si512(rounded(0)), rounded(16), 1);
            Avx512x16(_mm512_castsi512_ps(both))
        }
    }
}
