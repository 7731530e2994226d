//! Int8 activations times weights in groups: rows stream once, 64 columns of 4 bits are two registers of bytes after six instructions, and several tokens meet them there. Other
//! packings, and blocks, are unpacked to a row of bytes first.
//!
//! A turn is four weight groups, one in each lane of an output's accumulators.

use std::arch::x86_64::*;

use super::Avx2x16;
use crate::format::packing::PackingName;
use crate::input::{GROUP, ORDER};
use crate::instructions::int8_dot::{Groups, TokenScales, add_group};
use crate::instructions::unpack::{unpack_columns, unpack_lanes, widen};
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// Tokens that stream rows, at most: those that meet a turn's registers. With more, a level that has VNNI does not come here.
pub const FEW: usize = 4;
/// Registers of a turn at most: four groups of 128 columns.
const REGISTERS: usize = 16;
/// Bytes ahead of a row's integers that are fetched.
const AHEAD: usize = 2048;

/// One unpacked row, its scales and its biases, and the scales of all tokens: two for each group of 16 columns at most.
fn sizes(cols: usize, tokens: usize) -> [usize; 4] {
    [cols, cols / 4, cols / 4, tokens.min(FEW) * cols / 2]
}

pub(super) fn scratch_bytes(cols: usize, tokens: usize) -> usize {
    cut_bytes(sizes(cols, tokens))
}

/// Where a row's integers come from.
///
/// # Safety (of all)
/// The columns are there, and so is AVX2.
trait Source {
    /// Whether they are read from the matrix itself, not from a row that was unpacked first.
    const IS_PACKED: bool;
    /// Bytes of so many columns.
    fn bytes(columns: usize) -> usize;
    /// Columns `column..column + 64`, in the order of activations.
    unsafe fn load(row: *const u8, column: usize) -> (__m256i, __m256i);
    /// The integer of a column.
    unsafe fn one(row: *const u8, column: usize) -> u8;
}

/// Four bits each.
struct Nibbles;

impl Source for Nibbles {
    const IS_PACKED: bool = true;
    #[inline(always)]
    fn bytes(columns: usize) -> usize {
        columns / 2
    }
    #[inline(always)]
    unsafe fn load(row: *const u8, column: usize) -> (__m256i, __m256i) {
        // SAFETY: the caller's.
        unsafe {
            let low = _mm256_set1_epi8(15);
            // Eights of bytes 0, 2, 1, 3, since the two halves of a register are unpacked by themselves.
            let v = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_loadu_si256(row.add(column / 2).cast()));
            let (even, odd) = (_mm256_and_si256(v, low), _mm256_and_si256(_mm256_srli_epi16::<4>(v), low));
            (_mm256_unpacklo_epi32(even, odd), _mm256_unpackhi_epi32(even, odd))
        }
    }
    #[inline(always)]
    unsafe fn one(row: *const u8, column: usize) -> u8 {
        // SAFETY: the caller's.
        unsafe { *row.add(column / 2) >> (4 * (column % 2)) & 15 }
    }
}

/// A byte each: of the matrix, or of a row that was unpacked.
struct Bytes<const IS_PACKED: bool>;

impl<const IS_PACKED: bool> Source for Bytes<IS_PACKED> {
    const IS_PACKED: bool = IS_PACKED;
    #[inline(always)]
    fn bytes(columns: usize) -> usize {
        columns
    }
    #[inline(always)]
    unsafe fn load(row: *const u8, column: usize) -> (__m256i, __m256i) {
        // SAFETY: the caller's.
        unsafe {
            let at = row.add(column);
            (in_order(_mm256_loadu_si256(at.cast())), in_order(_mm256_loadu_si256(at.add(32).cast())))
        }
    }
    #[inline(always)]
    unsafe fn one(row: *const u8, column: usize) -> u8 {
        // SAFETY: the caller's.
        unsafe { *row.add(column) }
    }
}

/// Puts each eight bytes in the order of activations.
#[inline(always)]
unsafe fn in_order(q: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        _mm256_shuffle_epi8(q, _mm256_broadcastsi128_si256(order))
    }
}

/// How 32 products are summed: eight sums of four neighbours.
///
/// # Safety
/// The activations are there, and so is the instruction set.
trait Products {
    unsafe fn sums(q: __m256i, x: *const i8) -> __m256i;
}

