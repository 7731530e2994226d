//! Weights in groups as floats: `w = q * s + b`. MLX's integers are one little-endian bit stream per row. [`crate::quantize`] makes such weights.

use crate::dispatch::simd;
use crate::format::packing::{Packing, with_packing};
use crate::format::{BlockFormat, Float, Grouped, WeightFormat};
use crate::generic::Generic16;
use crate::instructions::f32_dot::Lanes;
use crate::instructions::unpack::{Unpack, unpack_columns};
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
    if let WeightFormat::Float(float) = w.format {
        // SAFETY: a row has `cols` elements.
        return unsafe { widen_lanes::<V>(float, w.row(r).as_ptr(), out, w.cols()) };
    }
    if let WeightFormat::Fp8(format) = w.format {
        // SAFETY: `out` holds a row.
        let out = unsafe { std::slice::from_raw_parts_mut(out, w.cols()) };
        return format.dequantize(w.row(r), w.row_scales(r).0, out);
    }
    if w.format.is_unpacked() {
        // SAFETY: the caller's.
        return unsafe { dequantize_unpacked::<V>(w, r, out) };
    }
    let format = w.grouped();
    // SAFETY: the caller's.
    unsafe { with_packing!(format.packing, P => dequantize_groups::<V, P>(w, format, r, out)) }
}

/// Columns that are unpacked at a time: whole blocks of every type.
const UNPACKED: usize = 1024;

/// [`dequantize_lanes`] of a row that is unpacked first: `fma(q - zero, s, b)`, where b is the row's own or 0.
///
/// # Safety
/// As for [`dequantize_lanes`].
#[inline(always)]
unsafe fn dequantize_unpacked<V: Unpack>(w: &Matrix, r: usize, out: *mut f32) {
    let (group, (zero, biased)) = (w.grouped().group, w.format.zero());
    let (mut q, mut s, mut b) = ([0u8; UNPACKED], [0f32; UNPACKED / 16], [0f32; UNPACKED / 16]);
    for k in (0..w.cols()).step_by(UNPACKED) {
        let cols = UNPACKED.min(w.cols() - k);
        // SAFETY: the buffers hold as many columns and groups; `out` holds a row, of which this is a part; the caller vouches for the instruction set.
        unsafe {
            unpack_columns::<V>(w, r, (k, cols), q.as_mut_ptr(), s.as_mut_ptr(), b.as_mut_ptr());
            let (out, zero) = (out.add(k), V::splat(zero));
            for g in 0..cols / group {
                let (s, b) = (V::splat(s[g]), V::splat(if biased { b[g] } else { 0.0 }));
                for i in (g * group..(g + 1) * group).step_by(16) {
                    V::load_u8(q.as_ptr().add(i)).sub(zero).fma(s, b).store(out.add(i));
                }
            }
        }
    }
}

/// [`dequantize_lanes`] of a row in groups. The packing is known outside of the loop over groups: a choice for each group costs 5 to 9 % of a product of one token.
///
/// # Safety
/// As for [`dequantize_lanes`].
#[inline(always)]
unsafe fn dequantize_groups<V: Unpack, P: Packing>(w: &Matrix, format: Grouped, r: usize, out: *mut f32) {
    let packed = w.row(r).as_ptr();
    let (scales, biases) = w.row_scales(r);
    let group = format.group;
    let mut q = [0u8; 128];
    for g in 0..w.cols() / group {
        // SAFETY: a group is inside the row and its q inside the buffer.
        unsafe {
            V::unpack::<P>(packed.add(g * group / 8 * P::BITS), q.as_mut_ptr(), group);
            let (s, b) = format.scale_and_bias(scales, biases, g);
            let (s, b) = (V::splat(s), V::splat(b));
            for i in (0..group).step_by(16) {
                V::load_u8(q.as_ptr().add(i)).fma(s, b).store(out.add(g * group + i));
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

/// What blocks hold: weights are `(q - zero) * s`, or `q * s + b` where blocks have biases of their own ([`BlockFormat::zero`]).
pub struct BlockValues {
    /// `[columns]`, unsigned.
    pub integers: Vec<u8>,
    /// `[groups]`
    pub scales: Vec<f32>,
    /// `[groups]`; `-zero * s` where blocks have none of their own.
    pub biases: Vec<f32>,
}

/// What `blocks` of a type hold, by its plain definition.
///
/// # Panics
/// Where they are not whole blocks.
pub fn block_values(format: BlockFormat, blocks: &[u8]) -> BlockValues {
    assert!(blocks.len().is_multiple_of(format.block_bytes()), "{} bytes are not whole blocks", blocks.len());
    let count = blocks.len() / format.block_bytes();
    let columns = count * format.block_columns();
    let (mut integers, groups) = (vec![0; columns], columns / format.group());
    let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
    let (q, s, b) = (integers.as_mut_ptr(), scales.as_mut_ptr(), biases.as_mut_ptr());
    // SAFETY: the blocks are as many, and there is room for their columns and groups.
    unsafe { Generic16::unpack_blocks(format, blocks.as_ptr(), count, q, s, b) };
    BlockValues { integers, scales, biases }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_have_the_bits_that_the_list_says() {
        for format in BlockFormat::ALL {
            let mut blocks = vec![0; 100 * format.block_bytes()];
            fastrand::Rng::with_seed(3).fill(&mut blocks);
            let greatest = block_values(format, &blocks).integers.into_iter().max().unwrap();
            assert_eq!(8 - greatest.leading_zeros(), u32::from(format.bits()), "{format:?}: {greatest}");
        }
    }
}
