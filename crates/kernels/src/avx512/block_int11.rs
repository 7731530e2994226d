//! Integers of 11 bits of a few tokens times blocks: rows stream once, four at a time, as in `block_decode`.
//!
//! An integer is `256 high + low`, two bytes with signs, so that each register of weights is multiplied twice. Sums lie in lanes 4g + r; the float operations of a row follow group
//! by group, for four rows at once.

use std::arch::x86_64::*;

use super::block_rows::{Large, PIECE, Planes, Rows, Small, Unpacked, halves};
use super::four_rows::{FourRows, gather};
use crate::Isa;
use crate::format::blocks::unpack::{Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use crate::format::{BlockFormat, E2m1, WeightFormat};
use crate::input::Int11;
use crate::int11::GROUP;
use crate::isa::Level;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// The most tokens. Rows are unpacked anew for each four of them.
const FEW: usize = 8;

/// Bytes of a token's piece: high and low bytes of its integers, then for each register of groups sixteen steps, and sixteen numbers of [`prepare`].
#[inline(always)]
const fn token_piece(group: usize) -> usize {
    2 * PIECE + 32 / group * 128
}

fn sizes(cols: usize, group: usize) -> [usize; 2] {
    [cols.div_ceil(PIECE) * token_piece(group) * FEW, Unpacked::<16>::bytes(cols)]
}

pub fn scratch_bytes(cols: usize) -> usize {
    cut_bytes(sizes(cols, 16))
}

/// Whether the matrix and the tokens are some for this kernel on such a machine.
pub fn takes(isa: Isa, w: &Matrix, tokens: usize) -> bool {
    matches!(isa.level(), Level::Avx512 | Level::Amx) && w.format.is_unpacked() && tokens <= FEW
}

/// The product of all rows with all tokens.
///
/// # Safety
/// `matmul` checked the lengths, and [`takes`] the matrix, the tokens and the machine.
pub unsafe fn product(w: &Matrix, x: Int11, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let blocks = match w.format {
        WeightFormat::Blocks(blocks) => Some(blocks),
        _ => None,
    };
    let product = match blocks {
        Some(BlockFormat::Q4_0) => all_rows::<Small<Q4_0>, false>,
        Some(BlockFormat::Q4_1) => all_rows::<Small<Q4_1>, true>,
        Some(BlockFormat::Q5_0) => all_rows::<Small<Q5_0>, false>,
        Some(BlockFormat::Q5_1) => all_rows::<Small<Q5_1>, true>,
        Some(BlockFormat::Q8_0) => all_rows::<Small<Q8_0>, false>,
        Some(BlockFormat::Iq4Nl) => all_rows::<Small<Iq4Nl>, false>,
        Some(BlockFormat::Mxfp4) => all_rows::<Small<Mxfp4>, false>,
        Some(BlockFormat::Q2K) => all_rows::<Large<Q2K>, true>,
        Some(BlockFormat::Q3K) => all_rows::<Large<Q3K>, false>,
        Some(BlockFormat::Q4K) => all_rows::<Large<Q4K>, true>,
        Some(BlockFormat::Q5K) => all_rows::<Large<Q5K>, true>,
        Some(BlockFormat::Q6K) => all_rows::<Large<Q6K>, false>,
        Some(BlockFormat::Iq4Xs) => all_rows::<Large<Iq4Xs>, false>,
        _ if w.format == WeightFormat::E2m1(E2m1::Power) => all_rows::<Planes, false>,
        _ if w.grouped().group == 16 => all_rows::<Unpacked<16>, false>,
        _ => all_rows::<Unpacked<32>, false>,
    };
    // SAFETY: the caller's.
    unsafe { product(w, x, tokens, tile, scratch) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma")]
unsafe fn all_rows<R: Rows, const BIASED: bool>(
    w: &Matrix,
    x: Int11,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let [prepared, room] = scratch.cut(sizes(w.cols, R::GROUP));
    let token_bytes = w.cols.div_ceil(PIECE) * token_piece(R::GROUP);
    let streams = FourRows::new(0..w.rows, w.row_bytes());
    let (zero, biased) = w.format.zero();
    assert!(biased == BIASED && tokens.len() <= FEW);
    // SAFETY: the scratch holds all tokens and what the rows are unpacked to; rows and tokens stay inside the tile.
    unsafe {
        for (i, &token) in tokens.iter().enumerate() {
            prepare::<R, BIASED>(&x, token as usize, w.cols, zero as i32, prepared.add(i * token_bytes));
        }
        for r in 0..streams.quarter {
            let (index, further) = (streams.index(r), streams.further(r));
            let rows = R::new(w, index, further * w.row_bytes(), room);
            let mut i = 0;
            while i < tokens.len() {
                let some = &tokens[i..(i + 4).min(tokens.len())];
                let from = prepared.add(i * token_bytes);
                let out = Out { at: tile.as_mut_ptr().add(i * w.rows), stride: w.rows, index };
                match some.len() {
                    1 => four_rows::<R, BIASED, 1>(&rows, w.cols, from, (&x, some), &out),
                    2 => four_rows::<R, BIASED, 2>(&rows, w.cols, from, (&x, some), &out),
                    3 => four_rows::<R, BIASED, 3>(&rows, w.cols, from, (&x, some), &out),
                    _ => four_rows::<R, BIASED, 4>(&rows, w.cols, from, (&x, some), &out),
                }
                i += some.len();
            }
        }
    }
}

/// Where four rows' products go.
pub(super) struct Out {
    /// [tokens, rows]
    pub at: *mut f32,
    pub stride: usize,
    pub index: [usize; 4],
}

impl Out {
    /// Stores four rows' products with token `t`, scaled.
    #[inline(always)]
    pub unsafe fn store(&self, acc: __m128, t: usize, scale: f32) {
        // SAFETY: the caller vouches for the place and the instruction set.
        unsafe {
            let mut four = [0f32; 4];
            _mm_storeu_ps(four.as_mut_ptr(), _mm_mul_ps(acc, _mm_set1_ps(scale)));
            for (product, row) in four.into_iter().zip(self.index) {
                *self.at.add(t * self.stride + row) = product;
            }
        }
    }
}

/// 64 integers from `n` on, zeros where there are none, as high and low bytes.
#[inline(always)]
pub(super) unsafe fn split(n: *const i16, there: usize) -> (__m512i, __m512i) {
    // SAFETY: the masks keep loads inside of what is there; the caller vouches for the instruction set.
    unsafe {
        let mask = |from: usize| ((1u64 << there.saturating_sub(from).min(32)) - 1) as u32;
        let a = _mm512_maskz_loadu_epi16(mask(0), n);
        let b = _mm512_maskz_loadu_epi16(mask(32), n.wrapping_add(32));
        let half = _mm512_set1_epi16(128);
        let (high_a, high_b) =
            (_mm512_srai_epi16::<8>(_mm512_add_epi16(a, half)), _mm512_srai_epi16::<8>(_mm512_add_epi16(b, half)));
        // Less 256 times the high byte, the lowest bits are the low one.
        (bytes_of(high_a, high_b), bytes_of(a, b))
    }
}

/// The lowest eight bits of 64 integers.
#[inline(always)]
unsafe fn bytes_of(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b)) }
}

