//! Integers of 11 bits of a few tokens times weights of 4 or 8 bits: rows stream once, and their integers never leave registers.
//!
//! Sixteen rows meet 64 columns of a token at a time. A mask and a shift make even and odd columns of 4-bit weights, so a token's columns are parted in the same way first.

use std::arch::x86_64::*;

use super::Avx512x16;
use crate::Isa;
use crate::format::Grouped;
use crate::format::packing::PackingName;
use crate::input::Int11;
use crate::instructions::f32_dot::Lanes;
use crate::instructions::int11_dot::{Int11Dot, ROWS, groups_of, side_by_side};
use crate::int11::{GROUP, HALF};
use crate::isa::Level;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// A token's integers as rows meet them; scales and biases of sixteen rows, and those of one after the other.
fn sizes(format: Grouped, cols: usize, tokens: usize) -> [usize; 4] {
    let numbers = 4 * ROWS * groups_of(cols, format.group);
    [2 * cols * tokens, numbers, numbers, numbers]
}

pub fn scratch_bytes(format: Grouped, cols: usize, tokens: usize) -> usize {
    cut_bytes(sizes(format, cols, tokens))
}

/// Whether the matrix is one for this kernel on such a machine.
pub fn takes(isa: Isa, w: &Matrix) -> bool {
    let format = w.grouped();
    matches!(isa.level(), Level::Avx512 | Level::Amx)
        && matches!(format.packing, PackingName::U4 | PackingName::U8)
        && format.group >= GROUP
}

/// How 64 columns of a row meet a token's.
///
/// # Safety (of all)
/// The columns are there, and so is AVX-512.
trait Columns {
    /// Bytes of 64 columns of a row.
    const BYTES: usize;
    /// Sixteen sums of the products of 64 columns.
    unsafe fn sums(row: *const u8, x: (__m512i, __m512i)) -> __m512i;
    /// 64 integers of a token as [`Columns::sums`] takes them.
    unsafe fn arrange(n: *const i16) -> (__m512i, __m512i);
}

/// Four bits each: even columns, then odd ones.
struct Nibbles;

impl Columns for Nibbles {
    const BYTES: usize = 32;
    #[inline(always)]
    unsafe fn sums(row: *const u8, (even, odd): (__m512i, __m512i)) -> __m512i {
        // SAFETY: the caller's.
        unsafe {
            let both = _mm512_cvtepu8_epi16(_mm256_loadu_si256(row.cast()));
            let sums = _mm512_madd_epi16(_mm512_and_si512(both, _mm512_set1_epi16(15)), even);
            _mm512_dpwssd_epi32(sums, _mm512_srli_epi16::<4>(both), odd)
        }
    }
    #[inline(always)]
    unsafe fn arrange(n: *const i16) -> (__m512i, __m512i) {
        const fn every_other(first: i16) -> [i16; 32] {
            let (mut index, mut i) = ([0; 32], 0);
            while i < 32 {
                index[i] = 2 * i as i16 + first;
                i += 1;
            }
            index
        }
        const EVEN: [i16; 32] = every_other(0);
        const ODD: [i16; 32] = every_other(1);
        // SAFETY: the caller's.
        unsafe {
            let (low, high) = (_mm512_loadu_si512(n.cast()), _mm512_loadu_si512(n.add(32).cast()));
            let (even, odd) = (_mm512_loadu_si512(EVEN.as_ptr().cast()), _mm512_loadu_si512(ODD.as_ptr().cast()));
            (_mm512_permutex2var_epi16(low, even, high), _mm512_permutex2var_epi16(low, odd, high))
        }
    }
}

/// A byte each.
struct Bytes;

impl Columns for Bytes {
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn sums(row: *const u8, (low, high): (__m512i, __m512i)) -> __m512i {
        // SAFETY: the caller's.
        unsafe {
            let sums = _mm512_madd_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256(row.cast())), low);
            _mm512_dpwssd_epi32(sums, _mm512_cvtepu8_epi16(_mm256_loadu_si256(row.add(32).cast())), high)
        }
    }
    #[inline(always)]
    unsafe fn arrange(n: *const i16) -> (__m512i, __m512i) {
        // SAFETY: the caller's.
        unsafe { (_mm512_loadu_si512(n.cast()), _mm512_loadu_si512(n.add(32).cast())) }
    }
}

