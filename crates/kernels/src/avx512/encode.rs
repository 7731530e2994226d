use std::arch::x86_64::*;

use super::Avx512x16;
use crate::avx2::encode::ordered;
use crate::instructions::encode::Encode;

// SAFETY (all): the caller vouches for the instruction set and for the pointers, see `Encode`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Encode for Avx512x16 {
    #[inline(always)]
    unsafe fn greatest_size(p: *const f32) -> f32 {
        unsafe {
            let load = |i: usize| _mm512_and_si512(_mm512_loadu_si512(p.add(i).cast()), _mm512_set1_epi32(0x7fff_ffff));
            f32::from_bits(_mm512_reduce_max_epi32(_mm512_max_epi32(load(0), load(16))) as u32)
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) -> i32 {
        unsafe {
            // NaN converts to i32::MIN, which truncates to 0.
            let bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0));
            _mm_storeu_si128(p.cast(), ordered(bytes));
            _mm512_reduce_add_epi32(_mm512_cvtepi8_epi32(bytes))
        }
    }
}
