use std::arch::aarch64::*;

use super::f32_dot::four;
use super::{Neon16, Products};
use crate::instructions::int11_dot::Int11Dot;

// SAFETY (all): NEON is there; the caller vouches for the pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: Products> Int11Dot for Neon16<P> {
    type Sums = [int32x4_t; 4];
    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        unsafe { [vdupq_n_s32(0); 4] }
    }
    #[inline(always)]
    unsafe fn widen_pairs(p: *const u8) -> Self {
        unsafe {
            let (a, b) = (vld1q_u8(p), vld1q_u8(p.add(16)));
            let wide = [vmovl_u8(vget_low_u8(a)), vmovl_high_u8(a), vmovl_u8(vget_low_u8(b)), vmovl_high_u8(b)];
            Neon16::of(four(wide, |v| vreinterpretq_f32_u16(v)))
        }
    }
    #[inline(always)]
    unsafe fn add_pairs(sums: Self::Sums, w: Self, x: *const i16) -> Self::Sums {
        unsafe {
            let x = vreinterpretq_s16_s32(vdupq_n_s32(x.cast::<i32>().read_unaligned()));
            let at = |i: usize| {
                let w = vreinterpretq_s16_f32(w.four()[i]);
                let (low, high) = (vmull_s16(vget_low_s16(w), vget_low_s16(x)), vmull_high_s16(w, x));
                vaddq_s32(sums[i], vpaddq_s32(low, high))
            };
            [at(0), at(1), at(2), at(3)]
        }
    }
    #[inline(always)]
    unsafe fn row_sums(rows: *const u8, stride: usize, x: *const i16, n: usize) -> Self::Sums {
        unsafe {
            let row = |r: usize| {
                let mut sums = [vdupq_n_s32(0); 2];
                for i in (0..n).step_by(8) {
                    let w = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(rows.add(stride * r + i))));
                    let x = vld1q_s16(x.add(i));
                    sums[0] = vmlal_s16(sums[0], vget_low_s16(w), vget_low_s16(x));
                    sums[1] = vmlal_high_s16(sums[1], w, x);
                }
                vaddq_s32(sums[0], sums[1])
            };
            let at = |i: usize| {
                let (low, high) = (vpaddq_s32(row(4 * i), row(4 * i + 1)), vpaddq_s32(row(4 * i + 2), row(4 * i + 3)));
                vpaddq_s32(low, high)
            };
            [at(0), at(1), at(2), at(3)]
        }
    }
    #[inline(always)]
    unsafe fn add_to_all(sums: Self::Sums, n: i32) -> Self::Sums {
        unsafe {
            let n = vdupq_n_s32(n);
            [vaddq_s32(sums[0], n), vaddq_s32(sums[1], n), vaddq_s32(sums[2], n), vaddq_s32(sums[3], n)]
        }
    }
    #[inline(always)]
    unsafe fn less(pairs: Self, zero: i16) -> Self {
        Neon16::of(four(pairs.four(), |w| unsafe {
            vreinterpretq_f32_s16(vsubq_s16(vreinterpretq_s16_f32(w), vdupq_n_s16(zero)))
        }))
    }
    #[inline(always)]
    unsafe fn to_f32(sums: Self::Sums) -> Self {
        Neon16::of(four(sums, |s| unsafe { vcvtq_f32_s32(s) }))
    }
}
