//! How rows of weights that files have in blocks (GGUF's types, four-bit floats) lie on a device: `kernels/format/blocks.cuh`.
//!
//! A row is a stream of numbers of a few bits, then what scales are made of, then the units of blocks. It is never shorter than the file's.

use sluice_backend::{BlockFormat, E2m1, WeightFormat};

/// What a group has: `SCALE_...` of `kernels/format/blocks.cuh`.
const SCALE_F16: u32 = 3;
const SCALE_BIAS_F16: u32 = 4;
const SCALE_POWER: u32 = 5;
const SCALE_POWER_NAN: u32 = 6;
const SCALE_E4M3: u32 = 7;
const SCALE_BYTE: u32 = 8;
const SCALE_E4M3_TIMES: u32 = 9;
const SCALE_E4M3_OVER: u32 = 10;
const SCALE_NIBBLES: u32 = 11;
const SCALE_PAIR: u32 = 12;
/// Columns that share a unit.
const UNIT_COLUMNS: usize = 256;
/// Rows begin at multiples of so many bytes.
const ROW_ALIGNMENT: usize = 16;
/// Tables of values (`VALUES` of `kernels/format/blocks.cuh`), from 1 on.
const IQ4: u32 = 1;
const E2M1: u32 = 2;
const IQ3_XXS: u32 = 3;
const IQ3_S: u32 = 4;
const IQ2: u32 = 5;
const IQ1: u32 = 6;

/// Bytes that a row of `cols` columns takes on a device, where rows of its format are rearranged on the way; `None`: as many as in the file.
pub fn row_bytes_on_device(format: WeightFormat, cols: usize) -> Option<usize> {
    RowLayout::of(format).map(|layout| layout.row_bytes(cols))
}

/// How rows of a format lie on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// Bits of a number.
    pub bits: usize,
    /// Columns of a group: 16 or 32.
    pub group: usize,
    /// What a group has, the integer that stands for 0, and the table of values, as kernels know them.
    pub element: u32,
}

impl RowLayout {
    /// Of a format that has blocks; `None` for others.
    pub fn of(format: WeightFormat) -> Option<RowLayout> {
        let (bits, group, zero, values, scale) = match format {
            WeightFormat::Float(_) | WeightFormat::Affine { .. } | WeightFormat::Fp8(_) => return None,
            WeightFormat::Blocks(blocks) => match blocks {
                BlockFormat::Q4_0 => (4, 32, 8, 0, SCALE_F16),
                BlockFormat::Q4_1 => (4, 32, 0, 0, SCALE_BIAS_F16),
                BlockFormat::Q5_0 => (5, 32, 16, 0, SCALE_F16),
                BlockFormat::Q5_1 => (5, 32, 0, 0, SCALE_BIAS_F16),
                BlockFormat::Q8_0 => (8, 32, 128, 0, SCALE_F16),
                BlockFormat::Q2K => (2, 16, 0, 0, SCALE_NIBBLES),
                BlockFormat::Q3K => (3, 16, 4, 0, SCALE_BYTE),
                BlockFormat::Q4K => (4, 32, 0, 0, SCALE_PAIR),
                BlockFormat::Q5K => (5, 32, 0, 0, SCALE_PAIR),
                BlockFormat::Q6K => (6, 16, 32, 0, SCALE_BYTE),
                BlockFormat::Iq4Nl => (4, 32, 128, IQ4, SCALE_F16),
                BlockFormat::Iq4Xs => (4, 32, 128, IQ4, SCALE_BYTE),
                BlockFormat::Iq3Xxs => (4, 32, 62, IQ3_XXS, SCALE_BYTE),
                BlockFormat::Iq3S => (4, 32, 15, IQ3_S, SCALE_BYTE),
                BlockFormat::Iq2Xxs => (3, 32, 43, IQ2, SCALE_BYTE),
                BlockFormat::Iq2Xs | BlockFormat::Iq2S => (3, 16, 43, IQ2, SCALE_BYTE),
                BlockFormat::Iq1S => (3, 32, 9, IQ1, SCALE_BYTE),
                BlockFormat::Iq1M => (3, 16, 9, IQ1, SCALE_BYTE),
                BlockFormat::Mxfp4 => (4, 32, 12, E2M1, SCALE_POWER),
                BlockFormat::Nvfp4 => (4, 16, 12, E2M1, SCALE_E4M3),
            },
            WeightFormat::E2m1(E2m1::Power) => (4, 32, 12, E2M1, SCALE_POWER_NAN),
            WeightFormat::E2m1(E2m1::E4m3 { divides: false, .. }) => (4, 16, 12, E2M1, SCALE_E4M3_TIMES),
            WeightFormat::E2m1(E2m1::E4m3 { divides: true, .. }) => (4, 16, 12, E2M1, SCALE_E4M3_OVER),
        };
        Some(RowLayout { bits, group, element: scale | zero << 8 | values << 16 })
    }

    /// Whether groups have a bias of their own.
    pub fn is_biased(self) -> bool {
        matches!(self.scale(), SCALE_BIAS_F16 | SCALE_NIBBLES | SCALE_PAIR)
    }

    /// The greatest size of a number less the one that stands for 0.
    fn greatest(self) -> usize {
        let zero = (self.element >> 8 & 0xff) as usize;
        match self.element >> 16 {
            0 => zero.max((1 << self.bits) - 1 - zero),
            IQ4 => 127,
            E2M1 => 12,
            _ => zero,
        }
    }

    /// Whether sums of a group's products with integers of 11 bits can reach 2^24, so that tensor cores take its numbers in two slices.
    pub fn is_sliced(self) -> bool {
        self.group * self.greatest() >= 1 << 10
    }

    fn scale(self) -> u32 {
        self.element & 0xff
    }

    /// Whether numbers are those of values in a table.
    pub fn is_looked_up(self) -> bool {
        self.element >> 16 != 0
    }

    /// Where what groups have begins in a row, and the units of blocks: there may be none.
    pub fn starts(self, cols: usize) -> [usize; 2] {
        let code = match self.scale() {
            SCALE_BIAS_F16 => 4,
            SCALE_F16 | SCALE_PAIR => 2,
            _ => 1,
        };
        let codes = cols / 8 * self.bits;
        [codes, (codes + cols / self.group * code).next_multiple_of(4)]
    }

    pub fn has_units(self) -> bool {
        self.scale() >= SCALE_BYTE
    }

    /// Bytes of a row.
    pub fn row_bytes(self, cols: usize) -> usize {
        let units = if self.has_units() { 4 * cols.div_ceil(UNIT_COLUMNS) } else { 0 };
        (self.starts(cols)[1] + units).next_multiple_of(ROW_ALIGNMENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_never_shorter_than_the_files_and_little_longer_but_for_codebooks() {
        for blocks in BlockFormat::ALL {
            let layout = RowLayout::of(WeightFormat::Blocks(blocks)).unwrap();
            for units in [1, 3, 16, 64] {
                let cols = units * blocks.block_columns();
                let (own, file) = (layout.row_bytes(cols), units * blocks.block_bytes());
                assert!(own >= file, "{}: {own} and {file} bytes", blocks.name());
                let is_book = matches!(blocks.name(), name if name.starts_with("IQ") && !name.starts_with("IQ4"));
                if cols >= 4096 && !is_book {
                    assert!(own as f64 <= 1.06 * file as f64, "{}: {own} and {file} bytes", blocks.name());
                }
            }
        }
    }
}
