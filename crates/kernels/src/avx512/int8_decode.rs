//! Integer groups with AVX-512 VNNI, for a few tokens: rows stream once, four at a time, straight from their packed bytes.
//!
//! A step is four rows by four weight groups: PARTS pieces of 128 columns. The sixteen integer sums of a piece are gathered in one register, lane 4g + r
//! for activation group g and row r. The pieces' quads are then exchanged, so that lane 4w + r of register i has part i of weight group w, and
//! each float operation of the definition handles all sixteen. Quad w of the accumulator is accumulator w of the definition. Before the rows,
//! each token is arranged in the order of the unpackers, with its scales spread to the same lanes.

use std::arch::x86_64::*;
use std::ops::Range;

use super::four_rows::{self, FourRows, NATURAL, store};
use super::scale_stream::ScaleStream;
use super::spread::{first_bytes, spread};
use crate::format::packing::{Packing, with_packing, with_parts};
use crate::instructions::int8_dot::Groups;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// The most tokens for which the packed rows stream at the speed of memory. With more, registers of sixteen rows are faster, which need no sum over their lanes.
pub(super) const FEW: usize = 12;
/// Columns of a piece.
const PIECE: usize = 128;

/// Bytes of a token's step: its activations, then sixteen `sx` for each part, then sixteen `mx`.
const fn token_step(parts: usize) -> usize {
    parts * (PIECE + 64) + 64
}

fn token_bytes(cols: usize, parts: usize) -> usize {
    cols.div_ceil(PIECE * parts) * token_step(parts)
}

fn sizes(cols: usize, tokens: usize) -> [usize; 1] {
    let most = token_bytes(cols, 1).max(token_bytes(cols, 2)).max(token_bytes(cols, 4));
    [most * tokens.min(FEW)]
}

pub(super) fn scratch_bytes(cols: usize, tokens: usize) -> usize {
    cut_bytes(sizes(cols, tokens))
}

/// Whether a width unpacks into even columns of a piece in one register and odd columns in the other. The other widths unpack in natural order.
pub(super) const fn alternate(bits: usize) -> bool {
    bits <= 4
}

