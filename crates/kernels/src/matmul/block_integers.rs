//! Integers of 11 bits times weights that are floats of sixteen bits, which become integers of 11 bits under an exponent of their piece.
//!
//! A piece is half of 64 columns: four runs of eight, every other one (`docs/numerics.md`). Its sum is exact in any order; one fma of a piece follows, in ascending order, in one
//! accumulator. Sixteen rows are rounded, two columns of each side by side, as many columns at a time as fit the first-level cache, and meet all tokens there.

use crate::Isa;
use crate::dispatch::simd;
use crate::format::{Float, WeightFormat};
use crate::input::Int11;
use crate::instructions::int11_dot::Int11Dot;
use crate::int11::{GROUP, HALF};
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// Rows and columns that are rounded at a time.
const ROWS: usize = 16;
const BLOCK: usize = 512;
/// Columns of a run.
const RUN: usize = 8;
/// Pieces of a group of columns, and pairs of columns in one.
const PIECES: usize = 2;
const PAIRS: usize = GROUP / PIECES / 2;

/// Bits of a weight's integer.
const BITS: i32 = 11;
/// The least exponent of a piece. So the product of a piece's unit and its sum is a normal number, and exact.
const LEAST: i32 = -60;
/// Sizes of bf16 from here on, 2^100, are treated as infinite.
const TOO_BIG: u16 = (100 + 127) << 7;
/// Sizes of f16 from here on are infinite, or no numbers.
const F16_INFINITE: u16 = 0x7c00;
/// The block's integers, pair by pair; units of its pieces; the accumulators of each token.
fn sizes(tokens: usize) -> [usize; 3] {
    [2 * ROWS * BLOCK, 4 * ROWS * BLOCK / GROUP * PIECES, 4 * ROWS * tokens]
}

pub(super) fn scratch_bytes(tokens: usize) -> usize {
    cut_bytes(sizes(tokens))
}

/// 2^e of a normal number.
#[inline(always)]
fn power(e: i32) -> f32 {
    f32::from_bits(((e + 127) as u32) << 23)
}

/// What elements of a piece whose greatest size has these bits are multiplied with before they are rounded, and their integers afterwards.
#[inline(always)]
fn factors(float: Float, most: u16) -> (f32, f32) {
    let (e, infinite) = match float {
        // Below the normal numbers: a 2^-24.
        Float::F16 if most < 0x400 => (16 - most.leading_zeros() as i32 - 24, false),
        Float::F16 => (i32::from(most >> 10) - 14, most >= F16_INFINITE),
        _ => (i32::from(most >> 7) - 126, most >= TOO_BIG),
    };
    let e = e.max(LEAST);
    if infinite { (0.0, f32::NAN) } else { (power(BITS - e), power(e - BITS)) }
}

/// Columns of sixteen rows as integers.
#[derive(Clone, Copy)]
struct Block {
    /// [groups, 2 pieces, 16 pairs, 16 rows, 2]
    w: *const i16,
    /// [groups, 2 pieces, 16 rows]
    units: *const f32,
    first: usize,
    cols: usize,
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
        for t in 0..T {
            y[t] = V::load(acc.add(ROWS * t));
        }
        let mut rests = [[0i16; GROUP]; T];
        for g in 0..block.cols.div_ceil(GROUP) {
            let column = block.first + g * GROUP;
            let mut rows = [x.n.as_ptr(); T];
            for t in 0..T {
                rows[t] = rows[t].add(tokens[t] * cols + column);
                if cols - column < GROUP {
                    // Columns that are missing are zeros.
                    let rest = cols - column;
                    rests[t][..rest].copy_from_slice(&x.n[tokens[t] * cols + column..][..rest]);
                    rows[t] = rests[t].as_ptr();
                }
            }
            for piece in 0..PIECES {
                let w = block.w.add((g * PIECES + piece) * PAIRS * 2 * ROWS);
                let mut sums = [V::zero(); T];
                for pair in 0..PAIRS {
                    let at = (pair / 4 * 2 + piece) * RUN + pair % 4 * 2;
                    let w = V::load(w.add(2 * ROWS * pair).cast());
                    for t in 0..T {
                        sums[t] = V::add_pairs(sums[t], w, rows[t].add(at));
                    }
                }
                let unit = V::load(block.units.add((g * PIECES + piece) * ROWS));
                for t in 0..T {
                    let step = *x.steps.as_ptr().add(tokens[t] * cols.div_ceil(GROUP) + column / GROUP);
                    y[t] = unit.fma(V::to_f32(sums[t]).mul(V::splat(step)), y[t]);
                }
            }
        }
        for t in 0..T {
            y[t].store(acc.add(ROWS * t));
        }
    }
}

