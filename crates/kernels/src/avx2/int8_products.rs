//! Integer groups for many tokens: how eight rows of a tile are multiplied by four columns of a token.

use std::arch::x86_64::*;

/// Rows of a tile: two registers.
pub const ROWS: usize = 16;
/// Columns of a tile: with the activations of a few tokens its integers (8 KB, or 16 in two planes) stay in the first-level cache. Four weight groups of any
/// size divide it, so that a tile begins with accumulator 0.
pub const COLS: usize = 512;
/// Bytes of a plane of the tile, [columns / 4, ROWS, 4].
pub const PLANE: usize = ROWS * COLS;

/// How products are summed.
///
/// # Safety
/// The columns are there, and so is the instruction set.
pub trait Products {
    /// AVX-VNNI is there, too.
    const HAS_VNNI: bool = false;
    /// Tokens of a pass: eight sums and what feeds them fill the registers.
    const TOKENS: usize = 4;
    /// Integers are halved to two planes of the tile, the lower four bits and the higher ones.
    const IN_HALVES: bool = false;
    /// `quads` times four columns (16 or 32) of the tile times those of T tokens, for each eight rows.
    // How many is not known to the compiler: it would unroll the loop and run out of registers.
    unsafe fn sums<const T: usize>(quads: usize, q: *const u8, x: [*const i8; T]) -> [[__m256i; 2]; T];
}

/// Adds four columns' products, those of quad `j`, to words: two sums of two for each row.
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

/// Integers of four bits at most: the eight sums of two products of 32 columns fit in sixteen bits (8 * 2 * 15 * 127).
pub struct Fours;

impl Products for Fours {
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn sums<const T: usize>(quads: usize, q: *const u8, x: [*const i8; T]) -> [[__m256i; 2]; T] {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); 2]; T];
            // The first ones have nothing to be added to.
            add_words(&mut sums, q, &x, 0);
            for j in 1..quads {
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
pub struct Sixes;

impl Products for Sixes {
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
pub struct Eights;

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

/// Integers of any size: `vpdpbusd` adds four products to a sum of 32 bits.
pub struct Vnni;

impl Products for Vnni {
    const HAS_VNNI: bool = true;
    /// Products go straight to their sums, so that two tokens more find registers.
    const TOKENS: usize = 6;
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn sums<const T: usize>(quads: usize, q: *const u8, x: [*const i8; T]) -> [[__m256i; 2]; T] {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); 2]; T];
            for j in 0..quads {
                let q0 = _mm256_load_si256(q.add(j * 4 * ROWS).cast());
                let q1 = _mm256_load_si256(q.add(j * 4 * ROWS + 32).cast());
                for t in 0..T {
                    let four = _mm256_set1_epi32(x[t].add(4 * j).cast::<i32>().read_unaligned());
                    sums[t][0] = _mm256_dpbusd_avx_epi32(sums[t][0], q0, four);
                    sums[t][1] = _mm256_dpbusd_avx_epi32(sums[t][1], q1, four);
                }
            }
            sums
        }
    }
}
