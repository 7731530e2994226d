//! bf16 pairs: the arithmetic of `vdpbf16ps`.
//!
//! Per lane two fused multiply-adds, the odd element first, with denormal inputs (the
//! accumulator too) taken as zero and a result that is below the normal range *after rounding with an unbounded exponent* flushed to zero
//! of its sign. Where the instruction is missing, [`flushed_fma`] and its vector forms do the same.

use super::dot::{Dot, Product, multiply};
use super::f32_dot::Lanes;

/// Sixteen accumulators that take bf16 pairs.
///
/// # Safety
/// As for [`Lanes`].
pub(crate) trait Bf16Dot: Lanes {
    /// 32 bf16.
    type Pair: Copy;
    unsafe fn load_pair(p: *const u8) -> Self::Pair;
    /// Lane l: `self + a[2l+1] * b[2l+1]`, then `+ a[2l] * b[2l]`.
    unsafe fn mac_pair(self, a: Self::Pair, b: Self::Pair) -> Self;
    /// Rounds to bf16 as `vcvtneps2bf16` does it: to nearest even, denormals to zero, NaN quieted; 32 bytes to `p`.
    unsafe fn store_bf16(self, p: *mut u8);
    /// Bytes that [`Bf16Dot::product`] works in, from the start of a line on.
    fn working_bytes(_rows: usize, _cols: usize, _tokens: usize) -> usize {
        0
    }
    /// The instruction set's matrix product of bf16; `working` has [`Bf16Dot::working_bytes`].
    #[inline(always)]
    unsafe fn product(product: Product, _working: *mut u8) {
        // SAFETY: the caller's.
        unsafe { multiply::<Self, BothBf16>(product) }
    }
}

/// A denormal as zero of its sign.
#[inline(always)]
pub(crate) fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// One half of `vdpbf16ps`: `fma(a, b, c)` of bf16 values a and b, denormal inputs as zero, tiny results to zero.
#[inline(always)]
pub(crate) fn flushed_fma(a: f32, b: f32, c: f32) -> f32 {
    let (a, b, c) = (flushed(a), flushed(b), flushed(c));
    let r = a.mul_add(b, c);
    let size = r.abs();
    if size > f32::MIN_POSITIVE || r == 0.0 || r.is_nan() {
        return r;
    }
    // Whether the result is tiny is decided after rounding to 24 bits with an unbounded exponent. Only at the smallest normal number can
    // that differ from what the fma says; there the exact sum fits in f64 (or is further away than matters).
    const LIMIT: f64 = f32::MIN_POSITIVE as f64 * (1.0 - 1.0 / (1 << 25) as f64);
    let tiny = size < f32::MIN_POSITIVE || (a as f64 * b as f64 + c as f64).abs() < LIMIT;
    if tiny { 0f32.copysign(r) } else { r }
}

/// bf16 bits of `x` as `vcvtneps2bf16` rounds: to nearest even, denormals to zero of their sign, NaN quieted.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        (bits >> 16) as u16 | 0x40
    } else if x.is_subnormal() {
        (bits >> 16) as u16 & 0x8000
    } else {
        ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
    }
}

#[inline(always)]
pub(crate) fn widen(x: u16) -> f32 {
    f32::from_bits((x as u32) << 16)
}

/// bf16 weights times bf16 activations.
pub(crate) struct BothBf16;

// SAFETY (all): the caller vouches for the instruction set and the pointers, see `Dot`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<V: Bf16Dot> Dot<V> for BothBf16 {
    const STEP: usize = 32;
    const SIZES: (usize, usize) = (2, 2);
    type W = V::Pair;
    type X = V::Pair;
    #[inline(always)]
    unsafe fn w(p: *const u8) -> V::Pair {
        unsafe { V::load_pair(p) }
    }
    #[inline(always)]
    unsafe fn w_first(p: *const u8, n: usize) -> V::Pair {
        let mut all = [0u8; 64];
        unsafe {
            std::ptr::copy_nonoverlapping(p, all.as_mut_ptr(), 2 * n);
            V::load_pair(all.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn x(p: *const u8) -> V::Pair {
        unsafe { V::load_pair(p) }
    }
    #[inline(always)]
    unsafe fn x_first(p: *const u8, n: usize) -> V::Pair {
        unsafe { <Self as Dot<V>>::w_first(p, n) }
    }
    #[inline(always)]
    unsafe fn mac(acc: V, w: V::Pair, x: V::Pair) -> V {
        unsafe { acc.mac_pair(w, x) }
    }
}
