//! Integer groups, row by row: four rows times a token, or a row times up to four tokens.
//!
//! The sums of four weight groups are gathered in one register, a lane each: these are the four accumulators of the definition. 4-bit integers are
//! read as they are packed; other formats are unpacked to scratch first.

use std::arch::aarch64::*;

use super::Products;
use super::products::apart;
use super::record::{Shape, Token, token, token_bytes, write_token};
use super::rows::{row_bytes, unpack_row, unpack_scales};
use super::sources::{Blocks32, Nibbles, Part, Q4K, Row, Source, Unpacked};
use crate::format::packing::PackingName;
use crate::format::{BlockFormat, WeightFormat};
use crate::instructions::int8_dot::{Groups, TokenScales};
use crate::matrix::Matrix;
use crate::scratch::Scratch;

/// The most tokens that read packed rows. With more, rows are unpacked once.
pub const FEW: usize = 4;
/// Rows at a time.
const ROWS: usize = 4;

/// Bytes of the pieces of scratch: all tokens; four rows of integers, their scales, their biases.
pub fn sizes(cols: usize, tokens: usize) -> [usize; 4] {
    let [q, s, b] = row_bytes(cols);
    [tokens * token_bytes(cols), ROWS * q, ROWS * s, ROWS * b]
}

/// What must be done to rows before a [`Source`] can read them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    /// Nothing: it reads blocks as they are.
    Nothing,
    /// Scales are widened to f32.
    Scales,
    /// Integers are unpacked, and scales widened.
    All,
}

