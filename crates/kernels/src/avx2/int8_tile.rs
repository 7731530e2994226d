//! Integer groups for many tokens.
//!
//! A tile of rows is unpacked into cache: eight rows across a register, four columns of each, so that no sum is spread over lanes. A few tokens at a time
//! then pass over the tile. The four accumulators of the definition stay in scratch and are updated once per weight group. Meanwhile the next tile's bytes
//! are fetched.

use std::arch::x86_64::*;

use super::Avx2x16;
use super::int8_products::{COLS, Eights, Fours, PLANE, Products, ROWS, Sixes, Vnni};
use crate::format::Grouped;
use crate::input::GROUP;
use crate::instructions::int8_dot::Groups;
use crate::instructions::unpack::{unpack_columns, unpack_lanes, widen};
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// f32 of a token's accumulators.
const ACC: usize = 4 * ROWS;

/// Bytes of the pieces of scratch: two planes of the tile; its rows' scales and biases, all columns; the tokens' accumulators, `sx` and `mx`; rows that were unpacked, and the scales and biases of one.
fn sizes(cols: usize, tokens: usize, format: Grouped) -> [usize; 9] {
    let parts = cols / format.part_columns() * 4;
    let row = cols.max(COLS) / (GROUP / 2) * 4;
    [2 * PLANE, ROWS * parts, ROWS * parts, tokens * ACC * 4, tokens * parts, tokens * parts, PLANE, row, row]
}

pub(super) fn scratch_bytes(cols: usize, tokens: usize, format: Grouped) -> usize {
    cut_bytes(sizes(cols, tokens, format))
}

/// A tile of rows in cache.
struct Tile {
    /// One or two planes of [columns / 4, ROWS, 4]
    q: *mut u8,
    /// Of all columns: [weight groups, ROWS]
    s: *mut f32,
    b: *mut f32,
}

/// Some tokens on their way over a tile.
struct Few<'a> {
    tokens: &'a [u32],
    /// The integers of all tokens, and columns of a row.
    q: &'a [i8],
    row: usize,
    /// The tile's first column.
    k: usize,
    /// From the tile's first column on: [activation groups, tokens]
    sx: *const f32,
    /// The same for weight groups: [weight groups, tokens]
    mx: *const f32,
    /// [tokens, 4, ROWS]
    acc: *mut f32,
}

/// # Safety
/// As for [`Int8Dot::product`](crate::instructions::int8_dot::Int8Dot::product).
#[inline(always)]
pub(super) unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe {
        match w.format.bits() {
            ..=4 => rows::<Fours>(w, x, tokens, tile, scratch),
            5 | 6 => rows::<Sixes>(w, x, tokens, tile, scratch),
            _ => rows::<Eights>(w, x, tokens, tile, scratch),
        }
    }
}

/// The same with AVX-VNNI.
///
/// # Safety
/// As above, and AVX-VNNI is there.
pub unsafe fn product_vnni(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe { rows::<Vnni>(w, x, tokens, tile, scratch) }
}

/// Tokens of the next pass, where some are left.
fn tokens_of_pass<M: Products>(left: usize) -> usize {
    [M::TOKENS, 4, 2, 1].into_iter().find(|&n| n <= left).unwrap_or(0)
}

