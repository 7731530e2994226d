//! What is set aside for scratch is what steps take: neither less, nor much more.

use crate::support;

use std::path::Path;

use sluice_engine::{
    Activations, Engine, Event, Generation, KvType, MemoryClass, Options, Placement, sampling::SamplingParams,
};
use support::*;

/// Checkpoints of every kind: dense and mixtures, stacked and single experts, recurrent layers, windows, widths.
const FOLDERS: [&str; 25] = [
    "gemma4_moe",
    "gemma4_per_layer",
    "olmo3",
    "phi3",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v32",
    "nemotron_h_moe",
    "nemotron_h_latent",
    "kimi_linear",
    "kimi_k3",
    "glm5_next",
    "deepseek_v4",
    "qwen4_exp",
    "granitemoehybrid_mamba",
    "qwen3",
    "qwen3_window",
    "qwen3_moe",
    "qwen3_moe_stacked",
    "qwen3_next",
    "qwen3_5_moe",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "mlx_qwen3_widths",
    "mlx_qwen3_5_moe",
];

/// Of scratch, what was set aside and what was taken, once steps of one token and of a whole chunk went through the model.
fn set_aside_and_taken(folder: &Path, options: Options) -> (u64, u64) {
    // Angles grow with the context, which has their room: here they reach to the next multiple of 256.
    let mut engine = Engine::open(folder, options).unwrap();
    let prompt = tokens(&engine, 3 * engine.chunk() + 1, 5);
    let sampling = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    let id = engine.add_sequence();
    engine.start(id, &prompt, Generation { sampling, max_tokens: 4, ..Generation::default() }).unwrap();
    while !engine.is_idle() {
        engine.step().unwrap();
    }
    let positions = (prompt.len() + 4).next_multiple_of(256).min(2048);
    let angles = positions * 8 * engine.model().rotary.inv_freq.len();
    (engine.reserved_scratch(), (engine.memory(MemoryClass::Scratch) - angles) as u64)
}

#[test]
fn scratch_is_what_was_set_aside() {
    for name in FOLDERS {
        for activations in [Activations::Int8, Activations::Bf16, Activations::F32, Activations::Int11] {
            for (threads, chunk) in [(1, 96), (2, 16), (2, 512), (5, 64)] {
                for experts in [Placement::Mapped, Placement::Slots] {
                    if experts != Placement::Mapped && !(name.contains("moe") || name.contains("next")) {
                        continue;
                    }
                    let options = Options {
                        activations,
                        threads,
                        experts,
                        chunk: Some(chunk),
                        max_context: Some(2048),
                        kv_type: Some(KvType::Bf16),
                        ..Options::for_this_machine().unwrap()
                    };
                    let (aside, taken) = set_aside_and_taken(&folder(name), options);
                    let case = format!("{name} {activations:?} {experts:?}, {threads} threads, {chunk} tokens");
                    // Parts of attention and lists of its tasks grow with the context, which has their room.
                    assert!(taken <= aside + (64 << 10), "{case}: {taken} taken, {aside} set aside");
                    // An indexer's scores have room for the whole context.
                    let indexed = ["deepseek_v32", "glm5_next", "deepseek_v4", "qwen4_exp"].contains(&name);
                    let scores = if indexed { 4 * chunk as u64 * 2048 } else { 0 };
                    let most = taken + taken / 3 + scores + (96 << 10);
                    assert!(aside <= most, "{case}: {aside} set aside, {taken} taken");
                }
            }
        }
    }
}

/// Answers to two long prompts at once, then to one that begins like the first, and the memory of keys and values behind them.
fn answers_and_cache(name: &str, limits: Options) -> (Vec<Vec<u32>>, usize) {
    let options = Options { chunk: Some(32), max_context: Some(4096), max_sequences: 2, prefix_cache: true, ..limits };
    let mut engine = Engine::open(&folder(name), options).unwrap();
    let prompts = [tokens(&engine, 1500, 1), tokens(&engine, 900, 2)];
    let again = [&prompts[0][..1200], &prompts[1][..100]].concat();
    let mut answers = Vec::new();
    for turn in [&prompts[..], &[again]] {
        let ids: Vec<_> = turn.iter().map(|_| engine.add_sequence()).collect();
        for (id, prompt) in ids.iter().zip(turn) {
            engine.start(*id, prompt, generation(40)).unwrap();
        }
        let mut found = vec![Vec::new(); turn.len()];
        while !engine.is_idle() {
            for event in engine.step().unwrap() {
                if let Event::Token { id, token } = event {
                    found[ids.iter().position(|known| known == id).unwrap()].push(*token);
                }
            }
        }
        ids.iter().for_each(|id| engine.remove_sequence(*id));
        answers.extend(found);
    }
    (answers, engine.memory(MemoryClass::Kv))
}

#[test]
fn within_a_budget_layers_with_a_window_keep_what_is_seen_and_answers_stay() {
    for name in ["qwen3_window", "gemma3", "gpt_oss", "deepseek_v4"] {
        let none = || Options::for_this_machine().unwrap();
        // Whoever says how many positions there are gets as many in every layer.
        let (wanted, all) = answers_and_cache(name, Options { kv_tokens: Some(2 * 4096), ..none() });
        let (found, kept) = answers_and_cache(name, Options { memory_budget: Some(1 << 40), ..none() });
        assert_eq!(found, wanted, "{name}");
        assert!(kept < all, "{name}: {kept} bytes of {all}");
    }
}
