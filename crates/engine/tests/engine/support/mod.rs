//! Golden checkpoints, tokens, and the bits of their logits.

pub mod prompts;
pub mod streamed;

use std::path::{Path, PathBuf};

use sluice_engine::sampling::SamplingParams;
use sluice_engine::{AttentionMode, Engine, Event, Generation, KvType};

/// Types of keys and values, and how attention works on them.
pub const KINDS: [(KvType, AttentionMode); 6] = [
    (KvType::F32, AttentionMode::F32),
    (KvType::Bf16, AttentionMode::F32),
    (KvType::F16, AttentionMode::F32),
    (KvType::Int8, AttentionMode::F32),
    (KvType::Int8, AttentionMode::Int8),
    (KvType::Int16, AttentionMode::Int16),
];

/// `SLUICE_THOROUGH`: every division of every checkpoint, and all that is asked of each real model, instead of a choice that takes a third of the time.
pub fn thorough() -> bool {
    std::env::var_os("SLUICE_THOROUGH").is_some_and(|value| !value.is_empty())
}

pub fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

pub fn tokens(engine: &Engine, n: usize, seed: u64) -> Vec<u32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| rng.u32(..engine.model().vocabulary as u32)).collect()
}

/// All logits of `tokens`, taken in pieces of these sizes (the last one repeats).
pub fn logits(engine: &mut Engine, tokens: &[u32], pieces: &[usize]) -> Vec<u32> {
    let id = engine.add_sequence();
    let mut bits = Vec::new();
    let (mut rest, mut sizes) = (tokens, pieces.iter().copied());
    let mut size = 1;
    while !rest.is_empty() {
        size = sizes.next().unwrap_or(size).min(rest.len());
        let (piece, after) = rest.split_at(size);
        let keep = |_, row: &[f32]| {
            bits.extend(row.iter().map(|x| x.to_bits()));
            Ok(())
        };
        engine.feed(id, piece, true, keep).unwrap();
        rest = after;
    }
    engine.remove_sequence(id);
    bits
}

/// Of each token of an answer, also how likely all others were, to the bit.
#[derive(Debug, PartialEq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub likely: Vec<(u32, u64)>,
}

pub fn generation(n: usize) -> Generation {
    let all = 1 << 16;
    let sampling = SamplingParams { temperature: 0.8, seed: 7, ..SamplingParams::default() };
    Generation { sampling, max_tokens: n, logprobs: Some(all), ..Generation::default() }
}

/// An answer, and how many tokens of its prompt were there, and of them from disk.
pub fn ask(engine: &mut Engine, prompt: &[u32], generation: Generation) -> (Answer, usize, usize) {
    let id = engine.add_sequence();
    engine.start(id, prompt, generation).unwrap();
    let mut answer = Answer { tokens: Vec::new(), likely: Vec::new() };
    while !engine.is_idle() {
        let events = engine.step().unwrap().to_vec();
        for event in events {
            if let Event::Token { token, .. } = event {
                answer.tokens.push(token);
                let logprobs = engine.take_logprobs(id).unwrap();
                answer.likely.extend(logprobs.top.iter().map(|(token, p)| (*token, p.to_bits())));
            }
        }
    }
    let (adopted, restored) = (engine.reused_tokens(id).unwrap(), engine.restored_tokens(id).unwrap());
    engine.remove_sequence(id);
    (answer, adopted, restored)
}

/// Dense, windowed, mixtures, and with recurrent layers: models whose keys, values and states go away and come back.
pub const MODELS: [&str; 19] = [
    "gemma4_moe",
    "gemma4_per_layer",
    "ministral3",
    "olmo3",
    "qwen3",
    "qwen3_window",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_next",
    "qwen3_5_moe",
    "gpt_oss_mxfp4",
    "nemotron_h_moe",
    "nemotron_h_latent",
    "kimi_linear",
    "kimi_k3",
    "glm5_next",
    "deepseek_v4",
    "qwen4_exp",
    "deepseek_v32",
];
