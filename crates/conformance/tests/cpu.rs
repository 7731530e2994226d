//! The CPU on every instruction set, with one, two and three threads in turn.

use sluice_backend::Isa;
use sluice_conformance::{Candidate, Setup};
use sluice_cpu::Cpu;

fn candidates() -> Vec<Candidate> {
    let candidate = |isa: Isa| {
        Candidate::new(format!("{isa}, 1 + seed % 3 threads"), move |setup: &Setup| {
            Ok(Box::new(Cpu::new(isa, 1 + (setup.seed % 3) as usize, setup.activations)?))
        })
    };
    Isa::supported().into_iter().map(candidate).collect()
}

sluice_conformance::tests!(candidates());
