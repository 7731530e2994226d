//! Integer groups for many tokens.
//!
//! A tile of rows is unpacked into cache in the layout of `vpdpbusd` and AMX: sixteen rows per register, four columns of each, so that
//! no sum is spread over lanes. A few tokens at a time then pass over the tile, by VNNI or AMX ([`Pass`]). The four
//! accumulators of the definition stay in scratch and are updated once per weight group. Meanwhile the next tile's bytes are prefetched.

use std::arch::x86_64::*;

use super::Avx512x16;
use super::spread::{first_bytes, spread};
use crate::format::packing::{Packing, with_packing, with_parts};
use crate::format::{Float, Grouped, WeightFormat};
use crate::input::ORDER;
use crate::instructions::int8_dot::Groups;
use crate::instructions::unpack::unpack_columns;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// Rows of a tile: two registers.
pub(super) const ROWS: usize = 32;
/// Columns of a tile: with their q (16 KB) and the activations of a few tokens they stay in the first-level cache. Four weight groups
/// of any size divide it, so that a tile begins with accumulator 0.
pub(super) const COLS: usize = 512;
/// f32 of a token's accumulators.
pub(super) const ACC: usize = 4 * ROWS;

/// How a few tokens pass over a tile.
///
/// # Safety
/// The instruction set is there, and what [`Few`] and [`Tile`] point to.
pub(super) trait Pass {
    /// Tokens at a time.
    const TOKENS: usize;
    /// Bytes of scratch besides.
    const ROOM: usize;
    /// The tile times `cols` columns of the tokens, added to their accumulators.
    unsafe fn pass(format: Grouped, cols: usize, tile: &Tile, x: &Few);
}

fn sizes<P: Pass>(cols: usize, tokens: usize, format: Grouped) -> [usize; 8] {
    let columns = format.part_columns();
    let (scales, tokens) = (COLS / columns * ROWS * 4, tokens.next_multiple_of(P::TOKENS));
    let groups = tokens * cols / columns * 4;
    [ROWS * COLS, scales, scales, tokens * ACC * 4, groups, groups, P::ROOM, unpacked_bytes(format)]
}

pub(super) fn scratch_bytes<P: Pass>(cols: usize, tokens: usize, format: Grouped) -> usize {
    cut_bytes(sizes::<P>(cols, tokens, format))
}

/// Bytes that [`unpack_tile`] takes, and the tile's scales and biases in them.
pub(super) fn unpacked_bytes(format: Grouped) -> usize {
    ROWS * COLS + 2 * unpacked_scales(format)
}

fn unpacked_scales(format: Grouped) -> usize {
    ROWS * COLS / format.part_columns() * 4
}

/// Rows `r..r + ROWS` and columns `k..k + cols` of a matrix, unpacked to `room`, row by row.
///
/// # Safety
/// The matrix is to be unpacked, the columns are whole blocks, and `room` has [`unpacked_bytes`]. The instruction set is there.
#[inline(always)]
pub(super) unsafe fn unpack_tile<'a>(w: &Matrix, (r, k): (usize, usize), cols: usize, room: *mut u8) -> Matrix<'a> {
    let (format, rows) = (w.grouped(), ROWS.min(w.rows - r));
    let groups = cols / format.group;
    // SAFETY: the room holds a tile of q and behind it the scales and biases.
    unsafe {
        let (s, b) = (room.add(ROWS * COLS), room.add(ROWS * COLS + unpacked_scales(format)));
        for i in 0..rows {
            let (s, b) = (s.cast::<f32>().add(i * groups), b.cast::<f32>().add(i * groups));
            unpack_columns::<Avx512x16>(w, r + i, (k, cols), room.add(i * cols), s, b);
        }
        let bytes = |p: *const u8, n: usize| std::slice::from_raw_parts(p, n);
        let scales = rows * groups * 4;
        Matrix::unpacked(w.format, (rows, cols), bytes(room, rows * cols), bytes(s, scales), bytes(b, scales))
    }
}

/// A tile of rows in cache.
pub(super) struct Tile {
    /// [columns / 4, ROWS, 4]
    pub q: *mut u8,
    pub scales: TileScales,
}

