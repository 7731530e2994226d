//! Types with blocks of 256 columns, straight from their bytes: a block is two pieces.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::Rows;
use super::small::{around_zero, looked_up};
use crate::format::BlockFormat;
use crate::format::blocks::unpack::{Block, IQ4, Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K};

/// The scales and biases of a piece: of groups of 32 in the first, of groups of 16 in both.
type Scales = [(__m512, __m512); 2];

/// A type whose blocks are read so.
///
/// # Safety (of all)
/// The block is there, and so is the instruction set.
pub(in super::super) trait Blocks: Block {
    /// The integers of piece `half`, as [`Rows::weights`] has them.
    unsafe fn weights(block: *const u8, half: usize) -> (__m512i, __m512i);
    /// The scales and biases of four rows' blocks, of both pieces.
    unsafe fn scales(blocks: [*const u8; 4]) -> [Scales; 2];
}

/// Four rows of such a type.
pub(in super::super) struct Large<B> {
    rows: [*const u8; 4],
    ahead: usize,
    block: PhantomData<B>,
}

impl<B: Blocks> Rows for Large<B> {
    const GROUP: usize = B::GROUP;
    /// Of the second piece.
    type Scales = Scales;

    #[inline(always)]
    unsafe fn new(_: BlockFormat, rows: [*const u8; 4], _: usize, ahead: usize, _: *mut u8) -> Self {
        Large { rows, ahead, block: PhantomData }
    }

    #[inline(always)]
    unsafe fn scales(&self) -> Scales {
        // SAFETY: the caller's.
        unsafe { [(_mm512_setzero_ps(), _mm512_setzero_ps()); 2] }
    }

    #[inline(always)]
    unsafe fn next(&self, second: &mut Scales, piece: usize, _: usize) -> Scales {
        if piece % 2 == 1 {
            return *second;
        }
        // SAFETY: the caller's.
        unsafe {
            let [first, then] = B::scales(self.rows.map(|row| row.add(piece / 2 * B::BYTES)));
            *second = then;
            first
        }
    }

    #[inline(always)]
    unsafe fn weights(&self, i: usize, piece: usize, _: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller's; a prefetch does not fault.
        unsafe {
            let block = self.rows[i].add(piece / 2 * B::BYTES);
            let from = self.ahead + piece % 2 * (B::BYTES / 2);
            for line in (0..B::BYTES / 2).step_by(64) {
                _mm_prefetch::<_MM_HINT_T1>(block.wrapping_add(from + line).cast());
            }
            B::weights(block, piece % 2)
        }
    }
}

/// Sixteen bytes of each of four rows, a quad each.
#[inline(always)]
unsafe fn quads(rows: [*const u8; 4], at: usize) -> __m512i {
    // SAFETY: the caller's.
    unsafe {
        let row = |i: usize| _mm_loadu_si128(rows[i].add(at).cast());
        let v = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(row(0)), row(1));
        _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(v, row(2)), row(3))
    }
}

/// Where byte `place` of lane 4g + r finds byte `first + g` of quad r.
const fn lanes(first: usize, place: usize) -> [u8; 64] {
    let (mut index, mut i) = ([0; 64], 0);
    while i < 16 {
        index[4 * i + place] = (i % 4 * 16 + first + i / 4) as u8;
        i += 1;
    }
    index
}

/// Bytes of the quads as integers in lanes 4g + r: bytes `first` to `first + 3`.
#[inline(always)]
unsafe fn bytes(v: __m512i, index: &[u8; 64]) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { _mm512_maskz_permutexvar_epi8(0x1111_1111_1111_1111, _mm512_loadu_si512(index.as_ptr().cast()), v) }
}

/// Signed bytes likewise; the index is made for place 3.
#[inline(always)]
unsafe fn signed_bytes(v: __m512i, index: &[u8; 64]) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let index = _mm512_loadu_si512(index.as_ptr().cast());
        _mm512_srai_epi32::<24>(_mm512_maskz_permutexvar_epi8(0x8888_8888_8888_8888, index, v))
    }
}

/// Word `at` of each quad as an f16 in lanes 4g + r.
#[inline(always)]
unsafe fn unit(v: __m512i, at: i32) -> __m512 {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        // Two words in a lane of 32 bits: word 8r + at is for lane r.
        let index = _mm512_set1_epi64((at as i64) * 0x0001_0001_0001_0001 + 0x0018_0010_0008_0000);
        _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(index, v)))
    }
}

