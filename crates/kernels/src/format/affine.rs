//! MLX's affine groups: `w = q * s + b`, one s and one b for each group of columns.

use super::definition::{Format, Grouped};
use super::float::Float;
use super::packing::PackingName;
use super::planes::{Element, MatrixError, Planes};

/// The parameters of [`WeightFormat::Affine`](super::WeightFormat::Affine).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Affine {
    /// Bits of each q: 2, 3, 4, 5, 6 or 8.
    pub bits: u8,
    /// Columns of a group: 32, 64 or 128.
    pub group: u16,
    /// The type of s and b.
    pub scale: Float,
}

impl Format for Affine {
    fn planes(&self, cols: usize) -> Result<Planes, MatrixError> {
        let Affine { bits, group, scale } = *self;
        if !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) {
            return Err(MatrixError::Bits(bits));
        }
        if !matches!(group, 32 | 64 | 128) {
            return Err(MatrixError::Group(group));
        }
        if !cols.is_multiple_of(group as usize) {
            return Err(MatrixError::Columns { cols, group });
        }
        let too_big = MatrixError::TooBig { rows: 1, cols };
        // Columns are a multiple of 32, so the bits are whole words.
        let packed = (cols / 8).checked_mul(bits as usize).ok_or(too_big)?;
        let scales = (cols / group as usize).checked_mul(scale.size()).ok_or(too_big)?;
        let mut planes = Planes::default();
        planes.add("weight", Element::Packed, packed);
        planes.add("scales", Element::Float(scale), scales);
        planes.add("biases", Element::Float(scale), scales);
        Ok(planes)
    }

    fn grouped(&self) -> Option<Grouped> {
        let packing = match self.bits {
            2 => PackingName::U2,
            3 => PackingName::U3,
            4 => PackingName::U4,
            5 => PackingName::U5,
            6 => PackingName::U6,
            _ => PackingName::U8,
        };
        Some(Grouped { packing, group: self.group as usize, scale: self.scale })
    }
}
