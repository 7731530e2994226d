//! Encodes activations for [`matmul`](mod@crate::matmul).
//!
//! Values that are not finite stay visible: in bf16 as themselves, in int8 as a group whose scale is not finite (with q of 0), so that every product with it
//! is NaN or infinite. No bits make this panic.

use crate::dispatch::simd;
use crate::instructions::bf16_dot::Bf16Dot;
use crate::instructions::encode::Encode;

#[inline(always)]
unsafe fn encode_bf16_lanes<V: Bf16Dot>(x: &[f32], out: &mut [u16]) {
    assert_eq!(x.len(), out.len(), "one bf16 per f32");
    let whole = x.len() / 16 * 16;
    // SAFETY: every access stays inside the slices; a rest goes through a buffer; the caller vouches for the instruction set.
    unsafe {
        for i in (0..whole).step_by(16) {
            V::load(x.as_ptr().add(i)).store_bf16(out.as_mut_ptr().add(i).cast());
        }
        if whole < x.len() {
            let mut rest = [0u16; 16];
            V::load_first(x.as_ptr().add(whole), x.len() - whole).store_bf16(rest.as_mut_ptr().cast());
            out[whole..].copy_from_slice(&rest[..x.len() - whole]);
        }
    }
}

simd! {
    /// Rounds to bf16 bits: to nearest even, denormals to zero of their sign, NaN quieted (as `vcvtneps2bf16` does it).
    pub fn encode_bf16(x: &[f32], out: &mut [u16]) = encode_bf16_lanes
}

#[inline(always)]
unsafe fn encode_int8_lanes<V: Encode>(x: &[f32], q: &mut [i8], scales: &mut [f32], sums: &mut [f32]) {
    let groups = x.len() / 32;
    assert!(x.len() == groups * 32 && q.len() == x.len(), "whole groups of 32");
    assert!(scales.len() == groups && sums.len() == groups, "one scale and one sum per group");
    for g in 0..groups {
        // SAFETY: group g lies inside the slices; the caller vouches for the instruction set.
        unsafe {
            let (x, q) = (x.as_ptr().add(g * 32), q.as_mut_ptr().add(g * 32));
            let a = V::greatest_size(x);
            let inv = 127.0 / a;
            let inv = V::splat(if inv.is_finite() { inv } else { 0.0 });
            let sum = V::load(x).mul(inv).store_i8(q) + V::load(x.add(16)).mul(inv).store_i8(q.add(16));
            scales[g] = a / 127.0;
            sums[g] = scales[g] * sum as f32;
        }
    }
}

simd! {
    /// Quantises groups of 32: `a = max |x|`, `inv = 127 / a` (0 where that is not finite), `q = round(x * inv)`, ties to even,
    /// `scales = a / 127`, `sums = scales * sum of q`. `x`, `q` (in [`ORDER`](crate::input::ORDER)): [n, cols]; `scales`, `sums`: [n, cols / 32].
    pub fn encode_int8(x: &[f32], q: &mut [i8], scales: &mut [f32], sums: &mut [f32]) = encode_int8_lanes
}
