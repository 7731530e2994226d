//! A few tokens times MXFP4, from a GGUF file's blocks or from safetensors' two planes: rows stream once, and integers never leave registers.
//!
//! A piece is 128 columns of two rows. Its products are summed so that a register has all eight sums, in the order of [`LANES`], and each float operation of the
//! definition handles eight.

use std::arch::x86_64::*;

use crate::format::blocks::unpack::E2M1;
use crate::format::{BlockFormat, E2m1, WeightFormat};
use crate::input::{GROUP, ORDER};
use crate::instructions::int8_dot::Groups;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// With more tokens, rows that are unpacked once are quicker.
pub(super) const FEW: usize = 4;
/// Columns of a piece, and its groups.
const PIECE: usize = 128;
const GROUPS: usize = PIECE / GROUP;
/// The group of each sum; the rows are 0, 0, 1, 1, 0, 0, 1, 1.
const LANES: [i32; 8] = [0, 2, 0, 2, 1, 3, 1, 3];
/// Bytes of a token's piece: its activations, then eight `sx` and eight `mx` as the sums have them.
const TOKEN_PIECE: usize = PIECE + 64;

fn sizes(cols: usize, tokens: usize) -> [usize; 1] {
    [cols.div_ceil(PIECE) * TOKEN_PIECE * tokens.min(FEW)]
}

pub(super) fn scratch_bytes(cols: usize, tokens: usize) -> usize {
    cut_bytes(sizes(cols, tokens))
}

/// Where a form of MXFP4 has its numbers and exponents.
///
/// # Safety (of all)
/// The bytes are there, and so is AVX2.
trait Form {
    /// Bytes from the numbers of a group to those of the next, and the same of exponents.
    const NUMBERS: usize;
    const EXPONENTS: usize;
    /// Exponent 255 is no number.
    const HAS_NAN: bool;
    unsafe fn row(w: &Matrix, r: usize) -> Row;
    /// The numbers of two groups, each in a half of both: their first sixteen columns, and the others, in the order of activations.
    unsafe fn nibbles(p: *const u8) -> (__m256i, __m256i);
}

/// The first bytes of a row.
#[derive(Clone, Copy)]
struct Row {
    numbers: *const u8,
    exponents: *const u8,
}

/// The lower and the higher half of each byte.
#[inline(always)]
unsafe fn halves_of_bytes(bytes: __m256i) -> (__m256i, __m256i) {
    // SAFETY: the caller's.
    unsafe {
        let low = _mm256_set1_epi8(15);
        (_mm256_and_si256(bytes, low), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low))
    }
}

/// Blocks of 17 bytes: an exponent, then sixteen columns in lower halves of bytes and sixteen in higher ones.
struct Blocks;

impl Form for Blocks {
    const NUMBERS: usize = 17;
    const EXPONENTS: usize = 17;
    const HAS_NAN: bool = false;

    #[inline(always)]
    unsafe fn row(w: &Matrix, r: usize) -> Row {
        let exponents = w.row(r).as_ptr();
        Row { numbers: exponents.wrapping_add(1), exponents }
    }

    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> (__m256i, __m256i) {
        const EIGHTS: [u8; 16] = {
            let (mut index, mut i) = ([0; 16], 0);
            while i < 16 {
                index[i] = (i / 8 * 8 + ORDER[i % 8]) as u8;
                i += 1;
            }
            index
        };
        // SAFETY: the caller's.
        unsafe {
            let bytes = _mm256_set_m128i(_mm_loadu_si128(p.add(17).cast()), _mm_loadu_si128(p.cast()));
            let eights = _mm256_broadcastsi128_si256(_mm_loadu_si128(EIGHTS.as_ptr().cast()));
            halves_of_bytes(_mm256_shuffle_epi8(bytes, eights))
        }
    }
}

/// Numbers in one plane, two neighbours in a byte; exponents in the other.
struct Planes;

