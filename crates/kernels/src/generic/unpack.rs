use super::Generic16;
use crate::format::BlockFormat;
use crate::format::blocks::unpack::with_block;
use crate::format::packing::Packing;
use crate::instructions::unpack::{Unpack, each_block, unpack};

impl Unpack for Generic16 {
    #[inline(always)]
    unsafe fn unpack<P: Packing>(p: *const u8, q: *mut u8, n: usize) {
        // SAFETY: the caller vouches for both.
        let (packed, q) =
            unsafe { (std::slice::from_raw_parts(p, n / 8 * P::BITS), std::slice::from_raw_parts_mut(q, n)) };
        unpack(P::BITS as u8, packed, q);
    }

    unsafe fn unpack_blocks(
        format: BlockFormat,
        blocks: *const u8,
        count: usize,
        q: *mut u8,
        s: *mut f32,
        b: *mut f32,
    ) {
        // SAFETY: the caller's.
        unsafe { with_block!(format, B => each_block::<B>(blocks, count, q, s, b)) }
    }
}