/// # Safety
/// `matmul` checked the lengths, there are at most `FEW` tokens, and the instruction set is there.
#[inline(always)]
pub(super) unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let format = w.grouped();
    // SAFETY: the caller's.
    unsafe {
        with_packing!(format.packing, P => with_parts!(format, PARTS, _COLUMNS => {
            all_rows::<P, PARTS>(w, x, tokens, tile, scratch)
        }))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn all_rows<P: Packing, const PARTS: usize>(
    w: &Matrix,
    x: Groups,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let [prepared] = scratch.cut(sizes(w.cols, tokens.len()));
    let token_bytes = token_bytes(w.cols, PARTS);
    // SAFETY: the scratch holds all tokens; rows and tokens stay inside the tile.
    unsafe {
        for (i, &token) in tokens.iter().enumerate() {
            prepare::<P, PARTS>(&x, token as usize, w.cols, prepared.add(i * token_bytes));
        }
        // All rows with up to four tokens; with more, some rows stay in the first-level cache for the next tokens.
        let block = if tokens.len() <= 4 { w.rows } else { 16 };
        for r in (0..w.rows).step_by(block) {
            let all = r..(r + block).min(w.rows);
            let mut i = 0;
            while i < tokens.len() {
                let x = prepared.add(i * token_bytes);
                let out = tile.as_mut_ptr().add(i * w.rows);
                // Avoids groups of one: unpacking is half of the work for a single token.
                let n = match tokens.len() - i {
                    few @ 1..=3 => few,
                    5 | 6 => 3,
                    _ => 4,
                };
                match n {
                    1 => rows::<P, PARTS, 1>(w, all.clone(), x, out),
                    2 => rows::<P, PARTS, 2>(w, all.clone(), x, out),
                    3 => rows::<P, PARTS, 3>(w, all.clone(), x, out),
                    _ => rows::<P, PARTS, 4>(w, all.clone(), x, out),
                }
                i += n;
            }
        }
    }
}

/// Lays out one token: per step its activations in the unpacker's order and its scales in the lanes of the accumulator.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn prepare<P: Packing, const PARTS: usize>(x: &Groups, token: usize, cols: usize, out: *mut u8) {
    let (groups, step_cols) = (cols / 32, PIECE * PARTS);
    // SAFETY: the token's columns and groups are read under masks; `out` holds a token.
    unsafe {
        let q = x.q.as_ptr().add(token * cols).cast::<u8>();
        let (sx, mx) = (x.scales.as_ptr().add(token * groups), x.sums.as_ptr().add(token * groups));
        let natural = _mm512_loadu_si512(NATURAL.as_ptr().cast());
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        // Part 0 of the weight group that a lane serves.
        let part = _mm512_mullo_epi32(_mm512_srli_epi32::<2>(lane), _mm512_set1_epi32(PARTS as i32));
        for step in 0..cols.div_ceil(step_cols) {
            let out = out.add(step * token_step(PARTS));
            for piece in 0..PARTS {
                let k = (step * step_cols + piece * PIECE).min(cols);
                let half = (k + 64).min(cols);
                let (a, b) = (first_bytes(q.add(k), cols - k), first_bytes(q.add(half), cols - half));
                let (first, second) = if alternate(P::BITS) {
                    (_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b))
                } else {
                    (_mm512_shuffle_epi8(a, natural), _mm512_shuffle_epi8(b, natural))
                };
                _mm512_storeu_si512(out.add(piece * PIECE).cast(), first);
                _mm512_storeu_si512(out.add(piece * PIECE + 64).cast(), second);
            }
            let out = out.add(PARTS * PIECE).cast::<f32>();
            let first = step * 4 * PARTS;
            let mask = ((1u32 << (groups - first).min(4 * PARTS)) - 1) as u16;
            let (sx, mx) = (_mm512_maskz_loadu_ps(mask, sx.add(first)), _mm512_maskz_loadu_ps(mask, mx.add(first)));
            let mut sum = _mm512_permutexvar_ps(part, mx);
            for i in 0..PARTS {
                let index = _mm512_add_epi32(part, _mm512_set1_epi32(i as i32));
                _mm512_storeu_ps(out.add(16 * i), _mm512_permutexvar_ps(index, sx));
                if i > 0 {
                    sum = _mm512_add_ps(sum, _mm512_permutexvar_ps(index, mx));
                }
            }
            _mm512_storeu_ps(out.add(16 * PARTS), sum);
        }
    }
}

