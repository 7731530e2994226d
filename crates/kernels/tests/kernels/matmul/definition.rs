//! Products by the definition in `docs/numerics.md`, written down here once more, plainly, from the weights' values.

use sluice_kernels::Isa;
use sluice_kernels::affine::{BlockValues, block_values, dequantize_row, unpack};
use sluice_kernels::format::{ActivationFormat, E2m1, WeightFormat};
use sluice_kernels::input::ORDER;

use super::tokens::Tokens;
use super::weights::{Weights, group_of};

fn tree(mut lanes: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// An e4m3 number that is one.
pub fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
    let size = if exponent == 0 { mantissa * 2f32.powi(-6) } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
    if byte & 0x80 == 0 { size } else { -size }
}

/// A row's unsigned integers, and the scale and bias of each group.
pub fn grouped_row(w: &Weights, r: usize) -> (Vec<u8>, Vec<(f32, f32)>) {
    let (mut q, scales, biases) = (vec![0u8; w.cols], w.row(1, r), w.row(2, r));
    let groups = 0..w.cols / group_of(w.format);
    match w.format {
        WeightFormat::Float(_) | WeightFormat::Fp8(_) => unreachable!("no groups"),
        WeightFormat::E2m1(e2m1) => {
            for (i, q) in q.iter_mut().enumerate() {
                *q = (2.0 * E2M1[usize::from(w.row(0, r)[i / 2] >> (i % 2 * 4) & 15)] + 12.0) as u8;
            }
            let scale = |g: usize| match e2m1 {
                E2m1::Power => 2f32.powi(i32::from(scales[g]) - 128),
                E2m1::E4m3 { global, divides } => {
                    let (scale, global) = (e4m3(scales[g]), f32::from_bits(global));
                    0.5 * if divides { scale / global } else { scale * global }
                }
            };
            (q, groups.map(|g| (scale(g), scale(g) * -12.0)).collect())
        }
        WeightFormat::Affine { bits, scale, .. } => {
            unpack(bits, w.row(0, r), &mut q);
            (q, groups.map(|g| (scale.read(scales, g), scale.read(biases, g))).collect())
        }
        WeightFormat::Blocks(blocks) => {
            let BlockValues { integers, scales, biases } = block_values(blocks, w.row(0, r));
            (integers, scales.into_iter().zip(biases).collect())
        }
    }
}

