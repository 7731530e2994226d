//! Norms of one vector: RMS, RMS with a gate, L2. Callers split tokens and heads; a vector is always normed whole.
//!
//! Sums of squares are wide sums, of 64 lanes: a chain of 64 additions for 4,096 elements. `docs/numerics.md` fixes their tree and the order of the products.

// No iterator adapters: their closures may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::math::silu;

/// Registers of a wide sum: element i goes to lane i mod 64.
const WIDE: usize = 4;
const STEP: usize = 16 * WIDE;

/// The wide sum of squares of `n` elements.
#[inline(always)]
unsafe fn squares<V: Lanes>(x: *const f32, n: usize) -> f32 {
    let whole = n / STEP * STEP;
    // SAFETY: the caller vouches for `n` elements and for the instruction set.
    unsafe {
        let mut acc = [V::splat(0.0); WIDE];
        for i in (0..whole).step_by(STEP) {
            for j in 0..WIDE {
                let v = V::load(x.add(i + 16 * j));
                acc[j] = v.fma(v, acc[j]);
            }
        }
        for j in 0..WIDE {
            let i = whole + 16 * j;
            if i < n {
                let v = V::load_first(x.add(i), 16.min(n - i));
                acc[j] = v.fma(v, acc[j]);
            }
        }
        V::sum64(acc)
    }
}

/// `1 / sqrt(mean of squares + eps)` of `n` elements.
#[inline(always)]
pub(crate) unsafe fn inverse_rms<V: Lanes>(x: *const f32, n: usize, eps: f32) -> f32 {
    // SAFETY: as the caller vouches.
    1.0 / (unsafe { squares::<V>(x, n) } / n as f32 + eps).sqrt()
}

/// `out = (x * inv) * w`; `out` may be `x`.
#[inline(always)]
unsafe fn scaled<V: Lanes>(x: *const f32, inv: f32, w: *const f32, out: *mut f32, n: usize) {
    let whole = n / 16 * 16;
    // SAFETY: the caller vouches for `n` elements of each and for the instruction set.
    unsafe {
        let inv = V::splat(inv);
        for i in (0..whole).step_by(16) {
            V::load(x.add(i)).mul(inv).mul(V::load(w.add(i))).store(out.add(i));
        }
        let (i, left) = (whole, n - whole);
        if left > 0 {
            let w = V::load_first(w.add(i), left);
            V::load_first(x.add(i), left).mul(inv).mul(w).store_first(out.add(i), left);
        }
    }
}

#[inline(always)]
unsafe fn rms_lanes<V: Lanes>(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len();
    assert!(w.len() == n && out.len() == n, "norm of {n}: weight {}, output {}", w.len(), out.len());
    // SAFETY: all three have `n` elements; the shell has the instruction set.
    unsafe {
        let inv = inverse_rms::<V>(x.as_ptr(), n, eps);
        scaled::<V>(x.as_ptr(), inv, w.as_ptr(), out.as_mut_ptr(), n);
    }
}

/// [`rms_norm`] in place; `w` of `None` is all ones. For kernels that continue with the vector.
#[inline(always)]
pub(crate) unsafe fn rms_in_place_lanes<V: Lanes>(x: &mut [f32], w: Option<&[f32]>, eps: f32) {
    let n = x.len();
    // SAFETY: `x` and `w` have `n` elements; the caller vouches for the instruction set.
    unsafe {
        let inv = inverse_rms::<V>(x.as_ptr(), n, eps);
        let p = x.as_mut_ptr();
        match w {
            Some(w) => {
                assert_eq!(w.len(), n, "one weight per element");
                scaled::<V>(p, inv, w.as_ptr(), p, n);
            }
            None => times::<V>(p, inv, p, n),
        }
    }
}

/// `out = x * by`; `out` may be `x`.
#[inline(always)]
unsafe fn times<V: Lanes>(x: *const f32, by: f32, out: *mut f32, n: usize) {
    let whole = n / 16 * 16;
    // SAFETY: the caller vouches for `n` elements of each and for the instruction set.
    unsafe {
        let by = V::splat(by);
        for i in (0..whole).step_by(16) {
            V::load(x.add(i)).mul(by).store(out.add(i));
        }
        if whole < n {
            V::load_first(x.add(whole), n - whole).mul(by).store_first(out.add(whole), n - whole);
        }
    }
}

