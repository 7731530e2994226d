//! Weight formats as kernels see them, from the list that both sides share (`kernels/format/list.cuh`).

use sluice_backend::{Activations, Float, WeightFormat};

use super::rows::RowLayout;

/// Which encodings of the activations some matrices need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    pub f32: bool,
    pub bf16: bool,
    pub int8: bool,
    pub int11: bool,
}

impl Needs {
    const NONE: Needs = Needs { f32: false, bf16: false, int8: false, int11: false };
    pub const F32: Needs = Needs { f32: true, ..Needs::NONE };
    pub const BF16: Needs = Needs { bf16: true, ..Needs::NONE };
    pub const INT8: Needs = Needs { int8: true, ..Needs::NONE };
    pub const INT11: Needs = Needs { int11: true, ..Needs::NONE };

    pub fn and(self, other: Needs) -> Needs {
        Needs {
            f32: self.f32 || other.f32,
            bf16: self.bf16 || other.bf16,
            int8: self.int8 || other.int8,
            int11: self.int11 || other.int11,
        }
    }
}

macro_rules! formats {
    ($($variant:ident $name:literal $bits:literal,)*) => {
        /// How weights are stored, with the arithmetic that multiplies with them: `Matrix::kind` of `kernels/format/list.cuh`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum KernelFormat {
            $($variant,)*
        }

        impl KernelFormat {
            pub const ALL: &[KernelFormat] = &[$(KernelFormat::$variant,)*];

            /// What kernels of this format have in their names.
            pub const fn name(self) -> &'static str {
                match self {
                    $(KernelFormat::$variant => $name,)*
                }
            }

            /// Bits of a weight, where weights and activations are integers.
            pub const fn bits(self) -> Option<usize> {
                match self {
                    $(KernelFormat::$variant => if $bits == 0 { None } else { Some($bits) },)*
                }
            }
        }
    };
}

macro_rules! format_lists {
    (F32 $($variant:ident)*) => { pub const F32_FORMATS: &[KernelFormat] = &[$(KernelFormat::$variant,)*]; };
    (BF16 $($variant:ident)*) => { pub const BF16_FORMATS: &[KernelFormat] = &[$(KernelFormat::$variant,)*]; };
    (INT8 $($variant:ident)*) => { pub const INT8_FORMATS: &[KernelFormat] = &[$(KernelFormat::$variant,)*]; };
    (INT11 $($variant:ident)*) => { pub const INT11_FORMATS: &[KernelFormat] = &[$(KernelFormat::$variant,)*]; };
    (INT11_FLOAT $($variant:ident)*) => { pub const INT11_FLOAT_FORMATS: &[KernelFormat] = &[$(KernelFormat::$variant,)*]; };
    (INT11_TENSOR $($variant:ident)*) => { pub const INT11_TENSOR_FORMATS: &[KernelFormat] = &[$(KernelFormat::$variant,)*]; };
    (INT11_BLOCK $($variant:ident)*) => { pub const INT11_BLOCK_FORMATS: &[KernelFormat] = &[$(KernelFormat::$variant,)*]; };
    (BLOCK $($variant:ident)*) => { pub const BLOCK_FORMATS: &[KernelFormat] = &[$(KernelFormat::$variant,)*]; };
    (BYTE $($variant:ident)*) => { pub const BYTE_FORMATS: &[KernelFormat] = &[$(KernelFormat::$variant,)*]; };
}

include!(concat!(env!("OUT_DIR"), "/formats.rs"));

