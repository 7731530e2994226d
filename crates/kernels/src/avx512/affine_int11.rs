//! Integers of 11 bits of a few tokens times affine weights: rows stream once, four at a time, straight from their packed bytes.
//!
//! As in `block_int11`, an integer is `256 high + low`, two bytes with signs. A step is four rows by four pieces: groups of 32 or 64 columns, or halves of groups of 128. A quad of a
//! register has columns of one piece, so that the sums of a row's step add up in one register, and those of four rows lie in lanes 4p + r of another.

use std::arch::x86_64::*;

use super::block_int11::{Out, split};
use super::block_rows::{halves, nibbles};
use super::four_rows::{FourRows, gather};
use super::int8_decode::{alternate, weights};
use super::scale_stream::{floats, side_by_side};
use crate::Isa;
use crate::format::packing::{Packing, with_packing};
use crate::input::Int11;
use crate::int11::GROUP;
use crate::isa::Level;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// The most tokens. Rows are unpacked anew for each four of them.
const FEW: usize = 8;

/// Columns of a step with pieces of `piece` columns.
const fn step_cols(piece: usize) -> usize {
    4 * piece
}

/// Bytes of a token's step: high and low bytes of its integers, then sixteen scales of pieces and sixteen numbers, see [`prepare`].
const fn token_step(piece: usize) -> usize {
    2 * step_cols(piece) + 128
}

const fn token_bytes(cols: usize, piece: usize) -> usize {
    cols.div_ceil(step_cols(piece)) * token_step(piece)
}

/// The tokens; scales and biases of four rows.
fn sizes(cols: usize) -> [usize; 3] {
    let (narrow, wide) = (token_bytes(cols, 32), token_bytes(cols, 64));
    let numbers = 4 * floats(cols / 32);
    [FEW * if narrow > wide { narrow } else { wide }, numbers, numbers]
}

pub fn scratch_bytes(cols: usize) -> usize {
    cut_bytes(sizes(cols))
}

/// Whether the matrix and the tokens are some for this kernel on such a machine.
pub fn takes(isa: Isa, w: &Matrix, tokens: usize) -> bool {
    matches!(isa.level(), Level::Avx512 | Level::Amx) && !w.format.is_unpacked() && tokens <= FEW
}

/// The product of all rows with all tokens.
///
/// # Safety
/// `matmul` checked the lengths, and [`takes`] the matrix, the tokens and the machine.
pub unsafe fn product(w: &Matrix, x: Int11, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let format = w.grouped();
    // SAFETY: the caller's.
    unsafe {
        with_packing!(format.packing, P => match format.group {
            32 => all_rows::<P, 32, 1>(w, x, tokens, tile, scratch),
            64 => all_rows::<P, 64, 1>(w, x, tokens, tile, scratch),
            _ => all_rows::<P, 64, 2>(w, x, tokens, tile, scratch),
        })
    }
}

