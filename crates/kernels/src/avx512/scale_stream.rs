//! Scales and biases of four rows of weights, streamed with the rows.

use std::arch::x86_64::*;

use crate::format::Float;
use crate::matrix::Matrix;

/// The scales and biases of four rows, four weight groups at a time, spread to lane 4w + r.
pub(super) struct ScaleStream {
    scale: Float,
    s: [*const u8; 4],
    b: [*const u8; 4],
    row_bytes: usize,
    ahead: usize,
    /// 16 bytes of each row: eight or four numbers.
    s_block: __m512i,
    b_block: __m512i,
    /// Steps that one block serves: this power of two.
    log_steps: u32,
    /// Where lane 4w + r finds its number in a block at its first step, in words or double words.
    index: __m512i,
    /// Numbers per step.
    advance: __m512i,
}

impl ScaleStream {
    #[inline(always)]
    pub fn new(w: &Matrix) -> ScaleStream {
        let (format, row_bytes) = (w.grouped(), w.scale_row_bytes());
        // SAFETY: the shell that this is inlined to has the instruction set.
        unsafe {
            let held = 16 / format.scale.size();
            let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let row = _mm512_and_si512(lane, _mm512_set1_epi32(3));
            let group = _mm512_srli_epi32::<2>(lane);
            let index = _mm512_add_epi32(_mm512_mullo_epi32(row, _mm512_set1_epi32(held as i32)), group);
            let advance = _mm512_set1_epi32(4);
            // bf16 numbers go to the high half of a lane, f16 numbers to the low half of the register.
            let (index, advance) = match format.scale {
                Float::F32 => (index, advance),
                Float::Bf16 => (_mm512_slli_epi32::<16>(index), _mm512_slli_epi32::<16>(advance)),
                Float::F16 => (
                    _mm512_castsi256_si512(_mm512_cvtepi32_epi16(index)),
                    _mm512_castsi256_si512(_mm512_cvtepi32_epi16(advance)),
                ),
            };
            let zero = _mm512_setzero_si512();
            ScaleStream {
                scale: format.scale,
                s: [w.scales.as_ptr(); 4],
                b: [w.biases.as_ptr(); 4],
                row_bytes,
                ahead: 0,
                s_block: zero,
                b_block: zero,
                log_steps: (held / 4).trailing_zeros(),
                index,
                advance,
            }
        }
    }

    /// Goes to the first step of four rows. Prefetches `further` rows ahead.
    ///
    /// # Safety
    /// The rows are inside the matrix.
    #[inline(always)]
    pub unsafe fn start(&mut self, w: &Matrix, rows: [usize; 4], further: usize) {
        self.ahead = further * self.row_bytes;
        // SAFETY: the caller's.
        unsafe {
            self.s = rows.map(|row| w.scales.as_ptr().add(row * self.row_bytes));
            self.b = rows.map(|row| w.biases.as_ptr().add(row * self.row_bytes));
        }
    }

    /// The scales and biases of step `step`; steps come in order.
    #[inline(always)]
    pub unsafe fn next(&mut self, step: usize) -> (__m512, __m512) {
        // SAFETY: blocks are read under a mask that ends with the row; the caller vouches for the instruction set.
        unsafe {
            let in_block = step & ((1 << self.log_steps) - 1);
            if in_block == 0 {
                let at = (step >> self.log_steps) * 16;
                let mask = ((1u32 << (self.row_bytes - at).min(16)) - 1) as u16;
                for row in 0..4 {
                    _mm_prefetch::<_MM_HINT_T1>(self.s[row].wrapping_add(at + self.ahead).cast());
                    _mm_prefetch::<_MM_HINT_T1>(self.b[row].wrapping_add(at + self.ahead).cast());
                }
                self.s_block = four(self.s, at, mask);
                self.b_block = four(self.b, at, mask);
            }
            let n = _mm512_set1_epi32(in_block as i32);
            let n = if self.scale == Float::F32 { n } else { _mm512_set1_epi16(in_block as i16) };
            match self.scale {
                Float::F32 => {
                    let index = _mm512_add_epi32(self.index, _mm512_mullo_epi16(n, self.advance));
                    let take = |v| _mm512_permutexvar_ps(index, _mm512_castsi512_ps(v));
                    (take(self.s_block), take(self.b_block))
                }
                Float::Bf16 => {
                    let index = _mm512_add_epi16(self.index, _mm512_mullo_epi16(n, self.advance));
                    let take = |v| _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaa_aaaa, index, v));
                    (take(self.s_block), take(self.b_block))
                }
                Float::F16 => {
                    let index = _mm512_add_epi16(self.index, _mm512_mullo_epi16(n, self.advance));
                    let take = |v| _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(index, v)));
                    (take(self.s_block), take(self.b_block))
                }
            }
        }
    }
}

