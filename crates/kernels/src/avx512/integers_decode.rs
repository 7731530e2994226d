//! Integer groups with AVX-512 VNNI, for a few tokens: rows stream once, four at a time, straight from their packed bytes.
//!
//! A step is four rows by four weight groups: PARTS pieces of 128 columns. The sixteen integer sums of a piece are brought into one register, lane 4g + r
//! for activation group g and row r; the pieces' quads then change places so that lane 4w + r of register i has part i of weight group w, and
//! the float operations of the definition serve all sixteen: quad w of the accumulator is accumulator w of the definition. Before the rows,
//! each token is laid out the way the unpackers want it, with its scales spread to the same lanes.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use super::int8_dot::FEW;
use super::unpack::{first_bytes, spread};
use crate::format::{Float, Packing, with_packing, with_parts};
use crate::input::ORDER;
use crate::instructions::int8_dot::{Groups, grouped_of};
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// Columns of a piece.
const PIECE: usize = 128;
/// How far ahead rows are fetched, at least, in bytes: what a core reads in the time that memory takes to answer, and some.
const AHEAD: usize = 8 << 10;

/// Bytes of a token's step: its activations, then sixteen `sx` for each part, then sixteen `mx`.
const fn token_step(parts: usize) -> usize {
    parts * (PIECE + 64) + 64
}

fn token_bytes(cols: usize, parts: usize) -> usize {
    cols.div_ceil(PIECE * parts) * token_step(parts)
}

fn sizes(cols: usize, tokens: usize) -> [usize; 1] {
    let most = token_bytes(cols, 1).max(token_bytes(cols, 2)).max(token_bytes(cols, 4));
    [most * tokens.min(FEW)]
}

pub(super) fn scratch_bytes(cols: usize, tokens: usize) -> usize {
    cut_bytes(sizes(cols, tokens))
}

/// Even columns of a piece in one register and odd ones in the other suit widths of which two q, or sixteen, are found at one place;
/// the other widths unpack in natural order.
const fn alternate(bits: usize) -> bool {
    bits <= 4
}

