//! bf16 pairs: bf16 weights as they are, and affine weights rounded to bf16, times bf16 activations.
//!
//! The arithmetic is that of `vdpbf16ps`: per lane two fused multiply-adds, the odd element first, with denormal inputs (the
//! accumulator too) taken as zero and a result that is below the normal range *after rounding with an unbounded exponent* flushed to zero
//! of its sign. Where the instruction is missing, [`flushed_fma`] and its vector forms do the same. With AVX-512 many tokens go through
//! `avx512_prefill`, which rearranges tiles of rows in cache; all else streams the rows as they lie.

#[cfg(target_arch = "x86_64")]
mod avx512_prefill;

use super::dot::{self, Dot, Product};
use crate::affine::{self, Unpack};
use crate::lanes::{Generic16, Lanes};
use crate::matrix::Matrix;
use crate::scratch::Scratch;
use crate::simd;

/// Sixteen accumulators that take bf16 pairs.
///
/// # Safety
/// As for [`Lanes`].
pub(crate) trait Pairs: Lanes {
    /// 32 bf16.
    type Pair: Copy;
    unsafe fn load_pair(p: *const u8) -> Self::Pair;
    /// Lane l: `self + a[2l+1] * b[2l+1]`, then `+ a[2l] * b[2l]`.
    unsafe fn mac_pair(self, a: Self::Pair, b: Self::Pair) -> Self;
    /// Rounds to bf16 as `vcvtneps2bf16` does it: to nearest even, denormals to zero, NaN quieted; 32 bytes to `p`.
    unsafe fn store_bf16(self, p: *mut u8);
    /// The instruction set's way through a product; `working` has [`working_bytes`].
    #[inline(always)]
    unsafe fn product(product: Product, _working: *mut u8) {
        // SAFETY: the caller's.
        unsafe { dot::multiply::<Self, BothBf16>(product) }
    }
}

/// Up to this many tokens stream through the rows; from there on tiles of rows in cache pay.
#[cfg(target_arch = "x86_64")]
const FEW: usize = 32;

