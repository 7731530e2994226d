//! Four rows of blocks for `block_decode`: their integers in registers, and their scales in the lanes of the sums.

mod large;
mod small;

pub(super) use large::{Blocks, Large};
pub(super) use small::{Piece, Small};

use std::arch::x86_64::*;

use super::Avx512x16;
use crate::format::BlockFormat;
use crate::instructions::unpack::Unpack;

/// Columns of a piece.
pub(super) const PIECE: usize = 128;

/// The first halves of four groups of 32 bytes, and the second halves.
#[inline(always)]
pub(super) unsafe fn halves(a: __m512i, b: __m512i) -> (__m512i, __m512i) {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { (_mm512_shuffle_i32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b)) }
}

/// Four rows of a type of blocks.
///
/// # Safety (of all)
/// The rows are there, and so is the instruction set. Pieces come in ascending order, and have `groups` (1 to 4) whole groups of 32 columns.
pub(super) trait Rows {
    /// Columns that share a scale.
    const GROUP: usize;
    /// What is kept from piece to piece.
    type Scales;

    /// Four rows of `cols` columns at `rows`. Prefetches rows that are `ahead` bytes further. `room`: as many bytes as [`Unpacked::bytes`] says.
    unsafe fn new(format: BlockFormat, rows: [*const u8; 4], cols: usize, ahead: usize, room: *mut u8) -> Self;
    /// Before the first piece.
    unsafe fn scales(&self) -> Self::Scales;
    /// Scales and biases of a piece, lane 4g + r: of groups of 32 in the first, of groups of 16 in both.
    unsafe fn next(&self, scales: &mut Self::Scales, piece: usize, groups: usize) -> [(__m512, __m512); 2];
    /// A piece of row `i`. Groups of 32: the first halves of all four, and the second halves. Groups of 16: four, and four. Bytes of groups that are not there are
    /// arbitrary.
    unsafe fn weights(&self, i: usize, piece: usize, groups: usize) -> (__m512i, __m512i);
}

/// Rows of any type, unpacked to memory.
pub(super) struct Unpacked<const GROUP: usize> {
    q: *const u8,
    /// Columns of a row, in whole pieces.
    cols: usize,
    s: *const f32,
    b: *const f32,
}

impl<const GROUP: usize> Unpacked<GROUP> {
    /// Bytes of four rows.
    pub fn bytes(cols: usize) -> usize {
        let cols = cols.next_multiple_of(PIECE);
        4 * (cols + 2 * cols / GROUP * 4)
    }

    /// Four numbers of each row, lane 4g + r.
    #[inline(always)]
    unsafe fn four(&self, all: *const f32, g: usize) -> __m512 {
        // SAFETY: the rows have as many groups, in whole pieces; the caller vouches for the instruction set.
        unsafe {
            let row = |i: usize| _mm_loadu_ps(all.add(i * (self.cols / GROUP) + g));
            let v = _mm512_insertf32x4::<1>(_mm512_castps128_ps512(row(0)), row(1));
            let v = _mm512_insertf32x4::<3>(_mm512_insertf32x4::<2>(v, row(2)), row(3));
            let index = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_ps(index, v)
        }
    }
}

impl<const GROUP: usize> Rows for Unpacked<GROUP> {
    const GROUP: usize = GROUP;
    type Scales = ();

    #[inline(always)]
    unsafe fn new(format: BlockFormat, rows: [*const u8; 4], cols: usize, ahead: usize, room: *mut u8) -> Self {
        let (count, whole) = (cols / format.block_columns(), cols.next_multiple_of(PIECE));
        let groups = whole / GROUP;
        // SAFETY: the room holds four rows in whole pieces.
        unsafe {
            let s = room.add(4 * whole).cast::<f32>();
            let b = s.add(4 * groups);
            for (i, row) in rows.into_iter().enumerate() {
                for line in (0..count * format.block_bytes()).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(ahead + line).cast());
                }
                Avx512x16::unpack_blocks(format, row, count, room.add(i * whole), s.add(i * groups), b.add(i * groups));
            }
            Unpacked { q: room, cols: whole, s, b }
        }
    }

    #[inline(always)]
    unsafe fn scales(&self) {}

    #[inline(always)]
    unsafe fn next(&self, _: &mut (), piece: usize, _: usize) -> [(__m512, __m512); 2] {
        // SAFETY: the caller's.
        unsafe {
            let first = piece * (PIECE / GROUP);
            let some = |g: usize| (self.four(self.s, g), self.four(self.b, g));
            if GROUP == 32 { [some(first); 2] } else { [some(first), some(first + 4)] }
        }
    }

    #[inline(always)]
    unsafe fn weights(&self, i: usize, piece: usize, _: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller's.
        unsafe {
            let at = self.q.add(i * self.cols + piece * PIECE);
            let (a, b) = (_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast()));
            if GROUP == 32 { halves(a, b) } else { (a, b) }
        }
    }
}
