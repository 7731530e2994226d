//! Blocks unpacked in registers of 32 bytes: what the plain definitions of [`crate::format::blocks::unpack`] say, of which compilers make a byte at a time for many types.

use std::arch::x86_64::*;

use crate::format::blocks::unpack::{
    Block, E2M1, IQ4, Iq4Nl, Iq4Xs, Mxfp4, Nvfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0,
};
use crate::instructions::unpack::{biases, scales};

/// A type's integers.
pub(super) trait Integers: Block {
    /// Writes a block's integers, [`Block::COLUMNS`] of them.
    ///
    /// # Safety
    /// Both ends hold a block's bytes, at any alignment, and AVX2 is there.
    unsafe fn integers(block: *const u8, q: *mut u8);
}

/// Unpacks `count` blocks: see [`Unpack::unpack_blocks`](crate::instructions::unpack::Unpack::unpack_blocks).
///
/// # Safety
/// As for that, and AVX2 is there.
#[inline(always)]
pub(super) unsafe fn each<B: Integers>(blocks: *const u8, count: usize, q: *mut u8, s: *mut f32, b: *mut f32) {
    let groups = B::COLUMNS / B::GROUP;
    // SAFETY: the caller's.
    unsafe {
        for i in 0..count {
            let block = blocks.add(i * B::BYTES);
            B::integers(block, q.add(i * B::COLUMNS));
            scales::<B>(block, s.add(i * groups), b.add(i * groups));
        }
        biases::<B>(count * groups, s, b);
    }
}

/// 32 bytes.
#[inline(always)]
unsafe fn load(p: *const u8) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

#[inline(always)]
unsafe fn store(q: *mut u8, v: __m256i) {
    // SAFETY: the caller's.
    unsafe { _mm256_storeu_si256(q.cast(), v) }
}

/// `BITS` bits of each byte, from bit `from` on.
#[inline(always)]
unsafe fn bits<const BITS: u32>(v: __m256i, from: u32) -> __m256i {
    // SAFETY: the caller's. What comes from the next byte is above the mask.
    unsafe { _mm256_and_si256(_mm256_srl_epi16(v, _mm_cvtsi32_si128(from as i32)), _mm256_set1_epi8((1 << BITS) - 1)) }
}

/// `BITS` bits of each byte from bit `from` on, as bits `to..` of the bytes.
#[inline(always)]
unsafe fn moved<const BITS: u32>(v: __m256i, from: u32, to: u32) -> __m256i {
    // SAFETY: the caller's. None leaves its byte.
    unsafe { _mm256_sll_epi16(bits::<BITS>(v, from), _mm_cvtsi32_si128(to as i32)) }
}

/// Low halves of sixteen bytes, then high halves.
#[inline(always)]
unsafe fn nibbles(p: *const u8) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let v = _mm_loadu_si128(p.cast());
        _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16::<4>(v), v), _mm256_set1_epi8(15))
    }
}

/// 16 in each byte whose bit of `p` is set, of which there are 32.
#[inline(always)]
unsafe fn fifths(p: *const u8) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let all = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
        let byte = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(all, byte), bit), bit);
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    }
}

/// The values of sixteen numbers of four bits.
#[inline(always)]
unsafe fn looked_up(values: &[u8; 16], numbers: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(values.as_ptr().cast())), numbers) }
}

/// Types of 32 columns, whose integers are one register.
macro_rules! small {
    ($($name:ident: |$block:ident| $integers:expr;)+) => {
        $(
            impl Integers for $name {
                #[inline(always)]
                unsafe fn integers($block: *const u8, q: *mut u8) {
                    // SAFETY: the caller's.
                    unsafe { store(q, $integers) }
                }
            }
        )+
    };
}

