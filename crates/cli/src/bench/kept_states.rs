//! `sluice bench drafts --kept-states`: what a step of a model with recurrent layers takes that keeps the state after each drafted token and goes back to one of them, beside
//! one that does not.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::json;
use sluice_backend::{Backend, Capacity, SequenceInput, StepInputs, Wanted};
use sluice_engine::{KvType, source};
use sluice_model::Decoder;

use super::figures::Figures;
use super::subject::tokens;
use crate::engine_args::EngineArgs;
use crate::load;
use crate::terminal;

/// Tokens before the steps.
const CONTEXT: usize = 64;
/// Drafted tokens where none are asked for.
const USUAL: [usize; 4] = [1, 2, 3, 4];

/// What is measured.
pub struct KeptStates<'a> {
    pub folder: &'a Path,
    pub engine: &'a EngineArgs,
    /// Drafted tokens of a step; empty: a few usual numbers.
    pub widths: &'a [usize],
    /// Steps of a round with states kept, and as many without.
    pub steps: usize,
    pub rounds: usize,
    pub json: bool,
}

/// A model whose steps are put together here.
struct Steps {
    backend: Box<dyn Backend>,
    decoder: Decoder,
    inputs: StepInputs,
    tables: Vec<Vec<u32>>,
}

impl Steps {
    /// Computes these tokens behind the context. `kept`: so many states are kept, and the sequence goes on from the first.
    fn step(&mut self, tokens: &[u32], position: usize, kept: usize) {
        self.inputs.clear();
        let wanted = if position == 0 { Wanted::None } else { Wanted::All };
        self.inputs.push(&SequenceInput { tokens, position, state: 0, tables: &self.tables, wanted });
        if kept > 0 {
            self.inputs.keep_states(1..1 + kept as u32);
        }
        self.backend.begin(&self.inputs);
        self.decoder.step(&mut *self.backend, &self.inputs);
        self.backend.end();
        if kept > 0 {
            self.backend.copy_state(1, 0);
        }
    }
}

/// Runs the benchmark and prints a row for each number of drafted tokens.
pub fn run(asked: &KeptStates) -> Result<()> {
    let KeptStates { folder, engine, steps: count, rounds, json, .. } = *asked;
    let widths = if asked.widths.is_empty() { &USUAL } else { asked.widths };
    let most = 1 + widths.iter().max().expect("there is one");
    let options = engine.options()?;
    let (max_tokens, context) = (CONTEXT.max(most), Some(CONTEXT + most));
    let of_model = sluice_model::Options { max_tokens, context, ..sluice_model::Options::default() };
    // 1. The model
    let opened = source::open(folder).map_err(|e| load::naming(folder, e))?;
    let (tensors, loading) = opened.load(&options.load, None).map_err(|e| load::naming(folder, e.into()))?;
    let mut backend = engine.device().chosen(&terminal::note).backend(&options)?;
    let loaded = sluice_model::load(&tensors, &mut *backend, &of_model)?;
    loading.finish()?;
    let (model, state) = (&loaded.description, loaded.description.state_len());
    ensure!(state > 0, "{}: no recurrent layers, so there are no states to keep", folder.display());
    ensure!(backend.keeps_states(), "states are not kept within a step on this device");
    // 2. Its caches
    let per_block = options.block_tokens;
    let blocks = (CONTEXT + most).div_ceil(per_block);
    let groups = model.groups();
    for group in &groups {
        let layout = group.layout(options.kv_type.unwrap_or(KvType::F32), options.attention_mode(), per_block);
        let pool = backend.alloc_kv(layout, blocks)?;
        backend.commit_kv(&pool, blocks)?;
    }
    backend.alloc_states(1 + most, state)?;
    let capacity = Capacity { tokens: max_tokens, sequences: 1, blocks };
    let inputs = StepInputs::new(&vec![per_block; groups.len()], capacity);
    let tables = vec![(0..blocks as u32).collect(); groups.len()];
    let (vocabulary, name) = (model.vocabulary, folder.display());
    let mut steps = Steps { backend, decoder: loaded.decoder, inputs, tables };
    steps.step(&tokens(0, CONTEXT, vocabulary), 0, 0);
    if !json {
        println!("{name}: {} threads, {}", options.threads, options.isa);
        println!("{:>8}{:>14}{:>24}{:>24}{:>16}", "drafted", "bytes kept", "ms a step", "ms with states kept", "ratio");
    }
    // 3. Steps with and without, by turns. The first ones are not counted
    for &width in widths {
        let (mut plain, mut keeping) = (Figures::default(), Figures::default());
        for round in 0..=rounds {
            let mut seconds = [0.0; 2];
            for i in 0..count {
                let text = tokens(CONTEXT + i * (1 + width), 1 + width, vocabulary);
                for turn in [i % 2, 1 - i % 2] {
                    let started = Instant::now();
                    steps.step(&text, CONTEXT, turn * width);
                    seconds[turn] += started.elapsed().as_secs_f64();
                }
            }
            if round > 0 {
                plain.push(seconds[0] / count as f64);
                keeping.push(seconds[1] / count as f64);
            }
        }
        let ratio = keeping.over(&plain);
        let bytes = width * state * size_of::<f32>();
        if json {
            let line = json!({
                "bench": "kept states",
                "threads": options.threads,
                "isa": options.isa.to_string(),
                "drafted": width,
                "kept_bytes": bytes,
                "step_seconds": plain.to_json(),
                "step_seconds_with_states_kept": keeping.to_json(),
                "ratio": ratio.to_json(),
            });
            println!("{line}");
        } else {
            let ms = |figures: &Figures| figures.map(|seconds| 1e3 * seconds).to_text(2);
            println!("{width:>8}{bytes:>14}{:>24}{:>24}{:>16}", ms(&plain), ms(&keeping), ratio.to_text(3));
        }
    }
    Ok(())
}
