//! Checkpoints as their producers quantise them (`tests/golden/quantized`) on a GPU: the CPU's bits, with experts on the device, in tiers and on disk. Without a GPU the device is
//! emulated. `SLUICE_GPU=N` requires one.

mod emulated;
mod logits;

use std::path::{Path, PathBuf};

use logits::logits;
use sluice_backend::{Activations, KvType};
use sluice_cuda::{Cuda, HostOffload, Pipeline};
use sluice_engine::{Engine, Options, Placement};

const MODES: [Activations; 4] = [Activations::F32, Activations::Bf16, Activations::Int8, Activations::Int11];

/// The device under test.
fn device() -> Option<u32> {
    let asked = std::env::var("SLUICE_GPU").ok()?;
    Some(asked.parse().expect("SLUICE_GPU: a number"))
}

#[test]
fn where_the_device_is_emulated() {
    if device().is_some() {
        return;
    }
    let Some(mut tests) = emulated::this_program() else { return };
    tests.args(["--skip", "where_the_device_is_emulated", "--test-threads", "1"]).env("SLUICE_GPU", "0");
    // Copies to the device come a millisecond late: a kernel that does not wait for one would find nothing.
    tests.env("EMULATED_DELAY", "1000");
    let output = tests.output().expect("this program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// All cases, by name.
fn folders() -> Vec<(String, PathBuf)> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/quantized");
    let mut found: Vec<(String, PathBuf)> = std::fs::read_dir(all)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().join("config.json").exists())
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.path()))
        .collect();
    found.sort();
    assert!(found.len() >= 30, "only {} cases found", found.len());
    found
}

fn options(activations: Activations, chunk: usize) -> Options {
    Options {
        activations,
        kv_type: Some(KvType::F32),
        chunk: Some(chunk),
        max_context: Some(64),
        threads: 2,
        ..Options::for_this_machine().unwrap()
    }
}

fn on_cpu(folder: &Path, activations: Activations) -> Engine {
    Engine::open(folder, options(activations, 64)).unwrap()
}

/// On one device, or on several.
fn on(devices: &[u32], folder: &Path, options: Options, by_host: bool) -> anyhow::Result<Engine> {
    let host = HostOffload { isa: options.isa, threads: 2, always: by_host };
    Engine::open_on(folder, options, &|o| match devices {
        [one] => Ok(Box::new(Cuda::new(*one, o.activations)?.with_host_experts(host))),
        _ => Ok(Box::new(Pipeline::new(devices, o.activations, o.threads)?.with_host_experts(host))),
    })
}

/// All modes for columns in the order of activations, and one for each other case, all of them in turn.
fn modes(number: usize, name: &str) -> Vec<Activations> {
    if name.contains("act_order_experts") { MODES.to_vec() } else { vec![MODES[number % MODES.len()]] }
}

#[test]
fn every_form_has_the_cpus_bits() {
    let Some(device) = device() else { return };
    for (number, (name, folder)) in folders().into_iter().enumerate() {
        for mode in modes(number, &name) {
            let wanted = logits(&mut on_cpu(&folder, mode));
            for (devices, chunk) in [(&[device][..], 64), (&[device, device], 1)] {
                let mut gpu = on(devices, &folder, options(mode, chunk), false).unwrap();
                assert!(logits(&mut gpu) == wanted, "{name}, {mode:?}, {devices:?}, {chunk} at once");
            }
        }
    }
}

/// The smallest sufficient budget, from the text of a refusal.
fn smallest(refused: &str) -> u64 {
    let figure = refused.rsplit_once("--gpu-memory ").unwrap().1.split_once('M').unwrap().0;
    (figure.parse::<f64>().unwrap() * 1e6) as u64
}

/// Where experts are, tokens of a step, bytes of the device beyond the least that will do, and whether the host computes some: one token at a time in the least, a few in some more,
/// and all in plenty.
const TIERS: [(Placement, usize, u64, bool); 3] =
    [(Placement::Slots, 1, 0, true), (Placement::Slots, 9, 3000, false), (Placement::PageCache, 64, 1 << 30, false)];

#[test]
fn experts_of_every_form_in_all_tiers_have_the_cpus_bits() {
    let Some(device) = device() else { return };
    let mut tested = Vec::new();
    let with_experts =
        folders().into_iter().filter(|(_, folder)| on_cpu(folder, Activations::F32).model().experts().is_some());
    for (number, (name, folder)) in with_experts.enumerate() {
        for mode in modes(number, &name) {
            let wanted = logits(&mut on_cpu(&folder, mode));
            for (experts, chunk, more, by_host) in TIERS {
                let open = |bytes: u64| {
                    let options = Options { experts, device_memory: Some(bytes), ..options(mode, chunk) };
                    on(&[device], &folder, options, by_host)
                };
                let least = smallest(&format!("{:#}", open(1 << 14).err().expect("too little")));
                let setup = format!("{name}, {mode:?}, {experts:?}, {chunk} at once, {more} more, {by_host}");
                let mut gpu = open(least + more).unwrap_or_else(|e| panic!("{setup}: {e:#}"));
                assert!(logits(&mut gpu) == wanted, "{setup}");
                let streamed = gpu.take_streamed().expect("experts are streamed").stats;
                assert!(streamed.wanted > 0 && streamed.uploads > 0, "{setup}: {streamed:?}");
            }
        }
        tested.push(name);
    }
    for name in ["gptq_act_order_experts", "w4a16_act_order_experts", "nvfp4_experts", "fp8_experts", "gptq_experts"] {
        assert!(tested.iter().any(|tested| tested == name), "{name} is not among {tested:?}");
    }
}
