//! Integers of 11 bits times weights that are integers: sixteen rows at a time, two columns a lane.

use super::unpack::{Unpack, widen};
use crate::format::Float;

/// Rows whose sums are computed side by side.
pub(crate) const ROWS: usize = 16;

/// Sums of pairs of products in sixteen rows.
///
/// # Safety
/// As for [`Lanes`](super::f32_dot::Lanes).
pub(crate) trait Int11Dot: Unpack {
    /// Sixteen i32.
    type Sums: Copy;
    /// There are registers for the sums and the accumulators of twelve tokens. As many chains of sums hide how long an addition takes.
    const MANY: bool = false;
    unsafe fn zero() -> Self::Sums;
    /// 32 bytes from `p` as 32 u16, two in the bits of each lane.
    unsafe fn widen_pairs(p: *const u8) -> Self;
    /// Adds to row r the products of the pair `w[2 r]`, `w[2 r + 1]`, of sixteen bits with a sign, with the pair at `x`.
    unsafe fn add_pairs(sums: Self::Sums, w: Self, x: *const i16) -> Self::Sums;
    /// For each of sixteen rows of bytes, which begin `stride` bytes after each other, the sum of `n` products (a multiple of 32, or of 16 where
    /// [`Int11Dot::half_row_sums`] is the one given here) with `x`.
    unsafe fn row_sums(rows: *const u8, stride: usize, x: *const i16, n: usize) -> Self::Sums;
    /// The same of 32 columns, those of the first sixteen and those of the others.
    #[inline(always)]
    unsafe fn half_row_sums(rows: *const u8, stride: usize, x: *const i16) -> [Self::Sums; 2] {
        // SAFETY: the caller's.
        unsafe { [Self::row_sums(rows, stride, x, 16), Self::row_sums(rows.add(16), stride, x.add(16), 16)] }
    }
    /// Adds a number to all sums.
    unsafe fn add_to_all(sums: Self::Sums, n: i32) -> Self::Sums;
    /// The integers of sixteen bits of [`Int11Dot::widen_pairs`], less `zero`.
    unsafe fn less(pairs: Self, zero: i16) -> Self;
    /// To the nearest f32, ties to even.
    unsafe fn to_f32(sums: Self::Sums) -> Self;
    /// Of 64 floats of sixteen bits the greatest size of the runs of eight whose number is even, and of the others, as bits: these are ordered as integers are.
    #[inline(always)]
    unsafe fn greatest_of_runs(w: *const u16) -> [u16; 2] {
        let mut most = [0; 2];
        for i in 0..64 {
            // SAFETY: the caller vouches for 64 elements.
            let size = unsafe { w.add(i).read_unaligned() } & 0x7fff;
            let most = &mut most[i / 8 % 2];
            *most = if size > *most { size } else { *most };
        }
        most
    }
    /// 32 elements of bf16 times `by`, of runs of eight in turns, rounded to integers, ties to even. Lane i has those of elements 2 i and 2 i + 1, the lowest sixteen bits
    /// of each.
    #[inline(always)]
    unsafe fn round_bf16(w: *const u16, by: [f32; 2]) -> Self {
        // SAFETY: the caller vouches for 32 elements and for the instruction set.
        unsafe { packed(Self::load_bf16(w.cast()), Self::load_bf16(w.add(16).cast()), by) }
    }
    /// The same of f16.
    #[inline(always)]
    unsafe fn round_f16(w: *const u16, by: [f32; 2]) -> Self {
        // SAFETY: as above.
        unsafe { packed(Self::load_f16(w.cast()), Self::load_f16(w.add(16).cast()), by) }
    }
}

/// Adding it rounds to an integer, ties to even, which is then in the lowest bits.
pub(crate) const TO_INTEGER: f32 = 12_582_912.0;

/// Two times sixteen elements as [`Int11Dot::round_bf16`] has them.
///
/// # Safety
/// The instruction set of `V` is available.
#[inline(always)]
unsafe fn packed<V: Int11Dot>(low: V, high: V, by: [f32; 2]) -> V {
    // SAFETY: the caller's; all arrays have the lengths that are read and written.
    unsafe {
        let mut of_run = [by[0]; 16];
        let mut i = 8;
        while i < 16 {
            of_run[i] = by[1];
            i += 1;
        }
        let of_run = V::load(of_run.as_ptr());
        let mut bits = [0f32; 32];
        low.mul(of_run).add(V::splat(TO_INTEGER)).store(bits.as_mut_ptr());
        high.mul(of_run).add(V::splat(TO_INTEGER)).store(bits.as_mut_ptr().add(16));
        let mut pairs = [0f32; 16];
        i = 0;
        while i < 16 {
            pairs[i] = f32::from_bits(bits[2 * i].to_bits() & 0xffff | bits[2 * i + 1].to_bits() << 16);
            i += 1;
        }
        V::load(pairs.as_ptr())
    }
}

/// Groups of a row, in whole sixteens.
pub(crate) fn groups_of(cols: usize, group: usize) -> usize {
    (cols / group).next_multiple_of(ROWS)
}

/// Scales or biases of sixteen rows, side by side.
///
/// # Safety
/// `to` and `by_row` have room for sixteen rows of `groups` in whole sixteens; the instruction set of `V` is available.
// Plain loops over arrays of constant length: closures over vectors may not be inlined.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
pub(crate) unsafe fn side_by_side<V: Int11Dot>(
    float: Float,
    rows: [&[u8]; ROWS],
    groups: usize,
    by_row: *mut f32,
    to: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        for r in 0..ROWS {
            widen::<V>(float, rows[r], by_row.add(r * groups));
        }
        transposed::<V>(by_row, groups, groups, to);
    }
}

/// The first `groups` numbers of sixteen rows, which begin `stride` numbers after each other, side by side.
///
/// # Safety
/// There are so many, in whole sixteens, and `to` has room for them; the instruction set of `V` is available.
// As above.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
pub(crate) unsafe fn transposed<V: Int11Dot>(by_row: *const f32, stride: usize, groups: usize, to: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        for g in (0..groups).step_by(ROWS) {
            let mut lanes = [V::splat(0.0); ROWS];
            for r in 0..ROWS {
                lanes[r] = V::load(by_row.add(r * stride + g));
            }
            let lanes = V::transpose16(lanes);
            for i in 0..ROWS {
                lanes[i].store(to.add((g + i) * ROWS));
            }
        }
    }
}
