//! Integers of 11 bits times weights in groups.
//!
//! Integer sums of a piece (up to 64 columns of a weight group) are exact in any order; the one or two fmas of a piece follow in ascending order, in one accumulator.
//! Sixteen rows are unpacked, as many columns at a time as fit the first-level cache, and meet all tokens there: many tokens with two columns of each row side by
//! side, few tokens with each row by itself, since putting columns side by side takes longer than a token's products.
//!
//! Where weights have a zero in place of biases, `sum (q - zero) n` is `sum q n` from `-zero * sum n` on, which is a number of the token alone.

use crate::Isa;
#[cfg(target_arch = "x86_64")]
use crate::avx512::{affine_int11, block_int11, int11_amx};
use crate::dispatch::simd;
use crate::format::{Grouped, WeightFormat};
use crate::input::Int11;
use crate::instructions::int11_dot::{Int11Dot, ROWS, groups_of, side_by_side, transposed};
use crate::instructions::unpack::{unpack_columns, unpack_lanes};
use crate::int11::{GROUP, HALF};
use crate::int11_tiles;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// Columns that are unpacked at a time: whole blocks of every type.
const BLOCK: usize = 512;

/// Tokens that meet rows as they are.
const FEW: usize = 3;

/// The block's integers, row by row and then pair by pair; scales and biases of sixteen rows, and those of one after the other; the accumulators of each token, and
/// what it has for each piece.
fn sizes(cols: usize, group: usize, tokens: usize) -> [usize; 8] {
    let numbers = 4 * ROWS * groups_of(cols, group);
    let of_tokens = 4 * tokens * (cols / group.min(GROUP));
    [ROWS * BLOCK, 2 * ROWS * BLOCK, numbers, numbers, numbers, numbers, 4 * ROWS * tokens, of_tokens]
}

pub(super) fn scratch_bytes(format: Grouped, cols: usize, tokens: usize) -> usize {
    let bytes = cut_bytes(sizes(cols, format.group, tokens));
    #[cfg(target_arch = "x86_64")]
    let bytes = bytes.max(int11_amx::scratch_bytes(format, tokens)).max(affine_int11::scratch_bytes(cols));
    #[cfg(target_arch = "x86_64")]
    let bytes = bytes.max(block_int11::scratch_bytes(cols));
    bytes
}

/// Pieces of a block of columns, unpacked.
#[derive(Clone, Copy)]
struct Block {
    /// [16 rows, BLOCK]
    q: *const u8,
    /// [columns / 2, 16 rows, 2], without the zero
    w: *const i16,
    /// [groups of the block, 16 rows]
    s: *const f32,
    /// As `s`, where weights have biases.
    b: *const f32,
    /// [pieces of the block] of the first token, and words from one token to the next: see [`prepare`].
    of_tokens: *const f32,
    stride: usize,
    first: usize,
    cols: usize,
    /// Columns of a piece.
    piece: usize,
    /// Columns of a group are two to the power of this.
    group_bits: u32,
}

impl Block {
    /// Adds the sums of the piece at the block's column `k` to the accumulators `y` of token `i` of the list, which is row `token` of `x`.
    ///
    /// # Safety
    /// As for [`fold`].
    #[inline(always)]
    unsafe fn add<V: Int11Dot, const BIASED: bool>(
        &self,
        y: V,
        sums: V::Sums,
        k: usize,
        (x, cols): (Int11, usize),
        (i, token): (usize, usize),
    ) -> V {
        let at = (k >> self.group_bits) * ROWS;
        // SAFETY: the caller's; the column is one of the block, and so is its group.
        unsafe {
            let column = self.first + k;
            let y = V::load(self.s.add(at)).fma(V::to_f32(sums).mul(V::splat(step(x, cols, token, column))), y);
            if !BIASED {
                return y;
            }
            let halves = x.sums.as_ptr().add(token * (cols / HALF) + column / HALF);
            let sum = match self.piece {
                GROUP => *halves + *halves.add(1),
                HALF => *halves,
                _ => *self.of_token(i, k),
            };
            V::load(self.b.add(at)).fma(V::splat(sum), y)
        }
    }