/// The product of all rows with all tokens, one tile after the other.
///
/// # Safety
/// As for [`product`], and the instruction set of `M` is there.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn rows<M: Products>(w: &Matrix, x: Groups, tokens: &[u32], out: &mut [f32], scratch: &mut Scratch) {
    let format = w.grouped();
    let (parts, groups, count) = (format.parts(), w.cols / format.group, tokens.len());
    let [q, s, b, acc, sx, mx, unpacked, row_s, row_b] = scratch.cut(sizes(w.cols, count, format));
    let tile = Tile { q, s: s.cast(), b: b.cast() };
    let (acc, sx, mx) = (acc.cast::<f32>(), sx.cast::<f32>(), mx.cast::<f32>());
    let row = Unpacked { q: unpacked, s: row_s.cast(), b: row_b.cast() };
    let (log_parts, mut i) = (parts.trailing_zeros(), 0);
    while i < count {
        let n = tokens_of_pass::<M>(count - i);
        for (t, &token) in tokens[i..i + n].iter().enumerate() {
            x.parts(token as usize, w.cols, format.part_columns(), |part, scale, sum| {
                // SAFETY: the scratch holds a number per group of each token.
                unsafe {
                    *sx.add(i * groups * parts + part * n + t) = scale;
                    let to = mx.add(i * groups + (part >> log_parts) * n + t);
                    *to = if part & (parts - 1) == 0 { sum } else { *to + sum };
                }
            });
        }
        i += n;
    }
    for r in (0..w.rows).step_by(ROWS) {
        for k in (0..w.cols).step_by(COLS) {
            let cols = COLS.min(w.cols - k);
            // SAFETY: rows, columns and tokens are inside their arrays, the tile, the sums and the accumulators in scratch; the caller vouches for the rest.
            unsafe {
                fill(w, (r, k), cols, M::IN_HALVES, &tile, &row);
                let (next, mut fetched, mut i) = (Next::after(w, r, k), 0, 0);
                while i < count {
                    let n = tokens_of_pass::<M>(count - i);
                    let end = ROWS * (i + n) / count;
                    next.fetch(fetched..end);
                    fetched = end;
                    let few = Few {
                        tokens: &tokens[i..i + n],
                        q: x.q,
                        row: w.cols,
                        k,
                        sx: sx.add(i * groups * parts + k / format.part_columns() * n),
                        mx: mx.add(i * groups + k / format.group * n),
                        acc: acc.add(i * ACC),
                    };
                    match n {
                        1 => pass_of_parts::<M, 1>(format, cols, &tile, &few),
                        2 => pass_of_parts::<M, 2>(format, cols, &tile, &few),
                        4 => pass_of_parts::<M, 4>(format, cols, &tile, &few),
                        _ => pass_of_parts::<M, 6>(format, cols, &tile, &few),
                    }
                    i += n;
                }
            }
        }
        let n = ROWS.min(w.rows - r);
        for i in 0..count {
            let to = &mut out[i * w.rows + r..][..n];
            // SAFETY: the scratch holds the accumulators of as many tokens; `to` holds a row for each of n.
            unsafe {
                let [low, high] = sum_lanes(acc.add(i * ACC), groups);
                if n == ROWS {
                    _mm256_storeu_ps(to.as_mut_ptr(), low);
                    _mm256_storeu_ps(to.as_mut_ptr().add(8), high);
                } else {
                    let mut sums = [0.0; ROWS];
                    _mm256_storeu_ps(sums.as_mut_ptr(), low);
                    _mm256_storeu_ps(sums.as_mut_ptr().add(8), high);
                    to.copy_from_slice(&sums[..n]);
                }
            }
        }
    }
}

/// The sums of a token's accumulators. Weight groups that are not there leave theirs at +0.
///
/// # Safety
/// The accumulators and AVX2 are there.
#[inline(always)]
unsafe fn sum_lanes(acc: *const f32, groups: usize) -> [__m256; 2] {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [_mm256_setzero_ps(); 2];
        for (half, sum) in sums.iter_mut().enumerate() {
            let mut lanes = [_mm256_setzero_ps(); 4];
            for (l, lane) in lanes.iter_mut().enumerate().take(groups) {
                *lane = _mm256_loadu_ps(acc.add(l * ROWS + 8 * half));
            }
            let [a, b, c, d] = lanes;
            *sum = _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d));
        }
        sums
    }
}

/// The bytes of the tile after that at (r, k).
struct Next<'a> {
    w: &'a Matrix<'a>,
    r: usize,
    /// Of a row.
    from: usize,
    bytes: usize,
}

impl Next<'_> {
    fn after<'a>(w: &'a Matrix<'a>, r: usize, k: usize) -> Next<'a> {
        let (r, k) = if k + COLS < w.cols { (r, k + COLS) } else { (r + ROWS, 0) };
        let row = w.row_bytes();
        Next { w, r, from: row * k / w.cols, bytes: row * COLS.min(w.cols - k) / w.cols }
    }

    /// Fetches some of its rows.
    ///
    /// # Safety
    /// AVX2 is there.
    #[inline(always)]
    unsafe fn fetch(&self, rows: std::ops::Range<usize>) {
        for r in self.r + rows.start..(self.r + rows.end).min(self.w.rows) {
            let from = self.w.data.as_ptr().wrapping_add(r * self.w.row_bytes() + self.from);
            for line in (0..self.bytes).step_by(64) {
                // SAFETY: any address may be fetched; the caller vouches for the instruction set.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast()) };
            }
        }
    }
}

/// Room for the tile's rows as bytes, and for the scales and biases of one.
struct Unpacked {
    q: *mut u8,
    s: *mut f32,
    b: *mut f32,
}

