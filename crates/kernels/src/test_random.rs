//! Random inputs and tolerances for the tests of the kernels.

/// `n` values in (-2, 2), a function of the seed alone.
pub fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 16) as i32 as f32 * (2.0 / 2147483648.0)
    };
    (0..8).for_each(|_| _ = next());
    (0..n).map(|_| next()).collect()
}

/// Panics where a value is off by more than `tolerance` of the greatest exact one (or of 1).
pub fn assert_close(got: &[f32], exact: &[f64], tolerance: f64) {
    assert_eq!(got.len(), exact.len());
    let range = exact.iter().fold(1.0f64, |m, x| m.max(x.abs()));
    for (i, (g, e)) in got.iter().zip(exact).enumerate() {
        assert!((*g as f64 - e).abs() <= tolerance * range, "element {i}: {g}, exactly {e}");
    }
}

/// For equality that tells +0 from -0 and a NaN from itself.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
