//! Hyper-connections (Xie et al. 2026): several residual streams, of which a block takes one mixture and to which it adds another. `docs/numerics.md` has the order of all sums.

// No iterator adapters: their closures may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::math::{exp1, sigmoid, sigmoid1};
use crate::norm::inverse_rms;

/// The most streams.
pub const MOST_STREAMS: usize = 8;

/// The most streams that are attended to.
pub const MOST_ATTENDED: usize = 16;

/// The number of a token's weights: how much of each stream goes into a block, how much of its output to each stream, and how much of each stream to each.
pub const fn weights_of(streams: usize) -> usize {
    (2 + streams) * streams
}

/// Makes a token's weights of their logits, in place: `[streams]` that go in, `[streams]` that come out, and `[streams from, streams to]`, whose rows and columns are divided by their sums in turns, `rounds` times,
/// first as a softmax of rows. Behind all blocks there are only those that go in. `bias`: one for each; `scales`: one for each of the three parts.
pub fn mixing(n: usize, weights: &mut [f32], bias: &[f32], scales: [f32; 3], eps: f32, rounds: usize) {
    assert!(
        [n, weights_of(n)].contains(&weights.len()) && n <= MOST_STREAMS,
        "{} weights of {n} streams",
        weights.len()
    );
    assert_eq!(bias.len(), weights.len(), "a bias for each");
    for (i, (w, bias)) in weights.iter_mut().zip(bias).enumerate() {
        *w = w.mul_add(scales[(i / n).min(2)], *bias);
    }
    let (ends, between) = weights.split_at_mut(weights.len().min(2 * n));
    for (i, w) in ends.iter_mut().enumerate() {
        *w = if i < n { sigmoid1(*w) + eps } else { 2.0 * sigmoid1(*w) };
    }
    if between.is_empty() {
        return;
    }
    for row in between.chunks_exact_mut(n) {
        let most = row.iter().fold(row[0], |most, x| if *x > most { *x } else { most });
        let mut sum = 0.0;
        for w in row.iter_mut() {
            *w = exp1(*w - most);
            sum += *w;
        }
        row.iter_mut().for_each(|w| *w = *w / sum + eps);
    }
    for round in 0..rounds {
        if round > 0 {
            for row in between.chunks_exact_mut(n) {
                let sum = row.iter().fold(0.0, |sum, w| sum + w) + eps;
                row.iter_mut().for_each(|w| *w /= sum);
            }
        }
        for to in 0..n {
            let sum = (0..n).fold(0.0, |sum, from| sum + between[from * n + to]) + eps;
            (0..n).for_each(|from| between[from * n + to] /= sum);
        }
    }
}

#[inline(always)]
unsafe fn collapse_lanes<V: Lanes>(streams: &[f32], weights: &[f32], out: &mut [f32]) {
    let (n, hidden) = (weights.len(), out.len());
    assert!(streams.len() == n * hidden, "{n} streams of {hidden}");
    for i in (0..hidden).step_by(16) {
        let left = (hidden - i).min(16);
        // SAFETY: `left` elements from `i` on are inside each stream; the shell has the instruction set.
        unsafe {
            let mut sum = V::splat(0.0);
            for s in 0..n {
                sum = V::splat(weights[s]).fma(V::load_first(streams.as_ptr().add(s * hidden + i), left), sum);
            }
            sum.store_first(out.as_mut_ptr().add(i), left);
        }
    }
}

