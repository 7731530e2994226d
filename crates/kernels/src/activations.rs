//! Activations in the encodings that [`matmul`](mod@crate::matmul) consumes.
//!
//! What is not finite stays visible: in bf16 as itself, in int8 as a group whose scale is not finite (with q of 0), which makes every product with it
//! NaN or infinite. Nothing here panics on any bits.

use crate::input::ORDER;
use crate::lanes::{Generic16, Lanes};
use crate::matmul::Pairs;
use crate::simd;

/// Conversions to small integers.
///
/// # Safety
/// As for [`Lanes`].
pub(crate) trait Encode: Lanes {
    /// The greatest `bits & 0x7fff_ffff` of 32 f32 at `p`, as f32: the greatest size, or a NaN if there is one.
    unsafe fn greatest_size(p: *const f32) -> f32;
    /// Rounds sixteen lanes of size at most 127 (or NaN, which gives 0) to i8 and writes them in [`ORDER`]; their sum.
    unsafe fn store_i8(self, p: *mut i8) -> i32;
}

impl Encode for Generic16 {
    #[inline(always)]
    unsafe fn greatest_size(p: *const f32) -> f32 {
        // SAFETY: the caller vouches for 32 values.
        let x = unsafe { p.cast::<[f32; 32]>().read_unaligned() };
        f32::from_bits(x.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7fff_ffff)))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) -> i32 {
        // SAFETY: the caller vouches for sixteen bytes.
        unsafe {
            let q = self.to_array().map(|x| x.round_ties_even() as i8);
            p.cast::<[i8; 16]>().write_unaligned(std::array::from_fn(|j| q[j / 8 * 8 + ORDER[j % 8]]));
            q.iter().map(|&q| q as i32).sum()
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Encode;
    use crate::input::ORDER;
    use crate::lanes::{Avx2x16, Avx512x16};
    use std::arch::x86_64::*;

    /// Two eights to their order.
    #[inline(always)]
    unsafe fn ordered(bytes: __m128i) -> __m128i {
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
                let load =
                    |i: usize| _mm256_and_si256(_mm256_loadu_si256(p.add(i).cast()), _mm256_set1_epi32(0x7fff_ffff));
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

    // SAFETY (all): as above.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Encode for Avx512x16 {
        #[inline(always)]
        unsafe fn greatest_size(p: *const f32) -> f32 {
            unsafe {
                let load =
                    |i: usize| _mm512_and_si512(_mm512_loadu_si512(p.add(i).cast()), _mm512_set1_epi32(0x7fff_ffff));
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
}

#[inline(always)]
unsafe fn encode_bf16_lanes<V: Pairs>(x: &[f32], out: &mut [u16]) {
    assert_eq!(x.len(), out.len(), "one bf16 per f32");
    let whole = x.len() / 16 * 16;
    // SAFETY: every access stays inside the slices; a rest goes through a buffer; the caller vouches for the instruction set.
    unsafe {
        for i in (0..whole).step_by(16) {
            V::load(x.as_ptr().add(i)).store_bf16(out.as_mut_ptr().add(i).cast());
        }
        if whole < x.len() {
            let mut rest = [0u16; 16];
            V::load_first(x.as_ptr().add(whole), x.len() - whole).store_bf16(rest.as_mut_ptr().cast());
            out[whole..].copy_from_slice(&rest[..x.len() - whole]);
        }
    }
}

simd! {
    /// Rounds to bf16 bits: to nearest even, denormals to zero of their sign, NaN quieted (as `vcvtneps2bf16` does it).
    pub fn encode_bf16(x: &[f32], out: &mut [u16]) = encode_bf16_lanes
}

#[inline(always)]
unsafe fn encode_int8_lanes<V: Encode>(x: &[f32], q: &mut [i8], scales: &mut [f32], sums: &mut [f32]) {
    let groups = x.len() / 32;
    assert!(x.len() == groups * 32 && q.len() == x.len(), "whole groups of 32");
    assert!(scales.len() == groups && sums.len() == groups, "one scale and one sum per group");
    for g in 0..groups {
        // SAFETY: group g lies inside the slices; the caller vouches for the instruction set.
        unsafe {
            let (x, q) = (x.as_ptr().add(g * 32), q.as_mut_ptr().add(g * 32));
            let a = V::greatest_size(x);
            let inv = 127.0 / a;
            let inv = V::splat(if inv.is_finite() { inv } else { 0.0 });
            let sum = V::load(x).mul(inv).store_i8(q) + V::load(x.add(16)).mul(inv).store_i8(q.add(16));
            scales[g] = a / 127.0;
            sums[g] = scales[g] * sum as f32;
        }
    }
}

simd! {
    /// Quantises groups of 32: `a = max |x|`, `inv = 127 / a` (0 where that is not finite), `q = round(x * inv)`, ties to even,
    /// `scales = a / 127`, `sums = scales * sum of q`. `x`, `q` (in [`ORDER`]): [n, cols]; `scales`, `sums`: [n, cols / 32].
    pub fn encode_int8(x: &[f32], q: &mut [i8], scales: &mut [f32], sums: &mut [f32]) = encode_int8_lanes
}
