//! Sixteen lanes in two registers.

use std::arch::x86_64::*;

use super::Avx2x16;
use crate::instructions::f32_dot::Lanes;

/// The last three levels of the tree, on eight lanes.
#[inline(always)]
pub unsafe fn sum8(v: __m256) -> f32 {
    // SAFETY: the caller runs with AVX2.
    unsafe {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
    }
}

#[inline(always)]
unsafe fn bf16x8(p: *const u8) -> __m256 {
    // SAFETY: the caller runs with AVX2 and vouches for 16 bytes at `p`.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
}

#[inline(always)]
unsafe fn f16x8(p: *const u8) -> __m256 {
    // SAFETY: the caller runs with F16C and vouches for 16 bytes at `p`.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
}

#[inline(always)]
unsafe fn u8x8(p: *const u8) -> __m256 {
    // SAFETY: the caller runs with AVX2 and vouches for 8 bytes at `p`.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))) }
}

#[inline(always)]
unsafe fn i8x8(p: *const u8) -> __m256 {
    // SAFETY: the caller runs with AVX2 and vouches for 8 bytes at `p`.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
}

#[inline(always)]
unsafe fn exp2_int8(v: __m256) -> __m256 {
    // SAFETY: the caller runs with AVX2.
    unsafe {
        let e = _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(e))
    }
}

#[inline(always)]
unsafe fn select_lt8(x: __m256, bound: __m256, a: __m256, b: __m256) -> __m256 {
    // SAFETY: the caller runs with AVX2.
    unsafe { _mm256_blendv_ps(b, a, _mm256_cmp_ps::<_CMP_LT_OQ>(x, bound)) }
}

/// The pairs of 64 bits of two registers, summed: level i and i + 2 of the tree for both.
#[inline(always)]
unsafe fn sum_pairs8(a: __m256, b: __m256) -> __m256 {
    // SAFETY: the caller runs with AVX2.
    unsafe {
        let low = _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
        let high = _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
        _mm256_add_ps(low, high)
    }
}

/// Lane j of register i becomes lane i of register j, for eight of eight.
#[inline(always)]
unsafe fn transpose8(v: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: the caller runs with AVX2.
    unsafe {
        let mut pairs = v;
        for i in 0..4 {
            pairs[2 * i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]);
            pairs[2 * i + 1] = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
        }
        // Of columns j and j + 4, four rows each.
        let mut fours = v;
        for i in 0..2 {
            for j in 0..2 {
                let (a, b) = (_mm256_castps_pd(pairs[4 * i + j]), _mm256_castps_pd(pairs[4 * i + 2 + j]));
                fours[4 * i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
                fours[4 * i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
            }
        }
        let mut out = v;
        for j in 0..4 {
            out[j] = _mm256_permute2f128_ps::<0x20>(fours[j], fours[4 + j]);
            out[4 + j] = _mm256_permute2f128_ps::<0x31>(fours[j], fours[4 + j]);
        }
        out
    }
}

/// The last two levels of the tree, four sums at a time: `v[j]` holds four lanes in each 128-bit part, whose sum goes to
/// place j of that part.
#[inline(always)]
unsafe fn sum_parts(v: [__m256; 4]) -> __m256 {
    // SAFETY: the caller runs with AVX2.
    unsafe {
        let (a, b) = (sum_pairs8(v[0], v[1]), sum_pairs8(v[2], v[3]));
        let low = _mm256_shuffle_ps::<0x88>(a, b);
        _mm256_add_ps(low, _mm256_shuffle_ps::<0xdd>(a, b))
    }
}

#[inline(always)]
pub unsafe fn max8(v: __m256) -> f32 {
    // SAFETY: the caller runs with AVX2.
    unsafe {
        let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
    }
}

#[inline(always)]
unsafe fn mask8(n: usize) -> __m256i {
    // SAFETY: the caller runs with AVX2.
    unsafe {
        let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n.min(8) as i32), lane)
    }
}

