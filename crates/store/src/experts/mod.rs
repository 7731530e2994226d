//! Experts of a mixture that stay on disk until tokens want them.

mod cache;
mod forecast;
pub mod simulate;

pub use cache::{ExpertCache, Policy};
