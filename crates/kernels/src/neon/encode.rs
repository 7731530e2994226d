use std::arch::aarch64::*;

use super::f32_dot::{narrow8, narrow16};
use super::{Neon16, Products};
use crate::input::ORDER;
use crate::instructions::encode::Encode;

/// Bytes of two eights in their order.
pub const ORDERED: [u8; 16] = {
    let (mut index, mut j) = ([0; 16], 0);
    while j < 16 {
        index[j] = (j / 8 * 8 + ORDER[j % 8]) as u8;
        j += 1;
    }
    index
};

// SAFETY (all): NEON is there; the caller vouches for the pointers, see `Encode`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: Products> Encode for Neon16<P> {
    #[inline(always)]
    unsafe fn greatest_size(p: *const f32) -> f32 {
        unsafe {
            // Greater sizes have greater bits, and NaN the greatest.
            let load = |i: usize| vandq_u32(vld1q_u32(p.add(4 * i).cast()), vdupq_n_u32(0x7fff_ffff));
            let mut m = load(0);
            for i in 1..8 {
                m = vmaxq_u32(m, load(i));
            }
            f32::from_bits(vmaxvq_u32(m))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) -> i32 {
        unsafe {
            // NaN converts to 0.
            let bytes = narrow8(narrow16(self.rounded()));
            vst1q_s8(p, vqtbl1q_s8(bytes, vld1q_u8(ORDERED.as_ptr())));
            i32::from(vaddlvq_s8(bytes))
        }
    }
}
