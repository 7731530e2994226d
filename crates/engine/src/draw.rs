//! The numbers that a draw is made of, the same on every machine: weights in whole numbers, and random bits of (seed, position).

/// The weight of the most likely token. A token lighter than 1e-12 of it is never drawn, and 2^24 of them do not overflow.
pub const ONE: f64 = (1u64 << 40) as f64;

/// exp(x) in units of 1 / `ONE`, for x of 0 or less. Additions and multiplications only, so that it is the same on every machine; the
/// relative error is below 1e-13.
#[inline]
pub fn weight(x: f64) -> u64 {
    /// Adding this to a small number rounds it to a whole one.
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    const LN2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    // Below -40 nothing is left in these units, also of -inf.
    let x = if x > -40.0 { x } else { -40.0 };
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW; // |r| <= ln(2) / 2
    // Taylor's series up to r^12 / 12!
    let mut sum = 1.0 / 479_001_600.0;
    for term in [
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        sum = sum * r + term;
    }
    // 2^n * ONE, made of bits; n is at least -58.
    let power = f64::from_bits(((shifted.to_bits() as i64 - ROUND.to_bits() as i64 + 1023 + 40) as u64) << 52);
    // The whole part: behind 2^52 a number has no other bits.
    const WHOLE: f64 = (1u64 << 52) as f64;
    (sum * power + WHOLE).to_bits() - WHOLE.to_bits()
}

/// 53 random bits: a function of seed and position alone.
pub fn uniform(seed: u64, position: u64) -> u64 {
    let [a, b, ..] = philox([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    (u64::from(a >> 5) << 26) | u64::from(b >> 6)
}

/// Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011).
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        }
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_exponentials() {
        assert_eq!(weight(0.0), 1 << 40);
        assert_eq!((weight(f64::NEG_INFINITY), weight(-1e300)), (0, 0));
        for i in 0..100_000 {
            let x = -f64::from(i) * 3e-4;
            let exact = libm::exp(x) * ONE;
            assert!((weight(x) as f64 - exact).abs() <= 1.0 + exact * 1e-13, "exp({x}): {} and {exact}", weight(x));
        }
    }

    #[test]
    fn philox_gives_the_published_values() {
        // Random123's known answers (kat_vectors, philox4x32 10).
        assert_eq!(philox([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }
}
