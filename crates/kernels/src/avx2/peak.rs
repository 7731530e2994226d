use std::arch::x86_64::*;

use super::Avx2x16;
use crate::instructions::peak::{Arithmetic, CHAINS, Peak, STREAMS, chains};

impl Peak for Avx2x16 {
    unsafe fn read(bytes: &[u8]) -> u64 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { read(bytes) }
    }

    unsafe fn multiply_add(arithmetic: Arithmetic, macs: u64) -> u64 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            match arithmetic {
                Arithmetic::F32 | Arithmetic::Bf16 => f32s(macs),
                Arithmetic::Int8 => int8s(macs),
            }
        }
    }
}

/// [`Arithmetic::Int8`] by AVX-VNNI.
///
/// # Safety
/// The machine has it.
pub unsafe fn multiply_add_vnni(macs: u64) -> u64 {
    // SAFETY: the caller's.
    unsafe { vnni(macs) }
}

/// # Safety
/// The machine has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn read(bytes: &[u8]) -> u64 {
    let part = bytes.len() / STREAMS / 128 * 128;
    let mut sums = [_mm256_setzero_si256(); 2 * STREAMS];
    for i in (0..part).step_by(128) {
        for (s, sums) in sums.chunks_exact_mut(2).enumerate() {
            // SAFETY: as above.
            unsafe {
                let p = bytes.as_ptr().add(s * part + i);
                let load = |n: usize| _mm256_loadu_si256(p.add(32 * n).cast());
                sums[0] = _mm256_xor_si256(sums[0], _mm256_xor_si256(load(0), load(1)));
                sums[1] = _mm256_xor_si256(sums[1], _mm256_xor_si256(load(2), load(3)));
            }
        }
    }
    let sum = sums.into_iter().reduce(|a, b| _mm256_xor_si256(a, b)).expect("there is one");
    let mut words = [0u64; 4];
    // SAFETY: 32 bytes.
    unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), sum) };
    words.into_iter().fold(0, |a, b| a ^ b)
}

chains!(f32s, "avx2,fma", 8, _mm256_setzero_ps(), _mm256_set1_ps(0.5), _mm256_set1_ps(0.25), |acc, a, b| {
    _mm256_fmadd_ps(a, b, *acc)
});
chains!(vnni, "avx2,avxvnni", 32, _mm256_setzero_si256(), _mm256_set1_epi8(3), _mm256_set1_epi8(1), |acc, a, b| {
    _mm256_dpbusd_avx_epi32(*acc, a, b)
});
chains!(
    int8s,
    "avx2",
    32,
    _mm256_setzero_si256(),
    _mm256_set1_epi8(3),
    _mm256_set1_epi8(1),
    // What AVX2 has for 8-bit integers: pairs to i16, pairs of those to i32. The sum takes part in the first factor,
    // so that the products are not taken out of the loop.
    |acc, a, b| {
        let pairs = _mm256_maddubs_epi16(_mm256_xor_si256(a, *acc), b);
        _mm256_add_epi32(*acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }
);
