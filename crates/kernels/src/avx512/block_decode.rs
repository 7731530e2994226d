//! Integer groups of blocks with AVX-512 VNNI, for a few tokens: rows stream once, four at a time.
//!
//! A piece is 128 columns of four rows. Its products are summed so that lane 4g + r has the sum of row r and group g, and each float operation of the definition
//! handles sixteen. Groups of 32 columns fill one such register: of a row, one register holds the first halves of four groups, another the second halves, and both
//! are multiplied into the same lanes. Groups of 16 fill two. [`Rows`] says how a type gets there: the common types straight from their bytes (`block_rows`), the others
//! unpacked to a buffer first.

use std::arch::x86_64::*;

use super::block_rows::{Large, PIECE, Planes, Rows, Small, Unpacked, halves};
use super::four_rows::{FourRows, NATURAL, gather, store};
use super::spread::first_bytes;
use crate::format::blocks::unpack::{Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use crate::format::{BlockFormat, E2m1, WeightFormat};
use crate::instructions::int8_dot::Groups;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// The most tokens. Rows are unpacked anew for each four of them; with more, a tile that is unpacked once is quicker.
pub(super) const FEW: usize = 16;

/// Bytes of a token's piece: its activations, then for each register of groups sixteen `sx` and sixteen `mx`.
#[inline(always)]
const fn token_piece(group: usize) -> usize {
    PIECE + 32 / group * 128
}

fn sizes(cols: usize, tokens: usize, group: usize) -> [usize; 2] {
    [cols.div_ceil(PIECE) * token_piece(group) * tokens.min(FEW), Unpacked::<16>::bytes(cols)]
}

pub(super) fn scratch_bytes(cols: usize, tokens: usize) -> usize {
    cut_bytes(sizes(cols, tokens, 16))
}

/// # Safety
/// `matmul` checked the lengths, there are at most `FEW` tokens, and the instruction set is there.
#[inline(always)]
pub(super) unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe {
        let blocks = match w.format {
            WeightFormat::Blocks(blocks) => Some(blocks),
            _ => None,
        };
        let product = match blocks {
            Some(BlockFormat::Q4_0) => all_rows::<Small<Q4_0>>,
            Some(BlockFormat::Q4_1) => all_rows::<Small<Q4_1>>,
            Some(BlockFormat::Q5_0) => all_rows::<Small<Q5_0>>,
            Some(BlockFormat::Q5_1) => all_rows::<Small<Q5_1>>,
            Some(BlockFormat::Q8_0) => all_rows::<Small<Q8_0>>,
            Some(BlockFormat::Iq4Nl) => all_rows::<Small<Iq4Nl>>,
            Some(BlockFormat::Mxfp4) => all_rows::<Small<Mxfp4>>,
            Some(BlockFormat::Q2K) => all_rows::<Large<Q2K>>,
            Some(BlockFormat::Q3K) => all_rows::<Large<Q3K>>,
            Some(BlockFormat::Q4K) => all_rows::<Large<Q4K>>,
            Some(BlockFormat::Q5K) => all_rows::<Large<Q5K>>,
            Some(BlockFormat::Q6K) => all_rows::<Large<Q6K>>,
            Some(BlockFormat::Iq4Xs) => all_rows::<Large<Iq4Xs>>,
            _ if w.format == WeightFormat::E2m1(E2m1::Power) => all_rows::<Planes>,
            _ if w.grouped().group == 16 => all_rows::<Unpacked<16>>,
            _ => all_rows::<Unpacked<32>>,
        };
        product(w, x, tokens, tile, scratch);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn all_rows<R: Rows>(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let [prepared, room] = scratch.cut(sizes(w.cols, tokens.len(), R::GROUP));
    let token_bytes = w.cols.div_ceil(PIECE) * token_piece(R::GROUP);
    let streams = FourRows::new(0..w.rows, w.row_bytes());
    // SAFETY: the scratch holds all tokens and what the rows are unpacked to; rows and tokens stay inside the tile.
    unsafe {
        for (i, &token) in tokens.iter().enumerate() {
            prepare::<R>(&x, token as usize, w.cols, prepared.add(i * token_bytes));
        }
        for r in 0..streams.quarter {
            let (index, further) = (streams.index(r), streams.further(r));
            let rows = R::new(w, index, further * w.row_bytes(), room);
            let mut i = 0;
            while i < tokens.len() {
                let x = prepared.add(i * token_bytes);
                let out = Out { at: tile.as_mut_ptr().add(i * w.rows), stride: w.rows, index };
                let n = (tokens.len() - i).min(4);
                match n {
                    1 => four_rows::<R, 1>(&rows, w.cols, x, &out),
                    2 => four_rows::<R, 2>(&rows, w.cols, x, &out),
                    3 => four_rows::<R, 3>(&rows, w.cols, x, &out),
                    _ => four_rows::<R, 4>(&rows, w.cols, x, &out),
                }
                i += n;
            }
        }
    }
}

/// Where four rows' products go.
struct Out {
    /// [tokens, rows]
    at: *mut f32,
    stride: usize,
    index: [usize; 4],
}

/// Lays out one token: per piece its activations as [`Rows::weights`] has weights, and its scales in the lanes of the sums.
#[inline(always)]
unsafe fn prepare<R: Rows>(x: &Groups, token: usize, cols: usize, out: *mut u8) {
    let groups = cols / 32;
    // SAFETY: the token's columns and groups are read under masks; `out` holds a token.
    unsafe {
        let q = x.q.as_ptr().add(token * cols).cast::<u8>();
        let (sx, mx) = (x.scales.as_ptr().add(token * groups), x.sums.as_ptr().add(token * groups));
        let natural = _mm512_loadu_si512(NATURAL.as_ptr().cast());
        // Lane 4g + r is of group g.
        let group = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        for piece in 0..cols.div_ceil(PIECE) {
            let out = out.add(piece * token_piece(R::GROUP));
            let (k, half) = (piece * PIECE, (piece * PIECE + 64).min(cols));
            let a = _mm512_shuffle_epi8(first_bytes(q.add(k), cols - k), natural);
            let b = _mm512_shuffle_epi8(first_bytes(q.add(half), cols - half), natural);
            let mask = ((1u32 << (groups - piece * 4).min(4)) - 1) as u16;
            let sx = _mm512_maskz_loadu_ps(mask, sx.add(piece * 4));
            let to = out.add(PIECE).cast::<f32>();
            if R::GROUP == 32 {
                let (first, second) = halves(a, b);
                _mm512_storeu_si512(out.cast(), first);
                _mm512_storeu_si512(out.add(64).cast(), second);
                let mx = _mm512_maskz_loadu_ps(mask, mx.add(piece * 4));
                _mm512_storeu_ps(to, _mm512_permutexvar_ps(group, sx));
                _mm512_storeu_ps(to.add(16), _mm512_permutexvar_ps(group, mx));
            } else {
                for (i, q) in [a, b].into_iter().enumerate() {
                    _mm512_storeu_si512(out.add(64 * i).cast(), q);
                    // A quad is half of an activation group: all of its lanes get the sum.
                    let sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), q);
                    let sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32::<0b01_00_11_10>(sums));
                    let sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32::<0b10_11_00_01>(sums));
                    let of = _mm512_add_epi32(_mm512_srli_epi32::<1>(group), _mm512_set1_epi32(2 * i as i32));
                    let sx = _mm512_permutexvar_ps(of, sx);
                    _mm512_storeu_ps(to.add(32 * i), sx);
                    _mm512_storeu_ps(to.add(32 * i + 16), _mm512_mul_ps(sx, _mm512_cvtepi32_ps(sums)));
                }
            }
        }
    }
}

