//! GGUF's quantised types: rows of blocks, each with its integers and scales together, read in place from the file's own bytes.

pub(crate) mod codebooks;
pub(crate) mod unpack;

use super::definition::{Format, Grouped};
use super::float::Float;
use super::packing::PackingName;
use super::planes::{Element, MatrixError, Planes};

/// A type of blocks of a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    /// 4 bits around 8, an f16 scale for each 32 columns.
    Q4_0,
    /// 4 bits, an f16 scale and an f16 minimum for each 32 columns.
    Q4_1,
    /// 5 bits around 16, an f16 scale for each 32 columns.
    Q5_0,
    /// 5 bits, an f16 scale and an f16 minimum for each 32 columns.
    Q5_1,
    /// Signed bytes, an f16 scale for each 32 columns.
    Q8_0,
    /// 2 bits, 4-bit scales and minima for each 16 columns, f16 units of both for each 256.
    Q2K,
    /// 3 bits around 4, 6-bit scales for each 16 columns, an f16 unit for each 256.
    Q3K,
    /// 4 bits, 6-bit scales and minima for each 32 columns, f16 units of both for each 256.
    Q4K,
    /// 5 bits, else as [`BlockFormat::Q4K`].
    Q5K,
    /// 6 bits around 32, 8-bit scales for each 16 columns, an f16 unit for each 256.
    Q6K,
    /// 4-bit numbers of sixteen values, an f16 scale for each 32 columns.
    Iq4Nl,
    /// The same values, 6-bit scales for each 32 columns, an f16 unit for each 256.
    Iq4Xs,
    /// 8-bit numbers of groups of four values, with signs; 4-bit scales for each 32 columns, an f16 unit for each 256.
    Iq3Xxs,
    /// 9-bit numbers of groups of four values, with signs; 4-bit scales for each 32 columns, an f16 unit for each 256.
    Iq3S,
    /// 8-bit numbers of groups of eight values, with signs; 4-bit scales for each 32 columns, an f16 unit for each 256.
    Iq2Xxs,
    /// 9-bit numbers of groups of eight values, with signs; 4-bit scales for each 16 columns, an f16 unit for each 256.
    Iq2Xs,
    /// 10-bit numbers of groups of eight values, with signs; 4-bit scales for each 16 columns, an f16 unit for each 256.
    Iq2S,
    /// 11-bit numbers of groups of eight values, shifted up or down; 3-bit scales for each 32 columns, an f16 unit for each 256.
    Iq1S,
    /// The same with 3-bit scales for each 16 columns and a shift for each eight.
    Iq1M,
    /// OCP's e2m1 numbers, a power of two for each 32 columns.
    Mxfp4,
    /// e2m1 numbers, an unsigned e4m3 scale for each 16 columns. The scale of the whole tensor is a tensor of its own in the file.
    Nvfp4,
}

impl BlockFormat {
    /// All of them.
    pub const ALL: [BlockFormat; 21] = [
        BlockFormat::Q4_0,
        BlockFormat::Q4_1,
        BlockFormat::Q5_0,
        BlockFormat::Q5_1,
        BlockFormat::Q8_0,
        BlockFormat::Q2K,
        BlockFormat::Q3K,
        BlockFormat::Q4K,
        BlockFormat::Q5K,
        BlockFormat::Q6K,
        BlockFormat::Iq4Nl,
        BlockFormat::Iq4Xs,
        BlockFormat::Iq3Xxs,
        BlockFormat::Iq3S,
        BlockFormat::Iq2Xxs,
        BlockFormat::Iq2Xs,
        BlockFormat::Iq2S,
        BlockFormat::Iq1S,
        BlockFormat::Iq1M,
        BlockFormat::Mxfp4,
        BlockFormat::Nvfp4,
    ];

