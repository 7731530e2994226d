//! Sixteen lanes in an array.

use super::Generic16;
use crate::instructions::f32_dot::Lanes;

impl Generic16 {
    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        Generic16(self.0.map(f))
    }
    #[inline(always)]
    fn zip(self, o: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Generic16(std::array::from_fn(|i| f(self.0[i], o.0[i])))
    }
    #[inline(always)]
    fn tree(self, f: impl Fn(f32, f32) -> f32) -> f32 {
        let mut v = self.0;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                v[i] = f(v[i], v[i + half]);
            }
        }
        v[0]
    }
}

impl Lanes for Generic16 {
    const WIDE: bool = false;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Generic16([x; 16])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller vouches for sixteen lanes at `p`.
        Generic16(unsafe { p.cast::<[f32; 16]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize) -> Self {
        let mut a = [0f32; 16];
        for (i, a) in a.iter_mut().enumerate().take(n) {
            // SAFETY: the caller vouches for `n` lanes at `p`.
            *a = unsafe { p.add(i).read_unaligned() };
        }
        Generic16(a)
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: the caller vouches for 32 bytes at `p`.
        let b = unsafe { p.cast::<[[u8; 2]; 16]>().read_unaligned() };
        Generic16(b.map(|b| f32::from_bits((u16::from_le_bytes(b) as u32) << 16)))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        // SAFETY: the caller vouches for 32 bytes at `p`.
        let b = unsafe { p.cast::<[[u8; 2]; 16]>().read_unaligned() };
        Generic16(b.map(|b| half::f16::from_le_bytes(b).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        // SAFETY: the caller vouches for 16 bytes at `p`.
        let b = unsafe { p.cast::<[u8; 16]>().read_unaligned() };
        Generic16(b.map(|b| b as f32))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        // SAFETY: the caller vouches for 16 bytes at `p`.
        let b = unsafe { p.cast::<[i8; 16]>().read_unaligned() };
        Generic16(b.map(|b| b as f32))
    }
    #[inline(always)]
    unsafe fn store_rounded_i8(self, p: *mut u8) {
        let q = self.0.map(|x| x.round_ties_even() as i8);
        // SAFETY: the caller vouches for 16 bytes at `p`.
        unsafe { p.cast::<[i8; 16]>().write_unaligned(q) }
    }
    #[inline(always)]
    unsafe fn store_rounded_i16(self, high: *mut u8, low: *mut u8) {
        let q = self.0.map(|x| x.round_ties_even() as i32);
        // SAFETY: the caller vouches for 16 bytes at both.
        unsafe {
            high.cast::<[i8; 16]>().write_unaligned(q.map(|q| ((q + 128) >> 8) as i8));
            low.cast::<[i8; 16]>().write_unaligned(q.map(|q| q as i8));
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller vouches for sixteen lanes at `p`.
        unsafe { p.cast::<[f32; 16]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, n: usize) {
        for (i, v) in self.0.iter().enumerate().take(n) {
            // SAFETY: the caller vouches for `n` lanes at `p`.
            unsafe { p.add(i).write_unaligned(*v) };
        }
    }
    #[inline(always)]
    unsafe fn add(self, o: Self) -> Self {
        self.zip(o, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, o: Self) -> Self {
        self.zip(o, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, o: Self) -> Self {
        self.zip(o, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, o: Self) -> Self {
        self.zip(o, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        Generic16(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    unsafe fn max(self, o: Self) -> Self {
        self.zip(o, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(self, o: Self) -> Self {
        self.zip(o, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        self.map(f32::sqrt)
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        self.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        self.map(|x| f32::from_bits(((x as i32 + 127) << 23) as u32))
    }
    #[inline(always)]
    unsafe fn select_lt(self, bound: Self, a: Self, b: Self) -> Self {
        Generic16(std::array::from_fn(|i| if self.0[i] < bound.0[i] { a.0[i] } else { b.0[i] }))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        self.tree(|a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sum16(v: [Self; 16]) -> Self {
        Generic16(v.map(|v| v.tree(|a, b| a + b)))
    }
    #[inline(always)]
    unsafe fn transpose16(v: [Self; 16]) -> [Self; 16] {
        std::array::from_fn(|j| Generic16(std::array::from_fn(|i| v[i].0[j])))
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        self.tree(|a, b| if a > b { a } else { b })
    }
}
