//! Element by element: SwiGLU, gates, sums. Any split of the elements gives the same result.

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::math::{gelu, sigmoid, silu, tanh};

/// `y' = f(x, y)`, over lanes. A trait, not a closure, so that it is certain to be inlined into the shell.
trait Update {
    unsafe fn of<V: Lanes>(&self, x: V, y: V) -> V;
}

/// `out[i] = f(x[i], y[i])`; `out` may be either of them.
#[inline(always)]
unsafe fn update<V: Lanes>(f: impl Update, x: *const f32, y: *const f32, out: *mut f32, n: usize) {
    let whole = n / 16 * 16;
    // SAFETY: the caller vouches for `n` elements of each and for the instruction set.
    unsafe {
        for i in (0..whole).step_by(16) {
            f.of(V::load(x.add(i)), V::load(y.add(i))).store(out.add(i));
        }
        let (i, left) = (whole, n - whole);
        if left > 0 {
            f.of(V::load_first(x.add(i), left), V::load_first(y.add(i), left)).store_first(out.add(i), left);
        }
    }
}

struct SwiGlu;
impl Update for SwiGlu {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, gate: V, up: V) -> V {
        // SAFETY: as the caller vouches.
        unsafe { silu(gate).mul(up) }
    }
}

struct GeGlu;
impl Update for GeGlu {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, gate: V, up: V) -> V {
        // SAFETY: as the caller vouches.
        unsafe { gelu(gate).mul(up) }
    }
}

struct SquaredRelu;
impl Update for SquaredRelu {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, x: V, _: V) -> V {
        // SAFETY: as the caller vouches.
        unsafe {
            // Zero comes first so that a NaN passes.
            let x = V::splat(0.0).max(x);
            x.mul(x)
        }
    }
}

struct ClampedSwiGlu {
    alpha: f32,
    limit: f32,
    added: f32,
}
impl Update for ClampedSwiGlu {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, gate: V, up: V) -> V {
        // SAFETY: as the caller vouches.
        unsafe {
            let limit = V::splat(self.limit);
            // The bounds come first so that a NaN passes.
            let gate = limit.min(gate);
            let up = limit.min(V::splat(-self.limit).max(up));
            let glu = gate.mul(sigmoid(gate.mul(V::splat(self.alpha))));
            up.add(V::splat(self.added)).mul(glu)
        }
    }
}

struct SiTu {
    beta: f32,
    linear: f32,
}
impl Update for SiTu {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, gate: V, up: V) -> V {
        // SAFETY: as the caller vouches.
        unsafe {
            let (beta, linear) = (V::splat(self.beta), V::splat(self.linear));
            let bounded = tanh(gate.div(beta)).mul(beta);
            bounded.mul(sigmoid(gate)).mul(tanh(up.div(linear)).mul(linear))
        }
    }
}

struct DividedSilu(f32);
impl Update for DividedSilu {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, x: V, _: V) -> V {
        // SAFETY: as the caller vouches.
        unsafe { silu(x.div(V::splat(self.0))) }
    }
}

struct Scale(f32);
impl Update for Scale {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, x: V, _: V) -> V {
        // SAFETY: as the caller vouches.
        unsafe { x.mul(V::splat(self.0)) }
    }
}

struct SoftCap(f32);
impl Update for SoftCap {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, x: V, _: V) -> V {
        // SAFETY: as the caller vouches.
        unsafe { tanh(x.div(V::splat(self.0))).mul(V::splat(self.0)) }
    }
}

struct SigmoidMul;
impl Update for SigmoidMul {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, gate: V, y: V) -> V {
        // SAFETY: as the caller vouches.
        unsafe { y.mul(sigmoid(gate)) }
    }
}

struct Add;
impl Update for Add {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, x: V, y: V) -> V {
        // SAFETY: as the caller vouches.
        unsafe { y.add(x) }
    }
}

struct ScaleAdd(f32);
impl Update for ScaleAdd {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, x: V, y: V) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::splat(self.0).fma(x, y) }
    }
}

