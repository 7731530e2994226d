//! Drafts on the GPU change no token and no probability, whoever drafts and however much of it is wrong: those of look-up, of a model and of a head that predicts one token
//! more, of models with recurrent layers too, whose states are kept within a step.

use std::fs;

use sluice_engine::{DraftOptions, DrafterChoice};

use super::*;

/// Tokens of an answer.
const LENGTH: usize = 24;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// Answers to prompts that repeat themselves, each at its temperature. `predicted`: what they are predicted to be.
fn answered(engine: &mut Engine, predicted: &[Vec<u32>]) -> Vec<Answer> {
    let ids: Vec<_> = [(9, 0.0, Some(2)), (33, 0.0, None), (50, 0.8, Some(0))]
        .into_iter()
        .enumerate()
        .map(|(number, (n, temperature, logprobs))| {
            let prompt: Vec<u32> = (0..n).map(|i| (i % 7 * 3 + number) as u32).collect();
            let id = engine.add_sequence();
            let sampling = SamplingParams { temperature, seed: 5, ..SamplingParams::default() };
            let prediction = predicted.get(number).cloned().unwrap_or_default();
            let generation = Generation { sampling, max_tokens: LENGTH, logprobs, prediction, ..Generation::default() };
            engine.start(id, &prompt, generation).unwrap();
            id
        })
        .collect();
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
        let wanted = answered(&mut plain, &[]);
        let found = answered(&mut drafting, &nearly(&wanted));
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
