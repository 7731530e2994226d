//! Integers of 11 bits times weights in groups, for many tokens, with AMX. The integers are two slices of bytes, `n = 256 h + l`. Tile registers compute both
//! slices' sums of a piece, of 16 tokens and 32 rows, and store them in the first-level cache. Vectors join the slices in integers, `256 H + L`, and fold:
//! one conversion, one multiplication and two fmas for 64 columns. Blocks are unpacked first. Where weights have a zero in place of biases, the tile has signed bytes,
//! `q - zero`.

use std::arch::x86_64::*;
use std::ops::Range;

use super::amx::{SIDE, Tiles};
use super::int8_prefill::{ROWS, Tile, TileScales, fill, fill_scales, prefetch, unpack_tile, unpacked_bytes};
use crate::format::Grouped;
use crate::format::packing::{Packing, U8, with_packing};
use crate::input::{Int11, ORDER, TILE_COLUMNS, TOKENS, TokenTile};
use crate::int11::{GROUP, HALF};
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// Blocks of 32 rows that meet some tokens before the next ones come.
const BLOCKS: usize = 2;
/// Columns of a tile of rows. Both blocks' bytes (32 KB) and the sums of two pieces (8 KB) stay in the first-level cache; tokens pass through it.
const COLS: usize = 512;
/// Sums of a piece: [2 slices, tokens, ROWS].
const SUMS: usize = 2 * TOKENS * ROWS;
/// Columns of the least group.
const LEAST: usize = 16;
/// Pieces whose sums are folded together, so that accumulators are read and written once for them.
const FOLDED: usize = 2;

/// Integers of both blocks; scales and biases of their groups; accumulators [tokens / 16, BLOCKS, 16, ROWS]; sums; tokens that do not lie side by side;
/// a block's rows before they are put side by side.
fn sizes(format: Grouped, tokens: usize) -> [usize; 7] {
    let scales = BLOCKS * ROWS * COLS / LEAST * 4;
    let acc = tokens.next_multiple_of(TOKENS) * BLOCKS * ROWS * 4;
    let room = COLS / GROUP * size_of::<TokenTile>();
    [BLOCKS * ROWS * COLS, scales, scales, acc, FOLDED * SUMS * 4, room, unpacked_bytes(format)]
}

pub fn scratch_bytes(format: Grouped, tokens: usize) -> usize {
    cut_bytes(sizes(format, tokens))
}

/// Whether the matrix is one for this kernel: sums of less than 32 columns of a token are not laid out.
pub fn takes(w: &Matrix) -> bool {
    w.grouped().group >= HALF || !w.format.zero().1
}

/// # Safety
/// `matmul` checked the lengths, the tokens are laid out in tiles, [`takes`] says so of the matrix, and the machine has tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub unsafe fn product(w: &Matrix, x: Int11, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's; the tiles are shaped for the pieces, and released when it is over.
    unsafe {
        let tiles = match w.grouped().group {
            LEAST => Tiles::of_half_a_group(),
            HALF => Tiles::of_a_group(),
            _ => Tiles::whole(),
        };
        all_rows(&tiles, w, x, tokens, tile, scratch);
    }
}

/// What multiplies a piece.
trait Multiply {
    /// `to[0][t][r]` = sum over i of `low[t][i] * q[i][r]`, and `to[1]` the same with `high`, of 16 tokens, 32 rows and a piece.
    /// `low`, `high`: [16, 64]; `q`: [piece / 4, 32, 4], signed or not; `to`: [2, 16, 32].
    ///
    /// # Safety
    /// All of it is there.
    unsafe fn sums<const SIGNED: bool>(&self, low: *const u8, high: *const i8, q: *const u8, to: *mut i32);
}

impl Multiply for Tiles {
    #[inline(always)]
    unsafe fn sums<const SIGNED: bool>(&self, low: *const u8, high: *const i8, q: *const u8, to: *mut i32) {
        // SAFETY: the caller's.
        unsafe { self.slices::<SIGNED>((low, high), q, to) }
    }
}

