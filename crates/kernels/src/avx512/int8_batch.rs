//! Integer groups with AVX-512 VNNI, for some tokens: a step of several sequences, or a short prompt.
//!
//! As for many tokens, a tile of rows is arranged in cache with sixteen rows per register, so that no sum is spread over lanes. But the tile is read only a
//! few times, so making it must be cheap: 4-bit weights stay packed in it and are unpacked in registers, for up to [`MOST`] tokens at once. Tokens are
//! records of constant length, so that one pointer reaches all of them.

use std::arch::x86_64::*;

use super::int8_prefill::{
    TileScales, accumulate, fill_scales, joined, row_span, transpose, transposed_quads, unpack_tile, unpacked_bytes,
};
use super::spread::{first_bytes, spread};
use crate::format::Grouped;
use crate::format::packing::{Packing, with_packing, with_parts};
use crate::input::ORDER;
use crate::instructions::int8_dot::Groups;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// The most tokens for which 4-bit weights stay packed in the tile. With more, the tile is read often enough to unpack it once.
pub const SOME: usize = 32;
/// Rows of a tile: two registers.
const ROWS: usize = super::int8_prefill::ROWS;
/// Columns of a tile. Four weight groups of any size divide it, so that a tile begins with accumulator 0.
const COLS: usize = 512;
/// Tokens at a time: their integer sums and their scaled ones take half of the registers, and each register of weights serves all of them.
const MOST: usize = 8;
/// f32 of a token's accumulators: [4, ROWS].
const ACC: usize = 4 * ROWS;

/// Bytes of a token's columns of one tile: q, then `sx` per part of a weight group, then `mx` per weight group.
const fn record_bytes(part_columns: usize) -> usize {
    COLS + 2 * scales_bytes(part_columns)
}

/// Bytes of a tile's scales.
const fn scales_bytes(part_columns: usize) -> usize {
    COLS / part_columns * 4
}

fn sizes(cols: usize, tokens: usize, format: Grouped) -> [usize; 6] {
    let columns = format.part_columns();
    let (scales, tokens) = (scales_bytes(columns) * ROWS, tokens.min(SOME));
    let records = cols.div_ceil(COLS) * tokens * record_bytes(columns);
    [ROWS * COLS, scales, scales, tokens * ACC * 4, records, unpacked_bytes(format)]
}

pub(super) fn scratch_bytes(cols: usize, tokens: usize, format: Grouped) -> usize {
    cut_bytes(sizes(cols, tokens, format))
}

/// # Safety
/// `matmul` checked the lengths, there are more than `FEW` and at most `SOME` tokens, and the instruction set is there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe { with_packing!(w.grouped().packing, P => width::<P>(w, x, tokens, tile, scratch)) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn width<P: Packing>(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let format = w.grouped();
    let [q, s, b, acc, records, unpacked] = scratch.cut(sizes(w.cols, tokens.len(), format));
    let record_bytes = record_bytes(format.part_columns());
    let (scales, acc) = (TileScales { s: s.cast(), b: b.cast() }, acc.cast::<f32>());
    let (n, groups) = (tokens.len(), w.cols / format.group);
    // Tokens are divided evenly: a pass of few tokens does few products per register of weights.
    let passes = n.div_ceil(MOST);
    // SAFETY: the scratch holds a tile, and the accumulators and records of all tokens; rows, columns and tokens are inside their arrays.
    unsafe {
        Ahead::new::<P>(w, format, 0, 0, 0..ROWS).fetch(0, 1);
        record(&x, tokens, w.cols, format, records);
        for r in (0..w.rows).step_by(ROWS) {
            let halves = (w.rows - r).div_ceil(16).min(2);
            for k in (0..w.cols).step_by(COLS) {
                let cols = COLS.min(w.cols - k);
                let (next_r, next_k) = if k + COLS < w.cols { (r, k + COLS) } else { (r + ROWS, 0) };
                let unpacked_tile = w.format.is_unpacked().then(|| unpack_tile(w, (r, k), cols, unpacked));
                let (from, r0, k0) = unpacked_tile.as_ref().map_or((w, r, k), |tile| (tile, 0, 0));
                for half in 0..halves {
                    fill::<P>(from, r0 + 16 * half, k0, cols, q.add(64 * half));
                }
                fill_scales(from, format, r0, k0 / format.group, cols / format.group, &scales);
                let piece = records.add(k / COLS * n * record_bytes);
                for half in 0..halves {
                    for p in 0..passes {
                        let (all, at) = (passes * halves, half * passes + p);
                        let (from, to) = (n * p / passes, n * (p + 1) / passes);
                        let some = RowPass {
                            q: q.add(64 * half),
                            s: scales.s.add(16 * half),
                            b: scales.b.add(16 * half),
                            x: piece.add(from * record_bytes),
                            acc: acc.add(from * ACC + 16 * half),
                            groups: cols / format.group,
                            first: k == 0,
                            ahead: Ahead::new::<P>(w, format, next_r, next_k, ROWS * at / all..ROWS * (at + 1) / all),
                        };
                        with_parts!(format, PARTS, COLUMNS => match P::BITS {
                            4 => pass_some::<true, PARTS, COLUMNS>(&some, to - from),
                            _ => pass_some::<false, PARTS, COLUMNS>(&some, to - from),
                        });
                    }
                }
            }
            for i in 0..n {
                for half in 0..halves {
                    let acc = acc.add(i * ACC + 16 * half);
                    // Weight groups that are not there leave their accumulator at +0.
                    let lane =
                        |l: usize| if l < groups { _mm512_loadu_ps(acc.add(l * ROWS)) } else { _mm512_setzero_ps() };
                    let sum = _mm512_add_ps(_mm512_add_ps(lane(0), lane(2)), _mm512_add_ps(lane(1), lane(3)));
                    let written = ((1u32 << (w.rows - r - 16 * half).min(16)) - 1) as u16;
                    _mm512_mask_storeu_ps(tile.as_mut_ptr().add(i * w.rows + r + 16 * half), written, sum);
                }
            }
        }
    }
}