/// One output by the definition, and in f64 from the same encoded values.
pub fn defined(w: &Weights, r: usize, x: &Tokens, token: usize, encoding: ActivationFormat) -> (f32, f64) {
    let cols = w.cols;
    let mut row = vec![0f32; cols];
    dequantize_row(Isa::GENERIC, &w.matrix(), r, &mut row);
    match encoding {
        ActivationFormat::F32 => {
            let x = &x.f32[token * cols..][..cols];
            let mut lanes = [0f32; 16];
            for i in 0..cols.next_multiple_of(16) {
                let (w, x) = if i < cols { (row[i], x[i]) } else { (0.0, 0.0) };
                lanes[i % 16] = w.mul_add(x, lanes[i % 16]);
            }
            (tree(lanes), row.iter().zip(x).map(|(&w, &x)| w as f64 * x as f64).sum())
        }
        ActivationFormat::Bf16 => {
            let bf16 = |x: u16| f32::from_bits((x as u32) << 16);
            let row: Vec<f32> = row.iter().map(|&w| bf16(half::bf16::from_f32(w).to_bits())).collect();
            let x: Vec<f32> = x.bf16[token * cols..][..cols].iter().map(|&x| bf16(x)).collect();
            let mut lanes = [0f32; 16];
            for c in 0..cols.div_ceil(32) {
                for (l, lane) in lanes.iter_mut().enumerate() {
                    for i in [32 * c + 2 * l + 1, 32 * c + 2 * l] {
                        let (w, x) = if i < cols { (row[i], x[i]) } else { (0.0, 0.0) };
                        *lane = w.mul_add(x, *lane);
                    }
                }
            }
            (tree(lanes), row.iter().zip(&x).map(|(&w, &x)| w as f64 * x as f64).sum())
        }
        ActivationFormat::Int8 => {
            let (group, groups) = (group_of(w.format), cols / 32);
            // A part of a weight group is an activation group, or half of one.
            let part = group.min(32);
            let (q, scale_and_bias) = grouped_row(w, r);
            let xq = |k: usize| {
                let place = ORDER.iter().position(|&i| i == k % 8).unwrap();
                x.q[token * cols + k / 8 * 8 + place] as i32
            };
            let (mut lanes, mut exact) = ([0f32; 4], 0f64);
            for wide in 0..cols / group {
                let (s, b) = scale_and_bias[wide];
                let (mut t, mut m) = (None, None);
                for k in (wide * group..(wide + 1) * group).step_by(part) {
                    let sx = x.scales[token * groups + k / 32];
                    let mx = sx * (k..k + part).map(xq).sum::<i32>() as f32;
                    let sum: i32 = (k..k + part).map(|k| q[k] as i32 * xq(k)).sum();
                    t = Some(t.map_or(sx * sum as f32, |t| sx.mul_add(sum as f32, t)));
                    m = Some(m.map_or(mx, |m| m + mx));
                    exact += s as f64 * sx as f64 * sum as f64 + b as f64 * mx as f64;
                }
                lanes[wide % 4] = s.mul_add(t.unwrap(), lanes[wide % 4]);
                lanes[wide % 4] = b.mul_add(m.unwrap(), lanes[wide % 4]);
            }
            ((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]), exact)
        }
        ActivationFormat::Int11 if matches!(w.format, WeightFormat::Float(_)) => {
            let (groups, x) = (cols.div_ceil(64), &x.int11);
            let (mut acc, mut exact) = (0f32, 0f64);
            for piece in 0..2 * groups {
                let columns = || (piece / 2 * 64..cols.min(piece / 2 * 64 + 64)).filter(|k| k / 8 % 2 == piece % 2);
                let most = columns().fold(0f64, |m, k| m.max(row[k].abs() as f64));
                let e = if most == 0.0 { -60 } else { (most.log2().floor() as i32 + 1).max(-60) };
                let integer = |k: usize| (row[k] as f64 * 2f64.powi(11 - e)).round_ties_even();
                let sum: f64 = columns().map(|k| integer(k) * x.n[token * cols + k] as f64).sum();
                let unit = 2f64.powi(e - 11) * x.steps[token * groups + piece / 2] as f64;
                acc += sum as f32 * unit as f32;
                exact += sum * unit;
            }
            (acc * x.scales[token], exact * x.scales[token] as f64)
        }
        ActivationFormat::Int11 => {
            let (zero, biased) = match w.format {
                WeightFormat::Blocks(blocks) => blocks.zero(),
                WeightFormat::E2m1(_) => (12.0, false),
                _ => (0.0, true),
            };
            let (group, x) = (group_of(w.format), &x.int11);
            let (q, scale_and_bias) = grouped_row(w, r);
            let (mut acc, mut exact) = (0f32, 0f64);
            for from in (0..cols).step_by(group.min(64)) {
                let (s, b) = scale_and_bias[from / group];
                let step = x.steps[token * cols.div_ceil(64) + from / 64];
                let n = |k: usize| x.n[token * cols + k] as i32;
                let piece = from..from + group.min(64);
                let products: i32 = piece.clone().map(|k| (q[k] as i32 - zero as i32) * n(k)).sum();
                acc = s.mul_add(products as f32 * step, acc);
                exact += s as f64 * products as f64 * step as f64;
                if biased {
                    let sum: i32 = piece.map(n).sum();
                    acc = b.mul_add(sum as f32 * step, acc);
                    exact += b as f64 * sum as f64 * step as f64;
                }
            }
            (acc * x.scales[token], exact * x.scales[token] as f64)
        }
    }
}