/// A denormal as zero of its sign.
#[inline(always)]
fn flushed(x: f32) -> f32 {
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
fn widen(x: u16) -> f32 {
    f32::from_bits((x as u32) << 16)
}

// SAFETY (all): the caller vouches for the instruction set and for the pointers, see `Lanes`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Pairs for Generic16 {
    type Pair = [u16; 32];
    #[inline(always)]
    unsafe fn load_pair(p: *const u8) -> [u16; 32] {
        unsafe { p.cast::<[[u8; 2]; 32]>().read_unaligned() }.map(u16::from_le_bytes)
    }
    #[inline(always)]
    unsafe fn mac_pair(self, a: [u16; 32], b: [u16; 32]) -> Self {
        unsafe {
            let mut acc = self.to_array();
            for (l, acc) in acc.iter_mut().enumerate() {
                for i in [2 * l + 1, 2 * l] {
                    *acc = flushed_fma(widen(a[i]), widen(b[i]), *acc);
                }
            }
            Self::load(acc.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        unsafe { p.cast::<[[u8; 2]; 16]>().write_unaligned(self.to_array().map(|x| to_bf16(x).to_le_bytes())) }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::lanes::{Avx2x16, Avx512x16};
    use std::arch::x86_64::*;

    /// Eight lanes of `mac_pair`.
    #[inline(always)]
    unsafe fn mac8(acc: __m256, a: __m256i, b: __m256i) -> __m256 {
        // SAFETY: the caller runs with AVX2 and FMA.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            let smallest = _mm256_set1_ps(f32::MIN_POSITIVE);
            // Denormal (exponent zero) to zero of its sign.
            let flush = |x: __m256| {
                let small = _mm256_cmp_ps::<_CMP_LT_OQ>(_mm256_andnot_ps(sign, x), smallest);
                _mm256_andnot_ps(_mm256_andnot_ps(sign, small), x)
            };
            let odd = |x| flush(_mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536))));
            let even = |x| flush(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)));
            let (a1, b1, a0, b0) = (odd(a), odd(b), even(a), even(b));
            let r1 = _mm256_fmadd_ps(a1, b1, flush(acc));
            let r0 = _mm256_fmadd_ps(a0, b0, flush(r1));
            // At the smallest normal number the vector form cannot tell whether to flush: those rare lanes go one by one.
            let at = |r| _mm256_cmp_ps::<_CMP_EQ_OQ>(_mm256_andnot_ps(sign, r), smallest);
            if _mm256_movemask_ps(_mm256_or_ps(at(r1), at(r0))) == 0 {
                return flush(r0);
            }
            one_by_one(acc, a, b)
        }
    }

    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx2,fma")]
    fn one_by_one(acc: __m256, a: __m256i, b: __m256i) -> __m256 {
        // SAFETY: 32 bytes of plain numbers each.
        let mut acc = unsafe { std::mem::transmute::<__m256, [f32; 8]>(acc) };
        // SAFETY: as above.
        let [a, b] = [a, b].map(|x| unsafe { std::mem::transmute::<__m256i, [u16; 16]>(x) });
        for (l, acc) in acc.iter_mut().enumerate() {
            for i in [2 * l + 1, 2 * l] {
                *acc = flushed_fma(widen(a[i]), widen(b[i]), *acc);
            }
        }
        // SAFETY: as above.
        unsafe { std::mem::transmute::<[f32; 8], __m256>(acc) }
    }

    /// Eight f32 to bf16 bits in the low halves of eight i32.
    #[inline(always)]
    unsafe fn round8(x: __m256) -> __m256i {
        // SAFETY: the caller runs with AVX2.
        unsafe {
            let bits = _mm256_castps_si256(x);
            let top = _mm256_srli_epi32::<16>(bits);
            let tie = _mm256_and_si256(top, _mm256_set1_epi32(1));
            let up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), tie);
            let rounded = _mm256_srli_epi32::<16>(up);
            let size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fff_ffff));
            let nan = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7f80_0000));
            let tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x0080_0000), size);
            let r = _mm256_blendv_epi8(rounded, _mm256_or_si256(top, _mm256_set1_epi32(0x40)), nan);
            _mm256_blendv_epi8(r, _mm256_and_si256(top, _mm256_set1_epi32(0x8000)), tiny)
        }
    }

    // SAFETY (all): the caller vouches for the instruction set and for the pointers, see `Lanes`.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Pairs for Avx2x16 {
        type Pair = (__m256i, __m256i);
        #[inline(always)]
        unsafe fn load_pair(p: *const u8) -> Self::Pair {
            unsafe { (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())) }
        }
        #[inline(always)]
        unsafe fn mac_pair(self, a: Self::Pair, b: Self::Pair) -> Self {
            unsafe { Avx2x16(mac8(self.0, a.0, b.0), mac8(self.1, a.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn store_bf16(self, p: *mut u8) {
            unsafe {
                let packed = _mm256_packus_epi32(round8(self.0), round8(self.1));
                _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0b11011000>(packed));
            }
        }
    }

    // SAFETY (all): as above.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Pairs for Avx512x16 {
        type Pair = __m512bh;
        #[inline(always)]
        unsafe fn load_pair(p: *const u8) -> __m512bh {
            unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(p.cast())) }
        }
        #[inline(always)]
        unsafe fn mac_pair(self, a: __m512bh, b: __m512bh) -> Self {
            unsafe { Avx512x16(_mm512_dpbf16_ps(self.0, a, b)) }
        }
        #[inline(always)]
        unsafe fn store_bf16(self, p: *mut u8) {
            unsafe {
                let r = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(self.0));
                _mm256_storeu_si256(p.cast(), r);
            }
        }
        #[inline(always)]
        unsafe fn product(product: Product, working: *mut u8) {
            unsafe {
                if product.tokens.len() <= FEW {
                    dot::multiply::<Self, BothBf16>(product);
                } else {
                    avx512_prefill::product(product, working);
                }
            }
        }
    }
}

struct BothBf16;

// SAFETY (all): the caller vouches for the instruction set and the pointers, see `Dot`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<V: Pairs> Dot<V> for BothBf16 {
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

#[inline(always)]
unsafe fn direct_lanes<V: Pairs>(w: Matrix, x: &[u16], tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let product = Product {
        w: w.data.as_ptr(),
        w_stride: w.row_bytes(),
        rows: w.rows,
        x: x.as_ptr().cast(),
        cols: w.cols,
        tokens,
        out: tile.as_mut_ptr(),
        out_stride: w.rows,
    };
    let [working] = scratch.cut([working_bytes(w.rows, w.cols, tokens.len())]);
    // SAFETY: `matmul` checked the lengths; the caller vouches for the instruction set.
    unsafe { V::product(product, working) }
}

simd! {
    /// bf16 weights as they lie.
    pub(super) fn direct(w: Matrix, x: &[u16], tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) = direct_lanes
}

/// What a product of so many rows and tokens keeps in scratch.
fn working_bytes(rows: usize, cols: usize, tokens: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    if tokens > FEW {
        return avx512_prefill::working_bytes(rows, cols);
    }
    let _ = (rows, cols, tokens);
    0
}

pub(super) fn direct_scratch_bytes(rows: usize, cols: usize, tokens: usize) -> usize {
    crate::scratch::cut_bytes([working_bytes(rows, cols, tokens)])
}

/// Rows that are dequantised at a time.
const ROWS: usize = 32;

/// A row as f32, some as bf16, and what a product needs.
fn affine_sizes(cols: usize, tokens: usize) -> [usize; 3] {
    [cols * 4, ROWS * cols * 2, working_bytes(ROWS, cols, tokens)]
}