/// # Safety
/// `matmul` checked the lengths, there are at most `FEW` tokens, and the instruction set is there.
#[inline(always)]
pub(super) unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let format = grouped_of(w);
    // SAFETY: the caller's.
    unsafe {
        with_packing!(format.packing, P => with_parts!(format.parts(), PARTS => {
            all_rows::<P, PARTS>(w, x, tokens, tile, scratch)
        }))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn all_rows<P: Packing, const PARTS: usize>(
    w: &Matrix,
    x: Groups,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let [prepared] = scratch.cut(sizes(w.cols, tokens.len()));
    let token_bytes = token_bytes(w.cols, PARTS);
    // SAFETY: the scratch holds all tokens; rows and tokens stay inside the tile.
    unsafe {
        for (i, &token) in tokens.iter().enumerate() {
            prepare::<P, PARTS>(&x, token as usize, w.cols, prepared.add(i * token_bytes));
        }
        // All rows with up to four tokens; with more, some rows stay in the first-level cache for the next tokens.
        let block = if tokens.len() <= 4 { w.rows } else { 16 };
        for r in (0..w.rows).step_by(block) {
            let all = r..(r + block).min(w.rows);
            let mut i = 0;
            while i < tokens.len() {
                let x = prepared.add(i * token_bytes);
                let out = tile.as_mut_ptr().add(i * w.rows);
                // None of them alone where it can be helped: unpacking is half of the work for a single token.
                let n = match tokens.len() - i {
                    few @ 1..=3 => few,
                    5 | 6 => 3,
                    _ => 4,
                };
                match n {
                    1 => rows::<P, PARTS, 1>(w, all.clone(), x, out),
                    2 => rows::<P, PARTS, 2>(w, all.clone(), x, out),
                    3 => rows::<P, PARTS, 3>(w, all.clone(), x, out),
                    _ => rows::<P, PARTS, 4>(w, all.clone(), x, out),
                }
                i += n;
            }
        }
    }
}

/// Lays out one token: per step its activations in the unpacker's order and its scales in the lanes of the accumulator.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn prepare<P: Packing, const PARTS: usize>(x: &Groups, token: usize, cols: usize, out: *mut u8) {
    const NATURAL: [u8; 64] = {
        let (mut index, mut i) = ([0; 64], 0);
        while i < 64 {
            // Where byte i of natural order lies.
            index[i / 8 * 8 + ORDER[i % 8]] = (i % 16) as u8;
            i += 1;
        }
        index
    };
    let (groups, step_cols) = (cols / 32, PIECE * PARTS);
    // SAFETY: the token's columns and groups are read under masks; `out` holds a token.
    unsafe {
        let q = x.q.as_ptr().add(token * cols).cast::<u8>();
        let (sx, mx) = (x.scales.as_ptr().add(token * groups), x.sums.as_ptr().add(token * groups));
        let natural = _mm512_loadu_si512(NATURAL.as_ptr().cast());
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        // Part 0 of the weight group that a lane serves.
        let part = _mm512_mullo_epi32(_mm512_srli_epi32::<2>(lane), _mm512_set1_epi32(PARTS as i32));
        for step in 0..cols.div_ceil(step_cols) {
            let out = out.add(step * token_step(PARTS));
            for piece in 0..PARTS {
                let k = (step * step_cols + piece * PIECE).min(cols);
                let half = (k + 64).min(cols);
                let (a, b) = (first_bytes(q.add(k), cols - k), first_bytes(q.add(half), cols - half));
                let (first, second) = if alternate(P::BITS) {
                    (_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b))
                } else {
                    (_mm512_shuffle_epi8(a, natural), _mm512_shuffle_epi8(b, natural))
                };
                _mm512_storeu_si512(out.add(piece * PIECE).cast(), first);
                _mm512_storeu_si512(out.add(piece * PIECE + 64).cast(), second);
            }
            let out = out.add(PARTS * PIECE).cast::<f32>();
            let first = step * 4 * PARTS;
            let mask = ((1u32 << (groups - first).min(4 * PARTS)) - 1) as u16;
            let (sx, mx) = (_mm512_maskz_loadu_ps(mask, sx.add(first)), _mm512_maskz_loadu_ps(mask, mx.add(first)));
            let mut sum = _mm512_permutexvar_ps(part, mx);
            for i in 0..PARTS {
                let index = _mm512_add_epi32(part, _mm512_set1_epi32(i as i32));
                _mm512_storeu_ps(out.add(16 * i), _mm512_permutexvar_ps(index, sx));
                if i > 0 {
                    sum = _mm512_add_ps(sum, _mm512_permutexvar_ps(index, mx));
                }
            }
            _mm512_storeu_ps(out.add(16 * PARTS), sum);
        }
    }
}

