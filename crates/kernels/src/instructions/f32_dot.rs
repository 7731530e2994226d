//! Sixteen f32 lanes: the unit in which every floating-point reduction is defined.
//!
//! A kernel is written once, over [`Lanes`], and instantiated once per instruction set: as plain arrays, as two AVX2 registers, as
//! one AVX-512 register. Each operation is a correctly rounded IEEE operation per lane and [`Lanes::sum`] is one fixed tree, so
//! all agree to the bit. Nothing here may use an approximation instruction (`rcp`, `rsqrt`) or reassociate.

/// Sixteen f32 values.
///
/// # Safety
/// The methods of an implementation may be called only where its instruction set is available: inside a function
/// that `simd!` made, or after a check. Pointers must be valid for the lanes read or written; no alignment is needed.
#[allow(clippy::missing_safety_doc)]
pub trait Lanes: Copy {
    /// Whether sixteen lanes are one register of thirty-two, so that kernels may hold larger tiles (which never changes a result).
    const WIDE: bool;
    unsafe fn splat(x: f32) -> Self;
    /// Sixteen f32 from `p`.
    unsafe fn load(p: *const f32) -> Self;
    /// The first `n <= 16` lanes from `p`, the rest zero.
    unsafe fn load_first(p: *const f32, n: usize) -> Self;
    /// Sixteen bf16 from `p` (32 bytes), widened.
    unsafe fn load_bf16(p: *const u8) -> Self;
    /// Sixteen f16 from `p` (32 bytes), widened.
    unsafe fn load_f16(p: *const u8) -> Self;
    /// Sixteen bytes from `p`, as unsigned integers converted to f32.
    unsafe fn load_u8(p: *const u8) -> Self;
    /// Sixteen bytes from `p`, as signed integers converted to f32.
    unsafe fn load_i8(p: *const u8) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// Stores the first `n <= 16` lanes.
    unsafe fn store_first(self, p: *mut f32, n: usize);
    /// Writes sixteen lanes of at most 127 in size, rounded to the nearest integer, ties to even, as signed bytes.
    unsafe fn store_rounded_i8(self, p: *mut u8);
    /// The same with lanes of at most 32639 in size: the integers are 256 times the signed bytes at `high` plus the signed bytes at `low`.
    unsafe fn store_rounded_i16(self, high: *mut u8, low: *mut u8);
    unsafe fn add(self, o: Self) -> Self;
    unsafe fn sub(self, o: Self) -> Self;
    unsafe fn mul(self, o: Self) -> Self;
    unsafe fn div(self, o: Self) -> Self;
    /// `self * b + c`, rounded once.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// Per lane `if self > o { self } else { o }`, as `vmaxps` does it: `o` where either is NaN.
    unsafe fn max(self, o: Self) -> Self;
    /// Per lane `if self < o { self } else { o }`, as `vminps` does it: `o` where either is NaN.
    unsafe fn min(self, o: Self) -> Self;
    unsafe fn sqrt(self) -> Self;
    /// To the nearest integer, ties to even.
    unsafe fn round(self) -> Self;
    /// `2^self` for integral lanes in -126..=127, built in the exponent field.
    unsafe fn exp2_int(self) -> Self;
    /// Per lane `if self < bound { a } else { b }` (false where NaN).
    unsafe fn select_lt(self, bound: Self, a: Self, b: Self) -> Self;
    /// The sum of all lanes by the fixed tree: lanes i and i+8, then i and i+4, i and i+2, 0 and 1.
    unsafe fn sum(self) -> f32;
    /// The sum of 64 lanes (register j has lanes 16j to 16j+15): lanes i and i+32, then i and i+16, then [`Lanes::sum`].
    #[inline(always)]
    unsafe fn sum64(v: [Self; 4]) -> f32 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { v[0].add(v[2]).add(v[1].add(v[3])).sum() }
    }
    /// Lane i is `v[i].sum()`: sixteen sums for a third of the work.
    unsafe fn sum16(v: [Self; 16]) -> Self;
    /// Lane j of register i becomes lane i of register j.
    unsafe fn transpose16(v: [Self; 16]) -> [Self; 16];
    /// The greatest lane by the same tree (lanes must not be NaN for a meaningful answer).
    unsafe fn max_lane(self) -> f32;
    /// Prefetches the cache line of `p`, any address, into the second-level cache. The first-level cache has two dozen fill buffers or fewer, too few outstanding
    /// reads to saturate memory.
    unsafe fn prefetch(_p: *const u8) {}
    /// Bits of each lane.
    unsafe fn to_array(self) -> [f32; 16] {
        let mut a = [0f32; 16];
        // SAFETY: `a` holds sixteen lanes; the caller vouches for the instruction set.
        unsafe { self.store(a.as_mut_ptr()) };
        a
    }
}