impl Form for Planes {
    const NUMBERS: usize = 16;
    const EXPONENTS: usize = 1;
    const HAS_NAN: bool = true;

    #[inline(always)]
    unsafe fn row(w: &Matrix, r: usize) -> Row {
        Row { numbers: w.row(r).as_ptr(), exponents: w.row_scales(r).0.as_ptr() }
    }

    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> (__m256i, __m256i) {
        // SAFETY: the caller's.
        unsafe {
            // Four even columns, then the four odd ones: the order of activations.
            let (even, odd) = halves_of_bytes(_mm256_loadu_si256(p.cast()));
            (_mm256_unpacklo_epi32(even, odd), _mm256_unpackhi_epi32(even, odd))
        }
    }
}

/// Whether [`product`] takes matrices of a format.
pub(super) fn takes(format: WeightFormat) -> bool {
    matches!(format, WeightFormat::Blocks(BlockFormat::Mxfp4) | WeightFormat::E2m1(E2m1::Power))
}

/// # Safety
/// `matmul` checked the lengths, the format [is taken](takes), there are at most `FEW` tokens, and AVX2 is there.
#[inline(always)]
pub(super) unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe {
        match w.format {
            WeightFormat::Blocks(_) => all_rows::<Blocks>(w, x, tokens, tile, scratch),
            _ => all_rows::<Planes>(w, x, tokens, tile, scratch),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn all_rows<F: Form>(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let [prepared] = scratch.cut(sizes(w.cols, tokens.len()));
    let token_bytes = w.cols.div_ceil(PIECE) * TOKEN_PIECE;
    let half = w.rows.div_ceil(2);
    // SAFETY: the scratch holds all tokens; rows and tokens stay inside the tile.
    unsafe {
        for (i, &token) in tokens.iter().enumerate() {
            prepare(&x, token as usize, w.cols, prepared.add(i * token_bytes));
        }
        // Two streams, of each half of the rows. If they are odd, the last is computed twice.
        for r in 0..half {
            let index = [r, (half + r).min(w.rows - 1)];
            let rows = [F::row(w, index[0]), F::row(w, index[1])];
            let out = Out { at: tile.as_mut_ptr(), stride: w.rows, index };
            match tokens.len() {
                1 => two_rows::<F, 1>(rows, w.cols, prepared, &out),
                2 => two_rows::<F, 2>(rows, w.cols, prepared, &out),
                3 => two_rows::<F, 3>(rows, w.cols, prepared, &out),
                _ => two_rows::<F, 4>(rows, w.cols, prepared, &out),
            }
        }
    }
}

/// Where two rows' products go.
struct Out {
    /// [tokens, rows]
    at: *mut f32,
    stride: usize,
    index: [usize; 2],
}

/// Lays out one token: per piece its activations as [`Form::nibbles`] has weights, and its scales as the sums lie. Groups that are not there are zeros.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
unsafe fn prepare(x: &Groups, token: usize, cols: usize, out: *mut u8) {
    let groups = cols / GROUP;
    let q = &x.q[token * cols..][..cols];
    let (sx, mx) = (&x.scales[token * groups..][..groups], &x.sums[token * groups..][..groups]);
    for piece in 0..cols.div_ceil(PIECE) {
        // SAFETY: `out` holds a token.
        let out = unsafe { std::slice::from_raw_parts_mut(out.add(piece * TOKEN_PIECE), TOKEN_PIECE) };
        let (to, scales) = out.split_at_mut(PIECE);
        // Sixteen columns: of two groups the first sixteen, then the others.
        for (i, to) in to.chunks_exact_mut(16).enumerate() {
            let from = piece * PIECE + 64 * (i / 4) + [0, 32, 16, 48][i % 4];
            match q.get(from..from + 16) {
                Some(q) => to.iter_mut().zip(q).for_each(|(to, q)| *to = *q as u8),
                None => to.fill(0),
            }
        }
        for (values, to) in [sx, mx].into_iter().zip(scales.chunks_exact_mut(32)) {
            for (lane, to) in LANES.into_iter().zip(to.chunks_exact_mut(4)) {
                let value = values.get(piece * GROUPS + lane as usize).copied().unwrap_or(0.0);
                to.copy_from_slice(&value.to_ne_bytes());
            }
        }
    }
}

/// Two rows times T tokens from `x`. No closures and no iterators: where they are not inlined, registers go through memory.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
unsafe fn two_rows<F: Form, const T: usize>(rows: [Row; 2], cols: usize, x: *const u8, out: &Out) {
    let token_bytes = cols.div_ceil(PIECE) * TOKEN_PIECE;
    // SAFETY: pieces are inside the rows and tokens; the caller vouches for the output.
    unsafe {
        let mut acc = [_mm256_setzero_ps(); T];
        let (mut a, mut b) = (rows[0], rows[1]);
        let mut x = x;
        for _ in 0..cols / PIECE {
            let (of_a, of_b, s) = (weights::<F>(a.numbers), weights::<F>(b.numbers), scales::<F>(&a, &b));
            let bias = _mm256_mul_ps(s, _mm256_set1_ps(-12.0));
            for t in 0..T {
                let x = x.add(t * token_bytes);
                acc[t] = _mm256_fmadd_ps(s, scaled_sums(of_a, of_b, x), acc[t]);
                acc[t] = _mm256_fmadd_ps(bias, _mm256_loadu_ps(x.add(PIECE + 32).cast()), acc[t]);
            }
            (a, b, x) = (a.next::<F>(), b.next::<F>(), x.add(TOKEN_PIECE));
        }
        let rest = cols % PIECE / GROUP;
        if rest > 0 {
            // Copies of the groups that are there, so that nothing is read beyond them. The accumulators of the others stay as they are.
            let mut copies = [([0u8; 17 * GROUPS], [0u8; 17 * GROUPS]); 2];
            a.copy::<F>(rest, &mut copies[0]);
            b.copy::<F>(rest, &mut copies[1]);
            let a = Row { numbers: copies[0].0.as_ptr(), exponents: copies[0].1.as_ptr() };
            let b = Row { numbers: copies[1].0.as_ptr(), exponents: copies[1].1.as_ptr() };
            let (of_a, of_b, s) = (weights::<F>(a.numbers), weights::<F>(b.numbers), scales::<F>(&a, &b));
            let bias = _mm256_mul_ps(s, _mm256_set1_ps(-12.0));
            let groups = _mm256_loadu_si256(LANES.as_ptr().cast());
            let there = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(rest as i32), groups));
            for t in 0..T {
                let x = x.add(t * token_bytes);
                let more = _mm256_fmadd_ps(s, scaled_sums(of_a, of_b, x), acc[t]);
                let more = _mm256_fmadd_ps(bias, _mm256_loadu_ps(x.add(PIECE + 32).cast()), more);
                acc[t] = _mm256_blendv_ps(acc[t], more, there);
            }
        }
        for t in 0..T {
            let mut lanes = [0f32; 8];
            _mm256_storeu_ps(lanes.as_mut_ptr(), acc[t]);
            for i in 0..2 {
                let to = out.at.add(t * out.stride + out.index[i]);
                *to = (lanes[2 * i] + lanes[2 * i + 1]) + (lanes[2 * i + 4] + lanes[2 * i + 5]);
            }
        }
    }
}

