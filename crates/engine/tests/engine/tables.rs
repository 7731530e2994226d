//! Tables of which a token uses few rows: on disk they give the bits that they give in memory.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sluice_engine::{Activations, Engine, Event, Finish, Generation, MemoryClass, Options, ReadFaults, TablePlacement};
use sluice_store::{Checkpoint, TensorPlan, Writer};

use crate::support::*;

const MODEL: &str = "gemma4_per_layer";
/// It has two tables in three parts each, of which a token uses four rows.
const OF_NGRAMS: &str = "qwen4_exp";
const TABLE: &str = "embed_tokens_per_layer.weight";

fn options(tables: TablePlacement) -> Options {
    Options { threads: 2, max_context: Some(400), tables, ..Options::for_this_machine().unwrap() }
}

/// As few rows at a time as there may be: fewer than a prompt's tokens, and than the table has.
fn on_disk() -> Options {
    Options { table_budget: Some(1), ..options(TablePlacement::Disk) }
}

#[test]
fn rows_from_disk_have_the_bits_of_a_table_in_memory() {
    for activations in [Activations::F32, Activations::Int8] {
        let mut wanted =
            Engine::open(&folder(MODEL), Options { activations, ..options(TablePlacement::Memory) }).unwrap();
        let prompt = tokens(&wanted, 200, 3);
        let wanted = logits(&mut wanted, &prompt, &[200]);
        for pieces in [&[200][..], &[1], &[64, 7, 1]] {
            for io_uring in [true, false] {
                let mut options = Options { activations, ..on_disk() };
                options.expert_options.io_uring = io_uring;
                let mut engine = Engine::open(&folder(MODEL), options).unwrap();
                assert!(logits(&mut engine, &prompt, pieces) == wanted, "{activations:?} {pieces:?}");
                let stats = engine.table_stats().unwrap();
                assert!(stats.wanted == 200 && (100..=200).contains(&stats.read), "{stats:?}");
            }
        }
    }
}

#[test]
fn rows_of_n_grams_have_the_bits_of_a_table_in_memory() {
    let mut wanted = Engine::open(&folder(OF_NGRAMS), options(TablePlacement::Memory)).unwrap();
    let prompt = tokens(&wanted, 200, 3);
    let wanted = logits(&mut wanted, &prompt, &[200]);
    for pieces in [&[200][..], &[1], &[64, 7, 1]] {
        for io_uring in [true, false] {
            let mut options = on_disk();
            options.expert_options.io_uring = io_uring;
            let mut engine = Engine::open(&folder(OF_NGRAMS), options).unwrap();
            assert!(logits(&mut engine, &prompt, pieces) == wanted, "{pieces:?}");
            let stats = engine.table_stats().unwrap();
            assert!(stats.wanted == 2 * 4 * 200 && stats.read > 64, "{stats:?}");
        }
    }
}

#[test]
fn batches_and_prefixes_take_rows_from_disk() {
    let ask_all = |model: &str, options: Options| {
        let mut engine = Engine::open(&folder(model), Options { max_sequences: 4, ..options }).unwrap();
        let prompts: Vec<Vec<u32>> = (0..6).map(|i| tokens(&engine, 60 + 20 * i, i as u64)).collect();
        let ids: Vec<_> = prompts.iter().map(|prompt| (engine.add_sequence(), prompt)).collect();
        for (id, prompt) in &ids {
            engine.start(*id, prompt, Generation { logprobs: None, ..generation(20) }).unwrap();
        }
        let mut told = vec![Vec::new(); ids.len()];
        while !engine.is_idle() {
            for event in engine.step().unwrap().to_vec() {
                if let Event::Token { id, token } = event {
                    told[ids.iter().position(|(own, _)| *own == id).unwrap()].push(token);
                }
            }
        }
        // And once more, from the prefix cache.
        let again: Vec<_> = prompts.iter().map(|prompt| ask(&mut engine, prompt, generation(5)).0).collect();
        (told, again)
    };
    for model in [MODEL, OF_NGRAMS] {
        assert!(ask_all(model, on_disk()) == ask_all(model, options(TablePlacement::Memory)), "{model}");
    }
}