/// Integers of seven bits at most: `vpmaddubsw` adds two products in sixteen bits, and 2 * 127 * 127 fits.
struct Narrow;

impl Products for Narrow {
    #[inline(always)]
    unsafe fn sums(q: __m256i, x: *const i8) -> __m256i {
        // SAFETY: the caller's.
        unsafe {
            let pairs = _mm256_maddubs_epi16(q, _mm256_loadu_si256(x.cast()));
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        }
    }
}

/// Integers of eight bits: their even and odd columns apart, so that no sum of two leaves its sixteen bits.
struct Wide;

impl Products for Wide {
    #[inline(always)]
    unsafe fn sums(q: __m256i, x: *const i8) -> __m256i {
        // SAFETY: the caller's.
        unsafe {
            let x = _mm256_loadu_si256(x.cast());
            let even = _mm256_and_si256(q, _mm256_set1_epi16(0xff));
            let x_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x));
            let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(q), _mm256_srai_epi16::<8>(x));
            _mm256_add_epi32(_mm256_madd_epi16(even, x_even), odd)
        }
    }
}

/// A row's integers, scales and biases.
#[derive(Clone, Copy)]
struct Row<'a> {
    q: *const u8,
    /// [weight groups]
    s: &'a [f32],
    b: &'a [f32],
}

/// A token's activations and scales.
#[derive(Clone, Copy)]
struct Token<'a> {
    q: *const i8,
    scales: TokenScales<'a>,
}

/// Lane l is the sum of all lanes of `v[l]`.
#[inline(always)]
unsafe fn four_sums(v: [__m256i; 4]) -> __m128i {
    // SAFETY: the caller's.
    unsafe {
        let halves = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
        _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves))
    }
}

/// Fetches what lies [`AHEAD`] of these columns, where rows are read from the matrix itself.
#[inline(always)]
unsafe fn fetch<S: Source>(row: Row, column: usize, columns: usize) {
    if S::IS_PACKED {
        for line in 0..S::bytes(columns).div_ceil(64) {
            let at = row.q.wrapping_add(S::bytes(column) + 64 * line + AHEAD);
            // SAFETY: any address may be fetched; the caller vouches for the instruction set.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
        }
    }
}

/// The accumulators of T tokens after all turns of a row whose weight groups have PARTS activation groups each.
///
/// # Safety
/// The row and the tokens have the same columns, and the instruction set is there.
// Loops over arrays of constant length instead of closures, which may not be inlined.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn turns<S: Source, M: Products, const PARTS: usize, const T: usize>(
    row: Row,
    tokens: &[Token; T],
) -> [__m128; T] {
    // SAFETY: the caller's.
    unsafe {
        let groups = row.s.len();
        let mut acc = [_mm_setzero_ps(); T];
        for g in (0..groups / 4 * 4).step_by(4) {
            let column = g * PARTS * GROUP;
            fetch::<S>(row, column, 4 * PARTS * GROUP);
            // Part i of group l is register l * PARTS + i.
            let mut w = [_mm256_setzero_si256(); REGISTERS];
            for pair in 0..2 * PARTS {
                (w[2 * pair], w[2 * pair + 1]) = S::load(row.q, column + 2 * GROUP * pair);
            }
            let (s, b) = (_mm_loadu_ps(row.s.as_ptr().add(g)), _mm_loadu_ps(row.b.as_ptr().add(g)));
            for t in 0..T {
                let (x, scales) = (tokens[t].q.add(column), tokens[t].scales);
                let mut sum = _mm_setzero_ps();
                for i in 0..PARTS {
                    let mut v = [_mm256_setzero_si256(); 4];
                    for l in 0..4 {
                        v[l] = M::sums(w[l * PARTS + i], x.add((l * PARTS + i) * GROUP));
                    }
                    let part = _mm_cvtepi32_ps(four_sums(v));
                    let sx = _mm_loadu_ps(scales.sx.as_ptr().add(i * groups + g));
                    sum = if i == 0 { _mm_mul_ps(sx, part) } else { _mm_fmadd_ps(sx, part, sum) };
                }
                acc[t] = _mm_fmadd_ps(s, sum, acc[t]);
                acc[t] = _mm_fmadd_ps(b, _mm_loadu_ps(scales.mx.as_ptr().add(g)), acc[t]);
            }
        }
        acc
    }
}