#[inline(always)]
unsafe fn scaled(unit: __m512, integers: __m512i) -> __m512 {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { _mm512_mul_ps(unit, _mm512_cvtepi32_ps(integers)) }
}

/// A bias of each group: the unit times the minimum, negative.
#[inline(always)]
unsafe fn below(unit: __m512, minima: __m512i) -> __m512 {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { _mm512_xor_ps(scaled(unit, minima), _mm512_set1_ps(-0.0)) }
}

/// The 6-bit scales and minima of Q4_K and Q5_K.
#[inline(always)]
unsafe fn sixes(blocks: [*const u8; 4]) -> [Scales; 2] {
    // SAFETY: the caller's.
    unsafe {
        let v = quads(blocks, 0);
        let and = |v, mask| _mm512_and_si512(v, _mm512_set1_epi32(mask));
        let or = |a, b| _mm512_or_si512(a, b);
        // Words 1 and 2 have the first four scales and minima, with the high bits of the others; word 3 has the others' low bits.
        let first = and(v, 0x3f3f_3f3f);
        let high = and(_mm512_srli_epi32::<2>(v), 0x3030_3030);
        // The high bits of scales and of minima to word 3.
        let scales = or(and(v, 0x0f0f_0f0f), _mm512_shuffle_epi32::<0b01_01_01_01>(high));
        let minima = or(and(_mm512_srli_epi32::<4>(v), 0x0f0f_0f0f), _mm512_shuffle_epi32::<0b10_10_10_10>(high));
        let (of_scales, of_minima) = (unit(v, 0), unit(v, 1));
        let some = |scales: __m512i, minima: __m512i| (scaled(of_scales, scales), below(of_minima, minima));
        [
            [some(bytes(first, const { &lanes(4, 0) }), bytes(first, const { &lanes(8, 0) })); 2],
            [some(bytes(scales, const { &lanes(12, 0) }), bytes(minima, const { &lanes(12, 0) })); 2],
        ]
    }
}

/// Words that shift each quad's bytes by so many bits.
#[inline(always)]
unsafe fn by_quad(bits: [i64; 4]) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let [a, b, c, d] = bits.map(|bits| bits * 0x0001_0001_0001_0001);
        _mm512_setr_epi64(a, a, b, b, c, c, d, d)
    }
}

/// 64 bytes whose low halves are groups 0 and 2, and whose high halves are 1 and 3: first halves and second halves of all four.
#[inline(always)]
unsafe fn interleaved(p: *const u8) -> (__m512i, __m512i) {
    // SAFETY: the caller's.
    unsafe {
        let v = _mm512_loadu_si512(p.cast());
        let (shift, low) = (by_quad([0, 4, 0, 4]), _mm512_set1_epi8(15));
        let of = |v| _mm512_and_si512(_mm512_srlv_epi16(v, shift), low);
        (of(_mm512_shuffle_i32x4::<0b10_10_00_00>(v, v)), of(_mm512_shuffle_i32x4::<0b11_11_01_01>(v, v)))
    }
}

impl Blocks for Q4K {
    #[inline(always)]
    unsafe fn weights(block: *const u8, half: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller's.
        unsafe { interleaved(block.add(16 + 64 * half)) }
    }
    #[inline(always)]
    unsafe fn scales(blocks: [*const u8; 4]) -> [Scales; 2] {
        // SAFETY: the caller's.
        unsafe { sixes(blocks) }
    }
}

impl Blocks for Q5K {
    #[inline(always)]
    unsafe fn weights(block: *const u8, half: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller's.
        unsafe {
            let (first, second) = interleaved(block.add(48 + 64 * half));
            // Bit g of a byte is for group g of eight.
            let bit = _mm512_sllv_epi16(by_quad([0x0101, 0x0202, 0x0404, 0x0808]), _mm512_set1_epi16(4 * half as i16));
            let of = |q, at: usize| {
                let high = _mm512_broadcast_i32x4(_mm_loadu_si128(block.add(16 + at).cast()));
                _mm512_mask_add_epi8(q, _mm512_test_epi8_mask(high, bit), q, _mm512_set1_epi8(16))
            };
            (of(first, 0), of(second, 16))
        }
    }
    #[inline(always)]
    unsafe fn scales(blocks: [*const u8; 4]) -> [Scales; 2] {
        // SAFETY: the caller's.
        unsafe { sixes(blocks) }
    }
}

