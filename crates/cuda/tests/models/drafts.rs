//! Drafts on the GPU change no token and no probability, whoever drafts and however much of it is wrong: those of look-up, of a model and of a head that predicts one token
//! more, of models with recurrent layers too, whose states are kept within a step.

use std::fs;

use fastrand::Rng;
use sluice_engine::{DraftOptions, DrafterChoice};

use super::*;

/// Tokens of an answer.
const LENGTH: usize = 24;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// Answers to all of these, in the same steps.
fn answered(engine: &mut Engine, asked: &[(Vec<u32>, Generation)]) -> Vec<Answer> {
    let start = |(prompt, generation): &(Vec<u32>, Generation)| {
        let id = engine.add_sequence();
        engine.start(id, prompt, generation.clone()).unwrap();
        id
    };
    let ids: Vec<_> = asked.iter().map(start).collect();
    let mut answers = vec![Vec::new(); ids.len()];
    while !engine.is_idle() {
        for event in engine.step().unwrap().to_vec() {
            if let Event::Token { id, token } = event {
                let logprobs = engine.take_logprobs(id);
                answers[ids.iter().position(|i| *i == id).unwrap()].push((token, logprobs));
            }
        }
    }
    ids.into_iter().for_each(|id| engine.remove_sequence(id));
    answers
}

/// Prompts that repeat themselves, each with its temperature. `predicted`: what the answers are predicted to be.
fn repeating(predicted: &[Vec<u32>]) -> Vec<(Vec<u32>, Generation)> {
    let all = [(9, 0.0, Some(2)), (33, 0.0, None), (50, 0.8, Some(0))];
    let asked = all.into_iter().enumerate().map(|(number, (n, temperature, logprobs))| {
        let prompt: Vec<u32> = (0..n).map(|i| (i % 7 * 3 + number) as u32).collect();
        let sampling = SamplingParams { temperature, seed: 5, ..SamplingParams::default() };
        let prediction = predicted.get(number).cloned().unwrap_or_default();
        (prompt, Generation { sampling, max_tokens: LENGTH, logprobs, prediction, ..Generation::default() })
    });
    asked.collect()
}

/// The answers with each seventh token changed.
fn nearly(answers: &[Answer]) -> Vec<Vec<u32>> {
    let token = |(i, (token, _)): (usize, &(u32, Option<Logprobs>))| if i % 7 == 6 { token ^ 1 } else { *token };
    answers.iter().map(|answer| answer.iter().enumerate().map(token).collect()).collect()
}

/// Asks the same of the CPU without drafts and of the GPU with them, twice, so that the second answers find what the first ones left. Checks that some drafts came true,
/// and, if `some_wrong`, that others did not.
fn compare(folder: &Path, devices: &[u32], options: &Options, drafter: &str, some_wrong: bool) {
    let without = Options { drafts: DraftOptions::default(), draft_model: None, ..options.clone() };
    let mut plain = on(None, folder, without);
    let mut drafting = on_all(devices, folder, options.clone());
    for _ in 0..2 {
        let wanted = answered(&mut plain, &repeating(&[]));
        let found = answered(&mut drafting, &repeating(&nearly(&wanted)));
        assert_eq!(found, wanted, "{}, {drafter}, {devices:?}", folder.display());
    }
    let stats = drafting.draft_stats();
    let of: Vec<_> = stats.iter().filter(|d| d.drafter == drafter).map(|d| d.counts).collect();
    let [drafted, accepted] = [of.iter().map(|c| c.drafted).sum::<u64>(), of.iter().map(|c| c.accepted).sum()];
    let is_right = drafted > 0 && (!some_wrong || accepted > 0 && accepted < drafted);
    assert!(is_right, "{}, {drafter}: {accepted} of {drafted} came true", folder.display());
}

/// Drafts of so many tokens in each step, whether they pay or not.
fn always(drafter: DrafterChoice, tokens: usize) -> DraftOptions {
    DraftOptions { drafter, tokens, governed: false, ..DraftOptions::default() }
}

