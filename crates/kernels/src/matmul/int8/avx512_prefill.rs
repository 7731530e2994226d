//! Integer groups with AVX-512 VNNI, for many tokens: 32 rows by 512 columns are unpacked into cache, four columns of sixteen rows to a
//! register, and all tokens pass by.
//!
//! A lane is then a row, the sum of a group is eight dot products by a broadcast of four activations, and one fused multiply-add
//! serves sixteen rows. The four accumulators of the definition are four passes over the groups; between column blocks they rest in scratch.

use super::{Affine, Groups, affine_of};
use crate::affine::x86::{first_bytes, spread};
use crate::matmul::scratch::cut_bytes;
use crate::matmul::{Matrix, Scratch};
use std::arch::x86_64::*;

/// Rows of a tile: two registers.
const ROWS: usize = 32;
/// Columns of a tile: with their q (16 KB) and the activations of a few tokens they stay in the first-level cache.
const COLS: usize = 512;
/// Tokens at a time: with two registers of rows, twelve sums of each kind and what feeds them fill the 32 registers.
const TOKENS: usize = 6;
/// f32 of a token's accumulators.
const ACC: usize = 4 * ROWS;

fn sizes(tokens: usize) -> [usize; 4] {
    let scales = COLS / 32 * ROWS * 4;
    [ROWS * COLS, scales, scales, tokens.next_multiple_of(TOKENS) * ACC * 4]
}

pub(super) fn scratch_bytes(tokens: usize) -> usize {
    cut_bytes(sizes(tokens))
}

/// A tile of rows in cache.
struct Tile {
    /// [columns / 4, ROWS, 4]
    q: *mut u8,
    /// [weight groups, ROWS]
    s: *mut f32,
    /// [weight groups, ROWS]
    b: *mut f32,
}

/// # Safety
/// `matmul` checked the lengths, and the instruction set is there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let form = affine_of(w);
    let [q, s, b, acc] = scratch.cut(sizes(tokens.len()));
    let cached = Tile { q, s: s.cast(), b: b.cast() };
    let acc = acc.cast::<f32>();
    for r in (0..w.rows).step_by(ROWS) {
        for k in (0..w.cols).step_by(COLS) {
            let cols = COLS.min(w.cols - k);
            // SAFETY: rows, columns and tokens are inside their arrays, the tile and the accumulators in scratch.
            unsafe {
                match form.bits {
                    2 => fill::<2>(w, form, r, k, cols, &cached),
                    3 => fill::<3>(w, form, r, k, cols, &cached),
                    4 => fill::<4>(w, form, r, k, cols, &cached),
                    5 => fill::<5>(w, form, r, k, cols, &cached),
                    6 => fill::<6>(w, form, r, k, cols, &cached),
                    _ => fill::<8>(w, form, r, k, cols, &cached),
                }
                for i in (0..tokens.len()).step_by(TOKENS) {
                    // Past the last token the last one is computed again, into accumulators of its own.
                    let mut some = [0; TOKENS];
                    for (t, token) in some.iter_mut().enumerate() {
                        *token = tokens[(i + t).min(tokens.len() - 1)] as usize;
                    }
                    pass(form, &x, w.cols, some, k, cols, &cached, acc.add(i * ACC));
                }
            }
        }
        let written = ((1u64 << (w.rows - r).min(ROWS)) - 1) as u32;
        for i in 0..tokens.len() {
            // SAFETY: the mask ends with the last row.
            unsafe {
                let (acc, out) = (acc.add(i * ACC), tile.as_mut_ptr().add(i * w.rows + r));
                for half in 0..2 {
                    let lane = |l: usize| _mm512_loadu_ps(acc.add(l * ROWS + 16 * half));
                    let sum = _mm512_add_ps(_mm512_add_ps(lane(0), lane(2)), _mm512_add_ps(lane(1), lane(3)));
                    _mm512_mask_storeu_ps(out.wrapping_add(16 * half), (written >> (16 * half)) as u16, sum);
                }
            }
        }
    }
}

/// Unpacks rows `r..r + ROWS` (the last row again where there is none) and columns `k..k + cols` into the tile.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn fill<const BITS: usize>(w: &Matrix, form: Affine, r: usize, k: usize, cols: usize, tile: &Tile) {
    let row_bytes = w.row_bytes();
    // SAFETY: reads whole groups of rows that are there; the tile holds ROWS x COLS.
    unsafe {
        for half in 0..2 {
            for c in (0..cols).step_by(64) {
                let n = (cols - c).min(64);
                let mut q = [_mm512_setzero_si512(); 16];
                for i in 0..16 {
                    let row = (r + 16 * half + i).min(w.rows - 1);
                    let p = w.data.as_ptr().add(row * row_bytes + (k + c) / 8 * BITS);
                    q[i] = spread::<BITS>(first_bytes(p, n / 8 * BITS));
                }
                transpose(&mut q);
                for j in 0..n / 4 {
                    _mm512_storeu_si512(tile.q.add(((c / 4 + j) * ROWS + 16 * half) * 4).cast(), q[j]);
                }
            }
        }
        let groups = cols.div_ceil(form.group);
        for i in 0..ROWS {
            let (s, b) = w.row_scales((r + i).min(w.rows - 1));
            for g in 0..groups {
                *tile.s.add(g * ROWS + i) = form.scale.read(s, k / form.group + g);
                *tile.b.add(g * ROWS + i) = form.scale.read(b, k / form.group + g);
            }
        }
    }
}

