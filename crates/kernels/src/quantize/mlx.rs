//! As `mlx.core.quantize(mode="affine")` of MLX's CPU package does it, to the byte, so that a packed model is the model that `mlx_lm` would have packed: all in f32,
//! scale and bias rounded to their stored type (MLX: the type that x had) only when they are stored.

use std::array::from_fn;

use super::group::{LANES, Pair, ends, nearest, put};

/// Quantises one group, its columns in [`LANES`] lanes, to 0..=`top`. Writes its integers to `q`.
#[inline(always)]
pub fn group(x: &[[f32; LANES]], top: f32, q: &mut [u8]) -> Pair {
    let (low, high) = ends(x);
    let pair = choose(low, high, top);
    put(q, |x| from_fn(|i| nearest((x[i] - pair.b) / pair.s, top)), x);
    pair
}

/// Of a range. Its greater end becomes exact: q = 0 is the end of greater size, and the scale is stretched so that zero is a whole step.
#[inline(always)]
fn choose(low: f32, high: f32, top: f32) -> Pair {
    let low_is_edge = low.abs() > high.abs();
    let mut s = ((high - low) / top).max(1e-7);
    if !low_is_edge {
        s = -s;
    }
    let edge = if low_is_edge { low } else { high };
    let steps = (edge / s).round_ties_even();
    if steps == 0.0 { Pair { s, b: 0.0 } } else { Pair { s: edge / steps, b: edge } }
}
