//! What `int8_decode` and `block_decode` share: four rows at a time, each in a stream of its own, and their sums in the lanes of one register.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::input::ORDER;

/// Prefetch distance in bytes, at least: what a core reads during the latency of memory, and some more.
const AHEAD: usize = 8 << 10;

/// Shuffles activations, which lie in [`ORDER`], into natural order.
pub const NATURAL: [u8; 64] = {
    let (mut index, mut i) = ([0; 64], 0);
    while i < 64 {
        // The place of byte i of natural order.
        index[i / 8 * 8 + ORDER[i % 8]] = (i % 16) as u8;
        i += 1;
    }
    index
};

/// Four streams, a quarter of some rows each. They are on different pages, so that more of the hardware prefetchers' trackers work at once.
pub struct FourRows {
    rows: Range<usize>,
    /// Rows of a stream.
    pub quarter: usize,
    rows_ahead: usize,
}

impl FourRows {
    /// Those of `rows`, of so many bytes each.
    #[inline(always)]
    pub fn new(rows: Range<usize>, row_bytes: usize) -> FourRows {
        FourRows { quarter: rows.len().div_ceil(4), rows_ahead: AHEAD.div_ceil(4 * row_bytes), rows }
    }

    /// The rows that are number `r` of their streams. Beyond the last row, the last row is computed again.
    #[inline(always)]
    pub fn index(&self, r: usize) -> [usize; 4] {
        std::array::from_fn(|i| self.rows.start + (i * self.quarter + r).min(self.rows.len() - 1))
    }

    /// Rows from number `r` of a stream to what is prefetched meanwhile: some rows further on in the stream, or past its end in the rows that often follow. A
    /// prefetch does not fault.
    #[inline(always)]
    pub fn further(&self, r: usize) -> usize {
        if r + self.rows_ahead < self.quarter {
            self.rows_ahead
        } else {
            self.rows.len() + self.rows_ahead - self.quarter
        }
    }
}

/// From sums of four products each, a group in a quad, to the groups' sums, lane 4g + r: a 4 x 4 transposition that adds on its way.
#[inline(always)]
pub unsafe fn gather(d: [__m512i; 4]) -> __m512i {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(d[0], d[1]), _mm512_unpackhi_epi32(d[0], d[1]));
        let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(d[2], d[3]), _mm512_unpackhi_epi32(d[2], d[3]));
        _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
    }
}

/// Adds the four lanes of each row (lane 4g + r), and stores the sums where `index` says, counted from `out`.
#[inline(always)]
pub unsafe fn store(acc: __m512, out: *mut f32, index: [usize; 4]) {
    // SAFETY: the caller vouches for the output and the instruction set.
    unsafe {
        let pairs = _mm256_add_ps(_mm512_castps512_ps256(acc), _mm512_extractf32x8_ps::<1>(acc));
        let four = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
        let mut sums = [0f32; 4];
        _mm_storeu_ps(sums.as_mut_ptr(), four);
        for i in 0..4 {
            *out.add(index[i]) = sums[i];
        }
    }
}