/// # Safety
/// `matmul` checked the lengths; the instruction set is there.
#[inline(always)]
pub unsafe fn product<P: Products>(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let (shape, direct) = (Shape::of(w), tokens.len() <= FEW);
    let narrow = w.format.is_narrow();
    macro_rules! with {
        ($source:ty, $before:ident) => {
            // SAFETY: the caller's.
            unsafe { all::<P, $source>(w, &x, shape, tokens, tile, scratch, Before::$before) }
        };
    }
    match (w.format, shape.parts, shape.columns) {
        (WeightFormat::Blocks(BlockFormat::Q4_0), ..) if direct => with!(Blocks32<false>, Nothing),
        (WeightFormat::Blocks(BlockFormat::Q4_1), ..) if direct => with!(Blocks32<true>, Nothing),
        (WeightFormat::Blocks(BlockFormat::Q4K), ..) if direct => with!(Q4K, Nothing),
        (WeightFormat::Affine { .. }, parts, 32) if direct && w.grouped().packing == PackingName::U4 => match parts {
            1 => with!(Nibbles<1>, Scales),
            2 => with!(Nibbles<2>, Scales),
            _ => with!(Nibbles<4>, Scales),
        },
        (_, _, 16) if narrow => with!(Unpacked<1, 16, true>, All),
        (_, _, 16) => with!(Unpacked<1, 16, false>, All),
        (_, 1, _) if narrow => with!(Unpacked<1, 32, true>, All),
        (_, 1, _) => with!(Unpacked<1, 32, false>, All),
        (_, 2, _) if narrow => with!(Unpacked<2, 32, true>, All),
        (_, 2, _) => with!(Unpacked<2, 32, false>, All),
        (_, _, _) if narrow => with!(Unpacked<4, 32, true>, All),
        (_, _, _) => with!(Unpacked<4, 32, false>, All),
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn all<P: Products, S: Source>(
    w: &Matrix,
    x: &Groups,
    shape: Shape,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
    before: Before,
) {
    let [records, q, s, b] = scratch.cut(sizes(w.cols, tokens.len()));
    let (bytes, [q_bytes, s_bytes, b_bytes]) = (token_bytes(w.cols), row_bytes(w.cols));
    // SAFETY: the scratch holds all tokens and four rows; rows and tokens are inside their arrays.
    unsafe {
        for (i, &token) in tokens.iter().enumerate() {
            write_token(x, token as usize, shape, S::ORDER, records.add(i * bytes));
        }
        for first in (0..w.rows).step_by(ROWS) {
            let n = ROWS.min(w.rows - first);
            let mut rows = [Row { q, s: s.cast(), b: b.cast() }; ROWS];
            for (i, row) in rows.iter_mut().enumerate().take(n) {
                let to = (q.add(i * q_bytes), s.add(i * s_bytes).cast(), b.add(i * b_bytes).cast());
                match before {
                    Before::All => unpack_row::<P>(w, first + i, to),
                    Before::Scales => unpack_scales::<P>(w, first + i, (to.1, to.2)),
                    Before::Nothing => {}
                }
                let integers = if before == Before::All { to.0.cast_const() } else { w.row(first + i).as_ptr() };
                *row = Row { q: integers, s: to.1, b: to.2 };
            }
            let token_at = |i: usize| token(records.add(i * bytes), w.cols);
            let out = tile.as_mut_ptr().add(first);
            if tokens.len() == 1 && n == ROWS {
                if S::STEP == 8 {
                    // Their scales take registers.
                    some_rows::<P, S, 2>(&rows, token_at(0), shape.groups, out);
                    some_rows::<P, S, 2>(&[rows[2], rows[3], rows[2], rows[3]], token_at(0), shape.groups, out.add(2));
                } else {
                    some_rows::<P, S, ROWS>(&rows, token_at(0), shape.groups, out);
                }
                continue;
            }
            for (r, &row) in rows.iter().enumerate().take(n) {
                let mut i = 0;
                while i < tokens.len() {
                    let out = out.add(i * w.rows + r);
                    match tokens.len() - i {
                        1 => some_tokens::<P, S, 1>(row, &[token_at(i)], shape.groups, (out, w.rows)),
                        2 | 3 => {
                            some_tokens::<P, S, 2>(row, &[token_at(i), token_at(i + 1)], shape.groups, (out, w.rows));
                            i += 1;
                        }
                        _ => {
                            let some = [token_at(i), token_at(i + 1), token_at(i + 2), token_at(i + 3)];
                            some_tokens::<P, S, 4>(row, &some, shape.groups, (out, w.rows));
                            i += 3;
                        }
                    }
                    i += 1;
                }
            }
        }
    }
}

/// The partial sums of a part.
#[inline(always)]
unsafe fn partial<P: Products, S: Source>(q: Part, x: [int8x16_t; 2]) -> int32x4_t {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let add = |sums, q, x| {
            if S::NARROW { P::signed(sums, vreinterpretq_s8_u8(q), x) } else { P::mixed(sums, q, x) }
        };
        let sums = add(vdupq_n_s32(0), q[0], x[0]);
        if S::COLUMNS > 16 { add(sums, q[1], x[1]) } else { sums }
    }
}

/// A token's integers of part `i` of weight group `g`.
#[inline(always)]
unsafe fn columns<S: Source>(x: Token, g: usize, i: usize) -> [int8x16_t; 2] {
    // SAFETY: the caller vouches for the group.
    unsafe {
        let p = x.q.add((g * S::PARTS + i) * S::COLUMNS);
        let first = vld1q_s8(p);
        [first, if S::COLUMNS > 16 { vld1q_s8(p.add(16)) } else { first }]
    }
}

/// The sums of part `i` of four weight groups, a lane each.
#[inline(always)]
unsafe fn gathered<P: Products, S: Source>(q: [Part; 4], x: [[int8x16_t; 2]; 4]) -> float32x4_t {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let at = |l: usize| partial::<P, S>(q[l], x[l]);
        vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(at(0), at(1)), vpaddq_s32(at(2), at(3))))
    }
}

#[inline(always)]
unsafe fn four_columns<S: Source>(x: Token, g: usize, i: usize) -> [[int8x16_t; 2]; 4] {
    // SAFETY: the caller's.
    unsafe { [columns::<S>(x, g, i), columns::<S>(x, g + 1, i), columns::<S>(x, g + 2, i), columns::<S>(x, g + 3, i)] }
}

/// `R` rows times a token.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
unsafe fn some_rows<P: Products, S: Source, const R: usize>(
    rows: &[Row; ROWS],
    x: Token,
    groups: usize,
    out: *mut f32,
) {
    // SAFETY: the caller vouches for the groups and the instruction set.
    unsafe {
        let mut acc = [vdupq_n_f32(0.0); R];
        let mut g = 0;
        if S::STEP == 8 {
            while g + 8 <= groups {
                let mut scales = [[[acc[0]; 2]; 2]; R];
                for r in 0..R {
                    scales[r] = S::scales(rows[r], g);
                }
                apart();
                for half in 0..2 {
                    let mut four = [[acc[0]; 2]; R];
                    for r in 0..R {
                        four[r] = scales[r][half];
                    }
                    four_by_rows::<P, S, R>(&mut acc, rows, x, (g + 4 * half, groups), Some(four));
                }
                g += 8;
            }
        }
        while g + 4 <= groups {
            four_by_rows::<P, S, R>(&mut acc, rows, x, (g, groups), None);
            g += 4;
        }
        for r in 0..R {
            *out.add(r) = finish::<P, S>(acc[r], rows[r], x, (g, groups));
        }
    }
}

