//! Types with blocks of 32 columns, straight from their bytes: a piece is four blocks.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::super::spread::first_bytes;
use super::Rows;
use crate::format::blocks::unpack::{Block, E2M1, IQ4, Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::matrix::Matrix;

/// A type whose pieces are read so.
///
/// # Safety (of all)
/// `groups` blocks are there, and so is the instruction set.
pub(in super::super) trait Piece: Block {
    /// The integers of four blocks: first halves and second halves.
    unsafe fn weights(p: *const u8, groups: usize) -> (__m512i, __m512i);
    /// The scales and biases of four rows, lane 4g + r.
    unsafe fn scales(p: [*const u8; 4], groups: usize) -> (__m512, __m512);
}

/// Four rows of such a type.
pub(in super::super) struct Small<B> {
    rows: [*const u8; 4],
    ahead: usize,
    block: PhantomData<B>,
}

impl<B: Piece> Rows for Small<B> {
    const GROUP: usize = 32;
    type Scales = ();

    #[inline(always)]
    unsafe fn new(w: &Matrix, rows: [usize; 4], ahead: usize, _: *mut u8) -> Self {
        Small { rows: rows.map(|r| w.row(r).as_ptr()), ahead, block: PhantomData }
    }

    #[inline(always)]
    unsafe fn scales(&self) {}

    #[inline(always)]
    unsafe fn next(&self, _: &mut (), piece: usize, groups: usize) -> [(__m512, __m512); 2] {
        // SAFETY: the caller's.
        unsafe {
            let (at, rows) = (piece * 4 * B::BYTES, &self.rows);
            let blocks = [rows[0].add(at), rows[1].add(at), rows[2].add(at), rows[3].add(at)];
            [B::scales(blocks, groups); 2]
        }
    }

    #[inline(always)]
    unsafe fn weights(&self, i: usize, piece: usize, groups: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller's; a prefetch does not fault.
        unsafe {
            let p = self.rows[i].add(piece * 4 * B::BYTES);
            for line in (0..4 * B::BYTES).step_by(64) {
                _mm_prefetch::<_MM_HINT_T1>(p.wrapping_add(self.ahead + line).cast());
            }
            B::weights(p, groups)
        }
    }
}

/// The 64 bytes from `at` on of a piece, zeros where blocks are not there.
#[inline(always)]
unsafe fn window<B: Block>(p: *const u8, at: usize, groups: usize) -> __m512i {
    // SAFETY: the caller's; four blocks have 64 bytes behind `at`.
    unsafe {
        match groups {
            4 => _mm512_loadu_si512(p.add(at).cast()),
            _ => first_bytes(p.wrapping_add(at), (groups * B::BYTES).saturating_sub(at)),
        }
    }
}

/// The windows of four rows at `at`.
#[inline(always)]
unsafe fn windows<B: Block>(p: [*const u8; 4], at: usize, groups: usize) -> [__m512i; 4] {
    // SAFETY: the caller's.
    unsafe {
        [
            window::<B>(p[0], at, groups),
            window::<B>(p[1], at, groups),
            window::<B>(p[2], at, groups),
            window::<B>(p[3], at, groups),
        ]
    }
}

/// The windows of four rows at 0, and at `at`.
#[inline(always)]
unsafe fn both<B: Block>(p: [*const u8; 4], at: usize, groups: usize) -> ([__m512i; 4], [__m512i; 4]) {
    // SAFETY: the caller's.
    unsafe { (windows::<B>(p, 0, groups), windows::<B>(p, at, groups)) }
}

/// Where the windows at `a` and `b` of a piece have sixteen bytes of each of four blocks: those from byte `first` of a block on.
const fn sixteens(block: usize, first: usize, (a, b): (usize, usize)) -> [u8; 64] {
    let (mut index, mut i) = ([0; 64], 0);
    while i < 64 {
        let from = i / 16 * block + first + i % 16;
        index[i] = (if from >= a && from < a + 64 { from - a } else { from - b + 64 }) as u8;
        i += 1;
    }
    index
}

/// Those bytes.
#[inline(always)]
unsafe fn taken(a: __m512i, b: __m512i, index: &[u8; 64]) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { _mm512_permutex2var_epi8(a, _mm512_loadu_si512(index.as_ptr().cast()), b) }
}

/// Low halves of the bytes, and high halves.
#[inline(always)]
pub(in super::super) unsafe fn nibbles(bytes: __m512i) -> (__m512i, __m512i) {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let low = _mm512_set1_epi8(15);
        (_mm512_and_si512(bytes, low), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low))
    }
}

/// Values by their numbers.
#[inline(always)]
pub(super) unsafe fn looked_up(values: &[u8; 16], (first, second): (__m512i, __m512i)) -> (__m512i, __m512i) {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let values = _mm512_broadcast_i32x4(_mm_loadu_si128(values.as_ptr().cast()));
        (_mm512_shuffle_epi8(values, first), _mm512_shuffle_epi8(values, second))
    }
}

