//! A copy of the weights for each node of memory, on a machine that is said to have two: every second of its processors is on the other.

use crate::support;

use std::fs;

use sluice_engine::{Activations, Engine, LoadMode, LoadOptions, MemoryClass, Numa, Options, Placement, Processors};
use support::{folder, logits, tokens};

const FOLDERS: [&str; 4] = ["qwen3", "mlx_qwen3", "mlx_qwen3_moe", "mlx_qwen3_next"];

/// `None`: this process has one processor.
fn two_nodes() -> Option<Processors> {
    let root = tempfile::tempdir().unwrap();
    for node in 0..2 {
        let folder = root.path().join(format!("node/node{node}"));
        fs::create_dir_all(&folder).unwrap();
        let processors: Vec<String> = (node..1024).step_by(2).map(|p: usize| p.to_string()).collect();
        fs::write(folder.join("cpulist"), processors.join(",")).unwrap();
    }
    let processors = Processors::told_by(root.path());
    let there = processors.of_threads(Numa::Replicate, 2).is_some();
    if !there {
        println!("SKIPPED: there are not two processors, an even and an odd one");
    }
    there.then_some(processors)
}

fn options(processors: &Processors, numa: Numa) -> Options {
    Options {
        threads: 4,
        numa,
        processors: processors.clone(),
        activations: Activations::Int8,
        max_context: Some(300),
        experts: Placement::Mapped,
        ..Options::for_this_machine().unwrap()
    }
}

/// Opened by a thread of its own, which keeps what it was told about memory.
fn open(name: &str, options: Options) -> Engine {
    std::thread::spawn({
        let folder = folder(name);
        move || Engine::open(&folder, options).unwrap()
    })
    .join()
    .unwrap()
}

fn weights(engine: &mut Engine) -> [usize; 2] {
    [MemoryClass::WeightsMapped, MemoryClass::WeightsCopied].map(|class| engine.memory(class))
}

fn said(engine: &Engine) -> String {
    engine.fallbacks().join("\n")
}

#[test]
fn copies_change_no_bit_and_count() {
    let Some(processors) = two_nodes() else { return };
    for name in FOLDERS {
        for mode in [LoadMode::Mmap, LoadMode::Pread] {
            let load = LoadOptions { mode, ..LoadOptions::default() };
            let with = |numa| open(name, Options { load: load.clone(), ..options(&processors, numa) });
            let (mut plain, mut copied) = (with(Numa::Off), with(Numa::Replicate));
            let tokens = tokens(&plain, 60, 5);
            let pieces = [40, 1];
            assert_eq!(logits(&mut copied, &tokens, &pieces), logits(&mut plain, &tokens, &pieces), "{name}");
            while copied.copy_weights() {}
            // Also when all of them are there from the first token on.
            assert_eq!(logits(&mut copied, &tokens, &pieces), logits(&mut plain, &tokens, &pieces), "{name}");
            let ([mapped, others], all) = (weights(&mut plain), weights(&mut copied));
            assert_eq!(all[0], 0, "{name}: what is mapped is left");
            // Some matrices are small enough to be read at once, to memory of our own. Each array is aligned.
            let (least, most) = (2 * mapped + others, 2 * (mapped + others) + (1 << 17));
            assert!((least..most).contains(&all[1]), "{name}: {all:?} of {mapped} and {others}");
            assert!(all[1] - others > (mapped + others) / 2, "{name}: {all:?} of {mapped} and {others}");
            let said = said(&copied);
            assert!(said.contains("a copy of the weights for each of 2 nodes"), "{said}");
            assert!(said.contains("4 threads bound to") && !said.contains("spread"), "{said}");
        }
    }
}

#[test]
fn without_room_for_copies_weights_are_spread() {
    let Some(processors) = two_nodes() else { return };
    let mut plain = open("mlx_qwen3", options(&processors, Numa::Off));
    let load = LoadOptions { copy_budget: Some(1 << 20), ..LoadOptions::default() };
    let mut spread = open("mlx_qwen3", Options { load, ..options(&processors, Numa::Replicate) });
    assert!(said(&spread).contains("not copied for each node: with 2 copies everything takes"), "{}", said(&spread));
    let tokens = tokens(&plain, 30, 6);
    assert_eq!(logits(&mut spread, &tokens, &[20, 1]), logits(&mut plain, &tokens, &[20, 1]));
    assert!(!spread.copy_weights() && weights(&mut spread) == weights(&mut plain));
    // A budget that is large enough without copies holds them too, or they are not made.
    let total = |engine: &mut Engine| MemoryClass::ALL.iter().map(|class| engine.memory(*class)).sum::<usize>() as u64;
    let most = total(&mut plain) + (64 << 20);
    let mut copied = open("mlx_qwen3", Options { memory_budget: Some(most), ..options(&processors, Numa::Replicate) });
    assert!(said(&copied).contains("a copy of the weights for each of 2 nodes"), "{}", said(&copied));
    logits(&mut copied, &tokens, &[20, 1]);
    assert!(total(&mut copied) <= most);
}

#[test]
fn where_experts_stay_on_disk_weights_are_spread() {
    let Some(processors) = two_nodes() else { return };
    let options = Options { experts: Placement::Slots, ..options(&processors, Numa::Replicate) };
    let streamed = open("mlx_qwen3_moe", options);
    assert!(said(&streamed).contains("not copied for each node: experts are read from disk"), "{}", said(&streamed));
}

#[test]
fn on_one_node_there_is_nothing_to_copy() {
    let nothing = tempfile::tempdir().unwrap();
    let mut engine = open("mlx_qwen3", options(&Processors::told_by(nothing.path()), Numa::Replicate));
    assert!(!engine.copy_weights());
    assert_eq!(said(&engine), "numa: one node: nothing to do");
}
