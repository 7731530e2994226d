use std::arch::x86_64::*;

use super::Avx2x16;
use crate::instructions::bf16_dot::{Bf16Dot, BothBf16, flushed_fma, widen};
use crate::instructions::dot::{Dot, Product, multiply};

/// MXCSR's bits for a denormal operand and for a result that was too small and inexact. They stay until they are cleared.
const DENORMAL: u32 = 1 << 1 | 1 << 4;

/// Clears [`DENORMAL`].
fn clear_denormal() {
    let mut mxcsr = 0u32;
    // SAFETY: the program's own word; assembler may change the flags of exceptions, and all else stays as it is.
    unsafe {
        std::arch::asm!("stmxcsr [{0}]", in(reg) &raw mut mxcsr, options(nostack));
        mxcsr &= !DENORMAL;
        std::arch::asm!("ldmxcsr [{0}]", in(reg) &raw const mxcsr, options(nostack));
    }
}

/// Whether [`DENORMAL`] has been set.
fn had_denormal() -> bool {
    let mut mxcsr = 0u32;
    // SAFETY: the program's own word.
    unsafe { std::arch::asm!("stmxcsr [{0}]", in(reg) &raw mut mxcsr, options(nostack)) };
    mxcsr & DENORMAL != 0
}

/// The product by fused multiply-adds alone, without flushes. Returns whether it is right, which it is if the processor met no denormal number. It notes a denormal operand where it is used, and
/// an inexact denormal result where it is made. An exact one becomes an operand, at the latest when lanes are summed.
///
/// # Safety
/// As for [`Bf16Dot::product`].
#[inline(always)]
unsafe fn multiply_without_flushes(product: Product) -> bool {
    clear_denormal();
    // SAFETY: the caller's.
    unsafe { plain(product) };
    !had_denormal()
}

// Not inlined: what it computes stays between the two looks at the flags.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn plain(product: Product) {
    // SAFETY: the caller's.
    unsafe { multiply::<Avx2x16, Unflushed>(product) }
}

/// [`BothBf16`], as long as nothing is denormal.
struct Unflushed;

// SAFETY (all): the caller vouches for the instruction set and the pointers, see `Dot`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Dot<Avx2x16> for Unflushed {
    const STEP: usize = <BothBf16 as Dot<Avx2x16>>::STEP;
    const SIZES: (usize, usize) = <BothBf16 as Dot<Avx2x16>>::SIZES;
    type W = (__m256i, __m256i);
    type X = (__m256i, __m256i);
    #[inline(always)]
    unsafe fn w(p: *const u8) -> Self::W {
        unsafe { <BothBf16 as Dot<Avx2x16>>::w(p) }
    }
    #[inline(always)]
    unsafe fn w_first(p: *const u8, n: usize) -> Self::W {
        unsafe { <BothBf16 as Dot<Avx2x16>>::w_first(p, n) }
    }
    #[inline(always)]
    unsafe fn x(p: *const u8) -> Self::X {
        unsafe { <BothBf16 as Dot<Avx2x16>>::x(p) }
    }
    #[inline(always)]
    unsafe fn x_first(p: *const u8, n: usize) -> Self::X {
        unsafe { <BothBf16 as Dot<Avx2x16>>::x_first(p, n) }
    }
    #[inline(always)]
    unsafe fn mac(acc: Avx2x16, w: Self::W, x: Self::X) -> Avx2x16 {
        unsafe { Avx2x16(plain8(acc.0, w.0, x.0), plain8(acc.1, w.1, x.1)) }
    }
}

/// Eight lanes of [`Unflushed`].
#[inline(always)]
unsafe fn plain8(acc: __m256, a: __m256i, b: __m256i) -> __m256 {
    // SAFETY: the caller runs with AVX2 and FMA.
    unsafe {
        let high = _mm256_set1_epi32(-65536);
        let (a1, b1) = (_mm256_and_si256(a, high), _mm256_and_si256(b, high));
        let (a0, b0) = (_mm256_slli_epi32::<16>(a), _mm256_slli_epi32::<16>(b));
        let r = _mm256_fmadd_ps(_mm256_castsi256_ps(a1), _mm256_castsi256_ps(b1), acc);
        _mm256_fmadd_ps(_mm256_castsi256_ps(a0), _mm256_castsi256_ps(b0), r)
    }
}

