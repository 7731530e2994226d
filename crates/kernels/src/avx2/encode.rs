use std::arch::x86_64::*;

use super::Avx2x16;
use crate::input::ORDER;
use crate::instructions::encode::Encode;

/// Two eights to their order.
#[inline(always)]
pub(crate) unsafe fn ordered(bytes: __m128i) -> __m128i {
    const INDEX: [u8; 16] = {
        let (mut index, mut j) = ([0; 16], 0);
        while j < 16 {
            index[j] = (j / 8 * 8 + ORDER[j % 8]) as u8;
            j += 1;
        }
        index
    };
    // SAFETY: the caller runs with SSSE3.
    unsafe { _mm_shuffle_epi8(bytes, _mm_loadu_si128(INDEX.as_ptr().cast())) }
}

// SAFETY (all): the caller vouches for the instruction set and for the pointers, see `Encode`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Encode for Avx2x16 {
    #[inline(always)]
    unsafe fn greatest_size(p: *const f32) -> f32 {
        unsafe {
            let load = |i: usize| _mm256_and_si256(_mm256_loadu_si256(p.add(i).cast()), _mm256_set1_epi32(0x7fff_ffff));
            let m = _mm256_max_epi32(_mm256_max_epi32(load(0), load(8)), _mm256_max_epi32(load(16), load(24)));
            let m = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m));
            let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b1110>(m));
            let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b01>(m));
            f32::from_bits(_mm_cvtsi128_si32(m) as u32)
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) -> i32 {
        unsafe {
            // NaN converts to i32::MIN, whose low byte is 0; the packs saturate, so the low bytes are cut out before.
            let low = |v| _mm256_and_si256(_mm256_cvtps_epi32(v), _mm256_set1_epi32(0xff));
            let words = _mm256_permute4x64_epi64::<0b11011000>(_mm256_packus_epi32(low(self.0), low(self.1)));
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(p.cast(), ordered(bytes));
            let sum = _mm256_madd_epi16(_mm256_cvtepi8_epi16(bytes), _mm256_set1_epi16(1));
            let s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
            let s = _mm_add_epi32(s, _mm_shuffle_epi32::<0b1110>(s));
            _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32::<0b01>(s)))
        }
    }
}
