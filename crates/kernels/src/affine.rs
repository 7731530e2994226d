//! Weights in groups as floats: `w = q * s + b`. Their integers are one little-endian bit stream per row. [`crate::quantize`] makes such weights.

use crate::dispatch::simd;
use crate::format::{Float, WeightFormat};
use crate::instructions::f32_dot::Lanes;
use crate::instructions::unpack::{Unpack, unpack_lanes};
use crate::matrix::Matrix;

pub use crate::instructions::unpack::unpack;

/// The inverse of [`unpack`].
pub fn pack(bits: u8, q: &[u8], packed: &mut [u8]) {
    for (packed, q) in packed.chunks_exact_mut(bits as usize).zip(q.chunks_exact(8)) {
        let stream = q.iter().rev().fold(0u64, |stream, &q| stream << bits | q as u64);
        packed.copy_from_slice(&stream.to_le_bytes()[..bits as usize]);
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
    match (w.format, w.format.grouped()) {
        // SAFETY: a row has `cols` elements.
        (WeightFormat::Float(float), _) => unsafe { widen_lanes::<V>(float, packed, out, w.cols()) },
        (_, grouped) => {
            let format = grouped.expect("what is not a float is in groups");
            let (scales, biases) = w.row_scales(r);
            let (group, bits) = (format.group, format.packing.bits());
            let mut q = [0u8; 128];
            for g in 0..w.cols() / group {
                // SAFETY: a group is inside the row and its q inside the buffer.
                unsafe {
                    unpack_lanes::<V>(format.packing, packed.add(g * group / 8 * bits), q.as_mut_ptr(), group);
                    let (s, b) = format.scale_and_bias(scales, biases, g);
                    let (s, b) = (V::splat(s), V::splat(b));
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
    /// Row `row` of a matrix of any format as f32: widened, or `fma(q, s, b)`. `out`: [cols].
    pub fn dequantize_row(w: &Matrix, row: usize, out: &mut [f32]) = dequantize_row_lanes
}
