//! The demo checkpoint against the reference: the same greedy tokens, the same perplexity. Needs the unpacked checkpoint (bf16, 103 MB, not in the
//! repository): `SLUICE_DEMO_CHECKPOINT` names its folder; without it these tests say that they were skipped.

use std::path::{Path, PathBuf};

use serde_json::Value;
use sluice_engine::text::Tokenizer;
use sluice_engine::{Activations, Engine, Event, Generation, KvType, Options, sampling::SamplingParams};

fn checkpoint() -> Option<PathBuf> {
    let folder = std::env::var_os("SLUICE_DEMO_CHECKPOINT").map(PathBuf::from);
    if folder.is_none() {
        println!("skipped: SLUICE_DEMO_CHECKPOINT is not set");
    }
    folder
}

fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn engine(folder: &Path) -> Engine {
    let options = Options {
        activations: Activations::F32,
        kv_type: Some(KvType::F32),
        max_context: Some(1024),
        ..Options::for_this_machine().unwrap()
    };
    Engine::open(folder, options).unwrap()
}

fn ids(v: &Value) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect()
}

#[test]
fn the_same_greedy_tokens_as_the_reference() {
    let Some(folder) = checkpoint() else { return };
    let mut engine = engine(&folder);
    let cases = golden("demo-greedy.json");
    let cases = cases["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 10);
    for case in cases {
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let id = engine.add_sequence();
        let generation = Generation { sampling, max_tokens: 128, ..Generation::default() };
        engine.start(id, &ids(&case["prompt_ids"]), generation).unwrap();
        let mut answer = Vec::new();
        while !engine.is_idle() {
            for event in engine.step().unwrap() {
                if let Event::Token { token, .. } = event {
                    answer.push(*token);
                }
            }
        }
        engine.remove_sequence(id);
        assert_eq!(answer, ids(&case["output_ids"]), "{}", case["prompt"]);
    }
}

#[test]
fn the_same_nats_as_the_reference() {
    let Some(folder) = checkpoint() else { return };
    let text = std::fs::read_to_string(folder.join("heldout.txt")).unwrap();
    let tokens = Tokenizer::load(&folder, None).unwrap().encode(&text, false).unwrap();
    let golden = golden("demo-ppl.json");
    assert_eq!(tokens.len() as u64, golden["tokens"].as_u64().unwrap());
    let mut engine = engine(&folder);
    for (i, window) in tokens.chunks(512).take(8).enumerate() {
        let mut nats = 0.0;
        engine
            .score(window, true, |position, logits| {
                if let Some(next) = window.get(position + 1) {
                    let top = logits.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x)) as f64;
                    let sum: f64 = logits.iter().map(|x| (*x as f64 - top).exp()).sum();
                    nats += top + sum.ln() - logits[*next as usize] as f64;
                }
                Ok(())
            })
            .unwrap();
        let (ours, theirs) = (nats / 511.0, golden["experts"]["8"]["windows"][i].as_f64().unwrap());
        assert!((ours - theirs).abs() < 1e-4, "window {i}: {ours} nats, the reference has {theirs}");
    }
}
