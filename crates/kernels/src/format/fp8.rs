//! Numbers of eight bits (e4m3) with a scale for some columns: `w = e4m3 * s`, rounded once. Kernels compute with these values as with floats.
//!
//! A scale plane has numbers for each row. Where a checkpoint has one for each 128 rows, or for the whole matrix, who loads it repeats them: 3 % of the weights' bytes at most.

use super::definition::{Format, Grouped};
use super::e2m1::e4m3;
use super::float::Float;
use super::planes::{Element, MatrixError, Planes};

/// The scales of e4m3 numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8 {
    /// Columns that share a scale; the last group of a row may be shorter. 0: the whole row.
    pub group: u16,
    /// The type of scales.
    pub scale: Fp8Scale,
}

/// A scale of e4m3 numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Scale {
    /// A float.
    Float(Float),
    /// `2^(byte - 127)`; 255 is no number.
    Power,
}

impl Fp8Scale {
    /// Bytes of one.
    const fn size(self) -> usize {
        match self {
            Fp8Scale::Float(float) => float.size(),
            Fp8Scale::Power => 1,
        }
    }

    /// Scale `i`.
    #[inline(always)]
    fn read(self, bytes: &[u8], i: usize) -> f32 {
        match self {
            Fp8Scale::Float(float) => float.read(bytes, i),
            Fp8Scale::Power => match u32::from(bytes[i]) {
                // 2^-127 is denormal.
                0 => f32::from_bits(0x0040_0000),
                255 => f32::NAN,
                exponent => f32::from_bits(exponent << 23),
            },
        }
    }
}

impl Fp8 {
    /// Columns that share a scale, of a matrix of `cols`.
    fn columns(self, cols: usize) -> usize {
        if self.group == 0 { cols.max(1) } else { usize::from(self.group) }
    }

    /// A row's values, from its bytes and scales.
    #[inline(always)]
    pub(crate) fn dequantize(self, row: &[u8], scales: &[u8], out: &mut [f32]) {
        let columns = self.columns(row.len());
        for (g, (row, out)) in row.chunks(columns).zip(out.chunks_mut(columns)).enumerate() {
            let scale = self.scale.read(scales, g);
            for (byte, out) in row.iter().zip(out) {
                *out = e4m3(*byte) * scale;
            }
        }
    }
}

impl Format for Fp8 {
    fn planes(&self, cols: usize) -> Result<Planes, MatrixError> {
        if !cols.is_multiple_of(32) {
            return Err(MatrixError::Columns { cols, group: 32 });
        }
        let element = match self.scale {
            Fp8Scale::Float(float) => Element::Float(float),
            Fp8Scale::Power => Element::Byte,
        };
        let scales = cols.div_ceil(self.columns(cols)).checked_mul(self.scale.size());
        let mut planes = Planes::default();
        planes.add("weight", Element::Byte, cols);
        planes.add("scales", element, scales.ok_or(MatrixError::TooBig { rows: 1, cols })?);
        Ok(planes)
    }

    fn grouped(&self) -> Option<Grouped> {
        None
    }
}