/// Up to [`Pass::TOKENS`] tokens on their way over a tile.
pub(super) struct Few<'a> {
    pub tokens: &'a [u32],
    /// The integers of all tokens, and columns of a row.
    pub q: &'a [i8],
    pub row: usize,
    /// The tile's first column.
    pub k: usize,
    /// From the tile's first column on: [activation groups, TOKENS]
    pub sx: *const f32,
    /// The same for weight groups: [weight groups, TOKENS]
    pub mx: *const f32,
    /// [TOKENS, 4, ROWS]
    pub acc: *mut f32,
    /// The tile is the first of its rows: the accumulators start at +0.
    pub first: bool,
    /// [`Pass::ROOM`] bytes.
    pub room: *mut u8,
}

impl Few<'_> {
    /// The integers of a token from the tile's first column on. Past the last token it is the last one again.
    pub fn integers(&self, t: usize) -> *const i8 {
        let token = self.tokens[t.min(self.tokens.len() - 1)] as usize;
        self.q.as_ptr().wrapping_add(token * self.row + self.k)
    }
}

/// The scales and biases of a tile of rows.
pub(super) struct TileScales {
    /// [weight groups, ROWS]
    pub s: *mut f32,
    /// [weight groups, ROWS]
    pub b: *mut f32,
}

/// # Safety
/// `matmul` checked the lengths, and the instruction set is there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn product<P: Pass>(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe { with_packing!(w.grouped().packing, F => width::<P, F>(w, x, tokens, tile, scratch)) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn width<P: Pass, F: Packing>(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let format = w.grouped();
    let [q, s, b, acc, sx, mx, room, unpacked] = scratch.cut(sizes::<P>(w.cols, tokens.len(), format));
    let cached = Tile { q, scales: TileScales { s: s.cast(), b: b.cast() } };
    let (acc, sx, mx) = (acc.cast::<f32>(), sx.cast::<f32>(), mx.cast::<f32>());
    let (parts, groups) = (format.parts(), w.cols / format.group);
    let log_parts = parts.trailing_zeros();
    for (i, &token) in tokens.iter().enumerate() {
        let (first, t) = (i / P::TOKENS * P::TOKENS, i % P::TOKENS);
        x.parts(token as usize, w.cols, format.part_columns(), |i, scale, sum| {
            // SAFETY: the scratch holds a number per group of each token, and of as many as fill the last pass.
            unsafe {
                *sx.add(first * groups * parts + i * P::TOKENS + t) = scale;
                let to = mx.add(first * groups + (i >> log_parts) * P::TOKENS + t);
                *to = if i & (parts - 1) == 0 { sum } else { *to + sum };
            }
        });
    }
    // SAFETY: the shell has the instruction set.
    unsafe { prefetch::<F>(w, format, (0, 0), COLS.min(w.cols), 0..ROWS) };
    let passes = tokens.len().div_ceil(P::TOKENS);
    for r in (0..w.rows).step_by(ROWS) {
        for k in (0..w.cols).step_by(COLS) {
            let cols = COLS.min(w.cols - k);
            let (next_r, next_k) = if k + COLS < w.cols { (r, k + COLS) } else { (r + ROWS, 0) };
            // SAFETY: rows, columns and tokens are inside their arrays, the tile, the sums and the accumulators in scratch.
            unsafe {
                if w.format.is_unpacked() {
                    let w = unpack_tile(w, (r, k), cols, unpacked);
                    fill::<F>(&w, 0, 0, cols, &cached);
                    fill_scales(&w, format, 0, 0, cols / format.group, &cached.scales);
                } else {
                    fill::<F>(w, r, k, cols, &cached);
                    fill_scales(w, format, r, k / format.group, cols / format.group, &cached.scales);
                }
                for (p, some) in tokens.chunks(P::TOKENS).enumerate() {
                    let (next_cols, rows) = (COLS.min(w.cols - next_k), ROWS * p / passes..ROWS * (p + 1) / passes);
                    prefetch::<F>(w, format, (next_r, next_k), next_cols, rows);
                    let i = p * P::TOKENS;
                    let sx = sx.add(i * groups * parts + k / format.part_columns() * P::TOKENS);
                    let mx = mx.add(i * groups + k / format.group * P::TOKENS);
                    let (q, row, acc, first) = (x.q, w.cols, acc.add(i * ACC), k == 0);
                    P::pass(format, cols, &cached, &Few { tokens: some, q, row, k, sx, mx, acc, first, room });
                }
            }
        }
        let written = ((1u64 << (w.rows - r).min(ROWS)) - 1) as u32;
        for i in 0..tokens.len() {
            // SAFETY: the mask ends with the last row.
            unsafe {
                let (acc, out) = (acc.add(i * ACC), tile.as_mut_ptr().add(i * w.rows + r));
                for half in 0..2 {
                    let lane = |l: usize| {
                        // Weight groups that are not there leave their accumulator at +0.
                        if l < groups { _mm512_loadu_ps(acc.add(l * ROWS + 16 * half)) } else { _mm512_setzero_ps() }
                    };
                    let sum = _mm512_add_ps(_mm512_add_ps(lane(0), lane(2)), _mm512_add_ps(lane(1), lane(3)));
                    _mm512_mask_storeu_ps(out.wrapping_add(16 * half), (written >> (16 * half)) as u16, sum);
                }
            }
        }
    }
}

