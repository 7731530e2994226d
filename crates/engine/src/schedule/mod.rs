//! Which sequences take part in each step.

mod chunk_budget;
pub(crate) mod plan;
pub(crate) mod scheduler;
pub(crate) mod sequence;
