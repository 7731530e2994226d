//! Quantisation that looks at what its matrix is used for: affine groups whose q, scale and bias lower
//!
//! `(w - v) H (w - v)^T`, `v = s q + b` in each group, `H = sum of x x^T` over the inputs x that the row w sees,
//!
//! which is the squared error of the row's outputs, rather than that of its weights. The quadratic form is that of Optimal Brain Surgeon
//! (Hassibi, Stork 1993) as GPTQ uses it (Frantar et al. 2022, arXiv:2210.17323); here it is lowered by descent, as QuantEase does for q
//! (Behdin et al. 2023, arXiv:2309.01885): one weight at a time takes its best level while all others stand, and each group's scale and bias
//! take their least-squares values for the q they have. Nothing is inverted or factorised, so a singular H needs no care, every step lowers
//! the error, and the work is products of matrices.
//!
//! Sixteen rows go together, one in each lane; a row's result never depends on its neighbours. Plain multiplications and additions, each rounded once: the
//! same bits in every instruction set.

use std::array::from_fn;

use super::group::nearest;
use crate::affine;
use crate::dense::{Buffer, LEFT, Panels, RIGHT, add_panels};
use crate::dispatch::simd;
use crate::format::Float;
use crate::instructions::f32_dot::Lanes;
use crate::isa::Isa;

/// Rows that go together.
const LANES: usize = LEFT;
type Row16 = [f32; LANES];

/// Parts of a group's range that the search for a start tries.
const SHRINK: [f32; 10] = [1.0, 0.95, 0.9, 0.85, 0.8, 0.74, 0.68, 0.6, 0.5, 0.42];
/// Regressions from each of them.
const REGRESSIONS: usize = 4;
/// A scale's least magnitude: smaller ones would make levels that are equal in f32.
const TINY: f32 = 1e-20;

/// How rows are quantised.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// 2, 3, 4, 5, 6 or 8
    pub bits: u8,
    /// Columns that share a scale and a bias: 32, 64 or 128.
    pub group: usize,
    /// Type in which scales and biases are stored: the search accounts for their rounding.
    pub scale: Float,
    /// Times that all groups are visited.
    pub sweeps: usize,
    /// Passes over a group's q and its scale and bias at each visit.
    pub rounds: usize,
}

/// Quantised rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quantized {
    /// `[rows, cols]`, one q a byte.
    pub q: Vec<u8>,
    /// `[rows, cols / group]`, exact values of the stored type.
    pub scales: Vec<f32>,
    /// The bias of each group.
    pub biases: Vec<f32>,
}

