//! Integers of eight and sixteen bits, and attention on them, beside their definition in docs/numerics.md.

use std::ops::Range;

use proptest::prelude::*;

use super::{Cache, HEAD, Kind, cache, in_chunks};
use crate::Isa;
use crate::attention::head::Head;
use crate::attention::kv::{AttentionMode, KvType, store_row};
use crate::attention::paged::PARTITION;
use crate::test_random::{bits, random};

/// A size of integers.
#[derive(Clone, Copy)]
struct Size {
    kind: Kind,
    /// The greatest integers of a row, and of weights.
    top: f32,
    top_weight: f32,
    /// What the sums are multiplied by.
    unit: f32,
}

const SIZES: [Size; 2] = [
    Size { kind: (KvType::Int8, AttentionMode::Int8), top: 127.0, top_weight: 255.0, unit: 1.0 },
    Size { kind: (KvType::Int16, AttentionMode::Int16), top: 32639.0, top_weight: 65535.0, unit: 256.0 },
];

impl Size {
    /// The integers of a row's bytes.
    fn integers(self, bytes: &[u8]) -> Vec<i32> {
        let signed = |b: &u8| i32::from(*b as i8);
        match self.kind.0 {
            KvType::Int8 => bytes.iter().map(signed).collect(),
            _ => {
                let (high, low) = bytes.split_at(bytes.len() / 2);
                high.iter().zip(low).map(|(h, l)| 256 * signed(h) + signed(l)).collect()
            }
        }
    }

    fn quantised(self, isa: Isa, x: &[f32]) -> (Vec<i32>, f32) {
        let (mut row, mut scale) = (vec![0; x.len() * self.kind.0.size()], [0; 4]);
        store_row(isa, self.kind.0, x, &mut row, &mut scale);
        (self.integers(&row), f32::from_le_bytes(scale))
    }

    /// The product of two integers, without that of their low bytes and divided by the unit. `bias`: 128 where the first is signed, 0 where it is a weight.
    fn product(self, a: i32, bias: i32, b: i32) -> i64 {
        if self.kind.0 == KvType::Int8 {
            return i64::from(a * b);
        }
        let halves = |n: i32, bias: i32| ((n + bias) >> 8, n - 256 * ((n + bias) >> 8));
        let ((ah, al), (bh, bl)) = (halves(a, bias), halves(b, 128));
        i64::from(256 * ah * bh + ah * bl + al * bh)
    }
}

proptest! {
    #[test]
    fn rows_are_quantised_alike_everywhere(n in 1usize..300, seed in any::<u64>(), exponent in -140i32..120) {
        let factor = 2f32.powi(exponent);
        let x: Vec<f32> = random(n, seed).iter().map(|x| x * factor).collect();
        let a = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        for size in SIZES {
            let (q, scale) = size.quantised(Isa::GENERIC, &x);
            let inv = if (size.top / a).is_finite() { size.top / a } else { 0.0 };
            prop_assert_eq!(scale.to_bits(), (a / size.top).to_bits());
            for (q, x) in q.iter().zip(&x) {
                prop_assert_eq!(*q, (x * inv).round_ties_even() as i32);
            }
            for isa in Isa::supported() {
                prop_assert_eq!(&size.quantised(isa, &x), &(q.clone(), scale));
            }
        }
    }
}

#[test]
fn a_row_that_is_not_finite_has_no_scale() {
    for (size, isa) in SIZES.into_iter().flat_map(|size| Isa::supported().into_iter().map(move |isa| (size, isa))) {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 20, 36] {
                let mut x = random(37, 9);
                x[at] = odd;
                let (q, scale) = size.quantised(isa, &x);
                assert!(scale.to_bits() == f32::NAN.to_bits() && q.iter().all(|q| *q == 0), "{isa} {odd} at {at}");
            }
        }
        assert_eq!(size.quantised(isa, &[0.0; 19]), (vec![0; 19], 0.0));
        let (top, half) = (size.top as i32, (size.top / 2.0).round_ties_even() as i32);
        assert_eq!(size.quantised(isa, &[1.0, -1.0, 0.5, -0.0]), (vec![top, -top, half, 0], 1.0 / size.top));
    }
}

