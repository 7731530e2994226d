//! Engines on a checker, and what they write.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fastrand::Rng;
use sluice_conformance::{Checker, Log};
use sluice_engine::sampling::SamplingParams;
use sluice_engine::{Cpu, Engine, Event, Generation, Options};

pub fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// An engine on a checker with the CPU inside, and what the checker sees.
pub fn checked(name: &str, options: Options) -> (Engine, Arc<Mutex<Log>>) {
    let log = Mutex::new(None);
    let engine = Engine::open_on(&folder(name), options, &|o: &Options| {
        let checker = Checker::new(Box::new(Cpu::new(o.isa, o.threads, o.activations)?));
        *log.lock().unwrap() = Some(checker.log());
        Ok(Box::new(checker))
    });
    (engine.unwrap(), log.into_inner().unwrap().unwrap())
}

/// Answers to some prompts together; `step` is called after each step.
pub fn answers(
    engine: &mut Engine,
    prompts: &[usize],
    tokens: usize,
    mut step: impl FnMut(&mut Engine),
) -> Vec<Vec<u32>> {
    let vocabulary = engine.model().vocabulary as u32;
    let ids: Vec<_> = prompts
        .iter()
        .map(|n| {
            let mut random = Rng::with_seed(*n as u64);
            let prompt: Vec<u32> = (0..*n).map(|_| random.u32(..vocabulary)).collect();
            let sampling = SamplingParams { seed: 3, ..SamplingParams::default() };
            let id = engine.add_sequence();
            engine.start(id, &prompt, Generation { sampling, max_tokens: tokens, ..Generation::default() }).unwrap();
            id
        })
        .collect();
    let mut answers = vec![Vec::new(); ids.len()];
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            if let Event::Token { id, token } = event {
                answers[ids.iter().position(|i| i == id).unwrap()].push(*token);
            }
        }
        step(engine);
    }
    ids.into_iter().for_each(|id| engine.remove_sequence(id));
    answers
}
