//! What every backend has to do, to the bit: random cases of each operation of `Backend`, compared with the CPU's plain code on one thread.
//!
//! For tests only. It is a crate because a backend is one too, and takes this one as a dev-dependency:
//!
//! ```ignore
//! sluice_conformance::tests!(vec![Candidate::new("cuda", |setup| Ok(Box::new(Cuda::new(0, setup.activations)?)))]);
//! ```
//!
//! A case is a function of a seed and a backend. It runs on the reference and on each candidate with the same random numbers, and what it saw of each must
//! be equal. A case that fails prints its seed, its shapes and what differs first; `SLUICE_CONFORMANCE_SEED=N` runs that seed alone, and
//! `SLUICE_CONFORMANCE_CASES=N` so many cases of each kind instead of the usual number.
//!
//! [`Checker`] is a backend of this crate's own: it holds whoever drives it to the order of calls, and replays steps.
#![forbid(unsafe_code)]

mod case;
mod checker;
mod operations;
mod weights;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

use fastrand::Rng;
#[cfg(doc)]
use sluice_backend::AttentionMode;
use sluice_backend::{Activations, Backend, Capacity, Cpu, Isa};

pub use case::Case;
use case::{Seen, Value};
pub use checker::{CacheContents, Checker, Log, Made, Operation, Recording, Spoil, Spoilt};
pub use operations::*;

/// What a backend is to be made for.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub activations: Activations,
    /// The case's seed, for whatever may differ from case to case: how many threads, say.
    pub seed: u64,
    /// The largest step of any case.
    pub capacity: Capacity,
}

/// No case has larger steps.
pub const CAPACITY: Capacity = Capacity { tokens: 512, sequences: 48, blocks: 8192 };

type Make = Box<dyn Fn(&Setup) -> anyhow::Result<Box<dyn Backend>>>;

/// A backend to be held to the reference.
pub struct Candidate {
    name: String,
    make: Make,
    in_turns: bool,
}

/// Whose turn it is.
static TURN: Mutex<()> = Mutex::new(());

impl Candidate {
    pub fn new(
        name: impl Into<String>,
        make: impl Fn(&Setup) -> anyhow::Result<Box<dyn Backend>> + 'static,
    ) -> Candidate {
        Candidate { name: name.into(), make: Box::new(make), in_turns: false }
    }

    /// There is one of it in the process at a time: while a device waits for the host in the middle of a step, another's calls may not wait for that device.
    pub fn in_turns(self) -> Candidate {
        Candidate { in_turns: true, ..self }
    }
}

/// The cases of one kind.
pub struct Family {
    pub name: &'static str,
    /// Seeds that are tried when nothing else is asked for.
    pub cases: u64,
    pub run: fn(&mut Case),
}

/// One test for each family of cases, over a `Vec<Candidate>`.
#[macro_export]
macro_rules! tests {
    ($candidates:expr) => {
        $crate::tests! { @each $candidates;
            buffers_hold_what_was_written BUFFERS;
            caches_hold_what_was_written CACHES;
            embeddings_agree_with_the_generic_cpu EMBEDDINGS;
            projections_agree_with_the_generic_cpu PROJECTIONS;
            interleaved_heads_agree_with_the_generic_cpu INTERLEAVED_HEADS;
            long_rows_agree_with_the_generic_cpu LONG_ROWS;
            large_tiles_agree_with_the_generic_cpu LARGE_TILES;
            tens_of_tokens_agree_with_the_generic_cpu TENS_OF_TOKENS;
            q8_0_weights_agree_with_the_generic_cpu Q8_0;
            q8_0_mixtures_agree_with_the_generic_cpu Q8_0_MIXTURES;
            dense_layers_agree_with_the_generic_cpu DENSE_LAYERS;
            attention_agrees_with_the_generic_cpu ATTENTION;
            attention_over_shared_prefixes_agrees_with_the_generic_cpu SHARED_PREFIXES;
            attention_behind_deep_contexts_agrees_with_the_generic_cpu DEEP_CONTEXTS;
            delta_rules_agree_with_the_generic_cpu DELTA_RULES;
            delta_rules_of_one_token_agree_with_the_generic_cpu DELTA_RULES_OF_ONE_TOKEN;
            mixtures_agree_with_the_generic_cpu MIXTURES;
            mixtures_of_one_token_agree_with_the_generic_cpu MIXTURES_OF_ONE_TOKEN;
            mixtures_of_few_tokens_agree_with_the_generic_cpu MIXTURES_OF_FEW_TOKENS;
            streamed_mixtures_agree_with_the_generic_cpu STREAMED_MIXTURES;
            experts_that_cannot_be_read_fail_their_own_rows_only FAILED_ROWS;
            logits_agree_with_the_generic_cpu LOGITS;
            whole_steps_agree_with_the_generic_cpu WHOLE_STEPS;
        }
    };
    (@each $candidates:expr; $($test:ident $family:ident;)*) => {
        $(
            #[test]
            fn $test() {
                $crate::check(&$crate::$family, &$candidates);
            }
        )*
    };
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}: expected a whole number")))
}

