//! The GPU has the CPU's bits, alone and as two that take turns. Without a GPU the tests pass and print that they were skipped; `SLUICE_GPU=N` requires a device.

mod emulated;

use sluice_backend::Isa;
use sluice_conformance::{Candidate, Setup};
use sluice_cuda::{Cuda, HostOffload, Pipeline};

/// The device under test.
fn device() -> Option<u32> {
    let asked: Option<u32> = std::env::var("SLUICE_GPU").ok().map(|n| n.parse().expect("SLUICE_GPU: a number"));
    let device = asked.unwrap_or(0);
    match sluice_cuda::describe(device) {
        Ok(_) => Some(device),
        Err(why) if asked.is_none() => {
            eprintln!("left out: {why:#}");
            None
        }
        Err(why) => panic!("SLUICE_GPU={device}: {why:#}"),
    }
}

fn candidates() -> Vec<Candidate> {
    let Some(device) = device() else { return vec![] };
    let make = move |setup: &Setup| -> anyhow::Result<Box<dyn sluice_backend::Backend>> {
        let cuda = Cuda::new(device, setup.activations)?;
        // In half of the cases the host computes some experts.
        let host = HostOffload { isa: Isa::from_env()?, threads: 2, always: true };
        Ok(Box::new(if setup.seed.is_multiple_of(2) { cuda } else { cuda.with_host_experts(host) }))
    };
    vec![taking_turns(device, Candidate::new(format!("cuda:{device}"), make))]
}

/// Concurrent tests take turns on a real device, because their steps wait for the host.
fn taking_turns(device: u32, candidate: Candidate) -> Candidate {
    let is_emulated = sluice_cuda::describe(device).is_ok_and(|name| name.starts_with("Emulated"));
    if is_emulated { candidate } else { candidate.in_turns() }
}

/// Operations alternate between two devices, or between two contexts of the only one.
fn two() -> Vec<Candidate> {
    let Some(device) = device() else { return vec![] };
    let other = sluice_cuda::count().map_or(device, |count| (device + 1) % count);
    let make = move |setup: &Setup| -> anyhow::Result<Box<dyn sluice_backend::Backend>> {
        Ok(Box::new(Pipeline::new(&[device, other], setup.activations, 2)?))
    };
    vec![taking_turns(device, Candidate::new(format!("cuda:{device},{other}"), make))]
}

sluice_conformance::tests!(candidates());

/// All families except experts on disk, which only a single device has.
#[test]
fn devices_that_take_turns_agree_with_the_generic_cpu() {
    use sluice_conformance::*;
    let families = [
        &BUFFERS,
        &CACHES,
        &EMBEDDINGS,
        &PROJECTIONS,
        &INTERLEAVED_HEADS,
        &LONG_ROWS,
        &LARGE_TILES,
        &SOME_TOKENS,
        &DENSE_LAYERS,
        &ATTENTION,
        &SHARED_PREFIXES,
        &DEEP_CONTEXTS,
        &LATENT_ATTENTION,
        &DELTA_RULES,
        &CHANNEL_DELTAS,
        &STATE_SPACES,
        &STREAMS,
        &GATED_STREAMS,
        &NGRAMS,
        &MIXTURES,
        &UNGATED_MIXTURES,
        &MIXTURES_WITH_ROUTERS_OF_THEIR_OWN,
        &ORDERED_MIXTURES,
        &LOGITS,
        &WHOLE_STEPS,
    ];
    families.into_iter().for_each(|family| check(family, &two()));
}

/// Cases of each family on the emulated device, and its bytes of shared memory for a block: as an H100 has, and as most other cards have, which allows fewer kernels.
/// Four cases have all modes of activations. Only with one case do devices take turns, too, which takes half as long again. `SLUICE_EMULATED_CASES` takes more of both.
const EMULATED: [(u64, &str); 2] = [(4, "232448"), (1, "101376")];

/// Without a GPU: the kernels' sources, compiled for this processor (`emulated/build.py`), have the same bits.
#[test]
fn kernels_agree_with_the_generic_cpu_where_they_are_emulated() {
    if std::env::var_os("SLUICE_GPU").is_some() {
        return;
    }
    let asked =
        std::env::var("SLUICE_EMULATED_CASES").ok().map(|n| n.parse::<u64>().expect("SLUICE_EMULATED_CASES: a number"));
    for (cases, shared) in EMULATED {
        let Some(mut tests) = emulated::this_program() else { return };
        tests.args(["--skip", "where_they_are_emulated"]);
        if cases > 1 {
            tests.args(["--skip", "devices_that_take_turns"]);
        }
        let cases = asked.unwrap_or(cases).to_string();
        tests.env("SLUICE_GPU", "0").env("SLUICE_CONFORMANCE_CASES", cases);
        tests.env("SLUICE_CONFORMANCE_REFERENCE", "quickest");
        let output = tests.env("EMULATED_SHARED", shared).output().expect("this program runs");
        assert!(output.status.success(), "{shared}: {}", String::from_utf8_lossy(&output.stdout));
    }
}