#[test]
fn looked_up_drafts_change_nothing() {
    let Some((device, _turn)) = device() else { return };
    for name in
        ["qwen3", "qwen3_moe", "gpt_oss_mxfp4", "gemma4", "nemotron_h", "qwen3_next", "mlx_qwen3_5", "qwen3_5_moe"]
    {
        for (mode, tokens) in [(Activations::Int8, 1), (Activations::F32, 4), (Activations::Bf16, 8)] {
            let drafts = always(DrafterChoice::Ngram, tokens);
            for devices in device_lists(device) {
                compare(&golden(name), &devices, &Options { drafts, ..options(mode, None, 48) }, "ngram", true);
            }
        }
    }
}

#[test]
fn a_models_drafts_change_nothing() {
    let Some((device, _turn)) = device() else { return };
    // Each drafts for itself, so that drafts come true.
    for name in ["qwen3", "qwen3_next", "qwen3_5"] {
        let options = Options {
            drafts: always(DrafterChoice::Model, 3),
            draft_model: Some(golden(name)),
            ..options(Activations::Int8, None, 48)
        };
        for devices in device_lists(device) {
            compare(&golden(name), &devices, &options, "model", false);
        }
    }
}

#[test]
fn trying_drafts_out_changes_nothing() {
    let Some((device, _turn)) = device() else { return };
    for (name, tokens) in [("qwen3", 8), ("qwen3_next", 3), ("qwen3_moe", 8)] {
        for drafter in [DrafterChoice::Ngram, DrafterChoice::Model] {
            let drafts = DraftOptions { drafter, tokens, ..DraftOptions::default() };
            let draft_model = (drafter == DrafterChoice::Model).then(|| golden(name));
            let without = options(Activations::Int8, None, 48);
            let mut plain = on(None, &golden(name), without.clone());
            let mut drafting = on(Some(device), &golden(name), Options { drafts, draft_model, ..without });
            assert!(!plain.measure_drafts(), "nothing drafts");
            if let Some(loading) = drafting.loading() {
                loading.finish().unwrap();
            }
            let before = drafting.kv_in_use();
            assert!(drafting.measure_drafts() && !drafting.measure_drafts(), "{name}: once");
            assert_eq!(drafting.kv_in_use(), before, "nothing is left of it");
            for _ in 0..2 {
                let wanted = answered(&mut plain, &repeating(&[]));
                let found = answered(&mut drafting, &repeating(&nearly(&wanted)));
                assert_eq!(found, wanted, "{name}, {drafter:?}");
            }
        }
    }
}

/// A checkpoint with its head in a file beside it.
fn with_head(name: &str) -> tempfile::TempDir {
    let made = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden(name)).unwrap().flatten() {
        let file = entry.file_name().into_string().unwrap();
        if file == "config.json" || file.ends_with(".safetensors") {
            fs::copy(entry.path(), made.path().join(file.replace("model.", "weights."))).unwrap();
        }
    }
    fs::copy(golden("mtp").join(format!("{name}.safetensors")), made.path().join("mtp.safetensors")).unwrap();
    made
}

#[test]
fn a_heads_drafts_change_nothing() {
    let Some((device, _turn)) = device() else { return };
    for name in ["qwen3_5", "qwen3_5_moe", "glm4_moe"] {
        let made = with_head(name);
        for (mode, tokens) in [(Activations::F32, 1), (Activations::Int8, 4)] {
            let options = Options { drafts: always(DrafterChoice::Mtp, tokens), ..options(mode, None, 48) };
            compare(made.path(), &[device], &options, "mtp", false);
            // On several devices nobody knows where the head's operations belong.
            let refused = Engine::open_on(made.path(), options, &|o| {
                Ok(Box::new(Pipeline::new(&[device, device], o.activations, o.threads)?))
            });
            let refused = format!("{:#}", refused.err().expect("refused"));
            assert!(refused.contains("on one GPU"), "{refused}");
        }
    }
}

