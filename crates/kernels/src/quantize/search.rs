//! A better scale and bias for each group than its range gives: least squares, starting from several ranges.
//!
//! With q given, the scale s and bias b that minimise the sum of (x - s q - b)^2 are a linear regression; with s and b given, the
//! nearest q are best. Alternating the two from ranges shrunk by several factors (which clip the group's outliers for a finer
//! step) finds a good pair; s and b are rounded to their stored type inside the search, so the error compared is the error that the
//! file will have. MLX's own choice stands wherever nothing better is found.

use std::array::from_fn;

use super::group::{LANES, Pair, ends, nearest, put};
use super::mlx;
use crate::format::Float;

/// Parts of the group's range to start from.
const SHRINK: [f32; 8] = [1.0, 0.96, 0.92, 0.88, 0.84, 0.78, 0.70, 0.60];
/// Starts that are followed.
const KEPT: usize = 3;
/// Regressions from each, at most.
const ROUNDS: usize = 6;

/// Quantises one group, its columns in [`LANES`] lanes, to 0..=`top`. Writes its integers to `q`.
#[inline(always)]
pub fn group(x: &[[f32; LANES]], top: f32, scale: Float, q: &mut [u8]) -> Pair {
    // 1. MLX's choice, and what it costs as it is stored
    let mlx = mlx::group(x, top, q);
    let mlx = Pair { s: scale.round(mlx.s), b: scale.round(mlx.b) };
    let mut cost = [0f32; LANES];
    for (x, q) in x.iter().zip(q.as_chunks::<LANES>().0) {
        let e: [f32; LANES] = from_fn(|i| x[i] - (q[i] as f32 * mlx.s + mlx.b));
        cost = from_fn(|i| cost[i] + e[i] * e[i]);
    }
    // 2. anything better?
    let mut best = Found { cost: tree(cost) as f32, pair: None };
    best.search(x, top, scale, mlx);
    let Some(pair) = best.pair else { return mlx };
    let inverse = 1.0 / pair.s;
    put(q, |x| from_fn(|i| nearest((x[i] - pair.b) * inverse, top)), x);
    pair
}

/// The cheapest pair found, if one costs less than what was there.
struct Found {
    cost: f32,
    pair: Option<Pair>,
}

impl Found {
    #[inline(always)]
    fn search(&mut self, x: &[[f32; LANES]], top: f32, scale: Float, mlx: Pair) {
        let (low, high) = ends(x);
        if low == high {
            return;
        }
        let mut sum = [0f32; LANES];
        for x in x {
            sum = from_fn(|i| sum[i] + x[i]);
        }
        let sum_x = tree(sum);
        let (middle, half) = ((low + high) / 2.0, (high - low) / 2.0);
        // 1. one look at each start
        let mut starts = [Sums::default(); SHRINK.len() + 1];
        for (sums, part) in starts.iter_mut().zip(SHRINK) {
            *sums = self.judge(x, top, scale, Pair { s: 2.0 * half * part / top, b: middle - half * part });
        }
        starts[..SHRINK.len()].sort_unstable_by(|a, b| a.cost.total_cmp(&b.cost));
        starts[KEPT] = self.judge(x, top, scale, mlx);
        // 2. regressions from the best few, for as long as they help
        for mut sums in starts.into_iter().take(KEPT + 1) {
            for _ in 0..ROUNDS {
                let Some(pair) = sums.regression(x.len() * LANES, sum_x) else { break };
                let next = self.judge(x, top, scale, pair);
                let helped = next.cost < sums.cost;
                sums = next;
                if !helped {
                    break;
                }
            }
        }
    }

    /// Takes a pair as it would be stored, if it costs less.
    #[inline(always)]
    fn judge(&mut self, x: &[[f32; LANES]], top: f32, scale: Float, pair: Pair) -> Sums {
        let pair = Pair { s: scale.round(pair.s), b: scale.round(pair.b) };
        let sums = Sums::of(x, top, pair);
        if sums.cost < self.cost {
            (self.cost, self.pair) = (sums.cost, Some(pair));
        }
        sums
    }
}

/// Sums over a group whose q are the nearest for a pair.
#[derive(Clone, Copy, Default)]
struct Sums {
    q: f64,
    qq: f64,
    qx: f64,
    /// The sum of squared errors.
    cost: f32,
}

