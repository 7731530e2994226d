//! Real models in GGUF against the references of `tests/golden/real`: logits, greedy tokens, token ids and nats. And promise 1 on them: the same bits however the work is
//! divided. `SLUICE_REAL_MODELS` names the folder of the files (default `target/real-models`); a model that is not there is SKIPPED by name.

use crate::support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use sluice_engine::text::Tokenizer;
use sluice_engine::{
    Activations, AttentionMode, Engine, Isa, KvType, ModelSource, Options, PromptCacheOptions, cpu,
    sampling::SamplingParams,
};
use sluice_engine::{Event, Generation};
use support::{ask, generation, logits, thorough};

const NAMES: [&str; 3] = ["smollm2", "gemma3", "qwen2_5_coder"];
/// How far our logits may be from transformers' on the dequantised weights, as a part of their range.
const TOLERANCE: f64 = 1e-4;
/// How far apart the best two may be where llama.cpp, which rounds activations to eight bits, chooses the other; as a part of the range.
const NEAR_TIE: f64 = 1e-2;

/// How many of a model's ten greedy answers are compared, unless all are asked for. Of the smallest model all are.
const ANSWERS: usize = 3;

struct Real {
    name: &'static str,
    source: Arc<dyn ModelSource>,
    golden: Value,
}

impl Real {
    fn engine(&self, options: Options) -> Engine {
        Engine::open_source(&self.source, options, &cpu).unwrap()
    }

    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::load(&*self.source, None).unwrap()
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The smallest of those that are here, or all where that is asked for: for what other checkpoints show too.
fn some_models() -> impl Iterator<Item = Real> {
    models().into_iter().take(if thorough() { NAMES.len() } else { 1 })
}

/// Those that are here.
fn models() -> Vec<Real> {
    let folder =
        std::env::var_os("SLUICE_REAL_MODELS").map_or_else(|| root().join("target/real-models"), PathBuf::from);
    let mut found = Vec::new();
    for name in NAMES {
        let golden = std::fs::read(root().join(format!("tests/golden/real/{name}.json"))).unwrap();
        let golden: Value = serde_json::from_slice(&golden).unwrap();
        let path = folder.join(golden["file"].as_str().unwrap());
        if path.exists() {
            found.push(Real { name, source: sluice_engine::source::open(&path).unwrap(), golden });
        } else {
            println!("SKIPPED: {name}, {} is not there", path.display());
        }
    }
    found
}

fn exact(max_context: usize) -> Options {
    Options {
        activations: Activations::F32,
        kv_type: Some(KvType::F32),
        max_context: Some(max_context),
        threads: 2,
        ..Options::for_this_machine().unwrap()
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    list(value).iter().map(|t| t.as_u64().unwrap() as u32).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    list(value).iter().map(|x| x.as_f64().unwrap()).collect()
}

#[test]
fn logits_are_those_of_transformers_on_the_dequantised_weights() {
    for model in models() {
        let mut engine = model.engine(exact(1024));
        assert_eq!(engine.model().vocabulary as u64, model.golden["vocabulary"].as_u64().unwrap(), "{}", model.name);
        let mut worst = 0.0f64;
        for case in list(&model.golden["logits"]) {
            let range = case["range"].as_f64().unwrap();
            let (rows, stride) = (list(&case["rows"]), case["stride"].as_u64().unwrap() as usize);
            let mut seen = 0;
            engine
                .score(&ids(&case["ids"]), true, |position, logits| {
                    for row in rows.iter().filter(|row| row["position"] == position) {
                        let top =
                            list(&row["top"]).iter().map(|t| (t[0].as_u64().unwrap() as usize, t[1].as_f64().unwrap()));
                        let sampled =
                            numbers(&row["sampled"]).into_iter().enumerate().map(|(i, value)| (i * stride, value));
                        for (token, value) in top.chain(sampled) {
                            worst = worst.max((f64::from(logits[token]) - value).abs() / range);
                            seen += 1;
                        }
                    }
                    Ok(())
                })
                .unwrap();
            assert_eq!(seen, rows.len() * (32 + 257), "{}", model.name);
        }
        println!("{:14} {worst:.1e} of the range from transformers", model.name);
        assert!(worst < TOLERANCE, "{}: {worst:.1e} of the range away from transformers", model.name);
    }
}

/// The greedy answers of `n` tokens, which an end of text does not stop. Side by side, which changes no bit, each weight is read once for all.
fn greedy(engine: &mut Engine, prompts: &[Vec<u32>], n: usize) -> Vec<Vec<u32>> {
    let mut ids = Vec::new();
    for prompt in prompts {
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let id = engine.add_sequence();
        engine.start(id, prompt, Generation { sampling, max_tokens: n, ..Generation::default() }).unwrap();
        ids.push(id);
    }
    let mut answers = vec![Vec::new(); prompts.len()];
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            if let Event::Token { id, token, .. } = event {
                answers[ids.iter().position(|of| of == id).unwrap()].push(*token);
            }
        }
    }
    ids.into_iter().for_each(|id| engine.remove_sequence(id));
    answers
}

