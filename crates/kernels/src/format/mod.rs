//! Weight formats: which planes a matrix consists of, and what its kernels need to know of them. The types that every kernel and its callers share.
//!
//! One file is one family of formats. It says once which planes a matrix has and, where columns share scales ([`Grouped`]), how their integers are packed.
//! Kernels are compiled for each packing of the list in `packing.rs`, never for a format by name. To add a format:
//!
//! 1. write its file: a type that implements [`Format`];
//! 2. add it to [`WeightFormat`] and to the list of [`WeightFormat::with`];
//! 3. if none of the packings fits, add one to the list of `packing.rs`.

mod affine;
pub(crate) mod blocks;
mod definition;
mod dense;
mod e2m1;
mod float;
mod fp8;
pub(crate) mod packing;
mod planes;

pub use affine::Affine;
pub use blocks::BlockFormat;
use definition::Format;
pub(crate) use definition::Grouped;
pub use definition::{ActivationFormat, Activations};
pub use e2m1::E2m1;
pub use float::Float;
pub use fp8::{Fp8, Fp8Scale};
pub use planes::{Element, MAX_PLANES, MatrixError, Plane, Planes};

/// How the bytes of a matrix encode its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// One element after the other.
    Float(Float),
    /// MLX's affine groups: `w = q * s + b`, with one s and one b for each `group` columns.
    Affine {
        /// Bits of each q: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Columns of a group: 32, 64 or 128.
        group: u16,
        /// The type of s and b.
        scale: Float,
    },
    /// A quantised type of GGUF, in the blocks of the file.
    Blocks(BlockFormat),
    /// MXFP4 and NVFP4 as safetensors have them.
    E2m1(E2m1),
    /// FP8 with scales.
    Fp8(Fp8),
}

impl WeightFormat {
    /// The list of formats.
    #[inline(always)]
    fn with<R>(self, use_it: impl FnOnce(&dyn Format) -> R) -> R {
        match self {
            WeightFormat::Float(float) => use_it(&float),
            WeightFormat::Affine { bits, group, scale } => use_it(&Affine { bits, group, scale }),
            WeightFormat::Blocks(blocks) => use_it(&blocks),
            WeightFormat::E2m1(e2m1) => use_it(&e2m1),
            WeightFormat::Fp8(fp8) => use_it(&fp8),
        }
    }

    /// The encoding of activations that a matrix of this format takes in `mode` (the table in `docs/numerics.md`).
    pub fn activation_format(self, mode: Activations) -> ActivationFormat {
        self.with(|format| format.activation_format(mode))
    }

    /// The planes of a matrix with `cols` columns, in the order that they have everywhere.
    ///
    /// # Errors
    /// Where there is no such format, or its groups do not divide the columns.
    pub fn planes(self, cols: usize) -> Result<Planes, MatrixError> {
        self.with(|format| format.planes(cols))
    }

    /// Whether kernels unpack a tile of the matrix before they multiply; [`WeightFormat::grouped`] is the form that they unpack to.
    pub(crate) const fn is_unpacked(self) -> bool {
        matches!(self, WeightFormat::Blocks(_) | WeightFormat::E2m1(_))
    }

    /// Bits of unpacked integers; 8 for formats without groups.
    pub(crate) fn bits(self) -> usize {
        match self {
            WeightFormat::Blocks(blocks) => blocks.bits().into(),
            WeightFormat::E2m1(_) => 5,
            _ => self.grouped().map_or(8, |grouped| grouped.packing.bits()),
        }
    }

    /// Whether unpacked integers have seven bits at most.
    pub(crate) fn is_narrow(self) -> bool {
        self.bits() < 8
    }

    /// The unpacked integer that stands for 0, and whether biases are the matrix's own. Otherwise weights are `(q - zero) * s`.
    pub(crate) const fn zero(self) -> (f32, bool) {
        match self {
            WeightFormat::Blocks(blocks) => blocks.zero(),
            WeightFormat::E2m1(_) => (12.0, false),
            _ => (0.0, true),
        }
    }

    /// How groups of columns are packed; `None` for formats without groups.
    pub(crate) fn grouped(self) -> Option<Grouped> {
        self.with(|format| format.grouped())
    }
}