/// Lays out one token: per piece its bytes as [`Rows::weights`] has weights, then in the lanes of the sums the steps, and each group's sum of integers: times the step where weights
/// have biases, else times `-zero`, as an integer.
#[inline(always)]
unsafe fn prepare<R: Rows, const BIASED: bool>(x: &Int11, token: usize, cols: usize, zero: i32, out: *mut u8) {
    // SAFETY: the token's columns are read under masks; `out` holds a token.
    unsafe {
        let n = x.n.as_ptr().add(token * cols);
        let groups = cols.div_ceil(GROUP);
        let steps = &x.steps[token * groups..][..groups];
        for piece in 0..cols.div_ceil(PIECE) {
            let (out, k) = (out.add(piece * token_piece(R::GROUP)), piece * PIECE);
            let (high_a, low_a) = split(n.add(k), cols - k);
            let (high_b, low_b) = split(n.wrapping_add(k + GROUP), cols.saturating_sub(k + GROUP));
            let step = |i: usize| if 2 * piece + i < groups { steps[2 * piece + i] } else { 0.0 };
            let (high, low) = if R::GROUP == 32 {
                (halves(high_a, high_b), halves(low_a, low_b))
            } else {
                ((high_a, high_b), (low_a, low_b))
            };
            for (i, bytes) in [high.0, high.1, low.0, low.1].into_iter().enumerate() {
                _mm512_storeu_si512(out.add(64 * i).cast(), bytes);
            }
            let one = _mm512_set1_epi8(1);
            let to = out.add(2 * PIECE).cast::<f32>();
            for i in 0..32 / R::GROUP {
                let zeros = _mm512_setzero_si512();
                let (sums, steps) = if R::GROUP == 32 {
                    let steps = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(step(0)), _mm512_set1_ps(step(1)));
                    (sum_of_both((one, one), high, low), steps)
                } else {
                    let (high, low) = ([high.0, high.1][i], [low.0, low.1][i]);
                    let sums = _mm512_slli_epi32::<8>(_mm512_dpbusd_epi32(zeros, one, high));
                    (_mm512_dpbusd_epi32(sums, one, low), _mm512_set1_ps(step(i)))
                };
                // A quad is a group: all of its lanes get the sum.
                let sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32::<0b01_00_11_10>(sums));
                let sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32::<0b10_11_00_01>(sums));
                let number = if BIASED {
                    _mm512_mul_ps(_mm512_cvtepi32_ps(sums), steps)
                } else {
                    _mm512_castsi512_ps(_mm512_mullo_epi32(sums, _mm512_set1_epi32(-zero)))
                };
                _mm512_storeu_ps(to.add(32 * i), steps);
                _mm512_storeu_ps(to.add(32 * i + 16), number);
            }
        }
    }
}

