//! Bit streams to bytes in a register.

use std::arch::x86_64::*;

use crate::format::packing::Packing;

/// Where each 64-bit lane of [`spread`] finds its eight q: byte `BITS * lane` and on.
const fn lane_bytes(bits: usize) -> [u8; 64] {
    let mut index = [0; 64];
    let mut i = 0;
    while i < 64 {
        index[i] = ((i / 8 * bits + i % 8) % 64) as u8;
        i += 1;
    }
    index
}

/// The first bit of each q of a lane.
const fn shifts(bits: usize) -> u64 {
    let (mut all, mut i) = (0, 0);
    while i < 8 {
        all |= ((i * bits) as u64) << (8 * i);
        i += 1;
    }
    all
}

struct Width<P>(std::marker::PhantomData<P>);
impl<P: Packing> Width<P> {
    const LANE_BYTES: [u8; 64] = lane_bytes(P::BITS);
}

/// 64 q of a packing in natural order, from a register whose low `8 * BITS` bytes are their bit stream.
///
/// # Safety
/// Needs AVX-512 VBMI.
#[inline(always)]
pub(crate) unsafe fn spread<P: Packing>(stream: __m512i) -> __m512i {
    if P::BITS == 8 {
        return stream;
    }
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let index = _mm512_loadu_si512(const { &Width::<P>::LANE_BYTES }.as_ptr().cast());
        let lanes = _mm512_permutexvar_epi8(index, stream);
        let q = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(shifts(P::BITS) as i64), lanes);
        _mm512_and_si512(q, _mm512_set1_epi8(((1u16 << P::BITS) - 1) as i8))
    }
}

/// The first `n` bytes at `p` (0 to 64), zeros behind; reads no further.
///
/// # Safety
/// Needs AVX-512 BW and `n` bytes at `p`.
#[inline(always)]
pub(crate) unsafe fn first_bytes(p: *const u8, n: usize) -> __m512i {
    // SAFETY: the mask keeps the load inside the caller's bytes.
    unsafe { _mm512_maskz_loadu_epi8(if n >= 64 { !0 } else { (1 << n) - 1 }, p.cast()) }
}
