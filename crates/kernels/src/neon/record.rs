//! Tokens laid out for the products of integer groups: once for all rows.

use std::arch::aarch64::*;

use crate::input::ORDER;
use crate::instructions::int8_dot::Groups;
use crate::matrix::Matrix;

/// In which order a token's integers lie inside of each 32 columns.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Columns {
    /// As they are counted.
    Natural,
    /// The even ones, then the odd ones: halves of the bytes of 4-bit integers.
    EvenOdd,
}

/// Where byte i of natural order lies in two eights.
const NATURAL: [u8; 16] = {
    let (mut index, mut j) = ([0; 16], 0);
    while j < 16 {
        index[j / 8 * 8 + ORDER[j % 8]] = j as u8;
        j += 1;
    }
    index
};

/// The sizes of a matrix' groups, as kernels count them.
#[derive(Clone, Copy)]
pub struct Shape {
    pub cols: usize,
    /// Weight groups of a row.
    pub groups: usize,
    /// Parts of a weight group: activation groups, or half of one.
    pub parts: usize,
    /// Columns of a part.
    pub columns: usize,
}

impl Shape {
    pub fn of(w: &Matrix) -> Shape {
        let format = w.grouped();
        Shape { cols: w.cols, groups: w.cols / format.group, parts: format.parts(), columns: format.part_columns() }
    }
}

/// Bytes of a [`Token`] of so many columns, for groups of any size.
pub const fn token_bytes(cols: usize) -> usize {
    // q; then sx and mx, one for each 16 columns at most.
    cols.next_multiple_of(64) + 2 * (cols / 4).next_multiple_of(64)
}

/// A token: its integers, and its scales by part and then by weight group.
#[derive(Clone, Copy)]
pub struct Token {
    pub q: *const i8,
    /// `sx`: [parts, weight groups]
    pub sx: *const f32,
    /// [weight groups]
    pub mx: *const f32,
}

/// The token at `p`, which has [`token_bytes`].
#[inline(always)]
pub fn token(p: *const u8, cols: usize) -> Token {
    let sx = p.wrapping_add(cols.next_multiple_of(64));
    Token { q: p.cast(), sx: sx.cast(), mx: sx.wrapping_add((cols / 4).next_multiple_of(64)).cast() }
}

/// Lays out a token at `to`.
///
/// # Safety
/// `to` has [`token_bytes`], and the token is one of `x`.
pub unsafe fn write_token(x: &Groups, number: usize, shape: Shape, columns: Columns, to: *mut u8) {
    let token = token(to, shape.cols);
    // SAFETY: columns come in 32s; `to` holds them, and a number for each part and each group.
    unsafe {
        let from = x.q.as_ptr().add(number * shape.cols).cast::<u8>();
        for i in (0..shape.cols).step_by(32) {
            let (a, b) = (vld1q_u8(from.add(i)), vld1q_u8(from.add(i + 16)));
            let (a, b) = match columns {
                Columns::Natural => {
                    let order = vld1q_u8(NATURAL.as_ptr());
                    (vqtbl1q_u8(a, order), vqtbl1q_u8(b, order))
                }
                Columns::EvenOdd => {
                    let (a, b) = (vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b));
                    (vreinterpretq_u8_u32(vuzp1q_u32(a, b)), vreinterpretq_u8_u32(vuzp2q_u32(a, b)))
                }
            };
            vst1q_u8(to.add(i), a);
            vst1q_u8(to.add(i + 16), b);
        }
        each_scale(x, number, shape, |g, part, sx, mx| {
            token.sx.cast_mut().add(part * shape.groups + g).write(sx);
            // Each part overwrites the sum of those before it; the last write is the group's.
            token.mx.cast_mut().add(g).write(mx);
        });
    }
}

/// Calls `each(weight group, part, sx, mx)`, where `mx` is the sum up to this part.
#[inline(always)]
pub fn each_scale(x: &Groups, number: usize, shape: Shape, mut each: impl FnMut(usize, usize, f32, f32)) {
    let (mut g, mut part, mut sum) = (0, 0, 0.0);
    x.parts(number, shape.cols, shape.columns, |_, sx, mx| {
        sum = if part == 0 { mx } else { sum + mx };
        each(g, part, sx, sum);
        part += 1;
        if part == shape.parts {
            (g, part) = (g + 1, 0);
        }
    });
}
