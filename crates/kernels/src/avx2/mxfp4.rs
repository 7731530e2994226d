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
            let rows = index.map(|r| F::row(w, r));
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

/// Two rows times T tokens from `x`.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
unsafe fn two_rows<F: Form, const T: usize>(rows: [Row; 2], cols: usize, x: *const u8, out: &Out) {
    let token_bytes = cols.div_ceil(PIECE) * TOKEN_PIECE;
    // SAFETY: pieces are inside the rows and tokens; the caller vouches for the output.
    unsafe {
        let mut acc = [_mm256_setzero_ps(); T];
        for piece in 0..cols / PIECE {
            let at = rows.map(|row| Row {
                numbers: row.numbers.add(piece * GROUPS * F::NUMBERS),
                exponents: row.exponents.add(piece * GROUPS * F::EXPONENTS),
            });
            let (weights, s) = (at.map(|row| weights::<F>(row.numbers)), scales::<F>(at));
            let b = _mm256_mul_ps(s, _mm256_set1_ps(-12.0));
            for (t, acc) in acc.iter_mut().enumerate() {
                let (scaled, mx) = products(&weights, x.add(t * token_bytes + piece * TOKEN_PIECE));
                *acc = _mm256_fmadd_ps(s, scaled, *acc);
                *acc = _mm256_fmadd_ps(b, mx, *acc);
            }
        }
        let rest = cols % PIECE / GROUP;
        if rest > 0 {
            // Copies of the groups that are there, so that nothing is read beyond them. The accumulators of the others stay as they are.
            let piece = cols / PIECE;
            let mut copies = [([0u8; 17 * GROUPS], [0u8; 17 * GROUPS]); 2];
            for (row, (numbers, exponents)) in rows.into_iter().zip(&mut copies) {
                for g in 0..rest {
                    let from = row.numbers.add((piece * GROUPS + g) * F::NUMBERS);
                    std::ptr::copy_nonoverlapping(from, numbers.as_mut_ptr().add(g * F::NUMBERS), 16);
                    exponents[g * F::EXPONENTS] = *row.exponents.add((piece * GROUPS + g) * F::EXPONENTS);
                }
            }
            let at = [0, 1].map(|i| Row { numbers: copies[i].0.as_ptr(), exponents: copies[i].1.as_ptr() });
            let (weights, s) = (at.map(|row| weights::<F>(row.numbers)), scales::<F>(at));
            let b = _mm256_mul_ps(s, _mm256_set1_ps(-12.0));
            let groups = _mm256_loadu_si256(LANES.as_ptr().cast());
            let there = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(rest as i32), groups));
            for (t, acc) in acc.iter_mut().enumerate() {
                let (scaled, mx) = products(&weights, x.add(t * token_bytes + piece * TOKEN_PIECE));
                let more = _mm256_fmadd_ps(b, mx, _mm256_fmadd_ps(s, scaled, *acc));
                *acc = _mm256_blendv_ps(*acc, more, there);
            }
        }
        for (t, acc) in acc.into_iter().enumerate() {
            let mut lanes = [0f32; 8];
            _mm256_storeu_ps(lanes.as_mut_ptr(), acc);
            for (i, row) in out.index.into_iter().enumerate() {
                let own = &lanes[2 * i..];
                *out.at.add(t * out.stride + row) = (own[0] + own[1]) + (own[4] + own[5]);
            }
        }
    }
}

/// The integers of a row's piece: of groups 0 and 1 the first sixteen columns and the others, then of groups 2 and 3.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn weights<F: Form>(p: *const u8) -> [__m256i; 4] {
    // SAFETY: the caller's.
    unsafe {
        let values = _mm256_broadcastsi128_si256(_mm_loadu_si128(E2M1.as_ptr().cast()));
        let (a, b) = F::nibbles(p);
        let (c, d) = F::nibbles(p.add(2 * F::NUMBERS));
        [a, b, c, d].map(|numbers| _mm256_shuffle_epi8(values, numbers))
    }
}

/// Half of each power of a piece of two rows, as the sums lie. The two least are denormal.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn scales<F: Form>(rows: [Row; 2]) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let four = |p: *const u8| {
            let byte = |g: usize| u32::from(*p.add(g * F::EXPONENTS)) << (8 * g);
            (byte(0) | byte(1) | byte(2) | byte(3)) as i32
        };
        let bytes = _mm_setr_epi32(four(rows[0].exponents), four(rows[1].exponents), 0, 0);
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

/// The sums of a piece times their `sx`, and `mx`. Products of numbers up to 24 with activations fit 16 bits, four of them too.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn products(weights: &[[__m256i; 4]; 2], x: *const u8) -> (__m256, __m256) {
    // SAFETY: the caller's.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let x_at = |i: usize| _mm256_loadu_si256(x.add(32 * i).cast());
        let q = [x_at(0), x_at(1), x_at(2), x_at(3)];
        // Each half has the sums of a group: two for a pair of groups.
        let of_row = |w: &[__m256i; 4]| {
            let two = |i: usize| {
                let fours = _mm256_add_epi16(_mm256_maddubs_epi16(w[i], q[i]), _mm256_maddubs_epi16(w[i + 1], q[i + 1]));
                _mm256_madd_epi16(fours, ones)
            };
            _mm256_hadd_epi32(two(0), two(2))
        };
        let sums = _mm256_hadd_epi32(of_row(&weights[0]), of_row(&weights[1]));
        let sx = _mm256_loadu_ps(x.add(PIECE).cast());
        (_mm256_mul_ps(sx, _mm256_cvtepi32_ps(sums)), _mm256_loadu_ps(x.add(PIECE + 32).cast()))
    }
}