/// The rows of `all`, four at a time, times T tokens from `x`: `out[t * w.rows + row]`.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn rows<P: Packing, const PARTS: usize, const T: usize>(
    w: &Matrix,
    all: Range<usize>,
    x: *const u8,
    out: *mut f32,
) {
    let (row_bytes, step_cols) = (w.cols / 8 * P::BITS, PIECE * PARTS);
    let (step_bytes, steps) = (step_cols / 8 * P::BITS, w.cols / step_cols);
    let token_bytes = token_bytes(w.cols, PARTS);
    let rest = (w.cols - steps * step_cols) / (32 * PARTS);
    // Four streams, a quarter of the rows each: they lie on pages of their own, so that more of the prefetchers' trackers work at once.
    let quarter = all.len().div_ceil(4);
    let rows_ahead = AHEAD.div_ceil(4 * row_bytes);
    let mut scales = Scales::<P>::new(w);
    for r in 0..quarter {
        // Past the last row the last row is computed once more.
        let index: [usize; 4] = std::array::from_fn(|i| all.start + (i * quarter + r).min(all.len() - 1));
        // The same place some rows further on in the stream, or in that of as many rows behind these, which often come next. It may lie
        // past the end: a prefetch does not fault.
        let further = if r + rows_ahead < quarter { rows_ahead } else { all.len() + rows_ahead - quarter };
        let ahead = further * row_bytes;
        // SAFETY: rows are inside the matrix, steps inside the rows and the token.
        unsafe {
            let p = index.map(|row| w.data.as_ptr().add(row * row_bytes));
            scales.start(w, index, further);
            let mut acc = [_mm512_setzero_ps(); T];
            for step in 0..steps {
                let (s, b) = scales.next(step);
                let mut sums = [[_mm512_setzero_si512(); PARTS]; T];
                for piece in 0..PARTS {
                    let mut d = [[_mm512_setzero_si512(); 4]; T];
                    for i in 0..4 {
                        let at = p[i].add(step * step_bytes + piece * PIECE / 8 * P::BITS);
                        _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(ahead).cast());
                        if P::BITS > 4 {
                            _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(ahead + 64).cast());
                        }
                        let (first, second) = weights::<P>(at, 4);
                        for t in 0..T {
                            let x = x.add(t * token_bytes + step * token_step(PARTS) + piece * PIECE);
                            dots::<P>(&mut d[t], i, first, second, x);
                        }
                    }
                    for t in 0..T {
                        sums[t][piece] = gather::<P>(d[t]);
                    }
                }
                for t in 0..T {
                    let x = x.add(t * token_bytes + step * token_step(PARTS) + PARTS * PIECE).cast::<f32>();
                    acc[t] = _mm512_fmadd_ps(s, scaled(parts(sums[t]), x), acc[t]);
                    acc[t] = _mm512_fmadd_ps(b, _mm512_loadu_ps(x.add(16 * PARTS)), acc[t]);
                }
            }
            if rest > 0 {
                // The last one to three weight groups: lanes of groups that are not there keep their sums.
                let there = (1u16 << (4 * rest)) - 1;
                let (s, b) = scales.next(steps);
                for t in 0..T {
                    let x = x.add(t * token_bytes + steps * token_step(PARTS));
                    let mut sums = [_mm512_setzero_si512(); PARTS];
                    for piece in 0..PARTS {
                        let groups = (rest * PARTS).saturating_sub(4 * piece).min(4);
                        if groups > 0 {
                            let mut d = [_mm512_setzero_si512(); 4];
                            for i in 0..4 {
                                let at = p[i].add(steps * step_bytes + piece * PIECE / 8 * P::BITS);
                                let (first, second) = weights::<P>(at, groups);
                                dots::<P>(&mut d, i, first, second, x.add(piece * PIECE));
                            }
                            sums[piece] = gather::<P>(d);
                        }
                    }
                    let x = x.add(PARTS * PIECE).cast::<f32>();
                    acc[t] = _mm512_mask3_fmadd_ps(s, scaled(parts(sums), x), acc[t], there);
                    acc[t] = _mm512_mask3_fmadd_ps(b, _mm512_loadu_ps(x.add(16 * PARTS)), acc[t], there);
                }
            }
            for t in 0..T {
                let pairs = _mm256_add_ps(_mm512_castps512_ps256(acc[t]), _mm512_extractf32x8_ps::<1>(acc[t]));
                let four = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
                let mut sums = [0f32; 4];
                _mm_storeu_ps(sums.as_mut_ptr(), four);
                for i in 0..4 {
                    *out.add(t * w.rows + index[i]) = sums[i];
                }
            }
        }
    }
}