/// Sums of products of four columns of both halves of groups of 32.
#[inline(always)]
unsafe fn sum_of_both(w: (__m512i, __m512i), high: (__m512i, __m512i), low: (__m512i, __m512i)) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.0, high.0);
        let sums = _mm512_slli_epi32::<8>(_mm512_dpbusd_epi32(sums, w.1, high.1));
        _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sums, w.0, low.0), w.1, low.1)
    }
}

/// Four rows times T tokens, laid out from `from` on, which are `tokens` of the input.
#[allow(clippy::needless_range_loop)]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma")]
unsafe fn four_rows<R: Rows, const BIASED: bool, const T: usize>(
    rows: &R,
    cols: usize,
    from: *const u8,
    (x, tokens): (&Int11, &[u32]),
    out: &Out,
) {
    let token_bytes = cols.div_ceil(PIECE) * token_piece(R::GROUP);
    // SAFETY: pieces are inside the rows and tokens; the caller vouches for the output.
    unsafe {
        let mut acc = [_mm_setzero_ps(); T];
        let mut scales = rows.scales();
        for piece in 0..cols / PIECE {
            let some = rows.next(&mut scales, piece, 4);
            let from = from.add(piece * token_piece(R::GROUP));
            let sums = sums::<R, T>(rows, piece, 4, from, token_bytes);
            for t in 0..T {
                for half in 0..32 / R::GROUP {
                    let from = from.add(t * token_bytes + 2 * PIECE + 128 * half).cast();
                    acc[t] = fold::<BIASED>(acc[t], some[half], sums[t][half], from, 4);
                }
            }
        }
        let rest = cols % PIECE / 32;
        if rest > 0 {
            let piece = cols / PIECE;
            let some = rows.next(&mut scales, piece, rest);
            let from = from.add(piece * token_piece(R::GROUP));
            let sums = sums::<R, T>(rows, piece, rest, from, token_bytes);
            for t in 0..T {
                for half in 0..32 / R::GROUP {
                    let from = from.add(t * token_bytes + 2 * PIECE + 128 * half).cast();
                    let groups = (rest * 32 / R::GROUP).saturating_sub(4 * half).min(4);
                    acc[t] = fold::<BIASED>(acc[t], some[half], sums[t][half], from, groups);
                }
            }
        }
        for t in 0..T {
            out.store(acc[t], t, x.scales[tokens[t] as usize]);
        }
    }
}

