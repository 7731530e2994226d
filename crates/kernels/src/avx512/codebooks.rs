//! Types of blocks whose integers are looked up, 64 columns at a time: eight or sixteen entries of a codebook are gathered at once, and a mask has their signs.

use std::arch::x86_64::*;

use crate::format::blocks::codebooks::{IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
use crate::format::blocks::unpack::{Block, E2M1, Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Nvfp4};

/// A type whose blocks are read so.
///
/// # Safety (of all)
/// The block is there, and so is the instruction set.
pub(super) trait Columns: Block {
    /// The integers of columns `64 * i..64 * i + 64`, in natural order.
    unsafe fn columns(block: *const u8, i: usize) -> __m512i;
}

#[inline(always)]
unsafe fn word(block: *const u8, at: usize) -> u64 {
    // SAFETY: the caller's.
    unsafe { u64::from(block.add(at).cast::<u16>().read_unaligned()) }
}

#[inline(always)]
unsafe fn long(block: *const u8, at: usize) -> u64 {
    // SAFETY: the caller's.
    unsafe { u64::from(block.add(at).cast::<u32>().read_unaligned()) }
}

#[inline(always)]
unsafe fn eight(block: *const u8, at: usize) -> u64 {
    // SAFETY: the caller's.
    unsafe { block.add(at).cast::<u64>().read_unaligned() }
}

/// Eight bytes as numbers of entries.
#[inline(always)]
unsafe fn numbers(bytes: u64) -> __m256i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64)) }
}

/// Values around `zero`, negative where the mask says so.
#[inline(always)]
unsafe fn signed(values: __m512i, zero: u8, negative: u64) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let zero = _mm512_set1_epi8(zero as i8);
        _mm512_mask_sub_epi8(_mm512_add_epi8(zero, values), negative, zero, values)
    }
}

/// Eight signs from seven: the eighth makes their number even. Of eight bytes at once.
#[inline(always)]
fn even(sevens: u64) -> u64 {
    let odd = sevens ^ (sevens >> 4 & 0x0f0f_0f0f_0f0f_0f0f);
    let odd = odd ^ (odd >> 2 & 0x3f3f_3f3f_3f3f_3f3f);
    let odd = (odd ^ odd >> 1) & 0x0101_0101_0101_0101;
    sevens | odd << 7
}

/// The signs of 64 columns from two words of four times seven bits.
#[inline(always)]
unsafe fn sevens(first: u64, second: u64) -> u64 {
    const EACH: u64 = 0x7f7f_7f7f;
    // SAFETY: the caller vouches for the instruction set.
    unsafe { even(_pdep_u64(first, EACH) | _pdep_u64(second, EACH) << 32) }
}

impl Columns for Iq2Xxs {
    #[inline(always)]
    unsafe fn columns(block: *const u8, i: usize) -> __m512i {
        // SAFETY: the caller's; a byte is less than the entries.
        unsafe {
            let at = 2 + 16 * i;
            let of = numbers(long(block, at) | long(block, at + 8) << 32);
            let values = _mm512_i32gather_epi64::<8>(of, IQ2_XXS.as_ptr().cast());
            signed(values, Self::ZERO, sevens(long(block, at + 4), long(block, at + 12)))
        }
    }
}

impl Columns for Iq2Xs {
    #[inline(always)]
    unsafe fn columns(block: *const u8, i: usize) -> __m512i {
        // SAFETY: the caller's; nine bits are less than the entries.
        unsafe {
            let words = _mm_loadu_si128(block.add(2 + 16 * i).cast());
            let of = _mm256_cvtepu16_epi32(_mm_and_si128(words, _mm_set1_epi16(511)));
            let signs = _mm_srli_epi16::<9>(words);
            let signs = _mm_cvtsi128_si64(_mm_packus_epi16(signs, signs)) as u64;
            signed(_mm512_i32gather_epi64::<8>(of, IQ2_XS.as_ptr().cast()), Self::ZERO, even(signs))
        }
    }
}

