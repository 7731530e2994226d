use std::arch::x86_64::*;

use super::Avx512x16;
use crate::instructions::bytes::Bytes;

/// The sums of lanes four apart of `a` and of `b`, in turn: a step of [`Bytes::total16`].
#[inline(always)]
unsafe fn fold_pairs(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the caller runs with AVX-512.
    unsafe { _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)) }
}

/// The next step.
#[inline(always)]
unsafe fn fold_quads(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the caller runs with AVX-512.
    unsafe { _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)) }
}

/// The last two: quarters of registers.
#[inline(always)]
unsafe fn fold_quarters(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the caller runs with AVX-512.
    unsafe { _mm512_add_epi32(_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b)) }
}

/// The bytes of four registers in turn, within quarters.
#[inline(always)]
unsafe fn unpack_all([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    // SAFETY: the caller runs with AVX-512.
    unsafe {
        let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
        let (ab_2, cd_2) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
        [
            _mm512_unpacklo_epi16(ab, cd),
            _mm512_unpackhi_epi16(ab, cd),
            _mm512_unpacklo_epi16(ab_2, cd_2),
            _mm512_unpackhi_epi16(ab_2, cd_2),
        ]
    }
}

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
    unsafe fn load_flipped(p: *const u8) -> Self::Quads {
        unsafe { _mm512_xor_si512(_mm512_loadu_si512(p.cast()), _mm512_set1_epi8(-128)) }
    }
    #[inline(always)]
    unsafe fn multiply_quads(sums: Self::Sums, a: Self::Quads, b: Self::Quads) -> Self::Sums {
        unsafe { _mm512_dpbusd_epi32(sums, a, b) }
    }
    #[inline(always)]
    unsafe fn total16(v: [Self::Sums; 16]) -> Self::Sums {
        unsafe {
            let mut quads = [_mm512_setzero_si512(); 4];
            for i in 0..4 {
                let (a, b) = (fold_pairs(v[4 * i], v[4 * i + 1]), fold_pairs(v[4 * i + 2], v[4 * i + 3]));
                quads[i] = fold_quads(a, b);
            }
            fold_quarters(fold_quarters(quads[0], quads[1]), fold_quarters(quads[2], quads[3]))
        }
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
    unsafe fn add_sums(a: Self::Sums, b: Self::Sums) -> Self::Sums {
        unsafe { _mm512_add_epi32(a, b) }
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
    unsafe fn interleave(rows: [*const u8; 4]) -> Self::Quads {
        unsafe {
            let mut four = _mm512_castsi128_si512(_mm_loadu_si128(rows[0].cast()));
            four = _mm512_inserti32x4::<1>(four, _mm_loadu_si128(rows[1].cast()));
            four = _mm512_inserti32x4::<2>(four, _mm_loadu_si128(rows[2].cast()));
            four = _mm512_inserti32x4::<3>(four, _mm_loadu_si128(rows[3].cast()));
            let order = _mm512_loadu_si512(INTERLEAVED.as_ptr().cast());
            _mm512_permutexvar_epi8(order, four)
        }
    }
    #[inline(always)]
    unsafe fn interleave64(rows: [*const u8; 4]) -> [Self::Quads; 4] {
        unsafe {
            // Four bytes of sixteen columns are a quarter's: what the unpacking leaves together.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let mut v = [order; 4];
            for i in 0..4 {
                v[i] = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(rows[i].cast()));
            }
            unpack_all(v)
        }
    }
    #[inline(always)]
    unsafe fn interleave_quarters(rows: [*const u8; 4]) -> [Self::Quads; 4] {
        unsafe {
            let mut v = [_mm512_setzero_si512(); 4];
            for i in 0..4 {
                v[i] = _mm512_loadu_si512(rows[i].cast());
            }
            unpack_all(v)
        }
    }
    #[inline(always)]
    unsafe fn in_order([a, b, c, d]: [Self::Sums; 4]) -> [Self::Sums; 4] {
        unsafe {
            // Quarter j of register i is quarter i of register j.
            let (ab, cd) = (_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(c, d));
            let (ab_2, cd_2) = (_mm512_shuffle_i32x4::<0xee>(a, b), _mm512_shuffle_i32x4::<0xee>(c, d));
            [
                _mm512_shuffle_i32x4::<0x88>(ab, cd),
                _mm512_shuffle_i32x4::<0xdd>(ab, cd),
                _mm512_shuffle_i32x4::<0x88>(ab_2, cd_2),
                _mm512_shuffle_i32x4::<0xdd>(ab_2, cd_2),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_quads(quads: Self::Quads, p: *mut u8) {
        unsafe { _mm512_storeu_si512(p.cast(), quads) }
    }
}
