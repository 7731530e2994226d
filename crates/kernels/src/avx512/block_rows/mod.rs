//! Four rows of blocks for `block_decode`: their integers in registers, and their scales in the lanes of the sums.

mod large;
mod mxfp4;
mod small;

pub(super) use large::{Blocks, Large};
pub(super) use mxfp4::Planes;
pub(super) use small::{Piece, Small, nibbles};

use std::arch::x86_64::*;

use super::Avx512x16;
use crate::instructions::unpack::unpack_columns;
use crate::matrix::Matrix;

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

    /// Four rows. Prefetches rows that are `ahead` bytes further. `room`: as many bytes as [`Unpacked::bytes`] says.
    unsafe fn new(w: &Matrix, rows: [usize; 4], ahead: usize, room: *mut u8) -> Self;
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
            let (at, row) = (all.add(g), self.cols / GROUP);
            let v = _mm512_insertf32x4::<1>(_mm512_castps128_ps512(_mm_loadu_ps(at)), _mm_loadu_ps(at.add(row)));
            let v = _mm512_insertf32x4::<2>(v, _mm_loadu_ps(at.add(2 * row)));
            let v = _mm512_insertf32x4::<3>(v, _mm_loadu_ps(at.add(3 * row)));
            let index = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_ps(index, v)
        }
    }
}

impl<const GROUP: usize> Rows for Unpacked<GROUP> {
    const GROUP: usize = GROUP;
    type Scales = ();

    #[inline(always)]
    unsafe fn new(w: &Matrix, rows: [usize; 4], ahead: usize, room: *mut u8) -> Self {
        let whole = w.cols.next_multiple_of(PIECE);
        let groups = whole / GROUP;
        // SAFETY: the room holds four rows in whole pieces.
        unsafe {
            let s = room.add(4 * whole).cast::<f32>();
            let b = s.add(4 * groups);
            for (i, r) in rows.into_iter().enumerate() {
                for line in w.row(r).chunks(64) {
                    _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().wrapping_add(ahead).cast());
                }
                let (s, b) = (s.add(i * groups), b.add(i * groups));
                unpack_columns::<Avx512x16>(w, r, (0, w.cols), room.add(i * whole), s, b);
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
            let some = (self.four(self.s, first), self.four(self.b, first));
            if GROUP == 32 { [some; 2] } else { [some, (self.four(self.s, first + 4), self.four(self.b, first + 4))] }
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