/// Quantises `w: [rows, cols]` for inputs whose second moments are `h: [cols, cols]` (symmetric, positive diagonal), lowering
/// `(w - v) H (w - v)^T + 2 (w - v) pull^T`: `pull: [cols, rows]`, or empty for zeros, moves the outputs that are wanted away from those of w.
///
/// Panics where lengths do not fit or columns are not whole groups.
pub fn quantize(isa: Isa, w: &[f32], cols: usize, h: &[f32], pull: &[f32], p: Params) -> Quantized {
    let (rows, g) = (w.len() / cols, p.group);
    assert!(w.len() == rows * cols && h.len() == cols * cols && cols.is_multiple_of(g), "whole rows and groups");
    assert!(pull.is_empty() || pull.len() == w.len(), "a pull for each weight");
    let groups = cols / g;
    let top = ((1u16 << p.bits) - 1) as f32;
    // Sixteen rows are a panel, `[cols, 16]`: weights, what is left of them (`w - v`) and q; scales and biases are `[groups, 16]` in each.
    let w = Panels::<LANES>::of_rows(w, cols).data;
    let h_panels = Panels::<RIGHT>::of_rows(h, cols).data;
    let (mut rest, mut q) = (Buffer::zeros(w.len()), Buffer::zeros(w.len()));
    let mut pairs = vec![[[0f32; LANES]; 2]; w.len() / (g * LANES)];
    // Of group k in a panel: its lanes, and its scales and biases.
    let at = |panel: usize, k: usize| {
        ((panel * cols + k * g) * LANES..(panel * cols + (k + 1) * g) * LANES, panel * groups + k)
    };

    // 1. a start: least squares weighted by H's diagonal
    for k in 0..groups {
        let weights: Vec<f32> = (k * g..(k + 1) * g).map(|j| h[j * cols + j]).collect();
        for panel in 0..rows.div_ceil(LANES) {
            let (lanes, pair) = at(panel, k);
            let [s, b] = &mut pairs[pair];
            start(isa, &w[lanes.clone()], &weights, top, p.scale, &mut q[lanes.clone()], s, b, &mut rest[lanes]);
        }
    }

    // 2. descent, group by group; the gradient of a group is a product with its rows of H
    let mut gradient = Buffer::zeros(g * rows);
    let mut block = vec![0f32; g * g];
    let mut sums = vec![0f32; g];
    let mut lanes = vec![0f32; g * LANES];
    for _ in 0..p.sweeps {
        for k in 0..groups {
            let columns = k * g..(k + 1) * g;
            match pull {
                [] => gradient.fill(0.0),
                pull => gradient.copy_from_slice(&pull[columns.start * rows..columns.end * rows]),
            }
            let of_group = &h_panels[columns.start * cols..columns.end * cols];
            add_panels(isa, (&rest, rows), (of_group, g), cols, false, &mut gradient);
            for (j, column) in columns.clone().enumerate() {
                block[j * g..(j + 1) * g].copy_from_slice(&h[column * cols..][columns.clone()]);
                sums[j] = block[j * g..(j + 1) * g].iter().sum();
            }
            for panel in 0..rows.div_ceil(LANES) {
                let n = LANES.min(rows - panel * LANES);
                for (to, from) in lanes.chunks_exact_mut(LANES).zip(gradient.chunks_exact(rows)) {
                    to[..n].copy_from_slice(&from[panel * LANES..][..n]);
                    to[n..].fill(0.0);
                }
                let (at, pair) = at(panel, k);
                let (w, q, rest) = (&w[at.clone()], &mut q[at.clone()], &mut rest[at]);
                let [s, b] = &mut pairs[pair];
                descend(isa, &block, &sums, top, p.scale, p.rounds, w, &mut lanes, q, s, b, rest);
            }
        }
    }

    // 3. row-major
    let mut out = Quantized {
        q: vec![0; rows * cols],
        scales: Vec::with_capacity(rows * groups),
        biases: Vec::with_capacity(rows * groups),
    };
    for r in 0..rows {
        let (panel, lane) = (r / LANES, r % LANES);
        let column = q[panel * cols * LANES..][..cols * LANES].as_chunks::<LANES>().0;
        out.q[r * cols..(r + 1) * cols].iter_mut().zip(column).for_each(|(to, q)| *to = q[lane] as u8);
        let pairs = &pairs[panel * groups..][..groups];
        out.scales.extend(pairs.iter().map(|[s, _]| s[lane]));
        out.biases.extend(pairs.iter().map(|[_, b]| b[lane]));
    }
    out
}

impl Quantized {
    /// The rows in MLX's bytes: packed q, scales, biases of type `scale`.
    pub fn pack(&self, bits: u8, scale: Float) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        let mut data = vec![0; self.q.len() / 8 * bits as usize];
        affine::pack(bits, &self.q, &mut data);
        let bytes = |values: &[f32]| {
            let mut out = vec![0; values.len() * scale.size()];
            out.chunks_exact_mut(scale.size()).zip(values).for_each(|(out, &v)| scale.write(v, out));
            out
        };
        (data, bytes(&self.scales), bytes(&self.biases))
    }

    /// The values `q s + b`, `[rows, cols]`.
    pub fn values(&self, group: usize) -> Vec<f32> {
        let pairs = self.scales.iter().zip(&self.biases);
        let mut out = Vec::with_capacity(self.q.len());
        for (q, (s, b)) in self.q.chunks_exact(group).zip(pairs) {
            out.extend(q.iter().map(|&q| q as f32 * s + b));
        }
        out
    }
}

