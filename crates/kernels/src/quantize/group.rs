//! What the recipes for one group share.

use std::array::from_fn;

/// A scale and a bias.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// The scale.
    pub s: f32,
    /// The bias.
    pub b: f32,
}

/// A group is worked on in so many lanes.
pub const LANES: usize = 16;

/// The least and the greatest.
#[inline(always)]
pub fn ends(x: &[[f32; LANES]]) -> (f32, f32) {
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
pub fn nearest(v: f32, top: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    let v = if v > 0.0 { v } else { 0.0 };
    let v = if v < top { v } else { top };
    (v + MAGIC) - MAGIC
}

/// q from its values, which are whole and in range.
#[inline(always)]
pub fn put(q: &mut [u8], of: impl Fn(&[f32; LANES]) -> [f32; LANES], x: &[[f32; LANES]]) {
    for (q, x) in q.as_chunks_mut::<LANES>().0.iter_mut().zip(x) {
        let v = of(x);
        *q = from_fn(|i| v[i] as i32 as u8);
    }
}