/// The same for weight groups of 16 columns, eight at a time: two turns.
///
/// # Safety
/// As above.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn turns_of_halves<S: Source, M: Products, const T: usize>(row: Row, tokens: &[Token; T]) -> [__m128; T] {
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [_mm_setzero_ps(); T];
        for g in (0..row.s.len() / 8 * 8).step_by(8) {
            let column = g * GROUP / 2;
            fetch::<S>(row, column, 4 * GROUP);
            let (first, second) = (S::load(row.q, column), S::load(row.q, column + 2 * GROUP));
            let w = [first.0, first.1, second.0, second.1];
            let (s, b) = (row.s.as_ptr().add(g), row.b.as_ptr().add(g));
            for t in 0..T {
                let (x, scales) = (tokens[t].q.add(column), tokens[t].scales);
                let mut v = [_mm256_setzero_si256(); 4];
                for l in 0..4 {
                    v[l] = M::sums(w[l], x.add(l * GROUP));
                }
                // The groups with even numbers in one half, those with odd ones in the other.
                let halves = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
                let (even, odd) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
                let sums = [_mm_unpacklo_epi32(even, odd), _mm_unpackhi_epi32(even, odd)];
                for turn in 0..2 {
                    let (sx, mx) = (scales.sx.as_ptr().add(g + 4 * turn), scales.mx.as_ptr().add(g + 4 * turn));
                    let sum = _mm_mul_ps(_mm_loadu_ps(sx), _mm_cvtepi32_ps(sums[turn]));
                    acc[t] = _mm_fmadd_ps(_mm_loadu_ps(s.add(4 * turn)), sum, acc[t]);
                    acc[t] = _mm_fmadd_ps(_mm_loadu_ps(b.add(4 * turn)), _mm_loadu_ps(mx), acc[t]);
                }
            }
        }
        acc
    }
}

/// The dot products of a row with T tokens: first all turns, then the groups that make none.
///
/// # Safety
/// As for [`turns`].
#[inline(always)]
unsafe fn dots<S: Source, M: Products, const PARTS: usize, const T: usize>(row: Row, tokens: &[Token; T]) -> [f32; T] {
    let (groups, columns) = (row.s.len(), if PARTS == 0 { GROUP / 2 } else { GROUP });
    // SAFETY: the caller's.
    unsafe {
        let (acc, whole) = if PARTS == 0 {
            (turns_of_halves::<S, M, T>(row, tokens), groups / 8 * 8)
        } else {
            (turns::<S, M, PARTS, T>(row, tokens), groups / 4 * 4)
        };
        let mut out = [0f32; T];
        for t in 0..T {
            let mut lanes = [0f32; 4];
            _mm_storeu_ps(lanes.as_mut_ptr(), acc[t]);
            for g in whole..groups {
                let sum = |part: usize| sum_of::<S>(row.q, tokens[t].q, part * columns, columns);
                add_group(&mut lanes[g % 4], g, row.s, row.b, tokens[t].scales, sum);
            }
            out[t] = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
        }
        out
    }
}

/// The sum of the products of `n` columns, a multiple of eight, one after the other.
///
/// # Safety
/// The columns are there.
unsafe fn sum_of<S: Source>(row: *const u8, x: *const i8, column: usize, n: usize) -> i32 {
    let mut sum = 0;
    for eight in (column..column + n).step_by(8) {
        for (i, place) in ORDER.into_iter().enumerate() {
            // SAFETY: the caller's.
            sum += unsafe { i32::from(S::one(row, eight + place)) * i32::from(*x.add(eight + i)) };
        }
    }
    sum
}

