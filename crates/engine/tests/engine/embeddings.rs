//! Embeddings: final hidden states as the references have them, pooled to the same bits however the work is divided.

use crate::support;

use serde_json::Value;
use sluice_backend::{Float, widen};
use sluice_engine::{Activations, Checkpoint, Engine, Event, Finish, Generation, KvType, Options, Pooling, SequenceId};
use sluice_store::Dtype;
use support::*;

fn pooled(pooling: Pooling) -> Generation {
    Generation { pooling: Some(pooling), ..Generation::default() }
}

/// Starts all at once; their vectors, and the tokens of those that are asked for some.
fn together(engine: &mut Engine, asked: &[(Vec<u32>, Generation)]) -> Vec<(Vec<u32>, Vec<u32>)> {
    let start = |(prompt, generation): &(Vec<u32>, Generation)| {
        let id = engine.add_sequence();
        engine.start(id, prompt, generation.clone()).unwrap();
        id
    };
    let ids: Vec<SequenceId> = asked.iter().map(start).collect();
    let mut found = vec![(Vec::new(), Vec::new()); asked.len()];
    while !engine.is_idle() {
        let events = engine.step().unwrap().to_vec();
        for event in events {
            let at = ids.iter().position(|id| *id == event.id()).unwrap();
            match event {
                Event::Token { token, .. } => found[at].1.push(token),
                Event::Finished { id, reason } => {
                    assert_ne!(reason, Finish::Failed);
                    let vector = engine.take_embedding(id);
                    assert_eq!(vector.is_some(), asked[at].1.pooling.is_some());
                    found[at].0.extend(vector.into_iter().flatten().map(f32::to_bits));
                    assert_eq!(engine.take_embedding(id), None);
                }
                Event::Prefill { .. } => {}
            }
        }
    }
    ids.into_iter().for_each(|id| engine.remove_sequence(id));
    found
}

fn embedding(engine: &mut Engine, prompt: &[u32], pooling: Pooling) -> Vec<f32> {
    let found = together(engine, &[(prompt.to_vec(), pooled(pooling))]);
    found[0].0.iter().map(|bits| f32::from_bits(*bits)).collect()
}

fn floats(checkpoint: &Checkpoint, name: &str) -> Option<Vec<f32>> {
    let tensor = checkpoint.tensor(name)?;
    let float = match tensor.dtype {
        Dtype::BF16 => Float::Bf16,
        Dtype::F16 => Float::F16,
        Dtype::F32 => Float::F32,
        _ => return None,
    };
    Some(widen(float, &tensor.bytes).unwrap())
}

