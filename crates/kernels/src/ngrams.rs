//! Embeddings of n-grams (Qwen4-Exp): which rows of a table a token's n-grams have, and how much of what is made of these goes into a residual stream. `docs/numerics.md` has the definition.

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::math::sigmoid1;
use crate::norm::rms_in_place_lanes;

/// The most tokens of an n-gram.
pub const MOST_GRAM: usize = 8;

/// Maps a token's n-grams to rows of a table: those of 2 up to as many tokens as there are multipliers, each by several heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NgramHash {
    /// Odd, one for each token of the longest n-gram: the last token's first.
    multipliers: Vec<u64>,
    /// The rows of each head: those of pairs first.
    sizes: Vec<u64>,
    /// Ends a text: what is before it is as if there were nothing.
    end: u32,
}

impl NgramHash {
    /// The hash of PLE layer number `layer`, counted from 0: multipliers come from a seed, and the sizes of all heads are primes from `base` on, each used once in the model.
    pub fn new(
        layer: usize,
        (size, heads_per_gram): (usize, usize),
        base: u64,
        vocabulary: usize,
        seed: u64,
        end: u32,
    ) -> NgramHash {
        assert!((2..=MOST_GRAM).contains(&size) && heads_per_gram > 0 && vocabulary > 0, "n-grams of {size}");
        let half = (i64::MAX as u64 / vocabulary as u64 / 2).max(1);
        let first = seed.wrapping_add((layer as u64).wrapping_mul(10007));
        let multiplier = |i: u64| 2 * (mixed(first.wrapping_add(GAMMA.wrapping_mul(i))) % half) + 1;
        let heads = (size - 1) * heads_per_gram;
        let sizes = primes(base.max(2)).skip(layer * heads).take(heads).collect();
        NgramHash { multipliers: (1..=size as u64).map(multiplier).collect(), sizes, end }
    }

    /// The hash with these multipliers, and rows of each head. `None`: numbers of no hash.
    pub fn of_numbers(multipliers: Vec<u64>, sizes: Vec<u64>, end: u32) -> Option<NgramHash> {
        let each = multipliers.len().checked_sub(1).filter(|grams| (1..MOST_GRAM).contains(grams))?;
        let fits = !sizes.is_empty() && sizes.len().is_multiple_of(each) && !sizes.contains(&0);
        let rows = sizes.iter().try_fold(0u64, |sum, size| sum.checked_add(*size))?;
        (fits && rows <= 1 << 32).then_some(NgramHash { multipliers, sizes, end })
    }

    /// Tokens of the longest n-gram.
    pub fn size(&self) -> usize {
        self.multipliers.len()
    }

    /// Rows that a token has.
    pub fn heads(&self) -> usize {
        self.sizes.len()
    }

    /// Rows of all heads.
    pub fn rows(&self) -> u64 {
        self.sizes.iter().sum()
    }

    /// The multipliers, and the rows of each head.
    pub fn numbers(&self) -> (&[u64], &[u64]) {
        (&self.multipliers, &self.sizes)
    }

    /// The rows of a token's n-grams, a head each. `before(i)`: the token that is `i` before it, 0 for itself; `None`: there is none.
    pub fn rows_of(&self, before: impl Fn(usize) -> Option<u32>, out: &mut [u32]) {
        assert_eq!(out.len(), self.heads(), "a row for each head");
        let each = self.heads() / (self.size() - 1);
        let (mut ended, mut mixed, mut offset) = (false, 0, 0);
        for (i, multiplier) in self.multipliers.iter().enumerate() {
            let token = before(i).filter(|_| !ended).unwrap_or(self.end);
            ended |= i > 0 && token == self.end;
            mixed ^= u64::from(token).wrapping_mul(*multiplier);
            let Some(gram) = i.checked_sub(1) else { continue };
            let heads = gram * each..(gram + 1) * each;
            for (row, size) in out[heads.clone()].iter_mut().zip(&self.sizes[heads]) {
                *row = (offset + mixed % size) as u32;
                offset += size;
            }
        }
    }
}

/// The step of SplitMix64 (Steele et al. 2014).
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's next number after the state `x`.
fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(GAMMA);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// All primes from `from` on, ascending.
fn primes(from: u64) -> impl Iterator<Item = u64> {
    let divides = |n: u64, by: u64| n > by && n.is_multiple_of(by);
    let is_prime =
        move |n: &u64| !divides(*n, 2) && !(3..).step_by(2).take_while(|by| by * by <= *n).any(|by| divides(*n, by));
    (from..).filter(is_prime)
}