#[inline(always)]
unsafe fn swiglu_lanes<V: Lanes>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == out.len() && up.len() == out.len(), "all have the same length");
    // SAFETY: equal lengths; the shell has the instruction set.
    unsafe { update::<V>(SwiGlu, gate.as_ptr(), up.as_ptr(), out.as_mut_ptr(), out.len()) }
}

#[inline(always)]
unsafe fn swiglu_in_place_lanes<V: Lanes>(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "both have the same length");
    // SAFETY: equal lengths; the shell has the instruction set.
    unsafe { update::<V>(SwiGlu, gate.as_ptr(), up.as_ptr(), gate.as_mut_ptr(), gate.len()) }
}

#[inline(always)]
unsafe fn clamped_swiglu_in_place_lanes<V: Lanes>(
    (alpha, limit, added): (f32, f32, f32),
    gate: &mut [f32],
    up: &[f32],
) {
    assert_eq!(gate.len(), up.len(), "both have the same length");
    let f = ClampedSwiGlu { alpha, limit, added };
    // SAFETY: equal lengths; the shell has the instruction set.
    unsafe { update::<V>(f, gate.as_ptr(), up.as_ptr(), gate.as_mut_ptr(), gate.len()) }
}

#[inline(always)]
unsafe fn situ_in_place_lanes<V: Lanes>((beta, linear): (f32, f32), gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "both have the same length");
    // SAFETY: equal lengths; the shell has the instruction set.
    unsafe { update::<V>(SiTu { beta, linear }, gate.as_ptr(), up.as_ptr(), gate.as_mut_ptr(), gate.len()) }
}

#[inline(always)]
unsafe fn geglu_in_place_lanes<V: Lanes>(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "both have the same length");
    // SAFETY: equal lengths; the shell has the instruction set.
    unsafe { update::<V>(GeGlu, gate.as_ptr(), up.as_ptr(), gate.as_mut_ptr(), gate.len()) }
}

#[inline(always)]
unsafe fn squared_relu_lanes<V: Lanes>(x: &mut [f32]) {
    // SAFETY: one slice; the shell has the instruction set.
    unsafe { update::<V>(SquaredRelu, x.as_ptr(), x.as_ptr(), x.as_mut_ptr(), x.len()) }
}

#[inline(always)]
unsafe fn scale_lanes<V: Lanes>(by: f32, x: &mut [f32]) {
    // SAFETY: one slice; the shell has the instruction set.
    unsafe { update::<V>(Scale(by), x.as_ptr(), x.as_ptr(), x.as_mut_ptr(), x.len()) }
}

#[inline(always)]
unsafe fn divided_silu_lanes<V: Lanes>(by: f32, x: &mut [f32]) {
    // SAFETY: one slice; the shell has the instruction set.
    unsafe { update::<V>(DividedSilu(by), x.as_ptr(), x.as_ptr(), x.as_mut_ptr(), x.len()) }
}

#[inline(always)]
unsafe fn soft_cap_lanes<V: Lanes>(cap: f32, x: &mut [f32]) {
    // SAFETY: one slice; the shell has the instruction set.
    unsafe { update::<V>(SoftCap(cap), x.as_ptr(), x.as_ptr(), x.as_mut_ptr(), x.len()) }
}

#[inline(always)]
unsafe fn sigmoid_mul_lanes<V: Lanes>(gate: &[f32], out: &mut [f32]) {
    assert_eq!(gate.len(), out.len(), "both have the same length");
    // SAFETY: equal lengths; the shell has the instruction set.
    unsafe { update::<V>(SigmoidMul, gate.as_ptr(), out.as_ptr(), out.as_mut_ptr(), out.len()) }
}

#[inline(always)]
unsafe fn add_lanes<V: Lanes>(x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "both have the same length");
    // SAFETY: equal lengths; the shell has the instruction set.
    unsafe { update::<V>(Add, x.as_ptr(), out.as_ptr(), out.as_mut_ptr(), out.len()) }
}