/// Rounds a group of columns of sixteen rows, whose elements are there.
///
/// # Safety
/// `rows` have a group each, `w` and `units` have room for one, and the instruction set of `V` is available.
// As in `fold`.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn round_group<V: Int11Dot>(float: Float, rows: [*const u16; ROWS], w: *mut i16, units: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let mut by = [[0f32; PIECES]; ROWS];
        for r in 0..ROWS {
            let most = V::greatest_of_runs(rows[r]);
            for piece in 0..PIECES {
                (by[r][piece], *units.add(piece * ROWS + r)) = factors(float, most[piece]);
            }
        }
        for half in 0..2 {
            let mut lanes = [V::splat(0.0); ROWS];
            for r in 0..ROWS {
                let from = rows[r].add(half * HALF);
                lanes[r] = if float == Float::F16 { V::round_f16(from, by[r]) } else { V::round_bf16(from, by[r]) };
            }
            let lanes = V::transpose16(lanes);
            for pair in 0..ROWS {
                // Runs take turns among the pieces.
                let to = pair / 4 % 2 * PAIRS + half * PAIRS / 2 + pair / 8 * 4 + pair % 4;
                lanes[pair].store(w.add(to * 2 * ROWS).cast());
            }
        }
    }
}

// As in `fold`.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn direct_lanes<V: Int11Dot>(
    float: Float,
    w: Matrix,
    x: Int11,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let [pairs, units, acc] = scratch.cut(sizes(tokens.len()));
    let (pairs, units, acc) = (pairs.cast::<i16>(), units.cast::<f32>(), acc.cast::<f32>());
    for first_row in (0..w.rows).step_by(ROWS) {
        let rows = ROWS.min(w.rows - first_row);
        // SAFETY: `sizes` has room for what is written here; rows, columns and tokens were checked by `direct`; a row that is not there is the last one again;
        // the caller vouches for the instruction set.
        unsafe {
            acc.write_bytes(0, ROWS * tokens.len());
            let mut rests = [[0u16; GROUP]; ROWS];
            for first in (0..w.cols).step_by(BLOCK) {
                let cols = BLOCK.min(w.cols - first);
                for g in 0..cols.div_ceil(GROUP) {
                    let column = first + g * GROUP;
                    let mut from = [w.data.as_ptr().cast::<u16>(); ROWS];
                    for r in 0..ROWS {
                        from[r] = from[r].add((first_row + r.min(rows - 1)) * w.cols + column);
                        if w.cols - column < GROUP {
                            // Columns that are missing are zeros.
                            let bytes = 2 * (w.cols - column);
                            std::ptr::copy_nonoverlapping(from[r].cast::<u8>(), rests[r].as_mut_ptr().cast(), bytes);
                            from[r] = rests[r].as_ptr();
                        }
                    }
                    let at = g * PIECES * ROWS;
                    round_group::<V>(float, from, pairs.add(at * 2 * PAIRS), units.add(at));
                }
                let block = Block { w: pairs, units, first, cols };
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
    fn in_lanes(float: Float, w: Matrix, x: Int11, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) = direct_lanes
}

/// Floats of sixteen bits times integers of 11 bits. `matmul` checked tokens and the lengths of `tile` and of `x.n`.
pub(super) fn direct(isa: Isa, w: Matrix, x: Int11, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let WeightFormat::Float(float @ (Float::F16 | Float::Bf16)) = w.format else {
        panic!("{:?} has no sixteen bits", w.format)
    };
    let n = x.n.len() / w.cols;
    assert_eq!((x.steps.len(), x.scales.len()), (n * w.cols.div_ceil(GROUP), n), "steps and scales of all tokens");
    in_lanes(isa, float, w, x, tokens, tile, scratch);
}