/// The references' logits are the head times the state that is wanted, and the mean of logits that times the mean of states.
#[test]
fn through_the_head_they_give_the_logits_of_the_references() {
    let all: Value = serde_json::from_slice(&std::fs::read(folder("cases.json")).unwrap()).unwrap();
    let mut tried = 0;
    for case in all["cases"].as_array().unwrap() {
        let text = |key: &str| case[key].as_str().unwrap();
        if case["first"] != 0 || text("config") != "config.json" || case["logits_mlx"].is_string() {
            continue;
        }
        let path = folder(text("folder"));
        let checkpoint = Checkpoint::open(&path).unwrap();
        let names = ["lm_head.weight", "model.embed_tokens.weight", "model.language_model.embed_tokens.weight"];
        let Some(head) = names.iter().find_map(|name| floats(&checkpoint, name)) else { continue };
        let tokens: Vec<u32> = case["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
        let bytes = std::fs::read(folder(text("logits"))).unwrap();
        let logits: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let (vocabulary, range) = (case["vocab"].as_u64().unwrap() as usize, case["range"].as_f64().unwrap());
        let options = Options {
            activations: Activations::F32,
            kv_type: Some(KvType::F32),
            max_context: Some(200),
            threads: 2,
            ..Options::for_this_machine().unwrap()
        };
        let mut engine = Engine::open(&path, options).unwrap();
        let hidden = engine.model().hidden;
        let scale = engine.model().logit_scale.unwrap_or(1.0);
        // The mean of capped logits is not that of states.
        let cap = engine.model().logit_softcap.map(f64::from);
        let poolings = if cap.is_some() { &[Pooling::Last][..] } else { &[Pooling::Last, Pooling::Mean] };
        for count in [1, 17, tokens.len()] {
            let row = |at: usize| &logits[at * vocabulary..(at + 1) * vocabulary];
            for &pooling in poolings {
                let from = if pooling == Pooling::Last { count - 1 } else { 0 };
                let vector = embedding(&mut engine, &tokens[..count], pooling);
                assert_eq!(vector.len(), hidden);
                for token in 0..vocabulary {
                    let weights = &head[token * hidden..(token + 1) * hidden];
                    let ours: f64 = weights.iter().zip(&vector).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    let theirs: f64 =
                        (from..count).map(|at| f64::from(row(at)[token])).sum::<f64>() / (count - from) as f64;
                    let ours = cap.map_or(scale * ours, |cap| (scale * ours / cap).tanh() * cap);
                    let off = (ours - theirs).abs() / range;
                    assert!(off < 2e-5, "{}: {pooling:?} of {count}, token {token}: {off:e}", text("name"));
                }
            }
        }
        tried += 1;
    }
    assert!(tried >= 5, "{tried} cases");
}

#[test]
fn their_bits_depend_on_nothing_else() {
    for name in ["granite", "qwen3", "qwen3_window", "qwen3_moe", "qwen3_next", "gpt_oss_mxfp4", "mlx_qwen3_5_moe"] {
        let open = |chunk: usize, kv_tokens: Option<usize>, prefix_cache: bool| {
            let options = Options {
                activations: Activations::Int8,
                chunk: Some(chunk),
                kv_tokens,
                prefix_cache,
                block_tokens: 16,
                max_context: Some(300),
                max_sequences: 4,
                threads: 2,
                ..Options::for_this_machine().unwrap()
            };
            Engine::open(&folder(name), options).unwrap()
        };
        let mut alone = open(300, None, false);
        let prompts: Vec<Vec<u32>> = (0..3).map(|i| tokens(&alone, 120 + 40 * i, i as u64)).collect();
        let story = (tokens(&alone, 50, 9), Generation { max_tokens: 40, ..generation(40) });
        let of = |prompt: &Vec<u32>, pooling| (prompt.clone(), pooled(pooling));
        let both = prompts.iter().flat_map(|p| [of(p, Pooling::Last), of(p, Pooling::Mean)]);
        let asked: Vec<_> = both.chain([story.clone()]).collect();
        let wanted: Vec<_> =
            asked.iter().map(|one| together(&mut alone, std::slice::from_ref(one)).remove(0)).collect();
        assert_eq!(wanted[6].1.len(), 40);
        assert!(wanted[0].0 != wanted[1].0 && wanted[0].0 != wanted[2].0);
        // Short steps, all at once, twice: what is kept of the prompts is there the second time.
        for (chunk, kv_tokens) in [(7, None), (64, None), (32, Some(320))] {
            let mut engine = open(chunk, kv_tokens, true);
            for _ in 0..2 {
                let found = together(&mut engine, &asked);
                assert!(found == wanted, "{name}: steps of {chunk} tokens, room for {kv_tokens:?}");
            }
        }
    }
}

#[test]
fn the_last_state_shares_a_prompt_and_the_mean_shares_nothing() {
    let options = Options { max_context: Some(300), block_tokens: 16, ..Options::for_this_machine().unwrap() };
    let mut engine = Engine::open(&folder("qwen3"), options).unwrap();
    let prompt = tokens(&engine, 100, 3);
    let mut adopted = |pooling| {
        let id = engine.add_sequence();
        engine.start(id, &prompt, pooled(pooling)).unwrap();
        while !engine.is_idle() {
            engine.step().unwrap();
        }
        let adopted = engine.reused_tokens(id).unwrap();
        engine.remove_sequence(id);
        adopted
    };
    assert_eq!((adopted(Pooling::Mean), adopted(Pooling::Last)), (0, 0));
    assert!(adopted(Pooling::Last) >= 96);
    assert_eq!(adopted(Pooling::Mean), 0);
    // It is of a whole sequence.
    let id = engine.add_sequence();
    engine.advance(id, &prompt).unwrap();
    assert!(engine.start(id, &prompt, pooled(Pooling::Last)).unwrap_err().to_string().contains("all of a sequence"));
}

#[test]
fn states_of_given_tokens_are_those_that_vectors_are_made_of() {
    for name in ["qwen3", "qwen3_next", "qwen3_moe"] {
        let open = |chunk: usize| {
            let options = Options {
                chunk: Some(chunk),
                max_context: Some(200),
                threads: 2,
                ..Options::for_this_machine().unwrap()
            };
            Engine::open(&folder(name), options).unwrap()
        };
        let (mut whole, mut pieces) = (open(200), open(7));
        let tokens = tokens(&whole, 40, 3);
        let states = |engine: &mut Engine| {
            let mut found: Vec<Vec<f32>> = Vec::new();
            let each = |position: usize, state: &[f32]| {
                assert_eq!(position, found.len());
                found.push(state.to_vec());
            };
            engine.states(&tokens, each).unwrap();
            found
        };
        let found = states(&mut whole);
        assert_eq!(found.len(), 40);
        // Also if a prompt that begins alike was kept.
        assert_eq!(embedding(&mut pieces, &tokens, Pooling::Last), found[39], "{name}");
        assert_eq!(states(&mut pieces), found, "{name}");
        assert_eq!(embedding(&mut whole, &tokens[..17], Pooling::Last), found[16], "{name}");
        assert!(whole.states(&[], |_, _| ()).is_err() && whole.is_idle());
    }
}
