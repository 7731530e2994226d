//! The arithmetic of Sluice, on plain slices. Knows nothing of files, models or threads.
//!
//! Every kernel gives the same bits on every instruction set and for every split of the work. `docs/numerics.md` defines each reduction. One file is one family
//! of kernels, written once over the traits of [`instructions`]:
//!
//! - a kernel is a function in its family's file, behind `simd!` (`dispatch`);
//! - an instruction set is a folder (`generic`, `avx2`, `avx512`, `neon`) that implements those traits for its sixteen lanes, a [`isa::Level`], and an arm in `dispatch`;
//! - a weight format is a file of [`mod@format`] that lists its planes, groups and packing.
//!
//! Imports point one way: `format`, `rows` <- `matrix`, `input` <- `instructions` <- instruction sets <- `dispatch` <- kernels.
//!
//! The product of a matrix in a checkpoint's own bytes with two tokens:
//!
//! ```
//! use sluice_kernels::Isa;
//! use sluice_kernels::format::{Float, WeightFormat};
//! use sluice_kernels::input::Input;
//! use sluice_kernels::matmul::matmul;
//! use sluice_kernels::matrix::Matrix;
//! use sluice_kernels::scratch::Scratch;
//!
//! // W: [2 rows, 3 columns] of f32, as its bytes.
//! let bytes: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0].iter().flat_map(|w| w.to_le_bytes()).collect();
//! let w = Matrix::new(WeightFormat::Float(Float::F32), 2, 3, [&bytes[..]])?;
//! // x: [2 tokens, 3 columns].
//! let x = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0];
//! // y: [2 tokens, 2 rows].
//! let mut y = [0.0; 4];
//! matmul(Isa::GENERIC, &w, 0..2, Input::F32(&x), &[0, 1], &mut y, &mut Scratch::default());
//! assert_eq!(y, [1.0, 4.0, 6.0, 15.0]);
//! # Ok::<(), sluice_kernels::format::MatrixError>(())
//! ```

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
pub mod hadamard;
pub mod input;
pub mod instructions;
pub mod int11;
pub mod int11_tiles;
pub mod isa;
pub mod latent;
pub mod math;
pub mod matmul;
pub mod matrix;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod ngrams;
pub mod norm;
pub mod quantize;
pub mod roofline;
pub mod rotary;
pub mod route;
pub mod rows;
pub mod sample;
pub mod scratch;
pub mod state_space;
pub mod streams;
#[cfg(test)]
mod test_random;

pub use isa::Isa;

/// Names the arithmetic of `docs/numerics.md`: a state that another version computed is never used.
pub const NUMERICS_VERSION: u32 = 5;