impl Sums {
    #[inline(always)]
    fn of(x: &[[f32; LANES]], top: f32, pair: Pair) -> Sums {
        let inverse = 1.0 / pair.s;
        let (mut q, mut qq, mut qx, mut cost) = ([0f32; LANES], [0f32; LANES], [0f32; LANES], [0f32; LANES]);
        for x in x {
            let v: [f32; LANES] = from_fn(|i| nearest((x[i] - pair.b) * inverse, top));
            let e: [f32; LANES] = from_fn(|i| x[i] - (v[i] * pair.s + pair.b));
            q = from_fn(|i| q[i] + v[i]);
            qq = from_fn(|i| qq[i] + v[i] * v[i]);
            qx = from_fn(|i| qx[i] + v[i] * x[i]);
            cost = from_fn(|i| cost[i] + e[i] * e[i]);
        }
        Sums { q: tree(q), qq: tree(qq), qx: tree(qx), cost: tree(cost) as f32 }
    }

    /// The pair of least squares for these q; `None` where all q are the same.
    #[inline(always)]
    fn regression(&self, n: usize, sum_x: f64) -> Option<Pair> {
        let n = n as f64;
        let spread = n * self.qq - self.q * self.q;
        if spread <= 0.0 {
            return None;
        }
        let s = (n * self.qx - self.q * sum_x) / spread;
        Some(Pair { s: s as f32, b: ((sum_x - s * self.q) / n) as f32 })
    }
}

/// The sum of all lanes by a fixed tree.
#[inline(always)]
fn tree(mut lanes: [f32; LANES]) -> f64 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0] as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::affine;
    use crate::isa::Isa;
    use crate::quantize::{Rounding, quantize};

    /// Sums of three uniform numbers: bell-shaped, with rare outliers.
    fn bell(n: usize, seed: u64) -> Vec<f32> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut uniform = || rng.f32() - 0.5;
        (0..n).map(|_| (uniform() + uniform() + uniform()) * 0.1).collect()
    }

    /// What each group's error is.
    fn cost(rounding: Rounding, x: &[f32], bits: u8, group: u16, float: Float) -> Vec<f64> {
        let groups = x.len() / group as usize;
        let mut data = vec![0; x.len() / 8 * bits as usize];
        let (mut s, mut b) = (vec![0; groups * float.size()], vec![0; groups * float.size()]);
        quantize(Isa::GENERIC, rounding, x, bits, group, float, &mut data, &mut s, &mut b);
        let mut q = vec![0; x.len()];
        affine::unpack(bits, &data, &mut q);
        let of_group = |g: usize| {
            let (s, b) = (float.read(&s, g), float.read(&b, g));
            let at = g * group as usize..(g + 1) * group as usize;
            x[at.clone()].iter().zip(&q[at]).map(|(x, &q)| (*x as f64 - (q as f32 * s + b) as f64).powi(2)).sum()
        };
        (0..groups).map(of_group).collect()
    }

    #[test]
    fn no_group_costs_more_than_mlx_and_the_sum_clearly_less() {
        for float in [Float::Bf16, Float::F16, Float::F32] {
            for (bits, gain) in [(2, 0.75), (3, 0.85), (4, 0.9), (8, 1.0)] {
                let x = bell(64 * 200, bits as u64);
                let [plain, searched] = [Rounding::Mlx, Rounding::Search].map(|r| cost(r, &x, bits, 64, float));
                for (p, s) in plain.iter().zip(&searched) {
                    assert!(*s <= p * 1.000001, "{float:?} {bits}: {s} > {p}");
                }
                let ratio = searched.iter().sum::<f64>() / plain.iter().sum::<f64>();
                assert!(ratio <= gain, "{float:?} {bits}: {ratio}");
            }
        }
    }

    #[test]
    fn what_is_exact_stays_exact() {
        // 16 levels, then all the same, then zeros.
        let x: Vec<f32> = (0..64).map(|i| (i % 16) as f32 * 0.25 - 2.0).chain([0.5; 64]).chain([0.0; 64]).collect();
        let all = cost(Rounding::Search, &x, 4, 64, Float::Bf16);
        assert!(all.iter().all(|&c| c < 1e-12), "{all:?}");
    }
}