#[inline(always)]
unsafe fn all_rows<M: Multiply>(by: &M, w: &Matrix, x: Int11, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe {
        let ((_, biased), group) = (w.format.zero(), w.grouped().group);
        match (biased, group) {
            (false, LEAST) => width::<M, U8, LEAST, false>(by, w, x, tokens, tile, scratch),
            (false, _) => width::<M, U8, HALF, false>(by, w, x, tokens, tile, scratch),
            (true, HALF) => {
                with_packing!(w.grouped().packing, F => width::<M, F, HALF, true>(by, w, x, tokens, tile, scratch))
            }
            (true, _) => {
                with_packing!(w.grouped().packing, F => width::<M, F, GROUP, true>(by, w, x, tokens, tile, scratch))
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn width<M: Multiply, F: Packing, const PIECE: usize, const BIASED: bool>(
    by: &M,
    w: &Matrix,
    x: Int11,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let (format, groups) = (w.grouped(), w.cols.div_ceil(GROUP));
    let [q, s, b, acc, sums, room, unpacked] = scratch.cut(sizes(format, tokens.len()));
    let (s, b, acc, sums, room) = (s.cast::<f32>(), b.cast::<f32>(), acc.cast::<f32>(), sums.cast(), room.cast());
    let cached = |block: usize| Tile {
        q: q.wrapping_add(block * ROWS * COLS),
        scales: TileScales {
            s: s.wrapping_add(block * ROWS * COLS / LEAST),
            b: b.wrapping_add(block * ROWS * COLS / LEAST),
        },
    };
    let accumulators = |p: usize, block: usize| acc.wrapping_add((p * BLOCKS + block) * TOKENS * ROWS);
    let passes = tokens.len().div_ceil(TOKENS);
    for r in (0..w.rows).step_by(BLOCKS * ROWS) {
        let blocks = (w.rows - r).div_ceil(ROWS).min(BLOCKS);
        // SAFETY: rows, columns and tokens are inside their arrays, all else in scratch.
        unsafe {
            acc.write_bytes(0, passes * BLOCKS * TOKENS * ROWS);
            for k in (0..w.cols).step_by(COLS) {
                let cols = COLS.min(w.cols - k);
                let (next_r, next_k) = if k + COLS < w.cols { (r, k + COLS) } else { (r + BLOCKS * ROWS, 0) };
                let next_cols = COLS.min(w.cols - next_k);
                for block in 0..blocks {
                    let (cached, first, groups) = (cached(block), r + block * ROWS, cols / format.group);
                    if w.format.is_unpacked() {
                        let w = unpack_tile(w, (first, k), cols, unpacked);
                        fill::<F>(&w, 0, 0, cols, &cached);
                        fill_scales(&w, format, 0, 0, groups, &cached.scales);
                    } else {
                        fill::<F>(w, first, k, cols, &cached);
                        fill_scales(w, format, first, k / format.group, groups, &cached.scales);
                    }
                    if !BIASED {
                        subtract(cached.q, ROWS * cols, w.format.zero().0 as u8);
                    }
                }
                for (p, some) in tokens.chunks(TOKENS).enumerate() {
                    let ahead = |p: usize| BLOCKS * ROWS * p / passes;
                    prefetch::<F>(w, format, (next_r, next_k), next_cols, ahead(p)..ahead(p + 1));
                    let tokens = laid_out(&x, groups, some, (k / GROUP, cols.div_ceil(GROUP)), room);
                    let few = Few { tokens, count: some.len(), cols, group: format.group, sums };
                    for block in 0..blocks {
                        pass::<M, PIECE, BIASED>(by, &cached(block), &few, accumulators(p, block));
                    }
                }
            }
            for (i, &token) in tokens.iter().enumerate() {
                let scale = _mm512_set1_ps(x.scales[token as usize]);
                for half in 0..2 * blocks {
                    let first = r + 16 * half;
                    let from = accumulators(i / TOKENS, half / 2).add(i % TOKENS * ROWS + half % 2 * 16);
                    let written = ((1u32 << (w.rows.saturating_sub(first)).min(16)) - 1) as u16;
                    let to = tile.as_mut_ptr().wrapping_add(i * w.rows + first);
                    _mm512_mask_storeu_ps(to, written, _mm512_mul_ps(_mm512_loadu_ps(from), scale));
                }
            }
        }
    }
}

/// Subtracts `zero` from `n` bytes, a multiple of 64.
///
/// # Safety
/// They are there, and the instruction set.
#[inline(always)]
unsafe fn subtract(q: *mut u8, n: usize, zero: u8) {
    // SAFETY: the caller's.
    unsafe {
        let zero = _mm512_set1_epi8(zero as i8);
        for i in (0..n).step_by(64) {
            let at = q.add(i).cast();
            _mm512_storeu_si512(at, _mm512_sub_epi8(_mm512_loadu_si512(at), zero));
        }
    }
}

/// The tiles of sixteen tokens, from group `first` on: where they are, if the tokens lie side by side, or a copy of `groups` of them in `room`. Tokens that are not there have
/// arbitrary integers.
///
/// # Safety
/// All tokens have tiles of `all` groups, and there is room for those that are asked for.
#[inline(always)]
unsafe fn laid_out(
    x: &Int11,
    all: usize,
    tokens: &[u32],
    (first, groups): (usize, usize),
    room: *mut TokenTile,
) -> *const TokenTile {
    let tile = |token: u32| x.tiles.as_ptr().wrapping_add(token as usize / TOKENS * all + first);
    let start = tokens[0];
    if (start as usize).is_multiple_of(TOKENS) && tokens.iter().zip(start..).all(|(&token, side)| token == side) {
        return tile(start);
    }
    for (t, &token) in tokens.iter().enumerate() {
        let lane = token as usize % TOKENS;
        for g in 0..groups {
            // SAFETY: the caller's.
            unsafe {
                let (from, to) = (&*tile(token).add(g), &mut *room.add(g));
                to.low[t] = from.low[lane];
                to.high[t] = from.high[lane];
                to.steps[t] = from.steps[lane];
                to.whole[t] = from.whole[lane];
                to.halves[0][t] = from.halves[0][lane];
                to.halves[1][t] = from.halves[1][lane];
            }
        }
    }
    room
}

/// Tokens on their way over a tile of rows.
struct Few {
    /// From the tile's first column on.
    tokens: *const TokenTile,
    count: usize,
    cols: usize,
    /// Columns of a weight group.
    group: usize,
    /// Room for sums of [`FOLDED`] pieces.
    sums: *mut i32,
}

/// A block of rows times up to sixteen tokens, added to their accumulators, [16, ROWS].
///
/// # Safety
/// All of it is there, and the instruction set.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn pass<M: Multiply, const PIECE: usize, const BIASED: bool>(by: &M, tile: &Tile, x: &Few, acc: *mut f32) {
    let pieces = x.cols / PIECE;
    for first in (0..pieces).step_by(FOLDED) {
        // SAFETY: the caller's.
        unsafe {
            multiply::<M, PIECE, BIASED>(by, tile, x, first..pieces.min(first + FOLDED));
            match pieces - first {
                1 => fold::<PIECE, BIASED, 1>(tile, x, first, acc),
                _ => fold::<PIECE, BIASED, FOLDED>(tile, x, first, acc),
            }
        }
    }
}

/// The sums of some pieces.
#[inline(always)]
unsafe fn multiply<M: Multiply, const PIECE: usize, const BIASED: bool>(
    by: &M,
    tile: &Tile,
    x: &Few,
    pieces: Range<usize>,
) {
    for (i, piece) in pieces.enumerate() {
        // SAFETY: the caller's.
        unsafe {
            let tokens = &*x.tokens.add(piece * PIECE / GROUP);
            let column = piece * PIECE % GROUP;
            let (low, high) =
                (tokens.low.as_ptr().cast::<u8>().add(column), tokens.high.as_ptr().cast::<i8>().add(column));
            let (q, to) = (tile.q.add(piece * PIECE * ROWS), x.sums.add(i * SUMS));
            if BIASED { by.sums::<false>(low, high, q, to) } else { by.sums::<true>(low, high, q, to) }
        }
    }
}

/// Adds pieces from `first` on, whose sums are there, to the accumulators.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn fold<const PIECE: usize, const BIASED: bool, const N: usize>(
    tile: &Tile,
    x: &Few,
    first: usize,
    acc: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let (mut s, mut b) = ([[_mm512_setzero_ps(); 2]; N], [[_mm512_setzero_ps(); 2]; N]);
        let (mut steps, mut totals) = ([std::ptr::null::<f32>(); N], [std::ptr::null::<f32>(); N]);
        for i in 0..N {
            let piece = first + i;
            let tokens = &*x.tokens.add(piece * PIECE / GROUP);
            steps[i] = tokens.steps.as_ptr();
            let half = piece % 2;
            totals[i] = if PIECE == GROUP { tokens.whole.as_ptr() } else { tokens.halves[half].as_ptr() };
            let at = piece * PIECE / x.group * ROWS;
            for half in 0..2 {
                s[i][half] = _mm512_loadu_ps(tile.scales.s.add(at + 16 * half));
                b[i][half] = _mm512_loadu_ps(tile.scales.b.add(at + 16 * half));
            }
        }
        for t in 0..x.count {
            let mut y = [_mm512_setzero_ps(); 2];
            for half in 0..2 {
                y[half] = _mm512_loadu_ps(acc.add(t * ROWS + 16 * half));
            }
            for i in 0..N {
                let step = _mm512_set1_ps(*steps[i].add(t));
                for half in 0..2 {
                    let at = x.sums.add(i * SUMS + t * ROWS + 16 * half);
                    let low = _mm512_loadu_si512(at.cast());
                    let high = _mm512_loadu_si512(at.add(TOKENS * ROWS).cast());
                    let joined = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low));
                    y[half] = _mm512_fmadd_ps(s[i][half], _mm512_mul_ps(joined, step), y[half]);
                    if BIASED {
                        y[half] = _mm512_fmadd_ps(b[i][half], _mm512_set1_ps(*totals[i].add(t)), y[half]);
                    }
                }
            }
            for half in 0..2 {
                _mm512_storeu_ps(acc.add(t * ROWS + 16 * half), y[half]);
            }
        }
    }
}