// The compiler vectorises these loops, given the shell's instruction set.
#[allow(clippy::too_many_arguments, clippy::extra_unused_type_parameters)]
#[inline(always)]
unsafe fn start_lanes<V: Lanes>(
    w: &[f32],
    weights: &[f32],
    top: f32,
    scale: Float,
    q: &mut [f32],
    s: &mut Row16,
    b: &mut Row16,
    rest: &mut [f32],
) {
    let w = w.as_chunks::<LANES>().0;
    let (mut low, mut high) = (w[0], w[0]);
    let (mut d_sum, mut dw) = (0f32, [0f32; LANES]);
    for (w, d) in w.iter().zip(weights) {
        low = from_fn(|i| if w[i] < low[i] { w[i] } else { low[i] });
        high = from_fn(|i| if w[i] > high[i] { w[i] } else { high[i] });
        d_sum += d;
        dw = from_fn(|i| dw[i] + d * w[i]);
    }
    let (mut best, mut best_s, mut best_b) = ([f32::INFINITY; LANES], [1f32; LANES], [0f32; LANES]);
    for part in SHRINK {
        let mut s16: Row16 = from_fn(|i| scale.round((high[i] - low[i]) * part / top));
        s16 = from_fn(|i| if s16[i] > TINY { s16[i] } else { 1.0 });
        let mut b16: Row16 = from_fn(|i| scale.round(0.5 * (low[i] + high[i]) - 0.5 * (high[i] - low[i]) * part));
        for _ in 0..=REGRESSIONS {
            // 1. the nearest q, and sums for the next regression
            let inverse: Row16 = from_fn(|i| 1.0 / s16[i]);
            let (mut cost, mut dq, mut dqq, mut dqw) = ([0f32; LANES], [0f32; LANES], [0f32; LANES], [0f32; LANES]);
            for (w, d) in w.iter().zip(weights) {
                let q: Row16 = from_fn(|i| nearest((w[i] - b16[i]) * inverse[i], top));
                let e: Row16 = from_fn(|i| w[i] - (q[i] * s16[i] + b16[i]));
                cost = from_fn(|i| cost[i] + d * e[i] * e[i]);
                dq = from_fn(|i| dq[i] + d * q[i]);
                dqq = from_fn(|i| dqq[i] + d * q[i] * q[i]);
                dqw = from_fn(|i| dqw[i] + d * q[i] * w[i]);
            }
            for i in 0..LANES {
                if cost[i] < best[i] {
                    (best[i], best_s[i], best_b[i]) = (cost[i], s16[i], b16[i]);
                }
            }
            // 2. scale and bias of least squares for these q
            for i in 0..LANES {
                let spread = d_sum * dqq[i] - dq[i] * dq[i];
                if spread > 1e-6 * d_sum * dqq[i] {
                    let slope = scale.round((d_sum * dqw[i] - dq[i] * dw[i]) / spread);
                    if slope.abs() > TINY {
                        s16[i] = slope;
                        b16[i] = scale.round((dw[i] - slope * dq[i]) / d_sum);
                    }
                }
            }
        }
    }
    (*s, *b) = (best_s, best_b);
    let inverse: Row16 = from_fn(|i| 1.0 / s[i]);
    let q = q.as_chunks_mut::<LANES>().0;
    for (q, w) in q.iter_mut().zip(w) {
        *q = from_fn(|i| nearest((w[i] - b[i]) * inverse[i], top));
    }
    leave(w, q, s, b, rest);
}

/// `rest = w - (q s + b)`
#[inline(always)]
fn leave(w: &[Row16], q: &[Row16], s: &Row16, b: &Row16, rest: &mut [f32]) {
    for ((rest, w), q) in rest.as_chunks_mut::<LANES>().0.iter_mut().zip(w).zip(q) {
        *rest = from_fn(|i| w[i] - (q[i] * s[i] + b[i]));
    }
}

simd! {
    /// Scale, bias and q of sixteen rows of one group, `w: [group, 16]`, by a search for the least squared error weighted by `weights: [group]`, and what is
    /// left of them.
    fn start(w: &[f32], weights: &[f32], top: f32, scale: Float, q: &mut [f32], s: &mut Row16, b: &mut Row16, rest: &mut [f32]) = start_lanes
}