/// The product of all rows with all tokens.
///
/// # Safety
/// `matmul` checked the lengths, and [`takes`] the matrix and the machine.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512bf16,avx2,fma,f16c,bmi2")]
pub unsafe fn product(w: &Matrix, x: Int11, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe {
        match w.grouped().packing {
            PackingName::U4 => rows::<Nibbles>(w, x, tokens, tile, scratch),
            _ => rows::<Bytes>(w, x, tokens, tile, scratch),
        }
    }
}

// Plain loops over arrays of constant length: closures over vectors may not be inlined.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn rows<C: Columns>(w: &Matrix, x: Int11, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
    let (format, groups) = (w.grouped(), w.cols / GROUP);
    let group_bits = format.group.trailing_zeros();
    let (padded, row_bytes) = (groups_of(w.cols, format.group), groups * C::BYTES);
    let [n, by_row, s, b] = scratch.cut(sizes(format, w.cols, tokens.len()));
    let (n, by_row, s, b) = (n.cast::<__m512i>(), by_row.cast(), s.cast::<f32>(), b.cast::<f32>());
    // SAFETY: rows, columns and tokens are inside their arrays, all else in scratch; a row that is not there is the last one again; any address may be fetched; the
    // caller vouches for the instruction set.
    unsafe {
        for (i, &token) in tokens.iter().enumerate() {
            for g in 0..groups {
                let to = n.add(2 * (i * groups + g));
                (*to, *to.add(1)) = C::arrange(x.n.as_ptr().add(token as usize * w.cols + g * GROUP));
            }
        }
        for first in (0..w.rows).step_by(ROWS) {
            let rows = ROWS.min(w.rows - first);
            let mut q = [w.data.as_ptr(); ROWS];
            let (mut row_s, mut row_b) = ([&w.scales[..0]; ROWS], [&w.scales[..0]; ROWS]);
            for r in 0..ROWS {
                q[r] = w.row(first + r.min(rows - 1)).as_ptr();
                (row_s[r], row_b[r]) = w.row_scales(first + r.min(rows - 1));
            }
            side_by_side::<Avx512x16>(format.scale, row_s, padded, by_row, s);
            side_by_side::<Avx512x16>(format.scale, row_b, padded, by_row, b);
            for (i, &token) in tokens.iter().enumerate() {
                let token = token as usize;
                let (steps, halves) =
                    (x.steps.as_ptr().add(token * groups), x.sums.as_ptr().add(token * w.cols / HALF));
                let mut y = Avx512x16::splat(0.0);
                for g in 0..groups {
                    if i == 0 {
                        // The next sixteen rows lie behind these. Their addresses are in no order that a processor foresees.
                        for line in 0..ROWS * C::BYTES / 64 {
                            let at = q[0].wrapping_add(ROWS * row_bytes + g * ROWS * C::BYTES + 64 * line);
                            Avx512x16::prefetch(at);
                        }
                    }
                    let from = n.add(2 * (i * groups + g));
                    let x = (*from, *from.add(1));
                    let mut sums = [_mm512_setzero_si512(); ROWS];
                    for r in 0..ROWS {
                        sums[r] = C::sums(q[r].add(g * C::BYTES), x);
                    }
                    let sums = Avx512x16::to_f32(super::int11_dot::sums_of_rows(sums));
                    let at = ((g * GROUP) >> group_bits) * ROWS;
                    let whole = *halves.add(2 * g) + *halves.add(2 * g + 1);
                    y = Avx512x16::load(s.add(at)).fma(sums.mul(Avx512x16::splat(*steps.add(g))), y);
                    y = Avx512x16::load(b.add(at)).fma(Avx512x16::splat(whole), y);
                }
                let y = y.mul(Avx512x16::splat(x.scales[token]));
                y.store_first(tile[i * w.rows + first..][..rows].as_mut_ptr(), rows);
            }
        }
    }
}