    /// What [`prepare`] wrote for a token's piece.
    ///
    /// # Safety
    /// As for [`fold`].
    #[inline(always)]
    unsafe fn of_token(&self, i: usize, k: usize) -> *const f32 {
        // SAFETY: the caller's.
        unsafe { self.of_tokens.add(i * self.stride + k / self.piece) }
    }
}

/// The step of a token's integers around a column.
///
/// # Safety
/// The column is one of `cols`, the token a row of `x`.
#[inline(always)]
unsafe fn step(x: Int11, cols: usize, token: usize, column: usize) -> f32 {
    // SAFETY: the caller's.
    unsafe { *x.steps.as_ptr().add(token * cols.div_ceil(GROUP) + column / GROUP) }
}

/// Writes for each piece of some tokens the sum of their integers, `[tokens, pieces]`: times their step where weights have biases, else times `-zero`, as integers.
///
/// # Safety
/// The tokens are rows of `x`, and `to` has room.
#[inline(always)]
unsafe fn prepare(x: Int11, cols: usize, tokens: &[u32], piece: usize, zero: Option<i16>, to: *mut f32) {
    for (i, &token) in tokens.iter().enumerate() {
        let (token, pieces) = (token as usize, cols / piece);
        for (p, n) in x.n[token * cols..][..cols].chunks_exact(piece).enumerate() {
            let mut sum = 0;
            for sixteen in n.as_chunks::<16>().0 {
                sum += sixteen.iter().map(|n| i32::from(*n)).sum::<i32>();
            }
            // SAFETY: the caller's.
            unsafe {
                let to = to.add(i * pieces + p);
                match zero {
                    Some(zero) => *to.cast() = -i32::from(zero) * sum,
                    None => *to = sum as f32 * step(x, cols, token, p * piece),
                }
            }
        }
    }
}

/// Takes token `i` of the list, row `token` of `x`, through a block of rows as they are. Its accumulators are at `acc`.
///
/// # Safety
/// As for [`fold`].
#[inline(always)]
unsafe fn fold_one<V: Int11Dot, const BIASED: bool>(
    block: Block,
    x: (Int11, usize),
    (i, token): (usize, usize),
    acc: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let (mut y, row) = (V::load(acc), x.0.n.as_ptr().add(token * x.1 + block.first));
        let mut k = 0;
        while k < block.cols {
            let (q, n) = (block.q.add(k), row.add(k));
            if block.piece < HALF {
                let [mut a, mut b] = V::half_row_sums(q, BLOCK, n);
                if !BIASED {
                    a = V::add_to_all(a, *block.of_token(i, k).cast());
                    b = V::add_to_all(b, *block.of_token(i, k + HALF / 2).cast());
                }
                y = block.add::<V, BIASED>(y, a, k, x, (i, token));
                y = block.add::<V, BIASED>(y, b, k + HALF / 2, x, (i, token));
                k += HALF;
                continue;
            }
            let mut sums = V::row_sums(q, BLOCK, n, block.piece);
            if !BIASED {
                sums = V::add_to_all(sums, *block.of_token(i, k).cast());
            }
            y = block.add::<V, BIASED>(y, sums, k, x, (i, token));
            k += block.piece;
        }
        y.store(acc);
    }
}

