//! MLX's affine quantisation: groups of 32, 64 or 128 columns share a scale s and a bias b, `w = q * s + b`.
//!
//! The q of a row lie in one little-endian bit stream, all widths alike. Where scales and biases come from: [`crate::quantize`].

use crate::form::{Float, Form};
use crate::lanes::{Generic16, Lanes};
use crate::matrix::Matrix;
use crate::simd;

/// Unpacks q of `bits` (2, 3, 4, 5, 6 or 8) each: `q.len()` is a multiple of 8 and `packed` has `q.len() * bits / 8` bytes.
pub fn unpack(bits: u8, packed: &[u8], q: &mut [u8]) {
    assert!(q.len().is_multiple_of(8) && packed.len() == q.len() / 8 * bits as usize, "whole eights of q");
    let mask = ((1u16 << bits) - 1) as u8;
    for (packed, q) in packed.chunks_exact(bits as usize).zip(q.chunks_exact_mut(8)) {
        let mut eight = [0; 8];
        eight[..bits as usize].copy_from_slice(packed);
        let stream = u64::from_le_bytes(eight);
        for (i, q) in q.iter_mut().enumerate() {
            *q = (stream >> (i * bits as usize)) as u8 & mask;
        }
    }
}

/// The inverse of [`unpack`].
pub fn pack(bits: u8, q: &[u8], packed: &mut [u8]) {
    for (packed, q) in packed.chunks_exact_mut(bits as usize).zip(q.chunks_exact(8)) {
        let stream = q.iter().rev().fold(0u64, |stream, &q| stream << bits | q as u64);
        packed.copy_from_slice(&stream.to_le_bytes()[..bits as usize]);
    }
}

/// Unpacking in registers.
///
/// # Safety
/// As for [`Lanes`].
pub(crate) trait Unpack: Lanes {
    /// `n` q (a multiple of 32) of `BITS` from `p`, which holds `n * BITS / 8` bytes and is read no further.
    unsafe fn unpack<const BITS: usize>(p: *const u8, q: *mut u8, n: usize);
}

impl Unpack for Generic16 {
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8, q: *mut u8, n: usize) {
        // SAFETY: the caller vouches for both.
        let (packed, q) =
            unsafe { (std::slice::from_raw_parts(p, n / 8 * BITS), std::slice::from_raw_parts_mut(q, n)) };
        unpack(BITS as u8, packed, q);
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    use super::Unpack;
    use crate::lanes::{Avx2x16, Avx512x16};
    use std::arch::x86_64::*;

    impl Unpack for Avx2x16 {
        #[inline(always)]
        unsafe fn unpack<const BITS: usize>(p: *const u8, q: *mut u8, n: usize) {
            let mask = ((1u64 << BITS) - 1) * 0x0101_0101_0101_0101;
            for i in 0..n / 8 {
                let mut eight = [0u8; 8];
                // SAFETY: eight q lie in BITS bytes; the caller vouches for both ends and for BMI2.
                unsafe {
                    std::ptr::copy_nonoverlapping(p.add(i * BITS), eight.as_mut_ptr(), BITS);
                    let spread = _pdep_u64(u64::from_le_bytes(eight), mask);
                    q.add(i * 8).cast::<[u8; 8]>().write_unaligned(spread.to_le_bytes());
                }
            }
        }
    }

    /// Where each 64-bit lane of [`spread`] finds its eight q: byte `BITS * lane` and on.
    const fn lane_bytes(bits: usize) -> [u8; 64] {
        let mut index = [0; 64];
        let mut i = 0;
        while i < 64 {
            index[i] = ((i / 8 * bits + i % 8) % 64) as u8;
            i += 1;
        }
        index
    }

    /// The first bit of each q of a lane.
    const fn shifts(bits: usize) -> u64 {
        let (mut all, mut i) = (0, 0);
        while i < 8 {
            all |= ((i * bits) as u64) << (8 * i);
            i += 1;
        }
        all
    }

    struct Width<const BITS: usize>;
    impl<const BITS: usize> Width<BITS> {
        const LANE_BYTES: [u8; 64] = lane_bytes(BITS);
    }

    /// 64 q in natural order from a register whose low `8 * BITS` bytes are their bit stream.
    ///
    /// # Safety
    /// Needs AVX-512 VBMI.
    #[inline(always)]
    pub(crate) unsafe fn spread<const BITS: usize>(stream: __m512i) -> __m512i {
        if BITS == 8 {
            return stream;
        }
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let index = _mm512_loadu_si512(const { &Width::<BITS>::LANE_BYTES }.as_ptr().cast());
            let lanes = _mm512_permutexvar_epi8(index, stream);
            let q = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(shifts(BITS) as i64), lanes);
            _mm512_and_si512(q, _mm512_set1_epi8(((1u16 << BITS) - 1) as i8))
        }
    }

    /// The first `n` bytes at `p` (0 to 64), zeros behind; reads no further.
    ///
    /// # Safety
    /// Needs AVX-512 BW and `n` bytes at `p`.
    #[inline(always)]
    pub(crate) unsafe fn first_bytes(p: *const u8, n: usize) -> __m512i {
        // SAFETY: the mask keeps the load inside the caller's bytes.
        unsafe { _mm512_maskz_loadu_epi8(if n >= 64 { !0 } else { (1 << n) - 1 }, p.cast()) }
    }

    impl Unpack for Avx512x16 {
        #[inline(always)]
        unsafe fn unpack<const BITS: usize>(p: *const u8, q: *mut u8, n: usize) {
            // SAFETY: the caller vouches for both ends and the instruction set; an odd 32 is read and written by half.
            unsafe {
                for i in (0..n / 64 * 64).step_by(64) {
                    let all = spread::<BITS>(first_bytes(p.add(i / 8 * BITS), 8 * BITS));
                    _mm512_storeu_si512(q.add(i).cast(), all);
                }
                if !n.is_multiple_of(64) {
                    let i = n / 64 * 64;
                    let half = spread::<BITS>(first_bytes(p.add(i / 8 * BITS), 4 * BITS));
                    _mm256_storeu_si256(q.add(i).cast(), _mm512_castsi512_si256(half));
                }
            }
        }
    }
}

