//! What an instruction set gives the kernels, one trait per file; a folder of `src` implements all of them for its sixteen lanes. What several
//! instruction sets share (the register tile of dot products, the plain way through integer groups) stands beside its trait.

pub mod bytes;
pub(crate) mod dot;
pub(crate) mod encode;
pub(crate) mod integers;
pub mod lanes;
pub(crate) mod pairs;
pub(crate) mod peak;
#[cfg(test)]
mod tests;
pub(crate) mod unpack;
