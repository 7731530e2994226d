//! Weights that files have in blocks (GGUF's types, four-bit floats), and how their rows lie on a device: `kernels/format/blocks.cuh`.
//!
//! What a file has begins at any byte, and its blocks have integers and scales side by side. On its way to the device a row becomes a stream of numbers of a few
//! bits, then what scales are made of, then the units of blocks. A row is never shorter than the file's, so that it is rearranged where it has arrived.

use anyhow::Result;
use sluice_backend::{BlockFormat, E2m1, WeightFormat};

use crate::device::memory::DeviceBuffer;
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::{Kernel, KernelFormat};
use crate::parameters::{self as p, number};

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
/// Bytes that are rearranged at a time.
const CHUNK: usize = 32 << 20;
/// Threads of a block, and the most blocks.
const THREADS: u32 = 256;
const BLOCKS: u64 = 1 << 16;

/// Tables of values (`VALUES` of `kernels/format/blocks.cuh`), from 1 on.
const IQ4: u32 = 1;
const E2M1: u32 = 2;
const IQ3_XXS: u32 = 3;
const IQ3_S: u32 = 4;
const IQ2: u32 = 5;
const IQ1: u32 = 6;

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

    fn scale(self) -> u32 {
        self.element & 0xff
    }

    /// The format of its kernels where activations are integers.
    pub fn kernel_format(self) -> KernelFormat {
        match (self.bits, self.group, self.element >> 16 != 0) {
            (2, ..) => KernelFormat::B2Int8,
            (3, 16, true) => KernelFormat::H3Int8,
            (3, _, true) => KernelFormat::V3Int8,
            (3, ..) => KernelFormat::B3Int8,
            (4, 16, _) => KernelFormat::H4Int8,
            (4, _, true) => KernelFormat::V4Int8,
            (4, ..) => KernelFormat::B4Int8,
            (5, ..) => KernelFormat::B5Int8,
            (6, ..) => KernelFormat::B6Int8,
            _ => KernelFormat::B8Int8,
        }
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

    fn has_units(self) -> bool {
        self.scale() >= SCALE_BYTE
    }

    /// Bytes of a row.
    pub fn row_bytes(self, cols: usize) -> usize {
        let units = if self.has_units() { 4 * cols.div_ceil(UNIT_COLUMNS) } else { 0 };
        (self.starts(cols)[1] + units).next_multiple_of(ROW_ALIGNMENT)
    }
}

/// What the kernel calls a format: `BLOCK_...` of `kernels/elementwise/rearrange.cu`.
fn block_number(format: WeightFormat) -> u32 {
    let position = |blocks| BlockFormat::ALL.iter().position(|of| *of == blocks).expect("one of all");
    match format {
        WeightFormat::Blocks(blocks) => number(position(blocks)),
        WeightFormat::E2m1(E2m1::Power) => number(BlockFormat::ALL.len()),
        _ => number(BlockFormat::ALL.len() + 1),
    }
}

/// A matrix whose arrays have arrived at `at` as the file has them, one behind the other.
#[derive(Clone, Copy)]
pub struct Arrived {
    pub format: WeightFormat,
    pub rows: usize,
    pub cols: usize,
    /// Bytes of a row of each array.
    pub row_bytes: [usize; 2],
    pub at: Address,
}

/// Rearranges matrices where they are.
///
/// # Errors
/// If there is no memory for a chunk of rows.
pub fn rearrange(gpu: &Gpu, all: &[Arrived]) -> Result<()> {
    let chunk_rows = |own: &Arrived| (CHUNK / own.row_bytes[0].max(1)).clamp(1, own.rows);
    let scratch = |own: &Arrived| chunk_rows(own) * own.row_bytes[0] + own.rows * own.row_bytes[1];
    let Some(most) = all.iter().map(scratch).max() else { return Ok(()) };
    let scratch = DeviceBuffer::new(gpu, most, "the rearrangement of weights")?;
    for own in all {
        let Arrived { format, rows, cols, row_bytes: [row, scale_row], at } = *own;
        let layout = RowLayout::of(format).expect("it has blocks");
        let (chunk, [codes_at, units_at]) = (chunk_rows(own), layout.starts(cols));
        let codebook = match format {
            WeightFormat::Blocks(blocks) => blocks.codebook(),
            _ => Vec::new(),
        };
        let book = (!codebook.is_empty()).then(|| DeviceBuffer::new(gpu, codebook.len(), "a codebook")).transpose()?;
        if let Some(book) = &book {
            // SAFETY: it was just allocated with this length.
            unsafe { gpu.write(book.at, &codebook, gpu.wait_permit()?)? };
        }
        let scales = scratch.at + (chunk * row) as u64;
        // SAFETY: the arrays lie behind one another; the scratch is as large as the largest.
        unsafe { gpu.copy(at + (rows * row) as u64, scales, rows * scale_row)? };
        // From the last rows on: a row is longer than the file's, and goes where later ones were.
        for first in (0..rows).step_by(chunk).collect::<Vec<_>>().into_iter().rev() {
            let count = chunk.min(rows - first);
            let parameters = p::Rearrange {
                file: scratch.at,
                scales: scales + (first * scale_row) as u64,
                own: at + (first * layout.row_bytes(cols)) as u64,
                codebook: book.as_ref().map_or(0, |book| book.at),
                own_bytes: layout.row_bytes(cols) as u64,
                rows: number(count),
                cols: number(cols),
                format: block_number(format),
                codes_at: number(codes_at),
                units_at: if layout.has_units() { number(units_at) } else { 0 },
                global: match format {
                    WeightFormat::E2m1(E2m1::E4m3 { global, .. }) => global,
                    _ => 0,
                },
            };
            let parts = count as u64 * (cols / 32) as u64;
            let blocks = number(parts.div_ceil(u64::from(THREADS)).min(BLOCKS) as usize);
            // SAFETY: as many rows as are there are copied, and as many written where this matrix has its place.
            unsafe {
                gpu.copy(at + (first * row) as u64, scratch.at, count * row)?;
                gpu.launch(Kernel::REARRANGE, [blocks, 1, 1], THREADS, 0, &parameters)?;
            }
        }
    }
    // Before the scratch goes.
    gpu.wait(gpu.wait_permit()?)?;
    Ok(())
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
