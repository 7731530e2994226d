//! Exponential, sigmoid, SiLU, softplus and tanh: our own polynomials, so that every machine and instruction set agrees to the bit.
//!
//! Each function comes twice: over [`Lanes`], to be inlined into kernels, and for one f32 (`exp1`, ..) with the same operations in
//! the same order. Their errors are a few units in the last place; the tests hold the bounds. A NaN stays a NaN. The
//! coefficients are minimax fits of the relative error, computed for this file.

use crate::instructions::f32_dot::Lanes;

const EXP_LOW: f32 = -87.0;
const EXP_HIGH: f32 = 88.0;
/// ln 2 rounded to f32, and what is missing.
const LN2_HIGH: f32 = f32::from_bits(0x3f31_7218);
const LN2_LOW: f32 = -1.904_654_3e-9;
/// exp(r) = 1 + r + r^2 P(r) for |r| <= ln 2 / 2: P, highest power first. Relative error 3.1e-9 before rounding.
const EXP: [f32; 5] = [0.001_381_454, 0.008_368_745, 0.041_668_39, 0.166_665_21, 0.499_999_94];
/// log1p(y) = 2s + s^3 Q(s^2) with s = y / (2 + y), for y in [0, 1]: Q, highest power first. Relative error 4.5e-9.
const LOG1P: [f32; 4] = [0.280_119_93, 0.280_018_03, 0.400_215_27, 0.666_664_2];
/// tanh(x) = x + x^3 T(x^2) for |x| < 0.625: T, highest power first. Relative error 4.4e-9.
const TANH: [f32; 5] = [-0.005_704_985, 0.020_639_086, -0.053_739_715, 0.133_314_42, -0.333_332_8];
const TANH_SMALL: f32 = 0.625;

/// `e^x` for `x` clamped to [-87, 88], so never 0 and never infinite: `exp(-inf)` is 1.6e-38. A masked score must
/// be left out, not given as -inf.
///
/// # Safety
/// The instruction set of `V` is available (as for all functions here over lanes).
#[inline(always)]
pub unsafe fn exp<V: Lanes>(x: V) -> V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        // The bounds come first so that a NaN passes.
        let x = V::splat(EXP_HIGH).min(V::splat(EXP_LOW).max(x));
        let n = x.mul(V::splat(std::f32::consts::LOG2_E)).round();
        let r = n.fma(V::splat(-LN2_HIGH), x);
        let r = n.fma(V::splat(-LN2_LOW), r);
        let mut p = V::splat(EXP[0]);
        for c in &EXP[1..] {
            p = p.fma(r, V::splat(*c));
        }
        let p = p.fma(r, V::splat(1.0)).fma(r, V::splat(1.0));
        p.mul(n.exp2_int())
    }
}

/// [`exp`] of one value.
#[inline(always)]
pub fn exp1(x: f32) -> f32 {
    let x = if EXP_LOW > x { EXP_LOW } else { x };
    let x = if EXP_HIGH < x { EXP_HIGH } else { x };
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    let mut p = EXP[0];
    for c in &EXP[1..] {
        p = p.mul_add(r, *c);
    }
    let p = p.mul_add(r, 1.0).mul_add(r, 1.0);
    // A NaN converts to 0, and stays what it is.
    p * f32::from_bits(((n as i32 + 127) << 23) as u32)
}

/// `1 / (1 + exp(-x))`
///
/// # Safety
/// As for [`exp`].
#[inline(always)]
pub unsafe fn sigmoid<V: Lanes>(x: V) -> V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let one = V::splat(1.0);
        one.div(one.add(exp(V::splat(0.0).sub(x))))
    }
}

/// [`sigmoid`] of one value.
#[inline(always)]
pub fn sigmoid1(x: f32) -> f32 {
    1.0 / (1.0 + exp1(0.0 - x))
}

