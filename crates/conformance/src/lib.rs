//! Holds every backend to the same bits: random cases of each operation, compared with the CPU's generic code on one thread.
//!
//! For tests, and for `sluice self-test`. It is a crate because a backend is one too, and takes this one as a dev-dependency:
//!
//! ```ignore
//! sluice_conformance::tests!(vec![Candidate::new("cuda", |setup| Ok(Box::new(Cuda::new(0, setup.activations)?)))]);
//! ```
//!
//! A case is a function of a seed and a backend. It runs on the reference and on each candidate with the same random numbers, and its observations must
//! be equal. A case that fails prints its seed, its shapes and the first difference. `SLUICE_CONFORMANCE_SEED=N` runs that seed alone, and
//! `SLUICE_CONFORMANCE_CASES=N` so many cases of each kind instead of the usual number.
//!
//! [`Checker`] is a backend that checks its caller and replays steps.
#![forbid(unsafe_code)]

mod case;
mod checker;
mod family;
mod operations;
mod setup;
mod weights;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

use fastrand::Rng;
#[cfg(doc)]
use sluice_backend::AttentionMode;
use sluice_backend::{Activations, Backend, Isa};
use sluice_cpu::Cpu;

pub use case::Case;
use case::{Seen, Value};
pub use checker::{CacheContents, Checker, Log, Made, Operation, Recording, Spoil, Spoilt};
pub use family::Family;
pub use operations::*;
pub use setup::{CAPACITY, Setup};

type Make = Box<dyn Fn(&Setup) -> anyhow::Result<Box<dyn Backend>>>;

/// A backend that is compared with the reference.
pub struct Candidate {
    name: String,
    make: Make,
    in_turns: bool,
}

/// Held by the candidate that runs, among those that take turns.
static TURN: Mutex<()> = Mutex::new(());

impl Candidate {
    pub fn new(
        name: impl Into<String>,
        make: impl Fn(&Setup) -> anyhow::Result<Box<dyn Backend>> + 'static,
    ) -> Candidate {
        Candidate { name: name.into(), make: Box::new(make), in_turns: false }
    }

    /// Lets only one such candidate run at a time. While a device waits for the host inside of a step, calls of another may block on it.
    pub fn in_turns(self) -> Candidate {
        Candidate { in_turns: true, ..self }
    }
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
            blocks_agree_with_the_generic_cpu BLOCKS;
            mixtures_of_blocks_agree_with_the_generic_cpu MIXTURES_OF_BLOCKS;
            dense_layers_agree_with_the_generic_cpu DENSE_LAYERS;
            elementwise_operations_agree_with_the_generic_cpu ELEMENTWISE;
            attention_agrees_with_the_generic_cpu ATTENTION;
            attention_over_shared_prefixes_agrees_with_the_generic_cpu SHARED_PREFIXES;
            attention_behind_deep_contexts_agrees_with_the_generic_cpu DEEP_CONTEXTS;
            latent_attention_agrees_with_the_generic_cpu LATENT_ATTENTION;
            sparse_indexers_agree_with_the_generic_cpu SPARSE_INDEXERS;
            delta_rules_agree_with_the_generic_cpu DELTA_RULES;
            delta_rules_of_one_token_agree_with_the_generic_cpu DELTA_RULES_OF_ONE_TOKEN;
            delta_rules_by_channels_agree_with_the_generic_cpu CHANNEL_DELTAS;
            state_spaces_agree_with_the_generic_cpu STATE_SPACES;
            ungated_mixtures_agree_with_the_generic_cpu UNGATED_MIXTURES;
            mixtures_agree_with_the_generic_cpu MIXTURES;
            mixtures_of_one_token_agree_with_the_generic_cpu MIXTURES_OF_ONE_TOKEN;
            mixtures_of_few_tokens_agree_with_the_generic_cpu MIXTURES_OF_FEW_TOKENS;
            clamped_mixtures_agree_with_the_generic_cpu CLAMPED_MIXTURES;
            mixtures_with_routers_of_their_own_agree_with_the_generic_cpu MIXTURES_WITH_ROUTERS_OF_THEIR_OWN;
            streamed_mixtures_agree_with_the_generic_cpu STREAMED_MIXTURES;
            streamed_clamped_mixtures_agree_with_the_generic_cpu STREAMED_CLAMPED_MIXTURES;
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

/// The generic instruction set. The suite shows that the CPU computes the same with all others, so another backend's tests may take the quickest, which saves a
/// quarter of the time where that backend is emulated.
fn reference_isa() -> Isa {
    match std::env::var_os("SLUICE_CONFORMANCE_REFERENCE").is_some_and(|isa| isa == "quickest") {
        true => *Isa::supported().last().expect("the generic one at least"),
        false => Isa::GENERIC,
    }
}

/// Runs the cases of a family on the reference and on all candidates.
///
/// # Panics
/// At the first case in which a candidate differs from the reference, with the seed that repeats it.
pub fn check(family: &Family, candidates: &[Candidate]) {
    if candidates.is_empty() {
        return;
    }
    let seeds = match number("SLUICE_CONFORMANCE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SLUICE_CONFORMANCE_CASES").unwrap_or(family.cases),
    };
    for seed in seeds {
        let isa = reference_isa();
        let reference = Candidate::new("the generic CPU", move |s| Ok(Box::new(Cpu::new(isa, 1, s.activations)?)));
        let wanted = run(family, seed, &reference, true);
        for candidate in candidates {
            let got = run(family, seed, candidate, false);
            assert!(wanted.refused.is_none(), "the reference takes everything");
            if let Some(what) = got.refused {
                eprintln!("{}: {} takes no {what}", family.name, candidate.name);
                continue;
            }
            if let Some(difference) = difference(&got, &wanted) {
                panic!("{}", report(family, seed, candidate, &wanted, &difference));
            }
        }
    }
}

