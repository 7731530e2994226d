//! What keeping the books of experts costs a token: `cargo run --release -p sluice-experts --example policy_speed [LAYERS EXPERTS K SLOTS]`.

use std::time::Instant;

use sluice_experts::{Policy, Residency};

fn main() {
    let sizes: Vec<usize> = std::env::args().skip(1).map(|a| a.parse().expect("a number")).collect();
    let [layers, experts, k, slots] = sizes.try_into().unwrap_or([60, 512, 10, 6000]);
    println!("{layers} layers of {experts} experts, {k} per token, {slots} slots");
    for policy in Policy::ALL {
        let mut cache = Residency::new(&vec![experts; layers], &[slots], policy, &[]);
        let mut state = 1u64;
        let mut random = move |of: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % of
        };
        let (mut wanted, ones) = (Vec::new(), vec![1; k]);
        let (mut misses, mut each) = (0, Vec::new());
        for _ in 0..300 {
            let mut spent = 0.0;
            for layer in 0..layers {
                // Low numbers are hotter.
                wanted.clear();
                while wanted.len() < k {
                    let below = 1 + random(experts);
                    let expert = random(below) as u32;
                    if !wanted.contains(&expert) {
                        wanted.push(expert);
                    }
                }
                wanted.sort_unstable();
                let begun = Instant::now();
                cache.visit(layer, &wanted, &ones);
                for &expert in &wanted {
                    if cache.slot(layer, expert as usize).is_none() {
                        let slot = cache.allocate(layer, expert as usize).expect("a slot that is not in use");
                        cache.unpin(slot);
                        misses += 1;
                    }
                }
                spent += begun.elapsed().as_secs_f64();
            }
            each.push(spent);
        }
        each.sort_by(f64::total_cmp);
        let missed = misses as f64 / (300 * layers * k) as f64;
        println!(
            "{:<8}{:>8.3} ms a token (median){:>8.1} % misses",
            policy.name(),
            each[each.len() / 2] * 1e3,
            100.0 * missed
        );
    }
}
