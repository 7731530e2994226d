//! How often a step makes its host wait: never where all it needs is in memory, once for each mixture some of whose experts are not.

mod support;

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sluice_engine::{Engine, ExpertOptions, Lookahead, Options, Placement, ReadFaults};
use support::*;

const MIXTURES: [&str; 5] = ["qwen3_moe", "qwen3_next", "gpt_oss_mxfp4", "mlx_qwen3_next", "mlx_qwen3_5_moe"];

fn options(experts: Placement) -> Options {
    Options {
        threads: 2,
        max_context: Some(200),
        max_sequences: 2,
        chunk: Some(24),
        experts,
        lookahead: Lookahead::Off,
        ..Options::for_this_machine().unwrap()
    }
}

/// How often each step waited.
fn waits(name: &str, options: Options, step: impl FnMut(&mut Engine)) -> Vec<usize> {
    let (mut engine, log) = checked(name, options);
    answers(&mut engine, &[40, 7], 8, step);
    let log = log.lock().unwrap();
    log.steps.iter().map(|(_, waits)| *waits).collect()
}

/// Mixtures of a model.
fn mixtures(name: &str) -> usize {
    Engine::open(&folder(name), options(Placement::Mapped)).unwrap().model().moe_layers().count()
}

#[test]
fn dense_models_never_wait() {
    for name in ["qwen3", "qwen3_window", "qwen3_5", "mlx_qwen3_widths"] {
        let waits = waits(name, options(Placement::Mapped), |_| ());
        assert!(waits.len() > 8 && waits.iter().all(|n| *n == 0), "{name}: {waits:?}");
    }
}

#[test]
fn mixtures_in_memory_never_wait() {
    for name in MIXTURES {
        let waits = waits(name, options(Placement::Mapped), |_| ());
        assert!(waits.len() > 8 && waits.iter().all(|n| *n == 0), "{name}: {waits:?}");
    }
}

/// A disk on which no read is over when it is first asked about.
#[derive(Debug, Default)]
struct Late {
    asked: Mutex<HashMap<u64, (u32, Instant)>>,
}

/// Through io_uring the thread that computes asks, so a number of times is enough; where threads read, they ask without a pause.
const TIMES: u32 = 40;
const LATE: Duration = Duration::from_millis(10);

impl ReadFaults for Late {
    fn intercept(&self, _: &Path, at: u64, _: &mut [u8], came: io::Result<usize>) -> Option<io::Result<usize>> {
        let mut asked = self.asked.lock().unwrap();
        let (times, since) = asked.entry(at).or_insert((0, Instant::now()));
        *times += 1;
        if *times < TIMES || since.elapsed() < LATE {
            return None;
        }
        asked.remove(&at);
        Some(came)
    }
}

fn late() -> ExpertOptions {
    ExpertOptions { faults: Some(Arc::new(Late::default())), ..ExpertOptions::default() }
}

#[test]
fn a_step_waits_once_for_each_mixture_whose_experts_are_on_disk() {
    for name in MIXTURES {
        // Nothing stays in memory.
        let options = Options { expert_options: late(), ..options(Placement::PageCache) };
        let waits = waits(name, options, |_| ());
        let layers = mixtures(name);
        assert!(waits.len() > 8 && waits.iter().all(|n| *n == layers), "{name}, {layers} mixtures: {waits:?}");
    }
}

#[test]
fn a_step_whose_experts_are_all_in_memory_does_not_wait() {
    for name in MIXTURES {
        let layers = mixtures(name);
        let options = Options { expert_options: late(), ..options(Placement::Slots) };
        let (mut engine, log) = checked(name, options);
        let mut hits = Vec::new();
        // The second time all experts are there that the first has read.
        for _ in 0..2 {
            answers(&mut engine, &[40, 7], 8, |engine| {
                let stats = engine.take_streamed().unwrap().stats;
                hits.push(stats.hits == stats.wanted);
            });
        }
        let log = log.lock().unwrap();
        let waits: Vec<usize> = log.steps.iter().map(|(_, waits)| *waits).collect();
        for (step, (waits, hits)) in waits.iter().zip(&hits).enumerate() {
            assert_eq!(*waits == 0, *hits, "{name}, step {step}: {waits} waits");
            assert!(*waits <= layers, "{name}, step {step}: {waits} waits for {layers} mixtures");
        }
        assert!(waits[0] == layers && waits[waits.len() / 2..].iter().all(|n| *n == 0), "{name}: {waits:?}");
    }
}
