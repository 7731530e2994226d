//! The CPU on every instruction set, with one, two and three threads in turn.

use sluice_backend::{Cpu, Isa};
use sluice_conformance::{Candidate, Setup};

fn candidates() -> Vec<Candidate> {
    let candidate = |isa: Isa| {
        Candidate::new(format!("{isa}, 1 + seed % 3 threads"), move |setup: &Setup| {
            Ok(Box::new(Cpu::new(isa, 1 + (setup.seed % 3) as usize, setup.activations)?))
        })
    };
    Isa::supported().into_iter().map(candidate).collect()
}

sluice_conformance::tests!(candidates());
