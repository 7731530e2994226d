use std::arch::aarch64::*;

use super::f32_dot::four;
use super::{Neon16, Products};
use crate::instructions::bf16_dot::{Bf16Dot, flushed_fma, widen};

/// Denormal (exponent zero) to zero of its sign.
#[inline(always)]
unsafe fn flush(x: float32x4_t) -> float32x4_t {
    // SAFETY: NEON is there.
    unsafe {
        let small = vcaltq_f32(x, vdupq_n_f32(f32::MIN_POSITIVE));
        let gone = vandq_u32(small, vdupq_n_u32(0x7fff_ffff));
        vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), gone))
    }
}

/// Four lanes of `mac_pair`.
#[inline(always)]
unsafe fn mac4(acc: float32x4_t, a: uint32x4_t, b: uint32x4_t) -> float32x4_t {
    // SAFETY: NEON is there.
    unsafe {
        let odd = |x| flush(vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff_0000))));
        let even = |x| flush(vreinterpretq_f32_u32(vshlq_n_u32::<16>(x)));
        let r1 = vfmaq_f32(flush(acc), odd(a), odd(b));
        let r0 = vfmaq_f32(flush(r1), even(a), even(b));
        // At the smallest normal number the vector form cannot tell whether to flush: those rare lanes go one by one.
        let smallest = vdupq_n_f32(f32::MIN_POSITIVE);
        let at = vorrq_u32(vceqq_f32(vabsq_f32(r1), smallest), vceqq_f32(vabsq_f32(r0), smallest));
        if vmaxvq_u32(at) == 0 {
            return flush(r0);
        }
        one_by_one(acc, a, b)
    }
}

#[cold]
#[inline(never)]
fn one_by_one(acc: float32x4_t, a: uint32x4_t, b: uint32x4_t) -> float32x4_t {
    // SAFETY: sixteen bytes of plain numbers each.
    let mut acc = unsafe { std::mem::transmute::<float32x4_t, [f32; 4]>(acc) };
    // SAFETY: as above.
    let [a, b] = [a, b].map(|x| unsafe { std::mem::transmute::<uint32x4_t, [u16; 8]>(x) });
    for (l, acc) in acc.iter_mut().enumerate() {
        for i in [2 * l + 1, 2 * l] {
            *acc = flushed_fma(widen(a[i]), widen(b[i]), *acc);
        }
    }
    // SAFETY: as above.
    unsafe { std::mem::transmute::<[f32; 4], float32x4_t>(acc) }
}

/// Four f32 to bf16 bits in the low halves of four lanes.
#[inline(always)]
unsafe fn round4(x: float32x4_t) -> uint32x4_t {
    // SAFETY: NEON is there.
    unsafe {
        let bits = vreinterpretq_u32_f32(x);
        let top = vshrq_n_u32::<16>(bits);
        let tie = vandq_u32(top, vdupq_n_u32(1));
        let rounded = vshrq_n_u32::<16>(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), tie));
        let size = vandq_u32(bits, vdupq_n_u32(0x7fff_ffff));
        let nan = vcgtq_u32(size, vdupq_n_u32(0x7f80_0000));
        let tiny = vcltq_u32(size, vdupq_n_u32(0x0080_0000));
        let r = vbslq_u32(nan, vorrq_u32(top, vdupq_n_u32(0x40)), rounded);
        vbslq_u32(tiny, vandq_u32(top, vdupq_n_u32(0x8000)), r)
    }
}

// SAFETY (all): NEON is there; the caller vouches for the pointers, see `Lanes`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: Products> Bf16Dot for Neon16<P> {
    type Pair = [uint32x4_t; 4];
    #[inline(always)]
    unsafe fn load_pair(p: *const u8) -> Self::Pair {
        let at = |i: usize| unsafe { vreinterpretq_u32_u8(vld1q_u8(p.add(16 * i))) };
        [at(0), at(1), at(2), at(3)]
    }
    #[inline(always)]
    unsafe fn mac_pair(self, a: Self::Pair, b: Self::Pair) -> Self {
        let at = |i: usize| unsafe { mac4(self.four()[i], a[i], b[i]) };
        Neon16::of([at(0), at(1), at(2), at(3)])
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        unsafe {
            let [a, b, c, d] = four(self.four(), |x| round4(x));
            let half = |a, b| vreinterpretq_u8_u16(vmovn_high_u32(vmovn_u32(a), b));
            vst1q_u8(p, half(a, b));
            vst1q_u8(p.add(16), half(c, d));
        }
    }
}
