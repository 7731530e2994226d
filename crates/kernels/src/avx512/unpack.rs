use std::arch::x86_64::*;

use super::Avx512x16;
use super::block_rows::{Blocks, Piece};
use super::codebooks::Columns;
use super::spread::{first_bytes, spread};
use crate::format::BlockFormat;
use crate::format::blocks::unpack::{
    Block, Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Iq4Nl, Iq4Xs, Mxfp4, Nvfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0,
    Q5_1, Q5K, Q6K, Q8_0,
};
use crate::format::packing::Packing;
use crate::instructions::unpack::{Unpack, biases, each_block, scales};

impl Unpack for Avx512x16 {
    #[inline(always)]
    unsafe fn unpack<P: Packing>(p: *const u8, q: *mut u8, n: usize) {
        // SAFETY: the caller vouches for both ends and the instruction set; an odd 32 is read and written by half.
        unsafe {
            for i in (0..n / 64 * 64).step_by(64) {
                let all = spread::<P>(first_bytes(p.add(i / 8 * P::BITS), 8 * P::BITS));
                _mm512_storeu_si512(q.add(i).cast(), all);
            }
            if !n.is_multiple_of(64) {
                let i = n / 64 * 64;
                let half = spread::<P>(first_bytes(p.add(i / 8 * P::BITS), 4 * P::BITS));
                _mm256_storeu_si256(q.add(i).cast(), _mm512_castsi512_si256(half));
            }
        }
    }

    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512bf16,avx2,fma,f16c,bmi2")]
    unsafe fn unpack_blocks(
        format: BlockFormat,
        blocks: *const u8,
        count: usize,
        q: *mut u8,
        s: *mut f32,
        b: *mut f32,
    ) {
        // SAFETY: the caller's.
        unsafe {
            match format {
                BlockFormat::Q4_0 => small::<Q4_0>(blocks, count, q, s, b),
                BlockFormat::Q4_1 => small::<Q4_1>(blocks, count, q, s, b),
                BlockFormat::Q5_0 => small::<Q5_0>(blocks, count, q, s, b),
                BlockFormat::Q5_1 => small::<Q5_1>(blocks, count, q, s, b),
                BlockFormat::Q8_0 => small::<Q8_0>(blocks, count, q, s, b),
                BlockFormat::Iq4Nl => small::<Iq4Nl>(blocks, count, q, s, b),
                BlockFormat::Mxfp4 => small::<Mxfp4>(blocks, count, q, s, b),
                BlockFormat::Q2K => large::<Q2K>(blocks, count, q, s, b),
                BlockFormat::Q3K => large::<Q3K>(blocks, count, q, s, b),
                BlockFormat::Q4K => large::<Q4K>(blocks, count, q, s, b),
                BlockFormat::Q5K => large::<Q5K>(blocks, count, q, s, b),
                BlockFormat::Q6K => large::<Q6K>(blocks, count, q, s, b),
                BlockFormat::Iq4Xs => large::<Iq4Xs>(blocks, count, q, s, b),
                BlockFormat::Iq3Xxs => looked_up::<Iq3Xxs>(blocks, count, q, s, b),
                BlockFormat::Iq3S => looked_up::<Iq3S>(blocks, count, q, s, b),
                BlockFormat::Iq2Xxs => looked_up::<Iq2Xxs>(blocks, count, q, s, b),
                BlockFormat::Iq2Xs => looked_up::<Iq2Xs>(blocks, count, q, s, b),
                BlockFormat::Iq2S => looked_up::<Iq2S>(blocks, count, q, s, b),
                BlockFormat::Iq1S => looked_up::<Iq1S>(blocks, count, q, s, b),
                BlockFormat::Iq1M => looked_up::<Iq1M>(blocks, count, q, s, b),
                BlockFormat::Nvfp4 => looked_up::<Nvfp4>(blocks, count, q, s, b),
            }
        }
    }
}

/// Two registers as [`Rows::weights`](super::block_rows::Rows::weights) has them, in natural order.
#[inline(always)]
unsafe fn store_piece<B: Block>(q: *mut u8, (first, second): (__m512i, __m512i)) {
    // SAFETY: the caller's.
    unsafe {
        let (first, second) = if B::GROUP == 16 {
            (first, second)
        } else {
            let order = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
            let behind = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
            (_mm512_permutex2var_epi64(first, order, second), _mm512_permutex2var_epi64(first, behind, second))
        };
        _mm512_storeu_si512(q.cast(), first);
        _mm512_storeu_si512(q.add(64).cast(), second);
    }
}

#[inline(always)]
unsafe fn small<B: Piece>(blocks: *const u8, count: usize, q: *mut u8, s: *mut f32, b: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let whole = count / 4 * 4;
        for i in (0..whole).step_by(4) {
            store_piece::<B>(q.add(32 * i), B::weights(blocks.add(i * B::BYTES), 4));
        }
        for i in 0..whole {
            scales::<B>(blocks.add(i * B::BYTES), s.add(i), b.add(i));
        }
        biases::<B>(whole, s, b);
        each_block::<B>(blocks.add(whole * B::BYTES), count - whole, q.add(32 * whole), s.add(whole), b.add(whole));
    }
}

#[inline(always)]
unsafe fn large<B: Blocks>(blocks: *const u8, count: usize, q: *mut u8, s: *mut f32, b: *mut f32) {
    let groups = B::COLUMNS / B::GROUP;
    // SAFETY: the caller's.
    unsafe {
        for i in 0..count {
            let block = blocks.add(i * B::BYTES);
            for half in 0..2 {
                store_piece::<B>(q.add(256 * i + 128 * half), B::weights(block, half));
            }
            scales::<B>(block, s.add(i * groups), b.add(i * groups));
        }
        biases::<B>(count * groups, s, b);
    }
}

#[inline(always)]
unsafe fn looked_up<B: Columns>(blocks: *const u8, count: usize, q: *mut u8, s: *mut f32, b: *mut f32) {
    let groups = B::COLUMNS / B::GROUP;
    // SAFETY: the caller's.
    unsafe {
        for i in 0..count {
            let block = blocks.add(i * B::BYTES);
            for part in 0..B::COLUMNS / 64 {
                _mm512_storeu_si512(q.add(i * B::COLUMNS + 64 * part).cast(), B::columns(block, part));
            }
            scales::<B>(block, s.add(i * groups), b.add(i * groups));
        }
        biases::<B>(count * groups, s, b);
    }
}