// The compiler vectorises these loops, given the shell's instruction set.
#[allow(clippy::too_many_arguments, clippy::extra_unused_type_parameters)]
#[inline(always)]
unsafe fn descend_lanes<V: Lanes>(
    block: &[f32],
    sums: &[f32],
    top: f32,
    scale: Float,
    rounds: usize,
    w: &[f32],
    gradient: &mut [f32],
    q: &mut [f32],
    s: &mut Row16,
    b: &mut Row16,
    rest: &mut [f32],
) {
    let g = sums.len();
    let gradient = gradient.as_chunks_mut::<LANES>().0;
    let q = q.as_chunks_mut::<LANES>().0;
    let total: f32 = sums.iter().sum();
    let mut hq = [[0f32; LANES]; 128];
    for _ in 0..rounds {
        // 1. each q to its best level, the others as they are
        let inverse: Row16 = from_fn(|i| 1.0 / s[i]);
        for j in 0..g {
            let row = &block[j * g..(j + 1) * g];
            let step = 1.0 / row[j];
            let (old, gj) = (q[j], gradient[j]);
            let new: Row16 = from_fn(|i| nearest(old[i] + gj[i] * step * inverse[i], top));
            if new == old {
                continue;
            }
            q[j] = new;
            let change: Row16 = from_fn(|i| (new[i] - old[i]) * s[i]);
            for (gradient, &h) in gradient.iter_mut().zip(row) {
                *gradient = from_fn(|i| gradient[i] - change[i] * h);
            }
        }
        // 2. scale and bias: a step of least squares, taken where it helps after rounding
        for (hq, row) in hq.iter_mut().zip(block.chunks_exact(g)) {
            let mut sum = [0f32; LANES];
            for (q, &h) in q.iter().zip(row) {
                sum = from_fn(|i| sum[i] + h * q[i]);
            }
            *hq = sum;
        }
        let (mut a, mut c, mut rq, mut r1) = ([0f32; LANES], [0f32; LANES], [0f32; LANES], [0f32; LANES]);
        for j in 0..g {
            a = from_fn(|i| a[i] + hq[j][i] * q[j][i]);
            c = from_fn(|i| c[i] + hq[j][i]);
            rq = from_fn(|i| rq[i] + gradient[j][i] * q[j][i]);
            r1 = from_fn(|i| r1[i] + gradient[j][i]);
        }
        let (mut ds, mut db) = ([0f32; LANES], [0f32; LANES]);
        for i in 0..LANES {
            let spread = a[i] * total - c[i] * c[i];
            if spread > 1e-5 * a[i] * total {
                let new_s = scale.round(s[i] + (total * rq[i] - c[i] * r1[i]) / spread);
                let d = new_s - s[i];
                let new_b = scale.round(b[i] + (r1[i] - d * c[i]) / total);
                let e = new_b - b[i];
                let gain = 2.0 * (d * rq[i] + e * r1[i]) - (d * d * a[i] + 2.0 * d * e * c[i] + e * e * total);
                if gain > 0.0 && new_s.abs() > TINY && new_b.is_finite() {
                    (ds[i], db[i], s[i], b[i]) = (d, e, new_s, new_b);
                }
            }
        }
        for j in 0..g {
            gradient[j] = from_fn(|i| gradient[j][i] - (ds[i] * hq[j][i] + db[i] * sums[j]));
        }
    }
    leave(w.as_chunks::<LANES>().0, q, s, b, rest);
}