/// Unpacks rows `r..r + ROWS` (the last row again where there is none) and columns `k..k + cols` into the tile. Scales are there at once for all columns, unless blocks hold them.
///
/// # Safety
/// The columns are there, the tile and the room hold them, and so is AVX2.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn fill(w: &Matrix, (r, k): (usize, usize), cols: usize, in_halves: bool, tile: &Tile, row: &Unpacked) {
    let format = w.grouped();
    let (bits, is_unpacked) = (format.packing.bits(), w.format.is_unpacked());
    // Halves of bytes, and bytes, are taken from the matrix itself.
    let in_place = !is_unpacked && matches!(bits, 4 | 8);
    let packed = |i: usize| w.row((r + i).min(w.rows - 1));
    // SAFETY: the caller's.
    unsafe {
        for i in 0..ROWS {
            let number = (r + i).min(w.rows - 1);
            let (first, groups) = if is_unpacked {
                unpack_columns::<Avx2x16>(w, number, (k, cols), row.q.add(i * cols), row.s, row.b);
                (k / format.group, cols / format.group)
            } else {
                if !in_place {
                    let from = packed(i).as_ptr().add(k / 8 * bits);
                    unpack_lanes::<Avx2x16>(format.packing, from, row.q.add(i * cols), cols);
                }
                if k > 0 {
                    continue;
                }
                let (s, b) = w.row_scales(number);
                widen::<Avx2x16>(format.scale, s, row.s);
                widen::<Avx2x16>(format.scale, b, row.b);
                (0, w.cols / format.group)
            };
            for g in 0..groups {
                *tile.s.add((first + g) * ROWS + i) = *row.s.add(g);
                *tile.b.add((first + g) * ROWS + i) = *row.b.add(g);
            }
        }
        for half in 0..2 {
            let to = tile.q.add(32 * half);
            let mut rows = [std::ptr::null(); 8];
            for (i, from) in rows.iter_mut().enumerate() {
                let i = 8 * half + i;
                *from = if in_place { packed(i).as_ptr().add(k / 8 * bits) } else { row.q.add(i * cols).cast_const() };
            }
            match (in_place && bits == 4, in_halves) {
                (true, _) => from_nibbles(&rows, cols, to),
                (_, true) => from_bytes::<true>(&rows, cols, to),
                (_, false) => from_bytes::<false>(&rows, cols, to),
            }
        }
    }
}

/// Eight rows of four bits, to their places in the tile.
///
/// # Safety
/// Both ends hold the columns, and AVX2 is there.
#[inline(always)]
unsafe fn from_nibbles(rows: &[*const u8; 8], cols: usize, to: *mut u8) {
    // SAFETY: the caller's.
    unsafe {
        let low = _mm256_set1_epi8(15);
        for c in (0..cols).step_by(32) {
            // A double word has eight columns: the even ones in its lower halves of bytes.
            for (i, v) in transposed(quads(rows, c / 2)).into_iter().enumerate() {
                let to = to.add((c / 4 + 2 * i) * 4 * ROWS);
                _mm256_store_si256(to.cast(), _mm256_and_si256(v, low));
                _mm256_store_si256(to.add(4 * ROWS).cast(), _mm256_and_si256(_mm256_srli_epi16::<4>(v), low));
            }
        }
    }
}

/// Eight rows of bytes, to their places in the tile's planes.
///
/// # Safety
/// As above.
#[inline(always)]
unsafe fn from_bytes<const IN_HALVES: bool>(rows: &[*const u8; 8], cols: usize, to: *mut u8) {
    // SAFETY: the caller's.
    unsafe {
        let low = _mm256_set1_epi8(15);
        let order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        let order = _mm256_broadcastsi128_si256(order);
        for c in (0..cols).step_by(16) {
            let [a, b, d, e] = quads(rows, c);
            let in_order = [
                _mm256_shuffle_epi8(a, order),
                _mm256_shuffle_epi8(b, order),
                _mm256_shuffle_epi8(d, order),
                _mm256_shuffle_epi8(e, order),
            ];
            for (i, v) in transposed(in_order).into_iter().enumerate() {
                let to = to.add((c / 4 + i) * 4 * ROWS);
                if IN_HALVES {
                    _mm256_store_si256(to.cast(), _mm256_and_si256(v, low));
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(v), low);
                    _mm256_store_si256(to.add(PLANE).cast(), high);
                } else {
                    _mm256_store_si256(to.cast(), v);
                }
            }
        }
    }
}

/// Sixteen bytes at offset `at` of each row: register i has rows i and 4 + i.
///
/// # Safety
/// The bytes and AVX2 are there.
#[inline(always)]
unsafe fn quads(rows: &[*const u8; 8], at: usize) -> [__m256i; 4] {
    // SAFETY: the caller's.
    unsafe {
        let mut all = [_mm256_setzero_si256(); 4];
        for (i, both) in all.iter_mut().enumerate() {
            let (first, second) =
                (_mm_loadu_si128(rows[i].add(at).cast()), _mm_loadu_si128(rows[4 + i].add(at).cast()));
            *both = _mm256_set_m128i(second, first);
        }
        all
    }
}

