//! How partitions of attention become one: joined in ascending order, and divided at the end.

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::math::exp1;

#[inline(always)]
unsafe fn join_two_lanes<V: Lanes>(m: &mut f32, l: &mut f32, o: &mut [f32], m_next: f32, l_next: f32, o_next: &[f32]) {
    let top = if m_next > *m { m_next } else { *m };
    let (a, b) = (exp1(*m - top), exp1(m_next - top));
    *m = top;
    *l = l.mul_add(a, l_next * b);
    // SAFETY: as the caller vouches.
    unsafe { join_sums::<V>(a, b, o, o_next) }
}

/// `o = fma(o, a, next * b)`
#[inline(always)]
pub unsafe fn join_sums<V: Lanes>(a: f32, b: f32, o: &mut [f32], next: &[f32]) {
    assert_eq!(o.len(), next.len());
    let (n, whole) = (o.len(), o.len() / 16 * 16);
    let (o, next) = (o.as_mut_ptr(), next.as_ptr());
    // SAFETY: both have `n` elements; the caller vouches for the instruction set.
    unsafe {
        let (a, b) = (V::splat(a), V::splat(b));
        for i in (0..whole).step_by(16) {
            V::load(o.add(i)).fma(a, V::load(next.add(i)).mul(b)).store(o.add(i));
        }
        if whole < n {
            let left = n - whole;
            let v = V::load_first(o.add(whole), left).fma(a, V::load_first(next.add(whole), left).mul(b));
            v.store_first(o.add(whole), left);
        }
    }
}

#[inline(always)]
unsafe fn finish_lanes<V: Lanes>(m: f32, l: f32, o: &mut [f32], sink: Option<f32>) {
    let (n, whole) = (o.len(), o.len() / 16 * 16);
    let o = o.as_mut_ptr();
    let (mut l, mut a) = (l, 1.0);
    if let Some(sink) = sink {
        let top = if sink > m { sink } else { m };
        a = exp1(m - top);
        l = l.mul_add(a, exp1(sink - top));
    }
    // SAFETY: `o` has `n` elements; the caller vouches for the instruction set.
    unsafe {
        let (a, l) = (V::splat(a), V::splat(l));
        for i in (0..whole).step_by(16) {
            V::load(o.add(i)).mul(a).div(l).store(o.add(i));
        }
        if whole < n {
            V::load_first(o.add(whole), n - whole).mul(a).div(l).store_first(o.add(whole), n - whole);
        }
    }
}

simd! {
    /// `into = join(into, from)`: each is the greatest score, the sum of weights and the weighted sums of consecutive partitions.
    pub fn join_two(m: &mut f32, l: &mut f32, o: &mut [f32], m_next: f32, l_next: f32, o_next: &[f32]) = join_two_lanes
}
simd! {
    /// `o = o / l`, after the sink has joined l: `m' = max(m, sink)`, `a = exp(m - m')`, `l = fma(l, a, exp(sink - m'))`, `o = o * a`.
    pub fn finish(m: f32, l: f32, o: &mut [f32], sink: Option<f32>) = finish_lanes
}
