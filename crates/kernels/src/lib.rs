//! Bytes to numbers: the arithmetic of Sluice, on plain slices. Knows nothing of files, models or threads.
//!
//! Every kernel gives the same bits in every instruction set and for every split of the work; `docs/numerics.md` says how each
//! reduction is defined. One file is one family of kernels: add a kernel where its family lives, an instruction set as
//! a folder, a weight form as an unpacker in `matmul`.

pub mod isa;
pub mod lanes;

pub use isa::Isa;