/// Where columns `k..k + cols` begin in a row's bytes, and how many bytes they are.
#[inline(always)]
pub(super) fn row_span<F: Packing>(w: &Matrix, k: usize, cols: usize) -> (usize, usize) {
    let bytes = |cols: usize| match w.format {
        WeightFormat::Blocks(blocks) => cols / blocks.block_columns() * blocks.block_bytes(),
        WeightFormat::E2m1(_) => cols / 2,
        _ => cols / 8 * F::BITS,
    };
    (bytes(k), bytes(cols))
}

/// Prefetches some rows of the tile of `cols` columns at (r, k). Addresses past the end do no harm.
#[inline(always)]
pub(super) unsafe fn prefetch<F: Packing>(
    w: &Matrix,
    format: Grouped,
    (r, k): (usize, usize),
    cols: usize,
    rows: std::ops::Range<usize>,
) {
    let scale_bytes = w.scale_row_bytes();
    let (from, bytes) = row_span::<F>(w, k, cols);
    // SAFETY: a prefetch does not fault; the caller has the instruction set.
    unsafe {
        for row in r + rows.start..(r + rows.end).min(w.rows) {
            let at = w.data.as_ptr().wrapping_add(row * w.row_bytes() + from);
            for line in (0..bytes).step_by(64) {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(line).cast());
            }
            let scales = row * scale_bytes + k / format.group * format.scale.size();
            _mm_prefetch::<_MM_HINT_T0>(w.scales.as_ptr().wrapping_add(scales).cast());
            _mm_prefetch::<_MM_HINT_T0>(w.biases.as_ptr().wrapping_add(scales).cast());
        }
    }
}

/// Unpacks rows `r..r + ROWS` (the last row again where there is none) and columns `k..k + cols` into the tile.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn fill<F: Packing>(w: &Matrix, r: usize, k: usize, cols: usize, tile: &Tile) {
    const EIGHTS: [u8; 64] = {
        let (mut index, mut i) = ([0; 64], 0);
        while i < 64 {
            index[i] = (i % 16 / 8 * 8 + ORDER[i % 8]) as u8;
            i += 1;
        }
        index
    };
    let row_bytes = w.row_bytes();
    // Columns of a row in a register before the transposition: packed, at 4 bits.
    let width = if F::BITS == 4 { 128 } else { 64 };
    // SAFETY: reads whole groups of rows that are there; the tile holds ROWS x COLS.
    unsafe {
        let (order, low) = (_mm512_loadu_si512(EIGHTS.as_ptr().cast()), _mm512_set1_epi8(0x0f));
        for half in 0..2 {
            for c in (0..cols).step_by(width) {
                let n = (cols - c).min(width);
                let mut q = [_mm512_setzero_si512(); 16];
                for i in 0..16 {
                    let row = (r + 16 * half + i).min(w.rows - 1);
                    let p = w.data.as_ptr().add(row * row_bytes + (k + c) / 8 * F::BITS);
                    let packed = first_bytes(p, n / 8 * F::BITS);
                    q[i] = if F::BITS == 4 { packed } else { _mm512_shuffle_epi8(spread::<F>(packed), order) };
                }
                transpose(&mut q);
                let four = |j: usize| tile.q.add(((c / 4 + j) * ROWS + 16 * half) * 4);
                if F::BITS == 4 {
                    for j in 0..n / 8 {
                        _mm512_storeu_si512(four(2 * j).cast(), _mm512_and_si512(q[j], low));
                        let odd = _mm512_and_si512(_mm512_srli_epi16::<4>(q[j]), low);
                        _mm512_storeu_si512(four(2 * j + 1).cast(), odd);
                    }
                } else {
                    for j in 0..n / 4 {
                        _mm512_storeu_si512(four(j).cast(), q[j]);
                    }
                }
            }
        }
    }
}