/// Runs the cases of a family on the reference and on all candidates.
///
/// # Panics
/// At the first case in which a candidate is not the reference's equal, with what it takes to run it again.
pub fn check(family: &Family, candidates: &[Candidate]) {
    if candidates.is_empty() {
        return;
    }
    let seeds = match number("SLUICE_CONFORMANCE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SLUICE_CONFORMANCE_CASES").unwrap_or(family.cases),
    };
    for seed in seeds {
        let reference = Candidate::new("the generic CPU", |s| Ok(Box::new(Cpu::new(Isa::GENERIC, 1, s.activations)?)));
        let wanted = run(family, seed, &reference, true);
        for candidate in candidates {
            let got = run(family, seed, candidate, false);
            assert!(wanted.refused.is_none(), "the reference takes every weight format");
            if let Some(format) = got.refused {
                eprintln!("{}: {} takes no {format:?}", family.name, candidate.name);
                continue;
            }
            if let Some(difference) = difference(&got, &wanted) {
                panic!("{}", told(family, seed, candidate, &wanted, &difference));
            }
        }
    }
}

fn told(family: &Family, seed: u64, candidate: &Candidate, seen: &Seen, what: &str) -> String {
    let shapes: String = seen.shapes.iter().map(|s| format!("\n    {s}")).collect();
    let (family, candidate) = (family.name, &candidate.name);
    format!(
        "{family}, seed {seed}, {candidate}: {what}\n  SLUICE_CONFORMANCE_SEED={seed} runs it alone. Shapes:{shapes}"
    )
}

fn run(family: &Family, seed: u64, candidate: &Candidate, is_reference: bool) -> Seen {
    let mut random = Rng::with_seed(seed);
    // In turn, so that a few cases have all of them. What was drawn for it before still is: shapes by their seeds stay what they were.
    let _ = random.usize(..3);
    let activations = [Activations::Int8, Activations::Bf16, Activations::F32][seed as usize % 3];
    let setup = Setup { activations, seed, capacity: CAPACITY };
    let _turn = candidate.in_turns.then(|| TURN.lock().unwrap_or_else(|e| e.into_inner()));
    let backend = (candidate.make)(&setup).unwrap_or_else(|e| panic!("{}: {e:#}", candidate.name));
    let mut case = Case::new(backend, random, &setup, is_reference);
    match catch_unwind(AssertUnwindSafe(|| (family.run)(&mut case))) {
        Ok(()) => case.into_seen(),
        Err(panic) => {
            eprintln!("{}", told(family, seed, candidate, &case.into_seen(), "panicked"));
            resume_unwind(panic)
        }
    }
}

/// What differs first.
fn difference(got: &Seen, wanted: &Seen) -> Option<String> {
    if got.shapes != wanted.shapes {
        return Some(format!("a case must not depend on its backend, but took other shapes: {:?}", got.shapes));
    }
    for ((label, got), (_, wanted)) in got.values.iter().zip(&wanted.values) {
        if let Some(at) = got.first_difference(wanted) {
            return Some(format!("{label}: {at}"));
        }
    }
    let counts = (got.values.len(), wanted.values.len());
    (counts.0 != counts.1).then(|| format!("{} values were seen instead of {}", counts.0, counts.1))
}

impl Value {
    fn first_difference(&self, wanted: &Value) -> Option<String> {
        match (self, wanted) {
            (Value::Floats { cols, values }, Value::Floats { values: wanted, .. }) => {
                // A NaN is a NaN: which one it is nobody promises.
                let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                let at = values.iter().zip(wanted).position(|pair| !same(pair));
                let at = at.or((values.len() != wanted.len()).then_some(values.len().min(wanted.len())))?;
                let show = |x: Option<&f32>| x.map_or("nothing".into(), |x| format!("{x:e} ({:#010x})", x.to_bits()));
                let differ = values.iter().zip(wanted).filter(|pair| !same(*pair)).count();
                let (got, wanted) = (show(values.get(at)), show(wanted.get(at)));
                let (row, col) = (at / cols, at % cols);
                Some(format!("row {row}, column {col} is {got} and should be {wanted}; {differ} elements differ"))
            }
            (Value::Bytes(got), Value::Bytes(wanted)) => {
                let at = got.iter().zip(wanted).position(|(a, b)| a != b);
                let at = at.or((got.len() != wanted.len()).then_some(got.len().min(wanted.len())))?;
                Some(format!("byte {at} is {:?} and should be {:?}", got.get(at), wanted.get(at)))
            }
            (Value::Text(got), Value::Text(wanted)) => {
                (got != wanted).then(|| format!("{got}\n  and should be\n  {wanted}"))
            }
            _ => Some("is of another kind".into()),
        }
    }
}
