//! How weights lie in bytes and in what precision activations meet them: the types that every kernel and its callers share. Uses nothing of the crate.

use std::ops::Deref;

/// An element type of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    F32,
    F16,
    Bf16,
}

impl Float {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::Bf16 => 2,
        }
    }

    /// Element `i` of little-endian `bytes`.
    pub fn read(self, bytes: &[u8], i: usize) -> f32 {
        let b = &bytes[i * self.size()..][..self.size()];
        match self {
            Float::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Float::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f32(),
            Float::Bf16 => half::bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        }
    }

    /// Rounds `v` to this type, ties to even, and writes its little-endian bytes.
    #[inline(always)]
    pub fn write(self, v: f32, bytes: &mut [u8]) {
        match self {
            Float::F32 => bytes.copy_from_slice(&v.to_le_bytes()),
            Float::F16 => bytes.copy_from_slice(&half::f16::from_f32(v).to_le_bytes()),
            Float::Bf16 => bytes.copy_from_slice(&half::bf16::from_f32(v).to_le_bytes()),
        }
    }

    /// `v` as it will be read back from this type.
    #[inline(always)]
    pub(crate) fn round(self, v: f32) -> f32 {
        match self {
            Float::F32 => v,
            Float::F16 => half::f16::from_f32(v).to_f32(),
            // In arithmetic that the compiler finds vectors for. What overflows becomes infinite, as it should; a NaN may, too.
            Float::Bf16 => {
                let bits = v.to_bits();
                f32::from_bits((bits.wrapping_add(0x7fff + (bits >> 16 & 1))) & 0xffff_0000)
            }
        }
    }
}

/// How a matrix lies in its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// One element after the other.
    Float(Float),
    /// MLX's affine groups: `w = q * s + b`, `bits` per q in one little-endian bit stream per row, one s and one b per `group` columns.
    Affine { bits: u8, group: u16, scale: Float },
}

/// The precision of activations, chosen once at start; part of the numerics version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activations {
    F32,
    Bf16,
    Int8,
}

/// What a matrix consumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationFormat {
    F32,
    Bf16,
    Int8,
}

impl WeightFormat {
    /// The encoding of activations that a matrix of this form consumes in `mode` (the table in `docs/numerics.md`).
    pub fn activation_format(self, mode: Activations) -> ActivationFormat {
        match (self, mode) {
            (_, Activations::F32) | (WeightFormat::Float(Float::F32 | Float::F16), _) => ActivationFormat::F32,
            (WeightFormat::Float(Float::Bf16), _) | (_, Activations::Bf16) => ActivationFormat::Bf16,
            (WeightFormat::Affine { .. }, Activations::Int8) => ActivationFormat::Int8,
        }
    }

    /// The arrays that a matrix of `cols` columns lies in, in the order that they have everywhere. This is the one place that knows them.
    ///
    /// # Errors
    /// Where there is no such form, or its groups do not divide the columns.
    pub fn planes(self, cols: usize) -> Result<Planes, MatrixError> {
        let too_big = MatrixError::TooBig { rows: 1, cols };
        let mut parts =
            Planes { all: [Plane { name: "weight", element: Element::Packed, row_bytes: 0 }; MAX_PLANES], len: 0 };
        match self {
            WeightFormat::Float(float) => {
                parts.add("weight", Element::Float(float), cols.checked_mul(float.size()).ok_or(too_big)?)
            }
            WeightFormat::Affine { bits, group, scale } => {
                if !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) {
                    return Err(MatrixError::Bits(bits));
                }
                if !matches!(group, 32 | 64 | 128) {
                    return Err(MatrixError::Group(group));
                }
                if !cols.is_multiple_of(group as usize) {
                    return Err(MatrixError::Columns { cols, group });
                }
                // Columns are a multiple of 32, so the bits are whole words.
                let packed = (cols / 8).checked_mul(bits as usize).ok_or(too_big)?;
                let scales = (cols / group as usize).checked_mul(scale.size()).ok_or(too_big)?;
                parts.add("weight", Element::Packed, packed);
                parts.add("scales", Element::Float(scale), scales);
                parts.add("biases", Element::Float(scale), scales);
            }
        }
        Ok(parts)
    }
}

/// What an array of a matrix consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    Float(Float),
    /// Words of 32 bits that are one little-endian bit stream per row.
    Packed,
}

impl Element {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Element::Float(float) => float.size(),
            Element::Packed => 4,
        }
    }
}

/// One of the arrays that a matrix lies in, row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// As checkpoints name it, behind the module's own name.
    pub name: &'static str,
    pub element: Element,
    /// Bytes of it that belong to one row of the matrix.
    pub row_bytes: usize,
}

/// The most arrays that a form has.
pub const MAX_PLANES: usize = 3;

/// The arrays of a form: a slice of [`Part`].
#[derive(Clone, Copy, Debug)]
pub struct Planes {
    all: [Plane; MAX_PLANES],
    len: usize,
}

impl Planes {
    fn add(&mut self, name: &'static str, element: Element, row_bytes: usize) {
        self.all[self.len] = Plane { name, element, row_bytes };
        self.len += 1;
    }

    /// Bytes of a row of the matrix in all of them.
    pub fn row_bytes(&self) -> usize {
        self.iter().map(|part| part.row_bytes).sum()
    }
}

impl Deref for Planes {
    type Target = [Plane];
    fn deref(&self) -> &[Plane] {
        &self.all[..self.len]
    }
}

/// Why bytes are not a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatrixError {
    #[error("{0} bits per weight: expected 2, 3, 4, 5, 6 or 8")]
    Bits(u8),
    #[error("quantisation groups of {0}: expected 32, 64 or 128")]
    Group(u16),
    #[error("{cols} columns do not divide into groups of {group}")]
    Columns { cols: usize, group: u16 },
    #[error("{rows} x {cols} elements do not fit in memory")]
    TooBig { rows: usize, cols: usize },
    #[error("{got} arrays, where its form has {wanted}")]
    Parts { got: usize, wanted: usize },
    #[error("{part} has {got} bytes, the shape needs {wanted}")]
    Length { part: &'static str, got: usize, wanted: usize },
}
