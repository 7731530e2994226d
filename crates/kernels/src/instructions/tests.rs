//! Every instruction set against the generic one, operation by operation where an operation is more than an instruction.

use proptest::prelude::*;

use super::bf16_dot::Bf16Dot;
use super::f32_dot::Lanes;
use super::int11_dot::{Int11Dot, ROWS};
use crate::Isa;
use crate::dispatch::simd;
use crate::test_random::random;

#[inline(always)]
unsafe fn dot_lanes<V: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let (n, whole) = (a.len(), a.len() / 16 * 16);
    // SAFETY: every load stays inside the slices; the caller vouches for the instruction set.
    unsafe {
        let mut acc = V::splat(0.0);
        for i in (0..whole).step_by(16) {
            acc = V::load(a.as_ptr().add(i)).fma(V::load(b.as_ptr().add(i)), acc);
        }
        if whole < n {
            let (x, y) = (a.as_ptr().add(whole), b.as_ptr().add(whole));
            acc = V::load_first(x, n - whole).fma(V::load_first(y, n - whole), acc);
        }
        acc.sum()
    }
}

simd! {
    /// A lane sum of products.
    fn dot(a: &[f32], b: &[f32]) -> f32 = dot_lanes
}

#[inline(always)]
unsafe fn sum_lanes<V: Lanes>(v: &[f32; 16]) -> f32 {
    // SAFETY: sixteen lanes; the shell has the instruction set.
    unsafe { V::load(v.as_ptr()).sum() }
}
simd! { fn sum(v: &[f32; 16]) -> f32 = sum_lanes }

#[inline(always)]
unsafe fn sums_lanes<V: Lanes>(x: &[f32], out: &mut [f32; 16]) {
    assert_eq!(x.len(), 256);
    // SAFETY: sixteen times sixteen lanes; the shell has the instruction set.
    unsafe { V::sum16(std::array::from_fn(|i| V::load(x.as_ptr().add(16 * i)))).store(out.as_mut_ptr()) }
}
simd! { fn sums(x: &[f32], out: &mut [f32; 16]) = sums_lanes }

#[inline(always)]
unsafe fn transposed_lanes<V: Lanes>(x: &mut [f32; 256]) {
    // SAFETY: sixteen times sixteen lanes; the shell has the instruction set.
    unsafe {
        let v = V::transpose16(std::array::from_fn(|i| V::load(x.as_ptr().add(16 * i))));
        for (i, v) in v.into_iter().enumerate() {
            v.store(x.as_mut_ptr().add(16 * i));
        }
    }
}
simd! { fn transposed(x: &mut [f32; 256]) = transposed_lanes }

#[test]
fn rows_become_columns() {
    for isa in Isa::supported() {
        let mut x: [f32; 256] = std::array::from_fn(|i| i as f32);
        transposed(isa, &mut x);
        assert!((0..256).all(|i| x[i] == (i % 16 * 16 + i / 16) as f32), "{isa}");
    }
}

proptest! {
    #[test]
    fn dot_has_the_same_bits_in_every_instruction_set(n in 0usize..100, seed in any::<u64>()) {
        let (a, b) = (random(n, seed), random(n, !seed));
        let oracle = dot(Isa::GENERIC, &a, &b);
        for isa in Isa::supported() {
            prop_assert_eq!(dot(isa, &a, &b).to_bits(), oracle.to_bits());
        }
    }

    #[test]
    fn sixteen_sums_are_each_the_tree(x in prop::collection::vec(-1e3f32..1e3, 256)) {
        let oracle: Vec<u32> = x.as_chunks::<16>().0.iter().map(|v| sum(Isa::GENERIC, v).to_bits()).collect();
        for isa in Isa::supported() {
            let mut out = [0.0; 16];
            sums(isa, &x, &mut out);
            prop_assert_eq!(&out.map(f32::to_bits)[..], &oracle);
        }
    }
}

#[inline(always)]
unsafe fn mac_lanes<V: Bf16Dot>(acc: &[f32; 16], a: &[u16; 32], b: &[u16; 32]) -> [f32; 16] {
    // SAFETY: whole registers; the shell has the instruction set.
    unsafe {
        let (a, b) = (V::load_pair(a.as_ptr().cast()), V::load_pair(b.as_ptr().cast()));
        V::load(acc.as_ptr()).mac_pair(a, b).to_array()
    }
}
simd! { fn mac(acc: &[f32; 16], a: &[u16; 32], b: &[u16; 32]) -> [f32; 16] = mac_lanes }