/// From the sums of each piece's four activation groups (lane 4g + r) to part i of four weight groups (lane 4w + r) in register i.
#[inline(always)]
unsafe fn parts<const PARTS: usize>(d: [__m512i; PARTS]) -> [__m512i; PARTS] {
    const LOW: i32 = 0b10_00_10_00;
    const HIGH: i32 = 0b11_01_11_01;
    let mut out = d;
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        if PARTS == 2 {
            out[0] = _mm512_shuffle_i32x4::<LOW>(d[0], d[1]);
            out[1] = _mm512_shuffle_i32x4::<HIGH>(d[0], d[1]);
        } else if PARTS == 4 {
            // A transposition of quads.
            let (ab, cd) = (_mm512_shuffle_i32x4::<LOW>(d[0], d[1]), _mm512_shuffle_i32x4::<LOW>(d[2], d[3]));
            out[0] = _mm512_shuffle_i32x4::<LOW>(ab, cd);
            out[2] = _mm512_shuffle_i32x4::<HIGH>(ab, cd);
            let (ab, cd) = (_mm512_shuffle_i32x4::<HIGH>(d[0], d[1]), _mm512_shuffle_i32x4::<HIGH>(d[2], d[3]));
            out[1] = _mm512_shuffle_i32x4::<LOW>(ab, cd);
            out[3] = _mm512_shuffle_i32x4::<HIGH>(ab, cd);
        }
    }
    out
}

/// The parts' sums times their scales at `sx` ([PARTS, 16]), joined.
#[inline(always)]
unsafe fn scaled<const PARTS: usize>(sums: [__m512i; PARTS], sx: *const f32) -> __m512 {
    // SAFETY: the caller vouches for the scales and the instruction set.
    unsafe {
        let mut t = _mm512_mul_ps(_mm512_loadu_ps(sx), _mm512_cvtepi32_ps(sums[0]));
        for (i, &sums) in sums.iter().enumerate().skip(1) {
            t = _mm512_fmadd_ps(_mm512_loadu_ps(sx.add(16 * i)), _mm512_cvtepi32_ps(sums), t);
        }
        t
    }
}

/// The q of a row's piece, `groups` (1 to 4) of which are there, the rest zero: even and odd columns, or the first and the second 64.
#[inline(always)]
unsafe fn weights<P: Packing>(p: *const u8, groups: usize) -> (__m512i, __m512i) {
    // SAFETY: reads 4 * BITS bytes per group.
    unsafe {
        let mask = _mm512_set1_epi8(((1u16 << P::BITS) - 1) as i8);
        match P::BITS {
            2 => {
                let v = if groups == 4 {
                    _mm256_loadu_si256(p.cast())
                } else {
                    _mm512_castsi512_si256(first_bytes(p, 8 * groups))
                };
                let v = _mm512_cvtepu32_epi64(v);
                let even = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x1c18_1410_0c08_0400), v);
                let odd = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x1e1a_1612_0e0a_0602), v);
                (_mm512_and_si512(even, mask), _mm512_and_si512(odd, mask))
            }
            3 => {
                const LANES: [u8; 64] = lane_bytes(6);
                let v = _mm512_permutexvar_epi8(_mm512_loadu_si512(LANES.as_ptr().cast()), first_bytes(p, 12 * groups));
                let even = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x2a24_1e18_120c_0600), v);
                let odd = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x2d27_211b_150f_0903), v);
                (_mm512_and_si512(even, mask), _mm512_and_si512(odd, mask))
            }
            4 => {
                let v = if groups == 4 { _mm512_loadu_si512(p.cast()) } else { first_bytes(p, 16 * groups) };
                (_mm512_and_si512(v, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(v), mask))
            }
            _ => {
                let (n, m) = (4 * P::BITS * groups.min(2), 4 * P::BITS * groups.saturating_sub(2));
                let second = p.add(if groups > 2 { 8 * P::BITS } else { 0 });
                (spread::<P>(first_bytes(p, n)), spread::<P>(first_bytes(second, m)))
            }
        }
    }
}

/// Byte `step * (i / 8) + i % 8` for byte i.
const fn lane_bytes(step: usize) -> [u8; 64] {
    let mut index = [0; 64];
    let mut i = 0;
    while i < 64 {
        index[i] = (i / 8 * step + i % 8) as u8;
        i += 1;
    }
    index
}

