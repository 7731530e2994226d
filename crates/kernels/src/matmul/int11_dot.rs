//! Integers of 11 bits times weights in groups.
//!
//! Integer sums of a piece (up to 64 columns of a weight group) are exact in any order; the two fmas of a piece follow in ascending order, in one accumulator.
//! Sixteen rows are unpacked, as many columns at a time as fit the first-level cache, and meet all tokens there: many tokens with two columns of each row side by
//! side, few tokens with each row by itself, since putting columns side by side takes longer than a token's products.

use crate::Isa;
#[cfg(target_arch = "x86_64")]
use crate::avx512::{int11_amx, int11_decode};
use crate::dispatch::simd;
use crate::format::Grouped;
use crate::input::Int11;
use crate::instructions::int11_dot::{Int11Dot, ROWS, groups_of, side_by_side};
use crate::instructions::unpack::unpack_lanes;
use crate::int11::{GROUP, HALF};
use crate::int11_tiles;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// Columns that are unpacked at a time.
const BLOCK: usize = 512;

/// Tokens that meet rows as they are.
const FEW: usize = 3;

/// The block's integers, row by row and then pair by pair; scales and biases of sixteen rows, and those of one after the other; the accumulators of each token.
fn sizes(cols: usize, group: usize, tokens: usize) -> [usize; 6] {
    let numbers = 4 * ROWS * groups_of(cols, group);
    [ROWS * BLOCK, 2 * ROWS * BLOCK, numbers, numbers, numbers, 4 * ROWS * tokens]
}

pub(super) fn scratch_bytes(format: Grouped, cols: usize, tokens: usize) -> usize {
    let bytes = cut_bytes(sizes(cols, format.group, tokens));
    #[cfg(target_arch = "x86_64")]
    let bytes = bytes.max(int11_amx::scratch_bytes(tokens)).max(int11_decode::scratch_bytes(format, cols, FEW));
    bytes
}

/// Pieces of a block of columns, unpacked.
#[derive(Clone, Copy)]
struct Block {
    /// [16 rows, BLOCK]
    q: *const u8,
    /// [columns / 2, 16 rows, 2]
    w: *const i16,
    /// [groups of a row, 16 rows]
    s: *const f32,
    b: *const f32,
    first: usize,
    cols: usize,
    /// Columns of a piece.
    piece: usize,
    /// Columns of a group are two to the power of this.
    group_bits: u32,
}

impl Block {
    /// Scales and biases of the sixteen rows in the group of the block's column `k`.
    ///
    /// # Safety
    /// The instruction set of `V` is available.
    #[inline(always)]
    unsafe fn scales<V: Int11Dot>(&self, k: usize) -> (V, V) {
        let at = ((self.first + k) >> self.group_bits) * ROWS;
        // SAFETY: the column is one of the row, and so is its group.
        unsafe { (V::load(self.s.add(at)), V::load(self.b.add(at))) }
    }
}

/// The sum of a token's integers in `width` columns, times their step.
///
/// # Safety
/// The columns are those of a piece of `x`, whose rows have `cols` columns; `row` is the token's.
#[inline(always)]
unsafe fn piece_sum(x: Int11, cols: usize, token: usize, row: *const i16, column: usize, width: usize) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let halves = x.sums.as_ptr().add(token * (cols / HALF) + column / HALF);
        match width {
            GROUP => *halves + *halves.add(1),
            HALF => *halves,
            _ => (0..width).map(|i| i32::from(*row.add(column + i))).sum::<i32>() as f32 * step(x, cols, token, column),
        }
    }
}

/// The step of a token's integers around a column.
///
/// # Safety
/// As for [`piece_sum`].
#[inline(always)]
unsafe fn step(x: Int11, cols: usize, token: usize, column: usize) -> f32 {
    // SAFETY: the caller's.
    unsafe { *x.steps.as_ptr().add(token * cols.div_ceil(GROUP) + column / GROUP) }
}

