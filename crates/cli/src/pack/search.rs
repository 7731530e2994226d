//! A better scale and bias for each group than its range gives: least squares, starting from several ranges.
//!
//! With q given, the scale s and bias b that minimise the sum of (x - s q - b)^2 are a linear regression; with s and b given, the
//! nearest q are best. Alternating the two from ranges shrunk by several factors (which clip the group's outliers for a finer
//! step) finds a good pair; s and b are rounded to their stored type inside the search, so the error compared is the error that the
//! file will have. MLX's own choice stands wherever nothing better is found.

use std::array::from_fn;

use sluice_kernels::affine;
use sluice_kernels::matmul::Float;

/// Parts of the group's range to start from.
const SHRINK: [f32; 8] = [1.0, 0.96, 0.92, 0.88, 0.84, 0.78, 0.70, 0.60];
/// Starts that are followed.
const KEPT: usize = 3;
/// Regressions from each, at most.
const ROUNDS: usize = 6;
/// Sums run in so many lanes, for the compiler's vectors.
const LANES: usize = 8;

/// As `sluice_kernels::affine::quantize_row`, with the same form of output.
pub fn quantize_row(
    x: &[f32],
    bits: u8,
    group: u16,
    scale: Float,
    data: &mut [u8],
    scales: &mut [u8],
    biases: &mut [u8],
) {
    let top = ((1u16 << bits) - 1) as f32;
    let (size, packed) = (scale.size(), group as usize / 8 * bits as usize);
    let groups = x.chunks_exact(group as usize).zip(data.chunks_exact_mut(packed));
    for ((x, data), (s, b)) in groups.zip(scales.chunks_exact_mut(size).zip(biases.chunks_exact_mut(size))) {
        // 1. MLX's choice, and what it costs as it is stored
        affine::quantize_row(x, bits, group, scale, data, s, b);
        let mut q = [0u8; 128];
        let q = &mut q[..group as usize];
        affine::unpack(bits, data, q);
        let mlx = Pair { s: read(scale, s), b: read(scale, b) };
        let cost = x.iter().zip(q.iter()).map(|(x, &q)| (x - (q as f32 * mlx.s + mlx.b)).powi(2)).sum();

        // 2. anything better?
        if let Some(best) = search(x, top, scale, mlx, cost) {
            best.nearest(x, top, q);
            affine::pack(bits, q, data);
            put(scale, best.s, s);
            put(scale, best.b, b);
        }
    }
}

/// A scale and a bias, as stored.
#[derive(Clone, Copy, Debug)]
struct Pair {
    s: f32,
    b: f32,
}

/// The cheapest pair found, if one costs less than `cost`.
fn search(x: &[f32], top: f32, scale: Float, mlx: Pair, mut cost: f32) -> Option<Pair> {
    let (low, high) = x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &x| (l.min(x), h.max(x)));
    if low == high {
        return None;
    }
    let sum_x: f64 = x.iter().map(|&x| x as f64).sum();
    let (middle, half) = ((low + high) / 2.0, (high - low) / 2.0);
    let shrunk = SHRINK.map(|part| Pair { s: 2.0 * half * part / top, b: middle - half * part });
    let mut best = None;
    let mut judge = |pair: Pair| {
        let pair = Pair { s: round(scale, pair.s), b: round(scale, pair.b) };
        let sums = Sums::of(x, top, pair);
        if sums.cost < cost {
            (cost, best) = (sums.cost, Some(pair));
        }
        sums
    };
    // 1. one look at each start
    let mut starts = shrunk.map(&mut judge);
    starts.sort_unstable_by(|a, b| a.cost.total_cmp(&b.cost));
    let mlx = judge(mlx);
    // 2. regressions from the best few, for as long as they help
    for mut sums in starts.into_iter().take(KEPT).chain([mlx]) {
        for _ in 0..ROUNDS {
            let Some(pair) = sums.regression(x.len(), sum_x) else { break };
            let next = judge(pair);
            let helped = next.cost < sums.cost;
            sums = next;
            if !helped {
                break;
            }
        }
    }
    best
}

