//! Integer groups for many tokens, with products of small matrices: a pair of rows times a pair of tokens, eight columns at a time.
//!
//! A tile of rows is unpacked once, pairs of rows interleaved by eights; tokens are laid out likewise. Four rows and four tokens at a time then pass over the
//! tile. Lane 2i + j of a register is row i of a pair times token j of another. The four accumulators of the definition are four such registers.

use std::arch::aarch64::*;

use super::Products;
use super::record::{Columns, Shape, each_scale, token, token_bytes, write_token};
use super::rows::{row_bytes, unpack_row};
use crate::instructions::int8_dot::Groups;
use crate::matrix::Matrix;
use crate::scratch::Scratch;

/// Rows of a tile.
const ROWS: usize = 8;
/// Rows, and tokens, of a pass.
const FOUR: usize = 4;

/// Bytes of four tokens' integers; of their `sx`, a number for each 16 columns at most; of their `mx`.
const fn quad_bytes(cols: usize) -> [usize; 3] {
    [FOUR * cols, cols, cols]
}

const fn quad(cols: usize) -> usize {
    let [q, sx, mx] = quad_bytes(cols);
    (q + sx + mx).next_multiple_of(64)
}

/// Bytes of the pieces of scratch: all tokens; the tile's integers; its scales and biases, each of them stored twice; two unpacked rows, their scales, their biases; a token.
pub fn sizes(cols: usize, tokens: usize) -> [usize; 7] {
    let [q, s, b] = row_bytes(cols);
    [tokens.div_ceil(FOUR) * quad(cols), ROWS * q, 4 * ROWS * s, 2 * q, 2 * s, 2 * b, token_bytes(cols)]
}

/// Where pairs of rows lie in the tile.
struct Tile {
    /// [pairs, columns / 8, 2, 8]
    q: *mut u8,
    /// [pairs, groups, (s s s' s' b b b' b')]
    scales: *mut f32,
    shape: Shape,
}

impl Tile {
    fn integers(&self, pair: usize) -> *mut u8 {
        self.q.wrapping_add(pair * 2 * self.shape.cols)
    }
    fn scales(&self, pair: usize) -> *mut f32 {
        self.scales.wrapping_add(pair * 8 * self.shape.groups)
    }
}

/// Four tokens.
struct Quad {
    /// [2, columns / 8, 2, 8]
    q: *mut i8,
    /// [parts of groups in ascending order, 4]
    sx: *mut f32,
    /// [groups, 4]
    mx: *mut f32,
}

fn quad_at(p: *mut u8, number: usize, cols: usize) -> Quad {
    let [q, sx, _] = quad_bytes(cols);
    let p = p.wrapping_add(number * quad(cols));
    Quad { q: p.cast(), sx: p.wrapping_add(q).cast(), mx: p.wrapping_add(q + sx).cast() }
}