/// `x * sigmoid(x)`
///
/// # Safety
/// As for [`exp`].
#[inline(always)]
pub unsafe fn silu<V: Lanes>(x: V) -> V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { x.mul(sigmoid(x)) }
}

/// [`silu`] of one value.
#[inline(always)]
pub fn silu1(x: f32) -> f32 {
    x * sigmoid1(x)
}

/// `max(x, 0) + log1p(exp(-|x|))`
///
/// # Safety
/// As for [`exp`].
#[inline(always)]
pub unsafe fn softplus<V: Lanes>(x: V) -> V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let zero = V::splat(0.0);
        let y = exp(zero.sub(x).min(x));
        let s = y.div(V::splat(2.0).add(y));
        let z = s.mul(s);
        let mut q = V::splat(LOG1P[0]);
        for c in &LOG1P[1..] {
            q = q.fma(z, V::splat(*c));
        }
        let log = s.mul(z).fma(q, s.add(s));
        zero.max(x).add(log)
    }
}

/// [`softplus`] of one value.
#[inline(always)]
pub fn softplus1(x: f32) -> f32 {
    let y = exp1(if 0.0 - x < x { 0.0 - x } else { x });
    let s = y / (2.0 + y);
    let z = s * s;
    let mut q = LOG1P[0];
    for c in &LOG1P[1..] {
        q = q.mul_add(z, *c);
    }
    let log = (s * z).mul_add(q, s + s);
    (if 0.0 > x { 0.0 } else { x }) + log
}

/// The root of 2 / pi, rounded to f32.
const GELU_ROOT: f32 = 0.797_884_6;
const GELU_CUBE: f32 = 0.044_715;

/// `0.5 x * (1 + tanh(root of 2 / pi * (x + 0.044715 x^3)))`, the tanh form of GELU.
///
/// # Safety
/// As for [`exp`].
#[inline(always)]
pub unsafe fn gelu<V: Lanes>(x: V) -> V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let inner = x.mul(x).mul(V::splat(GELU_CUBE)).fma(x, x).mul(V::splat(GELU_ROOT));
        V::splat(0.5).mul(x).mul(V::splat(1.0).add(tanh(inner)))
    }
}

/// [`gelu`] of one value.
#[inline(always)]
pub fn gelu1(x: f32) -> f32 {
    let inner = (x * x * GELU_CUBE).mul_add(x, x) * GELU_ROOT;
    0.5 * x * (1.0 + tanh1(inner))
}

/// Hyperbolic tangent: a polynomial below 0.625, `1 - 2 / (exp(2 |x|) + 1)` with the sign of x above.
///
/// # Safety
/// As for [`exp`].
#[inline(always)]
pub unsafe fn tanh<V: Lanes>(x: V) -> V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let (zero, one) = (V::splat(0.0), V::splat(1.0));
        let z = x.mul(x);
        let mut t = V::splat(TANH[0]);
        for c in &TANH[1..] {
            t = t.fma(z, V::splat(*c));
        }
        let small = x.mul(z).fma(t, x);
        let a = zero.sub(x).max(x);
        let big = one.sub(V::splat(2.0).div(exp(a.add(a)).add(one)));
        let big = x.select_lt(zero, zero.sub(big), big);
        a.select_lt(V::splat(TANH_SMALL), small, big)
    }
}

