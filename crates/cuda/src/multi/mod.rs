//! Several GPUs as one: which has what, and who computes what.

mod caches;
pub mod coherence;
mod operations;
pub mod partition;
pub mod pipeline;
mod sparse;
mod touched;