/// The scales and biases of weight groups `g..g + groups` of those rows.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn fill_scales(w: &Matrix, format: Grouped, r: usize, g: usize, groups: usize, tile: &TileScales) {
    let (size, held) = (format.scale.size(), 16 / format.scale.size());
    // SAFETY: loads end with the groups; the tile holds ROWS numbers for each.
    unsafe {
        for half in 0..2 {
            for (from, to) in [(w.scales, tile.s), (w.biases, tile.b)] {
                let rows: [*const u8; 16] = std::array::from_fn(|i| {
                    from.as_ptr().add((r + 16 * half + i).min(w.rows - 1) * w.scale_row_bytes() + g * size)
                });
                for first in (0..groups).step_by(held) {
                    let n = (groups - first).min(held);
                    let words = transposed_quads(&rows, first * size, n * size);
                    for j in 0..n {
                        let numbers = match format.scale {
                            Float::F32 => words[j],
                            Float::Bf16 if j % 2 == 0 => _mm512_slli_epi32::<16>(words[j / 2]),
                            Float::Bf16 => _mm512_and_si512(words[j / 2], _mm512_set1_epi32(!0xffff)),
                            Float::F16 => {
                                let low = if j % 2 == 0 { words[j / 2] } else { _mm512_srli_epi32::<16>(words[j / 2]) };
                                _mm512_castps_si512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(low)))
                            }
                        };
                        _mm512_storeu_si512(to.add((first + j) * ROWS + 16 * half).cast(), numbers);
                    }
                }
            }
        }
    }
}