/// Four weight groups of `R` rows, with their scales if they are read already.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn four_by_rows<P: Products, S: Source, const R: usize>(
    acc: &mut [float32x4_t; R],
    rows: &[Row; ROWS],
    x: Token,
    (g, groups): (usize, usize),
    scales: Option<[[float32x4_t; 2]; R]>,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut t = [vdupq_n_f32(0.0); R];
        for i in 0..S::PARTS {
            let (columns, sx) = (four_columns::<S>(x, g, i), vld1q_f32(x.sx.add(i * groups + g)));
            for r in 0..R {
                apart();
                let sums = gathered::<P, S>(S::four(rows[r], g, i), columns);
                t[r] = if i == 0 { vmulq_f32(sx, sums) } else { vfmaq_f32(t[r], sx, sums) };
            }
        }
        let mx = vld1q_f32(x.mx.add(g));
        for r in 0..R {
            let [s, b] = match scales {
                Some(scales) => scales[r],
                None => S::four_scales(rows[r], g),
            };
            acc[r] = vfmaq_f32(vfmaq_f32(acc[r], s, t[r]), b, mx);
        }
    }
}

/// A row times `T` tokens, `stride` apart in `out`.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
unsafe fn some_tokens<P: Products, S: Source, const T: usize>(
    row: Row,
    x: &[Token; T],
    groups: usize,
    (out, stride): (*mut f32, usize),
) {
    // SAFETY: the caller vouches for the groups and the instruction set.
    unsafe {
        let mut acc = [vdupq_n_f32(0.0); T];
        let mut g = 0;
        if S::STEP == 8 {
            while g + 8 <= groups {
                let scales = S::scales(row, g);
                apart();
                for half in 0..2 {
                    four_by_tokens::<P, S, T>(&mut acc, row, x, (g + 4 * half, groups), scales[half]);
                }
                g += 8;
            }
        }
        while g + 4 <= groups {
            four_by_tokens::<P, S, T>(&mut acc, row, x, (g, groups), S::four_scales(row, g));
            g += 4;
        }
        for t in 0..T {
            *out.add(t * stride) = finish::<P, S>(acc[t], row, x[t], (g, groups));
        }
    }
}

/// Four weight groups of `T` tokens.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn four_by_tokens<P: Products, S: Source, const T: usize>(
    acc: &mut [float32x4_t; T],
    row: Row,
    x: &[Token; T],
    (g, groups): (usize, usize),
    [s, b]: [float32x4_t; 2],
) {
    // SAFETY: the caller's.
    unsafe {
        let mut scaled = [vdupq_n_f32(0.0); T];
        for i in 0..S::PARTS {
            let q = S::four(row, g, i);
            for t in 0..T {
                apart();
                let sums = gathered::<P, S>(q, four_columns::<S>(x[t], g, i));
                let sx = vld1q_f32(x[t].sx.add(i * groups + g));
                scaled[t] = if i == 0 { vmulq_f32(sx, sums) } else { vfmaq_f32(scaled[t], sx, sums) };
            }
        }
        for t in 0..T {
            acc[t] = vfmaq_f32(vfmaq_f32(acc[t], s, scaled[t]), b, vld1q_f32(x[t].mx.add(g)));
        }
    }
}

/// The last one to three weight groups, from `g` on, and the sum of the accumulators.
#[inline(always)]
unsafe fn finish<P: Products, S: Source>(acc: float32x4_t, row: Row, x: Token, (g, groups): (usize, usize)) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let mut lanes = [0f32; 4];
        vst1q_f32(lanes.as_mut_ptr(), acc);
        let numbers = |p: *const f32, n: usize| std::slice::from_raw_parts(p, n);
        let scales = TokenScales { sx: numbers(x.sx, S::PARTS * groups), mx: numbers(x.mx, groups) };
        for (lane, g) in (g..groups).enumerate() {
            let (s, b) = S::scale(row, g);
            let sum = |i: usize| vaddvq_s32(partial::<P, S>(S::one(row, g, i), columns::<S>(x, g, i)));
            let mut t = scales.sx[g] * sum(0) as f32;
            for i in 1..S::PARTS {
                t = scales.sx[i * groups + g].mul_add(sum(i) as f32, t);
            }
            lanes[lane] = s.mul_add(t, lanes[lane]);
            lanes[lane] = b.mul_add(scales.mx[g], lanes[lane]);
        }
        (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
    }
}