/// Takes one token through a block of rows as they are, whose accumulators are at `acc`.
///
/// # Safety
/// As for [`fold`]; pieces have 32 columns or 64.
#[inline(always)]
unsafe fn fold_one<V: Int11Dot>(block: Block, x: Int11, cols: usize, token: usize, acc: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let (mut y, row) = (V::load(acc), x.n.as_ptr().add(token * cols));
        let mut k = 0;
        while k < block.cols {
            let (width, column) = (block.piece.min(block.cols - k), block.first + k);
            let sums = V::row_sums(block.q.add(k), BLOCK, row.add(column), width);
            let (s, b) = block.scales::<V>(k);
            y = s.fma(V::to_f32(sums).mul(V::splat(step(x, cols, token, column))), y);
            y = b.fma(V::splat(piece_sum(x, cols, token, row, column, width)), y);
            k += width;
        }
        y.store(acc);
    }
}

/// Takes T tokens through a block, whose accumulators are at `acc`.
///
/// # Safety
/// The tokens are rows of `x` with `cols` columns, `acc` holds T times sixteen, and the instruction set of `V` is available.
// Plain loops over arrays of constant length: closures over vectors may not be inlined.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn fold<V: Int11Dot, const T: usize>(block: Block, x: Int11, cols: usize, tokens: [usize; T], acc: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let mut y = [V::splat(0.0); T];
        let mut rows = [x.n.as_ptr(); T];
        for t in 0..T {
            y[t] = V::load(acc.add(ROWS * t));
            rows[t] = rows[t].add(tokens[t] * cols + block.first);
        }
        let mut k = 0;
        while k < block.cols {
            let mut sums = [V::zero(); T];
            let width = block.piece.min(block.cols - k);
            for pair in k / 2..(k + width) / 2 {
                let w = V::load(block.w.add(2 * ROWS * pair).cast());
                for t in 0..T {
                    sums[t] = V::add_pairs(sums[t], w, rows[t].add(2 * pair));
                }
            }
            let (s, b) = block.scales::<V>(k);
            let column = block.first + k;
            for t in 0..T {
                let row = rows[t].sub(block.first);
                y[t] = s.fma(V::to_f32(sums[t]).mul(V::splat(step(x, cols, tokens[t], column))), y[t]);
                y[t] = b.fma(V::splat(piece_sum(x, cols, tokens[t], row, column, width)), y[t]);
            }
            k += width;
        }
        for t in 0..T {
            y[t].store(acc.add(ROWS * t));
        }
    }
}