/// Unpacks `n` q (a multiple of 32) of `bits` each.
///
/// # Safety
/// As for [`Unpack::unpack`].
#[inline(always)]
pub(crate) unsafe fn unpack_lanes<V: Unpack>(bits: u8, p: *const u8, q: *mut u8, n: usize) {
    // SAFETY: the caller's.
    unsafe {
        match bits {
            2 => V::unpack::<2>(p, q, n),
            3 => V::unpack::<3>(p, q, n),
            4 => V::unpack::<4>(p, q, n),
            5 => V::unpack::<5>(p, q, n),
            6 => V::unpack::<6>(p, q, n),
            _ => V::unpack::<8>(p, q, n),
        }
    }
}

/// Widens `n` elements of type `float` from `p` to f32.
///
/// # Safety
/// Both ends hold `n` elements; the instruction set of `V` is available.
#[inline(always)]
pub(crate) unsafe fn widen_lanes<V: Lanes>(float: Float, p: *const u8, out: *mut f32, n: usize) {
    // SAFETY: the caller's; a rest below sixteen goes through a buffer.
    unsafe {
        let load = |p: *const u8| match float {
            Float::F32 => V::load(p.cast()),
            Float::F16 => V::load_f16(p),
            Float::Bf16 => V::load_bf16(p),
        };
        let whole = n / 16 * 16;
        for i in (0..whole).step_by(16) {
            load(p.add(i * float.size())).store(out.add(i));
        }
        if whole < n {
            let mut rest = [0u8; 64];
            std::ptr::copy_nonoverlapping(p.add(whole * float.size()), rest.as_mut_ptr(), (n - whole) * float.size());
            load(rest.as_ptr()).store_first(out.add(whole), n - whole);
        }
    }
}

/// Row `r` of `w` as f32 to `out` ([cols]).
///
/// # Safety
/// `out` holds a row; the instruction set of `V` is available.
#[inline(always)]
pub(crate) unsafe fn dequantize_lanes<V: Unpack>(w: &Matrix, r: usize, out: *mut f32) {
    let packed = w.row(r).as_ptr();
    match w.form() {
        // SAFETY: a row has `cols` elements.
        Form::Float(float) => unsafe { widen_lanes::<V>(float, packed, out, w.cols()) },
        Form::Affine { bits, group, scale } => {
            let (scales, biases) = w.row_scales(r);
            let group = group as usize;
            let mut q = [0u8; 128];
            for g in 0..w.cols() / group {
                // SAFETY: a group lies inside the row and its q inside the buffer.
                unsafe {
                    unpack_lanes::<V>(bits, packed.add(g * group / 8 * bits as usize), q.as_mut_ptr(), group);
                    let (s, b) = (V::splat(scale.read(scales, g)), V::splat(scale.read(biases, g)));
                    for i in (0..group).step_by(16) {
                        V::load_u8(q.as_ptr().add(i)).fma(s, b).store(out.add(g * group + i));
                    }
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn dequantize_row_lanes<V: Unpack>(w: &Matrix, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), w.cols(), "a row of f32");
    // SAFETY: checked above; `row` is checked where it is cut; the caller vouches for the instruction set.
    unsafe { dequantize_lanes::<V>(w, row, out.as_mut_ptr()) }
}

simd! {
    /// Row `row` of a matrix of any form as f32: widened, or `fma(q, s, b)`. `out`: [cols].
    pub fn dequantize_row(w: &Matrix, row: usize, out: &mut [f32]) = dequantize_row_lanes
}
