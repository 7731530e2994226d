//! What a machine can do at best: loops that only read memory, or only multiply and add in registers. `sluice bench` puts what the
//! kernels reach beside it, measured in the same run; no kernel uses this.

use crate::Isa;

/// Multiply-adds of a dot product, by the types of its factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    F32,
    /// Pairs of bf16, summed in f32. Where there is no such instruction, [`Arithmetic::F32`].
    Bf16,
    /// Fours (pairs in AVX2) of 8-bit integers, summed in i32.
    Int8,
}

impl Arithmetic {
    pub const ALL: [Arithmetic; 3] = [Arithmetic::F32, Arithmetic::Bf16, Arithmetic::Int8];

    pub fn name(self) -> &'static str {
        match self {
            Arithmetic::F32 => "f32",
            Arithmetic::Bf16 => "bf16",
            Arithmetic::Int8 => "int8",
        }
    }
}

/// Reads every byte once (but for a tail of less than 4 KiB) and returns something that depends on each of them. The time that
/// this takes on a buffer far larger than the caches is the bandwidth that one thread gets.
pub fn read(isa: Isa, bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    match isa.level() {
        // SAFETY: an `Isa` above generic is made only after its features were detected.
        crate::isa::Level::Avx512 => return unsafe { x86::read_avx512(bytes) },
        // SAFETY: as above.
        crate::isa::Level::Avx2 => return unsafe { x86::read_avx2(bytes) },
        crate::isa::Level::Generic => {}
    }
    let _ = isa;
    let mut sums = [0u64; 64];
    for chunk in bytes.chunks_exact(512) {
        for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *sum ^= u64::from_le_bytes(*word);
        }
    }
    sums.iter().fold(0, |a, b| a ^ b)
}

/// At least `macs` multiply-adds whose factors and sums stay in registers, in as many independent chains as the machine can
/// overlap; returns how many there were.
pub fn multiply_add(isa: Isa, arithmetic: Arithmetic, macs: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    match (isa.level(), arithmetic) {
        // SAFETY: an `Isa` above generic is made only after its features were detected.
        (crate::isa::Level::Avx512, Arithmetic::F32) => return unsafe { x86::f32_avx512(macs) },
        // SAFETY: as above.
        (crate::isa::Level::Avx512, Arithmetic::Bf16) => return unsafe { x86::bf16_avx512(macs) },
        // SAFETY: as above.
        (crate::isa::Level::Avx512, Arithmetic::Int8) => return unsafe { x86::int8_avx512(macs) },
        // SAFETY: as above.
        (crate::isa::Level::Avx2, Arithmetic::F32 | Arithmetic::Bf16) => return unsafe { x86::f32_avx2(macs) },
        // SAFETY: as above.
        (crate::isa::Level::Avx2, Arithmetic::Int8) => return unsafe { x86::int8_avx2(macs) },
        (crate::isa::Level::Generic, _) => {}
    }
    let _ = isa;
    let rounds = macs.div_ceil(64);
    if arithmetic == Arithmetic::Int8 {
        let mut sums = [0i32; 64];
        for i in 0..rounds {
            let x = std::hint::black_box(i as i8) as i32;
            sums.iter_mut().enumerate().for_each(|(j, sum)| *sum = sum.wrapping_add(x * j as i32));
        }
        std::hint::black_box(sums);
    } else {
        let mut sums = [0f32; 64];
        for i in 0..rounds {
            let x = std::hint::black_box(i as f32);
            sums.iter_mut().enumerate().for_each(|(j, sum)| *sum += x * j as f32);
        }
        std::hint::black_box(sums);
    }
    64 * rounds
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Streams that are read side by side: each lies on pages of its own, so that more of the prefetchers' trackers work at once.
    const STREAMS: usize = 4;

    /// # Safety
    /// The machine has AVX-512 F.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn read_avx512(bytes: &[u8]) -> u64 {
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

    /// # Safety
    /// The machine has AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn read_avx2(bytes: &[u8]) -> u64 {
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

    /// Independent sums: more than latency times throughput of any of these instructions, fewer than registers.
    const CHAINS: usize = 12;

    /// Makes a loop of `$lanes` multiply-adds per instruction in [`CHAINS`] chains.
    macro_rules! chains {
        ($(#[$meta:meta])* $name:ident, $features:literal, $lanes:expr, $zero:expr, $w:expr, $x:expr, |$acc:ident, $a:ident, $b:ident| $mac:expr) => {
            /// # Safety
            /// The machine has the features.
            #[target_feature(enable = $features)]
            pub unsafe fn $name(macs: u64) -> u64 {
                let rounds = macs.div_ceil((CHAINS * $lanes) as u64);
                let ($a, $b) = (black_box($w), black_box($x));
                let mut sums = [$zero; CHAINS];
                for _ in 0..rounds {
                    for $acc in &mut sums {
                        *$acc = $mac;
                    }
                }
                black_box(sums);
                rounds * (CHAINS * $lanes) as u64
            }
        };
    }

    chains!(f32_avx512, "avx512f", 16, _mm512_setzero_ps(), _mm512_set1_ps(0.5), _mm512_set1_ps(0.25), |acc, a, b| {
        _mm512_fmadd_ps(a, b, *acc)
    });
    chains!(f32_avx2, "avx2,fma", 8, _mm256_setzero_ps(), _mm256_set1_ps(0.5), _mm256_set1_ps(0.25), |acc, a, b| {
        _mm256_fmadd_ps(a, b, *acc)
    });
    chains!(
        int8_avx512,
        "avx512f,avx512vnni",
        64,
        _mm512_setzero_si512(),
        _mm512_set1_epi8(3),
        _mm512_set1_epi8(1),
        |acc, a, b| _mm512_dpbusd_epi32(*acc, a, b)
    );
    chains!(
        int8_avx2,
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

    /// # Safety
    /// The machine has AVX-512 F and BF16.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub unsafe fn bf16_avx512(macs: u64) -> u64 {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read() {
        for isa in Isa::supported() {
            let mut bytes = vec![0u8; 4 << 12];
            let nothing = read(isa, &bytes);
            for at in (0..bytes.len()).step_by(97) {
                bytes[at] = 0x11;
                assert_ne!(read(isa, &bytes), nothing, "{isa}: byte {at}");
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn as_many_multiply_adds_as_were_asked_for() {
        for isa in Isa::supported() {
            for arithmetic in Arithmetic::ALL {
                let done = multiply_add(isa, arithmetic, 1000);
                assert!((1000..2000).contains(&done), "{isa} {arithmetic:?}: {done}");
            }
        }
    }
}