/// Lays out the tokens: `[pieces of COLS columns, tokens, record]`.
#[inline(always)]
unsafe fn record(x: &Groups, tokens: &[u32], cols: usize, format: Grouped, records: *mut u8) {
    let (columns, parts) = (format.part_columns(), format.parts());
    let (bytes, scales, tile_parts) = (record_bytes(columns), scales_bytes(columns), COLS / columns);
    for (i, &token) in tokens.iter().enumerate() {
        let at = |piece: usize| (piece * tokens.len() + i) * bytes;
        // SAFETY: the scratch holds a record for each token and piece.
        unsafe {
            for (piece, k) in (0..cols).step_by(COLS).enumerate() {
                let from = x.q.as_ptr().add(token as usize * cols + k);
                std::ptr::copy_nonoverlapping(from.cast(), records.add(at(piece)), COLS.min(cols - k));
            }
            x.parts(token as usize, cols, columns, |part, scale, sum| {
                let (to, part) = (records.add(at(part / tile_parts) + COLS).cast::<f32>(), part % tile_parts);
                *to.add(part) = scale;
                let mx = to.byte_add(scales).add(part / parts);
                *mx = if part % parts == 0 { sum } else { *mx + sum };
            });
        }
    }
}

/// Rows of the next tile, prefetched bit by bit while tokens pass over this one. Many prefetches at once would wait for each other.
struct Ahead {
    data: *const u8,
    /// Bytes of a row, and those of them that the tile reads.
    stride: usize,
    bytes: usize,
    scales: [*const u8; 2],
    scale_stride: usize,
    rows: usize,
}

impl Ahead {
    /// `rows` of the tile at (r, k). They may be past the last row, where the next call often continues.
    fn new<P: Packing>(w: &Matrix, format: Grouped, r: usize, k: usize, rows: std::ops::Range<usize>) -> Ahead {
        let (stride, scale_stride) = (w.row_bytes(), w.scale_row_bytes());
        let (from, bytes) = row_span::<P>(w, k, COLS.min(w.cols - k));
        let scales = (r + rows.start) * scale_stride + k / format.group * format.scale.size();
        Ahead {
            data: w.data.as_ptr().wrapping_add((r + rows.start) * stride + from),
            stride,
            bytes,
            scales: [w.scales, w.biases].map(|all| all.as_ptr().wrapping_add(scales)),
            scale_stride,
            rows: rows.len(),
        }
    }

    /// Fetches part `i` of `n`.
    #[inline(always)]
    unsafe fn fetch(&self, i: usize, n: usize) {
        for row in self.rows * i / n..self.rows * (i + 1) / n {
            // SAFETY: a prefetch does not fault; the caller has the instruction set.
            unsafe {
                for line in (0..self.bytes).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T1>(self.data.wrapping_add(row * self.stride + line).cast());
                }
                for scales in self.scales {
                    _mm_prefetch::<_MM_HINT_T1>(scales.wrapping_add(row * self.scale_stride).cast());
                }
            }
        }
    }
}

