use super::Generic16;
use crate::instructions::unpack::{Unpack, unpack};

impl Unpack for Generic16 {
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8, q: *mut u8, n: usize) {
        // SAFETY: the caller vouches for both.
        let (packed, q) =
            unsafe { (std::slice::from_raw_parts(p, n / 8 * BITS), std::slice::from_raw_parts_mut(q, n)) };
        unpack(BITS as u8, packed, q);
    }
}
