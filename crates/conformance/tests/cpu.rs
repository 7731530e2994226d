//! The CPU on every instruction set and some numbers of threads.

use sluice_backend::{Cpu, Isa};
use sluice_conformance::Candidate;

fn candidates() -> Vec<Candidate> {
    let mut all = Vec::new();
    for isa in Isa::supported() {
        for threads in [1, 2, 3] {
            if isa != Isa::GENERIC || threads > 1 {
                let make = move |s: &sluice_conformance::Setup| -> anyhow::Result<_> {
                    Ok(Box::new(Cpu::new(isa, threads, s.activations)?) as _)
                };
                all.push(Candidate::new(format!("{isa} on {threads} threads"), make));
            }
        }
    }
    all
}

sluice_conformance::tests!(candidates());
