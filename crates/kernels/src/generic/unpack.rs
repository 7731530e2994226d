use super::Generic16;
use crate::format::packing::Packing;
use crate::instructions::unpack::{Unpack, unpack};

impl Unpack for Generic16 {
    #[inline(always)]
    unsafe fn unpack<P: Packing>(p: *const u8, q: *mut u8, n: usize) {
        // SAFETY: the caller vouches for both.
        let (packed, q) =
            unsafe { (std::slice::from_raw_parts(p, n / 8 * P::BITS), std::slice::from_raw_parts_mut(q, n)) };
        unpack(P::BITS as u8, packed, q);
    }
}
