//! Promise 2: once a few steps have sized the scratch, a step allocates nothing.

#[path = "../../../tests/counting.rs"]
mod counting;

use std::path::Path;

use counting::allocations;
use sluice_engine::{
    Activations, DraftOptions, DrafterChoice, Engine, Event, Generation, Options, Placement, sampling::SamplingParams,
};

#[test]
fn a_step_allocates_nothing() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    for folder in [
        "qwen3",
        "qwen3_window",
        "qwen3_moe",
        "qwen3_next",
        "kimi_linear",
        "kimi_k3",
        "glm5_next",
        "deepseek_v4",
        "qwen4_exp",
        "deepseek_v32",
        "nemotron_h",
        "mlx_qwen3_widths",
        "mlx_qwen3_5_moe",
    ] {
        let streamed = [Placement::Mapped, Placement::Slots, Placement::PageCache].map(|p| (Activations::Int8, p));
        let mapped = [Activations::F32, Activations::Bf16].map(|a| (a, Placement::Mapped));
        let mut engines = Vec::new();
        // Drafts that are computed whatever comes of them.
        let drafting =
            DraftOptions { drafter: DrafterChoice::Ngram, tokens: 3, governed: false, ..DraftOptions::default() };
        let without = mapped.into_iter().chain(streamed).map(|(activations, experts)| (activations, experts, None));
        // A model that drafts for itself.
        let by_model = DraftOptions { drafter: DrafterChoice::Model, ..drafting };
        let with = [drafting, by_model].map(|drafts| (Activations::Int8, Placement::Mapped, Some(drafts)));
        for (activations, experts, drafts) in without.chain(with) {
            if experts != Placement::Mapped && !(["moe", "next", "exp", "v4"].iter().any(|part| folder.contains(part)))
            {
                continue;
            }
            // A draft model stays within the context that it was made for: 128 tokens here, fewer than the prompt has.
            if ["deepseek_v32", "glm5_next", "deepseek_v4", "qwen4_exp"].contains(&folder)
                && drafts.is_some_and(|d| d.drafter == DrafterChoice::Model)
            {
                continue;
            }
            let options = Options {
                activations,
                experts,
                threads: 2,
                drafts: drafts.unwrap_or_default(),
                draft_model: Some(golden.join(folder)),
                chunk: Some(32),
                max_context: Some(if drafts.is_some() { 2000 } else { 400 }),
                ..Options::for_this_machine().unwrap()
            };
            let mut engine = Engine::open(&golden.join(folder), options).unwrap();
            let vocabulary = engine.model().vocabulary as u32;
            // At temperature 0 a small model soon repeats itself, so that there is something to draft.
            let temperature = if drafts.is_some() { 0.0 } else { 0.8 };
            let sampling = SamplingParams { temperature, top_k: 20, top_p: 0.9, ..SamplingParams::default() };
            let generation = Generation { sampling, max_tokens: 2000, ..Generation::default() };
            let id = engine.add_sequence();
            let prompt: Vec<u32> = (0..150).map(|i| i * 31 % vocabulary).collect();
            engine.start(id, &prompt, generation).unwrap();
            // A whole chunk, the rest of the prompt, single tokens.
            let drafted = |engine: &Engine| -> u64 { engine.draft_stats().iter().map(|d| d.counts.drafted).sum() };
            let (mut steps, least) = (0, if drafts.is_some() { 12 } else { 0 });
            while steps < 12 || (drafted(&engine) < least && steps < 1000) {
                engine.step().unwrap();
                steps += 1;
            }
            assert!(drafted(&engine) >= least, "{folder}: too little was drafted");
            engines.push((engine, activations, experts));
        }
        // Threads that the system starts late allocate as they start.
        std::thread::sleep(std::time::Duration::from_millis(200));
        for (mut engine, activations, experts) in engines {
            let mut tokens = 0;
            let made = allocations(|| {
                for _ in 0..200 {
                    let events = engine.step().unwrap();
                    tokens += events.iter().filter(|e| matches!(e, Event::Token { .. })).count();
                }
            });
            // Steps of a sequence that has ended would show nothing.
            assert!(tokens >= 200, "{folder} {activations:?} {experts:?}: {tokens} tokens in 200 steps");
            assert_eq!(made, 0, "{folder} {activations:?} {experts:?}: {made} allocations in 200 steps");
        }
    }
}
