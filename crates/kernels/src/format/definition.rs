//! What a weight format is, to kernels.

use super::float::Float;
use super::packing::PackingName;
use super::planes::{MatrixError, Planes};

/// The precision of activations. Chosen once at start, and a part of the numerics version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activations {
    /// As they are computed.
    F32,
    /// Rounded to bf16.
    Bf16,
    /// Quantised to integers in groups of 32 columns, where weights are integers in groups too.
    Int8,
    /// Rounded to integers of 11 significant bits under an exponent for 64 columns, where weights are integers in groups.
    Int11,
}

/// The encoding of activations that a matrix takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationFormat {
    /// f32.
    F32,
    /// bf16.
    Bf16,
    /// Signed bytes in groups of 32 columns.
    Int8,
    /// Integers of 11 significant bits under an exponent for 64 columns.
    Int11,
}

/// The properties of a format, written down once, in its own file.
pub(crate) trait Format {
    /// The planes of a matrix with `cols` columns, in the order that they have everywhere.
    fn planes(&self, cols: usize) -> Result<Planes, MatrixError>;
    /// How groups of columns are packed; `None` for formats without groups.
    fn grouped(&self) -> Option<Grouped>;
    /// The encoding of activations that a matrix takes in `mode` (the table in `docs/numerics.md`). Unless a format says otherwise, it has products of integers
    /// where it has groups.
    fn activation_format(&self, mode: Activations) -> ActivationFormat {
        match mode {
            Activations::Int11 if self.grouped().is_some() => ActivationFormat::Int11,
            // Activations as they are are no less precise than integers of 11 bits.
            Activations::F32 | Activations::Int11 => ActivationFormat::F32,
            Activations::Int8 if self.grouped().is_some() => ActivationFormat::Int8,
            Activations::Int8 | Activations::Bf16 => ActivationFormat::Bf16,
        }
    }
}

/// A format in groups: unsigned integers q, and for each `group` columns a scale s and a bias b, so that `w = fma(q, s, b)`. For blocks it says what they are unpacked to.
///
/// Plane 0 holds integers as `packing` says, plane 1 scales, plane 2 biases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grouped {
    /// How integers are packed.
    pub packing: PackingName,
    /// Columns of a group: 16, 32, 64 or 128.
    pub group: usize,
    /// The type of scales and biases.
    pub scale: Float,
}

impl Grouped {
    /// Parts of a weight group, each in one activation group: 1, 2 or 4.
    pub fn parts(self) -> usize {
        self.group.div_ceil(crate::input::GROUP)
    }

    /// Columns of a part: a whole activation group, or half of it.
    pub fn part_columns(self) -> usize {
        self.group.min(crate::input::GROUP)
    }

    /// The scale and the bias of group `g`, from a row's planes of scales and biases.
    #[inline(always)]
    pub fn scale_and_bias(self, scales: &[u8], biases: &[u8], g: usize) -> (f32, f32) {
        (self.scale.read(scales, g), self.scale.read(biases, g))
    }
}