small! {
    Q4_0: |block| nibbles(block.add(2));
    Q4_1: |block| nibbles(block.add(4));
    Q5_0: |block| _mm256_or_si256(nibbles(block.add(6)), fifths(block.add(2)));
    Q5_1: |block| _mm256_or_si256(nibbles(block.add(8)), fifths(block.add(4)));
    Q8_0: |block| _mm256_xor_si256(load(block.add(2)), _mm256_set1_epi8(-128));
    Iq4Nl: |block| looked_up(&IQ4, nibbles(block.add(2)));
    Mxfp4: |block| looked_up(&E2M1, nibbles(block.add(1)));
}

impl Integers for Iq4Xs {
    #[inline(always)]
    unsafe fn integers(block: *const u8, q: *mut u8) {
        for g in 0..8 {
            // SAFETY: the caller's.
            unsafe { store(q.add(32 * g), looked_up(&IQ4, nibbles(block.add(8 + 16 * g)))) };
        }
    }
}

impl Integers for Nvfp4 {
    #[inline(always)]
    unsafe fn integers(block: *const u8, q: *mut u8) {
        for two in 0..2 {
            // SAFETY: the caller's.
            unsafe {
                // Low halves of two groups, and their high halves: each group's belong together.
                let numbers = _mm256_permute4x64_epi64::<0b11_01_10_00>(nibbles(block.add(4 + 16 * two)));
                store(q.add(32 * two), looked_up(&E2M1, numbers));
            }
        }
    }
}

/// Integers of two bits: the lowest two bits of 32 bytes, then the next two bits of the same bytes, and so on.
#[inline(always)]
unsafe fn pair(bytes: *const u8, k: u32) -> __m256i {
    // SAFETY: the caller's.
    unsafe { bits::<2>(load(bytes.add(32 * (k as usize / 4))), k % 4 * 2) }
}

impl Integers for Q2K {
    #[inline(always)]
    unsafe fn integers(block: *const u8, q: *mut u8) {
        for k in 0..8 {
            // SAFETY: the caller's.
            unsafe { store(q.add(32 * k as usize), pair(block.add(16), k)) };
        }
    }
}

impl Integers for Q3K {
    #[inline(always)]
    unsafe fn integers(block: *const u8, q: *mut u8) {
        for k in 0..8 {
            // SAFETY: the caller's.
            unsafe {
                let high = moved::<1>(load(block), k, 2);
                store(q.add(32 * k as usize), _mm256_or_si256(pair(block.add(32), k), high));
            }
        }
    }
}

impl Integers for Q4K {
    #[inline(always)]
    unsafe fn integers(block: *const u8, q: *mut u8) {
        for k in 0..4 {
            // SAFETY: the caller's.
            unsafe {
                let v = load(block.add(16 + 32 * k));
                store(q.add(64 * k), bits::<4>(v, 0));
                store(q.add(64 * k + 32), bits::<4>(v, 4));
            }
        }
    }
}

impl Integers for Q5K {
    #[inline(always)]
    unsafe fn integers(block: *const u8, q: *mut u8) {
        for k in 0..4 {
            // SAFETY: the caller's.
            unsafe {
                let (v, high) = (load(block.add(48 + 32 * k)), load(block.add(16)));
                for half in 0..2 {
                    let fifth = moved::<1>(high, (2 * k + half) as u32, 4);
                    store(q.add(64 * k + 32 * half), _mm256_or_si256(bits::<4>(v, 4 * half as u32), fifth));
                }
            }
        }
    }
}

impl Integers for Q6K {
    #[inline(always)]
    unsafe fn integers(block: *const u8, q: *mut u8) {
        for half in 0..2 {
            // SAFETY: the caller's.
            unsafe {
                let low = [load(block.add(64 * half)), load(block.add(64 * half + 32))];
                let high = load(block.add(128 + 32 * half));
                for k in 0..4 {
                    let four = bits::<4>(low[k % 2], 4 * (k as u32 / 2));
                    store(q.add(128 * half + 32 * k), _mm256_or_si256(four, moved::<2>(high, 2 * k as u32, 4)));
                }
            }
        }
    }
}