#[inline(always)]
unsafe fn round_lanes<V: Bf16Dot>(x: &[f32; 16]) -> [u16; 16] {
    let mut out = [0u16; 16];
    // SAFETY: whole registers; the shell has the instruction set.
    unsafe { V::load(x.as_ptr()).store_bf16(out.as_mut_ptr().cast()) };
    out
}
simd! { fn round(x: &[f32; 16]) -> [u16; 16] = round_lanes }

/// An accumulator and pairs whose products lie about the smallest normal number, or anywhere.
fn lane() -> impl Strategy<Value = (f32, [u16; 2], [u16; 2])> {
    let near = |bits: u32| f32::from_bits((0x0080_0000 + (bits & 3)) | (bits & 0x8000_0000));
    let acc = prop_oneof![
        any::<u32>().prop_map(f32::from_bits),
        any::<u32>().prop_map(near),
        any::<u32>().prop_map(|x| f32::from_bits(x & 0x81ff_ffff)),
    ];
    let pair = (any::<[u16; 2]>(), any::<[u16; 2]>(), 1u16..120, 70u16..140, any::<bool>(), any::<bool>());
    let pair = pair.prop_map(|(a, b, exponent, sum, anything, powers)| {
        if anything {
            return (a, b);
        }
        // Exponents that add up to 2^-126 and some bits above or below.
        let other = (sum + 26).saturating_sub(exponent).min(254);
        let keep = if powers { 0x8000 } else { 0x807f };
        (a.map(|a| (a & keep) | (exponent << 7)), b.map(|b| (b & keep) | (other << 7)))
    });
    (acc, pair).prop_map(|(acc, (a, b))| (acc, a, b))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn pairs_round_and_flush_alike_everywhere(lanes in prop::collection::vec(lane(), 16)) {
        let (mut acc, mut a, mut b) = ([0f32; 16], [0u16; 32], [0u16; 32]);
        for (l, lane) in lanes.iter().enumerate() {
            acc[l] = lane.0;
            a[2 * l..2 * l + 2].copy_from_slice(&lane.1);
            b[2 * l..2 * l + 2].copy_from_slice(&lane.2);
        }
        let bits = |y: [f32; 16]| y.map(|y| if y.is_nan() { !0 } else { y.to_bits() });
        let wanted = bits(mac(Isa::GENERIC, &acc, &a, &b));
        for isa in Isa::supported() {
            prop_assert_eq!(bits(mac(isa, &acc, &a, &b)), wanted, "{}: {:?} {:?} {:?}", isa, acc, a, b);
            prop_assert_eq!(round(isa, &acc), round(Isa::GENERIC, &acc));
        }
    }
}

/// Sums of 64 columns, of the first sixteen, and of the sixteen behind these, and all of them with 7 added.
#[inline(always)]
unsafe fn row_sums_lanes<V: Int11Dot>(q: &[u8; 64 * ROWS], x: &[i16; 64]) -> [[f32; 16]; 4] {
    // SAFETY: sixteen rows of 64 columns; the shell has the instruction set.
    unsafe {
        let all = V::row_sums(q.as_ptr(), 64, x.as_ptr(), 64);
        let [a, b] = V::half_row_sums(q.as_ptr(), 64, x.as_ptr());
        let added = V::add_to_all(all, 7);
        [V::to_f32(all).to_array(), V::to_f32(a).to_array(), V::to_f32(b).to_array(), V::to_f32(added).to_array()]
    }
}
simd! { fn row_sums(q: &[u8; 64 * ROWS], x: &[i16; 64]) -> [[f32; 16]; 4] = row_sums_lanes }

#[test]
fn sums_of_rows_are_those_of_plain_code() {
    let mut rng = fastrand::Rng::with_seed(6);
    for _ in 0..50 {
        let mut q = [0; 64 * ROWS];
        rng.fill(&mut q);
        let x: [i16; 64] = std::array::from_fn(|_| rng.i16(-16384..=16384));
        let sum = |r: usize, columns: std::ops::Range<usize>| -> i32 {
            columns.map(|k| i32::from(q[64 * r + k]) * i32::from(x[k])).sum()
        };
        let wanted: [[f32; 16]; 4] = std::array::from_fn(|kind| {
            std::array::from_fn(|r| match kind {
                0 => sum(r, 0..64) as f32,
                1 => sum(r, 0..16) as f32,
                2 => sum(r, 16..32) as f32,
                _ => (sum(r, 0..64) + 7) as f32,
            })
        });
        for isa in Isa::supported() {
            assert_eq!(row_sums(isa, &q, &x), wanted, "{isa}");
        }
    }
}