#[inline(always)]
unsafe fn attend_lanes<V: Lanes>(streams: &[f32], weights: &[f32], eps: f32, out: &mut [f32]) {
    let hidden = out.len();
    let n = streams.len() / hidden.max(1);
    assert!((1..=MOST_ATTENDED).contains(&n) && streams.len() == n * hidden, "{n} streams of {hidden}");
    assert_eq!(weights.len(), hidden, "a weight for each element");
    let mut shares = [0.0; MOST_ATTENDED];
    // 1. scores
    for s in 0..n {
        let stream = &streams[s * hidden..(s + 1) * hidden];
        // SAFETY: both have `hidden` elements; the shell has the instruction set.
        unsafe {
            let mut dot = V::splat(0.0);
            for i in (0..hidden).step_by(16) {
                let left = (hidden - i).min(16);
                dot =
                    V::load_first(stream.as_ptr().add(i), left).fma(V::load_first(weights.as_ptr().add(i), left), dot);
            }
            shares[s] = dot.sum() * inverse_rms::<V>(stream.as_ptr(), hidden, eps);
        }
    }
    // 2. their softmax
    let mut most = shares[0];
    for s in 1..n {
        most = if shares[s] > most { shares[s] } else { most };
    }
    let mut sum = 0.0;
    for s in 0..n {
        shares[s] = exp1(shares[s] - most);
        sum += shares[s];
    }
    for s in 0..n {
        shares[s] /= sum;
    }
    // 3. the mixture
    // SAFETY: the shell has the instruction set.
    unsafe { collapse_lanes::<V>(streams, &shares[..n], out) }
}

#[inline(always)]
unsafe fn expand_lanes<V: Lanes>(x: &[f32], weights: &[f32], streams: &mut [f32]) {
    let hidden = x.len();
    let n = streams.len() / hidden.max(1);
    assert!(n <= MOST_STREAMS && streams.len() == n * hidden && weights.len() == n + n * n, "{n} streams of {hidden}");
    for i in (0..hidden).step_by(16) {
        let left = (hidden - i).min(16);
        // SAFETY: as above.
        unsafe {
            let x = V::load_first(x.as_ptr().add(i), left);
            let mut before = [V::splat(0.0); MOST_STREAMS];
            for s in 0..n {
                before[s] = V::load_first(streams.as_ptr().add(s * hidden + i), left);
            }
            for to in 0..n {
                let mut sum = V::splat(weights[to]).mul(x);
                for from in 0..n {
                    sum = V::splat(weights[n + from * n + to]).fma(before[from], sum);
                }
                sum.store_first(streams.as_mut_ptr().add(to * hidden + i), left);
            }
        }
    }
}

#[inline(always)]
unsafe fn mean_lanes<V: Lanes>(streams: &[f32], out: &mut [f32]) {
    let hidden = out.len();
    let n = streams.len() / hidden.max(1);
    assert!(streams.len() == n * hidden, "{n} streams of {hidden}");
    for i in (0..hidden).step_by(16) {
        let left = (hidden - i).min(16);
        // SAFETY: as above.
        unsafe {
            let mut sum = V::splat(0.0);
            for s in 0..n {
                sum = sum.add(V::load_first(streams.as_ptr().add(s * hidden + i), left));
            }
            sum.div(V::splat(n as f32)).store_first(out.as_mut_ptr().add(i), left);
        }
    }
}

#[inline(always)]
unsafe fn gated_mean_lanes<V: Lanes>(gates: &[f32], streams: &[f32], out: &mut [f32]) {
    let hidden = out.len();
    let n = streams.len() / hidden.max(1);
    assert!(streams.len() == n * hidden && gates.len() == n * hidden, "{n} streams of {hidden}");
    for i in (0..hidden).step_by(16) {
        let left = (hidden - i).min(16);
        // SAFETY: as above.
        unsafe {
            let mut sum = V::splat(0.0);
            for s in 0..n {
                let gate = sigmoid(V::load_first(gates.as_ptr().add(s * hidden + i), left));
                sum = gate.fma(V::load_first(streams.as_ptr().add(s * hidden + i), left), sum);
            }
            sum.div(V::splat(n as f32)).store_first(out.as_mut_ptr().add(i), left);
        }
    }
}

#[inline(always)]
unsafe fn inject_lanes<V: Lanes>(x: &[f32], logits: &[f32], streams: &mut [f32]) {
    let (n, hidden) = (logits.len(), x.len());
    assert!(streams.len() == n * hidden, "{n} streams of {hidden}");
    for s in 0..n {
        let weight = 2.0 * sigmoid1(logits[s] / n as f32);
        for i in (0..hidden).step_by(16) {
            let left = (hidden - i).min(16);
            // SAFETY: as above.
            unsafe {
                let stream = streams.as_mut_ptr().add(s * hidden + i);
                let x = V::load_first(x.as_ptr().add(i), left);
                V::splat(weight).fma(x, V::load_first(stream, left)).store_first(stream, left);
            }
        }
    }
}