/// Four rows times T tokens from `x`.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn four_rows<R: Rows, const T: usize>(rows: &R, cols: usize, x: *const u8, out: &Out) {
    let token_bytes = cols.div_ceil(PIECE) * token_piece(R::GROUP);
    // SAFETY: pieces are inside the rows and tokens; the caller vouches for the output.
    unsafe {
        let mut acc = [_mm512_setzero_ps(); T];
        let mut scales = rows.scales();
        for piece in 0..cols / PIECE {
            let some = rows.next(&mut scales, piece, 4);
            let sums = sums::<R, T>(rows, piece, 4, x, token_bytes);
            for t in 0..T {
                for half in 0..32 / R::GROUP {
                    let (scaled, mx) = joined(sums[t][half], token_scales::<R>(x, t * token_bytes, piece, half));
                    acc[t] = _mm512_fmadd_ps(some[half].0, scaled, acc[t]);
                    acc[t] = _mm512_fmadd_ps(some[half].1, mx, acc[t]);
                }
            }
        }
        let rest = cols % PIECE / 32;
        if rest > 0 {
            // Lanes of groups that are not there keep their sums.
            let there = if R::GROUP == 32 {
                [(1u32 << (4 * rest)) - 1, 0]
            } else {
                [(1 << (8 * rest).min(16)) - 1, (1 << (8 * rest).saturating_sub(16)) - 1]
            };
            let piece = cols / PIECE;
            let some = rows.next(&mut scales, piece, rest);
            let sums = sums::<R, T>(rows, piece, rest, x, token_bytes);
            for t in 0..T {
                for half in 0..32 / R::GROUP {
                    let (scaled, mx) = joined(sums[t][half], token_scales::<R>(x, t * token_bytes, piece, half));
                    let there = there[half] as u16;
                    acc[t] = _mm512_mask3_fmadd_ps(some[half].0, scaled, acc[t], there);
                    acc[t] = _mm512_mask3_fmadd_ps(some[half].1, mx, acc[t], there);
                }
            }
        }
        for t in 0..T {
            store(acc[t], out.at.add(t * out.stride), out.index);
        }
    }
}