/// 32 bytes at `p`, twice.
#[inline(always)]
unsafe fn twice(p: *const u8) -> __m512i {
    // SAFETY: the caller's.
    unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast())) }
}

impl Blocks for Q6K {
    #[inline(always)]
    unsafe fn weights(block: *const u8, half: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller's.
        unsafe {
            let low = _mm512_loadu_si512(block.add(64 * half).cast());
            let high = twice(block.add(128 + 32 * half));
            let (nibble, six) = (_mm512_set1_epi8(15), _mm512_set1_epi8(63));
            // Four bits of the one, two of the other above them.
            let of = |low, high| _mm512_and_si512(_mm512_ternarylogic_epi32::<0xca>(nibble, low, high), six);
            (
                of(low, _mm512_sllv_epi16(high, by_quad([4, 4, 2, 2]))),
                of(_mm512_srli_epi16::<4>(low), _mm512_srlv_epi16(high, by_quad([0, 0, 2, 2]))),
            )
        }
    }
    #[inline(always)]
    unsafe fn scales(blocks: [*const u8; 4]) -> [Scales; 2] {
        // SAFETY: the caller's; the unit lies behind the scales, in the last two of sixteen bytes.
        unsafe {
            let (v, unit) = (quads(blocks, 192), unit(quads(blocks, 194), 7));
            let some = |index| around_zero::<Self>(scaled(unit, signed_bytes(v, index)));
            [
                [some(const { &lanes(0, 3) }), some(const { &lanes(4, 3) })],
                [some(const { &lanes(8, 3) }), some(const { &lanes(12, 3) })],
            ]
        }
    }
}

/// Two bits of each: of 32 bytes the lowest, then the next, and so on.
#[inline(always)]
unsafe fn pairs(p: *const u8) -> (__m512i, __m512i) {
    // SAFETY: the caller's.
    unsafe {
        let (v, three) = (twice(p), _mm512_set1_epi8(3));
        let of = |shift| _mm512_and_si512(_mm512_srlv_epi16(v, by_quad(shift)), three);
        (of([0, 0, 2, 2]), of([4, 4, 6, 6]))
    }
}

impl Blocks for Q2K {
    #[inline(always)]
    unsafe fn weights(block: *const u8, half: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller's.
        unsafe { pairs(block.add(16 + 32 * half)) }
    }
    #[inline(always)]
    unsafe fn scales(blocks: [*const u8; 4]) -> [Scales; 2] {
        // SAFETY: the caller's; the units are the last four of sixteen bytes.
        unsafe {
            let (v, units) = (quads(blocks, 0), quads(blocks, 68));
            let (of_scales, of_minima) = (unit(units, 6), unit(units, 7));
            let nibble = _mm512_set1_epi8(15);
            let (scales, minima) = (_mm512_and_si512(v, nibble), _mm512_and_si512(_mm512_srli_epi16::<4>(v), nibble));
            let some = |index| (scaled(of_scales, bytes(scales, index)), below(of_minima, bytes(minima, index)));
            [
                [some(const { &lanes(0, 0) }), some(const { &lanes(4, 0) })],
                [some(const { &lanes(8, 0) }), some(const { &lanes(12, 0) })],
            ]
        }
    }
}

