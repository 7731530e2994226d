//! GGUF's Q8_0: blocks of 32 signed bytes that share one f16 scale, `w = q * s`.
//!
//! A GGUF file interleaves the two: each block is 34 bytes, first the scale, then the integers. Kernels take planes, as for every other format, so that rows
//! of integers are dense and aligned alike. A reader splits the blocks when it loads a tensor ([`Q8_0::split`]); the planes together have exactly as many bytes as
//! the blocks.
//!
//! Kernels compute with unsigned integers: `q + 128` and the bias `-128 * s`, which is exact (`docs/numerics.md`).

use super::definition::{ActivationFormat, Activations, Format, Grouped};
use super::float::Float;
use super::packing::PackingName;
use super::planes::{Element, MatrixError, Planes};

/// The format [`WeightFormat::Q8_0`](super::WeightFormat::Q8_0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Q8_0;

impl Q8_0 {
    /// Columns of a block.
    pub const BLOCK: usize = 32;
    /// Bytes of a block in a GGUF file.
    pub const BLOCK_BYTES: usize = 2 + Self::BLOCK;

    /// Splits a tensor of a GGUF file into its planes: integers, one per column, and f16 scales, one per block.
    ///
    /// ```
    /// use sluice_kernels::format::{Q8_0, WeightFormat};
    /// use sluice_kernels::matrix::Matrix;
    ///
    /// // One row of one block: the scale 0.5 and the integers -16..16.
    /// let mut file = vec![0x00, 0x38];
    /// file.extend((-16..16i8).map(|q| q as u8));
    /// let (integers, scales) = Q8_0::split(&file);
    /// let w = Matrix::new(WeightFormat::Q8_0, 1, 32, [&integers[..], &scales[..]])?;
    /// assert_eq!(w.bytes(), 34);
    /// # Ok::<(), sluice_kernels::format::MatrixError>(())
    /// ```
    ///
    /// # Panics
    /// When `blocks` is not a whole number of blocks.
    pub fn split(blocks: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let (all, rest) = blocks.as_chunks::<{ Self::BLOCK_BYTES }>();
        assert!(rest.is_empty(), "{} bytes are not whole blocks", blocks.len());
        let (mut integers, mut scales) =
            (Vec::with_capacity(all.len() * Self::BLOCK), Vec::with_capacity(all.len() * 2));
        for block in all {
            scales.extend_from_slice(&block[..2]);
            integers.extend_from_slice(&block[2..]);
        }
        (integers, scales)
    }
}

impl Format for Q8_0 {
    fn planes(&self, cols: usize) -> Result<Planes, MatrixError> {
        if !cols.is_multiple_of(Self::BLOCK) {
            return Err(MatrixError::Columns { cols, group: Self::BLOCK as u16 });
        }
        let mut planes = Planes::default();
        planes.add("weight", Element::Byte, cols);
        planes.add("scales", Element::Float(Float::F16), cols / Self::BLOCK * 2);
        Ok(planes)
    }

    fn grouped(&self) -> Option<Grouped> {
        Some(Grouped { packing: PackingName::I8, group: Self::BLOCK, scale: Float::F16 })
    }

    fn activation_format(&self, mode: Activations) -> ActivationFormat {
        match mode {
            Activations::F32 => ActivationFormat::F32,
            Activations::Bf16 => ActivationFormat::Bf16,
            Activations::Int8 => ActivationFormat::Int8,
            Activations::Int11 => ActivationFormat::Int11,
        }
    }
}
