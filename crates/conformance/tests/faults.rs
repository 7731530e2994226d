//! The suite can fail: a backend with one fault is caught by the cases of the operation that has it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use sluice_backend::{Activations, Isa, MatrixId};
use sluice_conformance::{
    ATTENTION, Candidate, Checker, DELTA_RULES, DENSE_LAYERS, EMBEDDINGS, Family, LOGITS, MIXTURES, Operation, Outcome,
    PROJECTIONS, WHOLE_STEPS, check, compare,
};
use sluice_cpu::Cpu;

/// What is wrong, where it must be noticed, and how.
type Fault = (&'static str, Family, fn(&mut Operation));

/// What the panic of a check says; `None` if there was none.
fn found(family: &Family, fault: fn(&mut Operation)) -> Option<String> {
    let faulty = Candidate::new("a faulty backend", move |setup| {
        let checker = Checker::new(Box::new(Cpu::new(*Isa::supported().last().unwrap(), 1, setup.activations)?));
        checker.log().lock().unwrap().fault = Some(fault);
        Ok(Box::new(checker))
    });
    let panic = catch_unwind(AssertUnwindSafe(|| check(family, &[faulty]))).err()?;
    Some(panic.downcast_ref::<String>().expect("text").clone())
}

#[test]
fn a_fault_is_found_and_told_with_its_seed() {
    let faults: [Fault; 16] = [
        ("a row too far", EMBEDDINGS, |o| {
            let Operation::Embed { out, .. } = o else { return };
            (out.offset, out.rows) = (out.offset + out.stride, out.rows - 1);
        }),
        ("no bias", PROJECTIONS, |o| {
            let Operation::Project { projections, .. } = o else { return };
            projections.iter_mut().for_each(|p| p.linear.bias = None);
        }),
        ("no norm", PROJECTIONS, |o| {
            let Operation::Project { norm, .. } = o else { return };
            *norm = None;
        }),
        ("the next row of a matrix", PROJECTIONS, |o| {
            let Operation::ProjectAdd { linear, .. } = o else { return };
            if linear.rows.start > 0 {
                linear.rows = linear.rows.start - 1..linear.rows.end - 1;
            }
        }),
        ("gate and up in the other order", DENSE_LAYERS, |o| {
            let Operation::Mlp { mlp, .. } = o else { return };
            std::mem::swap(&mut mlp.gate, &mut mlp.up);
        }),
        ("another epsilon", DENSE_LAYERS, |o| {
            let Operation::Mlp { norm, .. } = o else { return };
            norm.eps *= 1.01;
        }),
        // What lies before a window may have been given back, and is not to be looked at.
        ("a window one position shorter", ATTENTION, |o| {
            let Operation::Attention(layer) = o else { return };
            layer.window = layer.window.map(|w| (w - 1).max(1));
        }),
        ("no cap", ATTENTION, |o| {
            let Operation::Attention(layer) = o else { return };
            layer.softcap = None;
        }),
        ("no sinks", ATTENTION, |o| {
            let Operation::Attention(layer) = o else { return };
            layer.sinks = None;
        }),
        ("keys without their norm", ATTENTION, |o| {
            let Operation::Attention(layer) = o else { return };
            layer.k_norm = None;
        }),
        ("a scale rounded otherwise", ATTENTION, |o| {
            let Operation::Attention(layer) = o else { return };
            layer.scale = f32::from_bits(layer.scale.to_bits() + 1);
        }),
        ("another layer's state", DELTA_RULES, |o| {
            let Operation::DeltaNet(layer) = o else { return };
            layer.layer = 0;
        }),
        ("a and b in the other order", DELTA_RULES, |o| {
            let Operation::DeltaNet(layer) = o else { return };
            std::mem::swap(&mut layer.a, &mut layer.b);
        }),
        ("always the first mixture", MIXTURES, |o| {
            let Operation::Mixture { moe, .. } = o else { return };
            *moe = sluice_backend::MoeId::new(FIRST);
        }),
        ("logits without their norm's epsilon", LOGITS, |o| {
            let Operation::Logits { norm, .. } = o else { return };
            norm.iter_mut().for_each(|norm| norm.eps = 0.0);
        }),
        ("another matrix for a head", WHOLE_STEPS, |o| {
            let Operation::Logits { head, .. } = o else { return };
            *head = MatrixId::new(head.number() - STEP);
        }),
    ];
    for (what, family, fault) in faults {
        let told = found(&family, fault).unwrap_or_else(|| panic!("{what}: not found in {}", family.name));
        let told_all = ["a faulty backend", "SLUICE_CONFORMANCE_SEED=", "Shapes:", "should be"];
        assert!(told_all.iter().all(|part| told.contains(part)), "{what}: {told}");
    }
}

/// The number of a checker's first handle of a kind, and from one to the next.
const FIRST: usize = 1000;
const STEP: usize = 3;

#[test]
fn what_changes_nothing_is_no_fault() {
    assert_eq!(found(&Family { cases: 6, ..PROJECTIONS }, |_| ()), None);
    // Whatever the activations, if they are the same.
    let other = Candidate::new("other activations", |_| Ok(Box::new(Cpu::new(Isa::GENERIC, 1, Activations::F32)?)));
    assert!(catch_unwind(AssertUnwindSafe(|| check(&PROJECTIONS, &[other]))).is_err());
}

#[test]
fn a_program_that_compares_is_told_of_the_fault_and_goes_on() {
    let right = || Candidate::new("right", |setup| Ok(Box::new(Cpu::new(Isa::GENERIC, 1, setup.activations)?)));
    let faulty = Candidate::new("a faulty backend", |setup| {
        let checker = Checker::new(Box::new(Cpu::new(Isa::GENERIC, 1, setup.activations)?));
        let fault: fn(&mut Operation) = |o| {
            let Operation::Logits { norm, .. } = o else { return };
            norm.iter_mut().for_each(|norm| norm.eps = 0.5);
        };
        checker.log().lock().unwrap().fault = Some(fault);
        Ok(Box::new(checker))
    });
    let missing = Candidate::new("missing", |_| Err(anyhow::anyhow!("there is none")));
    let outcomes = compare(&LOGITS, 0, &[right(), faulty, missing, right()]);
    assert_eq!([&outcomes[0], &outcomes[3]], [&Outcome::Agrees; 2]);
    let [Outcome::Differs(fault), Outcome::Differs(missing)] = &outcomes[1..3] else { panic!("{outcomes:?}") };
    assert!(fault.contains("should be") && fault.contains("shapes: "), "{fault}");
    assert_eq!(missing, "it could not go on");
}
