//! Integer groups for many tokens.
//!
//! A tile of rows is unpacked into cache: eight rows across a register, four columns of each, so that no sum is spread over lanes. A few tokens at a time
//! then pass over the tile. The four accumulators of the definition stay in scratch and are updated once per weight group. Meanwhile the next tile's bytes
//! are fetched.

use std::arch::x86_64::*;

use super::Avx2x16;
use crate::format::Grouped;
use crate::format::packing::PackingName;
use crate::input::GROUP;
use crate::instructions::int8_dot::Groups;
use crate::instructions::unpack::{unpack_columns, unpack_lanes, widen};
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// Rows of a tile: two registers.
const ROWS: usize = 16;
/// Columns of a tile: with the activations of a few tokens its integers (8 KB, or 16 in two planes) stay in the first-level cache. Four weight groups of any
/// size divide it, so that a tile begins with accumulator 0.
const COLS: usize = 512;
/// Tokens of a pass: with two registers of rows, eight sums and what feeds them fill the registers. Tokens that are left over pass one by one.
const TOKENS: usize = 4;
/// f32 of a token's accumulators.
const ACC: usize = 4 * ROWS;
/// Bytes of a plane of the tile.
const PLANE: usize = ROWS * COLS;

/// Bytes of the pieces of scratch: two planes of the tile; its rows' scales and biases, all columns; the tokens' accumulators, `sx` and `mx`; rows that were unpacked, and the scales and biases of one.
fn sizes(cols: usize, tokens: usize, format: Grouped) -> [usize; 9] {
    let parts = cols / format.part_columns() * 4;
    let row = cols.max(COLS) / (GROUP / 2) * 4;
    [2 * PLANE, ROWS * parts, ROWS * parts, tokens * ACC * 4, tokens * parts, tokens * parts, PLANE, row, row]
}

pub(super) fn scratch_bytes(cols: usize, tokens: usize, format: Grouped) -> usize {
    cut_bytes(sizes(cols, tokens, format))
}

/// How products are summed.
///
/// # Safety
/// The columns are there, and so is the instruction set.
pub trait Products {
    /// Integers are halved to two planes of the tile, the lower four bits and the higher ones.
    const IN_HALVES: bool;
    /// `quads` times four columns (16 or 32) of the tile times those of T tokens, for each eight rows.
    // How many is not known to the compiler: it would unroll the loop and run out of registers.
    unsafe fn sums<const T: usize>(quads: usize, q: *const u8, x: [*const i8; T]) -> [[__m256i; 2]; T];
}

/// Sums of two products as words: `quads` times four columns are added to them.
///
/// # Safety
/// As for [`Products`].
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn add_words<const T: usize>(words: &mut [[__m256i; 2]; T], q: *const u8, x: &[*const i8; T], j: usize) {
    // SAFETY: the caller's.
    unsafe {
        let q0 = _mm256_load_si256(q.add(j * 4 * ROWS).cast());
        let q1 = _mm256_load_si256(q.add(j * 4 * ROWS + 32).cast());
        for t in 0..T {
            let four = _mm256_set1_epi32(x[t].add(4 * j).cast::<i32>().read_unaligned());
            words[t][0] = _mm256_add_epi16(words[t][0], _mm256_maddubs_epi16(q0, four));
            words[t][1] = _mm256_add_epi16(words[t][1], _mm256_maddubs_epi16(q1, four));
        }
    }
}

/// Integers of four bits at most: sixteen sums of two products fit in sixteen bits (8 * 2 * 15 * 127).
struct Fours;

impl Products for Fours {
    const IN_HALVES: bool = false;
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn sums<const T: usize>(quads: usize, q: *const u8, x: [*const i8; T]) -> [[__m256i; 2]; T] {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); 2]; T];
            for j in 0..quads {
                add_words(&mut sums, q, &x, j);
            }
            for t in 0..T {
                for half in 0..2 {
                    sums[t][half] = _mm256_madd_epi16(sums[t][half], _mm256_set1_epi16(1));
                }
            }
            sums
        }
    }
}

/// Integers of six bits at most: two sums of two products fit (2 * 2 * 63 * 127).
struct Sixes;

