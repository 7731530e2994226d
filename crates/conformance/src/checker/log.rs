//! What a checker saw, and what it is to do.

use sluice_backend::StepInputs;

use super::recording::{Made, Operation, Recording};

/// Rows of a step that shall fail, though they were computed.
#[derive(Clone, Debug, Default)]
pub struct Spoilt {
    /// Rows that the outcome shall name as failed; what their sequences have in states is overwritten.
    pub failed: Vec<u32>,
    /// Rows of logits that shall not be numbers.
    pub not_numbers: Vec<usize>,
}

/// What a step that begins with these inputs shall fail in.
pub type Spoil = Box<dyn FnMut(&StepInputs) -> Spoilt + Send>;

/// What a [`Checker`] saw, and what it is to do.
#[derive(Default)]
pub struct Log {
    /// Whether the next steps are to be recorded.
    pub record: bool,
    pub recordings: Vec<Recording>,
    /// Steps that have ended: names of their operations, and how often each waited.
    pub steps: Vec<(Vec<&'static str>, usize)>,
    pub spoil: Option<Spoil>,
    /// A fault of the backend: what is asked of it is done in another way.
    pub fault: Option<fn(&mut Operation)>,
    pub(super) made: Vec<Made>,
}
