//! bf16 pairs with AVX-512, for many tokens.
//!
//! The sixteen lanes of the definition are sixteen independent sums until the end, so they need not share a register. A tile of rows is
//! rearranged in cache so that a register holds one pair of columns of sixteen rows. For each lane in turn a dozen tokens pass over
//! the tile, each with a pair that is broadcast to a register. The lanes' sums stay in scratch; at the end the tree adds registers.

use std::arch::x86_64::*;

use super::Avx512x16;
use crate::instructions::bf16_dot::Bf16Dot;
use crate::instructions::dot::Product;
use crate::instructions::f32_dot::Lanes;

/// Rows of a tile: two registers.
const ROWS: usize = 32;
/// Tokens at a time: with two registers of rows they take 24 accumulators.
const TOKENS: usize = 12;
/// Lanes of the definition.
const LANES: usize = 16;
/// Columns that pass at a time: those of a dozen tokens (24 KB) stay in the first-level cache while lane after lane reads them.
const COLS: usize = 1024;
/// Bytes from one token's piece to the next one's: pairs of the same columns of neighbouring tokens are in different banks of the first-level cache.
const X_STRIDE: usize = COLS * 2 + 64 + 40;
/// Bytes of rearranged tiles that one dozen of tokens passes over: they stay in the second-level cache.
const TILES: usize = 512 << 10;
/// f32 of a tile's sums.
const SUMS: usize = LANES * TOKENS * ROWS;

/// The layout of a product's tiles.
#[derive(Clone, Copy)]
struct Layout {
    /// Bytes of one lane of a piece of [`COLS`] columns: `[columns / 32, ROWS]` pairs, and a line, so that lanes are no power of two apart.
    lane: usize,
    /// Pieces of a tile, each `[LANES, lane bytes]`.
    pieces: usize,
    /// Tiles that are there at once.
    tiles: usize,
}

impl Layout {
    fn new(rows: usize, cols: usize) -> Layout {
        let (lane, pieces) = (cols.min(COLS).div_ceil(32) * ROWS * 4 + 64, cols.div_ceil(COLS));
        let tiles = (TILES / (pieces * LANES * lane)).max(1).min(rows.div_ceil(ROWS));
        Layout { lane, pieces, tiles }
    }

    fn tile(self) -> usize {
        self.pieces * LANES * self.lane
    }

    /// Bytes of the tiles, of a dozen tokens and of the tiles' sums: whole lines.
    fn sizes(self) -> [usize; 3] {
        [self.tiles * self.tile(), (TOKENS * X_STRIDE).next_multiple_of(64), self.tiles * SUMS * 4]
    }
}

pub(super) fn working_bytes(rows: usize, cols: usize) -> usize {
    Layout::new(rows, cols).sizes().iter().sum()
}

/// # Safety
/// The product's pointers hold what it says, `tiles` has [`working_bytes`] from the start of a line on, and the instruction set is there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512bf16,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn product(product: Product, tiles: *mut u8) {
    let layout = Layout::new(product.rows, product.cols);
    let [tile_bytes, x_bytes, _] = layout.sizes();
    // SAFETY: the three parts are contiguous.
    let (x, sums) = unsafe { (tiles.add(tile_bytes), tiles.add(tile_bytes + x_bytes).cast::<f32>()) };
    for first in (0..product.rows).step_by(layout.tiles * ROWS) {
        let count = layout.tiles.min((product.rows - first).div_ceil(ROWS));
        // SAFETY: rows, columns and tokens are the product's; the scratch holds the tiles, a dozen tokens and their sums.
        unsafe {
            for tile in 0..count {
                fill(&product, first + tile * ROWS, tiles.add(tile * layout.tile()), layout);
            }
            for i in (0..product.tokens.len()).step_by(TOKENS) {
                let tokens = &product.tokens[i..product.tokens.len().min(i + TOKENS)];
                for piece in 0..layout.pieces {
                    let k = piece * COLS;
                    let cols = COLS.min(product.cols - k);
                    for (t, &token) in tokens.iter().enumerate() {
                        let (from, to) = (product.x.add((token as usize * product.cols + k) * 2), x.add(t * X_STRIDE));
                        std::ptr::copy_nonoverlapping(from, to, cols * 2);
                        // Missing elements of the last 32 count as zeros.
                        std::ptr::write_bytes(to.add(cols * 2), 0, (cols.next_multiple_of(32) - cols) * 2);
                    }
                    for tile in 0..count {
                        let w = tiles.add(tile * layout.tile() + piece * LANES * layout.lane);
                        let sums = sums.add(tile * SUMS);
                        let steps = cols.div_ceil(32);
                        match tokens.len() {
                            1..=4 => pass::<4>(w, layout.lane, x, steps, sums, piece == 0),
                            5..=8 => pass::<8>(w, layout.lane, x, steps, sums, piece == 0),
                            _ => pass::<TOKENS>(w, layout.lane, x, steps, sums, piece == 0),
                        }
                    }
                }
                for tile in 0..count {
                    finish(&product, first + tile * ROWS, i..i + tokens.len(), sums.add(tile * SUMS));
                }
            }
        }
    }
}

