//! Floats to affine groups (see [`crate::affine`]): where scales, biases and q come from. [`quantize`] looks at a group's weights alone; [`descent`] at what a matrix is
//! used for.
//!
//! Recipes are plain loops over arrays, each operation rounded once: the vectors are the compiler's, the bits the same in every instruction set.

pub mod descent;
mod mlx;
mod range;
mod search;

use std::array::from_fn;

use crate::affine;
use crate::form::Float;
use crate::lanes::Lanes;
use crate::simd;

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

/// A scale and a bias.
#[derive(Clone, Copy, Debug)]
struct Pair {
    s: f32,
    b: f32,
}

/// A group is worked on in so many lanes.
const LANES: usize = 16;

// The vectors are the compiler's: what it needs is the shell's instruction set.
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

/// The least and the greatest.
#[inline(always)]
fn ends(x: &[[f32; LANES]]) -> (f32, f32) {
    let (mut low, mut high) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    for x in x {
        low = from_fn(|i| if x[i] < low[i] { x[i] } else { low[i] });
        high = from_fn(|i| if x[i] > high[i] { x[i] } else { high[i] });
    }
    let least = low.into_iter().fold(f32::INFINITY, |a, b| if b < a { b } else { a });
    (least, high.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a }))
}

/// `v` clamped to 0..=top and rounded to a whole number, ties to even; 0 for NaN. Adding 1.5 * 2^23 leaves no bits for a fraction.
#[inline(always)]
fn nearest(v: f32, top: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    let v = if v > 0.0 { v } else { 0.0 };
    let v = if v < top { v } else { top };
    (v + MAGIC) - MAGIC
}

/// q from its values, which are whole and in range.
#[inline(always)]
fn put(q: &mut [u8], of: impl Fn(&[f32; LANES]) -> [f32; LANES], x: &[[f32; LANES]]) {
    for (q, x) in q.as_chunks_mut::<LANES>().0.iter_mut().zip(x) {
        let v = of(x);
        *q = from_fn(|i| v[i] as i32 as u8);
    }
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
