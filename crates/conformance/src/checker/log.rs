//! What a checker recorded, and the faults that it injects.

use sluice_backend::StepInputs;

use super::recording::{Made, Operation, Recording};

/// Rows of a step that fail though they were computed.
#[derive(Clone, Debug, Default)]
pub struct Spoilt {
    /// Rows that the outcome reports as failed. The states of their sequences are overwritten.
    pub failed: Vec<u32>,
    /// Rows of logits that become NaN.
    pub not_numbers: Vec<usize>,
}

/// Chooses the failures of a step with these inputs.
pub type Spoil = Box<dyn FnMut(&StepInputs) -> Spoilt + Send>;

/// What a [`Checker`](super::Checker) recorded, and the faults that it injects.
#[derive(Default)]
pub struct Log {
    /// Whether to record the next steps.
    pub record: bool,
    pub recordings: Vec<Recording>,
    /// Completed steps: the names of their operations, and their synchronisations.
    pub steps: Vec<(Vec<&'static str>, usize)>,
    pub spoil: Option<Spoil>,
    /// A fault of the backend: changes an operation before it runs.
    pub fault: Option<fn(&mut Operation)>,
    pub(super) made: Vec<Made>,
}