/// The rows of `all`, four at a time, times T tokens from `x`: `out[t * w.rows + row]`.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn rows<P: Packing, const PARTS: usize, const T: usize>(
    w: &Matrix,
    all: Range<usize>,
    x: *const u8,
    out: *mut f32,
) {
    let (row_bytes, step_cols) = (w.cols / 8 * P::BITS, PIECE * PARTS);
    let (step_bytes, steps) = (step_cols / 8 * P::BITS, w.cols / step_cols);
    let token_bytes = token_bytes(w.cols, PARTS);
    let rest = (w.cols - steps * step_cols) / (32 * PARTS);
    let streams = FourRows::new(all, row_bytes);
    let mut scales = ScaleStream::new(w);
    for r in 0..streams.quarter {
        let (index, further) = (streams.index(r), streams.further(r));
        let ahead = further * row_bytes;
        // SAFETY: rows are inside the matrix, steps inside the rows and the token.
        unsafe {
            let p = index.map(|row| w.data.as_ptr().add(row * row_bytes));
            scales.start(w, index, further);
            let mut acc = [_mm512_setzero_ps(); T];
            for step in 0..steps {
                let (s, b) = scales.next(step);
                let mut sums = [[_mm512_setzero_si512(); PARTS]; T];
                for piece in 0..PARTS {
                    let mut d = [[_mm512_setzero_si512(); 4]; T];
                    for i in 0..4 {
                        let at = p[i].add(step * step_bytes + piece * PIECE / 8 * P::BITS);
                        _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(ahead).cast());
                        if P::BITS > 4 {
                            _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(ahead + 64).cast());
                        }
                        let (first, second) = weights::<P>(at, 4);
                        for t in 0..T {
                            let x = x.add(t * token_bytes + step * token_step(PARTS) + piece * PIECE);
                            dots::<P>(&mut d[t], i, first, second, x);
                        }
                    }
                    for t in 0..T {
                        sums[t][piece] = gather::<P>(d[t]);
                    }
                }
                for t in 0..T {
                    let x = x.add(t * token_bytes + step * token_step(PARTS) + PARTS * PIECE).cast::<f32>();
                    acc[t] = _mm512_fmadd_ps(s, scaled(parts(sums[t]), x), acc[t]);
                    acc[t] = _mm512_fmadd_ps(b, _mm512_loadu_ps(x.add(16 * PARTS)), acc[t]);
                }
            }
            if rest > 0 {
                // The last one to three weight groups: lanes of groups that are not there keep their sums.
                let there = (1u16 << (4 * rest)) - 1;
                let (s, b) = scales.next(steps);
                for t in 0..T {
                    let x = x.add(t * token_bytes + steps * token_step(PARTS));
                    let mut sums = [_mm512_setzero_si512(); PARTS];
                    for piece in 0..PARTS {
                        let groups = (rest * PARTS).saturating_sub(4 * piece).min(4);
                        if groups > 0 {
                            let mut d = [_mm512_setzero_si512(); 4];
                            for i in 0..4 {
                                let at = p[i].add(steps * step_bytes + piece * PIECE / 8 * P::BITS);
                                let (first, second) = weights::<P>(at, groups);
                                dots::<P>(&mut d, i, first, second, x.add(piece * PIECE));
                            }
                            sums[piece] = gather::<P>(d);
                        }
                    }
                    let x = x.add(PARTS * PIECE).cast::<f32>();
                    acc[t] = _mm512_mask3_fmadd_ps(s, scaled(parts(sums), x), acc[t], there);
                    acc[t] = _mm512_mask3_fmadd_ps(b, _mm512_loadu_ps(x.add(16 * PARTS)), acc[t], there);
                }
            }
            for t in 0..T {
                store(acc[t], out.add(t * w.rows), index);
            }
        }
    }
}

/// From the sums of each piece's four activation groups (lane 4g + r) to part i of four weight groups (lane 4w + r) in register i.
#[inline(always)]
unsafe fn parts<const PARTS: usize>(d: [__m512i; PARTS]) -> [__m512i; PARTS] {
    const LOW: i32 = 0b10_00_10_00;
    const HIGH: i32 = 0b11_01_11_01;
    let mut out = d;
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        if PARTS == 2 {
            out[0] = _mm512_shuffle_i32x4::<LOW>(d[0], d[1]);
            out[1] = _mm512_shuffle_i32x4::<HIGH>(d[0], d[1]);
        } else if PARTS == 4 {
            // A transposition of quads.
            let (ab, cd) = (_mm512_shuffle_i32x4::<LOW>(d[0], d[1]), _mm512_shuffle_i32x4::<LOW>(d[2], d[3]));
            out[0] = _mm512_shuffle_i32x4::<LOW>(ab, cd);
            out[2] = _mm512_shuffle_i32x4::<HIGH>(ab, cd);
            let (ab, cd) = (_mm512_shuffle_i32x4::<HIGH>(d[0], d[1]), _mm512_shuffle_i32x4::<HIGH>(d[2], d[3]));
            out[1] = _mm512_shuffle_i32x4::<LOW>(ab, cd);
            out[3] = _mm512_shuffle_i32x4::<HIGH>(ab, cd);
        }
    }
    out
}

/// The parts' sums times their scales at `sx` ([PARTS, 16]), joined.
#[inline(always)]
unsafe fn scaled<const PARTS: usize>(sums: [__m512i; PARTS], sx: *const f32) -> __m512 {
    // SAFETY: the caller vouches for the scales and the instruction set.
    unsafe {
        let mut t = _mm512_mul_ps(_mm512_loadu_ps(sx), _mm512_cvtepi32_ps(sums[0]));
        for (i, &sums) in sums.iter().enumerate().skip(1) {
            t = _mm512_fmadd_ps(_mm512_loadu_ps(sx.add(16 * i)), _mm512_cvtepi32_ps(sums), t);
        }
        t
    }
}

