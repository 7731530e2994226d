//! Promise 1: the bits of the logits do not depend on how the work is divided or on the instruction set.

use crate::support;

use proptest::prelude::*;
use sluice_engine::{Activations, Engine, Event, Generation, Isa, Options, sampling::SamplingParams};
use support::*;

const ACTIVATIONS: [Activations; 4] = [Activations::F32, Activations::Bf16, Activations::Int8, Activations::Int11];

/// One checkpoint of each architecture, quantised and not.
const FOLDERS: [&str; 34] = [
    "gemma4",
    "gemma4_moe",
    "gemma4_per_layer",
    "ministral3",
    "phi3",
    "granite",
    "smollm3",
    "olmo3",
    "minimax_m2",
    "glm4",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm5_next",
    "deepseek_v4",
    "qwen4_exp",
    "nemotron_h_moe",
    "nemotron_h_latent",
    "kimi_linear",
    "kimi_k3",
    "granitemoehybrid_mamba",
    "glm4_moe_lite",
    "mistral4",
    "qwen3",
    "qwen3_window",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "mlx_qwen3_widths",
    "mlx_qwen3_next",
    "mlx_qwen3_5_moe",
];

fn options(isa: Isa, threads: usize, activations: Activations) -> Options {
    Options { isa, threads, activations, max_context: Some(300), ..Options::for_this_machine().unwrap() }
}

