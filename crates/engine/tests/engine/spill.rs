//! What the caches had no room for comes back from memory beside them: to the bits of an engine that computes all of it, for whoever asks, in any order.

use crate::support;

use proptest::prelude::*;
use sluice_engine::{Engine, Options, PromptCacheOptions};
use support::{KINDS, MODELS, ask, folder, generation, tokens};

/// An engine whose caches have room for about one prompt.
fn small(kv_spill: u64) -> Options {
    Options {
        threads: 2,
        max_context: Some(512),
        max_sequences: 1,
        kv_tokens: Some(512),
        snapshots: 2,
        kv_spill,
        ..Options::for_this_machine().unwrap()
    }
}

fn cold() -> Options {
    Options { prefix_cache: false, snapshots: 0, ..small(0) }
}

#[test]
fn a_conversation_that_had_to_go_comes_back() {
    for model in MODELS {
        let mut engine = Engine::open(&folder(model), small(64 << 20)).unwrap();
        let mut plain = Engine::open(&folder(model), cold()).unwrap();
        let prompts: Vec<Vec<u32>> = (0..4).map(|seed| tokens(&engine, 300, seed)).collect();
        let first: Vec<_> = prompts.iter().map(|prompt| ask(&mut engine, prompt, generation(4))).collect();
        assert!(first.iter().all(|(_, adopted, _)| *adopted == 0));
        let before = engine.host_tier().unwrap();
        assert!(before.blocks > 0 && before.returned_tokens == 0, "{model}: {before:?}");
        for (prompt, (answer, ..)) in prompts.iter().zip(&first) {
            let further = [&prompt[..], &answer.tokens, &[1, 2, 3]].concat();
            let wanted = ask(&mut plain, &further, generation(4)).0;
            let (found, adopted, _) = ask(&mut engine, &further, generation(4));
            assert_eq!(found, wanted, "{model}");
            assert!(adopted >= 288, "{model}: {adopted}");
        }
        let after = engine.host_tier().unwrap();
        assert!(after.returned_tokens >= 3 * 288, "{model}: {after:?}");
        assert!(after.bytes <= after.budget && after.lost == 0, "{model}: {after:?}");
    }
}

#[test]
fn what_does_not_fit_is_computed_again() {
    let mut engine = Engine::open(&folder("qwen3"), small(0)).unwrap();
    assert_eq!(engine.host_tier(), None);
    let prompts: Vec<Vec<u32>> = (0..5).map(|seed| tokens(&engine, 300, seed)).collect();
    let wanted: Vec<_> = prompts.iter().map(|prompt| ask(&mut engine, prompt, generation(4)).0).collect();
    // Room for some blocks, or for none at all.
    for budget in [100_000, 10] {
        let mut engine = Engine::open(&folder("qwen3"), small(budget)).unwrap();
        for _ in 0..2 {
            for (prompt, answer) in prompts.iter().zip(&wanted) {
                assert_eq!(&ask(&mut engine, prompt, generation(4)).0, answer);
            }
        }
        let status = engine.host_tier().unwrap();
        assert!(status.lost > 0 && status.bytes <= budget, "{status:?}");
    }
}

#[test]
fn disk_and_memory_beside_the_caches_go_together() {
    let home = tempfile::tempdir().unwrap();
    let options = |kv_spill| Options {
        prompt_cache: Some(PromptCacheOptions {
            folder: home.path().join("cache"),
            quota: Some(256 << 20),
            daily_limit: None,
            min_tokens: 16,
            key_file: None,
            sums_file: None,
            sum_at_start: PromptCacheOptions::SUM_AT_START,
            store: None,
        }),
        ..small(kv_spill)
    };
    for model in MODELS {
        let mut plain = Engine::open(&folder(model), cold()).unwrap();
        let prompts: Vec<Vec<u32>> = (0..3).map(|seed| tokens(&plain, 300, seed)).collect();
        let wanted: Vec<_> = prompts.iter().map(|prompt| ask(&mut plain, prompt, generation(4)).0).collect();
        for kv_spill in [64 << 20, 0, 300_000] {
            let mut engine = Engine::open(&folder(model), options(kv_spill)).unwrap();
            for (prompt, answer) in prompts.iter().zip(&wanted).chain(prompts.iter().zip(&wanted)) {
                assert_eq!(&ask(&mut engine, prompt, generation(4)).0, answer, "{model}, {kv_spill}");
            }
            engine.save().unwrap();
        }
    }
}

/// Prompts that begin alike and part somewhere are asked for one after the other.
fn in_any_order(model: &str, kind: usize, asked: &[(usize, usize, usize)], budget: u64, block_tokens: usize) {
    let (kv_type, attention) = (Some(KINDS[kind].0), KINDS[kind].1);
    let options = |of: Options| Options { kv_type, attention, block_tokens, ..of };
    let mut engine = Engine::open(&folder(model), options(small(budget))).unwrap();
    let mut plain = Engine::open(&folder(model), options(cold())).unwrap();
    let words = engine.model().vocabulary as u32;
    for (which, length, parts) in asked {
        let mut prompt = tokens(&engine, 400, *which as u64);
        prompt.truncate(*length);
        prompt.iter_mut().skip(*parts).for_each(|t| *t = (*t + 1) % words);
        let (answer, adopted, _) = ask(&mut engine, &prompt, generation(3));
        assert_eq!(answer, ask(&mut plain, &prompt, generation(3)).0, "{model}, {kind}, {asked:?}, {adopted} adopted");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn answers_are_those_of_a_cold_engine(
        model in 0..MODELS.len(),
        kind in 0..KINDS.len(),
        asked in proptest::collection::vec((0usize..3, 2usize..400, 0usize..400), 4..9),
        budget in prop_oneof![Just(64u64 << 20), 20_000u64..2_000_000],
        few in any::<bool>(),
    ) {
        in_any_order(MODELS[model], kind, &asked, budget, if few { 8 } else { 32 });
    }
}
