//! How weights lie in bytes and in what precision activations meet them: the types that every kernel and its callers share. Uses nothing of the crate.

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
pub enum Form {
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
pub enum Encoding {
    F32,
    Bf16,
    Int8,
}

impl Form {
    /// The encoding of activations that a matrix of this form consumes in `mode` (the table in `docs/numerics.md`).
    pub fn encoding(self, mode: Activations) -> Encoding {
        match (self, mode) {
            (_, Activations::F32) | (Form::Float(Float::F32 | Float::F16), _) => Encoding::F32,
            (Form::Float(Float::Bf16), _) | (_, Activations::Bf16) => Encoding::Bf16,
            (Form::Affine { .. }, Activations::Int8) => Encoding::Int8,
        }
    }

    /// Bytes of a row of `cols` elements, without scales and biases; `None` where the number does not fit.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        match self {
            Form::Float(float) => cols.checked_mul(float.size()),
            // Columns are a multiple of 32, so the bits are whole bytes.
            Form::Affine { bits, .. } => (cols / 8).checked_mul(bits as usize),
        }
    }
}