/// By how much of the range our own logits prefer the first of two tokens after `prompt`.
fn preference(engine: &mut Engine, prompt: &[u32], (ours, theirs): (u32, u32)) -> f64 {
    let mut margin = f64::NAN;
    engine
        .score(prompt, false, |_, logits| {
            let (least, most) = logits.iter().fold((f32::MAX, f32::MIN), |(a, b), x| (a.min(*x), b.max(*x)));
            margin = f64::from(logits[ours as usize] - logits[theirs as usize]) / f64::from(most - least);
            Ok(())
        })
        .unwrap();
    margin
}

#[test]
fn greedy_tokens_are_the_references_or_the_best_two_were_nearly_alike() {
    for model in models() {
        let mut engine = model.engine(Options { max_sequences: 10, ..exact(256) });
        let cases = list(&model.golden["greedy"]);
        assert_eq!(cases.len(), 10);
        let cases = if model.name == NAMES[0] || thorough() { cases } else { &cases[..ANSWERS] };
        let prompts: Vec<_> = cases.iter().map(|case| ids(&case["ids"])).collect();
        let answers = greedy(&mut engine, &prompts, 64);
        for (reference, tolerance) in [("transformers", 2.0 * TOLERANCE), ("llama_cpp", NEAR_TIE)] {
            let mut whole = 0;
            for (case, ours) in cases.iter().zip(&answers) {
                let (prompt, theirs) = (ids(&case["ids"]), ids(&case[reference]["ids"]));
                assert_eq!((ours.len(), theirs.len()), (64, 64));
                let Some(at) = (0..64).find(|&i| ours[i] != theirs[i]) else {
                    whole += 1;
                    continue;
                };
                let margin = preference(&mut engine, &[&prompt, &ours[..at]].concat(), (ours[at], theirs[at]));
                let gap = &case[reference]["gaps"][at];
                let what = format!("{}, {}: token {at} is not {reference}'s", model.name, case["prompt"]);
                println!("{what}: ours is ahead by {margin:.1e} of the range, theirs by {gap} in logits");
                assert!((0.0..tolerance).contains(&margin), "{what}: ours is ahead by {margin:.1e} of the range");
            }
            println!("{:14} {whole} of {} answers are {reference}'s", model.name, cases.len());
        }
    }
}

/// FNV-1a, 64 bits, of the ids as little-endian u32.
fn fnv(ids: &[u32]) -> String {
    let bytes = ids.iter().flat_map(|id| id.to_le_bytes());
    format!(
        "{:016x}",
        bytes.fold(0xcbf2_9ce4_8422_2325_u64, |h, byte| (h ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    )
}

#[test]
fn token_ids_are_those_of_llama_cpp() {
    assert_eq!(fnv(&[1]), "ad2aca7747985764");
    for model in models() {
        let tokenizer = model.tokenizer();
        let cases = list(&model.golden["tokenization"]);
        assert!(cases.len() > 20);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let file = (text == "LICENSE-APACHE").then(|| std::fs::read_to_string(root().join(text)).unwrap());
            let got = tokenizer.encode(file.as_deref().unwrap_or(text), false).unwrap();
            let what = || format!("{}: {text:?} gives {got:?}", model.name);
            assert_eq!(got.len() as u64, case["tokens"].as_u64().unwrap(), "{}", what());
            assert_eq!(fnv(&got), case["fnv"].as_str().unwrap(), "{}", what());
        }
    }
}

#[test]
fn nats_are_those_of_transformers() {
    let Some(folder) = std::env::var_os("SLUICE_DEMO_CHECKPOINT").map(PathBuf::from) else {
        println!("SKIPPED: SLUICE_DEMO_CHECKPOINT, which has the text, is not set");
        return;
    };
    for model in some_models() {
        let golden = &model.golden["perplexity"];
        let (window, windows) =
            (golden["window"].as_u64().unwrap() as usize, if model.name == NAMES[0] { 2 } else { 1 });
        let text = std::fs::read_to_string(folder.join(golden["text"].as_str().unwrap())).unwrap();
        let tokens = model.tokenizer().encode(&text, false).unwrap();
        assert_eq!(fnv(&tokens), golden["fnv"].as_str().unwrap(), "{}", model.name);
        let mut engine = model.engine(exact(window));
        let begin = ids(&model.golden["begin"]);
        for (i, piece) in tokens.chunks(window).take(windows).enumerate() {
            let piece = [&begin, &piece[begin.len()..]].concat();
            let mut nats = 0.0;
            engine
                .score(&piece, true, |position, logits| {
                    if let Some(next) = piece.get(position + 1) {
                        let top = f64::from(logits.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x)));
                        let sum: f64 = logits.iter().map(|x| (f64::from(*x) - top).exp()).sum();
                        nats += top + sum.ln() - f64::from(logits[*next as usize]);
                    }
                    Ok(())
                })
                .unwrap();
            let (ours, theirs) = (nats / (piece.len() - 1) as f64, golden["transformers"][i].as_f64().unwrap());
            println!("{:14} window {i}: {ours:.6} nats, transformers {theirs:.6}", model.name);
            assert!((ours - theirs).abs() < 1e-4, "{}, window {i}: {ours} nats, transformers {theirs}", model.name);
        }
    }
}

