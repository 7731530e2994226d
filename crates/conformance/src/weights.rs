//! Random weight matrices of every format, as the bytes of a checkpoint: at any alignment, with any tail.

use half::{bf16, f16};
use sluice_backend::{Float, MatrixId, MatrixSource, WeightFormat};
use sluice_store::Bytes;

use crate::case::Case;

/// A matrix by its bytes: elements, scales, biases.
pub struct Parts {
    pub form: WeightFormat,
    pub rows: usize,
    pub cols: usize,
    pub bytes: [Vec<u8>; 3],
}

const FLOATS: [Float; 3] = [Float::F32, Float::F16, Float::Bf16];

/// `values` in an element type, little-endian.
pub fn encode(float: Float, values: &[f32]) -> Vec<u8> {
    match float {
        Float::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Float::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        Float::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
    }
}

impl Case {
    /// A format that a matrix with so many columns can have.
    pub fn form(&mut self, cols: usize) -> WeightFormat {
        if let Some(form) = self.uniform {
            return form;
        }
        let groups: Vec<u16> = [32, 64, 128].into_iter().filter(|g| cols.is_multiple_of(*g as usize)).collect();
        if groups.is_empty() || self.once_in(4) {
            return WeightFormat::Float(self.one_of(&FLOATS));
        }
        let (bits, group) = (self.one_of(&[2, 3, 4, 5, 6, 8]), self.one_of(&groups));
        WeightFormat::Affine { bits, group, scale: self.one_of(&FLOATS) }
    }

    /// Random weights `[rows, cols]` in a format.
    pub fn parts(&mut self, form: WeightFormat, rows: usize, cols: usize) -> Parts {
        let bytes = match form {
            WeightFormat::Float(float) => [encode(float, &self.small(rows * cols, 0.5)), vec![], vec![]],
            WeightFormat::Affine { bits, group, scale } => {
                let mut packed = vec![0; rows * (cols / 8) * bits as usize];
                self.random.fill(&mut packed);
                let n = rows * (cols / group as usize);
                let mut scales = self.small(n, 1.0 / f32::from(1u16 << bits));
                if self.once_in(4) {
                    scales[0] = 0.0;
                }
                let biases: Vec<f32> =
                    scales.iter().map(|s| -s * f32::from(1u16 << (bits - 1)) * (0.5 + self.random.f32())).collect();
                [packed, encode(scale, &scales), encode(scale, &biases)]
            }
            WeightFormat::Blocks(blocks) => {
                let mut bytes = vec![0; rows * cols / blocks.block_columns() * blocks.block_bytes()];
                self.random.fill(&mut bytes);
                for block in bytes.chunks_exact_mut(blocks.block_bytes()) {
                    blocks.set_size(block, if self.once_in(8) { 0.0 } else { self.random.f32() });
                }
                [bytes, vec![], vec![]]
            }
        };
        Parts { form, rows, cols, bytes }
    }

    /// Registers weights in memory, at any alignment.
    pub fn register(&mut self, parts: &Parts) -> MatrixId {
        let Parts { form, rows, cols, ref bytes } = *parts;
        let arrays = form.planes(cols).expect("a form that there is").len();
        let shifted = |i: usize| {
            let offset = self.random.usize(..8);
            let mut shifted = vec![0xa5; offset];
            shifted.extend_from_slice(&bytes[i]);
            Bytes::from(shifted).slice(offset..)
        };
        let parts = (0..arrays).map(shifted).collect();
        self.backend.matrix(MatrixSource { format: form, rows, cols, planes: parts }).expect("a matrix of a known form")
    }

    /// A matrix of any format.
    pub fn matrix(&mut self, rows: usize, cols: usize) -> MatrixId {
        let form = self.form(cols);
        self.shape(format!("matrix {rows} x {cols}, {form:?}"));
        let parts = self.parts(form, rows, cols);
        self.register(&parts)
    }
}