/// `sx` and then `mx` of a register of groups of a piece.
#[inline(always)]
unsafe fn token_scales<R: Rows>(x: *const u8, token: usize, piece: usize, half: usize) -> *const f32 {
    // SAFETY: the caller vouches for the piece.
    unsafe { x.add(token + piece * token_piece(R::GROUP) + PIECE).cast::<f32>().add(32 * half) }
}

/// Sums times their `sx`, and `mx`.
#[inline(always)]
unsafe fn joined(sums: __m512i, scales: *const f32) -> (__m512, __m512) {
    // SAFETY: the caller vouches for the scales and the instruction set.
    unsafe { (_mm512_mul_ps(_mm512_loadu_ps(scales), _mm512_cvtepi32_ps(sums)), _mm512_loadu_ps(scales.add(16))) }
}

/// The sums of a piece, of which there are `groups` of 32 columns, in registers of groups. No closures: one that is called twice is not inlined, and has no instruction set.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn sums<R: Rows, const T: usize>(
    rows: &R,
    piece: usize,
    groups: usize,
    x: *const u8,
    token_bytes: usize,
) -> [[__m512i; 2]; T] {
    // SAFETY: the caller vouches for the piece and the instruction set.
    unsafe {
        let zero = _mm512_setzero_si512();
        let mut d = [[[zero; 4]; 2]; T];
        for i in 0..4 {
            let (first, second) = rows.weights(i, piece, groups);
            for t in 0..T {
                let x = x.add(t * token_bytes + piece * token_piece(R::GROUP));
                let (x0, x1) = (_mm512_loadu_si512(x.cast()), _mm512_loadu_si512(x.add(64).cast()));
                d[t][0][i] = _mm512_dpbusd_epi32(zero, first, x0);
                if R::GROUP == 32 {
                    d[t][0][i] = _mm512_dpbusd_epi32(d[t][0][i], second, x1);
                } else {
                    d[t][1][i] = _mm512_dpbusd_epi32(zero, second, x1);
                }
            }
        }
        let mut all = [[zero; 2]; T];
        for t in 0..T {
            all[t][0] = gather(d[t][0]);
            if R::GROUP == 16 {
                all[t][1] = gather(d[t][1]);
            }
        }
        all
    }
}
