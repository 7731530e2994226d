//! MXFP4 as safetensors have it, straight from its two planes: a piece has 64 bytes of numbers, two in a byte, and the exponents of four groups.

use std::arch::x86_64::*;

use super::super::spread::first_bytes;
use super::Rows;
use super::small::{around_zero, looked_up, nibbles};
use crate::format::blocks::unpack::{E2M1, Mxfp4};
use crate::matrix::Matrix;

/// Four rows.
pub(in super::super) struct Planes {
    numbers: [*const u8; 4],
    exponents: [*const u8; 4],
    ahead: usize,
}

/// The exponent of group g of row r: byte 4r + g goes to lane 4g + r.
const LANES: [u8; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];

impl Rows for Planes {
    const GROUP: usize = 32;
    type Scales = ();

    #[inline(always)]
    unsafe fn new(w: &Matrix, rows: [usize; 4], ahead: usize, _: *mut u8) -> Self {
        Planes { numbers: rows.map(|r| w.row(r).as_ptr()), exponents: rows.map(|r| w.row_scales(r).0.as_ptr()), ahead }
    }

    #[inline(always)]
    unsafe fn scales(&self) {}

    #[inline(always)]
    unsafe fn next(&self, _: &mut (), piece: usize, groups: usize) -> [(__m512, __m512); 2] {
        // SAFETY: the caller's; of groups that are not there nothing is read.
        unsafe {
            let mut four = [0u32; 4];
            for (four, row) in four.iter_mut().zip(self.exponents) {
                std::ptr::copy_nonoverlapping(row.add(4 * piece), (four as *mut u32).cast::<u8>(), groups);
            }
            let bytes = _mm_shuffle_epi8(_mm_loadu_si128(four.as_ptr().cast()), _mm_loadu_si128(LANES.as_ptr().cast()));
            let exponent = _mm512_cvtepu8_epi32(bytes);
            // Half of the power; the two least are denormal, and 255 is no number.
            let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(exponent, _mm512_set1_epi32(1)));
            let least = _mm512_cmplt_epi32_mask(exponent, _mm512_set1_epi32(2));
            let bits = _mm512_mask_sllv_epi32(normal, least, _mm512_set1_epi32(0x0020_0000), exponent);
            let none = _mm512_cmpeq_epi32_mask(exponent, _mm512_set1_epi32(255));
            let bits = _mm512_mask_mov_epi32(bits, none, _mm512_set1_epi32(0x7fc0_0000));
            [around_zero::<Mxfp4>(_mm512_castsi512_ps(bits)); 2]
        }
    }

    #[inline(always)]
    unsafe fn weights(&self, i: usize, piece: usize, groups: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller's; a prefetch does not fault.
        unsafe {
            let p = self.numbers[i].add(64 * piece);
            _mm_prefetch::<_MM_HINT_T1>(p.wrapping_add(self.ahead).cast());
            let bytes = match groups {
                4 => _mm512_loadu_si512(p.cast()),
                _ => first_bytes(p, 16 * groups),
            };
            // Even columns and odd ones; side by side, the lower eight bytes of each group are its first half.
            let (even, odd) = nibbles(bytes);
            looked_up(&E2M1, (_mm512_unpacklo_epi8(even, odd), _mm512_unpackhi_epi8(even, odd)))
        }
    }
}
