//! Random weight matrices of every format, as the bytes of a checkpoint: at any alignment, with any tail.

use half::{bf16, f16};
use sluice_backend::{BlockFormat, E2m1, Element, Float, Fp8, Fp8Scale, MatrixId, MatrixSource, WeightFormat};
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

/// Formats of safetensors whose numbers are small floats.
const SMALL_FLOATS: [WeightFormat; 6] = [
    WeightFormat::E2m1(E2m1::Power),
    WeightFormat::E2m1(E2m1::E4m3 { global: 0x3e4c_cccd, divides: false }),
    WeightFormat::E2m1(E2m1::E4m3 { global: 0x4133_3333, divides: true }),
    WeightFormat::Fp8(Fp8 { group: 128, scale: Fp8Scale::Float(Float::F32) }),
    WeightFormat::Fp8(Fp8 { group: 0, scale: Fp8Scale::Float(Float::Bf16) }),
    WeightFormat::Fp8(Fp8 { group: 32, scale: Fp8Scale::Power }),
];

/// The columns that matrices of a format are multiples of.
pub fn unit(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Float(_) => 1,
        WeightFormat::Affine { group, .. } => group.into(),
        WeightFormat::Blocks(blocks) => blocks.block_columns(),
        WeightFormat::E2m1(_) | WeightFormat::Fp8(_) => 32,
    }
}

impl Case {
    /// A type of GGUF's blocks, or at times a format of small floats, whose matrices can have so many columns.
    pub fn blocks(&mut self, cols: usize) -> WeightFormat {
        let small = self.once_in(8).then_some(&SMALL_FLOATS).into_iter().flatten().copied();
        let blocks = BlockFormat::ALL.map(WeightFormat::Blocks);
        let all: Vec<WeightFormat> = match small.collect::<Vec<_>>() {
            small if small.is_empty() => blocks.to_vec(),
            small => small,
        };
        let fits: Vec<WeightFormat> = all.into_iter().filter(|format| cols.is_multiple_of(unit(*format))).collect();
        if fits.is_empty() { WeightFormat::Float(Float::Bf16) } else { self.one_of(&fits) }
    }

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
            WeightFormat::E2m1(_) | WeightFormat::Fp8(_) => {
                let planes = form.planes(cols).expect("a form that there is");
                let mut bytes = vec![0; rows * planes[0].row_bytes];
                self.random.fill(&mut bytes);
                if let WeightFormat::Fp8(_) = form {
                    // Below 2: no NaN.
                    bytes.iter_mut().for_each(|byte| *byte &= 0xbf);
                }
                let n = rows * planes[1].row_bytes / planes[1].element.size();
                let scales = match (form, planes[1].element) {
                    (_, Element::Float(float)) => encode(float, &self.small(n, 0.1)),
                    (WeightFormat::E2m1(E2m1::E4m3 { .. }), _) => (0..n).map(|_| self.random.u8(..32)).collect(),
                    _ => (0..n).map(|_| self.random.u8(112..122)).collect(),
                };
                [bytes, scales, vec![]]
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
