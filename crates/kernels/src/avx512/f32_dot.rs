//! Sixteen lanes in one register.

use std::arch::x86_64::*;

use super::Avx512x16;
use crate::avx2::f32_dot::{max8, sum8};
use crate::instructions::f32_dot::Lanes;

/// As [`sum_pairs8`], on sixteen lanes.
#[inline(always)]
unsafe fn sum_pairs16(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller runs with AVX-512.
    unsafe {
        let low = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
        let high = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
        _mm512_add_ps(low, high)
    }
}

/// Lanes i and i + 8 of two registers, summed: eight lanes each.
#[inline(always)]
unsafe fn sum_halves16(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller runs with AVX-512.
    unsafe { _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b)) }
}

#[inline(always)]
fn mask16(n: usize) -> __mmask16 {
    ((1u32 << n.min(16)) - 1) as __mmask16
}

// Each method's body is a handful of intrinsics under the trait's own contract, so one SAFETY line serves the module:
// SAFETY (all): the caller vouches for the instruction set and for the pointers, see `Lanes`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Avx512x16 {
    const WIDE: bool = true;
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Avx512x16(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Avx512x16(_mm512_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize) -> Self {
        unsafe { Avx512x16(_mm512_maskz_loadu_ps(mask16(n), p)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        unsafe {
            let v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Avx512x16(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(v)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        unsafe { Avx512x16(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        unsafe { Avx512x16(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        unsafe { Avx512x16(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn store_rounded_i8(self, p: *mut u8) {
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0))) }
    }
    #[inline(always)]
    unsafe fn store_rounded_i16(self, high: *mut u8, low: *mut u8) {
        unsafe {
            let q = _mm512_cvtps_epi32(self.0);
            let upper = _mm512_srai_epi32::<8>(_mm512_add_epi32(q, _mm512_set1_epi32(128)));
            _mm_storeu_si128(high.cast(), _mm512_cvtepi32_epi8(upper));
            _mm_storeu_si128(low.cast(), _mm512_cvtepi32_epi8(q));
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, n: usize) {
        unsafe { _mm512_mask_storeu_ps(p, mask16(n), self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, o: Self) -> Self {
        unsafe { Avx512x16(_mm512_add_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, o: Self) -> Self {
        unsafe { Avx512x16(_mm512_sub_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, o: Self) -> Self {
        unsafe { Avx512x16(_mm512_mul_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, o: Self) -> Self {
        unsafe { Avx512x16(_mm512_div_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        unsafe { Avx512x16(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, o: Self) -> Self {
        unsafe { Avx512x16(_mm512_max_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, o: Self) -> Self {
        unsafe { Avx512x16(_mm512_min_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        unsafe { Avx512x16(_mm512_sqrt_ps(self.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        unsafe {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            Avx512x16(_mm512_roundscale_ps::<NEAREST>(self.0))
        }
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        unsafe {
            let e = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Avx512x16(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(e)))
        }
    }
    #[inline(always)]
    unsafe fn select_lt(self, bound: Self, a: Self, b: Self) -> Self {
        unsafe {
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0);
            Avx512x16(_mm512_mask_blend_ps(less, b.0, a.0))
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe {
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            sum8(_mm256_add_ps(_mm512_castps512_ps256(self.0), high))
        }
    }
    #[inline(always)]
    unsafe fn sum16(v: [Self; 16]) -> Self {
        unsafe {
            // Of v[4l + j], l is the 128-bit part and j the place in it where its sum ends up.
            let mut four = [_mm512_setzero_ps(); 4];
            for (j, four) in four.iter_mut().enumerate() {
                let a = sum_halves16(v[j].0, v[4 + j].0);
                let b = sum_halves16(v[8 + j].0, v[12 + j].0);
                let low = _mm512_shuffle_f32x4::<0x88>(a, b);
                *four = _mm512_add_ps(low, _mm512_shuffle_f32x4::<0xdd>(a, b));
            }
            let (a, b) = (sum_pairs16(four[0], four[1]), sum_pairs16(four[2], four[3]));
            let low = _mm512_shuffle_ps::<0x88>(a, b);
            Avx512x16(_mm512_add_ps(low, _mm512_shuffle_ps::<0xdd>(a, b)))
        }
    }
    #[inline(always)]
    unsafe fn transpose16(v: [Self; 16]) -> [Self; 16] {
        unsafe {
            let mut pairs = [_mm512_setzero_ps(); 16];
            for i in 0..8 {
                pairs[2 * i] = _mm512_unpacklo_ps(v[2 * i].0, v[2 * i + 1].0);
                pairs[2 * i + 1] = _mm512_unpackhi_ps(v[2 * i].0, v[2 * i + 1].0);
            }
            // Register 4i + j: of columns j, j + 4, j + 8, j + 12 the rows 4i to 4i + 3.
            let mut fours = pairs;
            for i in 0..4 {
                for j in 0..2 {
                    let (a, b) = (_mm512_castps_pd(pairs[4 * i + j]), _mm512_castps_pd(pairs[4 * i + 2 + j]));
                    fours[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                    fours[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
                }
            }
            let mut out = v;
            for j in 0..4 {
                let (a, b) = (fours[j], fours[4 + j]);
                let (c, d) = (fours[8 + j], fours[12 + j]);
                let (ab, cd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(c, d));
                out[j] = Avx512x16(_mm512_shuffle_f32x4::<0x88>(ab, cd));
                out[8 + j] = Avx512x16(_mm512_shuffle_f32x4::<0xdd>(ab, cd));
                let (ab, cd) = (_mm512_shuffle_f32x4::<0xdd>(a, b), _mm512_shuffle_f32x4::<0xdd>(c, d));
                out[4 + j] = Avx512x16(_mm512_shuffle_f32x4::<0x88>(ab, cd));
                out[12 + j] = Avx512x16(_mm512_shuffle_f32x4::<0xdd>(ab, cd));
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        unsafe {
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            max8(_mm256_max_ps(_mm512_castps512_ps256(self.0), high))
        }
    }
}