/// Rearranges sixteen rows from `r` on (the last row again where there is none) and columns `k..k + cols`: a register has four bytes of each row,
/// eight columns that stay packed at 4 bits, four columns of one byte each otherwise. Registers are `ROWS` double words apart.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn fill<P: Packing>(w: &Matrix, r: usize, k: usize, cols: usize, q: *mut u8) {
    const EIGHTS: [u8; 64] = {
        let (mut index, mut i) = ([0; 64], 0);
        while i < 64 {
            index[i] = (i % 16 / 8 * 8 + ORDER[i % 8]) as u8;
            i += 1;
        }
        index
    };
    let row_bytes = w.row_bytes();
    // SAFETY: reads whole groups of rows that are there; the tile holds sixteen rows of COLS columns.
    unsafe {
        let rows: [*const u8; 16] =
            std::array::from_fn(|i| w.data.as_ptr().add((r + i).min(w.rows - 1) * row_bytes + k / 8 * P::BITS));
        if P::BITS == 4 {
            for c in (0..cols).step_by(32) {
                let words = transposed_quads(&rows, c / 2, 16);
                for j in 0..4 {
                    _mm512_storeu_si512(q.add((c / 8 + j) * ROWS * 4).cast(), words[j]);
                }
            }
            return;
        }
        let order = _mm512_loadu_si512(EIGHTS.as_ptr().cast());
        for c in (0..cols).step_by(64) {
            let n = (cols - c).min(64);
            let mut some = [_mm512_setzero_si512(); 16];
            for i in 0..16 {
                let packed = first_bytes(rows[i].add(c / 8 * P::BITS), n / 8 * P::BITS);
                some[i] = _mm512_shuffle_epi8(spread::<P>(packed), order);
            }
            transpose(&mut some);
            for j in 0..n / 4 {
                _mm512_storeu_si512(q.add((c / 4 + j) * ROWS * 4).cast(), some[j]);
            }
        }
    }
}

/// Sixteen rows of a tile and some tokens.
struct RowPass {
    /// [columns / 8 or / 4, ROWS, 4], from the first of these rows on.
    q: *const u8,
    /// [weight groups, ROWS], likewise.
    s: *const f32,
    b: *const f32,
    /// [tokens, record]
    x: *const u8,
    /// [tokens, 4, ROWS], likewise.
    acc: *mut f32,
    /// Weight groups of the tile.
    groups: usize,
    /// The tile is the first of its rows: the accumulators start at +0.
    first: bool,
    ahead: Ahead,
}

/// [`pass`] for `tokens` tokens: 4 to [`MOST`], since there are more than [`FEW`](super::int8_decode::FEW) and they are divided evenly.
#[inline(always)]
unsafe fn pass_some<const PACKED: bool, const PARTS: usize, const COLUMNS: usize>(some: &RowPass, tokens: usize) {
    // SAFETY: the caller's.
    unsafe {
        match tokens {
            4 => pass::<PACKED, PARTS, COLUMNS, 4>(some),
            5 => pass::<PACKED, PARTS, COLUMNS, 5>(some),
            6 => pass::<PACKED, PARTS, COLUMNS, 6>(some),
            7 => pass::<PACKED, PARTS, COLUMNS, 7>(some),
            MOST => pass::<PACKED, PARTS, COLUMNS, MOST>(some),
            _ => unreachable!("{tokens} tokens in a pass"),
        }
    }
}

/// Sixteen rows times T tokens, added to their accumulators. A weight group has PARTS activation groups.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn pass<const PACKED: bool, const PARTS: usize, const COLUMNS: usize, const T: usize>(some: &RowPass) {
    // SAFETY: the caller vouches for the rows, the tokens and the accumulators.
    unsafe {
        let low = _mm512_set1_epi8(0x0f);
        let (record, scales) = (const { record_bytes(COLUMNS) }, const { scales_bytes(COLUMNS) });
        let four = |p: *const u8| _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
        for w in 0..some.groups {
            some.ahead.fetch(w, some.groups);
            let mut scaled = [_mm512_setzero_ps(); T];
            for part in 0..PARTS {
                let g = w * PARTS + part;
                let x = some.x.add(g * COLUMNS);
                let mut dots = [_mm512_setzero_si512(); T];
                let registers = if PACKED { COLUMNS / 8 } else { COLUMNS / 4 };
                let q = some.q.add(g * registers * ROWS * 4);
                for j in 0..registers {
                    let bytes = _mm512_loadu_si512(q.add(j * ROWS * 4).cast());
                    if PACKED {
                        // Even columns, and odd ones: the order of the activations.
                        let even = _mm512_and_si512(bytes, low);
                        let odd = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low);
                        for t in 0..T {
                            let x = x.add(t * record + 8 * j);
                            dots[t] = _mm512_dpbusd_epi32(dots[t], even, four(x));
                        }
                        for t in 0..T {
                            let x = x.add(t * record + 8 * j + 4);
                            dots[t] = _mm512_dpbusd_epi32(dots[t], odd, four(x));
                        }
                    } else {
                        for t in 0..T {
                            dots[t] = _mm512_dpbusd_epi32(dots[t], bytes, four(x.add(t * record + 4 * j)));
                        }
                    }
                }
                for t in 0..T {
                    let sx = _mm512_set1_ps(*some.x.add(t * record + COLS).cast::<f32>().add(g));
                    scaled[t] = joined(part, sx, dots[t], scaled[t]);
                }
            }
            let start = some.first && w < 4;
            let (s, b) = (_mm512_loadu_ps(some.s.add(w * ROWS)), _mm512_loadu_ps(some.b.add(w * ROWS)));
            for t in 0..T {
                let at = some.acc.add(t * ACC + w % 4 * ROWS);
                let mx = _mm512_set1_ps(*some.x.add(t * record + COLS + scales).cast::<f32>().add(w));
                accumulate(at, start, (s, b), scaled[t], mx);
            }
        }
    }
}
