use std::arch::x86_64::*;
use std::hint::black_box;

use super::Avx512x16;
use crate::instructions::peak::{Arithmetic, CHAINS, Peak, STREAMS, chains};

impl Peak for Avx512x16 {
    unsafe fn read(bytes: &[u8]) -> u64 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { read(bytes) }
    }

    unsafe fn multiply_add(arithmetic: Arithmetic, macs: u64) -> u64 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            match arithmetic {
                Arithmetic::F32 => f32s(macs),
                Arithmetic::Bf16 => bf16s(macs),
                Arithmetic::Int8 => int8s(macs),
            }
        }
    }
}

/// # Safety
/// The machine has AVX-512 F.
#[target_feature(enable = "avx512f")]
unsafe fn read(bytes: &[u8]) -> u64 {
    let part = bytes.len() / STREAMS / 256 * 256;
    let mut sums = [_mm512_setzero_si512(); 2 * STREAMS];
    for i in (0..part).step_by(256) {
        for (s, sums) in sums.chunks_exact_mut(2).enumerate() {
            // SAFETY: `i + 256 <= part`, and `STREAMS` parts lie in `bytes`.
            unsafe {
                let p = bytes.as_ptr().add(s * part + i);
                let load = |n: usize| _mm512_loadu_si512(p.add(64 * n).cast());
                sums[0] = _mm512_ternarylogic_epi64::<0x96>(sums[0], load(0), load(1));
                sums[1] = _mm512_ternarylogic_epi64::<0x96>(sums[1], load(2), load(3));
            }
        }
    }
    let sum = sums.into_iter().reduce(|a, b| _mm512_xor_si512(a, b)).expect("there is one");
    _mm512_reduce_add_epi64(sum) as u64
}

chains!(f32s, "avx512f", 16, _mm512_setzero_ps(), _mm512_set1_ps(0.5), _mm512_set1_ps(0.25), |acc, a, b| {
    _mm512_fmadd_ps(a, b, *acc)
});
chains!(
    int8s,
    "avx512f,avx512vnni",
    64,
    _mm512_setzero_si512(),
    _mm512_set1_epi8(3),
    _mm512_set1_epi8(1),
    |acc, a, b| _mm512_dpbusd_epi32(*acc, a, b)
);
/// # Safety
/// The machine has AVX-512 F and BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn bf16s(macs: u64) -> u64 {
    let rounds = macs.div_ceil((CHAINS * 32) as u64);
    let half = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5), _mm512_set1_ps(0.5));
    let (a, b) = (black_box(half), black_box(half));
    let mut sums = [_mm512_setzero_ps(); CHAINS];
    for _ in 0..rounds {
        for acc in &mut sums {
            *acc = _mm512_dpbf16_ps(*acc, a, b);
        }
    }
    black_box(sums);
    rounds * (CHAINS * 32) as u64
}