/// How values are rounded on the way: activations, keys and values, attention.
const ROUNDINGS: [(Activations, KvType, AttentionMode); 5] = [
    (Activations::F32, KvType::F32, AttentionMode::F32),
    (Activations::Bf16, KvType::Bf16, AttentionMode::F32),
    (Activations::Int8, KvType::Int8, AttentionMode::F32),
    (Activations::F32, KvType::Int16, AttentionMode::Int16),
    (Activations::Int8, KvType::Int8, AttentionMode::Int8),
];

#[test]
fn chunks_threads_and_instruction_sets_give_the_same_bits() {
    let best = *Isa::supported().last().unwrap();
    for model in some_models() {
        let prompt = ids(&model.golden["logits"][1]["ids"]);
        let prompt = &prompt[..prompt.len().min(20)];
        // The smallest model is tested with all roundings. The others, to save time, are tested with the one that has most arithmetic of its own.
        let roundings = if model.name == NAMES[0] { &ROUNDINGS[..] } else { &ROUNDINGS[4..] };
        for &(activations, kv_type, attention) in roundings {
            let options =
                |isa, threads| Options { isa, threads, activations, kv_type: Some(kv_type), attention, ..exact(64) };
            let wanted = logits(&mut model.engine(options(best, 1)), prompt, &[prompt.len()]);
            for isa in Isa::supported() {
                let generic = isa == Isa::GENERIC;
                for threads in [1, 2, 3] {
                    // The generic instruction set is slow: one division, a few tokens. Golden models have every division with each.
                    let pieces: &[&[usize]] = match (isa == best, threads) {
                        (true, 2) => &[&[1], &[7]],
                        (true, _) => &[&[prompt.len() - 1, 1]],
                        (false, 2) if generic => &[&[2, 1]],
                        (false, 2) => &[&[7]],
                        (false, _) => continue,
                    };
                    let prompt = &prompt[..if generic { 3 } else { prompt.len() }];
                    let mut engine = model.engine(options(isa, threads));
                    for pieces in pieces {
                        let got = logits(&mut engine, prompt, pieces);
                        let same = got == wanted[..got.len()];
                        assert!(
                            same,
                            "{} {activations:?} {kv_type:?} {attention:?}: {isa}, {threads} threads, pieces {pieces:?}",
                            model.name
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_restart_goes_on_with_the_bits_of_the_prompt_cache() {
    for model in some_models() {
        let home = tempfile::tempdir().unwrap();
        let options = || Options {
            activations: Activations::Int8,
            kv_type: None,
            max_sequences: 2,
            prompt_cache: Some(PromptCacheOptions {
                folder: home.path().join("cache"),
                quota: Some(256 << 20),
                daily_limit: None,
                min_tokens: 16,
                key_file: None,
                sums_file: Some(home.path().join("sums.json")),
                // However large the file is.
                sum_at_start: u64::MAX,
                store: None,
            }),
            ..exact(1024)
        };
        let prompt = ids(&model.golden["logits"][2]["ids"]);
        let mut engine = model.engine(options());
        let (first, _, restored) = ask(&mut engine, &prompt, generation(8));
        assert_eq!(restored, 0, "{}", model.name);
        engine.save().unwrap();
        drop(engine);
        let (again, _, restored) = ask(&mut model.engine(options()), &prompt, generation(8));
        assert!(restored >= 600, "{}: {restored} tokens came from disk", model.name);
        assert_eq!(again, first, "{}", model.name);
        let cold = Options { prompt_cache: None, prefix_cache: false, ..options() };
        assert_eq!(ask(&mut model.engine(cold), &prompt, generation(8)).0, first, "{}", model.name);
    }
}