/// [`tanh`] of one value.
#[inline(always)]
pub fn tanh1(x: f32) -> f32 {
    let a = if 0.0 - x > x { 0.0 - x } else { x };
    if a < TANH_SMALL {
        let z = x * x;
        let mut t = TANH[0];
        for c in &TANH[1..] {
            t = t.mul_add(z, *c);
        }
        return (x * z).mul_add(t, x);
    }
    let big = 1.0 - 2.0 / (exp1(a + a) + 1.0);
    if x < 0.0 { 0.0 - big } else { big }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::dispatch::simd;

    type Scalar = fn(f32) -> f32;

    macro_rules! over_lanes {
        ($($name:ident $body:ident $f:ident;)*) => { $(
            #[inline(always)]
            unsafe fn $body<V: Lanes>(x: &mut [f32; 16]) {
                // SAFETY: sixteen lanes; the shell has the instruction set.
                unsafe { $f(V::load(x.as_ptr())).store(x.as_mut_ptr()) }
            }
            simd! { fn $name(x: &mut [f32; 16]) = $body }
        )* };
    }
    over_lanes! {
        exp16 exp_body exp; sigmoid16 sigmoid_body sigmoid; silu16 silu_body silu;
        softplus16 softplus_body softplus; tanh16 tanh_body tanh;
    }

    type OverLanes = fn(Isa, &mut [f32; 16]);
    const ALL: [(OverLanes, Scalar); 5] =
        [(exp16, exp1), (sigmoid16, sigmoid1), (silu16, silu1), (softplus16, softplus1), (tanh16, tanh1)];

    /// Values that cover the range densely, and the odd ones.
    fn inputs() -> Vec<f32> {
        let mut all: Vec<f32> = (-200_000..=200_000).map(|i| i as f32 * 5.1e-4).collect();
        all.extend([
            0.0,
            -0.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            1e-30,
            -1e-30,
            1e30,
            -1e30,
            87.0,
            -87.0,
            88.0,
        ]);
        all.extend([1e-40, -1e-40, 0.624_999_9, 0.625, -0.625]);
        all.resize(all.len().next_multiple_of(16), 0.5);
        all
    }

    #[test]
    fn one_value_and_sixteen_lanes_have_the_same_bits_everywhere() {
        for (lanes, scalar) in ALL {
            for chunk in inputs().as_chunks::<16>().0 {
                for isa in Isa::supported() {
                    let mut got = *chunk;
                    lanes(isa, &mut got);
                    for (x, y) in chunk.iter().zip(got) {
                        let one = scalar(*x);
                        assert!(one.to_bits() == y.to_bits() || one.is_nan() && y.is_nan(), "{isa} {x}: {one} {y}");
                    }
                }
            }
        }
    }

    fn worst_relative(f: Scalar, exact: impl Fn(f64) -> f64, range: std::ops::Range<f32>) -> f64 {
        let x = inputs().into_iter().filter(|x| range.contains(x) && exact(*x as f64) != 0.0);
        x.map(|x| ((f(x) as f64 - exact(x as f64)) / exact(x as f64)).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn errors_are_a_few_units_in_the_last_place() {
        let worst = worst_relative(exp1, f64::exp, -87.0..88.0);
        assert!(worst < 1e-7, "exp {worst:e}");
        let worst = worst_relative(sigmoid1, |x| 1.0 / (1.0 + (-x).exp()), -86.0..90.0);
        assert!(worst < 2.5e-7, "sigmoid {worst:e}");
        let worst = worst_relative(silu1, |x| x / (1.0 + (-x).exp()), -80.0..90.0);
        assert!(worst < 3e-7, "silu {worst:e}");
        let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
        let worst = worst_relative(softplus1, softplus, -80.0..90.0);
        assert!(worst < 3e-7, "softplus {worst:e}");
        let worst = worst_relative(tanh1, f64::tanh, -100.0..100.0);
        assert!(worst < 2e-7, "tanh {worst:e}");
    }

    #[test]
    fn the_ends_are_as_promised() {
        assert_eq!(exp1(0.0), 1.0);
        assert_eq!(exp1(f32::NEG_INFINITY), exp1(-87.0));
        assert!(exp1(f32::NEG_INFINITY) > 0.0 && exp1(f32::INFINITY).is_finite());
        assert_eq!(silu1(-1000.0), -1000.0 / (1.0 + exp1(88.0)));
        assert_eq!((tanh1(100.0), tanh1(-100.0)), (1.0, -1.0));
        assert_eq!(softplus1(50.0), 50.0);
        assert!(ALL.iter().all(|(_, f)| f(f32::NAN).is_nan()));
    }
}