impl Products for Sixes {
    const IN_HALVES: bool = false;
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn sums<const T: usize>(quads: usize, q: *const u8, x: [*const i8; T]) -> [[__m256i; 2]; T] {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); 2]; T];
            for j in (0..quads).step_by(2) {
                let mut words = [[_mm256_setzero_si256(); 2]; T];
                add_words(&mut words, q, &x, j);
                add_words(&mut words, q, &x, j + 1);
                for t in 0..T {
                    for half in 0..2 {
                        let pairs = _mm256_madd_epi16(words[t][half], _mm256_set1_epi16(1));
                        sums[t][half] = _mm256_add_epi32(sums[t][half], pairs);
                    }
                }
            }
            sums
        }
    }
}

/// Integers of eight bits: twice four.
struct Eights;

impl Products for Eights {
    const IN_HALVES: bool = true;
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn sums<const T: usize>(quads: usize, q: *const u8, x: [*const i8; T]) -> [[__m256i; 2]; T] {
        // SAFETY: the caller's.
        unsafe {
            let high = Fours::sums(quads, q.add(PLANE), x);
            let mut sums = Fours::sums(quads, q, x);
            for t in 0..T {
                for half in 0..2 {
                    sums[t][half] = _mm256_add_epi32(sums[t][half], _mm256_slli_epi32::<4>(high[t][half]));
                }
            }
            sums
        }
    }
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

/// The product of all rows with all tokens, one tile after the other.
///
/// # Safety
/// As for [`product`].
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn rows<M: Products>(w: &Matrix, x: Groups, tokens: &[u32], out: &mut [f32], scratch: &mut Scratch) {
    let format = w.grouped();
    let (parts, groups) = (format.parts(), w.cols / format.group);
    let [q, s, b, acc, sx, mx, unpacked, row_s, row_b] = scratch.cut(sizes(w.cols, tokens.len(), format));
    let tile = Tile { q, s: s.cast(), b: b.cast() };
    let (acc, sx, mx) = (acc.cast::<f32>(), sx.cast::<f32>(), mx.cast::<f32>());
    let row = Unpacked { q: unpacked, s: row_s.cast(), b: row_b.cast() };
    let passes = tokens.len() / TOKENS + tokens.len() % TOKENS;
    // The first token of a pass, and how many they are.
    let whole = tokens.len() / TOKENS * TOKENS;
    let pass_of = |i: usize| if i < whole { (i / TOKENS * TOKENS, TOKENS) } else { (i, 1) };
    for (i, &token) in tokens.iter().enumerate() {
        let (first, n) = pass_of(i);
        x.parts(token as usize, w.cols, format.part_columns(), |part, scale, sum| {
            // SAFETY: the scratch holds a number per group of each token.
            unsafe {
                *sx.add(first * groups * parts + part * n + i - first) = scale;
                let to = mx.add(first * groups + part / parts * n + i - first);
                *to = if part % parts == 0 { sum } else { *to + sum };
            }
        });
    }
    for r in (0..w.rows).step_by(ROWS) {
        for k in (0..w.cols).step_by(COLS) {
            let cols = COLS.min(w.cols - k);
            // SAFETY: rows, columns and tokens are inside their arrays, the tile, the sums and the accumulators in scratch; the caller vouches for the rest.
            unsafe {
                fill(w, (r, k), cols, M::IN_HALVES, &tile, &row);
                let mut i = 0;
                for p in 0..passes {
                    fetch(w, next(w, (r, k)), ROWS * p / passes..ROWS * (p + 1) / passes);
                    let (_, n) = pass_of(i);
                    let few = Few {
                        tokens: &tokens[i..i + n],
                        q: x.q,
                        row: w.cols,
                        k,
                        sx: sx.add(i * groups * parts + k / format.part_columns() * n),
                        mx: mx.add(i * groups + k / format.group * n),
                        acc: acc.add(i * ACC),
                    };
                    match (parts, n) {
                        (1, TOKENS) => pass::<M, 1, TOKENS>(format, cols, &tile, &few),
                        (2, TOKENS) => pass::<M, 2, TOKENS>(format, cols, &tile, &few),
                        (_, TOKENS) => pass::<M, 4, TOKENS>(format, cols, &tile, &few),
                        (1, _) => pass::<M, 1, 1>(format, cols, &tile, &few),
                        (2, _) => pass::<M, 2, 1>(format, cols, &tile, &few),
                        (_, _) => pass::<M, 4, 1>(format, cols, &tile, &few),
                    }
                    i += n;
                }
            }
        }
        let n = ROWS.min(w.rows - r);
        for i in 0..tokens.len() {
            let mut sums = [0.0; ROWS];
            // SAFETY: the scratch holds the accumulators of as many tokens.
            unsafe { sum_lanes(acc.add(i * ACC), groups, &mut sums) };
            out[i * w.rows + r..][..n].copy_from_slice(&sums[..n]);
        }
    }
}

/// The sums of a token's accumulators. Weight groups that are not there leave theirs at +0.
///
/// # Safety
/// The accumulators and AVX2 are there.
#[inline(always)]
unsafe fn sum_lanes(acc: *const f32, groups: usize, sums: &mut [f32; ROWS]) {
    // SAFETY: the caller's.
    unsafe {
        for half in 0..2 {
            let mut lanes = [_mm256_setzero_ps(); 4];
            for (l, lane) in lanes.iter_mut().enumerate().take(groups) {
                *lane = _mm256_loadu_ps(acc.add(l * ROWS + 8 * half));
            }
            let [a, b, c, d] = lanes;
            let sum = _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d));
            _mm256_storeu_ps(sums.as_mut_ptr().add(8 * half), sum);
        }
    }
}