#[inline(always)]
unsafe fn add_rms_lanes<V: Lanes>(x: &[f32], residual: &mut [f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len();
    assert!(residual.len() == n && w.len() == n && out.len() == n, "all have {n} elements");
    // SAFETY: all four have `n` elements; the shell has the instruction set.
    unsafe {
        let r = residual.as_mut_ptr();
        let x = x.as_ptr();
        let mut acc = [V::splat(0.0); WIDE];
        let whole = n / STEP * STEP;
        for i in (0..whole).step_by(STEP) {
            for j in 0..WIDE {
                let i = i + 16 * j;
                let v = V::load(r.add(i)).add(V::load(x.add(i)));
                v.store(r.add(i));
                acc[j] = v.fma(v, acc[j]);
            }
        }
        for j in 0..WIDE {
            let i = whole + 16 * j;
            if i < n {
                let left = 16.min(n - i);
                let v = V::load_first(r.add(i), left).add(V::load_first(x.add(i), left));
                v.store_first(r.add(i), left);
                acc[j] = v.fma(v, acc[j]);
            }
        }
        let inv = 1.0 / (V::sum64(acc) / n as f32 + eps).sqrt();
        scaled::<V>(r, inv, w.as_ptr(), out.as_mut_ptr(), n);
    }
}

#[inline(always)]
unsafe fn l2_lanes<V: Lanes>(x: &mut [f32], eps: f32, scale: f32) {
    let (p, n) = (x.as_mut_ptr(), x.len());
    // SAFETY: `n` elements; the shell has the instruction set.
    unsafe {
        let inv = 1.0 / (squares::<V>(p, n) + eps).sqrt();
        let (inv, scale) = (V::splat(inv), V::splat(scale));
        let whole = n / 16 * 16;
        for i in (0..whole).step_by(16) {
            V::load(p.add(i)).mul(inv).mul(scale).store(p.add(i));
        }
        if whole < n {
            let v = V::load_first(p.add(whole), n - whole);
            v.mul(inv).mul(scale).store_first(p.add(whole), n - whole);
        }
    }
}

#[inline(always)]
unsafe fn gated_lanes<V: Lanes>(x: &[f32], w: &[f32], gate: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len();
    assert!(w.len() == n && gate.len() == n && out.len() == n, "all have {n} elements");
    // SAFETY: all four have `n` elements; the shell has the instruction set.
    unsafe { gated_raw::<V>(x.as_ptr(), w.as_ptr(), gate.as_ptr(), eps, out.as_mut_ptr(), n) }
}

#[inline(always)]
unsafe fn gated_in_place_lanes<V: Lanes>(x: &mut [f32], w: &[f32], gate: &[f32], eps: f32) {
    let n = x.len();
    assert!(w.len() == n && gate.len() == n, "all have {n} elements");
    // SAFETY: all three have `n` elements; the shell has the instruction set.
    unsafe { gated_raw::<V>(x.as_ptr(), w.as_ptr(), gate.as_ptr(), eps, x.as_mut_ptr(), n) }
}

#[inline(always)]
unsafe fn of_gated_in_place_lanes<V: Lanes>(x: &mut [f32], gate: &[f32], w: &[f32], eps: f32) {
    let n = x.len();
    assert!(w.len() == n && gate.len() == n, "all have {n} elements");
    let (p, gate, whole) = (x.as_mut_ptr(), gate.as_ptr(), n / 16 * 16);
    // SAFETY: all three have `n` elements; the shell has the instruction set.
    unsafe {
        for i in (0..whole).step_by(16) {
            V::load(p.add(i)).mul(silu(V::load(gate.add(i)))).store(p.add(i));
        }
        if whole < n {
            let gate = silu(V::load_first(gate.add(whole), n - whole));
            V::load_first(p.add(whole), n - whole).mul(gate).store_first(p.add(whole), n - whole);
        }
        rms_in_place_lanes::<V>(x, Some(w), eps);
    }
}

#[inline(always)]
unsafe fn layer_in_place_lanes<V: Lanes>(x: &mut [f32], w: &[f32], bias: &[f32], eps: f32) {
    let n = x.len();
    assert!(w.len() == n && bias.len() == n, "all have {n} elements");
    let p = x.as_mut_ptr();
    // SAFETY: all three have `n` elements; the shell has the instruction set.
    unsafe {
        let mut sum = V::splat(0.0);
        for i in (0..n).step_by(16) {
            sum = sum.add(V::load_first(p.add(i), 16.min(n - i)));
        }
        let mean = V::splat(sum.sum() / n as f32);
        for i in (0..n).step_by(16) {
            let left = 16.min(n - i);
            V::load_first(p.add(i), left).sub(mean).store_first(p.add(i), left);
        }
        let inv = V::splat(inverse_rms::<V>(p, n, eps));
        for i in (0..n).step_by(16) {
            let left = 16.min(n - i);
            let (w, bias) = (V::load_first(w.as_ptr().add(i), left), V::load_first(bias.as_ptr().add(i), left));
            V::load_first(p.add(i), left).mul(inv).fma(w, bias).store_first(p.add(i), left);
        }
    }
}

/// `out` may be `x`.
#[inline(always)]
unsafe fn gated_raw<V: Lanes>(x: *const f32, w: *const f32, gate: *const f32, eps: f32, out: *mut f32, n: usize) {
    let whole = n / 16 * 16;
    // SAFETY: the caller vouches for `n` elements of each and for the instruction set.
    unsafe {
        let inv = V::splat(inverse_rms::<V>(x, n, eps));
        for i in (0..whole).step_by(16) {
            let y = V::load(x.add(i)).mul(inv).mul(V::load(w.add(i)));
            y.mul(silu(V::load(gate.add(i)))).store(out.add(i));
        }
        let (i, left) = (whole, n - whole);
        if left > 0 {
            let y = V::load_first(x.add(i), left).mul(inv).mul(V::load_first(w.add(i), left));
            y.mul(silu(V::load_first(gate.add(i), left))).store_first(out.add(i), left);
        }
    }
}

simd! {
    /// `out = (x * (1 / sqrt(mean of squares + eps))) * w`: RMSNorm (Zhang and Sennrich 2019). `x`, `w`, `out`: `[n]`; zero-centred
    /// weights already have 1 added.
    pub fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) = rms_lanes
}

