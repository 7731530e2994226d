use std::arch::aarch64::*;

use super::f32_dot::{four, narrow8, narrow16};
use super::{Neon16, Products};
use crate::instructions::bytes::Bytes;

/// Four registers from their numbers.
macro_rules! four {
    (|$i:ident| $each:expr) => {{
        let at = |$i: usize| $each;
        [at(0), at(1), at(2), at(3)]
    }};
}

/// Sixteen bytes of each of four rows become sixteen times four, one of each row.
#[inline(always)]
unsafe fn interleaved(a: uint8x16_t, b: uint8x16_t, c: uint8x16_t, d: uint8x16_t) -> [uint8x16_t; 4] {
    // SAFETY: NEON is there.
    unsafe {
        let pairs = |a, b| (vreinterpretq_u16_u8(vzip1q_u8(a, b)), vreinterpretq_u16_u8(vzip2q_u8(a, b)));
        let ((low, high), (low_2, high_2)) = (pairs(a, b), pairs(c, d));
        let all = [vzip1q_u16(low, low_2), vzip2q_u16(low, low_2), vzip1q_u16(high, high_2), vzip2q_u16(high, high_2)];
        four(all, |v| vreinterpretq_u8_u16(v))
    }
}

// SAFETY (all): the caller vouches for the instruction set and for the pointers, see `Bytes`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: Products> Bytes for Neon16<P> {
    type Sums = [int32x4_t; 4];
    type Quads = [uint8x16_t; 4];
    #[inline(always)]
    unsafe fn start(sum: i32) -> Self::Sums {
        unsafe { [vdupq_n_s32(sum); 4] }
    }
    #[inline(always)]
    unsafe fn load_sums(p: *const i32, more: i32) -> Self::Sums {
        four!(|i| unsafe { vaddq_s32(vld1q_s32(p.add(4 * i)), vdupq_n_s32(more)) })
    }
    #[inline(always)]
    unsafe fn store_sums(sums: Self::Sums, p: *mut i32) {
        for i in 0..4 {
            unsafe { vst1q_s32(p.add(4 * i), sums[i]) };
        }
    }
    #[inline(always)]
    unsafe fn load_quads(p: *const u8) -> Self::Quads {
        four!(|i| unsafe { vld1q_u8(p.add(16 * i)) })
    }
    #[inline(always)]
    unsafe fn load_flipped(p: *const u8) -> Self::Quads {
        four!(|i| unsafe { veorq_u8(vld1q_u8(p.add(16 * i)), vdupq_n_u8(0x80)) })
    }
    #[inline(always)]
    unsafe fn multiply_quads(sums: Self::Sums, a: Self::Quads, b: Self::Quads) -> Self::Sums {
        four!(|i| unsafe { P::mixed(sums[i], a[i], vreinterpretq_s8_u8(b[i])) })
    }
    #[inline(always)]
    unsafe fn total16(v: [Self::Sums; 16]) -> Self::Sums {
        unsafe {
            let total = |i: usize| vaddq_s32(vaddq_s32(v[i][0], v[i][1]), vaddq_s32(v[i][2], v[i][3]));
            let pair = |i: usize| vpaddq_s32(total(i), total(i + 1));
            four!(|i| vpaddq_s32(pair(4 * i), pair(4 * i + 2)))
        }
    }
    #[inline(always)]
    unsafe fn multiply_unsigned(sums: Self::Sums, a: Self::Quads, b: i32) -> Self::Sums {
        let b = unsafe { vreinterpretq_s8_s32(vdupq_n_s32(b)) };
        four!(|i| unsafe { P::mixed(sums[i], a[i], b) })
    }
    #[inline(always)]
    unsafe fn multiply_signed(sums: Self::Sums, a: Self::Quads, b: i32) -> Self::Sums {
        let b = unsafe { vreinterpretq_u8_s32(vdupq_n_s32(b)) };
        four!(|i| unsafe { P::mixed(sums[i], b, vreinterpretq_s8_u8(a[i])) })
    }
    #[inline(always)]
    unsafe fn add_sums(a: Self::Sums, b: Self::Sums) -> Self::Sums {
        four!(|i| unsafe { vaddq_s32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn from_sums(sums: Self::Sums) -> Self {
        Neon16::of(four!(|i| unsafe { vcvtq_f32_s32(sums[i]) }))
    }
    #[inline(always)]
    unsafe fn store_flipped(self, p: *mut u8) {
        for i in 0..4 {
            unsafe { vst1q_u8(p.add(16 * i), veorq_u8(vreinterpretq_u8_f32(self.four()[i]), vdupq_n_u8(0x80))) };
        }
    }
    #[inline(always)]
    unsafe fn store_rounded_u8(self, p: *mut u8) {
        unsafe { vst1q_s8(p.cast(), narrow8(narrow16(self.rounded()))) }
    }
    #[inline(always)]
    unsafe fn store_rounded_u16(self, high: *mut u8, low: *mut u8) {
        unsafe {
            let words = narrow16(self.rounded());
            vst1q_s8(high.cast(), narrow8([vshrq_n_s16::<8>(words[0]), vshrq_n_s16::<8>(words[1])]));
            vst1q_s8(low.cast(), narrow8(words));
        }
    }
    #[inline(always)]
    unsafe fn join_sums(high: Self::Sums, low: Self::Sums) -> Self::Sums {
        four!(|i| unsafe { vaddq_s32(vshlq_n_s32::<8>(high[i]), low[i]) })
    }
    #[inline(always)]
    unsafe fn interleave([a, b, c, d]: [*const u8; 4]) -> Self::Quads {
        unsafe { interleaved(vld1q_u8(a), vld1q_u8(b), vld1q_u8(c), vld1q_u8(d)) }
    }
    #[inline(always)]
    unsafe fn interleave64([a, b, c, d]: [*const u8; 4]) -> [Self::Quads; 4] {
        four!(|i| unsafe { Self::interleave([a.add(16 * i), b.add(16 * i), c.add(16 * i), d.add(16 * i)]) })
    }
    #[inline(always)]
    unsafe fn interleave_quarters(rows: [*const u8; 4]) -> [Self::Quads; 4] {
        unsafe { Self::interleave64(rows) }
    }
    #[inline(always)]
    unsafe fn in_order(sums: [Self::Sums; 4]) -> [Self::Sums; 4] {
        sums
    }
    #[inline(always)]
    unsafe fn store_quads(quads: Self::Quads, p: *mut u8) {
        for i in 0..4 {
            unsafe { vst1q_u8(p.add(16 * i), quads[i]) };
        }
    }
}
