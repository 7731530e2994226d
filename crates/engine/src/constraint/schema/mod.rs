//! Rewrites JSON schemas into the keywords that llguidance supports.
//!
//! A keyword that it lacks is expressed by others, if they mean exactly the same. Other keywords stay, so that compiling refuses them by name.

mod formats;
mod keywords;
mod limits;
mod negation;
mod rewrite;
mod unevaluated;

pub use formats::unknown_formats;
pub(crate) use rewrite::rewrite;