/// The words of lane 4g + r, at word `step * g + first` of a block's piece.
const fn words(step: usize, first: usize) -> [u16; 32] {
    let (mut index, mut i) = ([0; 32], 0);
    while i < 16 {
        index[i] = (i / 4 * step + first) as u16;
        i += 1;
    }
    index
}

/// f16 numbers of four rows and four blocks in lanes 4g + r, whose words begin the pieces `a` or lie 64 bytes further, in `b`.
#[inline(always)]
unsafe fn halves_of<const FAR: bool>(a: [__m512i; 4], b: [__m512i; 4], index: &[u16; 32]) -> __m512 {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let index = _mm512_loadu_si512(index.as_ptr().cast());
        let mut all = _mm512_setzero_si512();
        for r in 0..4 {
            let mask = 0x1111 << r;
            all = if FAR {
                _mm512_or_si512(all, _mm512_maskz_permutex2var_epi16(mask, a[r], index, b[r]))
            } else {
                _mm512_mask_permutexvar_epi16(all, mask, index, a[r])
            };
        }
        _mm512_cvtph_ps(_mm512_castsi512_si256(all))
    }
}

/// The scales, and biases that make the zero of the type 0.
#[inline(always)]
pub(super) unsafe fn around_zero<B: Block>(s: __m512) -> (__m512, __m512) {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { (s, _mm512_mul_ps(_mm512_set1_ps(-f32::from(B::ZERO)), s)) }
}

/// Scales that begin blocks, and lie in the first 64 bytes of a piece.
#[inline(always)]
unsafe fn first_scales<B: Block>(p: [*const u8; 4], groups: usize, index: &[u16; 32]) -> __m512 {
    // SAFETY: the caller's.
    unsafe {
        let a = windows::<B>(p, 0, groups);
        halves_of::<false>(a, a, index)
    }
}

impl Piece for Q4_0 {
    #[inline(always)]
    unsafe fn weights(p: *const u8, groups: usize) -> (__m512i, __m512i) {
        const BYTES: [u8; 64] = sixteens(18, 2, (0, 8));
        // SAFETY: the caller's.
        unsafe { nibbles(taken(window::<Self>(p, 0, groups), window::<Self>(p, 8, groups), &BYTES)) }
    }
    #[inline(always)]
    unsafe fn scales(p: [*const u8; 4], groups: usize) -> (__m512, __m512) {
        // SAFETY: the caller's.
        unsafe { around_zero::<Self>(first_scales::<Self>(p, groups, const { &words(9, 0) })) }
    }
}

impl Piece for Iq4Nl {
    #[inline(always)]
    unsafe fn weights(p: *const u8, groups: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller's; the blocks are laid out as those of Q4_0.
        unsafe { looked_up(&IQ4, Q4_0::weights(p, groups)) }
    }
    #[inline(always)]
    unsafe fn scales(p: [*const u8; 4], groups: usize) -> (__m512, __m512) {
        // SAFETY: the caller's.
        unsafe { around_zero::<Self>(first_scales::<Self>(p, groups, const { &words(9, 0) })) }
    }
}

impl Piece for Q4_1 {
    #[inline(always)]
    unsafe fn weights(p: *const u8, groups: usize) -> (__m512i, __m512i) {
        const BYTES: [u8; 64] = sixteens(20, 4, (0, 16));
        // SAFETY: the caller's.
        unsafe { nibbles(taken(window::<Self>(p, 0, groups), window::<Self>(p, 16, groups), &BYTES)) }
    }
    #[inline(always)]
    unsafe fn scales(p: [*const u8; 4], groups: usize) -> (__m512, __m512) {
        // SAFETY: the caller's; the last block's are bytes 60 to 63.
        unsafe {
            let a = windows::<Self>(p, 0, groups);
            (halves_of::<false>(a, a, const { &words(10, 0) }), halves_of::<false>(a, a, const { &words(10, 1) }))
        }
    }
}

/// For each column of a half the byte that has its fifth bit: from byte `first` of a block on, in the windows at 0 and `b`.
const fn fifths(block: usize, first: usize, b: usize) -> [u8; 64] {
    let (mut index, mut i) = ([0; 64], 0);
    while i < 64 {
        let from = i / 16 * block + first + i % 16 / 8;
        index[i] = (if from < 64 { from } else { from - b + 64 }) as u8;
        i += 1;
    }
    index
}

/// Adds the fifth bits: bit i of each eight bytes for column i.
#[inline(always)]
unsafe fn fifth_bits(q: __m512i, bits: __m512i) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let set = _mm512_test_epi8_mask(bits, _mm512_set1_epi64(0x8040_2010_0804_0201_u64 as i64));
        _mm512_mask_add_epi8(q, set, q, _mm512_set1_epi8(16))
    }
}