#[inline(always)]
unsafe fn scale_add_lanes<V: Lanes>(w: f32, x: &[f32], acc: &mut [f32]) {
    assert_eq!(x.len(), acc.len(), "both have the same length");
    // SAFETY: equal lengths; the shell has the instruction set.
    unsafe { update::<V>(ScaleAdd(w), x.as_ptr(), acc.as_ptr(), acc.as_mut_ptr(), acc.len()) }
}

simd! {
    /// `out = silu(gate) * up` (Shazeer 2020). All `[n]`.
    pub fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) = swiglu_lanes
}

simd! {
    /// `gate = silu(gate) * up`. Both `[n]`.
    pub fn swiglu_in_place(gate: &mut [f32], up: &[f32]) = swiglu_in_place_lanes
}

simd! {
    /// `g = min(gate, limit)`, `u = clamp(up, -limit, limit)`, `gate = (u + added) * (g * sigmoid(g * alpha))`, with (alpha, limit, added) given first: gpt-oss, GLM-5.3. Both `[n]`.
    pub fn clamped_swiglu_in_place(clamp: (f32, f32, f32), gate: &mut [f32], up: &[f32]) = clamped_swiglu_in_place_lanes
}

simd! {
    /// `gate = (beta * tanh(gate / beta) * sigmoid(gate)) * (linear * tanh(up / linear))`, with (beta, linear) given first: Kimi-K3. Both `[n]`.
    pub fn situ_in_place(bounds: (f32, f32), gate: &mut [f32], up: &[f32]) = situ_in_place_lanes
}

simd! {
    /// `gate = gelu(gate) * up`. Both `[n]`.
    pub fn geglu_in_place(gate: &mut [f32], up: &[f32]) = geglu_in_place_lanes
}

simd! {
    /// `x = max(x, 0)^2` (So et al. 2021). `[n]`.
    pub fn squared_relu(x: &mut [f32]) = squared_relu_lanes
}

simd! {
    /// `x *= by`. `[n]`.
    pub fn scale(by: f32, x: &mut [f32]) = scale_lanes
}

simd! {
    /// `x = silu(x / by)`. `[n]`.
    pub fn divided_silu(by: f32, x: &mut [f32]) = divided_silu_lanes
}

simd! {
    /// `x = cap * tanh(x / cap)`. `[n]`.
    pub fn soft_cap(cap: f32, x: &mut [f32]) = soft_cap_lanes
}

/// `out[i] = x[order[i]]`. `order`: whole numbers.
///
/// # Panics
/// When a number is not below the length of `x`, or there is not one for each element of `out`.
pub fn gather(x: &[f32], order: &[f32], out: &mut [f32]) {
    assert_eq!(order.len(), out.len(), "a number for each element");
    out.iter_mut().zip(order).for_each(|(out, i)| *out = x[*i as usize]);
}

/// In each run of `scratch.len()` elements of `x`, elements 2i and 2i + 1 go to i and i + half a run.
///
/// # Panics
/// When runs are odd, or do not divide `x`.
pub fn split_pairs(x: &mut [f32], scratch: &mut [f32]) {
    let (head, half) = (scratch.len(), scratch.len() / 2);
    assert!(head > 0 && head == 2 * half && x.len().is_multiple_of(head), "{} elements in runs of {head}", x.len());
    for run in x.chunks_exact_mut(head) {
        scratch.copy_from_slice(run);
        let (first, second) = run.split_at_mut(half);
        for (i, pair) in scratch.chunks_exact(2).enumerate() {
            (first[i], second[i]) = (pair[0], pair[1]);
        }
    }
}

simd! {
    /// `out *= sigmoid(gate)`: gated attention output. Both `[n]`.
    pub fn sigmoid_mul(gate: &[f32], out: &mut [f32]) = sigmoid_mul_lanes
}

simd! {
    /// `out += x`. Both `[n]`.
    pub fn add(x: &[f32], out: &mut [f32]) = add_lanes
}

