use std::arch::x86_64::*;

use super::Avx2x16;
use crate::instructions::int11_dot::{Int11Dot, TO_INTEGER};

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
    unsafe fn row_sums(rows: *const u8, stride: usize, x: *const i16, n: usize) -> Self::Sums {
        unsafe { (eight_sums(rows, stride, x, n), eight_sums(rows.add(8 * stride), stride, x, n)) }
    }
    #[inline(always)]
    unsafe fn add_to_all(sums: Self::Sums, n: i32) -> Self::Sums {
        unsafe { (_mm256_add_epi32(sums.0, _mm256_set1_epi32(n)), _mm256_add_epi32(sums.1, _mm256_set1_epi32(n))) }
    }
    #[inline(always)]
    unsafe fn less(pairs: Self, zero: i16) -> Self {
        unsafe {
            let zero = _mm256_set1_epi16(zero);
            let low = _mm256_sub_epi16(_mm256_castps_si256(pairs.0), zero);
            let high = _mm256_sub_epi16(_mm256_castps_si256(pairs.1), zero);
            Avx2x16(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn to_f32(sums: Self::Sums) -> Self {
        unsafe { Avx2x16(_mm256_cvtepi32_ps(sums.0), _mm256_cvtepi32_ps(sums.1)) }
    }
    #[inline(always)]
    unsafe fn greatest_of_runs(w: *const u16) -> [u16; 2] {
        unsafe {
            let sizes = |i: usize| _mm256_and_si256(_mm256_loadu_si256(w.add(i).cast()), _mm256_set1_epi16(0x7fff));
            let all = _mm256_max_epu16(_mm256_max_epu16(sizes(0), sizes(16)), _mm256_max_epu16(sizes(32), sizes(48)));
            greatest_of_two(all)
        }
    }
    #[inline(always)]
    unsafe fn round_bf16(w: *const u16, by: [f32; 2]) -> Self {
        unsafe {
            let by = _mm256_setr_m128(_mm_set1_ps(by[0]), _mm_set1_ps(by[1]));
            let half = |i: usize| {
                let (w, magic) = (_mm256_loadu_si256(w.add(i).cast()), _mm256_set1_ps(TO_INTEGER));
                let even = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
                let odd = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(0xffff_0000u32 as i32)));
                let even = _mm256_castps_si256(_mm256_fmadd_ps(even, by, magic));
                let odd = _mm256_slli_epi32(_mm256_castps_si256(_mm256_fmadd_ps(odd, by, magic)), 16);
                _mm256_castsi256_ps(_mm256_blend_epi16(even, odd, 0xaa))
            };
            Avx2x16(half(0), half(16))
        }
    }
    #[inline(always)]
    unsafe fn round_f16(w: *const u16, by: [f32; 2]) -> Self {
        unsafe { Avx2x16(two_runs(w, by), two_runs(w.add(16), by)) }
    }
}

/// The greatest of eight unsigned integers of sixteen bits, and of eight others.
///
/// # Safety
/// AVX2 is available.
#[inline(always)]
pub(crate) unsafe fn greatest_of_two(w: __m256i) -> [u16; 2] {
    // There is an instruction for the least. SAFETY: the caller vouches for the instruction set.
    let greatest =
        |w| unsafe { !(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(w, _mm_set1_epi16(-1))), 0) as u16) };
    // SAFETY: as above.
    unsafe { [greatest(_mm256_castsi256_si128(w)), greatest(_mm256_extracti128_si256(w, 1))] }
}

/// Sixteen elements of f16 times `by`, of runs of eight, rounded to integers of sixteen bits.
///
/// # Safety
/// AVX2, FMA and F16C are available, and the elements are there.
// No closures: one inside another is not inlined.
#[inline(always)]
unsafe fn two_runs(w: *const u16, by: [f32; 2]) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let (magic, low) = (_mm256_set1_ps(TO_INTEGER), _mm256_set1_epi32(0xffff));
        let (a, b) = (_mm_loadu_si128(w.cast()), _mm_loadu_si128(w.add(8).cast()));
        let a = _mm256_fmadd_ps(_mm256_cvtph_ps(a), _mm256_set1_ps(by[0]), magic);
        let b = _mm256_fmadd_ps(_mm256_cvtph_ps(b), _mm256_set1_ps(by[1]), magic);
        let (a, b) = (_mm256_and_si256(_mm256_castps_si256(a), low), _mm256_and_si256(_mm256_castps_si256(b), low));
        _mm256_castsi256_ps(_mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0b11_01_10_00))
    }
}

/// [`Int11Dot::row_sums`] of eight rows.
///
/// # Safety
/// As for [`Int11Dot::row_sums`].
// No closures, as above.
#[inline(always)]
unsafe fn eight_sums(rows: *const u8, stride: usize, x: *const i16, n: usize) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let mut fours = [_mm256_setzero_si256(); 2];
        for (half, four) in fours.iter_mut().enumerate() {
            let mut sums = [_mm256_setzero_si256(); 4];
            for i in (0..n).step_by(16) {
                let x = _mm256_loadu_si256(x.add(i).cast());
                for (r, sum) in sums.iter_mut().enumerate() {
                    let w = _mm256_cvtepu8_epi16(_mm_loadu_si128(rows.add((4 * half + r) * stride + i).cast()));
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(w, x));
                }
            }
            *four = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
        }
        // Each half of a register has partial sums of four rows.
        let low = _mm256_permute2x128_si256::<0x20>(fours[0], fours[1]);
        _mm256_add_epi32(low, _mm256_permute2x128_si256::<0x31>(fours[0], fours[1]))
    }
}