#[inline(always)]
unsafe fn gate_lanes<V: Lanes>(
    key: &[f32],
    stream: &[f32],
    value: &[f32],
    norm: &[f32],
    (scale, eps): (f32, f32),
    out: &mut [f32],
    normed: &mut [f32],
) {
    let n = key.len();
    assert!([stream, value, norm, out, normed].iter().all(|x| x.len() == n), "all have {n} elements");
    // SAFETY: all have `n` elements; the shell has the instruction set.
    unsafe {
        let mut dot = V::splat(0.0);
        for i in (0..n).step_by(16) {
            let left = (n - i).min(16);
            dot = V::load_first(key.as_ptr().add(i), left).fma(V::load_first(stream.as_ptr().add(i), left), dot);
        }
        let by = V::splat(sigmoid1(signed_root(dot.sum() * scale)));
        for i in (0..n).step_by(16) {
            let left = (n - i).min(16);
            let x = by.mul(V::load_first(value.as_ptr().add(i), left));
            x.store_first(out.as_mut_ptr().add(i), left);
            x.store_first(normed.as_mut_ptr().add(i), left);
        }
        rms_in_place_lanes::<V>(normed, Some(norm), eps);
    }
}

/// The root of what is at least a millionth, with the sign of `x`; 0 for 0.
fn signed_root(x: f32) -> f32 {
    if x == 0.0 {
        return 0.0;
    }
    let least = if x.abs() < 1e-6 { 1e-6 } else { x.abs() };
    least.sqrt().copysign(x)
}

simd! {
    /// How much of a value goes into a stream: `out = sigmoid(c) * value`, where c is the signed root of `scale * key . stream`, and `normed` the RMS norm of that. All `[n]`; `key` and `stream` are normed.
    pub fn gate(key: &[f32], stream: &[f32], value: &[f32], norm: &[f32], factors: (f32, f32), out: &mut [f32], normed: &mut [f32]) = gate_lanes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multipliers_and_primes_are_the_references() {
        // Printed by the reference.
        let hash = |layer, vocabulary| NgramHash::new(layer, (3, 8), 20_000_000, vocabulary, 1234, 248_044);
        let published = hash(0, 248_320);
        assert_eq!(published.multipliers, [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071]);
        assert_eq!((published.sizes[0], published.sizes[1], published.sizes[15]), (20_000_003, 20_000_023, 20_000_171));
        // Of Qwen3.8-Flash-Next's table.
        assert_eq!(published.rows().next_multiple_of(128), 320_001_536);
        let second = hash(1, 248_320);
        assert_eq!(second.multipliers, [3_352_040_966_061, 19_752_442_147_475, 10_742_103_100_073]);
        assert_eq!((second.sizes[0], second.sizes[15]), (20_000_213, 20_000_429));
        assert_eq!(hash(2, 248_320).multipliers, [35_243_655_749_357, 23_198_521_423_797, 25_737_225_394_503]);
        assert_eq!(hash(0, 256).multipliers, [4_295_158_889_762_567, 35_454_616_657_218_897, 19_285_316_470_915_801]);
        let four = NgramHash::new(5, (4, 1), 2, 248_320, 99, 0);
        assert_eq!(four.multipliers, [36_168_620_934_457, 36_641_998_998_947, 4_903_609_324_141, 31_236_454_834_357]);
        assert_eq!(primes(2).take(8).collect::<Vec<_>>(), [2, 3, 5, 7, 11, 13, 17, 19]);
    }

    #[test]
    fn nothing_before_the_end_of_a_text_counts() {
        let hash = NgramHash::new(0, (4, 2), 50, 100, 1, 9);
        let rows = |tokens: &[u32]| {
            let mut out = vec![0; hash.heads()];
            hash.rows_of(|i| tokens.len().checked_sub(i + 1).map(|at| tokens[at]), &mut out);
            out
        };
        assert_eq!(rows(&[1, 2, 9, 3]), rows(&[5, 6, 9, 3]));
        assert_eq!(rows(&[3]), rows(&[7, 9, 3]));
        assert_ne!(rows(&[1, 2, 3]), rows(&[2, 2, 3]));
        // A token that ends a text has n-grams with those before it.
        assert_ne!(rows(&[1, 2, 9]), rows(&[1, 3, 9]));
        assert_eq!(rows(&[1, 2, 3])[..2], rows(&[4, 2, 3])[..2]);
        assert!(rows(&[1, 2, 3]).iter().all(|row| u64::from(*row) < hash.rows()));
    }

    #[test]
    fn roots_have_signs() {
        assert_eq!([4.0, -9.0, 0.0].map(signed_root), [2.0, -3.0, 0.0]);
        assert_eq!(signed_root(-1e-20), -(1e-6f32.sqrt()));
    }
}
