//! Integer groups for many tokens with AMX. Tile registers compute an activation group's sums of 16 tokens and 32 rows and store them in the first-level cache;
//! from there on it is the same as with VNNI. On the processors that we measured, tiles and vectors compete, and this is no faster than VNNI (docs/experiments.md).

use std::arch::x86_64::*;

use super::amx::{SIDE, Tiles};
use super::int8_prefill::{self, ACC, COLS, Few, Pass, ROWS, Tile, accumulate, joined};
use crate::format::Grouped;
use crate::format::packing::with_parts;
use crate::input::GROUP;
use crate::instructions::int8_dot::Groups;
use crate::matrix::Matrix;
use crate::scratch::Scratch;

/// Activation groups of a weight group at most.
const MAX_PARTS: usize = 4;
/// Sums of an activation group.
const SUMS: usize = SIDE * ROWS;

pub(super) fn scratch_bytes(cols: usize, tokens: usize, format: Grouped) -> usize {
    int8_prefill::scratch_bytes::<InTiles>(cols, tokens, format)
}

/// # Safety
/// `matmul` checked the lengths, weight groups have whole activation groups, and the instruction set is there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's; released when it is over.
    unsafe {
        let _tiles = Tiles::of_a_group();
        int8_prefill::product::<InTiles>(w, x, tokens, tile, scratch);
    }
}

/// Integer sums in tile registers, which are shaped.
struct InTiles;

impl Pass for InTiles {
    const TOKENS: usize = SIDE;
    /// Sums of a weight group, [parts, tokens, ROWS], and a copy of the tokens' integers where they are not contiguous.
    const ROOM: usize = MAX_PARTS * SUMS * 4 + SIDE * COLS;

    #[inline(always)]
    unsafe fn pass(format: Grouped, cols: usize, tile: &Tile, x: &Few) {
        // SAFETY: the caller's.
        unsafe { with_parts!(format, PARTS, _COLUMNS => pass::<PARTS>(cols, tile, x)) }
    }
}

/// The tokens' integers: the address of the first, and the strides in bytes of tokens and of groups. Missing tokens have arbitrary integers.
///
/// # Safety
/// There are `cols` columns of each token, and room for as many of sixteen.
unsafe fn laid_out(cols: usize, x: &Few, room: *mut i8) -> (*const i8, usize, usize) {
    if x.tokens.len() == SIDE && x.tokens.windows(2).all(|two| two[0] + 1 == two[1]) {
        return (x.integers(0), x.row, GROUP);
    }
    for t in 0..x.tokens.len() {
        for g in 0..cols / GROUP {
            // SAFETY: the caller's.
            unsafe { room.add((g * SIDE + t) * GROUP).copy_from_nonoverlapping(x.integers(t).add(g * GROUP), GROUP) };
        }
    }
    (room, GROUP, SIDE * GROUP)
}

/// [`Pass::pass`].
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn pass<const PARTS: usize>(cols: usize, tile: &Tile, x: &Few) {
    let sums = x.room.cast::<i32>();
    // SAFETY: the room holds the sums and behind them the tokens; the caller vouches for the tokens' columns, the tile and the accumulators.
    unsafe {
        let (q, from_token, from_group) = laid_out(cols, x, sums.add(MAX_PARTS * SUMS).cast());
        for w in 0..cols / (PARTS * GROUP) {
            for part in 0..PARTS {
                let g = w * PARTS + part;
                let q = (q.add(g * from_group), from_token);
                Tiles::group(q, tile.q.add(g * GROUP * ROWS), sums.add(part * SUMS));
            }
            let s = [0, 16].map(|half| _mm512_loadu_ps(tile.scales.s.add(w * ROWS + half)));
            let b = [0, 16].map(|half| _mm512_loadu_ps(tile.scales.b.add(w * ROWS + half)));
            let start = x.first && w < 4;
            for t in 0..x.tokens.len() {
                let mx = _mm512_set1_ps(*x.mx.add(w * SIDE + t));
                for half in 0..2 {
                    let mut scaled = _mm512_setzero_ps();
                    for part in 0..PARTS {
                        let sx = _mm512_set1_ps(*x.sx.add((w * PARTS + part) * SIDE + t));
                        let sums = _mm512_loadu_si512(sums.add(part * SUMS + t * ROWS + 16 * half).cast());
                        scaled = joined(part, sx, sums, scaled);
                    }
                    let at = x.acc.add(t * ACC + w % 4 * ROWS + 16 * half);
                    accumulate(at, start, (s[half], b[half]), scaled, mx);
                }
            }
        }
    }
}