/// # Safety
/// `matmul` checked the lengths; the instruction set is there, and has products of matrices.
#[inline(always)]
pub unsafe fn product<P: Products>(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let (shape, cols) = (Shape::of(w), w.cols);
    let [quads, q, scales, row_q, row_s, row_b, one] = scratch.cut(sizes(cols, tokens.len()));
    let cached = Tile { q, scales: scales.cast(), shape };
    let [q_bytes, s_bytes, b_bytes] = row_bytes(cols);
    // SAFETY: the scratch holds all tokens and the tile; rows and tokens are inside their arrays.
    unsafe {
        for i in 0..tokens.len().next_multiple_of(FOUR) {
            // Missing tokens of the last four are filled with the last one; their results are not stored.
            let number = tokens[i.min(tokens.len() - 1)] as usize;
            write_token(&x, number, shape, Columns::Natural, one);
            let (from, to) = (token(one, cols), quad_at(quads, i / FOUR, cols));
            let q = to.q.add(i % FOUR / 2 * 2 * cols + i % 2 * 8);
            for k in (0..cols).step_by(8) {
                vst1_s8(q.add(2 * k), vld1_s8(from.q.add(k)));
            }
            each_scale(&x, number, shape, |g, part, sx, mx| {
                *to.sx.add((g * shape.parts + part) * FOUR + i % FOUR) = sx;
                *to.mx.add(g * FOUR + i % FOUR) = mx;
            });
        }
        for first in (0..w.rows).step_by(ROWS) {
            let n = ROWS.min(w.rows - first);
            for pair in 0..n.div_ceil(FOUR) * 2 {
                for i in 0..2 {
                    // Missing rows of the last tile are filled with the last one; their results are not stored.
                    let r = (first + 2 * pair + i).min(w.rows - 1);
                    let at = (row_q.add(i * q_bytes), row_s.add(i * s_bytes).cast(), row_b.add(i * b_bytes).cast());
                    unpack_row::<P>(w, r, at);
                }
                interleave(&cached, pair, (row_q, q_bytes), (row_s, s_bytes), (row_b, b_bytes));
            }
            for t in (0..tokens.len()).step_by(FOUR) {
                let x = quad_at(quads, t / FOUR, cols);
                for r in (0..n).step_by(FOUR) {
                    let sums = match (shape.parts, shape.columns) {
                        (_, 16) => four_by_four::<P, 1, 16>(&cached, r / 2, &x),
                        (1, _) => four_by_four::<P, 1, 32>(&cached, r / 2, &x),
                        (2, _) => four_by_four::<P, 2, 32>(&cached, r / 2, &x),
                        _ => four_by_four::<P, 4, 32>(&cached, r / 2, &x),
                    };
                    for (i, sums) in sums.iter().enumerate() {
                        for (j, &sum) in sums.iter().enumerate() {
                            if t + i < tokens.len() && r + j < n {
                                tile[(t + i) * w.rows + first + r + j] = sum;
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Two unpacked rows to their place in the tile. Pieces of scratch come with the bytes from a row to the next.
#[inline(always)]
unsafe fn interleave(tile: &Tile, pair: usize, q: (*mut u8, usize), s: (*mut u8, usize), b: (*mut u8, usize)) {
    // SAFETY: both rows are whole, and the tile has room for them.
    unsafe {
        let to = tile.integers(pair);
        for k in (0..tile.shape.cols).step_by(16) {
            let (a, b) = (vld1q_u64(q.0.add(k).cast()), vld1q_u64(q.0.add(q.1 + k).cast()));
            vst1q_u64(to.add(2 * k).cast(), vzip1q_u64(a, b));
            vst1q_u64(to.add(2 * k + 16).cast(), vzip2q_u64(a, b));
        }
        let to = tile.scales(pair);
        let twice = |from: (*mut u8, usize), g: usize| {
            let (first, second) = (from.0.cast::<f32>().add(g), from.0.add(from.1).cast::<f32>().add(g));
            vcombine_f32(vld1_dup_f32(first), vld1_dup_f32(second))
        };
        for g in 0..tile.shape.groups {
            vst1q_f32(to.add(8 * g), twice(s, g));
            vst1q_f32(to.add(8 * g + 4), twice(b, g));
        }
    }
}

/// Accumulators of two pairs of rows and two pairs of tokens.
type Squares = [[float32x4_t; 2]; 2];

/// Four rows from pair `pair` on times four tokens: [token][row].
#[allow(clippy::needless_range_loop)]
#[inline(never)]
unsafe fn four_by_four<P: Products, const PARTS: usize, const COLUMNS: usize>(
    tile: &Tile,
    pair: usize,
    x: &Quad,
) -> [[f32; 4]; 4] {
    let (groups, cols) = (tile.shape.groups, tile.shape.cols);
    // SAFETY: the caller vouches for the rows, the tokens and the instruction set.
    unsafe {
        let zero = vdupq_n_f32(0.0);
        // In memory: all four would take half of the registers.
        let mut acc: [Squares; 4] = [[[zero; 2]; 2]; 4];
        let (mut q0, mut q1) = (tile.integers(pair).cast_const(), tile.integers(pair + 1).cast_const());
        let (mut x0, mut x1) = (x.q.cast_const(), x.q.add(2 * cols).cast_const());
        let (mut scales0, mut scales1) = (tile.scales(pair).cast_const(), tile.scales(pair + 1).cast_const());
        let (mut sx, mut mx) = (x.sx.cast_const(), x.mx.cast_const());
        for g in 0..groups {
            let mut t = [[zero; 2]; 2];
            for part in 0..PARTS {
                let mut sums = [[vdupq_n_s32(0); 2]; 2];
                for c in (0..2 * COLUMNS).step_by(16) {
                    let w = [vld1q_u8(q0.add(c)), vld1q_u8(q1.add(c))];
                    let x = [vld1q_s8(x0.add(c)), vld1q_s8(x1.add(c))];
                    for r in 0..2 {
                        for j in 0..2 {
                            sums[r][j] = P::matrices(sums[r][j], w[r], x[j]);
                        }
                    }
                }
                for j in 0..2 {
                    let sx = twice(sx.add(2 * j));
                    for r in 0..2 {
                        let sums = vcvtq_f32_s32(sums[r][j]);
                        t[r][j] = if part == 0 { vmulq_f32(sx, sums) } else { vfmaq_f32(t[r][j], sx, sums) };
                    }
                }
                (q0, q1, x0, x1) = (q0.add(2 * COLUMNS), q1.add(2 * COLUMNS), x0.add(2 * COLUMNS), x1.add(2 * COLUMNS));
                sx = sx.add(FOUR);
            }
            let acc = &mut acc[g % 4];
            let m = [twice(mx), twice(mx.add(2))];
            let s = [vld1q_f32(scales0), vld1q_f32(scales1)];
            let b = [vld1q_f32(scales0.add(4)), vld1q_f32(scales1.add(4))];
            for r in 0..2 {
                for j in 0..2 {
                    acc[r][j] = vfmaq_f32(vfmaq_f32(acc[r][j], s[r], t[r][j]), b[r], m[j]);
                }
            }
            mx = mx.add(FOUR);
            (scales0, scales1) = (scales0.add(8), scales1.add(8));
        }
        let mut out = [[0.0; 4]; 4];
        for r in 0..2 {
            for j in 0..2 {
                let (a, b) = (vaddq_f32(acc[0][r][j], acc[2][r][j]), vaddq_f32(acc[1][r][j], acc[3][r][j]));
                let mut sums = [0.0; 4];
                vst1q_f32(sums.as_mut_ptr(), vaddq_f32(a, b));
                for i in 0..4 {
                    out[2 * j + i % 2][2 * r + i / 2] = sums[i];
                }
            }
        }
        out
    }
}

/// Two numbers, twice.
#[inline(always)]
unsafe fn twice(p: *const f32) -> float32x4_t {
    // SAFETY: the caller vouches for both.
    unsafe { vreinterpretq_f32_f64(vld1q_dup_f64(p.cast())) }
}
