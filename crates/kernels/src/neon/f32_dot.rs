//! Sixteen lanes in four registers.

use std::arch::aarch64::*;
use std::marker::PhantomData;

use super::{Neon16, Products};
use crate::instructions::f32_dot::Lanes;

impl<P> Neon16<P> {
    #[inline(always)]
    pub fn of(lanes: [float32x4_t; 4]) -> Self {
        Neon16(lanes, PhantomData)
    }

    /// The four registers.
    #[inline(always)]
    pub fn four(self) -> [float32x4_t; 4] {
        self.0
    }
}

/// The four registers of an operation on four registers of one or two operands.
macro_rules! each {
    (|$i:ident| $each:expr) => {{
        let at = |$i: usize| $each;
        Neon16::of([at(0), at(1), at(2), at(3)])
    }};
}

/// The four results of a function.
#[inline(always)]
pub fn four<A: Copy, B>(v: [A; 4], f: impl Fn(A) -> B) -> [B; 4] {
    // Not `map`, which may be a call.
    [f(v[0]), f(v[1]), f(v[2]), f(v[3])]
}

/// Sixteen unsigned bytes as four times four integers.
#[inline(always)]
pub unsafe fn widen_u8(b: uint8x16_t) -> [uint32x4_t; 4] {
    // SAFETY: NEON is there.
    unsafe {
        let (low, high) = (vmovl_u8(vget_low_u8(b)), vmovl_high_u8(b));
        [vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)]
    }
}

/// Sixteen integers as the sixteen low halves of their lanes.
#[inline(always)]
pub unsafe fn narrow16(v: [int32x4_t; 4]) -> [int16x8_t; 2] {
    // SAFETY: NEON is there.
    unsafe { [vmovn_high_s32(vmovn_s32(v[0]), v[1]), vmovn_high_s32(vmovn_s32(v[2]), v[3])] }
}

/// The low bytes of sixteen words.
#[inline(always)]
pub unsafe fn narrow8(v: [int16x8_t; 2]) -> int8x16_t {
    // SAFETY: NEON is there.
    unsafe { vmovn_high_s16(vmovn_s16(v[0]), v[1]) }
}

impl<P> Neon16<P> {
    /// To the nearest integers, ties to even.
    #[inline(always)]
    pub unsafe fn rounded(self) -> [int32x4_t; 4] {
        // SAFETY: NEON is there.
        four(self.0, |v| unsafe { vcvtnq_s32_f32(v) })
    }

    /// The first two levels of the tree.
    #[inline(always)]
    unsafe fn fold(self) -> float32x4_t {
        // SAFETY: NEON is there.
        unsafe { vaddq_f32(vaddq_f32(self.0[0], self.0[2]), vaddq_f32(self.0[1], self.0[3])) }
    }
}

/// The last two levels of the tree, of four sums at a time: lane i is that of `v[i]`.
#[inline(always)]
unsafe fn sum4(v: [float32x4_t; 4]) -> float32x4_t {
    // SAFETY: NEON is there.
    unsafe {
        let pairs = |a: float32x4_t, b: float32x4_t| {
            let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
            let (low, high) = (vzip1q_f64(a, b), vzip2q_f64(a, b));
            vaddq_f32(vreinterpretq_f32_f64(low), vreinterpretq_f32_f64(high))
        };
        vpaddq_f32(pairs(v[0], v[1]), pairs(v[2], v[3]))
    }
}

/// Lane j of register i becomes lane i of register j.
#[inline(always)]
pub unsafe fn transpose4(v: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: NEON is there.
    unsafe {
        let halves = |a: float32x4_t, b: float32x4_t| {
            let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
            (vreinterpretq_f32_f64(vzip1q_f64(a, b)), vreinterpretq_f32_f64(vzip2q_f64(a, b)))
        };
        let (a, b) = (vtrn1q_f32(v[0], v[1]), vtrn2q_f32(v[0], v[1]));
        let (c, d) = (vtrn1q_f32(v[2], v[3]), vtrn2q_f32(v[2], v[3]));
        let ((r0, r2), (r1, r3)) = (halves(a, c), halves(b, d));
        [r0, r1, r2, r3]
    }
}

