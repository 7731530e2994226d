//! Integers of 11 bits times weights in groups.
//!
//! Integer sums of a piece (up to 64 columns of a weight group) are exact in any order; the two fmas of a piece follow in ascending order, in one accumulator.
//! Sixteen rows are unpacked, two columns of each side by side, as many columns at a time as fit the first-level cache, and meet all tokens there.

use crate::Isa;
#[cfg(target_arch = "x86_64")]
use crate::avx512::int11_amx;
use crate::dispatch::simd;
use crate::input::Int11;
use crate::instructions::int11_dot::Int11Dot;
use crate::instructions::unpack::unpack_lanes;
use crate::int11::{GROUP, HALF};
use crate::int11_tiles;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// Rows and columns that are unpacked at a time.
const ROWS: usize = 16;
const BLOCK: usize = 512;

/// Columns of the smallest piece.
const SMALL: usize = 16;

/// The block's integers, row by row and then pair by pair; scales and biases of its pieces; the accumulators of each token.
fn sizes(tokens: usize) -> [usize; 5] {
    [ROWS * BLOCK, 2 * ROWS * BLOCK, 4 * ROWS * BLOCK / SMALL, 4 * ROWS * BLOCK / SMALL, 4 * ROWS * tokens]
}

pub(super) fn scratch_bytes(tokens: usize) -> usize {
    let bytes = cut_bytes(sizes(tokens));
    #[cfg(target_arch = "x86_64")]
    let bytes = bytes.max(int11_amx::scratch_bytes(tokens));
    bytes
}

/// Pieces of a block of columns, unpacked.
#[derive(Clone, Copy)]
struct Block {
    /// [columns / 2, 16 rows, 2]
    w: *const i16,
    /// [pieces, 16 rows]
    s: *const f32,
    b: *const f32,
    first: usize,
    cols: usize,
    /// Columns of a piece.
    piece: usize,
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
            let at = k / block.piece * ROWS;
            let (s, b) = (V::load(block.s.add(at)), V::load(block.b.add(at)));
            for t in 0..T {
                let column = block.first + k;
                let step = *x.steps.as_ptr().add(tokens[t] * cols.div_ceil(GROUP) + column / GROUP);
                let halves = x.sums.as_ptr().add(tokens[t] * (cols / HALF) + column / HALF);
                let sum = match width {
                    GROUP => *halves + *halves.add(1),
                    HALF => *halves,
                    _ => (0..width).map(|i| i32::from(*rows[t].add(k + i))).sum::<i32>() as f32 * step,
                };
                y[t] = s.fma(V::to_f32(sums[t]).mul(V::splat(step)), y[t]);
                y[t] = b.fma(V::splat(sum), y[t]);
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
    let [q, pairs, s, b, acc] = scratch.cut(sizes(tokens.len()));
    let (pairs, s, b, acc) = (pairs.cast::<f32>(), s.cast::<f32>(), b.cast::<f32>(), acc.cast::<f32>());
    for first_row in (0..w.rows).step_by(ROWS) {
        let rows = ROWS.min(w.rows - first_row);
        // SAFETY: `sizes` has room for what is written here; rows, columns and tokens were checked by `grouped`; a row that is not there is the last one again;
        // the caller vouches for the instruction set.
        unsafe {
            acc.write_bytes(0, ROWS * tokens.len());
            for first in (0..w.cols).step_by(BLOCK) {
                let cols = BLOCK.min(w.cols - first);
                for r in 0..ROWS {
                    let from = &w.row(first_row + r.min(rows - 1))[first / 8 * format.packing.bits()..];
                    unpack_lanes::<V>(format.packing, from.as_ptr(), q.add(BLOCK * r), cols);
                }
                for k in (0..cols).step_by(HALF) {
                    let mut lanes = [V::splat(0.0); ROWS];
                    for r in 0..ROWS {
                        lanes[r] = V::widen_pairs(q.add(BLOCK * r + k));
                    }
                    let lanes = V::transpose16(lanes);
                    for pair in 0..ROWS {
                        lanes[pair].store(pairs.add((k / 2 + pair) * ROWS));
                    }
                }
                for r in 0..ROWS {
                    let (row_s, row_b) = w.row_scales(first_row + r.min(rows - 1));
                    for p in 0..cols.div_ceil(piece) {
                        let g = (first + p * piece) / format.group;
                        (*s.add(p * ROWS + r), *b.add(p * ROWS + r)) = format.scale_and_bias(row_s, row_b, g);
                    }
                }
                let block = Block { w: pairs.cast(), s, b, first, cols, piece };
                let token = |i: usize| tokens[i] as usize;
                let mut i = 0;
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
    in_lanes(isa, w, x, tokens, tile, scratch);
}
