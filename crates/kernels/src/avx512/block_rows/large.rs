//! Types with blocks of 256 columns, straight from their bytes: a block is two pieces.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::Rows;
use super::small::{around_zero, looked_up};
use crate::format::blocks::unpack::{Block, IQ4, Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K};
use crate::matrix::Matrix;

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
    unsafe fn new(w: &Matrix, rows: [usize; 4], ahead: usize, _: *mut u8) -> Self {
        Large { rows: rows.map(|r| w.row(r).as_ptr()), ahead, block: PhantomData }
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
            let (at, rows) = (piece / 2 * B::BYTES, &self.rows);
            let [first, then] = B::scales([rows[0].add(at), rows[1].add(at), rows[2].add(at), rows[3].add(at)]);
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

// Functions instead of closures: a closure that is called several times is not inlined, and outside of the shell that has the instruction set each intrinsic is a call.

/// Sixteen bytes of each of four rows, a quad each.
#[inline(always)]
unsafe fn quads(rows: [*const u8; 4], at: usize) -> __m512i {
    // SAFETY: the caller's.
    unsafe {
        let v = _mm512_castsi128_si512(_mm_loadu_si128(rows[0].add(at).cast()));
        let v = _mm512_inserti32x4::<1>(v, _mm_loadu_si128(rows[1].add(at).cast()));
        let v = _mm512_inserti32x4::<2>(v, _mm_loadu_si128(rows[2].add(at).cast()));
        _mm512_inserti32x4::<3>(v, _mm_loadu_si128(rows[3].add(at).cast()))
    }
}

#[inline(always)]
unsafe fn and(v: __m512i, mask: i32) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { _mm512_and_si512(v, _mm512_set1_epi32(mask)) }
}

#[inline(always)]
unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { _mm512_or_si512(a, b) }
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
        // Words 1 and 2 have the first four scales and minima, with the high bits of the others; word 3 has the others' low bits.
        let first = and(v, 0x3f3f_3f3f);
        let high = and(_mm512_srli_epi32::<2>(v), 0x3030_3030);
        // The high bits of scales and of minima to word 3.
        let scales = or(and(v, 0x0f0f_0f0f), _mm512_shuffle_epi32::<0b01_01_01_01>(high));
        let minima = or(and(_mm512_srli_epi32::<4>(v), 0x0f0f_0f0f), _mm512_shuffle_epi32::<0b10_10_10_10>(high));
        let (of_scales, of_minima) = (unit(v, 0), unit(v, 1));
        let first = (
            scaled(of_scales, bytes(first, const { &lanes(4, 0) })),
            below(of_minima, bytes(first, const { &lanes(8, 0) })),
        );
        let index = const { &lanes(12, 0) };
        let second = (scaled(of_scales, bytes(scales, index)), below(of_minima, bytes(minima, index)));
        [[first; 2], [second; 2]]
    }
}

/// Words that shift the bytes of each quad by its constant number of bits. No `map` of an array here, which is a call for each quad.
#[inline(always)]
unsafe fn by_quad<const A: i64, const B: i64, const C: i64, const D: i64>() -> __m512i {
    const WORDS: i64 = 0x0001_0001_0001_0001;
    // SAFETY: the caller vouches for the instruction set.
    unsafe { _mm512_setr_epi64(A * WORDS, A * WORDS, B * WORDS, B * WORDS, C * WORDS, C * WORDS, D * WORDS, D * WORDS) }
}

/// 64 bytes whose low halves are groups 0 and 2, and whose high halves are 1 and 3: first halves and second halves of all four.
#[inline(always)]
unsafe fn interleaved(p: *const u8) -> (__m512i, __m512i) {
    // SAFETY: the caller's.
    unsafe {
        let v = _mm512_loadu_si512(p.cast());
        let shift = by_quad::<0, 4, 0, 4>();
        let first = _mm512_srlv_epi16(_mm512_shuffle_i32x4::<0b10_10_00_00>(v, v), shift);
        let second = _mm512_srlv_epi16(_mm512_shuffle_i32x4::<0b11_11_01_01>(v, v), shift);
        (and(first, 0x0f0f_0f0f), and(second, 0x0f0f_0f0f))
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
            let bit =
                _mm512_sllv_epi16(by_quad::<0x0101, 0x0202, 0x0404, 0x0808>(), _mm512_set1_epi16(4 * half as i16));
            let high = _mm512_broadcast_i32x4(_mm_loadu_si128(block.add(16).cast()));
            let high_2 = _mm512_broadcast_i32x4(_mm_loadu_si128(block.add(32).cast()));
            (with_bit(first, high, bit, 16), with_bit(second, high_2, bit, 16))
        }
    }
    #[inline(always)]
    unsafe fn scales(blocks: [*const u8; 4]) -> [Scales; 2] {
        // SAFETY: the caller's.
        unsafe { sixes(blocks) }
    }
}