impl Row {
    /// One piece further.
    #[inline(always)]
    fn next<F: Form>(self) -> Row {
        Row {
            numbers: self.numbers.wrapping_add(GROUPS * F::NUMBERS),
            exponents: self.exponents.wrapping_add(GROUPS * F::EXPONENTS),
        }
    }

    /// Copies the first `groups` groups: numbers, and exponents.
    ///
    /// # Safety
    /// They are there.
    unsafe fn copy<F: Form>(self, groups: usize, (numbers, exponents): &mut ([u8; 17 * GROUPS], [u8; 17 * GROUPS])) {
        for g in 0..groups {
            let to = &mut numbers[g * F::NUMBERS..][..16];
            // SAFETY: the caller's.
            unsafe {
                std::ptr::copy_nonoverlapping(self.numbers.add(g * F::NUMBERS), to.as_mut_ptr(), 16);
                exponents[g * F::EXPONENTS] = *self.exponents.add(g * F::EXPONENTS);
            }
        }
    }
}

/// The integers of a row's piece: of groups 0 and 1 the first sixteen columns and the others, then of groups 2 and 3.
#[inline(always)]
unsafe fn weights<F: Form>(p: *const u8) -> [__m256i; 4] {
    // SAFETY: the caller's.
    unsafe {
        let values = _mm256_broadcastsi128_si256(_mm_loadu_si128(E2M1.as_ptr().cast()));
        let (first, second) = F::nibbles(p);
        let (third, fourth) = F::nibbles(p.add(2 * F::NUMBERS));
        [
            _mm256_shuffle_epi8(values, first),
            _mm256_shuffle_epi8(values, second),
            _mm256_shuffle_epi8(values, third),
            _mm256_shuffle_epi8(values, fourth),
        ]
    }
}

