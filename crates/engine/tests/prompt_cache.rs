//! The prompt cache on disk: what an engine has computed is taken up by one that begins anew, and whatever is taken up, the answers and logits are those of one
//! that computes all of it.

mod support;

use std::path::Path;

use proptest::prelude::*;
use sluice_engine::sampler::SamplingParams;
use sluice_engine::{Engine, Event, Generation, KvType, Options, PromptCacheOptions};
use support::{folder, tokens};

fn cached(cache: &Path) -> Options {
    Options {
        threads: 2,
        max_context: Some(2048),
        max_sequences: 2,
        snapshots: 16,
        prompt_cache: Some(PromptCacheOptions {
            folder: cache.join("cache"),
            quota: Some(256 << 20),
            daily_limit: None,
            fewest: 16,
            key_file: None,
            fingerprints: Some(cache.join("fingerprints.json")),
        }),
        ..Options::for_this_machine().unwrap()
    }
}

fn cold() -> Options {
    Options { prompt_cache: None, prefix_cache: false, snapshots: 0, ..cached(Path::new("")) }
}

/// Of each token of an answer, also how likely all others were, to the bit.
#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    likely: Vec<(u32, u64)>,
}

fn generation(n: usize) -> Generation {
    let all = 1 << 16;
    let sampling = SamplingParams { temperature: 0.8, seed: 7, ..SamplingParams::default() };
    Generation { sampling, max_tokens: n, logprobs: Some(all), ..Generation::default() }
}

fn ask(engine: &mut Engine, prompt: &[u32], generation: Generation) -> (Answer, usize, usize) {
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
    let (adopted, restored) = (engine.adopted(id).unwrap(), engine.restored(id).unwrap());
    engine.remove_sequence(id);
    (answer, adopted, restored)
}

#[test]
fn an_engine_that_begins_anew_goes_on_where_another_ended() {
    let home = tempfile::tempdir().unwrap();
    let model = folder("qwen3");
    let mut engine = Engine::open(&model, cached(home.path())).unwrap();
    assert_eq!(engine.take_prompt_cache_notes(), Vec::<String>::new());
    let prompt = tokens(&engine, 300, 1);
    let (first, adopted, restored) = ask(&mut engine, &prompt, generation(8));
    assert_eq!((adopted, restored), (0, 0));
    engine.save().unwrap();
    assert!(engine.prompt_cache().unwrap().stored >= 9);
    drop(engine);
    let mut engine = Engine::open(&model, cached(home.path())).unwrap();
    let (again, adopted, restored) = ask(&mut engine, &prompt, generation(8));
    assert_eq!((adopted, restored), (288, 288));
    assert_eq!(again, first);
    let (third, adopted, restored) = ask(&mut engine, &prompt, generation(8));
    assert_eq!((third, adopted, restored), (first, 299, 0));
}

/// Dense, windowed, mixtures, and with recurrent layers.
const MODELS: [&str; 6] = ["qwen3", "qwen3_window", "qwen3_moe", "qwen3_5", "qwen3_next", "qwen3_5_moe"];
const KV_TYPES: [KvType; 4] = [KvType::F32, KvType::Bf16, KvType::F16, KvType::Int8];

/// A first engine computes prompts that begin alike and is thrown away at some point; a second one is asked for others that part from them somewhere.
fn parts_anywhere(model: &str, kv_type: KvType, length: usize, cut: usize, mark: usize, block_tokens: usize) {
    let home = tempfile::tempdir().unwrap();
    let options = Options { kv_type: Some(kv_type), block_tokens, ..cached(home.path()) };
    let mut first = Engine::open(&folder(model), options.clone()).unwrap();
    let mut prompt = tokens(&first, length, 3);
    // The newest states are kept: of this one, that at its end.
    ask(&mut first, &prompt[..mark], generation(1));
    first.save().unwrap();
    ask(&mut first, &prompt, generation(3));
    first.save().unwrap();
    drop(first);
    let mut second = Engine::open(&folder(model), options.clone()).unwrap();
    let words = second.model().vocabulary as u32;
    prompt[cut..].iter_mut().for_each(|t| *t = (*t + 1) % words);
    let (answer, adopted, restored) = ask(&mut second, &prompt, generation(3));
    let what =
        format!("{model}, {kv_type:?}, {length} tokens, cut at {cut}, state at {mark}, blocks of {block_tokens}");
    let known = match second.model().state_len() {
        0 => cut / block_tokens * block_tokens,
        _ if mark <= cut => mark,
        _ => 0,
    };
    // Less than that is not looked for.
    let expected = if length - 1 >= 16 && known >= 16 { known } else { 0 };
    assert_eq!((adopted, restored), (expected, expected), "{what}");
    let mut cold = Engine::open(&folder(model), Options { kv_type: Some(kv_type), block_tokens, ..cold() }).unwrap();
    assert_eq!(answer, ask(&mut cold, &prompt, generation(3)).0, "{what}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_restored_prefix_gives_the_bits_of_a_cold_run(
        model in 0..MODELS.len(), kv_type in 0..4usize, length in 2usize..300, cut in 0.0..1.0, mark in 0.0..1.0, small in any::<bool>()
    ) {
        let (cut, mark) = ((cut * (length - 1) as f64) as usize, 1 + (mark * (length - 1) as f64) as usize);
        parts_anywhere(MODELS[model], KV_TYPES[kv_type], length, cut, mark, if small { 8 } else { 32 });
    }
}
