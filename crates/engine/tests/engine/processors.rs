//! Processors of logits: they see what a sequence has, and change its own tokens and nobody else's.

use std::sync::{Arc, Mutex};

use crate::support;

use sluice_engine::sampling::{LogitsProcessor, ProcessorFailed, SamplingParams};
use sluice_engine::{DraftOptions, DrafterChoice, Engine, Event, Finish, Generation, Options};
use support::*;

/// Allows only tokens of this remainder by 3, and fails at a length.
#[derive(Debug)]
struct Remainder {
    keeps: usize,
    fails_at: usize,
    seen: Mutex<Vec<Vec<u32>>>,
}

impl LogitsProcessor for Remainder {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<(), ProcessorFailed> {
        self.seen.lock().unwrap().push(tokens.to_vec());
        logits.iter_mut().enumerate().filter(|(at, _)| at % 3 != self.keeps).for_each(|(_, x)| *x = f32::NEG_INFINITY);
        if tokens.len() == self.fails_at { Err(ProcessorFailed) } else { Ok(()) }
    }
}

fn open(drafter: DrafterChoice) -> Engine {
    let options = Options {
        max_context: Some(200),
        max_sequences: 4,
        threads: 2,
        drafts: DraftOptions { drafter, governed: false, ..DraftOptions::default() },
        ..Options::for_this_machine().unwrap()
    };
    Engine::open(&folder("qwen3"), options).unwrap()
}

/// The tokens of each, and why they ended.
fn together(engine: &mut Engine, asked: &[(Vec<u32>, Generation)]) -> Vec<(Vec<u32>, Finish)> {
    let ids: Vec<_> = asked.iter().map(|_| engine.add_sequence()).collect();
    for (id, (prompt, generation)) in ids.iter().zip(asked) {
        engine.start(*id, prompt, generation.clone()).unwrap();
    }
    let mut found = vec![(Vec::new(), Finish::Cancelled); ids.len()];
    while !engine.is_idle() {
        for event in engine.step().unwrap().to_vec() {
            let at = ids.iter().position(|id| *id == event.id()).unwrap();
            match event {
                Event::Token { token, .. } => found[at].0.push(token),
                Event::Finished { reason, .. } => found[at].1 = reason,
                Event::Prefill { .. } => {}
            }
        }
    }
    for (id, (_, reason)) in ids.into_iter().zip(&found) {
        let failure = engine.take_failure(id).map(|e| e.to_string());
        assert_eq!(failure.as_deref(), (*reason == Finish::Failed).then_some("the logits processor failed"));
        engine.remove_sequence(id);
    }
    found
}

#[test]
fn a_processor_changes_its_own_sequence_alone() {
    let mut engine = open(DrafterChoice::Off);
    let prompt = tokens(&engine, 12, 1);
    let processor = |keeps, fails_at| Arc::new(Remainder { keeps, fails_at, seen: Mutex::default() });
    let with = |processor: &Arc<Remainder>, temperature| {
        let sampling = SamplingParams { temperature, seed: 5, ..SamplingParams::default() };
        let processor: Arc<dyn LogitsProcessor> = processor.clone();
        (prompt.clone(), Generation { sampling, max_tokens: 20, processor: Some(processor), ..Generation::default() })
    };
    let plain = (prompt.clone(), Generation { max_tokens: 20, ..Generation::default() });
    let alone = together(&mut engine, std::slice::from_ref(&plain));
    let all = [processor(0, 0), processor(1, 0), processor(2, 15)];
    let asked = [plain.clone(), with(&all[0], 0.0), with(&all[1], 1.3), with(&all[2], 0.0)];
    let found = together(&mut engine, &asked);
    assert_eq!(found[0], alone[0]);
    for (at, processor) in all.iter().enumerate() {
        let (answer, reason) = &found[at + 1];
        assert!(answer.iter().all(|token| *token as usize % 3 == at), "{answer:?}");
        // It saw the prompt, and then each token as it came.
        let seen = processor.seen.lock().unwrap();
        let whole: Vec<u32> = prompt.iter().chain(answer).copied().collect();
        assert!(seen.iter().enumerate().all(|(i, tokens)| *tokens == whole[..prompt.len() + i]), "{at}");
        let (tokens, ended) = if at == 2 { (3, Finish::Failed) } else { (20, Finish::Length) };
        assert_eq!((answer.len(), *reason), (tokens, ended));
    }
    // Drafts change nothing: each token still goes through its own processor.
    let again = together(&mut open(DrafterChoice::Ngram), &asked[..3]);
    assert_eq!(again, found[..3]);
}