impl KernelFormat {
    /// The format that multiplies with such weights where activations are computed so.
    ///
    /// # Panics
    /// Where no kernel has integers of as many bits.
    pub fn of(form: WeightFormat, mode: Activations) -> KernelFormat {
        match (form, mode) {
            (WeightFormat::Float(Float::F32), _) => KernelFormat::F32F32,
            (WeightFormat::Float(Float::F16), Activations::Int11) => KernelFormat::F16Int11,
            (WeightFormat::Float(Float::Bf16), Activations::Int11) => KernelFormat::Bf16Int11,
            (WeightFormat::Float(Float::F16), _) => KernelFormat::F16F32,
            (WeightFormat::Float(Float::Bf16), Activations::F32) => KernelFormat::Bf16F32,
            (WeightFormat::Float(Float::Bf16), _) => KernelFormat::Bf16Bf16,
            (WeightFormat::Fp8(_), Activations::F32 | Activations::Int11) => KernelFormat::Fp8F32,
            (WeightFormat::Fp8(_), Activations::Bf16 | Activations::Int8) => KernelFormat::Fp8Bf16,
            (WeightFormat::Blocks(_) | WeightFormat::E2m1(_), Activations::F32) => KernelFormat::BlocksF32,
            (WeightFormat::Blocks(_) | WeightFormat::E2m1(_), Activations::Bf16) => KernelFormat::BlocksBf16,
            (WeightFormat::Blocks(_) | WeightFormat::E2m1(_), Activations::Int8 | Activations::Int11) => {
                let of_int8 = KernelFormat::of_blocks(RowLayout::of(form).expect("it has blocks"));
                // Both lists have the same order.
                let at = BLOCK_FORMATS.iter().position(|format| *format == of_int8).expect("it is one of them");
                if mode == Activations::Int8 { of_int8 } else { INT11_BLOCK_FORMATS[at] }
            }
            (WeightFormat::Affine { .. }, Activations::F32) => KernelFormat::AffineF32,
            (WeightFormat::Affine { .. }, Activations::Bf16) => KernelFormat::AffineBf16,
            (WeightFormat::Affine { bits, .. }, Activations::Int8 | Activations::Int11) => {
                let formats = if mode == Activations::Int8 { INT8_FORMATS } else { INT11_FORMATS };
                let wanted = |format: &&KernelFormat| format.bits() == Some(usize::from(bits));
                *formats.iter().find(wanted).expect("integers of these bits have kernels")
            }
        }
    }

    /// The format that multiplies with such rows as integers.
    fn of_blocks(layout: RowLayout) -> KernelFormat {
        match (layout.bits, layout.group, layout.is_looked_up()) {
            (2, ..) => KernelFormat::B2Int8,
            (3, 16, true) => KernelFormat::H3Int8,
            (3, _, true) => KernelFormat::V3Int8,
            (3, ..) => KernelFormat::B3Int8,
            (4, 16, _) => KernelFormat::H4Int8,
            (4, _, true) => KernelFormat::V4Int8,
            (4, ..) => KernelFormat::B4Int8,
            (5, ..) => KernelFormat::B5Int8,
            (6, ..) => KernelFormat::B6Int8,
            _ => KernelFormat::B8Int8,
        }
    }

    /// The format of a matrix that a kernel is given.
    ///
    /// # Panics
    /// Where there is no such format.
    pub fn from_number(kind: u32) -> KernelFormat {
        KernelFormat::ALL[kind as usize]
    }

    /// The encoding of activations that its kernels take.
    pub fn needs(self) -> Needs {
        match () {
            () if F32_FORMATS.contains(&self) => Needs::F32,
            () if BF16_FORMATS.contains(&self) => Needs::BF16,
            () if INT11_FORMATS.contains(&self) || INT11_BLOCK_FORMATS.contains(&self) => Needs::INT11,
            () if INT11_FLOAT_FORMATS.contains(&self) => Needs::INT11,
            () => Needs::INT8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_have_the_numbers_of_the_kernels_list() {
        for (i, format) in KernelFormat::ALL.iter().enumerate() {
            assert_eq!(*format as usize, i);
            assert_eq!(KernelFormat::from_number(i as u32), *format);
        }
        let int8 = [INT8_FORMATS, INT11_FORMATS, BLOCK_FORMATS].concat();
        let lists = [F32_FORMATS, BF16_FORMATS, &int8, INT11_BLOCK_FORMATS, INT11_FLOAT_FORMATS].concat();
        assert_eq!(lists, KernelFormat::ALL);
        let bits = |formats: &[KernelFormat]| formats.iter().map(|f| f.name()[..2].to_owned()).collect::<Vec<_>>();
        assert_eq!(bits(BLOCK_FORMATS), bits(INT11_BLOCK_FORMATS));
        assert!(BYTE_FORMATS.iter().all(|format| INT8_FORMATS.contains(format)));
        assert!(INT11_TENSOR_FORMATS.iter().all(|format| INT11_FORMATS.contains(format)));
    }
}