simd! {
    /// What a block takes of streams that are attended to: `streams` `[n, hidden]`, of at most [`MOST_ATTENDED`]; `weights` `[hidden]`, of their normed elements in scores.
    pub fn attend(streams: &[f32], weights: &[f32], eps: f32, out: &mut [f32]) = attend_lanes
}

simd! {
    /// The mean of streams, each element of which is multiplied by the sigmoid of its gate. `gates`, `streams`: `[n, hidden]`, `out`: `[hidden]`.
    pub fn gated_mean(gates: &[f32], streams: &[f32], out: &mut [f32]) = gated_mean_lanes
}

simd! {
    /// `streams[s] += 2 * sigmoid(logits[s] / n) * x`. `x`: `[hidden]`, `logits`: `[n]`, `streams`: `[n, hidden]`.
    pub fn inject(x: &[f32], logits: &[f32], streams: &mut [f32]) = inject_lanes
}

simd! {
    /// `out = sum of weights[s] * streams[s]`. `streams`: `[n, hidden]`, `weights`: `[n]`, `out`: `[hidden]`.
    pub fn collapse(streams: &[f32], weights: &[f32], out: &mut [f32]) = collapse_lanes
}

simd! {
    /// `streams[to] = weights[to] * x + sum over from of weights[n + from * n + to] * streams[from]`. `x`: `[hidden]`, `weights`: `[n + n * n]`, `streams`: `[n, hidden]`.
    pub fn expand(x: &[f32], weights: &[f32], streams: &mut [f32]) = expand_lanes
}

simd! {
    /// The plain mean of streams. `streams`: `[n, hidden]`, `out`: `[hidden]`.
    pub fn mean(streams: &[f32], out: &mut [f32]) = mean_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::test_random::{bits, random};

    #[test]
    fn streams_are_attended_to_as_the_formula_says() {
        for (n, hidden) in [(1, 7), (3, 40), (9, 100), (16, 65)] {
            let (streams, weights) = (random(n * hidden, 5), random(hidden, 6));
            let mut out = vec![0.0; hidden];
            attend(Isa::GENERIC, &streams, &weights, 1e-5, &mut out);
            let of = |s: usize| streams[s * hidden..][..hidden].iter().map(|x| f64::from(*x));
            let score = |s: usize| {
                let rms = (of(s).map(|x| x * x).sum::<f64>() / hidden as f64 + 1e-5).sqrt();
                of(s).zip(&weights).map(|(x, w)| x * f64::from(*w)).sum::<f64>() / rms
            };
            let e: Vec<f64> = (0..n).map(|s| score(s).exp()).collect();
            for (i, found) in out.iter().enumerate() {
                let wanted =
                    (0..n).map(|s| e[s] * f64::from(streams[s * hidden + i])).sum::<f64>() / e.iter().sum::<f64>();
                assert!((f64::from(*found) - wanted).abs() < 1e-5 * wanted.abs().max(1.0), "{found}, {wanted}");
            }
            for isa in Isa::supported() {
                let mut other = vec![0.0; hidden];
                attend(isa, &streams, &weights, 1e-5, &mut other);
                assert_eq!(bits(&other), bits(&out));
            }
        }
    }

    #[test]
    fn what_streams_exchange_adds_up_to_one() {
        let mut weights: Vec<f32> = (0..weights_of(4)).map(|i| (i * 37 % 19) as f32 / 7.0 - 1.0).collect();
        mixing(4, &mut weights, &[0.25; 24], [1.0, 0.5, 2.0], 1e-6, 20);
        assert!(
            weights[..4].iter().all(|w| (0.0..1.1).contains(w)) && weights[4..8].iter().all(|w| (0.0..2.0).contains(w))
        );
        let between = &weights[8..];
        for i in 0..4 {
            let (row, column): (f32, f32) =
                ((0..4).map(|j| between[4 * i + j]).sum(), (0..4).map(|j| between[4 * j + i]).sum());
            assert!((row - 1.0).abs() < 1e-3 && (column - 1.0).abs() < 1e-4, "{row} {column}");
        }
    }
}