/// Where the tile after that at (r, k) begins.
fn next(w: &Matrix, (r, k): (usize, usize)) -> (usize, usize) {
    if k + COLS < w.cols { (r, k + COLS) } else { (r + ROWS, 0) }
}

/// Fetches some rows of the tile at (r, k).
#[inline(always)]
unsafe fn fetch(w: &Matrix, (r, k): (usize, usize), rows: std::ops::Range<usize>) {
    let (row, cols) = (w.row_bytes(), COLS.min(w.cols - k));
    for r in (r + rows.start..r + rows.end).take_while(|&r| r < w.rows) {
        let from = w.data.as_ptr().wrapping_add(r * row + row * k / w.cols);
        for line in (0..row * cols / w.cols).step_by(64) {
            // SAFETY: any address may be fetched; the caller vouches for the instruction set.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast()) };
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
    let (packing, is_unpacked) = (format.packing, w.format.is_unpacked());
    let packed = |i: usize| w.row((r + i).min(w.rows - 1));
    // SAFETY: the caller's.
    unsafe {
        for i in 0..ROWS {
            let number = (r + i).min(w.rows - 1);
            let (first, groups) = if is_unpacked {
                unpack_columns::<Avx2x16>(w, number, (k, cols), row.q.add(i * cols), row.s, row.b);
                (k / format.group, cols / format.group)
            } else {
                if !matches!(packing, PackingName::U4 | PackingName::U8) {
                    let from = packed(i).as_ptr().add(k / 8 * packing.bits());
                    unpack_lanes::<Avx2x16>(packing, from, row.q.add(i * cols), cols);
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
            let rows = |in_matrix: bool, at: usize| {
                let mut rows = [std::ptr::null(); 8];
                for (i, p) in rows.iter_mut().enumerate() {
                    let i = 8 * half + i;
                    *p = if in_matrix { packed(i).as_ptr().add(at) } else { row.q.add(i * cols).cast_const() };
                }
                rows
            };
            match packing {
                PackingName::U4 if !is_unpacked => from_nibbles(&rows(true, k / 2), cols, to),
                PackingName::U8 if !is_unpacked => from_bytes::<true>(&rows(true, k), cols, to),
                _ if in_halves => from_bytes::<true>(&rows(false, 0), cols, to),
                _ => from_bytes::<false>(&rows(false, 0), cols, to),
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

/// `cols` columns of the tile times those of T tokens, added to their accumulators.
///
/// # Safety
/// The tokens' columns, the tile, the accumulators and the instruction set are there.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
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
