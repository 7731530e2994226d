//! Bytes to numbers: the arithmetic of Sluice, on plain slices. Knows nothing of files, models or threads.
//!
//! Every kernel gives the same bits in every instruction set and for every split of the work; `docs/numerics.md` says how each
//! reduction is defined. One file is one family of kernels, written once over the traits of [`instructions`]:
//!
//! - a kernel stands in its family's file, behind `simd!` (`dispatch`);
//! - an instruction set is one folder (`generic`, `avx2`, `avx512`) that implements those traits for its sixteen lanes, a [`isa::Level`], and an arm in `dispatch`;
//! - a weight form is a variant of [`form::Form`], which lists the arrays that it lies in, and an unpacker ([`instructions`]).
//!
//! Imports between files point one way: `form`, `rows` <- `matrix`, `input` <- `instructions` <- instruction sets <- `dispatch` <- kernels.

pub mod activations;
pub mod affine;
pub mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod delta;
pub mod dense;
mod dispatch;
pub mod elementwise;
pub mod format;
mod generic;
pub mod input;
pub mod instructions;
pub mod isa;
pub mod math;
pub mod matmul;
pub mod matrix;
pub mod norm;
pub mod quantize;
pub mod roofline;
pub mod rotary;
pub mod route;
pub mod rows;
pub mod sample;
pub mod scratch;
#[cfg(test)]
mod test_random;

pub use isa::Isa;

/// Names the arithmetic of `docs/numerics.md`: a state that another version computed is never used.
pub const NUMERICS_VERSION: u32 = 3;