/// Rearranges rows `r..r + ROWS` (the last row again where there is none) with all their columns.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512bf16,avx2,fma,f16c,bmi2")]
unsafe fn fill(product: &Product, r: usize, tile: *mut u8, layout: Layout) {
    // SAFETY: loads are masked where a row ends; the tile holds every lane of its pieces.
    unsafe {
        for step in 0..product.cols.div_ceil(32) {
            let n = (product.cols - step * 32).min(32);
            let mask = ((1u64 << n) - 1) as u32;
            let (piece, step_in_piece) = (step / (COLS / 32), step % (COLS / 32));
            for half in 0..2 {
                let mut pairs = [Avx512x16(_mm512_setzero_ps()); 16];
                for (i, pairs) in pairs.iter_mut().enumerate() {
                    let row = (r + 16 * half + i).min(product.rows - 1);
                    let p = product.w.add(row * product.w_stride + step * 64);
                    let p =
                        if n == 32 { _mm512_loadu_si512(p.cast()) } else { _mm512_maskz_loadu_epi16(mask, p.cast()) };
                    *pairs = Avx512x16(_mm512_castsi512_ps(p));
                }
                let pairs = Avx512x16::transpose16(pairs);
                let to = tile.add(piece * LANES * layout.lane + (step_in_piece * ROWS + 16 * half) * 4);
                for (lane, pairs) in pairs.into_iter().enumerate() {
                    pairs.store(to.add(lane * layout.lane).cast());
                }
            }
        }
    }
}

/// A piece of a tile times `32 * steps` columns of T tokens, added to the sums `[LANES, T, ROWS]`, which begin at +0 with the `first` piece.
// Plain loops over arrays of constant length: they unroll into registers.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512bf16,avx2,fma,f16c,bmi2")]
unsafe fn pass<const T: usize>(
    w: *const u8,
    lane_bytes: usize,
    x: *const u8,
    steps: usize,
    sums: *mut f32,
    first: bool,
) {
    // SAFETY: the caller vouches for the piece, the tokens and the sums.
    unsafe {
        for lane in 0..LANES {
            let (w, x) = (w.add(lane * lane_bytes), x.add(lane * 4));
            let sums = sums.add(lane * TOKENS * ROWS);
            let mut acc = [[Avx512x16(_mm512_setzero_ps()); 2]; T];
            if !first {
                for t in 0..T {
                    for half in 0..2 {
                        acc[t][half] = Avx512x16::load(sums.add(t * ROWS + 16 * half));
                    }
                }
            }
            for step in 0..steps {
                let w0 = Avx512x16::load_pair(w.add(step * ROWS * 4));
                let w1 = Avx512x16::load_pair(w.add(step * ROWS * 4 + 64));
                for t in 0..T {
                    let pair = x.add(t * X_STRIDE + step * 64).cast::<i32>().read_unaligned();
                    let pair = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(pair));
                    acc[t][0] = acc[t][0].mac_pair(w0, pair);
                    acc[t][1] = acc[t][1].mac_pair(w1, pair);
                }
            }
            for t in 0..T {
                for half in 0..2 {
                    acc[t][half].store(sums.add(t * ROWS + 16 * half));
                }
            }
        }
    }
}

/// Adds the lanes up and writes rows `r..` of the product's tokens `range`.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512bf16,avx2,fma,f16c,bmi2")]
unsafe fn finish(product: &Product, r: usize, range: std::ops::Range<usize>, sums: *const f32) {
    // SAFETY: the sums hold every lane; the mask ends with the last row.
    unsafe {
        for (t, i) in range.enumerate() {
            for from in (0..ROWS.min(product.rows - r)).step_by(16) {
                let mut lanes = [_mm512_setzero_ps(); LANES];
                for (lane, v) in lanes.iter_mut().enumerate() {
                    *v = _mm512_loadu_ps(sums.add((lane * TOKENS + t) * ROWS + from));
                }
                for half in [8, 4, 2, 1] {
                    for lane in 0..half {
                        lanes[lane] = _mm512_add_ps(lanes[lane], lanes[lane + half]);
                    }
                }
                let written = ((1u32 << (product.rows - r - from).min(16)) - 1) as u16;
                _mm512_mask_storeu_ps(product.out.add(i * product.out_stride + r + from), written, lanes[0]);
            }
        }
    }
}
