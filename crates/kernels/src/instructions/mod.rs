//! What an instruction set gives the kernels, one trait per file; a folder of `src` implements all of them for its sixteen lanes. What several
//! instruction sets share (the register tile of dot products, the plain way through integer groups) stands beside its trait.

pub(crate) mod bf16_dot;
pub mod bytes;
pub(crate) mod dot;
pub(crate) mod encode;
pub mod f32_dot;
pub(crate) mod int8_dot;
pub(crate) mod peak;
#[cfg(test)]
mod tests;
pub(crate) mod unpack;