    /// GGUF's name of the type.
    pub const fn name(self) -> &'static str {
        match self {
            BlockFormat::Q4_0 => "Q4_0",
            BlockFormat::Q4_1 => "Q4_1",
            BlockFormat::Q5_0 => "Q5_0",
            BlockFormat::Q5_1 => "Q5_1",
            BlockFormat::Q8_0 => "Q8_0",
            BlockFormat::Q2K => "Q2_K",
            BlockFormat::Q3K => "Q3_K",
            BlockFormat::Q4K => "Q4_K",
            BlockFormat::Q5K => "Q5_K",
            BlockFormat::Q6K => "Q6_K",
            BlockFormat::Iq4Nl => "IQ4_NL",
            BlockFormat::Iq4Xs => "IQ4_XS",
            BlockFormat::Iq3Xxs => "IQ3_XXS",
            BlockFormat::Iq3S => "IQ3_S",
            BlockFormat::Iq2Xxs => "IQ2_XXS",
            BlockFormat::Iq2Xs => "IQ2_XS",
            BlockFormat::Iq2S => "IQ2_S",
            BlockFormat::Iq1S => "IQ1_S",
            BlockFormat::Iq1M => "IQ1_M",
            BlockFormat::Mxfp4 => "MXFP4",
            BlockFormat::Nvfp4 => "NVFP4",
        }
    }

    /// The entries of the type's codebook, little-endian: eight bytes each, or four for types of IQ3. Types without one have none.
    pub fn codebook(self) -> Vec<u8> {
        fn eights(entries: &[u64]) -> Vec<u8> {
            entries.iter().flat_map(|entry| entry.to_le_bytes()).collect()
        }
        fn fours(entries: &[u32]) -> Vec<u8> {
            entries.iter().flat_map(|entry| entry.to_le_bytes()).collect()
        }
        match self {
            BlockFormat::Iq3Xxs => fours(&codebooks::IQ3_XXS),
            BlockFormat::Iq3S => fours(&codebooks::IQ3_S),
            BlockFormat::Iq2Xxs => eights(&codebooks::IQ2_XXS),
            BlockFormat::Iq2Xs => eights(&codebooks::IQ2_XS),
            BlockFormat::Iq2S => eights(&codebooks::IQ2_S),
            BlockFormat::Iq1S | BlockFormat::Iq1M => eights(&codebooks::IQ1_S),
            _ => Vec::new(),
        }
    }

    /// Where a block has its f16 units. Three types have none: IQ1_M spreads its bits over four words, MXFP4 and NVFP4 have other scales.
    const fn units(self) -> &'static [usize] {
        match self {
            BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4K | BlockFormat::Q5K => &[0, 2],
            BlockFormat::Q2K => &[80, 82],
            BlockFormat::Q3K => &[108],
            BlockFormat::Q6K => &[208],
            BlockFormat::Iq1M | BlockFormat::Mxfp4 | BlockFormat::Nvfp4 => &[],
            _ => &[0],
        }
    }

    /// The greatest multiple of the unit that a weight can be, about.
    const fn greatest(self) -> f32 {
        match self {
            BlockFormat::Q4_0 => 8.0,
            BlockFormat::Q4_1 => 15.0,
            BlockFormat::Q5_0 => 16.0,
            BlockFormat::Q5_1 => 31.0,
            BlockFormat::Q8_0 | BlockFormat::Q3K => 128.0,
            BlockFormat::Q2K => 45.0,
            BlockFormat::Q4K => 945.0,
            BlockFormat::Q5K => 1953.0,
            BlockFormat::Q6K | BlockFormat::Iq4Xs => 4096.0,
            BlockFormat::Iq4Nl => 127.0,
            BlockFormat::Iq3Xxs | BlockFormat::Iq3S => 480.0,
            BlockFormat::Iq2Xxs | BlockFormat::Iq2Xs | BlockFormat::Iq2S => 167.0,
            BlockFormat::Iq1S | BlockFormat::Iq1M => 17.0,
            BlockFormat::Mxfp4 | BlockFormat::Nvfp4 => 12.0,
        }
    }

    /// Makes blocks of random bytes blocks of weights up to about `size`, for tests and measurements: sets their units, and keeps everything else.
    ///
    /// # Panics
    /// Where `blocks` are not whole blocks.
    pub fn set_size(self, blocks: &mut [u8], size: f32) {
        assert!(blocks.len().is_multiple_of(self.block_bytes()), "{} bytes are not whole blocks", blocks.len());
        let unit = size / self.greatest();
        let half = half::f16::from_f32(unit).to_bits();
        for block in blocks.chunks_exact_mut(self.block_bytes()) {
            match self {
                BlockFormat::Iq1M => {
                    for (i, byte) in [49, 51, 53, 55].into_iter().enumerate() {
                        block[byte] = block[byte] & 0x0f | ((half >> (4 * i)) as u8) << 4;
                    }
                }
                // The exponent of f32, whose scale is halved.
                BlockFormat::Mxfp4 => block[0] = (unit.to_bits() >> 23).wrapping_add(1) as u8,
                BlockFormat::Nvfp4 => {
                    let exponent = ((unit.to_bits() >> 23) as i32 - 127 + 8).clamp(0, 15) as u8;
                    block[..4].iter_mut().for_each(|scale| *scale = exponent << 3 | *scale & 7);
                }
                _ => self.units().iter().for_each(|&at| block[at..at + 2].copy_from_slice(&half.to_le_bytes())),
            }
        }
    }
}

impl Format for BlockFormat {
    fn planes(&self, cols: usize) -> Result<Planes, MatrixError> {
        let (columns, bytes) = (self.block_columns(), self.block_bytes());
        if !cols.is_multiple_of(columns) {
            return Err(MatrixError::Columns { cols, group: columns as u16 });
        }
        let row_bytes = (cols / columns).checked_mul(bytes).ok_or(MatrixError::TooBig { rows: 1, cols })?;
        let mut planes = Planes::default();
        planes.add("weight", Element::Byte, row_bytes);
        Ok(planes)
    }

    /// Of the integers and scales that blocks are unpacked to.
    fn grouped(&self) -> Option<Grouped> {
        Some(Grouped { packing: PackingName::U8, group: self.group(), scale: Float::F32 })
    }
}
