//! Experts of a mixture that stay on disk until tokens want them.

mod cache;

pub use cache::{ExpertCache, Policy};
