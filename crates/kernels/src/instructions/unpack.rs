//! Unpacks the bit stream of a row into one byte per integer.

use super::f32_dot::Lanes;
use crate::format::blocks::unpack::{Block, with_block};
use crate::format::packing::{Packing, PackingName, with_packing};
use crate::format::{BlockFormat, Float, WeightFormat};
use crate::matrix::Matrix;

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

/// Unpacking in registers.
///
/// # Safety
/// As for [`Lanes`].
pub(crate) trait Unpack: Lanes {
    /// `n` q (a multiple of 32) of a packing from `p`, which holds `n * BITS / 8` bytes and is read no further.
    unsafe fn unpack<P: Packing>(p: *const u8, q: *mut u8, n: usize);

    /// Unpacks `count` blocks from `blocks` to their integers, and the scale and bias of each group: `-zero * s` where blocks have none of their own.
    /// No call of it is inlined: it is compiled once for each type and instruction set. An instruction set without code of its own enables itself for
    /// [`unpack_each`].
    ///
    /// # Safety
    /// As for [`Lanes`]; `blocks` holds so many, `q` their columns, `s` and `b` their groups.
    #[inline(never)]
    unsafe fn unpack_blocks(
        format: BlockFormat,
        blocks: *const u8,
        count: usize,
        q: *mut u8,
        s: *mut f32,
        b: *mut f32,
    ) {
        // SAFETY: the caller's.
        unsafe { unpack_each(format, blocks, count, q, s, b) }
    }
}

/// Unpacks columns `k..k + cols` of row `r` of a matrix whose format [is unpacked](WeightFormat::is_unpacked).
///
/// # Safety
/// The columns are whole blocks and groups of the row; `q` holds them, `s` and `b` their groups; the instruction set of `V` is available.
#[inline(always)]
pub(crate) unsafe fn unpack_columns<V: Unpack>(
    w: &Matrix,
    r: usize,
    (k, cols): (usize, usize),
    q: *mut u8,
    s: *mut f32,
    b: *mut f32,
) {
    match w.format {
        WeightFormat::Blocks(blocks) => {
            let from = &w.row(r)[k / blocks.block_columns() * blocks.block_bytes()..];
            // SAFETY: the caller's.
            unsafe { V::unpack_blocks(blocks, from.as_ptr(), cols / blocks.block_columns(), q, s, b) }
        }
        WeightFormat::E2m1(e2m1) => {
            let (group, groups) = (e2m1.group(), cols / e2m1.group());
            let (packed, scales) = (&w.row(r)[k / 2..(k + cols) / 2], &w.row_scales(r).0[k / group..][..groups]);
            // SAFETY: the caller's.
            unsafe {
                let floats = |p: *mut f32| std::slice::from_raw_parts_mut(p, groups);
                e2m1.unpack(packed, scales, std::slice::from_raw_parts_mut(q, cols), floats(s), floats(b));
            }
        }
        _ => unreachable!("kernels take this format as it is"),
    }
}

/// [`Unpack::unpack_blocks`] by the plain definition of each type.
///
/// # Safety
/// As for [`Unpack::unpack_blocks`].
#[inline(always)]
pub(crate) unsafe fn unpack_each(
    format: BlockFormat,
    blocks: *const u8,
    count: usize,
    q: *mut u8,
    s: *mut f32,
    b: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe { with_block!(format, B => each_block::<B>(blocks, count, q, s, b)) }
}

/// [`Unpack::unpack_blocks`] for a type, by its plain definition.
///
/// # Safety
/// As for [`Unpack::unpack_blocks`].
#[inline(always)]
pub(crate) unsafe fn each_block<B: Block>(blocks: *const u8, count: usize, q: *mut u8, s: *mut f32, b: *mut f32) {
    let groups = B::COLUMNS / B::GROUP;
    for i in 0..count {
        // SAFETY: the caller's.
        unsafe { B::unpack(blocks.add(i * B::BYTES), q.add(i * B::COLUMNS), s.add(i * groups), b.add(i * groups)) };
    }
    // SAFETY: as above.
    unsafe { biases::<B>(count * groups, s, b) };
}

/// A block's scales, and its biases where they are its own, by the plain definition. What that does with the integers is left out by the compiler, since nobody reads them.
///
/// # Safety
/// As for [`Block::unpack`].
#[inline(always)]
pub(crate) unsafe fn scales<B: Block>(block: *const u8, s: *mut f32, b: *mut f32) {
    let mut unread = [0u8; 256];
    // SAFETY: the caller's.
    unsafe { B::unpack(block, unread.as_mut_ptr(), s, b) };
}

/// The biases of `groups` groups from their scales, where blocks have none of their own.
///
/// # Safety
/// There are as many.
#[inline(always)]
pub(crate) unsafe fn biases<B: Block>(groups: usize, s: *const f32, b: *mut f32) {
    if !B::BIASED {
        for g in 0..groups {
            // SAFETY: the caller's.
            unsafe { *b.add(g) = -f32::from(B::ZERO) * *s.add(g) };
        }
    }
}

/// Unpacks `n` q (a multiple of 32).
///
/// # Safety
/// As for [`Unpack::unpack`].
#[inline(always)]
pub(crate) unsafe fn unpack_lanes<V: Unpack>(packing: PackingName, p: *const u8, q: *mut u8, n: usize) {
    // SAFETY: the caller's.
    unsafe { with_packing!(packing, P => V::unpack::<P>(p, q, n)) }
}

/// Writes all elements of `from` as f32.
///
/// # Safety
/// `to` holds as many; the instruction set of `V` is available.
#[inline(always)]
pub(crate) unsafe fn widen<V: Lanes>(float: Float, from: &[u8], to: *mut f32) {
    let (size, n) = (float.size(), from.len() / float.size());
    let mut i = 0;
    while n >= 16 && i < n {
        // The last sixteen may have some of those before once more.
        i = i.min(n - 16);
        // SAFETY: sixteen elements are there, and have room; the caller vouches for the instruction set.
        unsafe {
            let p = from.as_ptr().add(i * size);
            let elements = match float {
                Float::F32 => V::load(p.cast()),
                Float::Bf16 => V::load_bf16(p),
                Float::F16 => V::load_f16(p),
            };
            elements.store(to.add(i));
        }
        i += 16;
    }
    for i in i..n {
        // SAFETY: as above.
        unsafe { *to.add(i) = float.read(from, i) };
    }
}