/// Sum by sum, of a query that sees all positions.
fn defined(size: Size, c: &Cache, head: &Head, q: &[f32], positions: usize) -> Vec<f32> {
    let (v_dim, block) = (c.shape.v_dim, c.shape.block_tokens);
    let slot = |p: usize| c.table[p / block] as usize * block + p % block;
    let scale = |at: Range<usize>| f32::from_le_bytes(c.bytes[at].try_into().unwrap());
    let (q, q_scale) = size.quantised(Isa::GENERIC, q);
    let exp = |x: f32| crate::math::exp1(x);
    let (mut m, mut l, mut o) = (0.0f32, 0.0f32, vec![0.0f32; v_dim]);
    for base in (0..positions).step_by(PARTITION) {
        let seen = base..positions.min(base + PARTITION);
        let scores: Vec<f32> = seen
            .clone()
            .map(|p| {
                let key = size.integers(&c.bytes[c.shape.k_at(slot(p), HEAD)]);
                let dot: i64 = key.iter().zip(&q).map(|(k, q)| size.product(*q, 128, *k)).sum();
                (dot as f32 * scale(c.shape.k_scale_at(slot(p), HEAD))) * (head.scale * (size.unit * q_scale))
            })
            .collect();
        let m_p = scores.iter().fold(f32::NEG_INFINITY, |m, s| m.max(*s));
        let mut lanes = [0.0f32; 16];
        let mut weights = Vec::new();
        for (i, (s, p)) in scores.iter().zip(seen.clone()).enumerate() {
            let p_i = exp(s - m_p);
            lanes[i % 16] += p_i;
            weights.push(p_i * scale(c.shape.v_scale_at(slot(p), HEAD)));
        }
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        let a = weights.iter().fold(0.0f32, |a, w| a.max(*w));
        let inv = size.top_weight / a;
        let integers: Vec<i32> = weights.iter().map(|w| (w * inv).round_ties_even() as i32).collect();
        let sums: Vec<f32> = (0..v_dim)
            .map(|d| {
                let column = seen
                    .clone()
                    .zip(&integers)
                    .map(|(p, w)| size.product(*w, 0, size.integers(&c.bytes[c.shape.v_at(slot(p), HEAD)])[d]));
                column.sum::<i64>() as f32 * (size.unit * (a / size.top_weight))
            })
            .collect();
        if base == 0 {
            (m, l, o) = (m_p, lanes[0], sums);
            continue;
        }
        let top = m.max(m_p);
        let (a, b) = (exp(m - top), exp(m_p - top));
        l = l.mul_add(a, lanes[0] * b);
        o.iter_mut().zip(&sums).for_each(|(o, s)| *o = o.mul_add(a, s * b));
        m = top;
    }
    o.iter().map(|o| o / l).collect()
}

#[test]
fn attention_on_integers_is_as_defined() {
    for size in SIZES {
        for (k_dim, v_dim, positions) in [(70, 33, 300), (128, 64, 128), (1, 1, 5), (516, 16, 140)] {
            let c = cache(size.kind, positions, 32, k_dim, v_dim, 5);
            let q = random(k_dim, 6);
            let head = c.head(1);
            let wanted = bits(&defined(size, &c, &head, &q, positions));
            for isa in Isa::supported() {
                let got = in_chunks(isa, &head, &c.table, &q, positions - 1..positions, 1);
                assert_eq!(bits(&got), wanted, "{isa}, {k_dim} and {v_dim}");
            }
        }
    }
}

/// Rows whose elements all have the greatest size make the greatest sums there are.
#[test]
fn the_greatest_sums_of_sixteen_bits_fit() {
    let size = SIZES[1];
    let (dim, positions) = (AttentionMode::LONGEST_INT16, PARTITION);
    for sign in [1.0, -1.0] {
        let mut c = cache(size.kind, positions, 32, dim, 40, 5);
        for p in 0..positions {
            let slot = c.table[p / 32] as usize * 32 + p % 32;
            for (row, scale, n) in [
                (c.shape.k_at(slot, HEAD), c.shape.k_scale_at(slot, HEAD), dim),
                (c.shape.v_at(slot, HEAD), c.shape.v_scale_at(slot, HEAD), 40),
            ] {
                let (mut to, mut scale_to) = (vec![0; row.len()], [0; 4]);
                store_row(Isa::GENERIC, size.kind.0, &vec![sign; n], &mut to, &mut scale_to);
                c.bytes[row].copy_from_slice(&to);
                c.bytes[scale].copy_from_slice(&scale_to);
            }
        }
        let (q, head) = (vec![1.0; dim], c.head(1));
        let wanted = bits(&defined(size, &c, &head, &q, positions));
        for isa in Isa::supported() {
            let got = in_chunks(isa, &head, &c.table, &q, positions - 1..positions, 1);
            assert_eq!(bits(&got), wanted, "{isa}");
            assert!(got.iter().all(|o| (o - sign).abs() < 1e-4), "{isa}: {got:?}");
        }
    }
}

#[test]
#[should_panic(expected = "keys of 517 elements")]
fn longer_keys_of_sixteen_bits_are_refused() {
    let c = cache(SIZES[1].kind, 1, 16, AttentionMode::LONGEST_INT16 + 1, 8, 1);
    in_chunks(Isa::GENERIC, &c.head(1), &c.table, &vec![0.0; AttentionMode::LONGEST_INT16 + 1], 0..1, 1);
}