/// `if a > b { a } else { b }`: `fmax` would prefer a zero's sign and a NaN.
#[inline(always)]
unsafe fn greater(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: NEON is there.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

// Each method's body is a handful of intrinsics under the trait's own contract, so one SAFETY line serves the module:
// SAFETY (all): NEON is part of every aarch64 processor; the caller vouches for the pointers, see `Lanes`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: Products> Lanes for Neon16<P> {
    const WIDE: bool = false;
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { super::products::prefetch(p) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Neon16::of([vdupq_n_f32(x); 4]) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        each!(|i| unsafe { vld1q_f32(p.add(4 * i)) })
    }
    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize) -> Self {
        let mut a = [0f32; 16];
        unsafe {
            std::ptr::copy_nonoverlapping(p.cast::<u8>(), a.as_mut_ptr().cast::<u8>(), 4 * n.min(16));
            Self::load(a.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        unsafe {
            let (low, high) = (vreinterpretq_u16_u8(vld1q_u8(p)), vreinterpretq_u16_u8(vld1q_u8(p.add(16))));
            let wide = [
                vshll_n_u16::<16>(vget_low_u16(low)),
                vshll_high_n_u16::<16>(low),
                vshll_n_u16::<16>(vget_low_u16(high)),
                vshll_high_n_u16::<16>(high),
            ];
            Neon16::of(four(wide, |v| vreinterpretq_f32_u32(v)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        unsafe {
            let half = |i: usize| vreinterpretq_f16_u8(vld1q_u8(p.add(i)));
            let (low, high) = (half(0), half(16));
            Neon16::of([
                vcvt_f32_f16(vget_low_f16(low)),
                vcvt_high_f32_f16(low),
                vcvt_f32_f16(vget_low_f16(high)),
                vcvt_high_f32_f16(high),
            ])
        }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        unsafe { Neon16::of(four(widen_u8(vld1q_u8(p)), |v| vcvtq_f32_u32(v))) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        unsafe {
            let b = vld1q_s8(p.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(b)), vmovl_high_s8(b));
            let wide = [
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ];
            Neon16::of(four(wide, |v| vcvtq_f32_s32(v)))
        }
    }
    #[inline(always)]
    unsafe fn store_rounded_i8(self, p: *mut u8) {
        unsafe { vst1q_s8(p.cast(), narrow8(narrow16(self.rounded()))) }
    }
    #[inline(always)]
    unsafe fn store_rounded_i16(self, high: *mut u8, low: *mut u8) {
        unsafe {
            // At most 32639 + 128: no overflow.
            let words = narrow16(self.rounded());
            let upper = |w| vshrq_n_s16::<8>(vaddq_s16(w, vdupq_n_s16(128)));
            let upper = [upper(words[0]), upper(words[1])];
            vst1q_s8(high.cast(), narrow8(upper));
            vst1q_s8(low.cast(), narrow8(words));
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe {
            for i in 0..4 {
                vst1q_f32(p.add(4 * i), self.0[i]);
            }
        }
    }
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, n: usize) {
        let all = unsafe { self.to_array() };
        unsafe { std::ptr::copy_nonoverlapping(all.as_ptr().cast::<u8>(), p.cast::<u8>(), 4 * n.min(16)) };
    }
    #[inline(always)]
    unsafe fn add(self, o: Self) -> Self {
        each!(|i| unsafe { vaddq_f32(self.0[i], o.0[i]) })
    }
    #[inline(always)]
    unsafe fn sub(self, o: Self) -> Self {
        each!(|i| unsafe { vsubq_f32(self.0[i], o.0[i]) })
    }
    #[inline(always)]
    unsafe fn mul(self, o: Self) -> Self {
        each!(|i| unsafe { vmulq_f32(self.0[i], o.0[i]) })
    }
    #[inline(always)]
    unsafe fn div(self, o: Self) -> Self {
        each!(|i| unsafe { vdivq_f32(self.0[i], o.0[i]) })
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        each!(|i| unsafe { vfmaq_f32(c.0[i], self.0[i], b.0[i]) })
    }
    #[inline(always)]
    unsafe fn max(self, o: Self) -> Self {
        each!(|i| unsafe { greater(self.0[i], o.0[i]) })
    }
    #[inline(always)]
    unsafe fn min(self, o: Self) -> Self {
        each!(|i| unsafe { vbslq_f32(vcltq_f32(self.0[i], o.0[i]), self.0[i], o.0[i]) })
    }
    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        each!(|i| unsafe { vsqrtq_f32(self.0[i]) })
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        each!(|i| unsafe { vrndnq_f32(self.0[i]) })
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        each!(|i| unsafe {
            let exponent = vaddq_s32(vcvtq_s32_f32(self.0[i]), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))
        })
    }
    #[inline(always)]
    unsafe fn select_lt(self, bound: Self, a: Self, b: Self) -> Self {
        each!(|i| unsafe { vbslq_f32(vcltq_f32(self.0[i], bound.0[i]), a.0[i], b.0[i]) })
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe {
            let four = self.fold();
            vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        }
    }
    #[inline(always)]
    unsafe fn sum16(v: [Self; 16]) -> Self {
        each!(|i| unsafe { sum4([v[4 * i].fold(), v[4 * i + 1].fold(), v[4 * i + 2].fold(), v[4 * i + 3].fold()]) })
    }
    #[inline(always)]
    unsafe fn transpose16(v: [Self; 16]) -> [Self; 16] {
        let mut out = v;
        for rows in 0..4 {
            for columns in 0..4 {
                let part = unsafe { transpose4(four([0, 1, 2, 3], |i| v[4 * rows + i].0[columns])) };
                for j in 0..4 {
                    out[4 * columns + j].0[rows] = part[j];
                }
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        unsafe {
            let [a, b, c, d] = self.0;
            let four = greater(greater(a, c), greater(b, d));
            let two = greater(four, vextq_f32::<2>(four, four));
            vgetq_lane_f32::<0>(greater(two, vdupq_laneq_f32::<1>(two)))
        }
    }
}
