//! Numbers of four bits (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives) beside their scales, as safetensors have them: MXFP4 and NVFP4.
//!
//! Column 2i is the low half of byte i, column 2i + 1 the high half. Doubled, the numbers are integers: kernels take `q = 2 * e2m1 + 12` and half of the scale.

#[cfg(test)]
use super::blocks::unpack::E2M1;
use super::blocks::unpack::half_of_power;
use super::definition::{Format, Grouped};
use super::float::Float;
use super::packing::PackingName;
use super::planes::{Element, MatrixError, Planes};

/// What the scales of e2m1 numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum E2m1 {
    /// MXFP4: `2^(byte - 127)` for each 32 columns; 255 is no number.
    Power,
    /// NVFP4: an e4m3 number for each 16 columns, times or divided by one f32 of the whole matrix.
    E4m3 {
        /// The bits of that f32.
        global: u32,
        /// Scales are divided by it (compressed-tensors) instead of multiplied (modelopt).
        divides: bool,
    },
}

impl E2m1 {
    /// Columns that share a scale.
    pub(crate) const fn group(self) -> usize {
        match self {
            E2m1::Power => 32,
            E2m1::E4m3 { .. } => 16,
        }
    }

    /// The scale of doubled numbers, from its byte.
    #[inline(always)]
    fn scale(self, byte: u8) -> f32 {
        match self {
            E2m1::Power if byte == 255 => f32::NAN,
            E2m1::Power => half_of_power(byte),
            E2m1::E4m3 { global, divides } => {
                let (scale, global) = (e4m3(byte), f32::from_bits(global));
                // Rounded once, then halved.
                0.5 * if divides { scale / global } else { scale * global }
            }
        }
    }

    /// Integers, scales and biases of some columns, from the bytes that they are in.
    #[inline(always)]
    pub(crate) fn unpack(self, packed: &[u8], scales: &[u8], q: &mut [u8], s: &mut [f32], b: &mut [f32]) {
        // Rows are whole groups of 32.
        for (q, packed) in q.as_chunks_mut::<32>().0.iter_mut().zip(packed.as_chunks::<16>().0) {
            let (even, odd) = (packed.map(|byte| doubled(byte & 15)), packed.map(|byte| doubled(byte >> 4)));
            for (two, (even, odd)) in q.as_chunks_mut::<2>().0.iter_mut().zip(even.into_iter().zip(odd)) {
                *two = [even, odd];
            }
        }
        for ((s, b), byte) in s.iter_mut().zip(b).zip(scales) {
            *s = self.scale(*byte);
            *b = -12.0 * *s;
        }
    }
}

/// [`E2M1`] of a code, by arithmetic that compilers have vectors for.
#[inline(always)]
fn doubled(code: u8) -> u8 {
    let place = code & 7;
    let size = place + u8::from(place > 4) + u8::from(place > 5) + 3 * u8::from(place > 6);
    // All bits of a negative number.
    let sign = 0u8.wrapping_sub(code >> 3);
    12u8.wrapping_add((size ^ sign).wrapping_sub(sign))
}

/// An e4m3 number: no infinities, and one NaN of each sign.
#[inline(always)]
pub(crate) fn e4m3(byte: u8) -> f32 {
    let (sign, size) = (u32::from(byte) << 24 & 0x8000_0000, u32::from(byte & 0x7f));
    // The exponent's bias is 120 less than that of f32. The product makes it so for denormals too.
    let value = f32::from_bits(size << 20) * f32::from_bits((127 + 120) << 23);
    f32::from_bits(sign | if size == 0x7f { 0x7fc0_0000 } else { value.to_bits() })
}

impl Format for E2m1 {
    fn planes(&self, cols: usize) -> Result<Planes, MatrixError> {
        // Activations have groups of 32.
        if !cols.is_multiple_of(32) {
            return Err(MatrixError::Columns { cols, group: 32 });
        }
        let mut planes = Planes::default();
        planes.add("weight", Element::Byte, cols / 2);
        planes.add("scales", Element::Byte, cols / self.group());
        Ok(planes)
    }

    fn grouped(&self) -> Option<Grouped> {
        Some(Grouped { packing: PackingName::U8, group: self.group(), scale: Float::F32 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubled_numbers_are_those_of_the_table() {
        assert_eq!(std::array::from_fn(|code| doubled(code as u8)), E2M1);
    }

    #[test]
    fn e4m3_is_what_its_bits_say() {
        for byte in 0..=255u8 {
            let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
            let size = match (exponent, byte & 7) {
                (15, 7) => f32::NAN,
                (0, _) => mantissa / 8.0 * 2f32.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
            };
            let wanted = if byte & 0x80 == 0 { size } else { -size };
            let got = e4m3(byte);
            assert!(got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan(), "{byte}: {got} not {wanted}");
        }
    }
}
