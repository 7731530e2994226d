//! Random inputs and tolerances for the tests of the kernels.

/// `n` values in [-2, 2), a function of the seed alone.
pub fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| 4.0 * rng.f32() - 2.0).collect()
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