/// Sums over a group whose q are the nearest for a pair.
struct Sums {
    q: f64,
    qq: f64,
    qx: f64,
    /// Of squared errors.
    cost: f32,
}

impl Sums {
    fn of(x: &[f32], top: f32, pair: Pair) -> Sums {
        let inverse = 1.0 / pair.s;
        let (mut q, mut qq, mut qx, mut cost) = ([0f32; LANES], [0f32; LANES], [0f32; LANES], [0f32; LANES]);
        for x in x.as_chunks::<LANES>().0 {
            let v: [f32; LANES] = from_fn(|i| nearest((x[i] - pair.b) * inverse, top));
            let e: [f32; LANES] = from_fn(|i| x[i] - (v[i] * pair.s + pair.b));
            q = from_fn(|i| q[i] + v[i]);
            qq = from_fn(|i| qq[i] + v[i] * v[i]);
            qx = from_fn(|i| qx[i] + v[i] * x[i]);
            cost = from_fn(|i| cost[i] + e[i] * e[i]);
        }
        let sum = |l: [f32; LANES]| (((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))) as f64;
        Sums { q: sum(q), qq: sum(qq), qx: sum(qx), cost: sum(cost) as f32 }
    }

    /// The pair of least squares for these q; `None` where all q are the same.
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

impl Pair {
    /// The q that cost least.
    fn nearest(self, x: &[f32], top: f32, q: &mut [u8]) {
        let inverse = 1.0 / self.s;
        for (q, x) in q.iter_mut().zip(x) {
            *q = nearest((x - self.b) * inverse, top) as u8;
        }
    }
}

/// `v` clamped to 0..=top and rounded to a whole number: adding 1.5 * 2^23 leaves no bits for a fraction.
#[inline(always)]
fn nearest(v: f32, top: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    let v = if v > 0.0 { v } else { 0.0 };
    let v = if v < top { v } else { top };
    (v + MAGIC) - MAGIC
}

/// `v` as it will be read back.
fn round(float: Float, v: f32) -> f32 {
    match float {
        Float::F32 => v,
        Float::F16 => half::f16::from_f32(v).to_f32(),
        Float::Bf16 => half::bf16::from_f32(v).to_f32(),
    }
}

fn read(float: Float, bytes: &[u8]) -> f32 {
    match float {
        Float::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        Float::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        Float::Bf16 => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
    }
}

pub fn put(float: Float, v: f32, bytes: &mut [u8]) {
    match float {
        Float::F32 => bytes.copy_from_slice(&v.to_le_bytes()),
        Float::F16 => bytes.copy_from_slice(&half::f16::from_f32(v).to_le_bytes()),
        Float::Bf16 => bytes.copy_from_slice(&half::bf16::from_f32(v).to_le_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums of three uniform numbers: bell-shaped, with rare outliers.
    fn bell(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut uniform = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..n).map(|_| (uniform() + uniform() + uniform()) * 0.1).collect()
    }

    fn cost(
        quantize: impl Fn(&[f32], u8, u16, Float, &mut [u8], &mut [u8], &mut [u8]),
        x: &[f32],
        bits: u8,
        group: u16,
        float: Float,
    ) -> Vec<f64> {
        let groups = x.len() / group as usize;
        let mut data = vec![0; x.len() / 8 * bits as usize];
        let (mut s, mut b) = (vec![0; groups * float.size()], vec![0; groups * float.size()]);
        quantize(x, bits, group, float, &mut data, &mut s, &mut b);
        let mut q = vec![0; x.len()];
        affine::unpack(bits, &data, &mut q);
        let of_group = |g: usize| {
            let (s, b) = (read(float, &s[g * float.size()..]), read(float, &b[g * float.size()..]));
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
                let (plain, searched) =
                    (cost(affine::quantize_row, &x, bits, 64, float), cost(quantize_row, &x, bits, 64, float));
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
        let all = cost(quantize_row, &x, 4, 64, Float::Bf16);
        assert!(all.iter().all(|&c| c < 1e-12), "{all:?}");
    }
}