/// The integers of a row's piece: even and odd columns, or the first and the second 64. Reads `groups` groups (1 to 4); the rest is unspecified.
#[inline(always)]
pub(super) unsafe fn weights<P: Packing>(p: *const u8, groups: usize) -> (__m512i, __m512i) {
    // SAFETY: reads 4 * BITS bytes per group.
    unsafe {
        let mask = _mm512_set1_epi8(((1u16 << P::BITS) - 1) as i8);
        match P::BITS {
            2 => {
                let v = if groups == 4 {
                    _mm256_loadu_si256(p.cast())
                } else {
                    _mm512_castsi512_si256(first_bytes(p, 8 * groups))
                };
                let v = _mm512_cvtepu32_epi64(v);
                let even = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x1c18_1410_0c08_0400), v);
                let odd = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x1e1a_1612_0e0a_0602), v);
                (_mm512_and_si512(even, mask), _mm512_and_si512(odd, mask))
            }
            3 => {
                const LANES: [u8; 64] = lane_bytes(6);
                let v = _mm512_permutexvar_epi8(_mm512_loadu_si512(LANES.as_ptr().cast()), first_bytes(p, 12 * groups));
                let even = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x2a24_1e18_120c_0600), v);
                let odd = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x2d27_211b_150f_0903), v);
                (_mm512_and_si512(even, mask), _mm512_and_si512(odd, mask))
            }
            4 => {
                let v = if groups == 4 { _mm512_loadu_si512(p.cast()) } else { first_bytes(p, 16 * groups) };
                (_mm512_and_si512(v, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(v), mask))
            }
            _ => {
                let (n, m) = (4 * P::BITS * groups.min(2), 4 * P::BITS * groups.saturating_sub(2));
                let second = p.add(if groups > 2 { 8 * P::BITS } else { 0 });
                (spread::<P>(first_bytes(p, n)), spread::<P>(first_bytes(second, m)))
            }
        }
    }
}

/// Byte `step * (i / 8) + i % 8` for byte i.
const fn lane_bytes(step: usize) -> [u8; 64] {
    let mut index = [0; 64];
    let mut i = 0;
    while i < 64 {
        index[i] = (i / 8 * step + i % 8) as u8;
        i += 1;
    }
    index
}

/// Sums of four products each, for row `i` of a piece. In natural order the two registers hold different groups: they meet in one register
/// where the lanes of a group are two apart.
#[inline(always)]
unsafe fn dots<P: Packing>(d: &mut [__m512i; 4], i: usize, first: __m512i, second: __m512i, x: *const u8) {
    // SAFETY: `x` holds a piece.
    unsafe {
        let (x0, x1) = (_mm512_loadu_si512(x.cast()), _mm512_loadu_si512(x.add(64).cast()));
        let zero = _mm512_setzero_si512();
        if alternate(P::BITS) {
            d[i] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, first, x0), second, x1);
        } else {
            let (a, b) = (_mm512_dpbusd_epi32(zero, first, x0), _mm512_dpbusd_epi32(zero, second, x1));
            d[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        }
    }
}

/// The sums of four rows and four groups, in lane 4g + r.
#[inline(always)]
unsafe fn gather<P: Packing>(d: [__m512i; 4]) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        if alternate(P::BITS) {
            four_rows::gather(d)
        } else {
            // Quads hold two sums of groups 0, 0, 2, 2 (quads 0 and 1) or 1, 1, 3, 3 (quads 2 and 3).
            let pair = |a, b| {
                let (a, b) = (_mm512_castsi512_ps(a), _mm512_castsi512_ps(b));
                _mm512_add_epi32(
                    _mm512_castps_si512(_mm512_shuffle_ps::<0b10_00_10_00>(a, b)),
                    _mm512_castps_si512(_mm512_shuffle_ps::<0b11_01_11_01>(a, b)),
                )
            };
            let (ab, cd) = (pair(d[0], d[1]), pair(d[2], d[3]));
            let all = _mm512_add_epi32(
                _mm512_shuffle_i32x4::<0b10_00_10_00>(ab, cd),
                _mm512_shuffle_i32x4::<0b11_01_11_01>(ab, cd),
            );
            let order = _mm512_setr_epi32(0, 2, 8, 10, 4, 6, 12, 14, 1, 3, 9, 11, 5, 7, 13, 15);
            _mm512_permutexvar_epi32(order, all)
        }
    }
}