/// The first `n` (up to 16) bytes at offset `at` of each row, transposed: register j has double word j of all sixteen, zeros where there are none.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
pub(super) unsafe fn transposed_quads(rows: &[*const u8; 16], at: usize, n: usize) -> [__m512i; 4] {
    // SAFETY: the mask keeps loads inside the caller's bytes; the caller vouches for the instruction set.
    unsafe {
        // Register i has rows i, 4 + i, 8 + i, 12 + i: then a transposition inside of quads leaves the rows in order.
        let mut some = [_mm512_setzero_si512(); 4];
        for i in 0..4 {
            let v = _mm512_castsi128_si512(quad(rows[i].add(at), n));
            let v = _mm512_inserti32x4::<1>(v, quad(rows[4 + i].add(at), n));
            let v = _mm512_inserti32x4::<2>(v, quad(rows[8 + i].add(at), n));
            some[i] = _mm512_inserti32x4::<3>(v, quad(rows[12 + i].add(at), n));
        }
        let [a, b, c, d] = some;
        let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(ab_low, cd_low),
            _mm512_unpackhi_epi64(ab_low, cd_low),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}

/// The first `n` (up to 16) bytes at `p`, zeros behind; reads no further.
#[inline(always)]
unsafe fn quad(p: *const u8, n: usize) -> __m128i {
    // SAFETY: the mask keeps the load inside the caller's bytes.
    unsafe {
        if n == 16 { _mm_loadu_si128(p.cast()) } else { _mm_maskz_loadu_epi8(((1u32 << n) - 1) as u16, p.cast()) }
    }
}

/// Transposes 16 x 16 double words.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
pub(super) unsafe fn transpose(q: &mut [__m512i; 16]) {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let mut p = *q;
        for i in 0..8 {
            p[2 * i] = _mm512_unpacklo_epi32(q[2 * i], q[2 * i + 1]);
            p[2 * i + 1] = _mm512_unpackhi_epi32(q[2 * i], q[2 * i + 1]);
        }
        // Now rows 4i..4i + 4: q[4i + j] has, in quad c, column 4c + j of four rows.
        for i in 0..4 {
            q[4 * i] = _mm512_unpacklo_epi64(p[4 * i], p[4 * i + 2]);
            q[4 * i + 1] = _mm512_unpackhi_epi64(p[4 * i], p[4 * i + 2]);
            q[4 * i + 2] = _mm512_unpacklo_epi64(p[4 * i + 1], p[4 * i + 3]);
            q[4 * i + 3] = _mm512_unpackhi_epi64(p[4 * i + 1], p[4 * i + 3]);
        }
        // Quads to their places: column 4c + j gathers quad c of q[j], q[4 + j], q[8 + j], q[12 + j].
        for j in 0..4 {
            let (a, b, c, d) = (q[j], q[4 + j], q[8 + j], q[12 + j]);
            let (ab_low, ab_high) =
                (_mm512_shuffle_i32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b));
            let (cd_low, cd_high) =
                (_mm512_shuffle_i32x4::<0b10_00_10_00>(c, d), _mm512_shuffle_i32x4::<0b11_01_11_01>(c, d));
            p[j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(ab_low, cd_low);
            p[8 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(ab_low, cd_low);
            p[4 + j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(ab_high, cd_high);
            p[12 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(ab_high, cd_high);
        }
        *q = p;
    }
}

/// Adds the sums of activation group `part` of a weight group to the scaled sums of those before it, for sixteen rows.
#[inline(always)]
pub(super) unsafe fn joined(part: usize, sx: __m512, sums: __m512i, scaled: __m512) -> __m512 {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let sums = _mm512_cvtepi32_ps(sums);
        if part == 0 { _mm512_mul_ps(sx, sums) } else { _mm512_fmadd_ps(sx, sums, scaled) }
    }
}

/// Adds a weight group to sixteen accumulators, which `start` at +0: its rows' scales and biases, and a token's joined sums and `mx`.
#[inline(always)]
pub(super) unsafe fn accumulate(at: *mut f32, start: bool, (s, b): (__m512, __m512), scaled: __m512, mx: __m512) {
    // SAFETY: the caller vouches for the instruction set and the accumulators.
    unsafe {
        let acc = if start { _mm512_setzero_ps() } else { _mm512_loadu_ps(at) };
        _mm512_storeu_ps(at, _mm512_fmadd_ps(b, mx, _mm512_fmadd_ps(s, scaled, acc)));
    }
}

/// Integer sums by VNNI, in registers.
pub(super) struct Vectors;

impl Pass for Vectors {
    /// With two registers of rows, twelve integer sums, twelve scaled ones and what feeds them fill the 32 registers.
    const TOKENS: usize = 6;
    const ROOM: usize = 0;

    #[inline(always)]
    unsafe fn pass(format: Grouped, cols: usize, tile: &Tile, x: &Few) {
        // SAFETY: the caller's.
        unsafe {
            with_parts!(format, PARTS, COLUMNS => match x.tokens.len() {
                1 | 2 => pass::<PARTS, COLUMNS, 2>(cols, tile, x),
                3 | 4 => pass::<PARTS, COLUMNS, 4>(cols, tile, x),
                _ => pass::<PARTS, COLUMNS, 6>(cols, tile, x),
            })
        }
    }
}

/// [`Pass::pass`] of T tokens; past the last one it is computed again, into accumulators of its own.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn pass<const PARTS: usize, const COLUMNS: usize, const T: usize>(cols: usize, tile: &Tile, x: &Few) {
    const TOKENS: usize = Vectors::TOKENS;
    let q: [_; T] = std::array::from_fn(|t| x.integers(t));
    // SAFETY: the caller vouches for the tokens' columns, the tile and the accumulators.
    unsafe {
        for w in 0..cols / (PARTS * COLUMNS) {
            let mut scaled = [[_mm512_setzero_ps(); 2]; T];
            for part in 0..PARTS {
                let g = w * PARTS + part;
                let mut dots = [[_mm512_setzero_si512(); 2]; T];
                let rows = tile.q.add(g * COLUMNS * ROWS);
                for j in 0..COLUMNS / 4 {
                    let q0 = _mm512_loadu_si512(rows.add(j * 4 * ROWS).cast());
                    let q1 = _mm512_loadu_si512(rows.add(j * 4 * ROWS + 64).cast());
                    for t in 0..T {
                        let four = _mm512_set1_epi32(q[t].add(g * COLUMNS + j * 4).cast::<i32>().read_unaligned());
                        dots[t][0] = _mm512_dpbusd_epi32(dots[t][0], q0, four);
                        dots[t][1] = _mm512_dpbusd_epi32(dots[t][1], q1, four);
                    }
                }
                for t in 0..T {
                    let sx = _mm512_set1_ps(*x.sx.add(g * TOKENS + t));
                    for half in 0..2 {
                        scaled[t][half] = joined(part, sx, dots[t][half], scaled[t][half]);
                    }
                }
            }
            let start = x.first && w < 4;
            for half in 0..2 {
                let s = _mm512_loadu_ps(tile.scales.s.add(w * ROWS + 16 * half));
                let b = _mm512_loadu_ps(tile.scales.b.add(w * ROWS + 16 * half));
                for t in 0..T {
                    let at = x.acc.add(t * ACC + w % 4 * ROWS + 16 * half);
                    let mx = _mm512_set1_ps(*x.mx.add(w * TOKENS + t));
                    accumulate(at, start, (s, b), scaled[t][half], mx);
                }
            }
        }
    }
}
