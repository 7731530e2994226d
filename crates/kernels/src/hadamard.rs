//! The Walsh-Hadamard transform of queries and keys before keys are rounded to eight bits: one large element is spread over all, so that it does not make the step of all others coarse (QuaRot,
//! Ashkboos et al. 2024). It is its own inverse but for a factor, so that scores stay what they are.

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;

/// Elements that are transformed together in rows of `dim`: the greatest power of two that divides it.
pub const fn hadamard_run(dim: usize) -> usize {
    1 << dim.trailing_zeros()
}

// Of the shell it needs the instruction set alone: compilers find the vectors.
#[allow(clippy::extra_unused_type_parameters)]
#[inline(always)]
unsafe fn hadamard_lanes<V: Lanes>(x: &mut [f32]) {
    let run = hadamard_run(x.len().max(1));
    for x in x.chunks_exact_mut(run) {
        // Butterflies of neighbours first. Those within sixteen elements have constant places, so that they are computed in registers.
        for x in x.as_chunks_mut::<16>().0 {
            butterflies::<16, 1>(x);
            butterflies::<16, 2>(x);
            butterflies::<16, 4>(x);
            butterflies::<16, 8>(x);
        }
        let mut apart = if run < 16 { 1 } else { 16 };
        while apart < run {
            for pair in x.chunks_exact_mut(2 * apart) {
                let (first, second) = pair.split_at_mut(apart);
                for (a, b) in first.iter_mut().zip(second) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            apart *= 2;
        }
    }
}

/// Those of elements that are `APART` apart.
#[inline(always)]
fn butterflies<const N: usize, const APART: usize>(x: &mut [f32; N]) {
    let from = *x;
    for i in 0..N {
        let other = from[i ^ APART];
        x[i] = if i & APART == 0 { from[i] + other } else { other - from[i] };
    }
}

simd! {
    /// Transforms each run of [`hadamard_run`] elements of `x` in place: for distances of 1, 2, 4 and so on, elements a and b at that distance become a + b and a - b.
    /// Without a factor: the sum of squares is that many times what it was.
    pub fn hadamard(x: &mut [f32]) = hadamard_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::test_random::{bits, random};

    #[test]
    fn a_transform_is_its_definition_and_its_own_inverse() {
        for n in [1, 2, 8, 16, 48, 80, 96, 64, 128, 256, 17] {
            let run = hadamard_run(n);
            let x = random(n, n as u64);
            let mut found = x.clone();
            hadamard(Isa::GENERIC, &mut found);
            for (x, found) in x.chunks_exact(run).zip(found.chunks_exact(run)) {
                for (i, found) in found.iter().enumerate() {
                    let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                    let wanted: f64 = x.iter().enumerate().map(|(j, x)| sign(j) * f64::from(*x)).sum();
                    assert!((f64::from(*found) - wanted).abs() < 1e-4, "{n}: {found} for {wanted}");
                }
            }
            let mut back = found.clone();
            hadamard(Isa::GENERIC, &mut back);
            let near = |(x, back): (&f32, &f32)| (x - back / run as f32).abs() < 1e-5;
            assert!(x.iter().zip(&back).all(near), "{n}");
            for isa in Isa::supported() {
                let mut other = x.clone();
                hadamard(isa, &mut other);
                assert_eq!(bits(&other), bits(&found), "{isa}: {n}");
            }
        }
    }
}