pub(super) fn affine_scratch_bytes(cols: usize, tokens: usize) -> usize {
    crate::scratch::cut_bytes(affine_sizes(cols, tokens))
}

#[inline(always)]
unsafe fn affine_lanes<V: Pairs + Unpack>(
    w: Matrix,
    x: &[u16],
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let [row, rows, working] = scratch.cut(affine_sizes(w.cols, tokens.len()));
    let row = row.cast::<f32>();
    for r0 in (0..w.rows).step_by(ROWS) {
        let n = ROWS.min(w.rows - r0);
        // SAFETY: the scratch holds a row of f32 and ROWS rows of bf16; columns are a multiple of 32; `matmul` checked the
        // other lengths; the caller vouches for the instruction set.
        unsafe {
            for r in 0..n {
                affine::dequantize_lanes::<V>(&w, r0 + r, row);
                for k in (0..w.cols).step_by(16) {
                    V::load(row.add(k)).store_bf16(rows.add((r * w.cols + k) * 2));
                }
            }
            let product = Product {
                w: rows,
                w_stride: w.cols * 2,
                rows: n,
                x: x.as_ptr().cast(),
                cols: w.cols,
                tokens,
                out: tile.as_mut_ptr().add(r0),
                out_stride: w.rows,
            };
            V::product(product, working);
        }
    }
}

simd! {
    /// Affine weights, some rows at a time dequantised and rounded into scratch.
    pub(super) fn affine(w: Matrix, x: &[u16], tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) = affine_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use proptest::prelude::*;

    #[inline(always)]
    unsafe fn mac_lanes<V: Pairs>(acc: &[f32; 16], a: &[u16; 32], b: &[u16; 32]) -> [f32; 16] {
        // SAFETY: whole registers; the shell has the instruction set.
        unsafe {
            let (a, b) = (V::load_pair(a.as_ptr().cast()), V::load_pair(b.as_ptr().cast()));
            V::load(acc.as_ptr()).mac_pair(a, b).to_array()
        }
    }
    simd! { fn mac(acc: &[f32; 16], a: &[u16; 32], b: &[u16; 32]) -> [f32; 16] = mac_lanes }

    #[inline(always)]
    unsafe fn round_lanes<V: Pairs>(x: &[f32; 16]) -> [u16; 16] {
        let mut out = [0u16; 16];
        // SAFETY: whole registers; the shell has the instruction set.
        unsafe { V::load(x.as_ptr()).store_bf16(out.as_mut_ptr().cast()) };
        out
    }
    simd! { fn round(x: &[f32; 16]) -> [u16; 16] = round_lanes }

    /// An accumulator and pairs whose products lie about the smallest normal number, or anywhere.
    fn lane() -> impl Strategy<Value = (f32, [u16; 2], [u16; 2])> {
        let near = |bits: u32| f32::from_bits((0x0080_0000 + (bits & 3)) | (bits & 0x8000_0000));
        let acc = prop_oneof![
            any::<u32>().prop_map(f32::from_bits),
            any::<u32>().prop_map(near),
            any::<u32>().prop_map(|x| f32::from_bits(x & 0x81ff_ffff)),
        ];
        let pair = (any::<[u16; 2]>(), any::<[u16; 2]>(), 1u16..120, 70u16..140, any::<bool>(), any::<bool>());
        let pair = pair.prop_map(|(a, b, exponent, sum, anything, powers)| {
            if anything {
                return (a, b);
            }
            // Exponents that add up to 2^-126 and some bits above or below.
            let other = (sum + 26).saturating_sub(exponent).min(254);
            let keep = if powers { 0x8000 } else { 0x807f };
            (a.map(|a| (a & keep) | (exponent << 7)), b.map(|b| (b & keep) | (other << 7)))
        });
        (acc, pair).prop_map(|(acc, (a, b))| (acc, a, b))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(3000))]
        #[test]
        fn pairs_round_and_flush_alike_everywhere(lanes in prop::collection::vec(lane(), 16)) {
            let (mut acc, mut a, mut b) = ([0f32; 16], [0u16; 32], [0u16; 32]);
            for (l, lane) in lanes.iter().enumerate() {
                acc[l] = lane.0;
                a[2 * l..2 * l + 2].copy_from_slice(&lane.1);
                b[2 * l..2 * l + 2].copy_from_slice(&lane.2);
            }
            let bits = |y: [f32; 16]| y.map(|y| if y.is_nan() { !0 } else { y.to_bits() });
            let wanted = bits(mac(Isa::GENERIC, &acc, &a, &b));
            for isa in Isa::supported() {
                prop_assert_eq!(bits(mac(isa, &acc, &a, &b)), wanted, "{}: {:?} {:?} {:?}", isa, acc, a, b);
                prop_assert_eq!(round(isa, &acc), round(Isa::GENERIC, &acc));
            }
        }
    }
}
