use std::arch::x86_64::*;

use super::Avx2x16;
use crate::instructions::unpack::Unpack;

impl Unpack for Avx2x16 {
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8, q: *mut u8, n: usize) {
        let mask = ((1u64 << BITS) - 1) * 0x0101_0101_0101_0101;
        for i in 0..n / 8 {
            let mut eight = [0u8; 8];
            // SAFETY: eight q lie in BITS bytes; the caller vouches for both ends and for BMI2.
            unsafe {
                std::ptr::copy_nonoverlapping(p.add(i * BITS), eight.as_mut_ptr(), BITS);
                let spread = _pdep_u64(u64::from_le_bytes(eight), mask);
                q.add(i * 8).cast::<[u8; 8]>().write_unaligned(spread.to_le_bytes());
            }
        }
    }
}