/// `value` added where bytes have one of the bits of `bit`.
#[inline(always)]
unsafe fn with_bit(q: __m512i, bytes: __m512i, bit: __m512i, value: i8) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { _mm512_mask_add_epi8(q, _mm512_test_epi8_mask(bytes, bit), q, _mm512_set1_epi8(value)) }
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
            // Four bits of the one, two of the other above them.
            let nibble = _mm512_set1_epi8(15);
            let first = _mm512_sllv_epi16(high, by_quad::<4, 4, 2, 2>());
            let first = _mm512_ternarylogic_epi32::<0xca>(nibble, low, first);
            let second = _mm512_srlv_epi16(high, by_quad::<0, 0, 2, 2>());
            let second = _mm512_ternarylogic_epi32::<0xca>(nibble, _mm512_srli_epi16::<4>(low), second);
            (and(first, 0x3f3f_3f3f), and(second, 0x3f3f_3f3f))
        }
    }
    #[inline(always)]
    unsafe fn scales(blocks: [*const u8; 4]) -> [Scales; 2] {
        // SAFETY: the caller's; the unit lies behind the scales, in the last two of sixteen bytes.
        unsafe {
            let (v, unit) = (quads(blocks, 192), unit(quads(blocks, 194), 7));
            let some = [
                around_zero::<Self>(scaled(unit, signed_bytes(v, const { &lanes(0, 3) }))),
                around_zero::<Self>(scaled(unit, signed_bytes(v, const { &lanes(4, 3) }))),
                around_zero::<Self>(scaled(unit, signed_bytes(v, const { &lanes(8, 3) }))),
                around_zero::<Self>(scaled(unit, signed_bytes(v, const { &lanes(12, 3) }))),
            ];
            [[some[0], some[1]], [some[2], some[3]]]
        }
    }
}

/// Two bits of each: of 32 bytes the lowest, then the next, and so on.
#[inline(always)]
unsafe fn pairs(p: *const u8) -> (__m512i, __m512i) {
    // SAFETY: the caller's.
    unsafe {
        let v = twice(p);
        let first = _mm512_srlv_epi16(v, by_quad::<0, 0, 2, 2>());
        let second = _mm512_srlv_epi16(v, by_quad::<4, 4, 6, 6>());
        (and(first, 0x0303_0303), and(second, 0x0303_0303))
    }
}

/// Scales and biases from the units and the integers of both.
#[inline(always)]
unsafe fn with_minima(
    units: (__m512, __m512),
    (scales, minima): (__m512i, __m512i),
    index: &[u8; 64],
) -> (__m512, __m512) {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { (scaled(units.0, bytes(scales, index)), below(units.1, bytes(minima, index))) }
}

/// Scales of six bits around 32.
#[inline(always)]
unsafe fn around_32<B: Block>(unit: __m512, scales: __m512i) -> (__m512, __m512) {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { around_zero::<B>(scaled(unit, _mm512_sub_epi32(scales, _mm512_set1_epi32(32)))) }
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
            let units = (of_scales, of_minima);
            let both = (and(v, 0x0f0f_0f0f), and(_mm512_srli_epi16::<4>(v), 0x0f0f_0f0f));
            let some = [
                with_minima(units, both, const { &lanes(0, 0) }),
                with_minima(units, both, const { &lanes(4, 0) }),
                with_minima(units, both, const { &lanes(8, 0) }),
                with_minima(units, both, const { &lanes(12, 0) }),
            ];
            [[some[0], some[1]], [some[2], some[3]]]
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
            let bit = _mm512_sllv_epi16(by_quad::<0x0101, 0x0101, 0x0202, 0x0202>(), by_half);
            let bit_2 = _mm512_sllv_epi16(by_quad::<0x0404, 0x0404, 0x0808, 0x0808>(), by_half);
            (with_bit(first, high, bit, 4), with_bit(second, high, bit_2, 4))
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
            let high = _mm512_shuffle_epi32::<0b10_10_10_10>(v);
            // Scales 0 to 3 in word 0, 4 to 7 in word 1, 8 to 11 in word 0 of the second, 12 to 15 in its word 1.
            let by = _mm512_setr_epi32(4, 2, 0, 0, 4, 2, 0, 0, 4, 2, 0, 0, 4, 2, 0, 0);
            let first = or(and(v, 0x0f0f_0f0f), and(_mm512_sllv_epi32(high, by), 0x3030_3030));
            let by = _mm512_setr_epi32(0, 2, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0);
            let low = and(_mm512_srli_epi32::<4>(v), 0x0f0f_0f0f);
            let second = or(low, and(_mm512_srlv_epi32(high, by), 0x3030_3030));
            let (index, index_2) = (const { &lanes(0, 0) }, const { &lanes(4, 0) });
            [
                [around_32::<Self>(unit, bytes(first, index)), around_32::<Self>(unit, bytes(first, index_2))],
                [around_32::<Self>(unit, bytes(second, index)), around_32::<Self>(unit, bytes(second, index_2))],
            ]
        }
    }
}

/// Scales of IQ4_XS of groups `from` to `from + 3`, in lanes 4g + r: four bits of `low`, moved by `odd`, and two of `high`.
#[inline(always)]
unsafe fn iq4_scales(
    unit: __m512,
    low: __m512i,
    high: __m512i,
    (odd, group): (__m512i, __m512i),
    from: i32,
) -> (__m512, __m512) {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let low = and(_mm512_srlv_epi32(low, odd), 15);
        let by = _mm512_slli_epi32::<1>(_mm512_add_epi32(group, _mm512_set1_epi32(from)));
        let high = and(_mm512_srlv_epi32(high, by), 3);
        around_32::<Iq4Xs>(unit, or(low, _mm512_slli_epi32::<4>(high)))
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
            let (low, low_2) = (bytes(v, const { &low(0) }), bytes(v, const { &low(1) }));
            let first = iq4_scales(unit, low, high, (odd, group), 0);
            let second = iq4_scales(unit, low_2, high, (odd, group), 4);
            [[first; 2], [second; 2]]
        }
    }
}
