use std::arch::aarch64::*;

use super::{Neon16, Products};
use crate::instructions::peak::{Arithmetic, CHAINS, Peak, STREAMS, chains};

impl<P: Products> Peak for Neon16<P> {
    unsafe fn read(bytes: &[u8]) -> u64 {
        read(bytes)
    }

    unsafe fn multiply_add(arithmetic: Arithmetic, macs: u64) -> u64 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            match arithmetic {
                Arithmetic::F32 | Arithmetic::Bf16 => f32s(macs),
                Arithmetic::Int8 => int8s::<P>(macs),
            }
        }
    }
}

fn read(bytes: &[u8]) -> u64 {
    let part = bytes.len() / STREAMS / 64 * 64;
    // SAFETY: loads stay inside the parts; NEON is there.
    unsafe {
        let mut sums = [vdupq_n_u64(0); 2 * STREAMS];
        for i in (0..part).step_by(64) {
            for (s, sums) in sums.chunks_exact_mut(2).enumerate() {
                let p = bytes.as_ptr().add(s * part + i);
                let load = |n: usize| vreinterpretq_u64_u8(vld1q_u8(p.add(16 * n)));
                sums[0] = veorq_u64(sums[0], veorq_u64(load(0), load(1)));
                sums[1] = veorq_u64(sums[1], veorq_u64(load(2), load(3)));
            }
        }
        let sum = sums.into_iter().reduce(|a, b| veorq_u64(a, b)).expect("there is one");
        vgetq_lane_u64::<0>(sum) ^ vgetq_lane_u64::<1>(sum)
    }
}

chains!(f32s, "neon", 4, vdupq_n_f32(0.0), vdupq_n_f32(0.5), vdupq_n_f32(0.25), |acc, a, b| vfmaq_f32(*acc, a, b));

/// # Safety
/// The machine has the instructions of `P`.
#[inline(never)]
unsafe fn int8s<P: Products>(macs: u64) -> u64 {
    let rounds = macs.div_ceil((CHAINS * 16) as u64);
    // SAFETY: the caller's.
    unsafe {
        let (a, b) = (std::hint::black_box(vdupq_n_s8(3)), std::hint::black_box(vdupq_n_s8(1)));
        let mut sums = [vdupq_n_s32(0); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                // The sum takes part in the first factor, so that products are not taken out of the loop.
                *sum = P::signed(*sum, veorq_s8(a, vreinterpretq_s8_s32(*sum)), b);
            }
        }
        std::hint::black_box(sums);
    }
    rounds * (CHAINS * 16) as u64
}