/// Adds `groups` groups in the lanes 4g + r of `sums` to four rows' accumulators, one after the other. `from`: the token's steps and numbers, see [`prepare`].
#[inline(always)]
unsafe fn fold<const BIASED: bool>(
    acc: __m128,
    (s, b): (__m512, __m512),
    sums: __m512i,
    from: *const f32,
    groups: usize,
) -> __m128 {
    // SAFETY: the caller's.
    unsafe {
        let numbers = from.add(16);
        let sums = if BIASED { sums } else { _mm512_add_epi32(sums, _mm512_loadu_si512(numbers.cast())) };
        let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_loadu_ps(from));
        let mut acc = acc;
        acc = group::<BIASED, 0>(acc, s, b, scaled, numbers);
        if groups > 1 {
            acc = group::<BIASED, 1>(acc, s, b, scaled, numbers);
        }
        if groups > 2 {
            acc = group::<BIASED, 2>(acc, s, b, scaled, numbers);
        }
        if groups > 3 {
            acc = group::<BIASED, 3>(acc, s, b, scaled, numbers);
        }
        acc
    }
}

/// Adds group G.
#[inline(always)]
unsafe fn group<const BIASED: bool, const G: i32>(
    acc: __m128,
    s: __m512,
    b: __m512,
    scaled: __m512,
    numbers: *const f32,
) -> __m128 {
    // SAFETY: the caller's.
    unsafe {
        let acc = _mm_fmadd_ps(_mm512_extractf32x4_ps::<G>(s), _mm512_extractf32x4_ps::<G>(scaled), acc);
        if BIASED {
            _mm_fmadd_ps(_mm512_extractf32x4_ps::<G>(b), _mm_loadu_ps(numbers.add(4 * G as usize)), acc)
        } else {
            acc
        }
    }
}

/// The sums of a piece, of which there are `groups` of 32 columns, in registers of groups: lane 4g + r. No closures: one that is called twice is not inlined, and has no
/// instruction set.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn sums<R: Rows, const T: usize>(
    rows: &R,
    piece: usize,
    groups: usize,
    from: *const u8,
    token_bytes: usize,
) -> [[__m512i; 2]; T] {
    // SAFETY: the caller vouches for the piece and the instruction set.
    unsafe {
        let zero = _mm512_setzero_si512();
        let mut d = [[[zero; 4]; 2]; T];
        for i in 0..4 {
            let w = rows.weights(i, piece, groups);
            for t in 0..T {
                let x = from.add(t * token_bytes);
                let high = (_mm512_loadu_si512(x.cast()), _mm512_loadu_si512(x.add(64).cast()));
                let low = (_mm512_loadu_si512(x.add(128).cast()), _mm512_loadu_si512(x.add(192).cast()));
                if R::GROUP == 32 {
                    d[t][0][i] = sum_of_both(w, high, low);
                } else {
                    let first = _mm512_slli_epi32::<8>(_mm512_dpbusd_epi32(zero, w.0, high.0));
                    let second = _mm512_slli_epi32::<8>(_mm512_dpbusd_epi32(zero, w.1, high.1));
                    d[t][0][i] = _mm512_dpbusd_epi32(first, w.0, low.0);
                    d[t][1][i] = _mm512_dpbusd_epi32(second, w.1, low.1);
                }
            }
        }
        let mut all = [[zero; 2]; T];
        for t in 0..T {
            all[t][0] = gather(d[t][0]);
            if R::GROUP == 16 {
                all[t][1] = gather(d[t][1]);
            }
        }
        all
    }
}
