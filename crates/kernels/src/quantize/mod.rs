//! Floats to affine groups (see [`crate::affine`]): where scales, biases and q come from. [`quantize`] looks at a group's weights alone; [`descent`] at what a matrix is
//! used for.
//!
//! Recipes are plain loops over arrays, each operation rounded once: the compiler vectorises them, and the bits are the same in every instruction set.

pub mod descent;
mod group;
mod mlx;
mod range;
mod search;

use crate::affine;
use crate::dispatch::simd;
use crate::format::Float;
use crate::instructions::f32_dot::Lanes;

use group::LANES;

/// Where a group's scale and bias come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// As `mlx.core.quantize(mode="affine")` has it.
    Mlx,
    /// Its least and its greatest weight.
    Range,
    /// A search for the least squared error.
    Search,
}

// The compiler vectorises these loops, given the shell's instruction set.
#[allow(clippy::too_many_arguments, clippy::extra_unused_type_parameters)]
#[inline(always)]
unsafe fn quantize_lanes<V: Lanes>(
    rounding: Rounding,
    x: &[f32],
    bits: u8,
    group: u16,
    scale: Float,
    data: &mut [u8],
    scales: &mut [u8],
    biases: &mut [u8],
) {
    assert!(matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) && matches!(group, 32 | 64 | 128), "{bits} bits, groups of {group}");
    let (group, size) = (group as usize, scale.size());
    let n = x.len() / group;
    assert!(x.len() == n * group && data.len() == x.len() / 8 * bits as usize, "whole groups");
    assert!(scales.len() == n * size && biases.len() == scales.len(), "one scale and one bias per group");
    let top = ((1u16 << bits) - 1) as f32;
    let mut q = [0u8; 128];
    let groups = x.chunks_exact(group).zip(data.chunks_exact_mut(group / 8 * bits as usize));
    for ((x, data), (s, b)) in groups.zip(scales.chunks_exact_mut(size).zip(biases.chunks_exact_mut(size))) {
        let (x, q) = (x.as_chunks::<LANES>().0, &mut q[..group]);
        let pair = match rounding {
            Rounding::Mlx => mlx::group(x, top, q),
            Rounding::Range => range::group(x, top, q),
            Rounding::Search => search::group(x, top, scale, q),
        };
        affine::pack(bits, q, data);
        scale.write(pair.s, s);
        scale.write(pair.b, b);
    }
}

simd! {
    /// Quantises whole groups of `x` to `bits` (2, 3, 4, 5, 6 or 8) each, 32, 64 or 128 of them with a scale and a bias of type `scale`.
    /// `data`: `x.len() * bits / 8` bytes; `scales`, `biases`: one per group. Values that are not finite give unspecified q.
    pub fn quantize(rounding: Rounding, x: &[f32], bits: u8, group: u16, scale: Float, data: &mut [u8], scales: &mut [u8], biases: &mut [u8]) = quantize_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::test_random::random;

    #[test]
    fn every_instruction_set_gives_the_same_bytes() {
        let mut x = random(128 * 60, 4);
        x[128..256].fill(0.5);
        x[256..384].fill(0.0);
        for rounding in [Rounding::Mlx, Rounding::Range, Rounding::Search] {
            for (bits, group, scale) in
                [(2, 64, Float::Bf16), (3, 32, Float::F16), (5, 128, Float::F32), (8, 64, Float::Bf16)]
            {
                let of = |isa| {
                    let groups = x.len() / group as usize * scale.size();
                    let (mut data, mut s, mut b) =
                        (vec![0; x.len() / 8 * bits as usize], vec![0; groups], vec![0; groups]);
                    quantize(isa, rounding, &x, bits, group, scale, &mut data, &mut s, &mut b);
                    (data, s, b)
                };
                let plain = of(Isa::GENERIC);
                assert!(Isa::supported().into_iter().all(|isa| of(isa) == plain), "{rounding:?}, {bits} bits");
            }
        }
    }
}
