use std::arch::x86_64::*;

use super::Avx512x16;
use crate::instructions::bytes::Bytes;

/// Where byte i of the interleaved 64 comes from, rows one after the other.
const INTERLEAVED: [u8; 64] = {
    let mut at = [0; 64];
    let mut i = 0;
    while i < 64 {
        at[i] = (i % 4 * 16 + i / 4) as u8;
        i += 1;
    }
    at
};

// SAFETY (all): the caller vouches for the instruction set and for the pointers, see `Bytes`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Bytes for Avx512x16 {
    type Sums = __m512i;
    type Quads = __m512i;
    #[inline(always)]
    unsafe fn start(sum: i32) -> Self::Sums {
        unsafe { _mm512_set1_epi32(sum) }
    }
    #[inline(always)]
    unsafe fn load_sums(p: *const i32, more: i32) -> Self::Sums {
        unsafe { _mm512_add_epi32(_mm512_loadu_si512(p.cast()), _mm512_set1_epi32(more)) }
    }
    #[inline(always)]
    unsafe fn store_sums(sums: Self::Sums, p: *mut i32) {
        unsafe { _mm512_storeu_si512(p.cast(), sums) }
    }
    #[inline(always)]
    unsafe fn load_quads(p: *const u8) -> Self::Quads {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn multiply_unsigned(sums: Self::Sums, a: Self::Quads, b: i32) -> Self::Sums {
        unsafe { _mm512_dpbusd_epi32(sums, a, _mm512_set1_epi32(b)) }
    }
    #[inline(always)]
    unsafe fn multiply_signed(sums: Self::Sums, a: Self::Quads, b: i32) -> Self::Sums {
        unsafe { _mm512_dpbusd_epi32(sums, _mm512_set1_epi32(b), a) }
    }
    #[inline(always)]
    unsafe fn from_sums(sums: Self::Sums) -> Self {
        unsafe { Avx512x16(_mm512_cvtepi32_ps(sums)) }
    }
    #[inline(always)]
    unsafe fn store_flipped(self, p: *mut u8) {
        unsafe {
            let flipped = _mm512_xor_si512(_mm512_castps_si512(self.0), _mm512_set1_epi8(-128));
            _mm512_storeu_si512(p.cast(), flipped);
        }
    }
    #[inline(always)]
    unsafe fn store_rounded_u8(self, p: *mut u8) {
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(self.0))) }
    }
    #[inline(always)]
    unsafe fn store_rounded_u16(self, high: *mut u8, low: *mut u8) {
        unsafe {
            let q = _mm512_cvtps_epi32(self.0);
            _mm_storeu_si128(high.cast(), _mm512_cvtepi32_epi8(_mm512_srli_epi32::<8>(q)));
            _mm_storeu_si128(low.cast(), _mm512_cvtepi32_epi8(q));
        }
    }
    #[inline(always)]
    unsafe fn join_sums(high: Self::Sums, low: Self::Sums) -> Self::Sums {
        unsafe { _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low) }
    }
    #[inline(always)]
    unsafe fn interleave(rows: [*const u8; 4], p: *mut u8) {
        unsafe {
            let mut four = _mm512_castsi128_si512(_mm_loadu_si128(rows[0].cast()));
            four = _mm512_inserti32x4::<1>(four, _mm_loadu_si128(rows[1].cast()));
            four = _mm512_inserti32x4::<2>(four, _mm_loadu_si128(rows[2].cast()));
            four = _mm512_inserti32x4::<3>(four, _mm_loadu_si128(rows[3].cast()));
            let order = _mm512_loadu_si512(INTERLEAVED.as_ptr().cast());
            _mm512_storeu_si512(p.cast(), _mm512_permutexvar_epi8(order, four));
        }
    }
}
