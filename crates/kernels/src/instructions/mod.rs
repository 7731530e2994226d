//! The traits of an instruction set, one per file. A folder of `src` implements all of them for its sixteen lanes. Code that several instruction sets share (the
//! register tile of dot products, integer groups row by row) is in the file of its trait.

pub(crate) mod bf16_dot;
pub mod bytes;
pub(crate) mod dot;
pub(crate) mod encode;
pub mod f32_dot;
pub(crate) mod int11_dot;
pub(crate) mod int8_dot;
pub(crate) mod peak;
#[cfg(test)]
mod tests;
pub(crate) mod unpack;
