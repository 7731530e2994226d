use super::Generic16;
use crate::instructions::peak::{Arithmetic, Peak};

impl Peak for Generic16 {
    unsafe fn read(bytes: &[u8]) -> u64 {
        let mut sums = [0u64; 64];
        for chunk in bytes.chunks_exact(512) {
            for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
                *sum ^= u64::from_le_bytes(*word);
            }
        }
        sums.iter().fold(0, |a, b| a ^ b)
    }

    unsafe fn multiply_add(arithmetic: Arithmetic, macs: u64) -> u64 {
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
}
