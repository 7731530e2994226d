use std::arch::x86_64::*;

use super::Avx2x16;
use super::blocks::each;
use crate::format::BlockFormat;
use crate::format::blocks::unpack::{
    Iq4Nl, Iq4Xs, Mxfp4, Nvfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0,
};
use crate::format::packing::Packing;
use crate::instructions::unpack::{Unpack, unpack_each};

impl Unpack for Avx2x16 {
    #[inline(always)]
    unsafe fn unpack<P: Packing>(p: *const u8, q: *mut u8, n: usize) {
        if P::BITS == 4 || P::BITS == 2 {
            // SAFETY: the caller's.
            return unsafe { unpack_in_registers::<P>(p, q, n) };
        }
        const EACH: u64 = 0x0101_0101_0101_0101;
        let mask = ((1u64 << P::BITS) - 1) * EACH;
        for i in 0..n / 8 {
            let mut eight = [0u8; 8];
            // SAFETY: eight q have BITS bytes; the caller vouches for both ends and for BMI2.
            unsafe {
                std::ptr::copy_nonoverlapping(p.add(i * P::BITS), eight.as_mut_ptr(), P::BITS);
                let spread = _pdep_u64(u64::from_le_bytes(eight), mask);
                q.add(i * 8).cast::<[u8; 8]>().write_unaligned(spread.to_le_bytes());
            }
        }
    }

    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    unsafe fn unpack_blocks(
        format: BlockFormat,
        blocks: *const u8,
        count: usize,
        q: *mut u8,
        s: *mut f32,
        b: *mut f32,
    ) {
        // SAFETY: the caller's.
        unsafe {
            match format {
                BlockFormat::Q4_0 => each::<Q4_0>(blocks, count, q, s, b),
                BlockFormat::Q4_1 => each::<Q4_1>(blocks, count, q, s, b),
                BlockFormat::Q5_0 => each::<Q5_0>(blocks, count, q, s, b),
                BlockFormat::Q5_1 => each::<Q5_1>(blocks, count, q, s, b),
                BlockFormat::Q8_0 => each::<Q8_0>(blocks, count, q, s, b),
                BlockFormat::Q2K => each::<Q2K>(blocks, count, q, s, b),
                BlockFormat::Q3K => each::<Q3K>(blocks, count, q, s, b),
                BlockFormat::Q4K => each::<Q4K>(blocks, count, q, s, b),
                BlockFormat::Q5K => each::<Q5K>(blocks, count, q, s, b),
                BlockFormat::Q6K => each::<Q6K>(blocks, count, q, s, b),
                BlockFormat::Iq4Nl => each::<Iq4Nl>(blocks, count, q, s, b),
                BlockFormat::Iq4Xs => each::<Iq4Xs>(blocks, count, q, s, b),
                BlockFormat::Mxfp4 => each::<Mxfp4>(blocks, count, q, s, b),
                BlockFormat::Nvfp4 => each::<Nvfp4>(blocks, count, q, s, b),
                // Their values come from codebooks.
                BlockFormat::Iq3Xxs
                | BlockFormat::Iq3S
                | BlockFormat::Iq2Xxs
                | BlockFormat::Iq2Xs
                | BlockFormat::Iq2S
                | BlockFormat::Iq1S
                | BlockFormat::Iq1M => unpack_each(format, blocks, count, q, s, b),
            }
        }
    }
}

/// [`Unpack::unpack`] of 2 or 4 bits, sixteen or eight bytes at a time. (`pdep` takes eight q at a time, and hundreds of cycles on AMD's processors before Zen 3.)
///
/// # Safety
/// As for [`Unpack::unpack`].
#[inline(always)]
unsafe fn unpack_in_registers<P: Packing>(p: *const u8, q: *mut u8, n: usize) {
    // SAFETY: 32 q have 4 * BITS bytes; the caller vouches for both ends and for AVX2.
    unsafe {
        for i in (0..n).step_by(32) {
            let (from, mask) = (p.add(i / 8 * P::BITS), _mm_set1_epi8((1 << P::BITS) - 1));
            let (even, odd) = if P::BITS == 4 {
                let v = _mm_loadu_si128(from.cast());
                (v, _mm_srli_epi16::<4>(v))
            } else {
                let v = _mm_loadl_epi64(from.cast());
                // Pairs of a byte: q 0 and 1 in one nibble, 2 and 3 in the next.
                let pairs = _mm_unpacklo_epi8(v, _mm_srli_epi16::<4>(v));
                (pairs, _mm_srli_epi16::<2>(pairs))
            };
            let (even, odd) = (_mm_and_si128(even, mask), _mm_and_si128(odd, mask));
            let all = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
            _mm256_storeu_si256(q.add(i).cast(), all);
        }
    }
}