// As in `fold`.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn grouped_lanes<V: Int11Dot>(w: Matrix, x: Int11, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let format = w.grouped();
    let piece = format.group.min(GROUP);
    let few = tokens.len() <= FEW && piece >= HALF;
    let [q, pairs, by_row, s, b, acc] = scratch.cut(sizes(w.cols, format.group, tokens.len()));
    let (pairs, by_row, s, b, acc) = (pairs.cast::<f32>(), by_row.cast(), s.cast(), b.cast(), acc.cast::<f32>());
    let (groups, row_bytes, block_bytes) =
        (groups_of(w.cols, format.group), w.row(0).len(), BLOCK / 8 * format.packing.bits());
    for first_row in (0..w.rows).step_by(ROWS) {
        let rows = ROWS.min(w.rows - first_row);
        // SAFETY: `sizes` has room for what is written here; rows, columns and tokens were checked by `grouped`; a row that is not there is the last one again;
        // the caller vouches for the instruction set.
        unsafe {
            acc.write_bytes(0, ROWS * tokens.len());
            let (mut row_s, mut row_b) = ([&w.scales[..0]; ROWS], [&w.scales[..0]; ROWS]);
            for r in 0..ROWS {
                (row_s[r], row_b[r]) = w.row_scales(first_row + r.min(rows - 1));
            }
            side_by_side::<V>(format.scale, row_s, groups, by_row, s);
            side_by_side::<V>(format.scale, row_b, groups, by_row, b);
            for first in (0..w.cols).step_by(BLOCK) {
                let cols = BLOCK.min(w.cols - first);
                for r in 0..ROWS {
                    let from = w.row(first_row + r.min(rows - 1))[first / 8 * format.packing.bits()..].as_ptr();
                    // The next block, or the same rows of the next sixteen: their addresses are in no order that a processor foresees.
                    let ahead = if first + BLOCK < w.cols {
                        block_bytes
                    } else {
                        row_bytes * ROWS - first / BLOCK * block_bytes
                    };
                    for line in (0..block_bytes).step_by(64) {
                        V::prefetch(from.wrapping_add(ahead + line));
                    }
                    unpack_lanes::<V>(format.packing, from, q.add(BLOCK * r), cols);
                }
                for k in (0..if few { 0 } else { cols }).step_by(HALF) {
                    let mut lanes = [V::splat(0.0); ROWS];
                    for r in 0..ROWS {
                        lanes[r] = V::widen_pairs(q.add(BLOCK * r + k));
                    }
                    let lanes = V::transpose16(lanes);
                    for pair in 0..ROWS {
                        lanes[pair].store(pairs.add((k / 2 + pair) * ROWS));
                    }
                }
                let block =
                    Block { q, w: pairs.cast(), s, b, first, cols, piece, group_bits: format.group.trailing_zeros() };
                let token = |i: usize| tokens[i] as usize;
                let mut i = 0;
                while few && i < tokens.len() {
                    fold_one::<V>(block, x, w.cols, token(i), acc.add(ROWS * i));
                    i += 1;
                }
                while V::MANY && tokens.len() - i >= 12 {
                    fold::<V, 12>(block, x, w.cols, std::array::from_fn(|t| token(i + t)), acc.add(ROWS * i));
                    i += 12;
                }
                while tokens.len() - i >= 4 {
                    fold::<V, 4>(block, x, w.cols, std::array::from_fn(|t| token(i + t)), acc.add(ROWS * i));
                    i += 4;
                }
                while i < tokens.len() {
                    fold::<V, 1>(block, x, w.cols, [token(i)], acc.add(ROWS * i));
                    i += 1;
                }
            }
            for (i, &token) in tokens.iter().enumerate() {
                let y = V::load(acc.add(ROWS * i)).mul(V::splat(x.scales[token as usize]));
                y.store_first(tile[i * w.rows + first_row..][..rows].as_mut_ptr(), rows);
            }
        }
    }
}

simd! {
    fn in_lanes(w: Matrix, x: Int11, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) = grouped_lanes
}

/// Weights in groups times integers of 11 bits. `matmul` checked tokens and the lengths of `tile` and of `x.n`.
pub(super) fn grouped(isa: Isa, w: Matrix, x: Int11, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let n = x.n.len() / w.cols;
    let lengths = (x.steps.len(), x.sums.len(), x.scales.len());
    assert_eq!(lengths, (n * w.cols.div_ceil(GROUP), n * (w.cols / HALF), n), "steps, sums and scales of all tokens");
    let tiles = x.tiles.len();
    assert!(tiles == 0 || tiles == int11_tiles::count(n, w.cols), "{tiles} tiles of {n} tokens");
    #[cfg(target_arch = "x86_64")]
    if tiles > 0 && int11_tiles::are_wanted(isa, tokens.len()) && w.grouped().group >= HALF {
        // SAFETY: the lengths are checked, and tiles are wanted where an `Isa` says that the machine has them.
        return unsafe { int11_amx::product(&w, x, tokens, tile, scratch) };
    }
    #[cfg(target_arch = "x86_64")]
    if tokens.len() <= FEW && int11_decode::takes(isa, &w) {
        // SAFETY: the lengths are checked, and it takes what this `Isa` has instructions for.
        return unsafe { int11_decode::product(&w, x, tokens, tile, scratch) };
    }
    in_lanes(isa, w, x, tokens, tile, scratch);
}