/// Sums of four products each, for row `i` of a piece. In natural order the two registers hold different groups: they meet in one register
/// where the lanes of a group are two apart.
#[inline(always)]
unsafe fn dots<P: Packing>(d: &mut [__m512i; 4], i: usize, first: __m512i, second: __m512i, x: *const u8) {
    // SAFETY: `x` holds a piece.
    unsafe {
        let (x0, x1) = (_mm512_loadu_si512(x.cast()), _mm512_loadu_si512(x.add(64).cast()));
        let zero = _mm512_setzero_si512();
        if alternate(P::BITS) {
            d[i] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, first, x0), second, x1);
        } else {
            let (a, b) = (_mm512_dpbusd_epi32(zero, first, x0), _mm512_dpbusd_epi32(zero, second, x1));
            d[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        }
    }
}

/// The sums of four rows and four groups, in lane 4g + r.
#[inline(always)]
unsafe fn gather<P: Packing>(d: [__m512i; 4]) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        if alternate(P::BITS) {
            // A quad is a group: a 4 x 4 transposition that adds on its way.
            let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(d[0], d[1]), _mm512_unpackhi_epi32(d[0], d[1]));
            let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(d[2], d[3]), _mm512_unpackhi_epi32(d[2], d[3]));
            _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
        } else {
            // Quads hold two sums of groups 0, 0, 2, 2 (quads 0 and 1) or 1, 1, 3, 3 (quads 2 and 3).
            let pair = |a, b| {
                let (a, b) = (_mm512_castsi512_ps(a), _mm512_castsi512_ps(b));
                _mm512_add_epi32(
                    _mm512_castps_si512(_mm512_shuffle_ps::<0b10_00_10_00>(a, b)),
                    _mm512_castps_si512(_mm512_shuffle_ps::<0b11_01_11_01>(a, b)),
                )
            };
            let (ab, cd) = (pair(d[0], d[1]), pair(d[2], d[3]));
            let all = _mm512_add_epi32(
                _mm512_shuffle_i32x4::<0b10_00_10_00>(ab, cd),
                _mm512_shuffle_i32x4::<0b11_01_11_01>(ab, cd),
            );
            let order = _mm512_setr_epi32(0, 2, 8, 10, 4, 6, 12, 14, 1, 3, 9, 11, 5, 7, 13, 15);
            _mm512_permutexvar_epi32(order, all)
        }
    }
}

/// The scales and biases of four rows, four weight groups at a time, spread to lane 4w + r.
struct Scales<P> {
    packing: PhantomData<P>,
    scale: Float,
    s: [*const u8; 4],
    b: [*const u8; 4],
    row_bytes: usize,
    ahead: usize,
    /// 16 bytes of each row: eight or four numbers.
    s_block: __m512i,
    b_block: __m512i,
    /// Steps that one block serves: this power of two.
    log_steps: u32,
    /// Where lane 4w + r finds its number in a block at its first step, in words or double words.
    index: __m512i,
    /// Numbers per step.
    advance: __m512i,
}

impl<P: Packing> Scales<P> {
    #[inline(always)]
    fn new(w: &Matrix) -> Scales<P> {
        let (format, row_bytes) = (grouped_of(w), w.scale_row_bytes());
        // SAFETY: the shell that this is inlined to has the instruction set.
        unsafe {
            let held = 16 / format.scale.size();
            let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let row = _mm512_and_si512(lane, _mm512_set1_epi32(3));
            let group = _mm512_srli_epi32::<2>(lane);
            let index = _mm512_add_epi32(_mm512_mullo_epi32(row, _mm512_set1_epi32(held as i32)), group);
            let advance = _mm512_set1_epi32(4);
            // bf16 numbers go to the high half of a lane, f16 numbers to the low half of the register.
            let (index, advance) = match format.scale {
                Float::F32 => (index, advance),
                Float::Bf16 => (_mm512_slli_epi32::<16>(index), _mm512_slli_epi32::<16>(advance)),
                Float::F16 => (
                    _mm512_castsi256_si512(_mm512_cvtepi32_epi16(index)),
                    _mm512_castsi256_si512(_mm512_cvtepi32_epi16(advance)),
                ),
            };
            let zero = _mm512_setzero_si512();
            Scales {
                packing: PhantomData,
                scale: format.scale,
                s: [w.scales.as_ptr(); 4],
                b: [w.biases.as_ptr(); 4],
                row_bytes,
                ahead: 0,
                s_block: zero,
                b_block: zero,
                log_steps: (held / 4).trailing_zeros(),
                index,
                advance,
            }
        }
    }

