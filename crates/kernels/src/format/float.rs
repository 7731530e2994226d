//! Element types of checkpoints.

/// An element type of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The high half of an f32.
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
    #[inline]
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
            // In arithmetic that the compiler vectorises. Overflow gives infinity, as it should; a NaN may become infinite too.
            Float::Bf16 => {
                let bits = v.to_bits();
                f32::from_bits((bits.wrapping_add(0x7fff + (bits >> 16 & 1))) & 0xffff_0000)
            }
        }
    }
}