/// The product of all rows with all tokens, at most [`FEW`].
///
/// # Safety
/// As for [`product`].
#[inline(always)]
unsafe fn rows<S: Source, M: Products, const PARTS: usize>(
    w: &Matrix,
    x: Groups,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let format = w.grouped();
    let groups = w.cols / format.group;
    debug_assert!(tokens.len() <= FEW, "{} tokens", tokens.len());
    let [q, s, b, scales] = scratch.cut(sizes(w.cols, tokens.len()));
    // SAFETY: the scratch holds a row of integers with its scales and biases, and two numbers for each 16 columns of each token; the caller vouches for the rest.
    unsafe {
        let (s, b) = (s.cast::<f32>(), b.cast::<f32>());
        let each = (format.parts() + 1) * groups;
        let scales = std::slice::from_raw_parts_mut(scales.cast::<f32>(), tokens.len() * each);
        for (out, &token) in scales.chunks_exact_mut(each).zip(tokens) {
            x.write_scales(token as usize, w.cols, format, out);
        }
        let token = |i: usize| Token {
            q: x.q.as_ptr().add(tokens[i] as usize * w.cols),
            scales: TokenScales::of(&scales[i * each..][..each], groups),
        };
        for r in 0..w.rows {
            if w.format.is_unpacked() {
                for line in w.row(r).chunks(64) {
                    _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast());
                }
                unpack_columns::<Avx2x16>(w, r, (0, w.cols), q, s, b);
            } else {
                let (row_s, row_b) = w.row_scales(r);
                widen::<Avx2x16>(format.scale, row_s, s);
                widen::<Avx2x16>(format.scale, row_b, b);
                if !S::IS_PACKED {
                    unpack_lanes::<Avx2x16>(format.packing, w.row(r).as_ptr(), q, w.cols);
                }
            }
            let q = if S::IS_PACKED { w.row(r).as_ptr() } else { q.cast_const() };
            let floats = |p: *mut f32| std::slice::from_raw_parts(p.cast_const(), groups);
            let row = Row { q, s: floats(s), b: floats(b) };
            if tokens.len() == FEW {
                let four = [token(0), token(1), token(2), token(3)];
                for (t, y) in dots::<S, M, PARTS, FEW>(row, &four).into_iter().enumerate() {
                    tile[t * w.rows + r] = y;
                }
                continue;
            }
            for i in 0..tokens.len() {
                [tile[i * w.rows + r]] = dots::<S, M, PARTS, 1>(row, &[token(i)]);
            }
        }
    }
}

/// The product of all rows with all tokens.
///
/// # Safety
/// As for [`Int8Dot::product`](crate::instructions::int8_dot::Int8Dot::product).
#[inline(always)]
pub(super) unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let (format, narrow) = (w.grouped(), w.format.is_narrow());
    let is_packed = !w.format.is_unpacked();
    // SAFETY: the caller's.
    unsafe {
        match (format.group, format.packing) {
            (16, _) if narrow => of_parts::<Bytes<false>, Narrow, 0>(w, x, tokens, tile, scratch),
            (16, _) => of_parts::<Bytes<false>, Wide, 0>(w, x, tokens, tile, scratch),
            (32, PackingName::U4) if is_packed => of_parts::<Nibbles, Narrow, 1>(w, x, tokens, tile, scratch),
            (64, PackingName::U4) if is_packed => of_parts::<Nibbles, Narrow, 2>(w, x, tokens, tile, scratch),
            (128, PackingName::U4) if is_packed => of_parts::<Nibbles, Narrow, 4>(w, x, tokens, tile, scratch),
            (32, PackingName::U8) if is_packed => of_parts::<Bytes<true>, Wide, 1>(w, x, tokens, tile, scratch),
            (64, PackingName::U8) if is_packed => of_parts::<Bytes<true>, Wide, 2>(w, x, tokens, tile, scratch),
            (128, PackingName::U8) if is_packed => of_parts::<Bytes<true>, Wide, 4>(w, x, tokens, tile, scratch),
            (32, _) if narrow => of_parts::<Bytes<false>, Narrow, 1>(w, x, tokens, tile, scratch),
            (64, _) if narrow => of_parts::<Bytes<false>, Narrow, 2>(w, x, tokens, tile, scratch),
            (_, _) if narrow => of_parts::<Bytes<false>, Narrow, 4>(w, x, tokens, tile, scratch),
            (32, _) => of_parts::<Bytes<false>, Wide, 1>(w, x, tokens, tile, scratch),
            (64, _) => of_parts::<Bytes<false>, Wide, 2>(w, x, tokens, tile, scratch),
            (_, _) => of_parts::<Bytes<false>, Wide, 4>(w, x, tokens, tile, scratch),
        }
    }
}

/// [`rows`], compiled once for each source, way of summing and number of parts.
///
/// # Safety
/// As for [`product`].
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn of_parts<S: Source, M: Products, const PARTS: usize>(
    w: &Matrix,
    x: Groups,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's.
    unsafe { rows::<S, M, PARTS>(w, x, tokens, tile, scratch) }
}