// Each method's body is a handful of intrinsics under the trait's own contract, so one SAFETY line serves the module:
// SAFETY (all): the caller vouches for the instruction set and for the pointers, see `Lanes`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Avx2x16 {
    const WIDE: bool = false;
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Avx2x16(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Avx2x16(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize) -> Self {
        unsafe {
            let high = if n > 8 { _mm256_maskload_ps(p.add(8), mask8(n - 8)) } else { _mm256_setzero_ps() };
            Avx2x16(_mm256_maskload_ps(p, mask8(n)), high)
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        unsafe { Avx2x16(bf16x8(p), bf16x8(p.add(16))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        unsafe { Avx2x16(f16x8(p), f16x8(p.add(16))) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        unsafe { Avx2x16(u8x8(p), u8x8(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        unsafe { Avx2x16(i8x8(p), i8x8(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store_rounded_i8(self, p: *mut u8) {
        unsafe {
            // The packs saturate, which changes nothing, and work within halves, which the permutation undoes.
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
            let words = _mm256_permute4x64_epi64::<0b11011000>(words);
            let high = _mm256_extracti128_si256::<1>(words);
            _mm_storeu_si128(p.cast(), _mm_packs_epi16(_mm256_castsi256_si128(words), high));
        }
    }
    #[inline(always)]
    unsafe fn store_rounded_i16(self, high: *mut u8, low: *mut u8) {
        unsafe {
            // As above; the last packs do not saturate, since all words are bytes by then.
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
            let words = _mm256_permute4x64_epi64::<0b11011000>(words);
            // At most 32639 + 128: no overflow.
            let h = _mm256_srai_epi16::<8>(_mm256_add_epi16(words, _mm256_set1_epi16(128)));
            let l = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(words));
            let upper = _mm256_extracti128_si256::<1>(h);
            _mm_storeu_si128(high.cast(), _mm_packs_epi16(_mm256_castsi256_si128(h), upper));
            let upper = _mm256_extracti128_si256::<1>(l);
            _mm_storeu_si128(low.cast(), _mm_packs_epi16(_mm256_castsi256_si128(l), upper));
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe {
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, n: usize) {
        unsafe {
            _mm256_maskstore_ps(p, mask8(n), self.0);
            if n > 8 {
                _mm256_maskstore_ps(p.add(8), mask8(n - 8), self.1);
            }
        }
    }
    #[inline(always)]
    unsafe fn add(self, o: Self) -> Self {
        unsafe { Avx2x16(_mm256_add_ps(self.0, o.0), _mm256_add_ps(self.1, o.1)) }
    }
    #[inline(always)]
    unsafe fn sub(self, o: Self) -> Self {
        unsafe { Avx2x16(_mm256_sub_ps(self.0, o.0), _mm256_sub_ps(self.1, o.1)) }
    }
    #[inline(always)]
    unsafe fn mul(self, o: Self) -> Self {
        unsafe { Avx2x16(_mm256_mul_ps(self.0, o.0), _mm256_mul_ps(self.1, o.1)) }
    }
    #[inline(always)]
    unsafe fn div(self, o: Self) -> Self {
        unsafe { Avx2x16(_mm256_div_ps(self.0, o.0), _mm256_div_ps(self.1, o.1)) }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        unsafe { Avx2x16(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
    }
    #[inline(always)]
    unsafe fn max(self, o: Self) -> Self {
        unsafe { Avx2x16(_mm256_max_ps(self.0, o.0), _mm256_max_ps(self.1, o.1)) }
    }
    #[inline(always)]
    unsafe fn min(self, o: Self) -> Self {
        unsafe { Avx2x16(_mm256_min_ps(self.0, o.0), _mm256_min_ps(self.1, o.1)) }
    }
    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        unsafe { Avx2x16(_mm256_sqrt_ps(self.0), _mm256_sqrt_ps(self.1)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        unsafe {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            Avx2x16(_mm256_round_ps::<NEAREST>(self.0), _mm256_round_ps::<NEAREST>(self.1))
        }
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        unsafe { Avx2x16(exp2_int8(self.0), exp2_int8(self.1)) }
    }
    #[inline(always)]
    unsafe fn select_lt(self, bound: Self, a: Self, b: Self) -> Self {
        unsafe { Avx2x16(select_lt8(self.0, bound.0, a.0, b.0), select_lt8(self.1, bound.1, a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe { sum8(_mm256_add_ps(self.0, self.1)) }
    }
    #[inline(always)]
    unsafe fn sum16(v: [Self; 16]) -> Self {
        unsafe {
            let mut half = [_mm256_setzero_ps(); 2];
            for (h, half) in half.iter_mut().enumerate() {
                // Of v[8h + 4l + j], l is the 128-bit part and j the place in it where its sum ends up.
                let mut four = [_mm256_setzero_ps(); 4];
                for (j, four) in four.iter_mut().enumerate() {
                    let (a, b) = (v[8 * h + j], v[8 * h + 4 + j]);
                    let (a, b) = (_mm256_add_ps(a.0, a.1), _mm256_add_ps(b.0, b.1));
                    let low = _mm256_permute2f128_ps::<0x20>(a, b);
                    *four = _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b));
                }
                *half = sum_parts(four);
            }
            Avx2x16(half[0], half[1])
        }
    }
    #[inline(always)]
    unsafe fn transpose16(v: [Self; 16]) -> [Self; 16] {
        let zero = unsafe { _mm256_setzero_ps() };
        let (mut parts, mut out) = ([[zero; 8]; 4], v);
        for i in 0..8 {
            (parts[0][i], parts[1][i]) = (v[i].0, v[i].1);
            (parts[2][i], parts[3][i]) = (v[8 + i].0, v[8 + i].1);
        }
        for part in &mut parts {
            *part = unsafe { transpose8(*part) };
        }
        for j in 0..8 {
            out[j] = Avx2x16(parts[0][j], parts[2][j]);
            out[8 + j] = Avx2x16(parts[1][j], parts[3][j]);
        }
        out
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        unsafe { max8(_mm256_max_ps(self.0, self.1)) }
    }
}
