//! Integers of 11 bits as AMX takes them: the bytes of sixteen tokens side by side.

pub use crate::input::{TOKENS, TokenTile};

use crate::Isa;
use crate::input::{Int11, ORDER};
use crate::int11::{GROUP, HALF};
use crate::isa::Level;

/// With fewer tokens most of a tile would be empty.
const MANY: usize = 8;

/// Tiles of `tokens` tokens of `cols` columns: [tokens / 16, cols / 64], each rounded up.
pub fn count(tokens: usize, cols: usize) -> usize {
    tokens.div_ceil(TOKENS) * cols.div_ceil(GROUP)
}

/// Whether products of so many tokens take them as tiles.
pub fn are_wanted(isa: Isa, tokens: usize) -> bool {
    isa.level() == Level::Amx && tokens >= MANY
}

/// Lays out tokens `first..first + 16` of `cols` columns, as many as there are. `tiles`: [cols / 64, rounded up]. The other tokens of a tile keep what they are.
///
/// # Panics
/// Where lengths are wrong.
pub fn lay_out(isa: Isa, x: &Int11, cols: usize, first: usize, tiles: &mut [TokenTile]) {
    let (groups, halves) = (cols.div_ceil(GROUP), cols / HALF);
    assert_eq!(tiles.len(), groups, "a tile for each group");
    for token in first..(first + TOKENS).min(x.scales.len()) {
        let (n, steps) = (&x.n[token * cols..][..cols], &x.steps[token * groups..][..groups]);
        let (sums, t) = (&x.sums[token * halves..][..halves], token - first);
        for (g, tile) in tiles.iter_mut().enumerate() {
            let part = &n[g * GROUP..cols.min((g + 1) * GROUP)];
            match part.try_into() {
                Ok(whole) => split(isa, whole, &mut tile.low[t], &mut tile.high[t]),
                Err(_) => {
                    let mut rest = [0; GROUP];
                    rest[..part.len()].copy_from_slice(part);
                    split(isa, &rest, &mut tile.low[t], &mut tile.high[t]);
                }
            }
            tile.steps[t] = steps[g];
            let of = [0, 1].map(|half| sums.get(2 * g + half).copied().unwrap_or(0.0));
            tile.whole[t] = of[0] + of[1];
            tile.halves[0][t] = of[0];
            tile.halves[1][t] = of[1];
        }
    }
}

/// A group's bytes.
#[inline(always)]
fn split(isa: Isa, n: &[i16; GROUP], low: &mut [u8; GROUP], high: &mut [i8; GROUP]) {
    #[cfg(target_arch = "x86_64")]
    if matches!(isa.level(), Level::Avx512 | Level::Amx) {
        // SAFETY: an `Isa` of these levels is made only where their features were found.
        return unsafe { crate::avx512::int11_amx::split(n, low, high) };
    }
    let _ = isa;
    for i in 0..GROUP {
        let n = n[i / 8 * 8 + ORDER[i % 8]];
        (low[i], high[i]) = (n as u8, (n >> 8) as i8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::int11::encode_int11;
    use fastrand::Rng;

    #[test]
    fn tiles_have_every_integer_and_sum() {
        let mut rng = Rng::with_seed(8);
        for (tokens, cols) in [(1usize, 32usize), (16, 64), (35, 288), (18, 100)] {
            let x: Vec<f32> = (0..tokens * cols).map(|_| 2.0 * rng.f32() - 1.0).collect();
            let (groups, halves) = (cols.div_ceil(GROUP), cols / HALF);
            let (mut n, mut steps) = (vec![0; x.len()], vec![0.0; tokens * groups]);
            let (mut sums, mut scales) = (vec![0.0; tokens * halves], vec![0.0; tokens]);
            encode_int11(Isa::GENERIC, &x, cols, &mut n, &mut steps, &mut sums, &mut scales);
            let x = Int11 { n: &n, steps: &steps, sums: &sums, scales: &scales, tiles: &[] };
            for isa in Isa::supported() {
                let mut tiles = vec![TokenTile::default(); count(tokens, cols)];
                for (block, tiles) in tiles.chunks_mut(groups).enumerate() {
                    lay_out(isa, &x, cols, block * TOKENS, tiles);
                }
                for token in 0..tokens {
                    for k in 0..groups * GROUP {
                        let (tile, t) = (&tiles[token / TOKENS * groups + k / GROUP], token % TOKENS);
                        let at = k % GROUP / 8 * 8 + ORDER.iter().position(|&i| i == k % 8).unwrap();
                        let wanted = if k < cols { n[token * cols + k] } else { 0 };
                        assert_eq!(i16::from(tile.high[t][at]) * 256 + i16::from(tile.low[t][at]), wanted, "{isa}");
                        assert_eq!(tile.steps[t], steps[token * groups + k / GROUP]);
                        let half = k % GROUP / HALF;
                        let sum = |half: usize| {
                            let h = k / GROUP * 2 + half;
                            if h < halves { sums[token * halves + h] } else { 0.0 }
                        };
                        assert_eq!((tile.halves[half][t], tile.whole[t]), (sum(half), sum(0) + sum(1)));
                    }
                }
            }
        }
    }
}
