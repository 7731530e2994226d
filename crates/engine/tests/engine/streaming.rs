//! Experts that are read from disk when tokens want them: the same bits as mapped ones, whatever is kept, guessed or read in pieces.

use crate::support;
use crate::support::streamed;

use std::fs;

use proptest::prelude::*;
use sluice_engine::{Activations, Engine, ExpertOptions, Lookahead, Options, Placement, Policy};
use streamed::*;
use support::*;

#[test]
fn streamed_experts_give_the_bits_of_mapped_ones() {
    for name in FOLDERS {
        let mut reference = Engine::open(&folder(name), mapped()).unwrap();
        let prompt = tokens(&reference, 170, 7);
        let wanted = logits(&mut reference, &prompt, &[170]);
        let (one, least) = (slot_bytes(name), least_bytes(name));
        for placement in [Placement::Slots, Placement::PageCache] {
            for more in [0, 3, u64::MAX / one / 2] {
                let options = Options { expert_budget: Some(least + more * one), ..streamed(placement) };
                let mut engine = Engine::open(&folder(name), options).unwrap();
                for pieces in [&[170][..], &[1], &[140, 1], &[64, 7]] {
                    let got = logits(&mut engine, &prompt, pieces);
                    assert!(got == wanted, "{name} {placement:?}, {more} more slots, pieces {pieces:?}");
                }
                let stats = engine.take_streamed().unwrap().stats;
                assert!(stats.wanted > 0 && stats.read_bytes > 0, "{stats:?}");
                let all_fit = placement == Placement::Slots && more > 1 << 20;
                assert!(!all_fit || stats.hits > stats.wanted / 2, "{stats:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn whatever_is_kept_or_guessed_the_bits_are_the_same(
        name in prop::sample::select(&FOLDERS[..]),
        placement in prop::sample::select(&[Placement::Slots, Placement::PageCache][..]),
        policy in prop::sample::select(&Policy::ALL[..]),
        lookahead in prop::sample::select(&[Lookahead::Off, Lookahead::On, Lookahead::Auto][..]),
        activations in prop::sample::select(&[Activations::F32, Activations::Bf16, Activations::Int8][..]),
        more_slots in 0u64..40,
        pages in 1usize..5,
        depth in 1usize..20,
        pinned in prop::collection::vec((0usize..4, 0usize..16), 0..6),
        pieces in prop::collection::vec(1usize..90, 1..12),
        seed in any::<u64>(),
    ) {
        let mut reference = Engine::open(&folder(name), Options { activations, ..mapped() }).unwrap();
        let prompt = tokens(&reference, 120, seed);
        let wanted = logits(&mut reference, &prompt, &[120]);
        let options = Options {
            activations,
            lookahead,
            expert_budget: Some(least_bytes(name) + more_slots * slot_bytes(name)),
            expert_options: ExpertOptions { policy, request: pages * 4096, depth: Some(depth), pinned, ..ExpertOptions::default() },
            ..streamed(placement)
        };
        let mut engine = Engine::open(&folder(name), options).unwrap();
        prop_assert!(logits(&mut engine, &prompt, &pieces) == wanted);
    }
}

#[test]
fn too_small_a_budget_is_refused_with_what_is_needed() {
    let options = Options { expert_budget: Some(5000), ..streamed(Placement::Slots) };
    let error = format!("{:#}", Engine::open(&folder("qwen3_moe"), options).err().unwrap());
    assert!(error.contains("5000 bytes are too few for experts"), "{error}");
    let error = format!("{:#}", Engine::open(&folder("qwen3"), streamed(Placement::Slots)).err().unwrap());
    assert!(error.contains("this model has no experts"), "{error}");
}

#[test]
fn what_does_not_fit_is_streamed_unasked() {
    let options = |budget| Options { memory_budget: Some(budget), experts: Placement::Auto, ..mapped() };
    let engine = Engine::open(&folder("qwen3_moe"), options(1 << 30)).unwrap();
    assert_eq!(engine.placement().placement, Placement::Mapped, "{}", engine.placement().reason);
    let bytes = fs::metadata(folder("qwen3_moe").join("model.safetensors")).unwrap().len();
    let error = Engine::open(&folder("qwen3_moe"), options(bytes)).err().unwrap();
    // This model is smaller than the program: the arithmetic says so.
    assert!(format!("{error:#}").contains("experts"), "{error:#}");
}
