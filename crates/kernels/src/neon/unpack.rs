use std::arch::aarch64::*;

use super::{Neon16, Products};
use crate::format::packing::Packing;
use crate::instructions::unpack::Unpack;

/// For each of sixteen integers of so many bits: the two bytes that it lies in, and how far to the left of bit 0 it begins.
struct Spread<const BITS: usize>;

impl<const BITS: usize> Spread<BITS> {
    const BYTES: [[u8; 16]; 2] = {
        let (mut index, mut j) = ([[0; 16]; 2], 0);
        while j < 16 {
            let byte = (j * BITS / 8) as u8;
            index[j / 8][j % 8 * 2] = byte;
            index[j / 8][j % 8 * 2 + 1] = byte + 1;
            j += 1;
        }
        index
    };
    /// The same for both eights.
    const SHIFTS: [i16; 8] = {
        let (mut shifts, mut j) = ([0; 8], 0);
        while j < 8 {
            shifts[j] = -((j * BITS % 8) as i16);
            j += 1;
        }
        shifts
    };
}

/// The sixteen integers at the start of `bytes`.
#[inline(always)]
unsafe fn spread<const BITS: usize>(bytes: uint8x16_t) -> uint8x16_t {
    // SAFETY: NEON is there; the tables are constants.
    unsafe {
        let shifts = vld1q_s16(Spread::<BITS>::SHIFTS.as_ptr());
        let eight = |i: usize| {
            let words = vqtbl1q_u8(bytes, vld1q_u8(Spread::<BITS>::BYTES[i].as_ptr()));
            vshlq_u16(vreinterpretq_u16_u8(words), shifts)
        };
        let all = vmovn_high_u16(vmovn_u16(eight(0)), eight(1));
        vandq_u8(all, vdupq_n_u8(((1u16 << BITS) - 1) as u8))
    }
}

/// So many times sixteen integers.
#[inline(always)]
unsafe fn spread_all<const BITS: usize>(p: *const u8, q: *mut u8, sixteens: usize) {
    for i in 0..sixteens {
        let mut bytes = [0u8; 16];
        // SAFETY: sixteen integers have 2 * BITS bytes; the caller vouches for both ends.
        unsafe {
            std::ptr::copy_nonoverlapping(p.add(i * 2 * BITS), bytes.as_mut_ptr(), 2 * BITS);
            vst1q_u8(q.add(16 * i), spread::<BITS>(vld1q_u8(bytes.as_ptr())));
        }
    }
}

// `unpack_blocks` is compiled for NEON as it is: that is what the target has.
impl<P: Products> Unpack for Neon16<P> {
    #[inline(always)]
    unsafe fn unpack<K: Packing>(p: *const u8, q: *mut u8, n: usize) {
        // SAFETY: the caller vouches for both ends, and for a multiple of 32.
        unsafe {
            match K::BITS {
                2 => {
                    for i in 0..n / 32 {
                        let (b, mask) = (vld1_u8(p.add(8 * i)), vdup_n_u8(3));
                        let fours = uint8x8x4_t(
                            vand_u8(b, mask),
                            vand_u8(vshr_n_u8::<2>(b), mask),
                            vand_u8(vshr_n_u8::<4>(b), mask),
                            vshr_n_u8::<6>(b),
                        );
                        vst4_u8(q.add(32 * i), fours);
                    }
                }
                3 => spread_all::<3>(p, q, n / 16),
                4 => {
                    for i in 0..n / 32 {
                        let b = vld1q_u8(p.add(16 * i));
                        let (even, odd) = (vandq_u8(b, vdupq_n_u8(15)), vshrq_n_u8::<4>(b));
                        vst1q_u8(q.add(32 * i), vzip1q_u8(even, odd));
                        vst1q_u8(q.add(32 * i + 16), vzip2q_u8(even, odd));
                    }
                }
                5 => spread_all::<5>(p, q, n / 16),
                6 => spread_all::<6>(p, q, n / 16),
                _ => std::ptr::copy_nonoverlapping(p, q, n),
            }
        }
    }
}