/// Eight lanes of `mac_pair`.
#[inline(always)]
unsafe fn mac8(acc: __m256, a: __m256i, b: __m256i) -> __m256 {
    // SAFETY: the caller runs with AVX2 and FMA.
    unsafe {
        let sign = _mm256_set1_ps(-0.0);
        let smallest = _mm256_set1_ps(f32::MIN_POSITIVE);
        // Denormal (exponent zero) to zero of its sign.
        let flush = |x: __m256| {
            let small = _mm256_cmp_ps::<_CMP_LT_OQ>(_mm256_andnot_ps(sign, x), smallest);
            _mm256_andnot_ps(_mm256_andnot_ps(sign, small), x)
        };
        let odd = |x| flush(_mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536))));
        let even = |x| flush(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)));
        let (a1, b1, a0, b0) = (odd(a), odd(b), even(a), even(b));
        let r1 = _mm256_fmadd_ps(a1, b1, flush(acc));
        let r0 = _mm256_fmadd_ps(a0, b0, flush(r1));
        // At the smallest normal number the vector form cannot tell whether to flush: those rare lanes go one by one.
        let at = |r| _mm256_cmp_ps::<_CMP_EQ_OQ>(_mm256_andnot_ps(sign, r), smallest);
        if _mm256_movemask_ps(_mm256_or_ps(at(r1), at(r0))) == 0 {
            return flush(r0);
        }
        one_by_one(acc, a, b)
    }
}

#[cold]
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn one_by_one(acc: __m256, a: __m256i, b: __m256i) -> __m256 {
    // SAFETY: 32 bytes of plain numbers each.
    let mut acc = unsafe { std::mem::transmute::<__m256, [f32; 8]>(acc) };
    // SAFETY: as above.
    let [a, b] = [a, b].map(|x| unsafe { std::mem::transmute::<__m256i, [u16; 16]>(x) });
    for (l, acc) in acc.iter_mut().enumerate() {
        for i in [2 * l + 1, 2 * l] {
            *acc = flushed_fma(widen(a[i]), widen(b[i]), *acc);
        }
    }
    // SAFETY: as above.
    unsafe { std::mem::transmute::<[f32; 8], __m256>(acc) }
}

/// Eight f32 to bf16 bits in the low halves of eight i32.
#[inline(always)]
unsafe fn round8(x: __m256) -> __m256i {
    // SAFETY: the caller runs with AVX2.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let top = _mm256_srli_epi32::<16>(bits);
        let tie = _mm256_and_si256(top, _mm256_set1_epi32(1));
        let up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), tie);
        let rounded = _mm256_srli_epi32::<16>(up);
        let size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fff_ffff));
        let nan = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7f80_0000));
        let tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x0080_0000), size);
        let r = _mm256_blendv_epi8(rounded, _mm256_or_si256(top, _mm256_set1_epi32(0x40)), nan);
        _mm256_blendv_epi8(r, _mm256_and_si256(top, _mm256_set1_epi32(0x8000)), tiny)
    }
}

// SAFETY (all): the caller vouches for the instruction set and for the pointers, see `Lanes`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Bf16Dot for Avx2x16 {
    type Pair = (__m256i, __m256i);
    #[inline(always)]
    unsafe fn load_pair(p: *const u8) -> Self::Pair {
        unsafe { (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())) }
    }
    #[inline(always)]
    unsafe fn mac_pair(self, a: Self::Pair, b: Self::Pair) -> Self {
        unsafe { Avx2x16(mac8(self.0, a.0, b.0), mac8(self.1, a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn product(product: Product, _working: *mut u8) {
        // SAFETY: the caller's.
        unsafe {
            if !multiply_without_flushes(product) {
                multiply::<Self, BothBf16>(product);
            }
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        unsafe {
            let packed = _mm256_packus_epi32(round8(self.0), round8(self.1));
            _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0b11011000>(packed));
        }
    }
}