/// Transposes 16 x 16 double words.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn transpose(q: &mut [__m512i; 16]) {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let mut p = *q;
        for i in 0..8 {
            p[2 * i] = _mm512_unpacklo_epi32(q[2 * i], q[2 * i + 1]);
            p[2 * i + 1] = _mm512_unpackhi_epi32(q[2 * i], q[2 * i + 1]);
        }
        // Now rows 4i..4i + 4: q[4i + j] has, in quad c, column 4c + j of four rows.
        for i in 0..4 {
            q[4 * i] = _mm512_unpacklo_epi64(p[4 * i], p[4 * i + 2]);
            q[4 * i + 1] = _mm512_unpackhi_epi64(p[4 * i], p[4 * i + 2]);
            q[4 * i + 2] = _mm512_unpacklo_epi64(p[4 * i + 1], p[4 * i + 3]);
            q[4 * i + 3] = _mm512_unpackhi_epi64(p[4 * i + 1], p[4 * i + 3]);
        }
        // Quads to their places: column 4c + j gathers quad c of q[j], q[4 + j], q[8 + j], q[12 + j].
        for j in 0..4 {
            let (a, b, c, d) = (q[j], q[4 + j], q[8 + j], q[12 + j]);
            let (ab_low, ab_high) =
                (_mm512_shuffle_i32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b));
            let (cd_low, cd_high) =
                (_mm512_shuffle_i32x4::<0b10_00_10_00>(c, d), _mm512_shuffle_i32x4::<0b11_01_11_01>(c, d));
            p[j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(ab_low, cd_low);
            p[8 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(ab_low, cd_low);
            p[4 + j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(ab_high, cd_high);
            p[12 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(ab_high, cd_high);
        }
        *q = p;
    }
}

/// The tile times columns `k..k + cols` of some tokens, added to `acc` ([TOKENS, 4, ROWS]); at k = 0 the accumulators start.
#[allow(clippy::needless_range_loop, clippy::too_many_arguments)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn pass(
    form: Affine,
    x: &Groups,
    all_cols: usize,
    tokens: [usize; TOKENS],
    k: usize,
    cols: usize,
    tile: &Tile,
    acc: *mut f32,
) {
    let log_group = form.group.trailing_zeros();
    // SAFETY: the caller's.
    unsafe {
        let (mut xq, mut sx, mut mx) = ([x.q.as_ptr(); TOKENS], [x.scales.as_ptr(); TOKENS], [x.sums.as_ptr(); TOKENS]);
        for t in 0..TOKENS {
            xq[t] = xq[t].add(tokens[t] * all_cols + k);
            sx[t] = sx[t].add((tokens[t] * all_cols + k) / 32);
            mx[t] = mx[t].add((tokens[t] * all_cols + k) / 32);
        }
        for lane in 0..4 {
            let at = |t: usize, half: usize| acc.add(t * ACC + lane * ROWS + 16 * half);
            let mut sums = [[_mm512_setzero_ps(); 2]; TOKENS];
            if k > 0 {
                for t in 0..TOKENS {
                    sums[t] = [_mm512_loadu_ps(at(t, 0)), _mm512_loadu_ps(at(t, 1))];
                }
            }
            let mut g = lane;
            while g < cols / 32 {
                let mut dots = [[_mm512_setzero_si512(); 2]; TOKENS];
                let q = tile.q.add(g * 32 * ROWS);
                for j in 0..8 {
                    let q0 = _mm512_loadu_si512(q.add(j * 4 * ROWS).cast());
                    let q1 = _mm512_loadu_si512(q.add(j * 4 * ROWS + 64).cast());
                    for t in 0..TOKENS {
                        let four = _mm512_set1_epi32(xq[t].add(g * 32 + j * 4).cast::<i32>().read_unaligned());
                        dots[t][0] = _mm512_dpbusd_epi32(dots[t][0], q0, four);
                        dots[t][1] = _mm512_dpbusd_epi32(dots[t][1], q1, four);
                    }
                }
                let wide = ((g * 32) >> log_group) * ROWS;
                for half in 0..2 {
                    let s = _mm512_loadu_ps(tile.s.add(wide + 16 * half));
                    let b = _mm512_loadu_ps(tile.b.add(wide + 16 * half));
                    for t in 0..TOKENS {
                        let scale = _mm512_mul_ps(s, _mm512_set1_ps(*sx[t].add(g)));
                        sums[t][half] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dots[t][half]), sums[t][half]);
                        sums[t][half] = _mm512_fmadd_ps(b, _mm512_set1_ps(*mx[t].add(g)), sums[t][half]);
                    }
                }
                g += 4;
            }
            for t in 0..TOKENS {
                _mm512_storeu_ps(at(t, 0), sums[t][0]);
                _mm512_storeu_ps(at(t, 1), sums[t][1]);
            }
        }
    }
}