    /// Goes to the first step of four rows, and will fetch what lies `further` rows on.
    ///
    /// # Safety
    /// The rows are inside the matrix.
    #[inline(always)]
    unsafe fn start(&mut self, w: &Matrix, rows: [usize; 4], further: usize) {
        self.ahead = further * self.row_bytes;
        // SAFETY: the caller's.
        unsafe {
            self.s = rows.map(|row| w.scales.as_ptr().add(row * self.row_bytes));
            if P::ZERO.is_none() {
                self.b = rows.map(|row| w.biases.as_ptr().add(row * self.row_bytes));
            }
        }
    }

    /// The scales and biases of step `step`; steps come in order.
    #[inline(always)]
    unsafe fn next(&mut self, step: usize) -> (__m512, __m512) {
        // SAFETY: blocks are read under a mask that ends with the row; the caller vouches for the instruction set.
        unsafe {
            let in_block = step & ((1 << self.log_steps) - 1);
            if in_block == 0 {
                let at = (step >> self.log_steps) * 16;
                let mask = ((1u32 << (self.row_bytes - at).min(16)) - 1) as u16;
                for row in 0..4 {
                    _mm_prefetch::<_MM_HINT_T1>(self.s[row].wrapping_add(at + self.ahead).cast());
                    if P::ZERO.is_none() {
                        _mm_prefetch::<_MM_HINT_T1>(self.b[row].wrapping_add(at + self.ahead).cast());
                    }
                }
                self.s_block = four(self.s, at, mask);
                if P::ZERO.is_none() {
                    self.b_block = four(self.b, at, mask);
                }
            }
            let n = _mm512_set1_epi32(in_block as i32);
            let n = if self.scale == Float::F32 { n } else { _mm512_set1_epi16(in_block as i16) };
            match self.scale {
                Float::F32 => {
                    let index = _mm512_add_epi32(self.index, _mm512_mullo_epi16(n, self.advance));
                    let take = |v| _mm512_permutexvar_ps(index, _mm512_castsi512_ps(v));
                    with_bias::<P>(take(self.s_block), || take(self.b_block))
                }
                Float::Bf16 => {
                    let index = _mm512_add_epi16(self.index, _mm512_mullo_epi16(n, self.advance));
                    let take = |v| _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaa_aaaa, index, v));
                    with_bias::<P>(take(self.s_block), || take(self.b_block))
                }
                Float::F16 => {
                    let index = _mm512_add_epi16(self.index, _mm512_mullo_epi16(n, self.advance));
                    let take = |v| _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(index, v)));
                    with_bias::<P>(take(self.s_block), || take(self.b_block))
                }
            }
        }
    }
}

/// Scales, and biases that are either read or made of them.
#[inline(always)]
unsafe fn with_bias<P: Packing>(s: __m512, read: impl FnOnce() -> __m512) -> (__m512, __m512) {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { (s, P::ZERO.map_or_else(read, |zero| _mm512_mul_ps(_mm512_set1_ps(-zero), s))) }
}

/// Sixteen bytes of each of four rows at offset `at`, under `mask`.
#[inline(always)]
unsafe fn four(rows: [*const u8; 4], at: usize, mask: u16) -> __m512i {
    // SAFETY: the caller vouches for the bytes under the mask.
    unsafe {
        let part = |i: usize| _mm_maskz_loadu_epi8(mask, rows[i].add(at).cast());
        let v = _mm512_castsi128_si512(part(0));
        let v = _mm512_inserti32x4::<1>(v, part(1));
        let v = _mm512_inserti32x4::<2>(v, part(2));
        _mm512_inserti32x4::<3>(v, part(3))
    }
}