/// Takes T tokens from token `i` of the list on, which are rows `tokens` of `x.0`, through a block, whose accumulators are at `acc`.
///
/// # Safety
/// The tokens are rows with `x.1` columns, `acc` holds T times sixteen, and the instruction set of `V` is available.
// Plain loops over arrays of constant length: closures over vectors may not be inlined.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn fold<V: Int11Dot, const BIASED: bool, const T: usize>(
    block: Block,
    x: (Int11, usize),
    (i, tokens): (usize, [usize; T]),
    acc: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut y = [V::splat(0.0); T];
        let mut rows = [x.0.n.as_ptr(); T];
        for t in 0..T {
            y[t] = V::load(acc.add(ROWS * t));
            rows[t] = rows[t].add(tokens[t] * x.1 + block.first);
        }
        let mut k = 0;
        while k < block.cols {
            let mut sums = [V::zero(); T];
            for pair in k / 2..(k + block.piece) / 2 {
                let w = V::load(block.w.add(2 * ROWS * pair).cast());
                for t in 0..T {
                    sums[t] = V::add_pairs(sums[t], w, rows[t].add(2 * pair));
                }
            }
            for t in 0..T {
                y[t] = block.add::<V, BIASED>(y[t], sums[t], k, x, (i + t, tokens[t]));
            }
            k += block.piece;
        }
        for t in 0..T {
            y[t].store(acc.add(ROWS * t));
        }
    }
}

/// Takes all tokens through a block.
///
/// # Safety
/// As for [`fold`], for all tokens.
#[inline(always)]
unsafe fn fold_all<V: Int11Dot, const BIASED: bool>(
    block: Block,
    x: (Int11, usize),
    tokens: &[u32],
    few: bool,
    acc: *mut f32,
) {
    let token = |i: usize| tokens[i] as usize;
    let mut i = 0;
    // SAFETY: the caller's.
    unsafe {
        while few && i < tokens.len() {
            fold_one::<V, BIASED>(block, x, (i, token(i)), acc.add(ROWS * i));
            i += 1;
        }
        while V::MANY && tokens.len() - i >= 12 {
            fold::<V, BIASED, 12>(block, x, (i, std::array::from_fn(|t| token(i + t))), acc.add(ROWS * i));
            i += 12;
        }
        while tokens.len() - i >= 4 {
            fold::<V, BIASED, 4>(block, x, (i, std::array::from_fn(|t| token(i + t))), acc.add(ROWS * i));
            i += 4;
        }
        while i < tokens.len() {
            fold::<V, BIASED, 1>(block, x, (i, [token(i)]), acc.add(ROWS * i));
            i += 1;
        }
    }
}

