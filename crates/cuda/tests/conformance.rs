//! The GPU held to the CPU's bits. Where there is none, nothing is tried, and the test says so; `SLUICE_GPU=N` names a device that has to be there.

use sluice_conformance::{Candidate, Setup};
use sluice_cuda::Cuda;

fn candidates() -> Vec<Candidate> {
    let asked: Option<u32> = std::env::var("SLUICE_GPU").ok().map(|n| n.parse().expect("SLUICE_GPU: a number"));
    let device = asked.unwrap_or(0);
    match sluice_cuda::describe(device) {
        Ok(_) => {}
        Err(why) if asked.is_none() => {
            eprintln!("left out: {why:#}");
            return vec![];
        }
        Err(why) => panic!("SLUICE_GPU={device}: {why:#}"),
    }
    let make = move |setup: &Setup| -> anyhow::Result<Box<dyn sluice_backend::Backend>> {
        Ok(Box::new(Cuda::new(device, setup.activations)?))
    };
    vec![Candidate::new(format!("cuda:{device}"), make).without_integer_attention()]
}

sluice_conformance::tests!(candidates());