simd! {
    /// `acc = fma(w, x, acc)`: one expert's part of a token. Both `[n]`.
    pub fn scale_add(w: f32, x: &[f32], acc: &mut [f32]) = scale_add_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::math::{gelu1, sigmoid1, silu1, tanh1};
    use crate::test_random::{bits, random};
    use proptest::prelude::*;

    #[test]
    fn pairs_are_split_within_their_runs() {
        let mut x: Vec<f32> = (0..12).map(|i| i as f32).collect();
        split_pairs(&mut x, &mut [0.0; 6]);
        assert_eq!(x, [0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 6.0, 8.0, 10.0, 7.0, 9.0, 11.0]);
    }

    #[test]
    fn elements_are_gathered_by_their_numbers() {
        let mut out = [0.0; 4];
        gather(&[5.0, 6.0, 7.0], &[2.0, 0.0, 2.0, 1.0], &mut out);
        assert_eq!(out, [7.0, 5.0, 7.0, 6.0]);
    }

    #[test]
    fn gelu_is_close_to_its_formula_in_f64() {
        for i in -4000..4000 {
            let x = i as f32 / 400.0;
            let wide = f64::from(x);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
            let exact = 0.5 * wide * (1.0 + inner.tanh());
            let found = f64::from(gelu1(x));
            assert!((found - exact).abs() <= 1e-6 * exact.abs().max(0.1), "{x}: {found} for {exact}");
        }
        assert!(gelu1(f32::NAN).is_nan());
    }

    proptest! {
        #[test]
        fn each_element_is_the_scalar_formula_in_every_instruction_set(n in 0usize..70, seed in any::<u64>()) {
            let (x, y) = (random(n, seed), random(n, seed + 1));
            let expect = |f: &dyn Fn(f32, f32) -> f32| -> Vec<u32> {
                x.iter().zip(&y).map(|(x, y)| f(*x, *y).to_bits()).collect()
            };
            for isa in Isa::supported() {
                let mut out = vec![0.0; n];
                swiglu(isa, &x, &y, &mut out);
                prop_assert_eq!(bits(&out), expect(&|x, y| silu1(x) * y));
                let mut out = x.clone();
                swiglu_in_place(isa, &mut out, &y);
                prop_assert_eq!(bits(&out), expect(&|x, y| silu1(x) * y));
                let mut out = x.clone();
                clamped_swiglu_in_place(isa, (1.702, 0.4, 1.0), &mut out, &y);
                prop_assert_eq!(bits(&out), expect(&|x, y| {
                    let (gate, up) = (x.min(0.4), y.clamp(-0.4, 0.4));
                    (up + 1.0) * (gate * sigmoid1(gate * 1.702))
                }));
                let mut out = x.clone();
                situ_in_place(isa, (0.7, 1.3), &mut out, &y);
                prop_assert_eq!(bits(&out), expect(&|x, y| (tanh1(x / 0.7) * 0.7 * sigmoid1(x)) * (tanh1(y / 1.3) * 1.3)));
                let mut out = x.clone();
                geglu_in_place(isa, &mut out, &y);
                prop_assert_eq!(bits(&out), expect(&|x, y| gelu1(x) * y));
                let mut out = x.clone();
                squared_relu(isa, &mut out);
                prop_assert_eq!(bits(&out), expect(&|x, _| if x > 0.0 { x * x } else { 0.0 }));
                let mut out = x.clone();
                scale(isa, 25.3, &mut out);
                prop_assert_eq!(bits(&out), expect(&|x, _| x * 25.3));
                let mut out = y.clone();
                sigmoid_mul(isa, &x, &mut out);
                prop_assert_eq!(bits(&out), expect(&|x, y| y * sigmoid1(x)));
                let mut out = y.clone();
                add(isa, &x, &mut out);
                prop_assert_eq!(bits(&out), expect(&|x, y| y + x));
                let mut out = y.clone();
                scale_add(isa, 0.37, &x, &mut out);
                prop_assert_eq!(bits(&out), expect(&|x, y| 0.37f32.mul_add(x, y)));
            }
        }
    }
}