simd! {
    /// Lowers the error of sixteen rows in one group. `block: [group, group]` of H and `sums`, those of its rows; `gradient: [group, 16]`, `(w - v) H` in the
    /// group's columns, is used up; `w`, `q` and `rest`, what is left of w: `[group, 16]`.
    fn descend(block: &[f32], sums: &[f32], top: f32, scale: Float, rounds: usize, w: &[f32], gradient: &mut [f32], q: &mut [f32], s: &mut Row16, b: &mut Row16, rest: &mut [f32]) = descend_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_random::random;

    const P: Params = Params { bits: 2, group: 64, scale: Float::Bf16, sweeps: 4, rounds: 2 };

    /// Rows, and moments of inputs that hang together, as a model's do.
    fn case(rows: usize, cols: usize, seed: u64) -> (Vec<f32>, Vec<f32>) {
        let mut values = random((rows + cols) * cols * 3 + cols, seed).into_iter();
        let mut bell = || (0..3).map(|_| values.next().unwrap() * 0.3).sum::<f32>();
        let w = (0..rows * cols).map(|_| 0.02 * bell()).collect();
        let inputs = cols / 2;
        let mut x = vec![0f32; inputs * cols];
        for row in x.chunks_exact_mut(cols) {
            let common = bell();
            row.iter_mut().enumerate().for_each(|(c, v)| *v = bell() * (1.0 + (c % 7) as f32) + 2.0 * common);
        }
        let mut h = vec![0f32; cols * cols];
        for row in x.chunks_exact(cols) {
            for i in 0..cols {
                for j in 0..cols {
                    h[i * cols + j] += row[i] * row[j];
                }
            }
        }
        let mean = (0..cols).map(|i| h[i * cols + i]).sum::<f32>() / cols as f32;
        (0..cols).for_each(|i| h[i * cols + i] += 0.01 * mean);
        (w, h)
    }

    fn cost(w: &[f32], v: &[f32], h: &[f32], cols: usize) -> f64 {
        let mut all = 0.0;
        for (w, v) in w.chunks_exact(cols).zip(v.chunks_exact(cols)) {
            let e: Vec<f64> = w.iter().zip(v).map(|(w, v)| (w - v) as f64).collect();
            for i in 0..cols {
                all += e[i] * (0..cols).map(|j| h[i * cols + j] as f64 * e[j]).sum::<f64>();
            }
        }
        all
    }

    #[test]
    fn every_sweep_lowers_the_error_of_the_outputs() {
        for (bits, gain) in [(2, 0.6), (3, 0.6), (4, 0.7)] {
            let (rows, cols) = (19, 192);
            let (w, h) = case(rows, cols, bits as u64);
            let at = |sweeps| {
                let p = Params { bits, sweeps, ..P };
                cost(&w, &quantize(Isa::GENERIC, &w, cols, &h, &[], p).values(64), &h, cols)
            };
            let costs: Vec<f64> = (0..5).map(at).collect();
            assert!(costs.windows(2).all(|c| c[1] <= c[0] * 1.001), "{bits} bits: {costs:?}");
            assert!(costs[4] < gain * costs[0], "{bits} bits: {costs:?}");
        }
    }

    #[test]
    fn a_row_is_the_same_alone_among_others_and_in_every_instruction_set() {
        let (rows, cols) = (21, 128);
        let (w, h) = case(rows, cols, 5);
        for (bits, group, scale) in [(2, 64, Float::Bf16), (3, 32, Float::F16), (4, 128, Float::F32)] {
            let p = Params { bits, group, scale, ..P };
            let all = quantize(Isa::GENERIC, &w, cols, &h, &[], p);
            for isa in Isa::supported() {
                assert_eq!(quantize(isa, &w, cols, &h, &[], p), all, "{isa}");
            }
            for r in [0, 7, 20] {
                let one = quantize(Isa::GENERIC, &w[r * cols..(r + 1) * cols], cols, &h, &[], p);
                assert_eq!(one.q, all.q[r * cols..(r + 1) * cols]);
                assert_eq!(one.scales, all.scales[r * cols / group..(r + 1) * cols / group]);
            }
        }
    }

    #[test]
    fn rows_on_a_grid_stay_what_they_are() {
        let cols = 64;
        let (_, h) = case(1, cols, 9);
        let w: Vec<f32> = (0..cols).map(|c| (c * 7 % 4) as f32 * 0.25 - 0.5).collect();
        let found = quantize(Isa::GENERIC, &w, cols, &h, &[], P);
        assert_eq!(found.values(64), w);
        // Zeros, all alike, and an H of zeros but its diagonal.
        let mut eye = vec![0f32; cols * cols];
        (0..cols).for_each(|i| eye[i * cols + i] = 1.0);
        for v in [0.0, 0.5] {
            let found = quantize(Isa::GENERIC, &vec![v; cols], cols, &eye, &[], P).values(64);
            assert!(found.iter().all(|f| (f - v).abs() < 1e-6), "{found:?}");
        }
    }
}