/// `PIECES` of `PIECE` columns are a group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma")]
unsafe fn all_rows<P: Packing, const PIECE: usize, const PIECES: usize>(
    w: &Matrix,
    x: Int11,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let (format, row_bytes, scale_row_bytes) = (w.grouped(), w.row_bytes(), w.scale_row_bytes());
    assert!(tokens.len() <= FEW && format.group == PIECE * PIECES);
    let [prepared, s, b] = scratch.cut(sizes(w.cols));
    let (s, b) = (s.cast::<f32>(), b.cast::<f32>());
    let token_bytes = token_bytes(w.cols, PIECE);
    let streams = FourRows::new(0..w.rows, row_bytes);
    // SAFETY: the scratch holds all tokens and the scales of four rows; rows and tokens stay inside the tile.
    unsafe {
        for (i, &token) in tokens.iter().enumerate() {
            prepare::<P, PIECE>(&x, token as usize, w.cols, prepared.add(i * token_bytes));
        }
        for r in 0..streams.quarter {
            let (index, further) = (streams.index(r), streams.further(r));
            let begin = |all: &[u8], row_bytes: usize| index.map(|row| all.as_ptr().wrapping_add(row * row_bytes));
            for (all, to) in [(w.scales, s), (w.biases, b)] {
                let (rows, ahead) = (begin(all, scale_row_bytes), further * scale_row_bytes);
                side_by_side(format.scale, rows, scale_row_bytes, ahead, to);
            }
            let four = Four { rows: begin(w.data, row_bytes), ahead: further * row_bytes, cols: w.cols, s, b };
            let mut i = 0;
            while i < tokens.len() {
                // Avoids groups of one: unpacking is a third of the work for a single token.
                let n = match tokens.len() - i {
                    few @ 1..=3 => few,
                    5 | 6 => 3,
                    _ => 4,
                };
                let (some, from) = (&tokens[i..i + n], prepared.add(i * token_bytes));
                let out = Out { at: tile.as_mut_ptr().add(i * w.rows), stride: w.rows, index };
                match n {
                    1 => four_rows::<P, PIECE, PIECES, 1>(&four, from, (&x, some), &out),
                    2 => four_rows::<P, PIECE, PIECES, 2>(&four, from, (&x, some), &out),
                    3 => four_rows::<P, PIECE, PIECES, 3>(&four, from, (&x, some), &out),
                    _ => four_rows::<P, PIECE, PIECES, 4>(&four, from, (&x, some), &out),
                }
                i += n;
            }
        }
    }
}

/// Quad p of register i becomes quad i of register p.
#[inline(always)]
unsafe fn transposed([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let ((ab0, ab1), (cd0, cd1)) = (halves(a, b), halves(c, d));
        let ((first, third), (second, fourth)) = (halves(ab0, cd0), halves(ab1, cd1));
        [first, second, third, fourth]
    }
}

/// For each 32 columns the even ones, then the odd ones.
const PARTED: [u8; 64] = {
    let (mut index, mut i) = ([0; 64], 0);
    while i < 64 {
        index[i] = (i / 32 * 32 + i % 16 * 2 + i % 32 / 16) as u8;
        i += 1;
    }
    index
};

/// Lays out one token: per step its high and low bytes as [`step_weights`] has weights, then in the lanes of the sums the scale of a piece's integers, and their sum times it.
#[inline(always)]
unsafe fn prepare<P: Packing, const PIECE: usize>(x: &Int11, token: usize, cols: usize, out: *mut u8) {
    // SAFETY: the token's columns and scales are read under masks; `out` holds a token.
    unsafe {
        let n = x.n.as_ptr().add(token * cols);
        let groups = cols.div_ceil(GROUP);
        let steps = x.steps.as_ptr().add(token * groups);
        let (parted, one) = (_mm512_loadu_si512(PARTED.as_ptr().cast()), _mm512_set1_epi8(1));
        let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let registers = PIECE / 16;
        for step in 0..cols.div_ceil(step_cols(PIECE)) {
            let (out, k) = (out.add(step * token_step(PIECE)), step * step_cols(PIECE));
            let (mut high, mut low) = ([_mm512_setzero_si512(); 4], [_mm512_setzero_si512(); 4]);
            for i in 0..registers {
                let at = (k + 64 * i).min(cols);
                (high[i], low[i]) = split(n.add(at), cols - at);
                if alternate(P::BITS) {
                    high[i] = _mm512_permutexvar_epi8(parted, high[i]);
                    low[i] = _mm512_permutexvar_epi8(parted, low[i]);
                }
            }
            if PIECE == 64 {
                (high, low) = (transposed(high), transposed(low));
            } else {
                (high[0], high[1]) = halves(high[0], high[1]);
                (low[0], low[1]) = halves(low[0], low[1]);
            }
            let mut sums = _mm512_setzero_si512();
            for (i, high) in high.into_iter().take(registers).enumerate() {
                _mm512_storeu_si512(out.add(64 * i).cast(), high);
                sums = _mm512_dpbusd_epi32(sums, one, high);
            }
            sums = _mm512_slli_epi32::<8>(sums);
            for (i, low) in low.into_iter().take(registers).enumerate() {
                _mm512_storeu_si512(out.add(64 * (registers + i)).cast(), low);
                sums = _mm512_dpbusd_epi32(sums, one, low);
            }
            // A quad is a piece: all of its lanes get the sum.
            let sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32::<0b01_00_11_10>(sums));
            let sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32::<0b10_11_00_01>(sums));
            let first = step * step_cols(PIECE) / GROUP;
            let some = _mm512_maskz_loadu_ps((1 << (groups - first).min(4)) - 1, steps.add(first));
            let index = if PIECE == 64 { _mm512_srli_epi32::<2>(lane) } else { _mm512_srli_epi32::<3>(lane) };
            let scale = _mm512_permutexvar_ps(index, some);
            let to = out.add(2 * step_cols(PIECE)).cast::<f32>();
            _mm512_storeu_ps(to, scale);
            _mm512_storeu_ps(to.add(16), _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scale));
        }
    }
}

