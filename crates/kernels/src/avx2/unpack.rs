use std::arch::x86_64::*;

use super::Avx2x16;
use crate::format::BlockFormat;
use crate::format::packing::Packing;
use crate::instructions::unpack::{Unpack, unpack_each};

impl Unpack for Avx2x16 {
    #[inline(always)]
    unsafe fn unpack<P: Packing>(p: *const u8, q: *mut u8, n: usize) {
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
        unsafe { unpack_each(format, blocks, count, q, s, b) }
    }
}