simd! {
    /// [`rms_norm`] in place; `w` of `None` is all ones.
    pub fn rms_norm_in_place(x: &mut [f32], w: Option<&[f32]>, eps: f32) = rms_in_place_lanes
}

simd! {
    /// `residual += x`, then `out = rms_norm(residual)`, in one pass less. All `[n]`.
    pub fn add_rms_norm(x: &[f32], residual: &mut [f32], w: &[f32], eps: f32, out: &mut [f32]) = add_rms_lanes
}

simd! {
    /// `out = rms_norm(x) * silu(gate)`: the output norm of GatedDeltaNet (`Qwen3NextRMSNormGated` of transformers). All `[n]`.
    pub fn rms_norm_gated(x: &[f32], w: &[f32], gate: &[f32], eps: f32, out: &mut [f32]) = gated_lanes
}

simd! {
    /// [`rms_norm_gated`] in place.
    pub fn rms_norm_gated_in_place(x: &mut [f32], w: &[f32], gate: &[f32], eps: f32) = gated_in_place_lanes
}

simd! {
    /// Layer norm (Ba et al. 2016), in place: with d the distances from the mean, `x = fma(d * (1 / sqrt(mean of squares of d + eps)), w, bias)`. All `[n]`.
    pub fn layer_norm_in_place(x: &mut [f32], w: &[f32], bias: &[f32], eps: f32) = layer_in_place_lanes
}

simd! {
    /// `x = rms_norm(x * silu(gate))`, in place: the output norm of Mamba-2, whose groups callers take one by one. All `[n]`.
    pub fn rms_norm_of_gated_in_place(x: &mut [f32], gate: &[f32], w: &[f32], eps: f32) = of_gated_in_place_lanes
}