impl Piece for Q5_1 {
    #[inline(always)]
    unsafe fn weights(p: *const u8, groups: usize) -> (__m512i, __m512i) {
        const BYTES: [u8; 64] = sixteens(24, 8, (0, 32));
        // SAFETY: the caller's.
        unsafe {
            let (a, b) = (window::<Self>(p, 0, groups), window::<Self>(p, 32, groups));
            let (first, second) = nibbles(taken(a, b, &BYTES));
            let bits = (taken(a, b, const { &fifths(24, 4, 32) }), taken(a, b, const { &fifths(24, 6, 32) }));
            (fifth_bits(first, bits.0), fifth_bits(second, bits.1))
        }
    }
    #[inline(always)]
    unsafe fn scales(p: [*const u8; 4], groups: usize) -> (__m512, __m512) {
        /// Word 36 and those behind it are in the second window, which begins with word 16.
        const fn far(first: usize) -> [u16; 32] {
            let mut index = words(12, first);
            let mut i = 12;
            while i < 16 {
                index[i] += 32 - 16;
                i += 1;
            }
            index
        }
        // SAFETY: the caller's.
        unsafe {
            let (a, b) = both::<Self>(p, 32, groups);
            (halves_of::<true>(a, b, const { &far(0) }), halves_of::<true>(a, b, const { &far(1) }))
        }
    }
}

impl Piece for Q5_0 {
    #[inline(always)]
    unsafe fn weights(p: *const u8, groups: usize) -> (__m512i, __m512i) {
        const BYTES: [u8; 64] = sixteens(22, 6, (0, 24));
        // SAFETY: the caller's.
        unsafe {
            let (a, b) = (window::<Self>(p, 0, groups), window::<Self>(p, 24, groups));
            let (first, second) = nibbles(taken(a, b, &BYTES));
            let bits = (taken(a, b, const { &fifths(22, 2, 24) }), taken(a, b, const { &fifths(22, 4, 24) }));
            (fifth_bits(first, bits.0), fifth_bits(second, bits.1))
        }
    }
    #[inline(always)]
    unsafe fn scales(p: [*const u8; 4], groups: usize) -> (__m512, __m512) {
        // SAFETY: the caller's; the last block's is byte 66.
        unsafe {
            let (a, b) = both::<Self>(p, 24, groups);
            // Word 33 is word 21 of the second window.
            const WORDS: [u16; 32] = {
                let mut index = words(11, 0);
                let mut i = 12;
                while i < 16 {
                    index[i] = 33 - 12 + 32;
                    i += 1;
                }
                index
            };
            around_zero::<Self>(halves_of::<true>(a, b, &WORDS))
        }
    }
}

impl Piece for Q8_0 {
    #[inline(always)]
    unsafe fn weights(p: *const u8, groups: usize) -> (__m512i, __m512i) {
        const FIRST: [u8; 64] = sixteens(34, 2, (0, 64));
        const SECOND: [u8; 64] = sixteens(34, 18, (8, 72));
        // SAFETY: the caller's.
        unsafe {
            let first = taken(window::<Self>(p, 0, groups), window::<Self>(p, 64, groups), &FIRST);
            let second = taken(window::<Self>(p, 8, groups), window::<Self>(p, 72, groups), &SECOND);
            let flip = _mm512_set1_epi8(-128);
            (_mm512_xor_si512(first, flip), _mm512_xor_si512(second, flip))
        }
    }
    #[inline(always)]
    unsafe fn scales(p: [*const u8; 4], groups: usize) -> (__m512, __m512) {
        // SAFETY: the caller's.
        unsafe {
            let (a, b) = both::<Self>(p, 64, groups);
            around_zero::<Self>(halves_of::<true>(a, b, const { &words(17, 0) }))
        }
    }
}

impl Piece for Mxfp4 {
    #[inline(always)]
    unsafe fn weights(p: *const u8, groups: usize) -> (__m512i, __m512i) {
        const BYTES: [u8; 64] = sixteens(17, 1, (0, 4));
        // SAFETY: the caller's.
        unsafe {
            let bytes = taken(window::<Self>(p, 0, groups), window::<Self>(p, 4, groups), &BYTES);
            looked_up(&E2M1, nibbles(bytes))
        }
    }
    #[inline(always)]
    unsafe fn scales(p: [*const u8; 4], groups: usize) -> (__m512, __m512) {
        const EXPONENTS: [u8; 64] = {
            let (mut index, mut i) = ([0; 64], 0);
            while i < 16 {
                index[4 * i] = (i / 4 * 17) as u8;
                i += 1;
            }
            index
        };
        // SAFETY: the caller's.
        unsafe {
            let index = _mm512_loadu_si512(EXPONENTS.as_ptr().cast());
            let mut exponent = _mm512_setzero_si512();
            for (r, p) in p.into_iter().enumerate() {
                // The lowest byte of each lane 4g + r.
                let mask = 0x0001_0001_0001_0001 << (4 * r);
                exponent = _mm512_mask_permutexvar_epi8(exponent, mask, index, window::<Self>(p, 0, groups));
            }
            // Half of the power; the two least are denormal.
            let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(exponent, _mm512_set1_epi32(1)));
            let least = _mm512_cmplt_epi32_mask(exponent, _mm512_set1_epi32(2));
            let bits = _mm512_mask_sllv_epi32(normal, least, _mm512_set1_epi32(0x0020_0000), exponent);
            around_zero::<Self>(_mm512_castsi512_ps(bits))
        }
    }
}