/// The model with a table of many rows.
fn with_large_table(folder: &Path, rows: usize) {
    let small = Checkpoint::open(&crate::support::folder(MODEL)).unwrap();
    let of = |t: &sluice_store::Tensor| {
        let mut plan = TensorPlan { name: t.name.to_string(), dtype: t.dtype, shape: t.shape.clone() };
        let mut bytes = t.bytes.to_vec();
        if t.name.ends_with(TABLE) {
            bytes.resize(bytes.len() / t.shape[0] * rows, 0);
            plan.shape[0] = rows;
        }
        (plan, bytes)
    };
    let tensors: Vec<_> = small.tensors().iter().map(of).collect();
    let plans: Vec<TensorPlan> = tensors.iter().map(|(plan, _)| plan.clone()).collect();
    let mut writer = Writer::create(&folder.join("model.safetensors"), &plans, &BTreeMap::new()).unwrap();
    tensors.iter().for_each(|(plan, bytes)| writer.append(&plan.name, bytes).unwrap());
    writer.finish().unwrap();
    let config = std::fs::read(crate::support::folder(MODEL).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    config["text_config"]["vocab_size_per_layer_input"] = rows.into();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn a_table_may_be_larger_than_the_memory_budget() {
    let dir = tempfile::tempdir().unwrap();
    // 58 MB of rows.
    with_large_table(dir.path(), 200_000);
    let budget = 24 << 20;
    let limited = |tables| Options { memory_budget: Some(budget), chunk: Some(64), ..options(tables) };
    let refused = Engine::open(dir.path(), limited(TablePlacement::Memory)).err().expect("more than the budget");
    assert!(format!("{refused:#}").contains("--memory-budget"), "{refused:#}");
    let mut engine = Engine::open(dir.path(), limited(TablePlacement::Disk)).unwrap();
    let prompt = tokens(&engine, 150, 3);
    let found = logits(&mut engine, &prompt, &[64]);
    let held: usize = MemoryClass::ALL.into_iter().map(|class| engine.memory(class)).sum();
    assert!(held < budget as usize, "{held} bytes");
    let mut small = Engine::open(&folder(MODEL), options(TablePlacement::Memory)).unwrap();
    assert!(found == logits(&mut small, &prompt, &[64]));
}

/// Reads that fail while this is on, and that are cut short otherwise.
#[derive(Debug, Default)]
struct Bad(AtomicBool);

impl ReadFaults for Bad {
    fn intercept(&self, _: &Path, _: u64, memory: &mut [u8], came: io::Result<usize>) -> Option<io::Result<usize>> {
        if self.0.load(Ordering::SeqCst) {
            memory.fill(0xee);
            return Some(Err(io::Error::from_raw_os_error(5)));
        }
        let n = came.unwrap_or(0);
        // Whole pages, as direct reads are cut.
        let cut = if n > 4096 { n / 2 / 4096 * 4096 } else { n };
        memory[cut..].fill(0xee);
        Some(Ok(cut))
    }
}

#[test]
fn a_row_that_cannot_be_read_ends_its_sequence_alone() {
    let faults = Arc::new(Bad::default());
    let mut options = on_disk();
    options.expert_options.faults = Some(Arc::clone(&faults) as Arc<dyn ReadFaults>);
    let mut engine = Engine::open(&folder(MODEL), options).unwrap();
    let prompt = tokens(&engine, 80, 5);
    let run = |engine: &mut Engine| {
        let id = engine.add_sequence();
        engine.start(id, &prompt, Generation { max_tokens: 3, ..Generation::default() }).unwrap();
        let (mut told, mut finish) = (Vec::new(), None);
        while !engine.is_idle() {
            for event in engine.step().unwrap().to_vec() {
                match event {
                    Event::Token { token, .. } => told.push(token),
                    Event::Finished { reason, .. } => finish = Some(reason),
                    _ => {}
                }
            }
        }
        engine.remove_sequence(id);
        (told, finish.expect("an end"))
    };
    let (first, _) = run(&mut engine);
    assert_eq!(first.len(), 3);
    faults.0.store(true, Ordering::SeqCst);
    let mut other = tokens(&engine, 80, 6);
    other[0] = prompt[0].wrapping_add(1) % 256;
    let id = engine.add_sequence();
    engine.start(id, &other, Generation { max_tokens: 3, ..Generation::default() }).unwrap();
    let mut failed = false;
    while !engine.is_idle() {
        failed |= engine.step().unwrap().iter().any(|e| matches!(e, Event::Finished { reason: Finish::Failed, .. }));
    }
    engine.remove_sequence(id);
    assert!(failed, "rows of 0xee would have been computed with");
    faults.0.store(false, Ordering::SeqCst);
    assert_eq!(run(&mut engine).0, first, "the engine goes on");
}