/// What came of a case on a candidate.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Agrees,
    /// It does not compute something that the case is about, and says so: its name.
    Refuses(String),
    /// The first difference, or why it could not go on, with the case's shapes.
    Differs(String),
}

/// One case on the generic CPU and on each candidate, for programs: `sluice self-test`. A panic is a difference.
pub fn compare(family: &Family, seed: u64, candidates: &[Candidate]) -> Vec<Outcome> {
    let reference = Candidate::new("the generic CPU", |s| Ok(Box::new(Cpu::new(Isa::GENERIC, 1, s.activations)?)));
    let held = |candidate: &Candidate, is_reference| {
        catch_unwind(AssertUnwindSafe(|| run(family, seed, candidate, is_reference)))
    };
    let Ok(wanted) = held(&reference, true) else {
        return vec![Outcome::Differs("the generic CPU cannot compute it".into()); candidates.len()];
    };
    let one = |candidate: &Candidate| match held(candidate, false) {
        Err(_) => Outcome::Differs("it could not go on".into()),
        Ok(Seen { refused: Some(what), .. }) => Outcome::Refuses(what),
        Ok(got) => difference(&got, &wanted)
            .map_or(Outcome::Agrees, |what| Outcome::Differs(format!("{what}; shapes: {}", wanted.shapes.join(", ")))),
    };
    candidates.iter().map(one).collect()
}

fn report(family: &Family, seed: u64, candidate: &Candidate, seen: &Seen, what: &str) -> String {
    let shapes: String = seen.shapes.iter().map(|s| format!("\n    {s}")).collect();
    let (family, candidate) = (family.name, &candidate.name);
    format!(
        "{family}, seed {seed}, {candidate}: {what}\n  SLUICE_CONFORMANCE_SEED={seed} runs it alone. Shapes:{shapes}"
    )
}

/// In turn, so that a few cases have all of them, and each mode has even and odd seeds.
fn mode_of(seed: u64) -> Activations {
    let modes = [Activations::Int8, Activations::Bf16, Activations::F32, Activations::Int11];
    modes[(seed + seed / 4) as usize % modes.len()]
}

fn run(family: &Family, seed: u64, candidate: &Candidate, is_reference: bool) -> Seen {
    let mut random = Rng::with_seed(seed);
    // What was drawn for the mode before still is: shapes by their seeds stay what they were.
    let _ = random.usize(..3);
    let setup = Setup { activations: mode_of(seed), seed, capacity: CAPACITY };
    let _turn = candidate.in_turns.then(|| TURN.lock().unwrap_or_else(|e| e.into_inner()));
    let backend = (candidate.make)(&setup).unwrap_or_else(|e| panic!("{}: {e:#}", candidate.name));
    let mut case = Case::new(backend, random, &setup, is_reference);
    match catch_unwind(AssertUnwindSafe(|| (family.run)(&mut case))) {
        Ok(()) => case.into_seen(),
        Err(panic) => {
            eprintln!("{}", report(family, seed, candidate, &case.into_seen(), "panicked"));
            resume_unwind(panic)
        }
    }
}

/// The first difference.
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
