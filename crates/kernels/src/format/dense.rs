//! Floats without scales, one element after the other.

use super::definition::{ActivationFormat, Activations, Format, Grouped};
use super::float::Float;
use super::planes::{Element, MatrixError, Planes};

impl Format for Float {
    fn planes(&self, cols: usize) -> Result<Planes, MatrixError> {
        let row_bytes = cols.checked_mul(self.size()).ok_or(MatrixError::TooBig { rows: 1, cols })?;
        let mut planes = Planes::default();
        planes.add("weight", Element::Float(*self), row_bytes);
        Ok(planes)
    }

    fn grouped(&self) -> Option<Grouped> {
        None
    }

    fn activation_format(&self, mode: Activations) -> ActivationFormat {
        match (self, mode) {
            (Float::F16 | Float::Bf16, Activations::Int11) => ActivationFormat::Int11,
            (Float::F32 | Float::F16, _) | (_, Activations::F32) => ActivationFormat::F32,
            (Float::Bf16, _) => ActivationFormat::Bf16,
        }
    }
}