/// Four rows.
struct Four {
    rows: [*const u8; 4],
    /// Bytes from a row to the one that is prefetched meanwhile.
    ahead: usize,
    cols: usize,
    /// Scales and biases, [groups, 4 rows].
    s: *const f32,
    b: *const f32,
}

/// Four rows times T tokens, laid out from `from` on, which are `tokens` of the input.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma")]
unsafe fn four_rows<P: Packing, const PIECE: usize, const PIECES: usize, const T: usize>(
    four: &Four,
    from: *const u8,
    (x, tokens): (&Int11, &[u32]),
    out: &Out,
) {
    let token_bytes = token_bytes(four.cols, PIECE);
    let (steps, rest) = (four.cols / step_cols(PIECE), four.cols % step_cols(PIECE) / PIECE);
    // SAFETY: steps are inside the rows and tokens; the caller vouches for the output.
    unsafe {
        let mut acc = [_mm_setzero_ps(); T];
        for step in 0..steps {
            let from = from.add(step * token_step(PIECE));
            let sums = sums::<P, PIECE, T>(four, step, 4, from, token_bytes);
            for t in 0..T {
                acc[t] = fold::<PIECE, PIECES>(acc[t], four, step, sums[t], from.add(t * token_bytes), 4);
            }
        }
        if rest > 0 {
            let from = from.add(steps * token_step(PIECE));
            let sums = sums::<P, PIECE, T>(four, steps, rest, from, token_bytes);
            for t in 0..T {
                acc[t] = fold::<PIECE, PIECES>(acc[t], four, steps, sums[t], from.add(t * token_bytes), rest);
            }
        }
        for t in 0..T {
            out.store(acc[t], t, x.scales[tokens[t] as usize]);
        }
    }
}

/// Adds the `pieces` pieces of a step, whose sums are in lanes 4p + r, to four rows' accumulators, one after the other. `from`: the token's step.
#[inline(always)]
unsafe fn fold<const PIECE: usize, const PIECES: usize>(
    acc: __m128,
    four: &Four,
    step: usize,
    sums: __m512i,
    from: *const u8,
    pieces: usize,
) -> __m128 {
    // SAFETY: the caller's.
    unsafe {
        let (s, b) = (four.s.add(16 / PIECES * step), four.b.add(16 / PIECES * step));
        let scale = from.add(2 * step_cols(PIECE)).cast::<f32>();
        let numbers = scale.add(16);
        let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_loadu_ps(scale));
        let mut acc = piece::<PIECES, 0>(acc, s, b, scaled, numbers);
        if pieces > 1 {
            acc = piece::<PIECES, 1>(acc, s, b, scaled, numbers);
        }
        if pieces > 2 {
            acc = piece::<PIECES, 2>(acc, s, b, scaled, numbers);
        }
        if pieces > 3 {
            acc = piece::<PIECES, 3>(acc, s, b, scaled, numbers);
        }
        acc
    }
}