impl Columns for Iq2S {
    #[inline(always)]
    unsafe fn columns(block: *const u8, i: usize) -> __m512i {
        // SAFETY: the caller's; ten bits are less than the entries.
        unsafe {
            let high = _mm256_set1_epi32(word(block, 66 + 2 * i) as i32);
            let high = _mm256_srlv_epi32(high, _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
            let high = _mm256_slli_epi32::<8>(_mm256_and_si256(high, _mm256_set1_epi32(3)));
            let of = _mm256_or_si256(numbers(eight(block, 2 + 8 * i)), high);
            let values = _mm512_i32gather_epi64::<8>(of, IQ2_S.as_ptr().cast());
            signed(values, Self::ZERO, eight(block, 34 + 8 * i))
        }
    }
}

impl Columns for Iq3Xxs {
    #[inline(always)]
    unsafe fn columns(block: *const u8, i: usize) -> __m512i {
        // SAFETY: the caller's; a byte is less than the entries.
        unsafe {
            let of = _mm512_cvtepu8_epi32(_mm_loadu_si128(block.add(2 + 16 * i).cast()));
            let values = _mm512_i32gather_epi32::<4>(of, IQ3_XXS.as_ptr().cast());
            signed(values, Self::ZERO, sevens(long(block, 66 + 8 * i), long(block, 70 + 8 * i)))
        }
    }
}

impl Columns for Iq3S {
    #[inline(always)]
    unsafe fn columns(block: *const u8, i: usize) -> __m512i {
        // SAFETY: the caller's; nine bits are less than the entries.
        unsafe {
            let of = _mm512_cvtepu8_epi32(_mm_loadu_si128(block.add(2 + 16 * i).cast()));
            let high = word(block, 66 + 2 * i) as u16;
            let of = _mm512_mask_add_epi32(of, high, of, _mm512_set1_epi32(256));
            let values = _mm512_i32gather_epi32::<4>(of, IQ3_S.as_ptr().cast());
            signed(values, Self::ZERO, eight(block, 74 + 8 * i))
        }
    }
}

/// Values of IQ1 by their numbers, shifted by one down where the mask says so, else up.
#[inline(always)]
unsafe fn shifted(of: __m256i, down: u64) -> __m512i {
    // SAFETY: the caller's; eleven bits are less than the entries.
    unsafe {
        let (values, one) = (_mm512_i32gather_epi64::<8>(of, IQ1_S.as_ptr().cast()), _mm512_set1_epi8(1));
        _mm512_mask_sub_epi8(_mm512_add_epi8(values, one), down, values, one)
    }
}

impl Columns for Iq1S {
    #[inline(always)]
    unsafe fn columns(block: *const u8, i: usize) -> __m512i {
        // SAFETY: the caller's.
        unsafe {
            let (a, b) = (word(block, 34 + 4 * i), word(block, 36 + 4 * i));
            let high = _mm256_inserti128_si256::<1>(_mm256_set1_epi32(a as i32), _mm_set1_epi32(b as i32));
            let high = _mm256_srlv_epi32(high, _mm256_setr_epi32(0, 3, 6, 9, 0, 3, 6, 9));
            let high = _mm256_slli_epi32::<8>(_mm256_and_si256(high, _mm256_set1_epi32(7)));
            let down = ((a >> 15) * 0xffff_ffff) | ((b >> 15) * 0xffff_ffff_0000_0000);
            shifted(_mm256_or_si256(numbers(eight(block, 2 + 8 * i)), high), down)
        }
    }
}

impl Columns for Iq1M {
    #[inline(always)]
    unsafe fn columns(block: *const u8, i: usize) -> __m512i {
        const EACH: u64 = 0x0101_0101_0101_0101;
        // SAFETY: the caller's.
        unsafe {
            let high = _pdep_u64(long(block, 32 + 4 * i), 15 * EACH);
            let of = _mm256_or_si256(numbers(eight(block, 8 * i)), _mm256_slli_epi32::<8>(numbers(high & (7 * EACH))));
            shifted(of, (high >> 3 & EACH) * 255)
        }
    }
}

impl Columns for Nvfp4 {
    #[inline(always)]
    unsafe fn columns(block: *const u8, _: usize) -> __m512i {
        // SAFETY: the caller's.
        unsafe {
            let packed = _mm512_castsi256_si512(_mm256_loadu_si256(block.add(4).cast()));
            let twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), packed);
            let halves = _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 4, 0, 4, 0, 4, 0, 4));
            let values = _mm512_broadcast_i32x4(_mm_loadu_si128(E2M1.as_ptr().cast()));
            _mm512_shuffle_epi8(values, _mm512_and_si512(halves, _mm512_set1_epi8(15)))
        }
    }
}