/// Sixteen bytes of each of four rows at offset `at`, under `mask`.
#[inline(always)]
unsafe fn four(rows: [*const u8; 4], at: usize, mask: u16) -> __m512i {
    // SAFETY: the caller vouches for the bytes under the mask.
    unsafe {
        let part = |i: usize| _mm_maskz_loadu_epi8(mask, rows[i].add(at).cast());
        let v = _mm512_castsi128_si512(part(0));
        let v = _mm512_inserti32x4::<1>(v, part(1));
        let v = _mm512_inserti32x4::<2>(v, part(2));
        _mm512_inserti32x4::<3>(v, part(3))
    }
}

/// Numbers that [`side_by_side`] reads of each row at a time, at most.
const BLOCK: usize = 8;

/// Floats for which [`side_by_side`] needs room.
pub(super) const fn floats(groups: usize) -> usize {
    4 * groups.next_multiple_of(BLOCK)
}

/// For each byte of sixteen floats in lanes 4g + r, the byte of a block with `size` bytes of a number, the first of group `first`. Low bytes of bf16 are not among them.
const fn lanes(size: usize, first: usize) -> [u8; 64] {
    let (mut index, mut i) = ([0; 64], 0);
    while i < 64 {
        let (lane, byte) = (i / 4, i % 4);
        index[i] = (16 * (lane % 4) + size * (first + lane / 4) + byte % size) as u8;
        i += 1;
    }
    index
}

/// Widens all numbers of four rows: `to[4 * group + row]`. Prefetches what lies `ahead` bytes further.
///
/// # Safety
/// The rows have `row_bytes` bytes, `to` has room for [`floats`], and the instruction set is there.
#[inline(always)]
pub(super) unsafe fn side_by_side(float: Float, rows: [*const u8; 4], row_bytes: usize, ahead: usize, to: *mut f32) {
    // SAFETY: the caller's; a prefetch does not fault.
    unsafe {
        for line in (0..row_bytes).step_by(64) {
            for row in rows {
                _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(ahead + line).cast());
            }
        }
        for at in (0..row_bytes).step_by(16) {
            let v = if at + 16 <= row_bytes { four(rows, at, !0) } else { four(rows, at, (1 << (row_bytes - at)) - 1) };
            let to = to.add(4 * (at / float.size()));
            match float {
                Float::F32 => {
                    let index = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                    _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi32(index, v));
                }
                Float::Bf16 => {
                    const FIRST: [u8; 64] = lanes(2, 0);
                    const SECOND: [u8; 64] = lanes(2, 4);
                    let (first, second) =
                        (_mm512_loadu_si512(FIRST.as_ptr().cast()), _mm512_loadu_si512(SECOND.as_ptr().cast()));
                    let high = 0xcccc_cccc_cccc_cccc;
                    _mm512_storeu_si512(to.cast(), _mm512_maskz_permutexvar_epi8(high, first, v));
                    _mm512_storeu_si512(to.add(16).cast(), _mm512_maskz_permutexvar_epi8(high, second, v));
                }
                Float::F16 => {
                    const ORDER: [u8; 64] = {
                        let (mut index, mut i) = ([0; 64], 0);
                        while i < 64 {
                            index[i] = (16 * (i / 2 % 4) + 2 * (i / 8) + i % 2) as u8;
                            i += 1;
                        }
                        index
                    };
                    let v = _mm512_permutexvar_epi8(_mm512_loadu_si512(ORDER.as_ptr().cast()), v);
                    _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm512_castsi512_si256(v)));
                    _mm512_storeu_ps(to.add(16), _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(v)));
                }
            }
        }
    }
}
