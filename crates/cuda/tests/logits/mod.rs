//! Logits that devices and ways of loading are compared by.

use sluice_engine::Engine;

/// The bits of all logits of 24 tokens. `[tokens * vocabulary]`
pub fn logits(engine: &mut Engine) -> Vec<u32> {
    let vocabulary = engine.model().vocabulary as u32;
    let tokens: Vec<u32> = (0..24).map(|i| (i * i * 7 + 3 * i + 1) % vocabulary).collect();
    let mut bits = Vec::new();
    let each = |_: usize, row: &[f32]| {
        bits.extend(row.iter().map(|x| x.to_bits()));
        Ok(())
    };
    engine.score(&tokens, true, each).unwrap();
    bits
}
