//! A model in stages: wherever it is cut, with whatever other sequences in a step and in whatever pieces, logits and tokens have the bits of one engine.

use sluice_engine::sampling::SamplingParams;
use sluice_engine::{Engine, Generation, Options, Stage, StagePiece, StageWanted, cpu};
use sluice_model::LayerRange;

use crate::support::{ask, folder, logits, tokens};

/// Models of every kind that can be cut: dense, with windows, with recurrent layers, with mixtures, with latent attention.
const CUT: [&str; 8] =
    ["qwen3", "qwen3_moe", "qwen3_window", "qwen3_5", "qwen3_next", "deepseek_v3", "gemma3", "gpt_oss"];

fn options() -> Options {
    Options {
        threads: 2,
        max_context: Some(256),
        max_sequences: 4,
        chunk: Some(64),
        snapshots: 0,
        ..Options::for_this_machine().unwrap()
    }
}

fn open(model: &str, ends: &[usize]) -> Vec<Stage> {
    let source = sluice_model::source::open(&folder(model)).unwrap();
    let starts = std::iter::once(0).chain(ends.iter().copied());
    starts
        .zip(ends)
        .map(|(from, to)| Stage::open(&source, options(), LayerRange { from, to: *to }, &cpu).unwrap())
        .collect()
}

/// Takes pieces through all stages.
fn run(stages: &mut [Stage], pieces: &[StagePiece]) -> sluice_engine::StageOutput {
    let mut hidden = Vec::new();
    let last = stages.len() - 1;
    for stage in &mut stages[..last] {
        hidden = stage.step(pieces, &hidden).unwrap().hidden;
    }
    stages[last].step(pieces, &hidden).unwrap()
}

/// All ways to cut so many layers into two, some into four, and none.
fn cuts(layers: usize) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = (1..layers).map(|at| vec![at, layers]).collect();
    all.push(vec![layers]);
    for a in 1..layers {
        for b in a + 1..layers {
            all.extend((b + 1..layers).map(|c| vec![a, b, c, layers]));
        }
    }
    all
}

#[test]
fn logits_are_those_of_one_engine_wherever_the_model_is_cut() {
    for model in CUT {
        let mut engine = Engine::open(&folder(model), options()).unwrap();
        let layers = engine.model().layers.len();
        let prompts = [tokens(&engine, 50, 1), tokens(&engine, 33, 2)];
        let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| logits(&mut engine, prompt, &[50])).collect();
        assert!(cuts(layers).len() > 1, "{model}");
        for cut in cuts(layers) {
            let mut stages = open(model, &cut);
            let vocabulary = engine.model().vocabulary;
            let mut found: Vec<Vec<u32>> = vec![Vec::new(); 2];
            // Both at once, in pieces of different lengths.
            let mut at = [0, 0];
            for step in [[20, 3], [1, 29], [29, 1]] {
                let pieces: Vec<StagePiece> = (0..2)
                    .map(|i| StagePiece {
                        sequence: i as u64,
                        position: at[i],
                        tokens: &prompts[i][at[i]..at[i] + step[i]],
                        wanted: StageWanted::AllLogits,
                        is_answer: false,
                    })
                    .collect();
                let output = run(&mut stages, &pieces);
                let (first, second) = output.logits.split_at(step[0] * vocabulary);
                found[0].extend(first.iter().map(|x| x.to_bits()));
                found[1].extend(second.iter().map(|x| x.to_bits()));
                (0..2).for_each(|i| at[i] += step[i]);
            }
            assert!(found == expected, "{model}, cut at {cut:?}");
        }
    }
}

#[test]
fn tokens_are_drawn_as_by_one_engine_and_a_sequence_may_begin_anew() {
    for model in ["qwen3", "qwen3_next"] {
        let sampling =
            SamplingParams { temperature: 0.9, seed: 3, repetition_penalty: 1.3, ..SamplingParams::default() };
        let mut engine = Engine::open(&folder(model), options()).unwrap();
        let prompt = tokens(&engine, 40, 4);
        let generation =
            Generation { sampling: sampling.clone(), max_tokens: 20, logprobs: Some(1), ..Generation::default() };
        let expected = ask(&mut engine, &prompt, generation).0.tokens;
        let mut stages = open(model, &[1, engine.model().layers.len()]);
        for _ in 0..2 {
            let (mut answer, mut next, mut position) = (Vec::new(), prompt.clone(), 0);
            while answer.len() < 20 {
                let wanted = StageWanted::Token(sampling.clone());
                let is_answer = !answer.is_empty();
                let pieces = [StagePiece { sequence: 9, position, tokens: &next, wanted, is_answer }];
                let token = run(&mut stages, &pieces).tokens[0].unwrap().unwrap();
                position += next.len();
                next = vec![token];
                answer.push(token);
            }
            assert_eq!(answer, expected, "{model}");
        }
        stages.iter_mut().for_each(|stage| stage.release(9));
        assert!(stages.iter().all(|stage| stage.computed(9) == 0));
    }
}

#[test]
fn what_does_not_follow_or_does_not_fit_is_refused_and_changes_nothing() {
    let mut stages = open("qwen3", &[1, 2]);
    let piece =
        |position, tokens| StagePiece { sequence: 1, position, tokens, wanted: StageWanted::Logits, is_answer: false };
    let many = vec![1; 65];
    let hidden = stages[0].step(&[piece(0, &[1, 2, 3])], &[]).unwrap().hidden;
    assert_eq!(hidden.len(), 3 * stages[0].hidden_len());
    let mut why = |stage: usize, pieces: &[StagePiece], hidden: &[f32]| {
        format!("{:#}", stages[stage].step(pieces, hidden).unwrap_err())
    };
    assert!(why(0, &[piece(2, &[1])], &[]).contains("has 3 tokens here, and goes on at 2"));
    assert!(why(0, &[piece(3, &many)], &[]).contains("65 tokens in a step of at most 64"));
    assert!(why(0, &[piece(3, &[u32::MAX])], &[]).contains("of a vocabulary of"));
    assert!(why(0, &[piece(3, &[1]), piece(4, &[1])], &[]).contains("twice"));
    assert!(why(0, &[piece(3, &[])], &[]).contains("no tokens"));
    assert!(why(1, &[piece(0, &[1, 2, 3])], &hidden[1..]).contains("elements of hidden rows"));
    assert_eq!((stages[0].computed(1), stages[1].computed(1)), (3, 0));
    assert!(!stages[1].step(&[piece(0, &[1, 2, 3])], &hidden).unwrap().logits.is_empty());
    let source = sluice_model::source::open(&folder("gemma4_per_layer")).unwrap();
    let refused = Stage::open(&source, options(), LayerRange { from: 0, to: 1 }, &cpu).err().unwrap();
    assert!(refused.to_string().contains("cannot be divided by layers"), "{refused:#}");
    let source = sluice_model::source::open(&folder("qwen3")).unwrap();
    for (from, to) in [(1, 1), (2, 1), (0, 99)] {
        assert!(Stage::open(&source, options(), LayerRange { from, to }, &cpu).is_err());
    }
}
