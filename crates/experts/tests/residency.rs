//! Visits and evictions among tiers allocate nothing, from the first.

#[path = "../../../tests/counting.rs"]
mod counting;

use counting::allocations;
use sluice_experts::{Policy, Residency};

#[test]
fn a_visit_allocates_nothing() {
    const LAYERS: usize = 6;
    const EXPERTS: u32 = 64;
    let mut state = 1u64;
    let mut random = move |of: u32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % of
    };
    let mut visits = |policy| {
        let mut cache = Residency::new(&[EXPERTS as usize; LAYERS], &[24, 76], policy, &[(1, 7), (3, 0)]);
        let (mut wanted, mut tokens, mut held) =
            (Vec::with_capacity(64), Vec::with_capacity(64), Vec::with_capacity(64));
        allocations(|| {
            for token in 0..300 {
                for layer in 0..LAYERS {
                    // Mostly one token, at times many; low numbers are hotter.
                    let (uses, most) = if token % 50 == 0 { (48, 20) } else { (8, 1) };
                    wanted.clear();
                    while wanted.len() < uses {
                        let below = 1 + random(EXPERTS);
                        let expert = random(below);
                        if !wanted.contains(&expert) {
                            wanted.push(expert);
                        }
                    }
                    tokens.clear();
                    tokens.extend(wanted.iter().map(|_| 1 + random(most)));
                    cache.visit(layer, &wanted, &tokens);
                    held.clear();
                    held.extend(wanted.iter().filter_map(|e| cache.slot(layer, *e as usize)));
                    held.iter().for_each(|slot| cache.pin(*slot));
                    for expert in &wanted {
                        if cache.slot(layer, *expert as usize).is_none() {
                            held.push(cache.allocate(layer, *expert as usize).unwrap());
                        }
                    }
                    held.iter().for_each(|slot| cache.unpin(*slot));
                }
            }
        })
    };
    for policy in Policy::ALL {
        // The harness's own thread allocates at times; a visit that does would do so every time.
        let made = (0..4).map(|_| visits(policy)).min();
        assert_eq!(made, Some(0), "{policy:?}");
    }
}