/// How many random cases each model sees.
fn cases() -> u64 {
    std::env::var("SLUICE_DRAFT_CASES").map_or(6, |n| n.parse().unwrap())
}

/// One to three prompts of few different tokens, with any sampling. `wanted`, if known, are their answers, which are predicted with mistakes.
fn anything(seed: u64, vocabulary: u32, wanted: &[Answer]) -> Vec<(Vec<u32>, Generation)> {
    let mut random = Rng::with_seed(seed);
    let asked = (0..random.usize(1..=3)).map(|number| {
        let few = [3, 30, vocabulary][random.usize(..3)].min(vocabulary);
        let prompt: Vec<u32> = (0..random.usize(1..60)).map(|_| random.u32(..few)).collect();
        let sampling = SamplingParams {
            temperature: [0.0, 0.0, 0.3, 1.0][random.usize(..4)],
            top_k: [0, 0, 5, 250][random.usize(..4)],
            top_p: [1.0, 0.9][random.usize(..2)],
            min_p: [0.0, 0.0, 0.1][random.usize(..3)],
            repetition_penalty: [1.0, 1.0, 1.3, 0.7][random.usize(..4)],
            presence_penalty: [0.0, 0.5][random.usize(..2)],
            seed: random.u64(..),
            ..SamplingParams::default()
        };
        let (max_tokens, logprobs) = (random.usize(1..40), [None, Some(0), Some(3)][random.usize(..3)]);
        let (mistakes, mut random) = ([0, 5, 20, 60][random.usize(..4)], random.fork());
        let token = |(token, _): &(u32, Option<Logprobs>)| match random.u32(..100) < mistakes {
            true => random.u32(..vocabulary),
            false => *token,
        };
        let prediction = wanted.get(number).map(|answer| answer.iter().map(token).collect()).unwrap_or_default();
        (prompt, Generation { sampling, max_tokens, logprobs, prediction, ..Generation::default() })
    });
    asked.collect()
}

#[test]
fn random_answers_are_those_of_the_cpu_without_drafts() {
    let Some((device, _turn)) = device() else { return };
    let heads = ["qwen3_5", "qwen3_5_moe", "glm4_moe"].map(with_head);
    let of_heads = heads.iter().map(|made| (made.path().to_path_buf(), DrafterChoice::Mtp));
    let looked_up = ["qwen3", "qwen3_window", "qwen3_moe", "gemma4", "qwen3_next", "deepseek_v3", "nemotron_h"];
    let looked_up = looked_up.iter().map(|name| (golden(name), DrafterChoice::Ngram));
    let small = ["qwen3", "qwen3_5"].iter().map(|name| (golden(name), DrafterChoice::Model));
    for (folder, drafter) in of_heads.chain(looked_up).chain(small) {
        let mut engines = None;
        for seed in 0..cases() {
            let mut random = Rng::with_seed(!seed);
            let (plain, drafting) = engines.get_or_insert_with(|| {
                let mode = MODES[random.usize(..MODES.len())];
                let drafts = always(drafter, [1, 2, 5, 8][random.usize(..4)]);
                let draft_model = (drafter == DrafterChoice::Model).then(|| golden("qwen3"));
                let with = Options { drafts, draft_model, ..options(mode, None, 48) };
                (on(None, &folder, options(mode, None, 48)), on(Some(device), &folder, with))
            });
            let vocabulary = plain.model().vocabulary as u32;
            let wanted = answered(plain, &anything(seed, vocabulary, &[]));
            let found = answered(drafting, &anything(seed, vocabulary, &wanted));
            assert_eq!(found, wanted, "{}, {drafter:?}, seed {seed}", folder.display());
            if seed % 20 == 19 {
                engines = None;
            }
        }
    }
}
