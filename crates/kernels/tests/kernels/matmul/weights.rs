//! Random matrices of every format.

use fastrand::Rng;
use proptest::prelude::*;
use sluice_kernels::format::{Activations, BlockFormat, E2m1, Float, Fp8, Fp8Scale, WeightFormat};
use sluice_kernels::matrix::Matrix;

use crate::guarded::Guarded;

/// In [-1, 1).
pub fn unit(rng: &mut Rng) -> f32 {
    2.0 * rng.f32() - 1.0
}

pub struct Weights {
    pub format: WeightFormat,
    pub rows: usize,
    pub cols: usize,
    pub planes: Vec<Guarded>,
}

impl Weights {
    pub fn random(format: WeightFormat, rows: usize, cols: usize, rng: &mut Rng) -> Weights {
        let floats = |float: Float, n: usize, size: f32, rng: &mut Rng| -> Vec<u8> {
            (0..n)
                .flat_map(|_| {
                    let x = unit(rng) * size;
                    match float {
                        Float::F32 => x.to_le_bytes().to_vec(),
                        Float::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
                        Float::Bf16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
                    }
                })
                .collect()
        };
        let planes = match format {
            WeightFormat::Float(float) => vec![floats(float, rows * cols, 1.0, rng)],
            WeightFormat::Affine { bits, group, scale } => {
                let groups = rows * cols / group as usize;
                let data = (0..rows * cols / 8 * bits as usize).map(|_| rng.u64(..) as u8).collect();
                vec![data, floats(scale, groups, 0.1, rng), floats(scale, groups, 1.0, rng)]
            }
            WeightFormat::Blocks(blocks) => {
                let mut data = vec![0; rows * cols / blocks.block_columns() * blocks.block_bytes()];
                rng.fill(&mut data);
                for block in data.chunks_exact_mut(blocks.block_bytes()) {
                    blocks.set_size(block, rng.f32());
                }
                vec![data]
            }
            WeightFormat::E2m1(e2m1) => {
                let mut data = vec![0; rows * cols / 2];
                rng.fill(&mut data);
                // Powers of two from 2^-7 to 1; e4m3 numbers below 2.
                let scale = |rng: &mut Rng| match e2m1 {
                    E2m1::Power => rng.u8(118..126),
                    E2m1::E4m3 { .. } => rng.u8(..64),
                };
                vec![data, (0..rows * cols / group_of(format)).map(|_| scale(rng)).collect()]
            }
            WeightFormat::Fp8(fp8) => {
                let scales = format.planes(cols).unwrap()[1].row_bytes;
                // Below 2, of either sign.
                let data = (0..rows * cols).map(|_| rng.u8(..) & 0xbf).collect();
                let scales = match fp8.scale {
                    Fp8Scale::Float(float) => floats(float, rows * scales / float.size(), 0.5, rng),
                    Fp8Scale::Power => (0..rows * scales).map(|_| rng.u8(118..127)).collect(),
                };
                vec![data, scales]
            }
        };
        let planes = planes.iter().map(|bytes| Guarded::new(bytes)).collect();
        Weights { format, rows, cols, planes }
    }

    pub fn matrix(&self) -> Matrix<'_> {
        Matrix::new(self.format, self.rows, self.cols, self.planes.iter().map(Guarded::bytes)).unwrap()
    }

    /// Row `r` of a plane; nothing of a plane that the format lacks.
    pub fn row(&self, plane: usize, r: usize) -> &[u8] {
        let row_bytes = self.format.planes(self.cols).unwrap().get(plane).map_or(0, |plane| plane.row_bytes);
        self.planes.get(plane).map_or(&[], |plane| &plane.bytes()[r * row_bytes..][..row_bytes])
    }
}

/// Columns of a group, for formats that have such; what divides the columns of others.
pub fn group_of(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Float(_) | WeightFormat::Fp8(_) => 32,
        WeightFormat::Affine { group, .. } => group as usize,
        WeightFormat::Blocks(blocks) => blocks.group(),
        WeightFormat::E2m1(E2m1::Power) => 32,
        WeightFormat::E2m1(E2m1::E4m3 { .. }) => 16,
    }
}

/// MXFP4, NVFP4 with either kind of global scale, and FP8 with each kind of scale.
pub fn small_floats() -> Vec<WeightFormat> {
    let nvfp4 = |global: f32, divides| WeightFormat::E2m1(E2m1::E4m3 { global: global.to_bits(), divides });
    let fp8 = |group, scale| WeightFormat::Fp8(Fp8 { group, scale });
    vec![
        WeightFormat::E2m1(E2m1::Power),
        nvfp4(0.013, false),
        nvfp4(77.3, true),
        fp8(128, Fp8Scale::Float(Float::F32)),
        fp8(128, Fp8Scale::Float(Float::Bf16)),
        fp8(0, Fp8Scale::Float(Float::F32)),
        fp8(128, Fp8Scale::Power),
        fp8(32, Fp8Scale::Power),
    ]
}

pub fn float() -> impl Strategy<Value = Float> {
    prop::sample::select(vec![Float::F32, Float::F16, Float::Bf16])
}

pub fn format() -> impl Strategy<Value = WeightFormat> {
    let affine = (prop::sample::select(vec![2u8, 3, 4, 5, 6, 8]), prop::sample::select(vec![32u16, 64, 128]), float());
    prop_oneof![
        1 => float().prop_map(WeightFormat::Float),
        3 => affine.prop_map(|(bits, group, scale)| WeightFormat::Affine { bits, group, scale }),
        6 => prop::sample::select(&BlockFormat::ALL[..]).prop_map(WeightFormat::Blocks),
        3 => prop::sample::select(small_floats()),
    ]
}

pub fn mode() -> impl Strategy<Value = Activations> {
    prop::sample::select(vec![Activations::F32, Activations::Bf16, Activations::Int8, Activations::Int11])
}

/// Columns of a format: any number for floats, whole groups for the others.
pub fn columns(format: WeightFormat, rng: &mut Rng) -> usize {
    match format {
        WeightFormat::Float(_) => 1 + rng.usize(..300),
        WeightFormat::Blocks(blocks) => blocks.block_columns() * (1 + rng.usize(..(1300 / blocks.block_columns()))),
        _ => {
            let unit = group_of(format).max(32);
            unit * (1 + rng.usize(..1300 / unit))
        }
    }
}
