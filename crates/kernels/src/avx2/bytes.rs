//! Bytes are widened to words first: products of unsigned and signed bytes in pairs would saturate.

use std::arch::x86_64::*;

use super::Avx2x16;
use crate::instructions::bytes::Bytes;

/// The even and the odd bytes of four, as words.
#[inline(always)]
unsafe fn unsigned(x: __m256i) -> (__m256i, __m256i) {
    // SAFETY: the caller runs with AVX2.
    unsafe { (_mm256_and_si256(x, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(x)) }
}

#[inline(always)]
unsafe fn signed(x: __m256i) -> (__m256i, __m256i) {
    // SAFETY: the caller runs with AVX2.
    unsafe { (_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x)) }
}

#[inline(always)]
unsafe fn multiply(sum: __m256i, a: (__m256i, __m256i), b: (__m256i, __m256i)) -> __m256i {
    // SAFETY: the caller runs with AVX2.
    unsafe {
        let products = _mm256_add_epi32(_mm256_madd_epi16(a.0, b.0), _mm256_madd_epi16(a.1, b.1));
        _mm256_add_epi32(sum, products)
    }
}

// SAFETY (all): the caller vouches for the instruction set and for the pointers, see `Bytes`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Bytes for Avx2x16 {
    type Sums = [__m256i; 2];
    type Quads = [__m256i; 2];
    #[inline(always)]
    unsafe fn start(sum: i32) -> Self::Sums {
        unsafe { [_mm256_set1_epi32(sum); 2] }
    }
    #[inline(always)]
    unsafe fn load_sums(p: *const i32, more: i32) -> Self::Sums {
        unsafe {
            let more = _mm256_set1_epi32(more);
            let low = _mm256_add_epi32(_mm256_loadu_si256(p.cast()), more);
            [low, _mm256_add_epi32(_mm256_loadu_si256(p.add(8).cast()), more)]
        }
    }
    #[inline(always)]
    unsafe fn store_sums(sums: Self::Sums, p: *mut i32) {
        unsafe {
            _mm256_storeu_si256(p.cast(), sums[0]);
            _mm256_storeu_si256(p.add(8).cast(), sums[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_quads(p: *const u8) -> Self::Quads {
        unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())] }
    }
    #[inline(always)]
    unsafe fn multiply_unsigned(sums: Self::Sums, a: Self::Quads, b: i32) -> Self::Sums {
        unsafe {
            let b = signed(_mm256_set1_epi32(b));
            [multiply(sums[0], unsigned(a[0]), b), multiply(sums[1], unsigned(a[1]), b)]
        }
    }
    #[inline(always)]
    unsafe fn multiply_signed(sums: Self::Sums, a: Self::Quads, b: i32) -> Self::Sums {
        unsafe {
            let b = unsigned(_mm256_set1_epi32(b));
            [multiply(sums[0], signed(a[0]), b), multiply(sums[1], signed(a[1]), b)]
        }
    }
    #[inline(always)]
    unsafe fn from_sums(sums: Self::Sums) -> Self {
        unsafe { Avx2x16(_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])) }
    }
    #[inline(always)]
    unsafe fn store_flipped(self, p: *mut u8) {
        unsafe {
            let bits = _mm256_set1_epi8(-128);
            _mm256_storeu_si256(p.cast(), _mm256_xor_si256(_mm256_castps_si256(self.0), bits));
            _mm256_storeu_si256(p.add(32).cast(), _mm256_xor_si256(_mm256_castps_si256(self.1), bits));
        }
    }
    #[inline(always)]
    unsafe fn store_rounded_u8(self, p: *mut u8) {
        unsafe {
            // The packs saturate, which changes nothing, and work within halves, which the permutation undoes.
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
            let words = _mm256_permute4x64_epi64::<0b11011000>(words);
            let high = _mm256_extracti128_si256::<1>(words);
            _mm_storeu_si128(p.cast(), _mm_packus_epi16(_mm256_castsi256_si128(words), high));
        }
    }
    #[inline(always)]
    unsafe fn store_rounded_u16(self, high: *mut u8, low: *mut u8) {
        unsafe {
            let words = _mm256_packus_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
            let words = _mm256_permute4x64_epi64::<0b11011000>(words);
            let (even, odd) = (_mm256_and_si256(words, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(words));
            let upper = _mm256_extracti128_si256::<1>(odd);
            _mm_storeu_si128(high.cast(), _mm_packus_epi16(_mm256_castsi256_si128(odd), upper));
            let upper = _mm256_extracti128_si256::<1>(even);
            _mm_storeu_si128(low.cast(), _mm_packus_epi16(_mm256_castsi256_si128(even), upper));
        }
    }
    #[inline(always)]
    unsafe fn join_sums(high: Self::Sums, low: Self::Sums) -> Self::Sums {
        unsafe {
            let high = [_mm256_slli_epi32::<8>(high[0]), _mm256_slli_epi32::<8>(high[1])];
            [_mm256_add_epi32(high[0], low[0]), _mm256_add_epi32(high[1], low[1])]
        }
    }
    #[inline(always)]
    unsafe fn interleave(rows: [*const u8; 4], p: *mut u8) {
        unsafe {
            let [a, b, c, d] = [rows[0], rows[1], rows[2], rows[3]].map(|row| _mm_loadu_si128(row.cast()));
            let (low, high) = (_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b));
            let (low_2, high_2) = (_mm_unpacklo_epi8(c, d), _mm_unpackhi_epi8(c, d));
            _mm_storeu_si128(p.cast(), _mm_unpacklo_epi16(low, low_2));
            _mm_storeu_si128(p.add(16).cast(), _mm_unpackhi_epi16(low, low_2));
            _mm_storeu_si128(p.add(32).cast(), _mm_unpacklo_epi16(high, high_2));
            _mm_storeu_si128(p.add(48).cast(), _mm_unpackhi_epi16(high, high_2));
        }
    }
}
