//! Logits of every architecture against the reference implementations, on the tiny random checkpoints of `tests/golden`.

use std::path::{Path, PathBuf};

use serde_json::Value;
use sluice_engine::{Activations, Checkpoint, Config, Engine, KvType, ModelTensors, Options};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn options(max_context: usize) -> Options {
    Options {
        activations: Activations::F32,
        kv_type: Some(KvType::F32),
        max_context: Some(max_context),
        threads: 2,
        ..Options::for_this_machine().unwrap()
    }
}

struct Case {
    name: String,
    folder: PathBuf,
    config: String,
    tokens: Vec<u32>,
    prompt: usize,
    /// Position of the first recorded row.
    first: usize,
    vocab: usize,
    /// The reference's greatest logit minus its least.
    range: f32,
    /// `[rows, vocab]`
    logits: Vec<f32>,
    logits_mlx: Option<Vec<f32>>,
}

fn cases() -> Vec<Case> {
    let all: Value = serde_json::from_slice(&std::fs::read(golden().join("cases.json")).unwrap()).unwrap();
    let floats = |name: &str| -> Vec<f32> {
        let bytes = std::fs::read(golden().join(name)).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let cases = all["cases"].as_array().unwrap().iter().map(|c| Case {
        name: c["name"].as_str().unwrap().into(),
        folder: golden().join(c["folder"].as_str().unwrap()),
        config: c["config"].as_str().unwrap().into(),
        tokens: c["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect(),
        prompt: all["prompt"].as_u64().unwrap() as usize,
        first: c["first"].as_u64().unwrap() as usize,
        vocab: c["vocab"].as_u64().unwrap() as usize,
        range: c["range"].as_f64().unwrap() as f32,
        logits: floats(c["logits"].as_str().unwrap()),
        logits_mlx: c["logits_mlx"].as_str().map(floats),
    });
    cases.collect()
}

impl Case {
    fn engine(&self, options: Options) -> Engine {
        let path = self.folder.join(&self.config);
        let config = Config::parse(path.clone(), &std::fs::read(path).unwrap()).unwrap();
        let checkpoint = Checkpoint::open(&self.folder).unwrap();
        Engine::load(&ModelTensors::of_safetensors(checkpoint, config), options).unwrap()
    }

    /// Logits of all positions: the prompt at once, then single steps.
    fn run(&self, engine: &mut Engine) -> Vec<f32> {
        let mut rows = Vec::new();
        let id = engine.add_sequence();
        let (prompt, steps) = self.tokens.split_at(self.prompt);
        for tokens in std::iter::once(prompt).chain(steps.chunks(1)) {
            let keep = |_, logits: &[f32]| {
                rows.extend_from_slice(logits);
                Ok(())
            };
            engine.feed(id, tokens, true, keep).unwrap();
        }
        rows
    }
}

/// The greatest difference, relative to the reference's range of logits.
fn difference(ours: &[f32], reference: &[f32], range: f32) -> f32 {
    assert!(ours.len() >= reference.len());
    let recorded = &ours[ours.len() - reference.len()..];
    recorded.iter().zip(reference).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / range
}

#[test]
fn logits_agree_with_the_references_for_every_architecture() {
    let mut seen = 0;
    for case in cases() {
        let mut engine = case.engine(options(case.tokens.len()));
        assert_eq!(engine.model().vocabulary, case.vocab, "{}", case.name);
        let ours = case.run(&mut engine);
        assert_eq!(ours.len() / case.vocab, case.tokens.len());
        assert_eq!(case.logits.len() / case.vocab, case.tokens.len() - case.first);
        let worst = difference(&ours, &case.logits, case.range);
        println!("{:28} {worst:.1e} of the range from transformers", case.name);
        assert!(worst < 2e-4, "{}: {worst} of the range away from transformers", case.name);
        if let Some(mlx) = &case.logits_mlx {
            let worst = difference(&ours, mlx, case.range);
            println!("{:28} {worst:.1e} of the range from mlx_lm", case.name);
            assert!(worst < 2e-2, "{}: {worst} of the range away from mlx_lm", case.name);
        }
        seen += 1;
    }
    assert!(seen >= 30, "only {seen} golden cases found");
}
