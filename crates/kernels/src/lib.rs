//! Bytes to numbers: the arithmetic of Sluice, on plain slices. Knows nothing of files, models or threads.
//!
//! Every kernel gives the same bits in every instruction set and for every split of the work; `docs/numerics.md` says how each
//! reduction is defined. One file is one family of kernels: add a kernel where its family lives, an instruction set as
//! a folder, a weight form as an unpacker in `matmul`.

pub mod activations;
pub mod affine;
pub mod attention;
pub mod delta;
pub mod dense;
pub mod elementwise;
pub mod form;
pub mod input;
pub mod isa;
pub mod lanes;
pub mod math;
pub mod matmul;
pub mod matrix;
pub mod norm;
pub mod quantize;
pub mod roofline;
pub mod rotary;
pub mod route;
pub mod rows;
pub mod scratch;
#[cfg(test)]
mod test_random;

pub use isa::Isa;

/// Names the arithmetic of `docs/numerics.md`: a state that another version computed is never used.
pub const NUMERICS_VERSION: u32 = 2;
