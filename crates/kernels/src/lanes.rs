//! Sixteen f32 lanes: the unit in which every floating-point reduction is defined.
//!
//! A kernel is written once, over [`Lanes`], and instantiated three times: as plain arrays, as two AVX2 registers and as
//! one AVX-512 register. Each operation is a correctly rounded IEEE operation per lane and [`Lanes::sum`] is one fixed tree, so
//! the three agree to the bit. Nothing here may use an approximation instruction (`rcp`, `rsqrt`) or reassociate.

/// Sixteen f32 values.
///
/// # Safety
/// The methods of an implementation may be called only where its instruction set is available: inside a function
/// that [`simd!`](crate::simd) made, or after a check. Pointers must be valid for the lanes read or written; no alignment is needed.
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
    /// Lane i is `v[i].sum()`: sixteen sums for a third of the work.
    unsafe fn sum16(v: [Self; 16]) -> Self;
    /// Lane j of register i becomes lane i of register j.
    unsafe fn transpose16(v: [Self; 16]) -> [Self; 16];
    /// The greatest lane by the same tree (lanes must not be NaN for a meaningful answer).
    unsafe fn max_lane(self) -> f32;
    /// Asks for the cache line of `p`, which may be any address.
    unsafe fn prefetch(_p: *const u8) {}
    /// Bits of each lane.
    unsafe fn to_array(self) -> [f32; 16] {
        let mut a = [0f32; 16];
        // SAFETY: `a` holds sixteen lanes; the caller vouches for the instruction set.
        unsafe { self.store(a.as_mut_ptr()) };
        a
    }
}

/// The oracle: sixteen lanes in an array.
#[derive(Clone, Copy)]
pub struct Generic16([f32; 16]);

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

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2x16, Avx512x16};

/// Makes a function that runs `$body::<V>(args)` with the lanes of the given [`Isa`], inside a shell that has the
/// instruction set enabled. `$body` must be `#[inline(always)] unsafe fn body<V: Lanes>(..)`, and sound for any arguments
/// that the made (safe) function lets through: it does the checks.
#[macro_export]
macro_rules! simd {
    ($(#[$meta:meta])* $vis:vis fn $name:ident$(<$($life:lifetime),+>)?($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name$(<$($life),+>)?(isa: $crate::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "avx2,fma,f16c,bmi2")]
                unsafe fn avx2$(<$($life),+>)?($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: this shell has the instruction set enabled.
                    unsafe { $body::<$crate::lanes::Avx2x16>($($arg),*) }
                }
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512bf16,avx2,fma,f16c,bmi2")]
                unsafe fn avx512$(<$($life),+>)?($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: as above.
                    unsafe { $body::<$crate::lanes::Avx512x16>($($arg),*) }
                }
                match isa.level() {
                    // SAFETY: an `Isa` above generic is made only after its features were detected.
                    $crate::isa::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::isa::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::isa::Level::Generic => {}
                }
            }
            let _ = isa;
            // SAFETY: the generic lanes need no instruction set; the body is sound for all arguments.
            unsafe { $body::<$crate::lanes::Generic16>($($arg),*) }
        }
    };
}

#[inline(always)]
unsafe fn dot_lanes<V: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let (n, whole) = (a.len(), a.len() / 16 * 16);
    // SAFETY: every load stays inside the slices; the caller vouches for the instruction set.
    unsafe {
        let mut acc = V::splat(0.0);
        for i in (0..whole).step_by(16) {
            acc = V::load(a.as_ptr().add(i)).fma(V::load(b.as_ptr().add(i)), acc);
        }
        if whole < n {
            let (x, y) = (a.as_ptr().add(whole), b.as_ptr().add(whole));
            acc = V::load_first(x, n - whole).fma(V::load_first(y, n - whole), acc);
        }
        acc.sum()
    }
}

simd! {
    /// The dot product of two vectors as the numerics define it: element i goes to lane i mod 16, in ascending order, one
    /// fused multiply-add each; then [`Lanes::sum`].
    pub fn dot(a: &[f32], b: &[f32]) -> f32 = dot_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use proptest::prelude::*;

    #[inline(always)]
    unsafe fn sum_lanes<V: Lanes>(v: &[f32; 16]) -> f32 {
        // SAFETY: sixteen lanes; the shell has the instruction set.
        unsafe { V::load(v.as_ptr()).sum() }
    }
    simd! { fn sum(v: &[f32; 16]) -> f32 = sum_lanes }

    #[inline(always)]
    unsafe fn sums_lanes<V: Lanes>(x: &[f32], out: &mut [f32; 16]) {
        assert_eq!(x.len(), 256);
        // SAFETY: sixteen times sixteen lanes; the shell has the instruction set.
        unsafe { V::sum16(std::array::from_fn(|i| V::load(x.as_ptr().add(16 * i)))).store(out.as_mut_ptr()) }
    }
    simd! { fn sums(x: &[f32], out: &mut [f32; 16]) = sums_lanes }

    #[inline(always)]
    unsafe fn transposed_lanes<V: Lanes>(x: &mut [f32; 256]) {
        // SAFETY: sixteen times sixteen lanes; the shell has the instruction set.
        unsafe {
            let v = V::transpose16(std::array::from_fn(|i| V::load(x.as_ptr().add(16 * i))));
            for (i, v) in v.into_iter().enumerate() {
                v.store(x.as_mut_ptr().add(16 * i));
            }
        }
    }
    simd! { fn transposed(x: &mut [f32; 256]) = transposed_lanes }

    #[test]
    fn rows_become_columns() {
        for isa in Isa::supported() {
            let mut x: [f32; 256] = std::array::from_fn(|i| i as f32);
            transposed(isa, &mut x);
            assert!((0..256).all(|i| x[i] == (i % 16 * 16 + i / 16) as f32), "{isa}");
        }
    }

    proptest! {
        #[test]
        fn dot_has_the_same_bits_in_every_instruction_set(n in 0usize..100, seed in any::<u64>()) {
            let mut s = seed | 1;
            let mut next = || { s ^= s << 13; s ^= s >> 7; s ^= s << 17; (s as i32) as f32 * 1e-9 };
            let (a, b): (Vec<f32>, Vec<f32>) = (0..n).map(|_| (next(), next())).unzip();
            let oracle = dot(Isa::GENERIC, &a, &b);
            for isa in Isa::supported() {
                prop_assert_eq!(dot(isa, &a, &b).to_bits(), oracle.to_bits());
            }
        }

        #[test]
        fn sixteen_sums_are_each_the_tree(x in prop::collection::vec(-1e3f32..1e3, 256)) {
            let oracle: Vec<u32> = x.as_chunks::<16>().0.iter().map(|v| sum(Isa::GENERIC, v).to_bits()).collect();
            for isa in Isa::supported() {
                let mut out = [0.0; 16];
                sums(isa, &x, &mut out);
                prop_assert_eq!(&out.map(f32::to_bits)[..], &oracle);
            }
        }
    }
}