#[test]
fn chunks_threads_and_instruction_sets_give_the_same_bits() {
    for isa in Isa::missing() {
        println!("SKIPPED: {isa}, which is not here");
    }
    const DIVISIONS: [&[usize]; 5] = [&[1], &[7], &[64], &[150], &[140, 1]];
    for (of_folder, name) in FOLDERS.into_iter().enumerate() {
        for (of_activations, activations) in ACTIVATIONS.into_iter().enumerate() {
            let best = *Isa::supported().last().unwrap();
            let mut reference = Engine::open(&folder(name), options(best, 1, activations)).unwrap();
            let prompt = tokens(&reference, 150, 7);
            let wanted = logits(&mut reference, &prompt, &[150]);
            for isa in Isa::supported() {
                for threads in [1, 2, 3] {
                    // The generic instruction set is slow, so it takes one division. The others take two of the five in turn: over all checkpoints and modes
                    // each division meets each number of threads.
                    let turn = of_folder + of_activations + threads;
                    let pieces: &[&[usize]] = match (isa == Isa::GENERIC, threads) {
                        (true, 2) => &[&[64, 7, 1]],
                        (true, _) => continue,
                        (false, _) if thorough() => &DIVISIONS,
                        (false, _) => &[DIVISIONS[turn % 5], DIVISIONS[(turn + 2) % 5]],
                    };
                    let mut engine = Engine::open(&folder(name), options(isa, threads, activations)).unwrap();
                    for pieces in pieces {
                        let got = logits(&mut engine, &prompt, pieces);
                        assert!(got == wanted, "{name} {activations:?}: {isa}, {threads} threads, pieces {pieces:?}");
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_division_of_a_prompt_gives_the_same_bits(
        name in prop::sample::select(&FOLDERS[..]),
        activations in prop::sample::select(&ACTIVATIONS[..]),
        (kv_type, attention) in prop::sample::select(&KINDS[..]),
        length in 1usize..200,
        pieces in prop::collection::vec(1usize..90, 1..12),
        (chunk, block_tokens) in (1usize..100, 1usize..70),
        seed in any::<u64>(),
    ) {
        let isa = *Isa::supported().last().unwrap();
        let plain = Options { kv_type: Some(kv_type), attention, ..options(isa, 1, activations) };
        let mut reference = Engine::open(&folder(name), plain.clone()).unwrap();
        let prompt = tokens(&reference, length, seed);
        let wanted = logits(&mut reference, &prompt, &[length]);
        let mut engine = Engine::open(&folder(name), Options { chunk: Some(chunk), block_tokens, threads: 2, ..plain }).unwrap();
        prop_assert!(logits(&mut engine, &prompt, &pieces) == wanted);
    }
}

#[test]
fn other_sequences_in_the_batch_change_nothing() {
    for name in FOLDERS {
        let isa = *Isa::supported().last().unwrap();
        let options = Options { max_sequences: 3, chunk: Some(20), ..options(isa, 2, Activations::Int8) };
        let ask = |engine: &mut Engine, prompts: &[Vec<u32>]| -> Vec<Vec<u32>> {
            let sampling = SamplingParams { temperature: 1.0, seed: 5, ..SamplingParams::default() };
            let generation = Generation { sampling, max_tokens: 24, ..Generation::default() };
            let ids: Vec<_> = prompts
                .iter()
                .map(|prompt| {
                    let id = engine.add_sequence();
                    engine.start(id, prompt, generation.clone()).unwrap();
                    id
                })
                .collect();
            let mut answers = vec![Vec::new(); prompts.len()];
            while !engine.is_idle() {
                for event in engine.step().unwrap() {
                    if let Event::Token { id, token } = event {
                        answers[ids.iter().position(|i| i == id).unwrap()].push(*token);
                    }
                }
            }
            ids.into_iter().for_each(|id| engine.remove_sequence(id));
            answers
        };
        let mut engine = Engine::open(&folder(name), options).unwrap();
        let prompts: Vec<Vec<u32>> = (0..3).map(|i| tokens(&engine, 11 + 25 * i, i as u64 + 1)).collect();
        let together = ask(&mut engine, &prompts);
        let alone: Vec<_> = prompts.iter().flat_map(|p| ask(&mut engine, std::slice::from_ref(p))).collect();
        assert_eq!(together, alone, "{name}");
        assert!(together.iter().all(|a| a.len() == 24));
    }
}

#[test]
fn the_text_from_shared_blocks_is_that_from_private_ones() {
    // Two systems of prompts, and within the first two sorts of them; longer than two partitions of attention.
    const COMMON: usize = 290;
    for (turn, name) in FOLDERS.into_iter().enumerate() {
        // Each checkpoint takes two of the kinds, in turn.
        let kinds = [KINDS[1], KINDS[3], KINDS[4], KINDS[5]];
        let two = [kinds[turn % 4], kinds[(turn + 1 + turn / 4 % 3) % 4]];
        for &(kv_type, attention) in if thorough() { &kinds[..] } else { &two } {
            let isa = *Isa::supported().last().unwrap();
            let options = Options {
                kv_type: Some(kv_type),
                attention,
                max_sequences: 6,
                max_context: Some(440),
                block_tokens: 16,
                snapshots: 12,
                ..options(isa, 2, Activations::Int8)
            };
            let ask = |prefix_cache: bool, at_once: bool| -> (Vec<Vec<u32>>, usize) {
                let mut engine = Engine::open(&folder(name), Options { prefix_cache, ..options.clone() }).unwrap();
                let prompts: Vec<Vec<u32>> = (0..6)
                    .map(|i| {
                        let system = tokens(&engine, COMMON, u64::from(i < 4));
                        let sort = tokens(&engine, if i < 2 { 100 } else { 3 }, u64::from(i < 2) + 3);
                        [system, sort, tokens(&engine, 5 + i, i as u64 + 9)].concat()
                    })
                    .collect();
                let sampling = SamplingParams { temperature: 1.0, seed: 5, ..SamplingParams::default() };
                let mut generation =
                    Generation { sampling, max_tokens: 1, snapshot_points: vec![COMMON], ..Generation::default() };
                let mut answers = vec![Vec::new(); prompts.len()];
                let mut adopted = 0;
                // The first of each sort goes ahead, so that there is something to share.
                for (ahead, most) in [(true, 1), (false, 16)] {
                    generation.max_tokens = most;
                    let mut ids = Vec::new();
                    for (i, prompt) in prompts.iter().enumerate().filter(|(i, _)| !ahead || [0, 2, 4].contains(i)) {
                        let id = engine.add_sequence();
                        engine.start(id, prompt, generation.clone()).unwrap();
                        ids.push((id, i));
                        while (ahead || !at_once) && !engine.is_idle() {
                            let events = engine.step().unwrap();
                            let of_it = events.iter().filter(|e| e.id() == id);
                            for event in of_it {
                                if let (Event::Token { token, .. }, false) = (event, ahead) {
                                    answers[i].push(*token);
                                }
                            }
                        }
                    }
                    while !engine.is_idle() {
                        for event in engine.step().unwrap() {
                            if let Event::Token { id, token } = event {
                                answers[ids.iter().find(|(of, _)| of == id).unwrap().1].push(*token);
                            }
                        }
                    }
                    for (id, _) in ids {
                        adopted += engine.reused_tokens(id).unwrap();
                        engine.remove_sequence(id);
                    }
                }
                (answers, adopted)
            };
            let (alone, _) = ask(false, false);
            let (private, none) = ask(false, true);
            let (shared, adopted) = ask(true, true);
            assert!(alone.iter().all(|a| a.len() == 16), "{name}");
            assert_eq!(private, alone, "{name}");
            assert_eq!(shared, alone, "{name}");
            assert_eq!(none, 0);
            assert!(adopted >= 6 * 256, "{name}: {adopted} tokens were there");
        }
    }
}

#[test]
fn a_truncated_sequence_goes_on_as_if_it_had_never_been_longer() {
    for name in FOLDERS {
        let isa = *Isa::supported().last().unwrap();
        let mut engine = Engine::open(&folder(name), options(isa, 2, Activations::Int8)).unwrap();
        let prompt = tokens(&engine, 90, 3);
        let wanted = logits(&mut engine, &prompt, &[90]);
        let vocabulary = engine.model().vocabulary;
        let id = engine.add_sequence();
        engine.feed(id, &prompt[..60], false, |_, _| Ok(())).unwrap();
        engine.feed(id, &tokens(&engine, 30, 99), false, |_, _| Ok(())).unwrap();
        engine.truncate(id, 60).unwrap();
        let mut last = Vec::new();
        let keep = |_, row: &[f32]| {
            last = row.iter().map(|x| x.to_bits()).collect();
            Ok(())
        };
        engine.feed(id, &prompt[60..], false, keep).unwrap();
        assert!(last == wanted[89 * vocabulary..], "{name}");
    }
}
