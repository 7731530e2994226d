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

/// The sums of lanes four apart of `a` and of `b`, in turn: a step of [`Bytes::total16`].
#[inline(always)]
unsafe fn fold_pairs(a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: the caller runs with AVX2.
    unsafe { _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)) }
}

/// Its last step.
#[inline(always)]
unsafe fn fold_halves(a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: the caller runs with AVX2.
    unsafe { _mm256_add_epi32(_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)) }
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
    unsafe fn load_flipped(p: *const u8) -> Self::Quads {
        unsafe {
            let bits = _mm256_set1_epi8(-128);
            let [a, b] = Self::load_quads(p);
            [_mm256_xor_si256(a, bits), _mm256_xor_si256(b, bits)]
        }
    }
    #[inline(always)]
    unsafe fn multiply_quads(sums: Self::Sums, a: Self::Quads, b: Self::Quads) -> Self::Sums {
        unsafe { [multiply(sums[0], unsigned(a[0]), signed(b[0])), multiply(sums[1], unsigned(a[1]), signed(b[1]))] }
    }
    #[inline(always)]
    unsafe fn total16(v: [Self::Sums; 16]) -> Self::Sums {
        unsafe {
            let mut quads = [_mm256_setzero_si256(); 4];
            for i in 0..4 {
                let v = &v[4 * i..4 * i + 4];
                let a = fold_pairs(_mm256_add_epi32(v[0][0], v[0][1]), _mm256_add_epi32(v[1][0], v[1][1]));
                let b = fold_pairs(_mm256_add_epi32(v[2][0], v[2][1]), _mm256_add_epi32(v[3][0], v[3][1]));
                quads[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
            }
            [fold_halves(quads[0], quads[1]), fold_halves(quads[2], quads[3])]
        }
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
    unsafe fn add_sums(a: Self::Sums, b: Self::Sums) -> Self::Sums {
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
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
    unsafe fn interleave(rows: [*const u8; 4]) -> Self::Quads {
        unsafe {
            let [a, b, c, d] = [rows[0], rows[1], rows[2], rows[3]].map(|row| _mm_loadu_si128(row.cast()));
            let (low, high) = (_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b));
            let (low_2, high_2) = (_mm_unpacklo_epi8(c, d), _mm_unpackhi_epi8(c, d));
            let first = _mm256_set_m128i(_mm_unpackhi_epi16(low, low_2), _mm_unpacklo_epi16(low, low_2));
            [first, _mm256_set_m128i(_mm_unpackhi_epi16(high, high_2), _mm_unpacklo_epi16(high, high_2))]
        }
    }
    #[inline(always)]
    unsafe fn interleave64([a, b, c, d]: [*const u8; 4]) -> [Self::Quads; 4] {
        unsafe {
            [
                Self::interleave([a, b, c, d]),
                Self::interleave([a.add(16), b.add(16), c.add(16), d.add(16)]),
                Self::interleave([a.add(32), b.add(32), c.add(32), d.add(32)]),
                Self::interleave([a.add(48), b.add(48), c.add(48), d.add(48)]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn interleave_quarters(rows: [*const u8; 4]) -> [Self::Quads; 4] {
        unsafe { Self::interleave64(rows) }
    }
    #[inline(always)]
    unsafe fn in_order(sums: [Self::Sums; 4]) -> [Self::Sums; 4] {
        sums
    }
    #[inline(always)]
    unsafe fn store_quads(quads: Self::Quads, p: *mut u8) {
        unsafe {
            _mm256_storeu_si256(p.cast(), quads[0]);
            _mm256_storeu_si256(p.add(32).cast(), quads[1]);
        }
    }
}