/// Adds piece N.
#[inline(always)]
unsafe fn piece<const PIECES: usize, const N: i32>(
    acc: __m128,
    s: *const f32,
    b: *const f32,
    scaled: __m512,
    numbers: *const f32,
) -> __m128 {
    let group = 4 * (N as usize / PIECES);
    // SAFETY: the caller's.
    unsafe {
        let acc = _mm_fmadd_ps(_mm_loadu_ps(s.add(group)), _mm512_extractf32x4_ps::<N>(scaled), acc);
        _mm_fmadd_ps(_mm_loadu_ps(b.add(group)), _mm_loadu_ps(numbers.add(4 * N as usize)), acc)
    }
}

/// The sums of a step, of which there are so many pieces, in lanes 4p + r.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn sums<P: Packing, const PIECE: usize, const T: usize>(
    four: &Four,
    step: usize,
    pieces: usize,
    from: *const u8,
    token_bytes: usize,
) -> [__m512i; T] {
    let (registers, step_bytes) = (PIECE / 16, step_cols(PIECE) / 8 * P::BITS);
    // SAFETY: the caller's; a prefetch does not fault.
    unsafe {
        let mut d = [[_mm512_setzero_si512(); 4]; T];
        for i in 0..4 {
            let p = four.rows[i].add(step * step_bytes);
            for line in (0..step_bytes).step_by(64) {
                _mm_prefetch::<_MM_HINT_T1>(p.wrapping_add(four.ahead + line).cast());
            }
            let w = step_weights::<P, PIECE>(p, pieces);
            for t in 0..T {
                let x = from.add(t * token_bytes);
                let mut sums = _mm512_setzero_si512();
                for k in 0..registers {
                    sums = _mm512_dpbusd_epi32(sums, w[k], _mm512_loadu_si512(x.add(64 * k).cast()));
                }
                sums = _mm512_slli_epi32::<8>(sums);
                for k in 0..registers {
                    let low = _mm512_loadu_si512(x.add(64 * (registers + k)).cast());
                    sums = _mm512_dpbusd_epi32(sums, w[k], low);
                }
                d[t][i] = sums;
            }
        }
        let mut all = [_mm512_setzero_si512(); T];
        for t in 0..T {
            all[t] = gather(d[t]);
        }
        all
    }
}

/// The integers of a row's step, in two registers or four, where quads are pieces. Reads `pieces` pieces; the others' are arbitrary.
#[inline(always)]
unsafe fn step_weights<P: Packing, const PIECE: usize>(p: *const u8, pieces: usize) -> [__m512i; 4] {
    // SAFETY: the caller's.
    unsafe {
        let zero = _mm512_setzero_si512();
        if PIECE == 32 {
            let (a, b) = weights::<P>(p, pieces);
            let (a, b) = if alternate(P::BITS) { (a, b) } else { halves(a, b) };
            return [a, b, zero, zero];
        }
        let second = p.wrapping_add(16 * P::BITS);
        if P::BITS == 4 && pieces == 4 {
            let (a, b) = halves(_mm512_loadu_si512(p.cast()), _mm512_loadu_si512(second.cast()));
            let ((a, b), (c, d)) = (nibbles(a), nibbles(b));
            return [a, b, c, d];
        }
        let (a, b) = weights::<P>(p, (2 * pieces).min(4));
        let (c, d) = weights::<P>(second, (2 * pieces).saturating_sub(4));
        if alternate(P::BITS) {
            let ((even, more_even), (odd, more_odd)) = (halves(a, c), halves(b, d));
            [even, odd, more_even, more_odd]
        } else {
            transposed([a, b, c, d])
        }
    }
}