/// Register j has double word j of all eight rows.
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
unsafe fn transposed([a, b, c, d]: [__m256i; 4]) -> [__m256i; 4] {
    // SAFETY: the caller's.
    unsafe {
        let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab_low, cd_low),
            _mm256_unpackhi_epi64(ab_low, cd_low),
            _mm256_unpacklo_epi64(ab_high, cd_high),
            _mm256_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}

/// [`pass`], compiled once for each number of parts, with the instruction set.
///
/// # Safety
/// As for [`pass`].
#[inline(always)]
unsafe fn pass_of_parts<M: Products, const T: usize>(format: Grouped, cols: usize, tile: &Tile, few: &Few) {
    // SAFETY: the caller's.
    unsafe {
        match (M::HAS_VNNI, format.parts()) {
            (false, 1) => pass_avx2::<M, 1, T>(format, cols, tile, few),
            (false, 2) => pass_avx2::<M, 2, T>(format, cols, tile, few),
            (false, _) => pass_avx2::<M, 4, T>(format, cols, tile, few),
            (true, 1) => pass_vnni::<M, 1, T>(format, cols, tile, few),
            (true, 2) => pass_vnni::<M, 2, T>(format, cols, tile, few),
            (true, _) => pass_vnni::<M, 4, T>(format, cols, tile, few),
        }
    }
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn pass_avx2<M: Products, const PARTS: usize, const T: usize>(
    format: Grouped,
    cols: usize,
    tile: &Tile,
    few: &Few,
) {
    // SAFETY: the caller's.
    unsafe { pass::<M, PARTS, T>(format, cols, tile, few) }
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,bmi2,avxvnni")]
unsafe fn pass_vnni<M: Products, const PARTS: usize, const T: usize>(
    format: Grouped,
    cols: usize,
    tile: &Tile,
    few: &Few,
) {
    // SAFETY: the caller's.
    unsafe { pass::<M, PARTS, T>(format, cols, tile, few) }
}

/// `cols` columns of the tile times those of T tokens, added to their accumulators.
///
/// # Safety
/// The tokens' columns, the tile, the accumulators and the instruction set are there.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn pass<M: Products, const PARTS: usize, const T: usize>(format: Grouped, cols: usize, tile: &Tile, few: &Few) {
    let (group, columns) = (format.group, format.part_columns());
    let mut x = [few.q.as_ptr(); T];
    for t in 0..T {
        x[t] = few.q.as_ptr().wrapping_add(few.tokens[t] as usize * few.row + few.k);
    }
    let scales = few.k / group * ROWS;
    // SAFETY: the caller's.
    unsafe {
        let (s, b) = (tile.s.add(scales), tile.b.add(scales));
        for w in 0..cols / group {
            let mut scaled = [[_mm256_setzero_ps(); 2]; T];
            for part in 0..PARTS {
                let g = w * PARTS + part;
                let mut at = x;
                for t in 0..T {
                    at[t] = x[t].add(g * columns);
                }
                let sums = M::sums::<T>(columns / 4, tile.q.add(g * columns * ROWS), at);
                for t in 0..T {
                    let sx = _mm256_set1_ps(*few.sx.add(g * T + t));
                    for half in 0..2 {
                        let sums = _mm256_cvtepi32_ps(sums[t][half]);
                        let joined = scaled[t][half];
                        scaled[t][half] =
                            if part == 0 { _mm256_mul_ps(sx, sums) } else { _mm256_fmadd_ps(sx, sums, joined) };
                    }
                }
            }
            // The accumulators of a row begin at +0.
            let begins = few.k == 0 && w < 4;
            for half in 0..2 {
                let s = _mm256_loadu_ps(s.add(w * ROWS + 8 * half));
                let b = _mm256_loadu_ps(b.add(w * ROWS + 8 * half));
                for t in 0..T {
                    let at = few.acc.add(t * ACC + w % 4 * ROWS + 8 * half);
                    let acc = if begins { _mm256_setzero_ps() } else { _mm256_loadu_ps(at) };
                    let mx = _mm256_set1_ps(*few.mx.add(w * T + t));
                    _mm256_storeu_ps(at, _mm256_fmadd_ps(b, mx, _mm256_fmadd_ps(s, scaled[t][half], acc)));
                }
            }
        }
    }
}