/// The low and the high bytes of a group's integers, in [`ORDER`] inside each eight columns.
///
/// # Safety
/// The instruction set is there.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub unsafe fn split(n: &[i16; GROUP], low: &mut [u8; GROUP], high: &mut [i8; GROUP]) {
    const fn bytes(of: usize) -> [u8; 64] {
        let (mut index, mut i) = ([0; 64], 0);
        while i < 64 {
            index[i] = (2 * (i / 8 * 8 + ORDER[i % 8]) + of) as u8;
            i += 1;
        }
        index
    }
    const LOW: [u8; 64] = bytes(0);
    const HIGH: [u8; 64] = bytes(1);
    // SAFETY: all arrays are as long as what is read and written.
    unsafe {
        let (first, second) = (_mm512_loadu_si512(n.as_ptr().cast()), _mm512_loadu_si512(n.as_ptr().add(32).cast()));
        for (index, to) in [(&LOW, low.as_mut_ptr()), (&HIGH, high.as_mut_ptr().cast::<u8>())] {
            let index = _mm512_loadu_si512(index.as_ptr().cast());
            _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi8(first, index, second));
        }
    }
}

const _: () = assert!(SIDE == TOKENS && 2 * SIDE == ROWS && TILE_COLUMNS == GROUP);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::format::{Activations, BlockFormat, Float, WeightFormat};
    use crate::input::Input;
    use crate::int11::encode_int11;
    use crate::int11_tiles::{count, lay_out};
    use crate::test_random::bits;
    use fastrand::Rng;

    /// Tile registers in plain code: rows of as many bytes as a piece has columns.
    struct Model {
        deep: usize,
    }

    impl Multiply for Model {
        unsafe fn sums<const SIGNED: bool>(&self, low: *const u8, high: *const i8, q: *const u8, to: *mut i32) {
            for t in 0..TOKENS {
                for r in 0..ROWS {
                    let (mut sums, at) = ([0; 2], t * ROWS + r);
                    for i in 0..self.deep {
                        // SAFETY: as `Multiply` has them.
                        unsafe {
                            let q = *q.add((i / 4 * ROWS + r) * 4 + i % 4);
                            let q = if SIGNED { i32::from(q as i8) } else { i32::from(q) };
                            sums[0] += i32::from(*low.add(t * GROUP + i)) * q;
                            sums[1] += i32::from(*high.add(t * GROUP + i)) * q;
                        }
                    }
                    // SAFETY: as above.
                    unsafe { (*to.add(at), *to.add(TOKENS * ROWS + at)) = (sums[0], sums[1]) };
                }
            }
        }
    }

    /// Compares products of a matrix of these planes with those of plain code.
    fn compare(format: WeightFormat, planes: &[Vec<u8>], (rows, cols, n): (usize, usize, usize), rng: &mut Rng) {
        let w = Matrix::new(format, rows, cols, planes.iter().map(Vec::as_slice)).unwrap();
        // Sizes of all kinds; a token that is not finite; and the greatest integers, which are 2^14.
        let x: Vec<f32> = (0..n * cols)
            .map(|i| match i / cols % 5 {
                0 => 0.999_99,
                1 if i % cols == 7 => f32::NAN,
                _ => (2.0 * rng.f32() - 1.0) * 2f32.powi(-rng.i32(0..12)),
            })
            .collect();
        let (mut q, mut steps) = (vec![0; x.len()], vec![0.0; n * cols.div_ceil(GROUP)]);
        let (mut sums, mut scales) = (vec![0.0; n * (cols / HALF)], vec![0.0; n]);
        encode_int11(Isa::GENERIC, &x, cols, &mut q, &mut steps, &mut sums, &mut scales);
        let x = Int11 { n: &q, steps: &steps, sums: &sums, scales: &scales, tiles: &[] };
        let mut tiles = vec![TokenTile::default(); count(n, cols)];
        for (block, tiles) in tiles.chunks_mut(cols.div_ceil(GROUP)).enumerate() {
            lay_out(Isa::GENERIC, &x, cols, block * TOKENS, tiles);
        }
        let x = Int11 { tiles: &tiles, ..x };
        let side_by_side: Vec<u32> = (0..n as u32).collect();
        let any: Vec<u32> = (0..n + 3).map(|_| rng.u32(0..n as u32)).collect();
        for tokens in [side_by_side, any] {
            let mut wanted = vec![0.0; tokens.len() * rows];
            let mode = Activations::Int11;
            let bytes = crate::matmul::scratch_bytes(format, cols, rows, tokens.len(), mode);
            let mut scratch = Scratch::with_bytes(bytes);
            let input = Input::Int11(x);
            crate::matmul::matmul(Isa::GENERIC, &w, 0..rows, input, &tokens, &mut wanted, &mut scratch);
            let mut got = vec![f32::NEG_INFINITY; wanted.len()];
            let model = Model { deep: w.grouped().group.min(GROUP) };
            // SAFETY: AVX-512 is there, and the model needs nothing else.
            unsafe { all_rows(&model, &w, x, &tokens, &mut got, &mut scratch) };
            assert_eq!(scratch.bytes(), bytes.next_multiple_of(64), "the scratch grew");
            let same = |x: &[f32]| -> Vec<u32> {
                bits(x).into_iter().zip(x).map(|(bits, x)| if x.is_nan() { !0 } else { bits }).collect()
            };
            assert_eq!(same(&got), same(&wanted), "{format:?}, {rows} x {cols}, {} tokens", tokens.len());
        }
    }

    #[test]
    fn tiles_and_vectors_give_the_bits_of_plain_code() {
        if !crate::avx512::is_supported() {
            return eprintln!("skipped: no AVX-512");
        }
        let mut rng = Rng::with_seed(11);
        for bits_of_weight in [2u8, 3, 4, 5, 6, 8] {
            for (group, scale) in [(32u16, Float::Bf16), (64, Float::F16), (128, Float::F32), (64, Float::Bf16)] {
                let format = WeightFormat::Affine { bits: bits_of_weight, group, scale };
                for (rows, cols, n) in [(70, 640, 40), (5, 128, 9), (64, 256, 16), (33, 384, 17)] {
                    let cols = if group == 32 { cols + 32 } else { cols };
                    let (width, groups) = (f64::from(bits_of_weight) / 8.0, rows * cols / group as usize);
                    let data: Vec<u8> = (0..(rows as f64 * cols as f64 * width) as usize).map(|_| rng.u8(..)).collect();
                    let mut floats = || -> Vec<u8> {
                        let bytes = |x: f32| match scale {
                            Float::F32 => x.to_le_bytes().to_vec(),
                            Float::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
                            Float::Bf16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
                        };
                        (0..groups).flat_map(|_| bytes(2.0 * rng.f32() - 1.0)).collect()
                    };
                    let (s, b) = (floats(), floats());
                    compare(format, &[data, s, b], (rows, cols, n), &mut rng);
                }
            }
        }
        for blocks in BlockFormat::ALL {
            let format = WeightFormat::Blocks(blocks);
            for (rows, columns, n) in [(70usize, 640usize, 40usize), (5, 128, 9), (33, 800, 17)] {
                let cols = columns.next_multiple_of(blocks.block_columns());
                let mut data = vec![0; rows * cols / blocks.block_columns() * blocks.block_bytes()];
                rng.fill(&mut data);
                blocks.set_size(&mut data, 1.0);
                if takes(&Matrix::new(format, rows, cols, [&data[..]]).unwrap()) {
                    compare(format, &[data], (rows, cols, n), &mut rng);
                }
            }
        }
    }
}