simd! {
    /// `x = (x * (1 / sqrt(sum of squares + eps))) * scale`, in place: q and k of GatedDeltaNet, whose q is also scaled by
    /// `1 / sqrt(key_dim)` (`l2norm` in transformers' Qwen3-Next). A `scale` of 1 changes nothing.
    pub fn l2_norm(x: &mut [f32], eps: f32, scale: f32) = l2_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::test_random::{assert_close, bits, random};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn norms_have_the_same_bits_in_every_instruction_set(n in 1usize..150, seed in any::<u64>()) {
            let [x, w, gate] = [0, 1, 2].map(|i| random(n, seed + i));
            let run = |isa| {
                let [mut rms, mut gated, mut summed] = [(); 3].map(|_| vec![0.0; n]);
                rms_norm(isa, &x, &w, 1e-6, &mut rms);
                rms_norm_gated(isa, &x, &w, &gate, 1e-6, &mut gated);
                let (mut in_place, mut gated_in_place, mut l2, mut bare) = (x.clone(), x.clone(), x.clone(), x.clone());
                rms_norm_in_place(isa, &mut in_place, Some(&w), 1e-6);
                rms_norm_in_place(isa, &mut bare, None, 1e-6);
                rms_norm_gated_in_place(isa, &mut gated_in_place, &w, &gate, 1e-6);
                assert!(in_place == rms && gated_in_place == gated);
                l2_norm(isa, &mut l2, 1e-6, 0.25);
                // Of what is gated: the same as gating and then the norm.
                let mut of_gated = x.clone();
                rms_norm_of_gated_in_place(isa, &mut of_gated, &gate, &w, 1e-6);
                let products: Vec<f32> = x.iter().zip(&gate).map(|(x, g)| x * crate::math::silu1(*g)).collect();
                let mut gated_first = vec![0.0; n];
                rms_norm(isa, &products, &w, 1e-6, &mut gated_first);
                assert!(of_gated == gated_first);
                let mut layer = x.clone();
                layer_norm_in_place(isa, &mut layer, &w, &gate, 1e-6);
                // Fused with the sum: the same as the sum and then the norm.
                let mut residual = gate.clone();
                add_rms_norm(isa, &x, &mut residual, &w, 1e-6, &mut summed);
                let sum: Vec<f32> = gate.iter().zip(&x).map(|(a, b)| a + b).collect();
                let mut apart = vec![0.0; n];
                rms_norm(isa, &sum, &w, 1e-6, &mut apart);
                assert!(residual == sum && summed == apart);
                [rms, gated, l2, bare, summed, layer].concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            let oracle = run(Isa::GENERIC);
            for isa in Isa::supported() {
                prop_assert_eq!(&run(isa), &oracle);
            }
        }
    }

    /// The wide sum as `docs/numerics.md` has it, one element at a time.
    #[test]
    fn squares_are_summed_over_64_lanes() {
        for n in [1, 15, 16, 63, 64, 65, 80, 127, 128, 200, 1000, 4096] {
            let x = random(n, n as u64);
            let mut lanes = [0f32; 64];
            for (i, x) in x.iter().enumerate() {
                lanes[i % 64] = x.mul_add(*x, lanes[i % 64]);
            }
            for half in [32, 16, 8, 4, 2, 1] {
                (0..half).for_each(|i| lanes[i] += lanes[i + half]);
            }
            let inv = 1.0 / (lanes[0] / n as f32 + 1e-6).sqrt();
            let wanted: Vec<u32> = x.iter().map(|x| (x * inv).to_bits()).collect();
            for isa in Isa::supported() {
                let mut got = x.clone();
                rms_norm_in_place(isa, &mut got, None, 1e-6);
                assert_eq!(bits(&got), wanted, "{isa}, {n}");
            }
        }
    }

    #[test]
    fn norms_are_close_to_f64() {
        let isa = *Isa::supported().last().unwrap();
        for n in [5, 16, 127, 128, 2048] {
            let [x, w, gate] = [0, 1, 2].map(|i| random(n, 77 + i));
            let squares: f64 = x.iter().map(|x| (*x as f64).powi(2)).sum();
            let inv = 1.0 / (squares / n as f64 + 1e-6).sqrt();
            let rms: Vec<f64> = x.iter().zip(&w).map(|(x, w)| *x as f64 * inv * *w as f64).collect();
            let silu = |x: f64| x / (1.0 + (-x).exp());
            let mut out = vec![0.0; n];
            rms_norm(isa, &x, &w, 1e-6, &mut out);
            assert_close(&out, &rms, 1e-6);
            rms_norm_gated(isa, &x, &w, &gate, 1e-6, &mut out);
            let gated: Vec<f64> = rms.iter().zip(&gate).map(|(r, g)| r * silu(*g as f64)).collect();
            assert_close(&out, &gated, 1e-6);
            let mean = x.iter().map(|x| *x as f64).sum::<f64>() / n as f64;
            let spread = x.iter().map(|x| (*x as f64 - mean).powi(2)).sum::<f64>() / n as f64;
            let of =
                |((x, w), b): ((&f32, &f32), &f32)| (*x as f64 - mean) / (spread + 1e-6).sqrt() * *w as f64 + *b as f64;
            let layer: Vec<f64> = x.iter().zip(&w).zip(&gate).map(of).collect();
            let mut out = x.clone();
            layer_norm_in_place(isa, &mut out, &w, &gate, 1e-6);
            assert_close(&out, &layer, 1e-6);
            let mut out = x.clone();
            l2_norm(isa, &mut out, 1e-6, 0.5);
            let l2: Vec<f64> = x.iter().map(|x| *x as f64 * 0.5 / (squares + 1e-6).sqrt()).collect();
            assert_close(&out, &l2, 1e-6);
        }
    }
}