// As in `fold`.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn grouped_lanes<V: Int11Dot>(w: Matrix, x: Int11, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let (format, (zero, biased)) = (w.grouped(), w.format.zero());
    let (piece, zero) = (format.group.min(GROUP), zero as i16);
    let few = tokens.len() <= FEW;
    let [q, pairs, by_row, biases_by_row, s, b, acc, of_tokens] =
        scratch.cut(sizes(w.cols, format.group, tokens.len()));
    let (pairs, by_row, biases_by_row) = (pairs.cast::<f32>(), by_row.cast::<f32>(), biases_by_row.cast::<f32>());
    let (s, b, acc, of_tokens) = (s.cast::<f32>(), b.cast::<f32>(), acc.cast::<f32>(), of_tokens.cast::<f32>());
    let (unpacked, groups) = (w.format.is_unpacked(), groups_of(w.cols, format.group));
    if few && !biased || biased && piece < HALF {
        // SAFETY: `sizes` has room; tokens were checked by `grouped`.
        unsafe { prepare(x, w.cols, tokens, piece, (!biased).then_some(zero), of_tokens) };
    }
    for first_row in (0..w.rows).step_by(ROWS) {
        let rows = ROWS.min(w.rows - first_row);
        // SAFETY: `sizes` has room for what is written here; rows, columns and tokens were checked by `grouped`; a row that is not there is the last one again;
        // the caller vouches for the instruction set.
        unsafe {
            acc.write_bytes(0, ROWS * tokens.len());
            if !unpacked {
                let (mut row_s, mut row_b) = ([&w.scales[..0]; ROWS], [&w.scales[..0]; ROWS]);
                for r in 0..ROWS {
                    (row_s[r], row_b[r]) = w.row_scales(first_row + r.min(rows - 1));
                }
                side_by_side::<V>(format.scale, row_s, groups, by_row, s);
                side_by_side::<V>(format.scale, row_b, groups, by_row, b);
            }
            for first in (0..w.cols).step_by(BLOCK) {
                let cols = BLOCK.min(w.cols - first);
                let bytes = |cols: usize| packed_bytes(&w, cols);
                for r in 0..ROWS {
                    let row = first_row + r.min(rows - 1);
                    let from = w.row(row)[bytes(first)..].as_ptr();
                    // The next block, or the same rows of the next sixteen: their addresses are in no order that a processor foresees.
                    let ahead = if first + BLOCK < w.cols { bytes(BLOCK) } else { bytes(w.cols) * ROWS - bytes(first) };
                    for line in (0..bytes(BLOCK)).step_by(64) {
                        V::prefetch(from.wrapping_add(ahead + line));
                    }
                    let q = q.add(BLOCK * r);
                    if unpacked {
                        let (s, b) = (by_row.add(r * groups), biases_by_row.add(r * groups));
                        unpack_columns::<V>(&w, row, (first, cols), q, s, b);
                    } else {
                        unpack_lanes::<V>(format.packing, from, q, cols);
                    }
                }
                if unpacked {
                    let some = groups_of(cols, format.group);
                    transposed::<V>(by_row, groups, some, s);
                    if biased {
                        transposed::<V>(biases_by_row, groups, some, b);
                    }
                }
                for k in (0..if few { 0 } else { cols }).step_by(HALF) {
                    let mut lanes = [V::splat(0.0); ROWS];
                    for r in 0..ROWS {
                        lanes[r] = V::widen_pairs(q.add(BLOCK * r + k));
                        if !biased {
                            lanes[r] = V::less(lanes[r], zero);
                        }
                    }
                    let lanes = V::transpose16(lanes);
                    for pair in 0..ROWS {
                        lanes[pair].store(pairs.add((k / 2 + pair) * ROWS));
                    }
                }
                let group_bits = format.group.trailing_zeros();
                let behind = if unpacked { 0 } else { (first >> group_bits) * ROWS };
                let block = Block {
                    q,
                    w: pairs.cast(),
                    s: s.add(behind),
                    b: b.add(behind),
                    of_tokens: of_tokens.add(first / piece),
                    stride: w.cols / piece,
                    first,
                    cols,
                    piece,
                    group_bits,
                };
                if biased {
                    fold_all::<V, true>(block, (x, w.cols), tokens, few, acc);
                } else {
                    fold_all::<V, false>(block, (x, w.cols), tokens, few, acc);
                }
            }
            for (i, &token) in tokens.iter().enumerate() {
                let y = V::load(acc.add(ROWS * i)).mul(V::splat(x.scales[token as usize]));
                y.store_first(tile[i * w.rows + first_row..][..rows].as_mut_ptr(), rows);
            }
        }
    }
}

/// Bytes of `cols` columns of a row: whole blocks and groups.
fn packed_bytes(w: &Matrix, cols: usize) -> usize {
    match w.format {
        WeightFormat::Blocks(blocks) => cols / blocks.block_columns() * blocks.block_bytes(),
        WeightFormat::E2m1(_) => cols / 2,
        _ => cols / 8 * w.grouped().packing.bits(),
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
    if tiles > 0 && int11_tiles::are_wanted(isa, tokens.len()) && int11_amx::takes(&w) {
        // SAFETY: the lengths are checked, and tiles are wanted where an `Isa` says that the machine has them.
        return unsafe { int11_amx::product(&w, x, tokens, tile, scratch) };
    }
    #[cfg(target_arch = "x86_64")]
    if affine_int11::takes(isa, &w, tokens.len()) {
        // SAFETY: the lengths are checked, and it takes what this `Isa` has instructions for.
        return unsafe { affine_int11::product(&w, x, tokens, tile, scratch) };
    }
    #[cfg(target_arch = "x86_64")]
    if block_int11::takes(isa, &w, tokens.len()) {
        // SAFETY: as above.
        return unsafe { block_int11::product(&w, x, tokens, tile, scratch) };
    }
    in_lanes(isa, w, x, tokens, tile, scratch);
}