/// The exponents of a piece, a byte each.
#[inline(always)]
unsafe fn exponents<F: Form>(p: *const u8) -> i32 {
    // SAFETY: the caller's.
    unsafe {
        if F::EXPONENTS == 1 {
            return p.cast::<i32>().read_unaligned();
        }
        i32::from_le_bytes([*p, *p.add(F::EXPONENTS), *p.add(2 * F::EXPONENTS), *p.add(3 * F::EXPONENTS)])
    }
}

/// Half of each power of a piece of two rows, as the sums lie. The two least are denormal.
#[inline(always)]
unsafe fn scales<F: Form>(a: &Row, b: &Row) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let bytes = _mm_setr_epi32(exponents::<F>(a.exponents), exponents::<F>(b.exponents), 0, 0);
        // Groups 0 and 2 of both, then groups 1 and 3.
        let order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, -1, -1, -1, -1, -1, -1, -1, -1);
        let exponent = _mm256_cvtepu8_epi32(_mm_shuffle_epi8(bytes, order));
        let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(exponent, _mm256_set1_epi32(1)));
        let denormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), exponent);
        let least = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), exponent);
        let mut bits = _mm256_blendv_epi8(normal, denormal, least);
        if F::HAS_NAN {
            let none = _mm256_cmpeq_epi32(exponent, _mm256_set1_epi32(255));
            bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc0_0000), none);
        }
        _mm256_castsi256_ps(bits)
    }
}

/// Two sums for each group of a row: each half of a register has those of one group of a pair, and then of the other pair. Products of numbers up to 24 with activations fit 16
/// bits, four of them too.
#[inline(always)]
unsafe fn sums_of_row(w: [__m256i; 4], x: *const u8) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let x: *const __m256i = x.cast();
        let first = _mm256_add_epi16(
            _mm256_maddubs_epi16(w[0], _mm256_loadu_si256(x)),
            _mm256_maddubs_epi16(w[1], _mm256_loadu_si256(x.add(1))),
        );
        let second = _mm256_add_epi16(
            _mm256_maddubs_epi16(w[2], _mm256_loadu_si256(x.add(2))),
            _mm256_maddubs_epi16(w[3], _mm256_loadu_si256(x.add(3))),
        );
        let ones = _mm256_set1_epi16(1);
        _mm256_hadd_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones))
    }
}

/// The sums of a piece of two rows, times their `sx`.
#[inline(always)]
unsafe fn scaled_sums(a: [__m256i; 4], b: [__m256i; 4], x: *const u8) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let sums = _mm256_hadd_epi32(sums_of_row(a, x), sums_of_row(b, x));
        _mm256_mul_ps(_mm256_loadu_ps(x.add(PIECE).cast()), _mm256_cvtepi32_ps(sums))
    }
}
