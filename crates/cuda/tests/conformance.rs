//! The GPU held to the CPU's bits. Where there is none, nothing is tried, and the test says so; `SLUICE_GPU=N` names a device that has to be there.

use sluice_backend::Isa;
use sluice_conformance::{Candidate, Setup};
use sluice_cuda::{Cuda, Host};

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
        let cuda = Cuda::new(device, setup.activations)?;
        // In half of the cases the host computes some of the experts.
        let host = Host { isa: Isa::from_env()?, threads: 2, always: true };
        Ok(Box::new(if setup.seed.is_multiple_of(2) { cuda } else { cuda.beside(host) }))
    };
    vec![Candidate::new(format!("cuda:{device}"), make).without_integer_attention()]
}

sluice_conformance::tests!(candidates());