impl Blocks for Q3K {
    #[inline(always)]
    unsafe fn weights(block: *const u8, half: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller's.
        unsafe {
            let (first, second) = pairs(block.add(32 + 32 * half));
            let (high, by_half) = (twice(block), _mm512_set1_epi16(4 * half as i16));
            // Bit k of a byte is for the k-th 32 of eight.
            let of = |q, bits| {
                let bit = _mm512_sllv_epi16(by_quad(bits), by_half);
                _mm512_mask_add_epi8(q, _mm512_test_epi8_mask(high, bit), q, _mm512_set1_epi8(4))
            };
            (of(first, [0x0101, 0x0101, 0x0202, 0x0202]), of(second, [0x0404, 0x0404, 0x0808, 0x0808]))
        }
    }
    #[inline(always)]
    unsafe fn scales(blocks: [*const u8; 4]) -> [Scales; 2] {
        // SAFETY: the caller's; the scales are bytes 2 to 13 of the sixteen, the unit the last two.
        unsafe {
            let all = quads(blocks, 94);
            let unit = unit(all, 7);
            // Words 0 and 1 have the low bits, word 2 the high ones.
            let v = _mm512_bsrli_epi128::<2>(all);
            let and = |v, mask| _mm512_and_si512(v, _mm512_set1_epi32(mask));
            let high = _mm512_shuffle_epi32::<0b10_10_10_10>(v);
            let two = |low, high| _mm512_or_si512(and(low, 0x0f0f_0f0f), and(high, 0x3030_3030));
            // Scales 0 to 3 in word 0, 4 to 7 in word 1, 8 to 11 in word 0 of the second, 12 to 15 in its word 1.
            let by = _mm512_setr_epi32(4, 2, 0, 0, 4, 2, 0, 0, 4, 2, 0, 0, 4, 2, 0, 0);
            let first = two(v, _mm512_sllv_epi32(high, by));
            let by = _mm512_setr_epi32(0, 2, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0);
            let second = two(_mm512_srli_epi32::<4>(v), _mm512_srlv_epi32(high, by));
            let some = |v, index| {
                let scales = _mm512_sub_epi32(bytes(v, index), _mm512_set1_epi32(32));
                around_zero::<Self>(scaled(unit, scales))
            };
            [
                [some(first, const { &lanes(0, 0) }), some(first, const { &lanes(4, 0) })],
                [some(second, const { &lanes(0, 0) }), some(second, const { &lanes(4, 0) })],
            ]
        }
    }
}

impl Blocks for Iq4Xs {
    #[inline(always)]
    unsafe fn weights(block: *const u8, half: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller's.
        unsafe {
            let (v, low) = (_mm512_loadu_si512(block.add(8 + 64 * half).cast()), _mm512_set1_epi8(15));
            looked_up(&IQ4, (_mm512_and_si512(v, low), _mm512_and_si512(_mm512_srli_epi16::<4>(v), low)))
        }
    }
    #[inline(always)]
    unsafe fn scales(blocks: [*const u8; 4]) -> [Scales; 2] {
        /// Bytes 2 and 3 of quad r in lane 4g + r.
        const HIGH: [u8; 64] = {
            let (mut index, mut i) = ([0; 64], 0);
            while i < 16 {
                index[4 * i] = (i % 4 * 16 + 2) as u8;
                index[4 * i + 1] = index[4 * i] + 1;
                i += 1;
            }
            index
        };
        /// Byte `4 + g / 2` for group g of the piece.
        const fn low(half: usize) -> [u8; 64] {
            let (mut index, mut i) = ([0; 64], 0);
            while i < 16 {
                index[4 * i] = (i % 4 * 16 + 4 + 2 * half + i / 8) as u8;
                i += 1;
            }
            index
        }
        // SAFETY: the caller's.
        unsafe {
            let v = quads(blocks, 0);
            let unit = unit(v, 0);
            let index = _mm512_loadu_si512(HIGH.as_ptr().cast());
            let high = _mm512_maskz_permutexvar_epi8(0x3333_3333_3333_3333, index, v);
            let group = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            let odd = _mm512_slli_epi32::<2>(_mm512_and_si512(group, _mm512_set1_epi32(1)));
            let some = |index, half: i32| {
                let low = _mm512_and_si512(_mm512_srlv_epi32(bytes(v, index), odd), _mm512_set1_epi32(15));
                let by = _mm512_slli_epi32::<1>(_mm512_add_epi32(group, _mm512_set1_epi32(4 * half)));
                let high = _mm512_and_si512(_mm512_srlv_epi32(high, by), _mm512_set1_epi32(3));
                let scales = _mm512_or_si512(low, _mm512_slli_epi32::<4>(high));
                [around_zero::<Self>(scaled(unit, _mm512_sub_epi32(scales, _mm512_set1_epi32(32)))); 2]
            };
            [some(const { &low(0) }, 0), some(const { &low(1) }, 1)]
        }
    }
}
