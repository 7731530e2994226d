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
    unsafe fn row_sums(rows: *const u8, stride: usize, x: *const i16, n: usize) -> __m512i {
        unsafe {
            let mut sums = [_mm512_setzero_si512(); 16];
            for i in (0..n).step_by(32) {
                let x = _mm512_loadu_si512(x.add(i).cast());
                for (r, sum) in sums.iter_mut().enumerate() {
                    let w = _mm512_cvtepu8_epi16(_mm256_loadu_si256(rows.add(stride * r + i).cast()));
                    *sum = _mm512_dpwssd_epi32(*sum, w, x);
                }
            }
            sums_of_rows(sums)
        }
    }
    #[inline(always)]
    unsafe fn half_row_sums(rows: *const u8, stride: usize, x: *const i16) -> [__m512i; 2] {
        unsafe {
            let mut sums = [_mm512_setzero_si512(); 16];
            let x = _mm512_loadu_si512(x.cast());
            for (r, sum) in sums.iter_mut().enumerate() {
                let w = _mm512_cvtepu8_epi16(_mm256_loadu_si256(rows.add(stride * r).cast()));
                *sum = _mm512_madd_epi16(w, x);
            }
            half_sums_of_rows(sums)
        }
    }
    #[inline(always)]
    unsafe fn add_to_all(sums: __m512i, n: i32) -> __m512i {
        unsafe { _mm512_add_epi32(sums, _mm512_set1_epi32(n)) }
    }
    #[inline(always)]
    unsafe fn less(pairs: Self, zero: i16) -> Self {
        unsafe {
            let less = _mm512_sub_epi16(_mm512_castps_si512(pairs.0), _mm512_set1_epi16(zero));
            Avx512x16(_mm512_castsi512_ps(less))
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

/// Lane r is the sum of the lanes of `v[r]`.
///
/// # Safety
/// AVX-512 is available.
#[inline(always)]
pub(super) unsafe fn sums_of_rows(v: [__m512i; 16]) -> __m512i {
    // SAFETY: the caller's.
    unsafe {
        // Part l of `fours[j]` has four partial sums of row 4l + j.
        let mut fours = [_mm512_setzero_si512(); 4];
        for (j, four) in fours.iter_mut().enumerate() {
            let a = added_by_parts(v[j], v[4 + j]);
            let b = added_by_parts(v[8 + j], v[12 + j]);
            let low = _mm512_shuffle_i32x4::<0x88>(a, b);
            *four = _mm512_add_epi32(low, _mm512_shuffle_i32x4::<0xdd>(a, b));
        }
        let [a, b, c, d] = fours;
        let (a, b) = (added_in_turns(a, b), added_in_turns(c, d));
        _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
    }
}

/// Lane r of the first is the sum of the first eight lanes of `v[r]`, lane r of the second that of the others.
///
/// # Safety
/// As above.
#[inline(always)]
unsafe fn half_sums_of_rows(v: [__m512i; 16]) -> [__m512i; 2] {
    // SAFETY: the caller's.
    unsafe {
        // Part l of `fours[j]` has for rows 4j to 4j + 3 the sum of part l.
        let mut fours = [_mm512_setzero_si512(); 4];
        for (j, four) in fours.iter_mut().enumerate() {
            let (a, b) = (added_in_turns(v[4 * j], v[4 * j + 1]), added_in_turns(v[4 * j + 2], v[4 * j + 3]));
            *four = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        }
        // Parts 0 and 2 have first halves, parts 1 and 3 second ones.
        let [a, b, c, d] = fours;
        let (low, high) = (neighbours_added(a, b), neighbours_added(c, d));
        [_mm512_shuffle_i32x4::<0x88>(low, high), _mm512_shuffle_i32x4::<0xdd>(low, high)]
    }
}

/// Of `a` and then of `b`, parts 0 and 1 added, and parts 2 and 3.
///
/// # Safety
/// As above.
#[inline(always)]
unsafe fn neighbours_added(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the caller's.
    unsafe { _mm512_add_epi32(_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b)) }
}

/// In parts 0 and 1 the sums of the halves of `a`, in parts 2 and 3 those of `b`.
///
/// # Safety
/// As above.
#[inline(always)]
unsafe fn added_by_parts(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the caller's.
    unsafe { _mm512_add_epi32(_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0xee>(a, b)) }
}

/// In each part lanes 0 and 2 together have the sum of those of `a`, lanes 1 and 3 of those of `b`.
///
/// # Safety
/// As above.
#[inline(always)]
unsafe fn added_in_turns(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the caller's.
    unsafe { _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)) }
}
